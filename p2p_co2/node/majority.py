"""What most peers say of where the swarm is: versions, digests, and who has them.

Law: one peer's word alone moves nobody where three or more train. A peer that rests, or only joins, does not
say how far the swarm is; what a version *was* it may tell.

Price: votes are counted again when the membership, or this peer's own state, has changed; in between the last
answer stands.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import TYPE_CHECKING

from p2p_co2.node.last_words import LastWords
from p2p_co2.protocol.catchup import split_donors
from p2p_co2.protocol.rounds.bounds import AHEAD_AT_MOST
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.limits import MAX_PEERS
from p2p_co2.protocol.wire.messages_pb2 import Status

if TYPE_CHECKING:
    from p2p_co2.node.node import Node


class Majority:
    def __init__(self, node: Node) -> None:
        self._node = node
        self._swarm_versions: dict[int, tuple[object, int]] = {}
        self._digests: dict[int, tuple[object, bytes | None]] = {}
        """What ``swarm_version`` and ``digest`` said last, and of what."""
        self.last_words = LastWords()
        self._were_here: dict[PeerId, None] = {}
        """The last that went, in the order in which they did."""

    def swarm_version(self, fragment: int) -> int:
        """The highest version that at least half of the peers have reached, this one included unless it is
        joining: one peer's word alone moves nobody where three or more train."""
        mine, joining = self._node.agreed[fragment].version, self.is_joining()
        seen = (self._node.membership.revision, mine, joining)
        known = self._swarm_versions.get(fragment)
        if known is not None and known[0] == seen:
            return known[1]
        versions = self._votes(fragment)
        if not versions or not joining:
            versions.append(mine)
        versions.sort(reverse=True)
        version = versions[(len(versions) - 1) // 2]
        self._swarm_versions[fragment] = seen, version
        return version

    def last_version(self, fragment: int) -> int:
        """The round after this peer's version, if somebody has it and nobody has more to offer
        for the fragment; else 0. Whoever hears such a last round announced takes it, few as they may be who
        made it, so whoever did not hear it must as well: with less than half on one side all would wait for
        each other until their time is over. Only the round, which proves itself by its decision and digests,
        never a state."""
        node, local = self._node, self._node.progress.local
        is_done = local.phase == Status.DRAINING or fragment in local.finished
        if not is_done:
            return 0
        live = node.membership.live.values()
        if any(info.status.offers_for(fragment) for info in live):
            return 0
        following = node.agreed[fragment].version + 1
        done = [info for info in live if info.status.phase in (Status.TRAINING, Status.DRAINING)]
        reached = [info.versions[fragment] for info in done if fragment < len(info.versions)]
        return following if max(reached, default=0) >= following else 0

    def is_joining(self) -> bool:
        return self._node.progress.local.phase == Status.JOINING

    def may_decide(self, peer: PeerId, group: set[PeerId]) -> bool:
        """Whether ``peer`` may have decided for ``group``: whoever is asked coordinates, also one that only
        finishes or is behind, and is no member then. It may have left since."""
        is_here = peer == self._node.me or peer in self._node.membership.live
        return peer in group or is_here or peer in self._were_here

    def left(self, peer: PeerId) -> None:
        """``peer`` is live no more."""
        self._were_here.pop(peer, None)
        self._were_here[peer] = None
        if len(self._were_here) > MAX_PEERS:
            del self._were_here[next(iter(self._were_here))]

    def is_most(self, group: set[PeerId], fragment: int) -> bool:
        """Whether at least half of the peers that train now and have yet to offer for ``fragment``, as far as
        we hear them, are in ``group``, or as many as a group holds. Those of it that have finished since
        count, too: at the end of a run others still train who missed its last rounds."""
        if len(group) >= self._node.group_size:
            return True
        live = self._node.membership.live
        phases = {peer: info.status.phase for peer, info in live.items()}
        training = {peer for peer, info in live.items() if info.status.offers_for(fragment)}
        made_it = {peer for peer in group if phases.get(peer) in (Status.TRAINING, Status.DRAINING)}
        return 2 * len(made_it) >= len((training | made_it) - {self._node.me})

    def _votes(self, fragment: int) -> list[int]:
        """Where those are who move the state. A peer that rests, or only joins, tells where it was left: many
        of them would hold the others' newest state for impossible. Where there are no others, their word
        counts."""
        live, rests = self._node.membership.live.values(), (Status.JOINING, Status.PAUSED)
        moving = [
            info.versions[fragment]
            for info in live
            if info.status.phase not in rests and fragment < len(info.digests)
        ]
        return moving or [info.versions[fragment] for info in live if fragment < len(info.digests)]

    def digest(self, fragment: int, version: int) -> bytes | None:
        """The digest that most peers at ``version`` report, this one included, and those that rest: what a
        version was does not grow old. None without a majority of them."""
        agreed = self._node.agreed[fragment]
        seen = (self._node.membership.revision, agreed, version)
        known = self._digests.get(fragment)
        if known is None or known[0] != seen:
            known = self._digests[fragment] = seen, self._count(fragment, version)
        return known[1]

    def _count(self, fragment: int, version: int) -> bytes | None:
        votes = [
            info.digests[fragment]
            for info in self._node.membership.live.values()
            if fragment < len(info.digests) and info.versions[fragment] == version
        ]
        agreed = self._node.agreed[fragment]
        if agreed.version == version:
            votes.append(agreed.digest)
        if votes and 2 * votes.count(votes[0]) > len(votes):
            return votes[0]  # nearly always all are alike
        digest, count = Counter(votes).most_common(1)[0] if votes else (None, 0)
        return digest if 2 * count > len(votes) else None

    def is_too_far(self, fragment: int, version: int) -> bool:
        """Whether nobody who is honest can be at ``version``, going by most peers."""
        return version > self.limit(fragment)

    def limit(self, fragment: int) -> int:
        """The newest version at which anybody honest can be."""
        return max(self.swarm_version(fragment) + AHEAD_AT_MOST, self._node.agreed[fragment].version)

    def bears_out(self, donor: PeerId, fragment: int, version: int, digest: bytes) -> bool | None:
        """What the others say of the state that ``donor`` promises: True if one of them has the
        same, False if most have another or nobody honest can be that far, None if neither."""
        votes = Counter(
            info.digests[fragment]
            for peer, info in self._node.membership.live.items()
            if peer != donor and fragment < len(info.digests) and info.versions[fragment] == version
        )
        same = votes[digest]
        votes[digest] += 1
        most, count = votes.most_common(1)[0]
        if self.is_too_far(fragment, version) or (most != digest and 2 * count > votes.total()):
            return False
        return True if same else None

    def is_contradicted(self, fragment: int, version: int, digest: bytes, donors: Collection[PeerId]) -> bool:
        """Whether most of all who say what ``version`` was say something else than ``donors``, who gave it;
        one word against another is nothing."""
        votes = Counter(
            info.digests[fragment]
            for peer, info in self._node.membership.live.items()
            if peer not in donors and fragment < len(info.digests) and info.versions[fragment] == version
        )
        agreed = self._node.agreed[fragment]
        if agreed.version == version:
            votes[agreed.digest] += 1
        votes[digest] += len(donors)
        most, count = votes.most_common(1)[0]
        return most != digest and 2 * count > votes.total()

    def is_one_word(self, fragment: int, version: int) -> bool:
        """Whether less than half have reached ``version``, and no two of them say that they hold one state of
        it or later. What a few made together while they were cut off is taken, or both sides would go on for
        good: with storm 20 they did, where at least half were asked for."""
        if version <= self.swarm_version(fragment):
            return False
        held = Counter(
            (info.versions[fragment], info.digests[fragment])
            for info in self._node.membership.live.values()
            if fragment < len(info.digests) and info.versions[fragment] >= version
        )
        return max(held.values(), default=0) < 2

    def donors(self, fragment: int, version: int, digest: bytes = b"") -> tuple[PeerId, ...]:
        """Peers that have it, or are further; not who says that its state of ``version`` is another than
        ``digest``: it would be honest, and taken for a liar. One that rests, whose owner wants the machine or
        the line, only if no other has."""
        phases = {
            peer: info.status.phase
            for peer, info in sorted(self._node.membership.live.items())
            if fragment < len(info.digests)
            and (
                info.versions[fragment] > version
                or (info.versions[fragment] == version and digest in (b"", info.digests[fragment]))
            )
        }
        awake = [peer for peer, phase in phases.items() if phase != Status.PAUSED]
        return split_donors(awake or list(phases), fragment)
