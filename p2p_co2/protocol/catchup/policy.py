"""Whether to replay, to load or to wait: decided from what the others' heartbeats say of one fragment.

    behind half of those that move             ``AHEAD``: their version, by replay if that is cheap
    contradicted by more than agree with us    ``OTHER``: their state, though ours is lost
    all have finished, and one made a round    ``LAST``: that round, by replay alone

One rule where two histories meet: most holders, then the higher version, then the larger digest. The loser
loads what the others hold and keeps its uncounted offer. A peer agrees with us that is at our version with
our digest, or at one of our past versions. Where all have finished only equal states agree.

Laws: one peer's word moves nobody where three or more train; a version that honest peers cannot have reached
moves nobody. Price: what one side of a split made alone is lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from p2p_co2.protocol.catchup.goals import split_donors
from p2p_co2.protocol.rounds.bounds import AHEAD_AT_MOST
from p2p_co2.wire.heartbeat import SLOWEST_HEARTBEAT_S
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.messages_pb2 import Status

NOTICE_AFTER_S = 3.0
"""What heartbeats say is waited for so long: the round's own messages usually bring it."""
MOVING = (Status.TRAINING, Status.DRAINING)


class HeldState(NamedTuple):
    """A version of a fragment and its digest."""

    version: int
    digest: bytes


class PeerReport(NamedTuple):
    """A live peer's last heartbeat, of one fragment. ``offers``: it trains and has more to offer for it."""

    held: HeldState
    phase: Status.Phase
    offers: bool


View = Mapping[PeerId, PeerReport]


class Mine(NamedTuple):
    """This peer. ``past``: digests of its own versions, with the one that it holds; ``is_done``: it offers
    nothing more for the fragment."""

    held: HeldState
    past: Mapping[int, bytes]
    phase: Status.Phase
    is_done: bool = False


class Why(Enum):
    AHEAD = 0
    OTHER = 1
    LAST = 2


@dataclass(frozen=True)
class Move:
    """Where to go, and how long that must have been so. ``digest``: empty if no majority says it."""

    why: Why
    version: int
    digest: bytes
    wait_s: float = NOTICE_AFTER_S


def decide(view: View, mine: Mine, replayable: bool) -> Move | None:
    """Where to go; None to wait. ``replayable``: whether a missed round may be tried; one that follows our
    state is no other history."""
    here = mine.held.version
    newest = reached(view, mine)
    last = last_round(view, mine) if replayable else 0
    other = _other_history(view, mine)
    if other is not None and not (last and other.version > here):
        return other
    if newest > here:
        return Move(Why.AHEAD, newest, digest_at(view, mine, newest) or b"")
    return Move(Why.LAST, last, digest_at(view, mine, last) or b"") if last else None


def reached(view: View, mine: Mine) -> int:
    """The highest version that at least half of those that move have reached, this peer included unless it
    joins. One that rests or joins tells where it was left; where there are no others, its word counts."""
    moving = [said.held.version for said in view.values() if said.phase in MOVING]
    versions = moving or [said.held.version for said in view.values()]
    if not versions or mine.phase != Status.JOINING:
        versions.append(mine.held.version)
    return sorted(versions, reverse=True)[(len(versions) - 1) // 2]


def limit(view: View, mine: Mine) -> int:
    """The newest version at which anybody honest can be."""
    return max(reached(view, mine) + AHEAD_AT_MOST, mine.held.version)


def last_round(view: View, mine: Mine) -> int:
    """The round after this peer's version, if somebody has it and nobody has more to offer for the fragment;
    else 0. Few as they may be that made it, all take it: it proves itself by its decision and digests."""
    following = mine.held.version + 1
    if not mine.is_done or any(said.offers for said in view.values()):
        return 0
    versions = [said.held.version for said in view.values() if said.phase in MOVING]
    return following if max(versions, default=0) >= following else 0


def digest_at(view: View, mine: Mine, version: int) -> bytes | None:
    """The digest that most peers at ``version`` report, this one and those that rest included. None without
    a majority of them."""
    votes = Counter(said.held.digest for said in view.values() if said.held.version == version)
    votes[mine.held.digest] += mine.held.version == version
    digest, count = votes.most_common(1)[0]
    return digest if 2 * count > votes.total() else None


def donors(view: View, fragment: int, version: int, digest: bytes) -> tuple[PeerId, ...]:
    """Peers that have it, or are further; not one that says that its state of ``version`` is another. One
    that rests, whose owner wants the machine or the line, only if no other has."""
    able = {
        peer: said.phase
        for peer, said in sorted(view.items())
        if said.held.version > version or (said.held.version == version and digest in (b"", said.held.digest))
    }
    awake = [peer for peer, phase in able.items() if phase != Status.PAUSED]
    return split_donors(awake or list(able), fragment)


def bears_out(view: View, mine: Mine, donor: PeerId, held: HeldState) -> bool | None:
    """What the others say of the state that ``donor`` promises. True if one of them has the same. False if
    most have another, or nobody honest can be that far. None if neither."""
    votes = Counter(
        said.held.digest for peer, said in view.items() if peer != donor and said.held.version == held.version
    )
    same = votes[held.digest]
    if held.version > limit(view, mine) or _outvoted(votes, held.digest, 1):
        return False
    return True if same else None


def is_contradicted(view: View, mine: Mine, givers: Collection[PeerId], held: HeldState) -> bool:
    """Whether most of all that say what a version was say something else than ``givers``, and we among
    them; one word against another is nothing."""
    votes = Counter(
        said.held.digest
        for peer, said in view.items()
        if peer not in givers and said.held.version == held.version
    )
    votes[mine.held.digest] += mine.held.version == held.version
    return _outvoted(votes, held.digest, len(givers))


def is_one_word(view: View, mine: Mine, version: int) -> bool:
    """Whether less than half have reached ``version``, and no two of them hold one state of it or later. What
    a few made while they were cut off is taken, or both sides would go on for good."""
    if version <= reached(view, mine):
        return False
    held = Counter(said.held for said in view.values() if said.held.version >= version)
    return max(held.values(), default=0) < 2


def _outvoted(votes: Counter[bytes], digest: bytes, count: int) -> bool:
    votes[digest] += count
    most, times = votes.most_common(1)[0]
    return most != digest and 2 * times > votes.total()


def _other_history(view: View, mine: Mine) -> Move | None:
    moving = [said for said in view.values() if said.phase in MOVING]
    is_over = mine.phase == Status.DRAINING and all(said.phase == Status.DRAINING for said in moving)
    here = mine.held
    most = limit(view, mine)
    against = Counter(
        said.held
        for said in moving
        if said.held != here
        and (is_over or mine.past.get(said.held.version, said.held.digest) != said.held.digest)
        and said.held.version <= (most if is_over else here.version)
    )
    if not against:
        return None
    best = max(against, key=lambda held: (against[held], held))
    if is_over:
        theirs = against[best]
        ours = 1 + sum(said.held == here for said in moving)
    else:
        theirs = against.total()
        ours = 1 + sum(said.held.version <= here.version and said.held not in against for said in moving)
    if (ours, here) >= (theirs, best):
        return None
    # Last rounds that are on their way come first.
    wait_s = NOTICE_AFTER_S + SLOWEST_HEARTBEAT_S * is_over
    return Move(Why.OTHER, *best, wait_s)
