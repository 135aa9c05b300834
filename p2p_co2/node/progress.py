"""What a peer concludes from heartbeats: where the swarm is, and whether this peer has arrived, or may go.

    joins    the others are heard, and this peer is abreast of them, or they have left it behind
    trains   only the swarm's position is of interest
    is done  all that are heard hold the same and say so (settled), or this peer stays for who differs

At the end each has offered the rest of its work in last rounds, for which all live peers gather longer. Then
a peer lingers as a donor while anybody that it hears has more to offer, holds anything else, or joins.

Laws: conclusions rest on heartbeats of live peers alone. The position is the lower median of those whose word
counts (``rounds.voters``): of three, one liar moves nothing. Nor is it further than the commits of this
peer's state bear out (``BORNE_OUT_ROUNDS``). All are plain values, replaced whole: other threads may read
them at any time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from p2p_co2.node.catchup import Agreement, CatchupController
from p2p_co2.node.state import PeerState
from p2p_co2.node.status import REFRESH_S, StatusWriter, Times, view_of
from p2p_co2.protocol.catchup import policy
from p2p_co2.protocol.membership import Membership, PeerInfo, positions
from p2p_co2.wire.heartbeat import HEARTBEAT_S
from p2p_co2.wire.messages_pb2 import Status

CONCLUDED_PEERS_PER_S = 200.0
"""After news it is concluded as many times a second, divided by the peers: at a run's end all stand still.
One that waits for others concludes every ``REFRESH_S``: among many there is always news."""
BORNE_OUT_SHARE = 1.25
"""Others are believed to be at so many times this peer's version at most: rounds pass without a commit."""
BORNE_OUT_ROUNDS = 8.0
"""And so many rounds further. What is beyond counts as the same moment of an earlier round."""
LISTENED_S = 12.0
"""A peer that came when the run was over takes the first that it hears for all only after this. So long a
peer that joins listens if the DHT lists others, who may only be slow to answer."""
LACKS = "the run is over, and this peer leaves without what others hold"
"""What such a peer says begins so."""


class Where(Enum):
    """Where a peer that joins is among those that it hears."""

    ALONE = auto()
    """It hears nobody."""
    BEHIND = auto()
    """Somebody is ahead, or it is fetching."""
    ABREAST = auto()
    """Nobody is ahead by more than a round, or at all of a fragment of which it has only the start."""
    LEFT_BEHIND = auto()
    """The others were ahead and went before it had what they had. It did not come for a history of its
    own."""
    NO_ROOM = auto()
    """As many have joined as a run can have."""


@dataclass(frozen=True)
class Joining:
    """What a peer that joins has concluded. ``has_met``: it has ever heard somebody that has joined;
    ``goes_on``: whether anybody trained when it heard such a peer last."""

    where: Where = Where.ALONE
    has_met: bool = False
    goes_on: bool = True


