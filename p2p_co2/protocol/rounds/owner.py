"""The owner of one part: collects the members' slices, has them averaged, sends the mean to all.

Laws: a slice counts only if it arrived whole, once, from a member. The divisor is the weight of what is in
the job. The own slice is always there, and nothing waits longer than ``due_at``. All parts of one owner hold
at most ``MAX_OWNED_PAYLOADS`` of slices, whatever BEGIN says. One member's slice takes no room: until the
mean is made it lies where that will.
"""

from __future__ import annotations

from collections.abc import Collection
from statistics import median_low
from typing import NamedTuple

from p2p_co2.errors import LocalProtocolError, Offence, RemoteProtocolError
from p2p_co2.protocol.rounds import bounds
from p2p_co2.protocol.rounds.assembly import Assembly
from p2p_co2.protocol.rounds.attempt import Attempt
from p2p_co2.protocol.rounds.deadline import SAFETY, Durations
from p2p_co2.protocol.rounds.events import Distrusted, PeerSlice, ReduceJob, ReduceWanted
from p2p_co2.protocol.rounds.repute import LATE_TIMES
from p2p_co2.protocol.rounds.swarm import Outlet, RoundSwarm
from p2p_co2.system.memory import Buffer
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.messages_pb2 import HOSTILE, LATE, NO_ROOM, NOT_ASKED, NOT_AWAITED, Missed, Part

SLOW = "not waited for here any more, since its slices come too late, until they are in time again"
Contributors = tuple[tuple[PeerId, float], ...]


class MeanSlices(NamedTuple):
    """Whose slices are in a mean, with their weights; of the other members, in their order, why not."""

    contributors: Contributors
    missed: tuple[Missed, ...]


class SliceRoom:
    """Bytes of others' slices that one owner holds in an attempt."""

    def __init__(self, size_bytes: int) -> None:
        self._free_bytes = size_bytes

    def take(self, size_bytes: int) -> bool:
        """Whether there is room; it is taken then."""
        has_room = size_bytes <= self._free_bytes
        self._free_bytes -= size_bytes if has_room else 0
        return has_room

    def give_back(self, size_bytes: int) -> None:
        self._free_bytes += size_bytes


class Arrivals:
    """What an owner sees of one attempt, over all parts of its own. A peer was in time if all that it was to
    send was; the wait was as long as the longest of those in time. Whoever sends at the last moment each time
    is late, too: else it alone would say how long exchanges take."""

    def __init__(
        self, attempt: Attempt, swarm: RoundSwarm, observed: Durations, parts: Collection[int]
    ) -> None:
        self._attempt = attempt
        self._swarm = swarm
        self._observed = observed
        self._open = set(parts)
        self._longest_s = 0.0
        self._owed = {
            peer: {part for part in parts if peer in attempt.senders[part]} for peer in attempt.shares
        }

    def came(self, peer: PeerId, part: int) -> None:
        """A slice is whole in time."""
        owed = self._owed[peer]
        owed.discard(part)
        if not owed:
            self._swarm.slices.came(peer)

    def missed(self, peer: PeerId) -> None:
        """A slice was waited for in vain, or so long that it is as bad."""
        was_awaited = self._swarm.slices.is_awaited(peer)
        self._swarm.slices.missed(peer, self._attempt.id)
        if was_awaited and not self._swarm.slices.is_awaited(peer):
            self._swarm.repute.emit(Distrusted(peer, SLOW, 0.0))

    def closed(self, part: int, waited_s: float) -> None:
        """Nothing more is waited for in ``part``."""
        self._open.discard(part)
        self._longest_s = max(self._longest_s, waited_s)
        if not self._open:
            self._observed.add(self._longest_s)


class SliceStore:
    """Slices of one part, each of ``size_bytes``, as they come to its owner. ``whole``: those that are;
    ``came_at``: when; ``missed``: who found no room, or is hostile. ``place``: where the part's mean goes."""

    def __init__(self, room: SliceRoom, size_bytes: int, place: memoryview) -> None:
        self.whole: dict[PeerId, Buffer] = {}
        self.came_at: dict[PeerId, float] = {}
        self.missed: dict[PeerId, Missed] = {}
        self._room = room
        self._size_bytes = size_bytes
        self._taken_bytes = 0
        self._free_place: memoryview | None = place
        self._transfers: dict[PeerId, Assembly] = {}

    def add(self, message: Part, sender: PeerId, now: float) -> bool:
        """Take a piece; False if it came for nothing. Raises ``RemoteProtocolError``."""
        transfer = self._transfers.get(sender) or self._begun(sender)
        is_new = transfer is not None and transfer.add(message.offset, message.total, message.data)
        if is_new and transfer is not None and transfer.whole is not None:
            self.whole[sender] = transfer.whole
            self.came_at[sender] = now
        return is_new

    def _begun(self, sender: PeerId) -> Assembly | None:
        """A slice begins to come in; None if there is no room for it. The first one is put together in the
        mean's place: a message's own memory, held among the others, would leave a hole there."""
        place = self._free_place
        self._free_place = None
        if place is None:
            if not self._room.take(self._size_bytes):
                self.missed[sender] = NO_ROOM
                return None
            self._taken_bytes += self._size_bytes
        self.missed.pop(sender, None)
        self._transfers[sender] = Assembly(self._size_bytes, place)
        return self._transfers[sender]

    def refuse(self, peer: PeerId) -> None:
        """A slice is hostile."""
        if self.whole.pop(peer, None) is None:
            raise LocalProtocolError(f"no slice of {peer} in this job")
        self.missed[peer] = HOSTILE

    def close(self) -> None:
        """Slices that are not whole are waited for no longer."""
        self._transfers.clear()

    def let_go(self) -> None:
        """Nothing more is held."""
        self._room.give_back(self._taken_bytes)
        self._taken_bytes = 0
        self.whole.clear()


