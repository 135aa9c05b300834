"""The bytes of one attempt at one member: its slices go to owners, owners' means come back.

Laws: a mean counts only with the signature of the part's owner in its generation. It comes from that owner,
or from a member that passes on what a lost owner had sent it. The payload is cut with views, never copied
whole. Where an owner is lost, nobody leads: once all live members lack its mean, the next by rank takes the
part (``Attempt.heir``). As long as a member holds the mean, the first of these by rank passes it on. An owner
sends its own mean once more only when it must be lost.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterator, Mapping
from functools import lru_cache
from itertools import chain
from statistics import fmean, median_high
from typing import TypeVar

from p2p_co2.digest import digest
from p2p_co2.errors import Offence, RemoteProtocolError
from p2p_co2.protocol.rounds import bounds
from p2p_co2.protocol.rounds.assembly import Assembly, pieces
from p2p_co2.protocol.rounds.attempt import Attempt, Share, check_missed, read_contributors
from p2p_co2.protocol.rounds.certificate import Seals
from p2p_co2.protocol.rounds.deadline import Durations
from p2p_co2.protocol.rounds.events import CheckWanted, Likeness, Offer, ReduceJob
from p2p_co2.protocol.rounds.owner import Arrivals, Contributors, MeanSlices, PartJob, SliceRoom
from p2p_co2.protocol.rounds.swarm import Outlet, RoundSwarm
from p2p_co2.system.memory import Buffer, large_buffer
from p2p_co2.wire.envelope import with_data
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.messages_pb2 import Contributor, Mean, Part, PartOutcome, SignedMean

_Place = TypeVar("_Place", bound=Hashable)
LEAST_COSINE = 0.2
"""A mean that holds a slice points its way: of 38,000 honest ones the least was -0.31, the median 0.5. One
that points the other way by more than this is refused."""
LONGEST = 3.0
"""Nor is a mean so many times as long. Honest ones were 1.9 times as long at most, beside no peer of twice
the work."""
OURS = Likeness(1.0, 1.0, 0.0)
"""Of the mean that we made."""
BAD = Likeness(-1.0, math.inf, 0.0)
"""Of one that is refused unseen."""


def may_be_true(likeness: Likeness, size: float) -> bool:
    """Whether a mean may hold our slice. ``size``: root mean square of our slices elsewhere, 0 if there are
    none. A slice that is zero in most blocks, as of a table's rows that we hardly used, says little of what
    others did there: it is taken to be as long as those."""
    is_sparse = 2 * likeness.used < 1
    longer = (min(1.0, likeness.size / size) if size else 0.0) if is_sparse else 1.0
    return likeness.cosine >= -LEAST_COSINE and likeness.length * longer <= LONGEST


def has_a_say(peer: PeerId, shares: Mapping[PeerId, Share]) -> bool:
    """Whether it made at least three quarters of the median work. An honest mean may point away from the
    slice of a slower one: with half of the work one in a hundred did."""
    return 4 * shares[peer].weight >= 3 * median_high([share.weight for share in shares.values()])


class Findings(dict[_Place, tuple[PeerId, Likeness | None]]):
    """Of the means that a member looks at: who averaged each, and what it is like; None until it was looked
    at."""

    @property
    def is_done(self) -> bool:
        return all(likeness is not None for _, likeness in self.values())

    @property
    def refused(self) -> set[_Place]:
        """In whose mean our slice is not what it should be. If most owners seem to lie, it is more likely the
        member's own slice that is odd."""
        found = {place: (owner, like) for place, (owner, like) in self.items() if like is not None}
        sizes = [like.size for _, like in found.values() if like.size > 0]
        size = math.sqrt(fmean(one**2 for one in sizes)) if len(sizes) > 1 else 0.0
        owners = {owner for owner, _ in found.values()}
        bad = {place: owner for place, (owner, like) in found.items() if not may_be_true(like, size)}
        return set(bad) if 2 * len(set(bad.values())) <= len(owners) else set()


@lru_cache(2 * bounds.KEEP_DECISIONS)
def list_contributors(contributors: Contributors) -> list[Contributor]:
    """As messages name them, never written to: nearly always all parts of a round have one list."""
    return [Contributor(peer=peer, weight=weight) for peer, weight in contributors]


