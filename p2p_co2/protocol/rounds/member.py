"""A member from BEGIN to the outcome: sends its slices, owns its part, collects the means, votes.

Laws: a vote (a complete RESULT) goes only to the coordinator that the member follows, and it follows only
forwards (``tally`` says why that makes two commits impossible); a mean counts only from the part's owner in
the part's generation; the payload is cut with views, never copied whole; every wait has a timer.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.protocol.rounds import bounds
from p2p_co2.protocol.rounds.assembly import LAST_PIECE_S, pieces
from p2p_co2.protocol.rounds.attempt import Attempt, check_duration, read_who_is_in
from p2p_co2.protocol.rounds.deadline import Durations
from p2p_co2.protocol.rounds.events import Offer, ReduceJob
from p2p_co2.protocol.rounds.listening import Audience
from p2p_co2.protocol.rounds.owner import Arrivals, PartJob, Room, send_mean
from p2p_co2.protocol.rounds.part_state import PartState
from p2p_co2.protocol.rounds.swarm import Outlet, Swarm, coordination_order, named
from p2p_co2.protocol.wire.bulk import with_data
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.messages_pb2 import (
    AskOutcome,
    Mean,
    Outcome,
    Part,
    PartOutcome,
    Reassign,
    Result,
)
from p2p_co2.system.memory import Buffer, large_buffer

ASKED_BESIDE = 3
"""Members that are asked for the outcome beside who decides: all asking all would be a thousand questions."""
RESEND_S = 1.0
"""A RESULT is repeated after this, then after twice as long and so on, until the decision comes."""
MEANS_COME = 1 / 4
"""Of all parts: when the means of so many have come from other owners, our own slices have left."""


class Member:
    """This peer's part in one attempt."""

    def __init__(
        self, offer: Offer, attempt: Attempt, swarm: Swarm, outlet: Outlet, *, observed: Durations, now: float
    ) -> None:
        self.offer, self.attempt = offer, attempt
        self.coordinators = [attempt.coordinator]
        """Those followed so far; the last one is the one we vote to."""
        self.failure = ""
        """Why the attempt is given up without a decision; empty as long as it is not."""
        self.begun_at = self.parts_at = self.means_at = now
        """When it began here, when our own parts were averaged, when all means were here."""
        self._swarm, self._outlet, self._observed = swarm, outlet, observed
        mine = [part for part, owner in enumerate(attempt.owners) if owner == swarm.me]
        self._arrivals = Arrivals(attempt, swarm, observed, mine)
        self._payload = memoryview(offer.payload)
        self._give_up_at = now + swarm.shape.round_cap_s
        self._decide_by_at = now + attempt.result_within_s + bounds.GRACE_S
        self._resend_at: float | None = None
        self._resend_s = RESEND_S
        self._has_woken = False
        """Whether we came too late to the deadline of who decides now, and gave it more."""
        self._told: Result | None = None
        self._told_of: tuple[list[PartOutcome], list[int]] = [], []
        """What ``_told`` was made of."""
        self._asked_beside = 0
        self._mean, self._parts = memoryview(b""), list[PartState]()
        """Made in ``start``."""
        self._means_due_at = now + 2 * attempt.parts_within_s
        self._jobs: dict[int, PartJob] = {}
        self._here_at: dict[int, float] = {}
        """When a part's mean was here, from its first owner."""
        self._room = Room(int(bounds.MAX_OWNED_PAYLOADS * len(self._payload)))
        self._audience = Audience(attempt)

    def start(self, now: float) -> None:
        """Make room for the mean and send the slices to their owners, a piece to each in turn, so that all
        links are busy at once."""
        self._mean = large_buffer(len(self._payload))
        self._parts = [
            PartState(owner, 0, self._slice(part, self._mean), self._means_due_at)
            for part, owner in enumerate(self.attempt.owners)
        ]
        by_owner: dict[PeerId, list[Iterator[tuple[PeerId, Part]]]] = {}
        for part, state in enumerate(self._parts):
            if state.owner == self._swarm.me:
                self._own(part, self._arrivals, now)
            elif self._swarm.me in self.attempt.senders[part]:
                by_owner.setdefault(state.owner, []).append(self._slice_messages(part))
        streams = [chain.from_iterable(parts) for parts in by_owner.values()]
        while streams:
            streams = [stream for stream in streams if self._send_next(stream)]
        self._check(now)

    # ---- slices

    def _slice(self, part: int, whole: memoryview) -> memoryview:
        start, stop = self.attempt.ranges[part]
        width = self._swarm.shape.block_bytes
        return whole[start * width : stop * width]

    def _slice_messages(self, part: int) -> Iterator[tuple[PeerId, Part]]:
        state = self._parts[part]
        view = self._slice(part, self._payload)
        for offset, data in pieces(view, self._swarm.piece_bytes(self.attempt.shares, LAST_PIECE_S)):
            key, generation = self.attempt.key(), state.generation
            head = Part(key=key, part=part, generation=generation, offset=offset, total=len(view))
            yield state.owner, with_data(head, data)

    def _send_next(self, stream: Iterator[tuple[PeerId, Part]]) -> bool:
        item = next(stream, None)
        if item is not None:
            self._outlet.send(*item)
        return item is not None

    def _own(self, part: int, arrivals: Arrivals, now: float) -> None:
        generation = self._parts[part].generation
        own_slice = self._slice(part, self._payload)
        job = PartJob(
            self.attempt, part, generation, own_slice, swarm=self._swarm, outlet=self._outlet,
            room=self._room, arrivals=arrivals, place=self._parts[part].place, now=now,
        )  # fmt: skip
        self._jobs[part] = job
        job.check(now)

    def is_early(self, part: int, generation: int) -> bool:
        """Whether a piece belongs to a generation that we have not been told of yet."""
        known = self._parts[part].generation if part < len(self._parts) else bounds.MAX_GENERATION
        return known < generation <= bounds.MAX_GENERATION

    def part(self, message: Part, sender: PeerId, now: float) -> bool:
        """A piece of another member's slice; False if it came for nothing. Raises ``RemoteProtocolError``."""
        state = self._state(message.part, message.generation)
        if sender not in self.attempt.shares:
            raise RemoteProtocolError("not a member", "PART")
        if message.generation < state.generation:
            return False
        job = self._jobs.get(message.part)
        if job is None:
            raise RemoteProtocolError("wrong owner", f"PART {message.part} belongs to {state.owner}")
        return job.add(message, sender, now)

    def reduced(self, job: ReduceJob, mean: Buffer, now: float) -> None:
        mine = self._jobs.get(job.part)
        if mine is not None and mine.is_answered_by(job):
            self.parts_at = now
            self._parts[job.part].hold(mine.reduced(job, mean, self._parts[job.part].place), self.attempt)
            self._check(now)

    def listen(self, peer: PeerId) -> bool:
        """A peer that is not in the round wants to hear the means of our parts; whether it will."""
        has_joined = self._audience.joined(peer)
        self._play()
        return has_joined

    def _play(self) -> None:
        """Send our means to those who listen, when the members have been sent all of them."""
        me = self._swarm.me
        mine = [part for part, state in enumerate(self._parts) if (state.owner, state.generation) == (me, 0)]
        for peer in self._audience.waiting(all(state.mean is not None for state in self._parts)):
            for part in mine:
                mean, contributors = self._parts[part].mean, self._parts[part].contributors
                assert mean is not None
                assert contributors is not None
                send_mean(
                    self.attempt, part, 0, mean, contributors,
                    swarm=self._swarm, outlet=self._outlet, to=(peer,),
                )  # fmt: skip

    def refused_slice(self, job: ReduceJob, peer: PeerId) -> bool:
        """Drop a slice from an open job; False if the job is not open any more."""
        mine = self._jobs.get(job.part)
        if mine is None or not mine.is_answered_by(job):
            return False
        mine.refuse(peer)
        return True

    # ---- means

    def _state(self, part: int, generation: int) -> PartState:
        if part >= len(self._parts):
            raise RemoteProtocolError("wrong parts", f"part {part} of {len(self._parts)}")
        if generation > self._parts[part].generation:
            raise RemoteProtocolError("wrong generation", f"{generation} of part {part}")
        return self._parts[part]

    def mean(self, message: Mean, sender: PeerId, now: float) -> bool:
        """A piece of a part's mean; False if it came for nothing. Raises ``RemoteProtocolError``."""
        state = self._state(message.part, message.generation)
        if message.generation < state.generation:
            return False
        if sender != state.owner:
            raise RemoteProtocolError("wrong owner", f"MEAN of part {message.part} belongs to {state.owner}")
        if state.mean is not None and state.transfer.whole is None:
            return False  # kept over a REASSIGN
        if message.offset == 0:
            contributors = read_who_is_in(message, self.attempt)
            if state.contributors is not None and state.contributors != contributors:
                raise RemoteProtocolError("conflicting duplicate", "other contributors")
            state.contributors = contributors
        is_new = state.transfer.add(message.offset, message.total, message.data)
        if is_new and state.transfer.whole is not None:
            assert state.contributors is not None
            state.hold(state.contributors, self.attempt)
            if not state.generation:
                self._here_at[message.part] = now
            self._check(now)
        return is_new

    def reassign(self, message: Reassign, sender: PeerId, now: float) -> None:
        """A part got another owner. Only the coordinator that we follow may say so: another one may be a
        successor that we will follow later, so it is no offence. Raises ``RemoteProtocolError``."""
        if message.part >= len(self._parts) or message.owner not in self.attempt.shares:
            raise RemoteProtocolError(
                "wrong owner", "REASSIGN of a part or to a peer that is not in the round"
            )
        if message.generation > bounds.MAX_GENERATION:
            raise RemoteProtocolError("wrong generation", str(message.generation))
        check_duration(message.parts_within_s, self._swarm.shape.parts_cap_s)
        if sender == self.coordinators[-1] and message.generation > self._parts[message.part].generation:
            old = self._jobs.pop(message.part, None)
            if old is not None:
                old.give_up()
            self._told = None
            within_s = message.parts_within_s or self.attempt.parts_within_s
            self._decide_by_at, self._has_woken = now + 2 * within_s + 2 * bounds.GRACE_S, False
            self._follow_reassign(message, now + 2 * within_s, now)
            self._check(now)

    def _follow_reassign(self, message: Reassign, due_at: float, now: float) -> None:
        """``parts_within_s`` 0: the new owner holds the mean and sends it again; else it needs our slice."""
        part, owner = message.part, PeerId(message.owner)
        old = self._parts[part]
        new = PartState(owner, message.generation, old.place, due_at)
        self._parts[part] = new
        is_sent_again, is_mine = message.parts_within_s == 0, owner == self._swarm.me
        if is_sent_again and old.mean is not None and old.contributors is not None:
            if is_mine or old.generation == message.generation - 1:
                new.hold(old.contributors, self.attempt)  # what is sent again is what we have
            if is_mine:
                attempt, generation = self.attempt, message.generation
                send_mean(
                    attempt, part, generation, old.mean, old.contributors,
                    swarm=self._swarm, outlet=self._outlet,
                )  # fmt: skip
        elif is_mine and not is_sent_again:
            self._own(part, Arrivals(self.attempt, self._swarm, self._observed, [part]), now)
        elif not is_sent_again and self._swarm.me in self.attempt.senders[part]:
            for peer, piece in self._slice_messages(part):
                self._outlet.send(peer, piece)

    # ---- votes

    def _check(self, now: float) -> None:
        """Tell the coordinator when there is something new to tell: all means, or another lost part."""
        self._play()
        lost = [part for part, state in enumerate(self._parts) if self._is_lost(state, now)]
        if lost or all(state.mean is not None for state in self._parts):
            news = self._parts_outcome(), lost
            if self._told is None or news != self._told_of:
                self.means_at = now
                self._tell(*news, now)

    def _is_lost(self, state: PartState, now: float) -> bool:
        return state.mean is None and (now >= state.due_at or not self._swarm.is_live(state.owner))

    def _parts_outcome(self) -> list[PartOutcome]:
        return [state.outcome(part, self.attempt) for part, state in enumerate(self._parts)]

    def _tell(self, parts: list[PartOutcome], lost: list[int], now: float) -> None:
        self._told_of = parts, lost
        self._told = Result(key=self.attempt.key(), parts=parts, lost_parts=lost)
        self._resend_s = RESEND_S
        self._resend_at = now + self._resend_s
        self._outlet.send(self.coordinators[-1], self._told)

    def _repeat(self, now: float) -> None:
        if self._told is not None:
            self._outlet.send(self.coordinators[-1], self._told)
        if len(self.coordinators) > 1:
            self._ask_outcome()
        self._resend_s *= 2
        self._resend_at = now + self._resend_s

    # ---- a lost coordinator

    def _move_on(self, now: float) -> None:
        order = coordination_order(self.attempt.shares, self.attempt.fragment, self.attempt.round)
        left = [peer for peer in order if peer not in self.coordinators and self._swarm.is_live(peer)]
        if not left or len(self.coordinators) >= bounds.MAX_TERMS:
            followed = named(self.coordinators)
            self.failure = f"coordinator lost, nobody decided in its place (followed {followed})"
            return
        self.coordinators.append(left[0])
        self._has_woken = False
        self._decide_by_at = now + self.attempt.parts_within_s + 2 * bounds.GRACE_S
        self._ask_outcome()
        lost = [part for part, state in enumerate(self._parts) if self._is_lost(state, now)]
        self._tell(self._parts_outcome(), lost, now)

    @property
    def brings_means(self) -> bool:
        """Whether our slices have left, as the means of others tell; other threads may ask."""
        return len(self._here_at) >= MEANS_COME * len(self._parts)

    def leads(self) -> bool:
        """Whether we follow ourselves as a successor: then it is on us to decide."""
        return len(self.coordinators) > 1 and self.coordinators[-1] == self._swarm.me

    def _ask_outcome(self) -> None:
        """Who decides now asks everybody; the others, whose votes ask that one, a few more in turn."""
        members, me, question = list(self.attempt.shares), self._swarm.me, AskOutcome(key=self.attempt.key())
        count = len(members) if self.leads() else ASKED_BESIDE
        first = members.index(me) + 1 + self._asked_beside
        self._asked_beside += count
        asked = {members[at % len(members)] for at in range(first, first + count)}
        for peer in sorted({*asked, *self.coordinators} - {me}):
            self._outlet.send(peer, question)

    def ownership(self) -> tuple[list[PeerId], list[int]]:
        """Owner and generation of every part, as far as we were told."""
        return [state.owner for state in self._parts], [state.generation for state in self._parts]

    def term(self) -> int:
        """0 with the coordinator of BEGIN, one more with each successor."""
        return len(self.coordinators) - 1

    # ---- time and the swarm

    def peers_changed(self, now: float) -> None:
        for job in list(self._jobs.values()):
            job.check(now)
        if not self._swarm.is_live(self.coordinators[-1]):
            self._move_on(now)
        if not self.failure:
            self._check(now)

    def get_timer(self) -> float:
        times = [self._give_up_at, self._decide_by_at]
        times += [due_at for job in self._jobs.values() if (due_at := job.get_timer()) is not None]
        if self._resend_at is not None:
            times.append(self._resend_at)
        # Each mean's due time has to fire once; a later one is told by news, not by the clock.
        told = self._told.lost_parts if self._told is not None else ()
        times += [s.due_at for part, s in enumerate(self._parts) if s.mean is None and part not in told]
        return min(times)

    def handle_timer(self, now: float) -> None:
        if now >= self._give_up_at:
            self.failure = f"not decided within {self._swarm.shape.round_cap_s:.0f} s"
            return
        for job in list(self._jobs.values()):
            job.check(now)
        if now >= self._decide_by_at + bounds.GRACE_S and not self._has_woken:
            self._has_woken, self._decide_by_at = True, now + 2 * bounds.GRACE_S
            self._ask_outcome()  # it is we who slept: the decision may lie there
        elif now >= self._decide_by_at:
            if now < self._decide_by_at + bounds.GRACE_S:
                self._swarm.spoilt(self.coordinators[-1], "it was too late", now, cost_s=self.cost_s(now))
            self._move_on(now)
        if self.failure:
            return
        self._check(now)
        if self._resend_at is not None and now >= self._resend_at:
            self._repeat(now)

    def cost_s(self, now: float) -> float:
        """What an attempt that came to nothing cost: at most as long as its coordinator had, since we may
        have slept."""
        return min(now - self.begun_at, self.attempt.result_within_s + 2 * bounds.GRACE_S)

    # ---- the outcome

    def check_outcome(self, outcome: Outcome) -> None:
        """Raise ``RemoteProtocolError`` unless a commit is about the round that began here."""
        group = [(peer.peer, peer.weight) for peer in outcome.members]
        ranges = [(part.start_block, part.stop_block) for part in outcome.parts]
        mine = [(peer, share.weight) for peer, share in self.attempt.shares.items()]
        if group != mine or ranges != list(self.attempt.ranges):
            raise RemoteProtocolError("wrong group", "a decision that is not about the round that began")

    def note_duration(self, now: float) -> None:
        """The round is decided: how long its owners took."""
        took_s: dict[PeerId, float] = {}
        for part, owner in enumerate(self.attempt.owners):
            at = self.parts_at if owner == self._swarm.me else self._here_at.get(part, now)
            took_s[owner] = max(took_s.get(owner, 0.0), at - self.begun_at)
        self._swarm.lateness.owners_took(took_s, self.attempt.parts_within_s)

    def owners_of_missing(self) -> set[PeerId]:
        """The owners of the parts whose means have not come."""
        return {state.owner for state in self._parts if state.mean is None}

    def may_complete(self, outcome: Outcome) -> bool:
        """Whether all that was committed can still come: what we hold is part of it, and the owners of the
        rest live."""
        held = zip(self._parts, outcome.parts, strict=True)
        fits = all(state.mean is None or state.digest == part.digest for state, part in held)
        return fits and all(map(self._swarm.is_live, self.owners_of_missing()))

    def agreed_mean(self, outcome: Outcome) -> memoryview | None:
        """The whole fragment's mean if ours is what was committed, else None."""
        agrees = [state.digest for state in self._parts] == [part.digest for part in outcome.parts]
        return self._mean if agrees else None