class PartJob:
    """One part in one generation, at its owner. Slices are waited for from those whom BEGIN asked to send
    them. ``job``: what the tensor side was asked to average; ``place``: where the part's mean goes."""

    def __init__(
        self, attempt: Attempt, part: int, generation: int, own_slice: memoryview, *,
        swarm: RoundSwarm, outlet: Outlet, room: SliceRoom, arrivals: Arrivals, place: memoryview, now: float,
    ) -> None:  # fmt: skip
        self.attempt = attempt
        self.part = part
        self.generation = generation
        self.job: ReduceJob | None = None
        self.is_done = False
        self._swarm = swarm
        self._outlet = outlet
        self._arrivals = arrivals
        self._began_at = now
        self._slices = SliceStore(room, len(place), place)
        self._slices.whole[swarm.me] = own_slice

    @property
    def _due_at(self) -> float:
        return self._began_at + self.attempt.parts_within_s

    def get_timer(self) -> float | None:
        return None if self.job is not None or self.is_done else self._due_at

    def add(self, message: Part, sender: PeerId, now: float) -> bool:
        """Take a piece of a member's slice; False if it came for nothing. Raises ``RemoteProtocolError``."""
        if sender not in self.attempt.shares or sender == self._swarm.me:
            raise RemoteProtocolError(Offence.NOT_A_MEMBER, "PART")
        if sender not in self.attempt.senders[self.part]:
            return False  # more than it was asked for
        if self.job is not None or self.is_done:
            if message.offset + len(message.data) == message.total and self._is_fair(now):
                self._arrivals.came(sender, self.part)  # it was not waited for, but would have been in time
            return False  # too late for this round; the sender did nothing wrong
        is_new = self._slices.add(message, sender, now)
        if is_new and sender in self._slices.whole:
            self.check(now)
        return is_new

    def check(self, now: float) -> None:
        """Ask for the average once the slice of everybody who is waited for is there, or the time is up."""
        if self.job is not None or self.is_done:
            return
        slices = self._slices
        habit = self._swarm.slices
        absent = [peer for peer in self.attempt.senders[self.part] if peer not in slices.whole]
        missing = [peer for peer in absent if self._swarm.is_live(peer) and habit.is_awaited(peer)]
        if missing and now < self._due_at:
            return
        slices.missed = dict.fromkeys(missing, LATE) | slices.missed
        late = {peer for peer, came_at in slices.came_at.items() if not self._is_fair(came_at)}
        for peer in slices.whole.keys() - late:
            self._arrivals.came(peer, self.part)
        for peer in sorted(late.union(missing)):
            self._arrivals.missed(peer)
        # A slice that missed the deadline took longer than we know: count twice the wait so that it can grow.
        in_time = [came_at for peer, came_at in slices.came_at.items() if peer not in late]
        in_time_s = max(in_time, default=self._began_at) - self._began_at
        slices.close()
        self._arrivals.closed(self.part, 2 * self.attempt.parts_within_s if missing else in_time_s)
        self._ask()

    def _is_fair(self, at: float) -> bool:
        """Whether a slice that is whole then is in time for its own sake. That is within what links were
        planned to take, or twice what the middle one of the others took, or what costs nobody anything."""
        came_at = median_low(self._slices.came_at.values() or [self._began_at])
        usual_s = LATE_TIMES * (came_at - self._began_at)
        cheap_s = max(bounds.CHEAP_S, bounds.CHEAP_SHARE * self._swarm.shape.round_s)
        fair_s = max(usual_s, cheap_s, LATE_TIMES * self.attempt.parts_within_s / SAFETY)
        return at < self._due_at and at - self._began_at <= fair_s

    def _ask(self) -> None:
        weights = self.attempt.weights
        whole = self._slices.whole
        slices = tuple(PeerSlice(peer, weights[peer], whole[peer]) for peer in sorted(whole))
        if not slices:
            self.is_done = True  # all were hostile, ours too: the part is lost and the members will say so
            return
        self.job = ReduceJob(
            self.attempt.id, self.attempt.fragment, self.attempt.round, self.part, self.generation,
            *self.attempt.ranges[self.part], slices,
        )  # fmt: skip
        self._outlet.emit(ReduceWanted(self.job))

    def give_up(self) -> None:
        self._slices.let_go()

    def is_answered_by(self, job: ReduceJob) -> bool:
        """Whether ``job`` is the one that is open now; a job that was re-issued is not."""
        mine = self.job
        if mine is None or self.is_done:
            return False
        if (mine.key, mine.part, mine.generation) != (job.key, job.part, job.generation):
            return False
        return [piece.peer for piece in mine.slices] == [piece.peer for piece in job.slices]

    def refuse(self, peer: PeerId) -> None:
        """Drop a hostile slice and ask again without it."""
        self._slices.refuse(peer)
        self._ask()

    def reduced(self, job: ReduceJob, mean: Buffer, place: memoryview) -> MeanSlices:
        """Put the encoded mean to its ``place``; returns whose slices are in it."""
        if len(mean) != len(place):
            raise LocalProtocolError(f"the mean of part {self.part} has {len(mean)} bytes, not {len(place)}")
        place[:] = mean
        self.is_done = True
        self.job = None
        self.give_up()
        contributors = {piece.peer: piece.weight for piece in job.slices}
        asked = self.attempt.senders[self.part]
        absent = (peer for peer in self.attempt.shares if peer not in contributors)
        known = self._slices.missed
        missed = (known.get(peer, NOT_AWAITED) if peer in asked else NOT_ASKED for peer in absent)
        return MeanSlices(tuple(contributors.items()), tuple(missed))