class PartState:
    """What a member knows of one part of the mean. ``place``: where its bytes go; ``source``: who sends
    them."""

    def __init__(self, owner: PeerId, generation: int, place: memoryview, due_at: float) -> None:
        self.owner = owner
        self.generation = generation
        self.place = place
        self.due_at = due_at
        self.outcome = PartOutcome()
        """What an outcome says of it, once its mean is held."""
        self.seal = SignedMean()
        """Its owner's signature, then."""
        self.again_at: dict[PeerId, float] = {}
        """When its mean, which was passed on to a peer, must have come or be lost."""
        self.expect(owner)

    @property
    def is_held(self) -> bool:
        return bool(self.outcome.digest)

    def expect(self, source: PeerId) -> None:
        """All of it, from ``source``."""
        self.source = source
        self.transfer = Assembly(len(self.place), self.place)
        self.head: tuple[MeanSlices, bytes] | None = None
        """What the first piece says: whose slices are in it, and the owner's signature."""

    def is_lost(self, swarm: RoundSwarm, now: float) -> bool:
        """Whether its owner is late, or went: one that is back at once is another process."""
        if not self.is_held and not swarm.is_live(self.owner):
            self.due_at = min(self.due_at, now)
        return not self.is_held and now >= self.due_at

    def hold(
        self, part: int, attempt: Attempt, seals: Seals, counted: MeanSlices, signature: bytes | None = None
    ) -> None:
        """Its mean is whole, and we made it if there is no ``signature``. Raises ``RemoteProtocolError``."""
        start, stop = attempt.ranges[part]
        outcome = PartOutcome(
            start_block=start, stop_block=stop, digest=digest(self.place),
            contributors=list_contributors(counted.contributors), missed=counted.missed,
        )  # fmt: skip
        said = digest(outcome.SerializeToString(deterministic=True))
        seal = SignedMean(part=part, generation=self.generation, digest=said, signature=signature)
        if signature is None:
            seals.sign(seal)
        else:
            seals.check(seal)
        self.outcome = outcome
        self.seal = seal

    def send(self, attempt: Attempt, swarm: RoundSwarm, outlet: Outlet, to: Collection[PeerId] = ()) -> None:
        """The mean that we hold, in pieces, to all other members, or ``to`` others."""
        others = to or [peer for peer in attempt.shares if peer != outlet.me]
        for offset, data in pieces(self.place, swarm.piece_bytes(others)):
            head = Mean(
                key=attempt.key(), part=self.seal.part, generation=self.generation, offset=offset,
                total=len(self.place), contributors=[] if offset else self.outcome.contributors,
                missed=[] if offset else self.outcome.missed,
                signature=b"" if offset else self.seal.signature,
            )  # fmt: skip
            message = with_data(head, data)
            for peer in others:
                outlet.send(peer, message)