class SwarmPosition:
    """``value``: median position of the other peers that train, in rounds, and when that was true by the
    node's monotonic clock. None while it is not known."""

    def __init__(self, state: PeerState, membership: Membership, writer: StatusWriter, times: Times) -> None:
        self._state = state
        self._membership = membership
        self._writer = writer
        self._times = times
        self._at = -math.inf
        self.value: tuple[float, float] | None = None

    def look(self, now: float) -> None:
        """Work it out, at most once in a heartbeat; in between the clock carries it on."""
        quiet_s = self._membership.quiet_s if self._writer.rests else 0.0
        if now - self._at < max(HEARTBEAT_S, quiet_s / 2) and self.value is not None:
            return
        self._at = now
        times = self._times
        at = times.monotonic() - (times.now() - now)
        heard = self._membership.live
        near = positions(
            [heard[peer] for peer in list(heard) if self._state.counts(peer)], now, times.rounds_per_s
        )
        near = sorted(near + times.elsewhere(now))
        self.value = (self._borne_out(near[(len(near) - 1) // 2]), at) if near else None

    def _borne_out(self, position: float) -> float:
        most = max(self._writer.position(), BORNE_OUT_SHARE * max(self._state.held[0]) + BORNE_OUT_ROUNDS)
        if position <= most:
            return position
        self._at = -math.inf  # it may be soon, by the state that comes
        return max(0.0, math.floor(most) - 1 + position % 1.0)


class SwarmProgress:
    """``conclude`` is asked at ``conclude_at``. ``joining``: of while it joined. ``most_peers``: how many a
    run can have."""

    def __init__(
        self, state: PeerState, membership: Membership, agreement: Agreement, writer: StatusWriter,
        times: Times, fetches: CatchupController, most_peers: int,
    ) -> None:  # fmt: skip
        self._state = state
        self._membership = membership
        self._agreement = agreement
        self.writer = writer
        self._times = times
        self._fetches = fetches
        self._most_peers = most_peers
        self._began_at = times.now()
        self.joining = Joining()
        self._position = SwarmPosition(state, membership, writer, times)
        self._settled_of: object = None
        """The versions and digests of which all said that they are settled."""
        self._concluded_at = -math.inf
        self._differed_at = -math.inf
        """When somebody last was there for whom this peer stays; infinity while one is."""
        self._concluded_of: object = None
        self._furthest = list(state.held[0])
        """Per fragment, where the swarm was when somebody who is in it was heard last."""

    @property
    def swarm_position(self) -> tuple[float, float] | None:
        """As ``SwarmPosition.value``."""
        return self._position.value

    @property
    def settled(self) -> bool:
        """Whether no live peer trains any more, all hold what this peer holds now, and say the same of those
        that they hear. Other threads may ask."""
        return self._settled_of == self._state.held

    def is_needed(self, within_s: float, settled: bool = False) -> bool:
        """Whether somebody is heard, or was within so long, that this peer stays for. So it does for a state
        or a missed round on its way to it or from it. Where all have ``settled``: whether somebody still
        joins. Other threads may ask."""
        if settled:
            return self._differed_at == math.inf
        now = self._times.now()
        return now - self._differed_at <= within_s or self._fetches.moves(now, within_s)

    def missing(self) -> str:
        """In words, what others hold and this peer has not; empty if that is nothing. Other threads may
        ask."""
        late = [f"fragment {f}: version {mine} of {new}" for f, mine, new in self._agreement.lacking()]
        if not late:
            return ""
        named = ", ".join(late[:4]) + (", ..." if late[4:] else "")
        return f"{LACKS} ({named}), and waits for it no longer; on slow lines see `p2p-co2 plan`"

    def conclude_at(self) -> float:
        """When to ``conclude`` again; never while it would say the same. A peer that trains is in no
        hurry."""
        if self._state.local.phase == Status.TRAINING or self._seen() == self._concluded_of:
            return math.inf
        soon_s = len(self._membership.live) / CONCLUDED_PEERS_PER_S
        return self._concluded_at + (REFRESH_S if self._concluded_of is None else soon_s)

    def _seen(self) -> tuple[object, ...]:
        """What a conclusion rests on. An offer of ours that ends may be the last thing that happens."""
        state = self._state
        return self._membership.revision, state.held, state.local.finished, self._fetches.busy()

    def conclude(self, now: float) -> bool:
        """Compare this peer with the others; while it trains nobody asks for more than the position. Whether
        what this peer tells has changed by that: others wait to hear it."""
        self._position.look(now)
        state = self._state
        membership = self._membership
        self._agreement.note_newest()
        if state.local.phase == Status.TRAINING:
            self._settled_of = None
            self._concluded_of = None
            self.writer.is_at_rest = False
            return False
        seen = self._seen()
        if seen == self._concluded_of:
            return False
        self._concluded_of = seen
        self._concluded_at = now
        idle = not self._fetches.busy()
        live = membership.live.values()
        was_at_rest = self.writer.is_at_rest
        if state.local.phase == Status.JOINING:
            self.joining = self._look_for_the_swarm(idle)
        done = [info for info in live if info.status.phase not in (Status.JOINING, Status.PAUSED)]
        if waits := self._may_hear_more(now):
            self._concluded_of = None  # time alone ends that
        # A last offer may commit when all others seem to be done: who left before would miss it.
        is_done = state.local.phase == Status.DRAINING and idle and not state.works
        self.writer.is_at_rest = at_rest = is_done and not waits and all(map(self._is_with_us, done))
        is_settled = at_rest and all(info.status.settled for info in done)
        self._note_who_differs(live, now)
        self._settled_of = state.held if is_settled else None
        return at_rest != was_at_rest

    def _may_hear_more(self, now: float) -> bool:
        """Whether others may be out of sight: this peer came a moment ago, or most others went without a
        word and may only be suspended."""
        membership = self._membership
        hears_more = membership.awaited > 0 or not membership.candidates.has_looked
        is_new = hears_more and now - self._began_at < LISTENED_S
        return is_new or membership.departed.is_cut_off(len(membership.live), now)

    def _is_with_us(self, info: PeerInfo) -> bool:
        """Whether a peer has trained to the end, has offered all, and holds what this one does."""
        is_done = info.status.phase == Status.DRAINING and not view_of(info).training
        return is_done and (info.versions, info.digests) == self._state.held

    def _note_who_differs(self, live: Collection[PeerInfo], now: float) -> None:
        """Who has not come to the run's end may train on for long, and is not stayed for."""
        ended = (info for info in live if info.status.phase in (Status.JOINING, Status.DRAINING))
        if self._state.works or not all(map(self._is_with_us, ended)):
            self._differed_at = math.inf
        elif self._differed_at == math.inf:
            self._differed_at = now

    def _look_for_the_swarm(self, idle: bool) -> Joining:
        known = self.joining
        (versions, _) = self._state.held
        live = self._membership.live.values()
        inside = [info.versions for info in live if info.status.phase != Status.JOINING]
        if inside and 2 * len(inside) >= len(live):  # a few alone could hold up all who join
            middle = (len(inside) - 1) // 2
            of_fragments = zip(*(held for held in inside if len(held) == len(versions)), strict=True)
            self._furthest = [sorted(held, reverse=True)[min(middle, len(held) - 1)] for held in of_fragments]
        newest = [policy.reached(*self._agreement.at(fragment)) for fragment in range(len(versions))]
        trains = any(info.status.phase == Status.TRAINING for info in live)
        goes_on = trains if inside else known.goes_on
        is_behind = not _keeps_up(versions, self._furthest, goes_on)
        if len(inside) >= self._most_peers:
            where = Where.NO_ROOM
        elif is_behind and not inside:
            where = Where.LEFT_BEHIND
        elif not live:
            where = Where.ALONE
        else:
            is_abreast = idle and not is_behind and _keeps_up(versions, newest, goes_on)
            where = Where.ABREAST if is_abreast else Where.BEHIND
        return Joining(where, known.has_met or bool(inside), goes_on)


def _keeps_up(versions: Sequence[int], newest: Sequence[int], goes_on: bool) -> bool:
    """Whether no version is more than a round behind; or at all, where there is only the start or no round
    is to come."""
    slack = 1 if goes_on else 0
    return all(new - mine <= (slack if mine else 0) for mine, new in zip(versions, newest, strict=False))