class Exchange:
    """Of one member. ``parts_at``: when our own parts were averaged."""

    def __init__(
        self, offer: Offer, attempt: Attempt, swarm: RoundSwarm, outlet: Outlet, *, seals: Seals,
        observed: Durations, now: float,
    ) -> None:  # fmt: skip
        self.attempt = attempt
        self.seals = seals
        self.parts_at = now
        self._began_at = self._slices_at = now
        """When the last piece of a slice came."""
        self._swarm = swarm
        self._outlet = outlet
        self._observed = observed
        self._payload = memoryview(offer.payload)
        self.mean = large_buffer(len(self._payload))
        self.parts = [
            PartState(owner, 0, self._slice(part, self.mean), now + 2 * attempt.parts_within_s)
            for part, owner in enumerate(attempt.owners)
        ]
        self.findings = Findings[tuple[int, int]]()
        """By (part, generation)."""
        self._jobs: dict[int, PartJob] = {}
        self._here_at: dict[int, float] = {}
        """When a part's mean was here, from its first owner."""
        self._room = SliceRoom(int(bounds.MAX_OWNED_PAYLOADS * len(self._payload)))

    def start(self, now: float) -> None:
        """Send the slices to their owners, a piece to each in turn, so that all links are busy at once."""
        mine = [part for part, owner in enumerate(self.attempt.owners) if owner == self._swarm.me]
        arrivals = Arrivals(self.attempt, self._swarm, self._observed, mine)
        by_owner: dict[PeerId, list[Iterator[tuple[PeerId, Part]]]] = {}
        for part, state in enumerate(self.parts):
            if state.owner == self._swarm.me:
                self._own(part, arrivals, now)
            elif self._swarm.me in self.attempt.senders[part]:
                by_owner.setdefault(state.owner, []).append(self._slice_messages(part))
        streams = [chain.from_iterable(parts) for parts in by_owner.values()]
        while streams:
            streams = [stream for stream in streams if _send_next(stream, self._outlet)]

    # ---- slices

    def _slice(self, part: int, whole: memoryview) -> memoryview:
        start, stop = self.attempt.ranges[part]
        width = self._swarm.shape.block_bytes
        return whole[start * width : stop * width]

    def _slice_messages(self, part: int) -> Iterator[tuple[PeerId, Part]]:
        state = self.parts[part]
        view = self._slice(part, self._payload)
        for offset, data in pieces(view, self._swarm.piece_bytes(self.attempt.shares)):
            head = Part(
                key=self.attempt.key(), part=part, generation=state.generation, offset=offset,
                total=len(view),
            )  # fmt: skip
            yield state.owner, with_data(head, data)

    def _own(self, part: int, arrivals: Arrivals, now: float) -> None:
        state = self.parts[part]
        job = PartJob(
            self.attempt, part, state.generation, self._slice(part, self._payload), swarm=self._swarm,
            outlet=self._outlet, room=self._room, arrivals=arrivals, place=state.place, now=now,
        )  # fmt: skip
        self._jobs[part] = job
        job.check(now)

    def is_early(self, part: int, generation: int) -> bool:
        """Whether a piece is of an owner that we do not follow yet."""
        known = self.parts[part].generation if part < len(self.parts) else bounds.MAX_GENERATION
        return known < generation <= bounds.MAX_GENERATION

    def _state(self, part: int, generation: int) -> PartState:
        if part >= len(self.parts):
            raise RemoteProtocolError(Offence.WRONG_PARTS, f"part {part} of {len(self.parts)}")
        if generation > self.parts[part].generation:
            raise RemoteProtocolError(Offence.WRONG_GENERATION, f"{generation} of part {part}")
        return self.parts[part]

    def part(self, message: Part, sender: PeerId, now: float) -> bool:
        """A piece of another member's slice; False if it came for nothing. Raises ``RemoteProtocolError``."""
        state = self._state(message.part, message.generation)
        if message.generation < state.generation:
            return False
        job = self._jobs.get(message.part)
        if job is None:
            raise RemoteProtocolError(Offence.WRONG_OWNER, f"PART {message.part} belongs to {state.owner}")
        self._slices_at = now  # too late for the mean, it is still a measurement
        return job.add(message, sender, now)

    def reduced(self, job: ReduceJob, mean: Buffer, now: float) -> None:
        mine = self._jobs.get(job.part)
        state = self.parts[job.part]
        if mine is not None and mine.is_answered_by(job):
            self.parts_at = now
            counted = mine.reduced(job, mean, state.place)
            state.hold(job.part, self.attempt, self.seals, counted)
            state.send(self.attempt, self._swarm, self._outlet)
            self.findings[job.part, job.generation] = state.owner, OURS

    def refused_slice(self, job: ReduceJob, peer: PeerId) -> bool:
        """Drop a slice from an open job; False if the job is not open any more."""
        mine = self._jobs.get(job.part)
        if mine is None or not mine.is_answered_by(job):
            return False
        mine.refuse(peer)
        return True

    # ---- means

    def mean_came(self, message: Mean, sender: PeerId, now: float) -> bool:
        """A piece of a part's mean; False if it came for nothing. Raises ``RemoteProtocolError``."""
        state = self._state(message.part, message.generation)
        if message.generation < state.generation or (state.is_held and state.transfer.whole is None):
            return False
        if sender != state.source and not self._follows(state, sender, now):
            return False
        if message.offset == 0:
            weights = self.attempt.weights
            contributors = read_contributors(message.contributors, weights, self.attempt.counts_whole)
            check_missed(message.missed, len(weights) - len(contributors))
            head = MeanSlices(contributors, tuple(message.missed)), message.signature
            if state.head not in (None, head):
                raise RemoteProtocolError("conflicting duplicate", "other contributors or signature")
            state.head = head
        is_new = state.transfer.add(message.offset, message.total, message.data)
        if is_new and state.transfer.whole is not None and state.head is not None:
            try:
                state.hold(message.part, self.attempt, self.seals, *state.head)
            except RemoteProtocolError:  # were it taken, votes would differ and nothing prove by whose fault
                state.expect(state.owner)
                state.due_at = min(state.due_at, now)
                self._swarm.repute.lied(sender, "it sent a mean with a wrong signature")
                raise
            self._check(message.part)
            if not state.generation and sender == state.owner:
                self._here_at[message.part] = now
        return is_new

    def _follows(self, state: PartState, sender: PeerId, now: float) -> bool:
        """Whether ``sender`` may pass on the mean of an owner that is lost: the first one that does."""
        if sender not in self.attempt.shares:
            raise RemoteProtocolError(Offence.NOT_A_MEMBER, "MEAN")
        is_ours = state.owner == self._swarm.me  # its slices are being averaged in place
        if is_ours or not state.is_lost(self._swarm, now) or state.source != state.owner:
            return False
        state.expect(sender)
        return True

    def _check(self, part: int) -> None:
        """Have a mean looked at, where the run has a defence and we have a say. No honest owner lets the
        slices of most voters that are no newcomers count for less than a quarter: only those unlike most do,
        and refuse nothing."""
        state = self.parts[part]
        weights = self.attempt.weights
        counted = dict(state.head[0].contributors if state.head else ())
        cut = {peer for peer, weight in counted.items() if 4 * weight < weights[peer]}
        if not self.attempt.weight_cap or self._swarm.me not in self.attempt.senders[part]:
            return
        judges = self._swarm.voters.steady(self.attempt.fragment, counted.keys())
        if 2 * len(cut & judges) > len(judges):
            self.findings[part, state.generation] = state.owner, BAD
        elif has_a_say(self._swarm.me, self.attempt.shares):
            if self._swarm.me not in cut:
                self.findings[part, state.generation] = state.owner, None
            place = self.attempt.id, self.attempt.fragment, part, state.generation
            self._outlet.emit(CheckWanted(*place, self._slice(part, self._payload), state.place))

    def checked(self, job: CheckWanted, likeness: Likeness) -> None:
        """What a mean is like."""
        state = self.parts[job.part]
        if state.generation != job.generation:
            return
        is_true = may_be_true(likeness, 0.0)
        if likeness.size > 0 or not is_true:  # beside a slice of zeros all means look alike
            self._swarm.repute.looked_at(state.owner, likeness if is_true else BAD)
        if (job.part, job.generation) in self.findings:
            self.findings[job.part, job.generation] = state.owner, likeness

    @property
    def is_whole(self) -> bool:
        return all(state.is_held for state in self.parts)

    def owners_of_missing(self) -> set[PeerId]:
        return {state.source for state in self.parts if not state.is_held}

    @property
    def brings_means(self) -> bool:
        """Whether our slices have left: a quarter of the means have come from other owners."""
        return 4 * len(self._here_at) >= len(self.parts)

    # ---- lost owners

    def lost(self, now: float) -> frozenset[tuple[int, int]]:
        """The (part, generation) that we lack and whose owner is gone or late. Those that we have given up
        for an heir count, too: we do not hold their means."""
        return frozenset(
            (part, generation)
            for part, state in enumerate(self.parts)
            if state.generation or not state.is_held
            for generation in range(state.generation + state.is_lost(self._swarm, now))
        )

    def holds_any(self, lost: dict[PeerId, frozenset[tuple[int, int]]]) -> bool:
        """Whether we hold the mean of a part that somebody lacks, which they should know."""
        told = set[tuple[int, int]]().union(*lost.values())
        return any(self.parts[p].is_held and self.parts[p].generation == number for p, number in told)

    def settle_lost(
        self, lost: dict[PeerId, frozenset[tuple[int, int]]], gave_up: set[PeerId], now: float
    ) -> bool:
        """Pass on what others lack of lost owners; hand a part that all live members lack, and that is late
        here too, to its heir. ``lost``: what each member says that spoke, this one too. Whether a part was
        handed on."""
        spoken = [peer for peer in self.attempt.ranked if peer in lost and peer not in gave_up]
        live = [peer for peer in spoken if self._swarm.is_live(peer)]
        handed_on = False
        for part, generation in sorted(set[tuple[int, int]]().union(*lost.values())):
            state = self.parts[part]
            if generation != state.generation:
                continue
            lacking = [peer for peer in live if (part, generation) in lost[peer]]
            has_lied = self._swarm.repute.has_lied  # it says that it holds what it sends to nobody
            holders = [peer for peer in live if peer not in lacking and not has_lied(peer)]
            if not holders and generation < bounds.MAX_GENERATION and state.is_lost(self._swarm, now):
                self._hand_on(part, now)
                handed_on = True
            elif (
                holders
                and state.is_held
                and self._swarm.me == (state.owner if state.owner in holders else holders[0])
            ):
                self._pass_on(part, state, lacking, now)
        return handed_on

    def _pass_on(self, part: int, state: PartState, lacking: list[PeerId], now: float) -> None:
        """Send a mean that may be lost: what its owner sent must be so after three times as long as the
        slices were under way."""
        slices_s = (self._slices_at - self._began_at) or (self.parts_at - self._began_at)
        lost_after_s = max(bounds.GRACE_S, 3 * slices_s)
        first_at = self._began_at + lost_after_s if state.owner == self._swarm.me else now
        to = [peer for peer in lacking if now >= state.again_at.get(peer, first_at)]
        state.again_at.update((peer, now + lost_after_s) for peer in to)
        if to:
            state.send(self.attempt, self._swarm, self._outlet, to)

    def _hand_on(self, part: int, now: float) -> None:
        old = self._jobs.pop(part, None)
        if old is not None:
            old.give_up()
        generation = self.parts[part].generation + 1
        due_at = now + 2 * self.attempt.parts_within_s
        owner = self.attempt.heir(part, generation)
        self.parts[part] = PartState(owner, generation, self.parts[part].place, due_at)
        if owner == self._swarm.me:
            self._own(part, Arrivals(self.attempt, self._swarm, self._observed, [part]), now)
        elif self._swarm.me in self.attempt.senders[part]:
            for peer, piece in self._slice_messages(part):
                self._outlet.send(peer, piece)

    # ---- time and the swarm

    def check(self, now: float) -> None:
        """Ask for what our own parts need no longer wait for."""
        for job in list(self._jobs.values()):
            job.check(now)

    def get_timer(self, told: frozenset[tuple[int, int]]) -> float | None:
        """When an owner waits no longer, or the next mean is late that was not ``told`` to be lost."""
        times = [due_at for job in self._jobs.values() if (due_at := job.get_timer()) is not None]
        missing = ((part, state) for part, state in enumerate(self.parts) if not state.is_held)
        times += [state.due_at for part, state in missing if (part, state.generation) not in told]
        return min(times, default=None)

    def note_duration(self, begun_at: float, now: float) -> None:
        """The round is decided: how long its owners took."""
        took_s: dict[PeerId, float] = {}
        for part, owner in enumerate(self.attempt.owners):
            at = self.parts_at if owner == self._swarm.me else self._here_at.get(part, now)
            took_s[owner] = max(took_s.get(owner, 0.0), at - begun_at)
        self._swarm.lateness.owners_took(took_s, self.attempt.parts_within_s)


def _send_next(stream: Iterator[tuple[PeerId, Part]], outlet: Outlet) -> bool:
    """Send one more piece; False if there is none."""
    item = next(stream, None)
    if item is not None:
        outlet.send(*item)
    return item is not None
