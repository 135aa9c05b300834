"""The council: the one coordinator that begins a round for all cells and signs its one outcome.

Laws: one council commits one round once; a round begins with more than half of the cells that made the round
before (of all, for the first one; half is enough with the lowest of them), so that two halves of a split
swarm cannot both go on; it commits only if every cell that began holds the same means, and else nothing
changes anywhere; a cell that does not come in time is left out and catches up. Nobody waits for a cell that
is done, and one that was seen to train is waited for as long as cells take as a rule. How a cell voted is
taken from who spoke for it, or, some seconds later, from an owner that this one named and that may have
succeeded it; that it failed, from an owner only once nobody hears of who spoke. A cell that has not voted and
that nobody asks for any more has lost its coordinator: the round is over.

Price: one cell that fails in the middle costs all of them the round. A successor that owns nothing is not
heard, and its cell's vote is lost.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from functools import partial

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.protocol.rounds import bounds
from p2p_co2.protocol.rounds.attempt import check_digest, read_key
from p2p_co2.protocol.rounds.begun import PASSED
from p2p_co2.protocol.rounds.cells import assign_roots, check_cell_ready, failure_of, slot_ranges
from p2p_co2.protocol.rounds.deadline import Cadence, ReadyHistory
from p2p_co2.protocol.rounds.decision import Verdicts, sign_outcome
from p2p_co2.protocol.rounds.delegate import DOUBTED, REPEAT_S, patience_s
from p2p_co2.protocol.rounds.forming import Forming
from p2p_co2.protocol.rounds.gathering import attempt_nonce
from p2p_co2.protocol.rounds.repute import NOT_BEGUN, SPOILT_IN_A_ROW
from p2p_co2.protocol.rounds.speakers import SPEAKERS_KEPT
from p2p_co2.protocol.rounds.swarm import Outlet, Swarm, coordination_order, short
from p2p_co2.protocol.wire.identity import Identity, PeerId
from p2p_co2.protocol.wire.limits import MAX_MEMBERS
from p2p_co2.protocol.wire.messages_pb2 import (
    AskOutcome,
    CellBegin,
    CellDecision,
    CellReady,
    CellResult,
    CellWaiting,
    Council,
    Decision,
    Outcome,
    RoundKey,
)

Place = tuple[int, int]
SEEN_LATE_BY = 2
"""Rounds that a cell may have made since it was seen: one that is further behind is not waited for."""
FORMING_KEPT = 3
"""Rounds of one fragment that gather cells: anybody may name one."""
SUCCESSOR_S = 5.0
"""Who spoke for a cell may contradict for so long what another votes for it."""
ASLEEP_S = 1.25 * REPEAT_S
TOLD_OF_LEFT_OUT = 2
"""Peers of a cell that was left out who are told of a commit: the others see it in their heartbeats."""


@dataclass
class _Sitting:
    """A round that began over several cells."""

    council: Council
    readies: dict[int, tuple[CellReady, PeerId]]
    decide_at: float
    began_at: float
    left_out: list[int]
    """Cells that are not in it."""
    looked_at: float
    patience_s: float
    """Who has not asked for so long how it ends is lost."""
    spoke_at: dict[int, float] = field(default_factory=dict)
    """By cell, when who spoke for it was heard last."""
    heard_at: dict[int, float] = field(default_factory=dict)
    """The same, or one that may have succeeded it."""
    doubted: set[int] = field(default_factory=set)
    """Cells of which only a successor says that they failed, or for which another one is ready anew."""
    results: dict[int, tuple[CellResult, PeerId]] = field(default_factory=dict)
    """With who said so."""
    contested: set[int] = field(default_factory=set)
    """Cells for which others spoke as well."""
    decision: Decision | None = None
    has_failed: bool = False

    def is_complete(self) -> bool:
        return len(self.results) == len(self.readies)

    def is_certain(self, cell: int) -> bool:
        """Whether the vote of ``cell`` is by who spoke for it."""
        return self.results[cell][1] == self.readies[cell][1]

    def silent(self) -> list[int]:
        """The cells that did not vote."""
        return sorted(self.readies.keys() - self.results.keys())

    def lost_at(self, cell: int) -> float:
        """When one of them is given up, if nobody there is heard until then."""
        if cell in self.doubted:
            return self.spoke_at.get(cell, self.began_at) + DOUBTED * self.patience_s
        return self.heard_at.get(cell, self.began_at) + self.patience_s

    def has_stood_still(self, now: float) -> bool:
        """Whether we slept (awake, we look every ``REPEAT_S``, whoever asks), and half of the cells may have
        given up by now, whatever of theirs still comes in."""
        slept_s, self.looked_at = now - self.looked_at, now
        heard_at = [self.heard_at.get(cell, self.began_at) for cell in self.readies]
        may_be_gone = sum(now >= at + DOUBTED * self.patience_s for at in heard_at)
        return slept_s > ASLEEP_S and 2 * may_be_gone >= len(heard_at)

    def due_at(self) -> float:
        return min([self.decide_at, *map(self.lost_at, self.silent())])

    def heard(self, cell: int, sender: PeerId, now: float) -> None:
        self.heard_at[cell] = now
        if sender == self.readies[cell][1]:
            self.spoke_at[cell] = now

    def may_vote(self, cell: int, sender: PeerId) -> bool:
        """Whether ``sender`` spoke for ``cell``, or may have succeeded who did."""
        ready, speaker = self.readies[cell]
        return sender == speaker or sender in ready.owners


class Councils:
    """What this peer decides for all cells."""

    def __init__(
        self, identity: Identity, run: bytes, swarm: Swarm, outlet: Outlet, cadences: list[Cadence]
    ) -> None:
        self._identity, self._run, self._swarm, self._outlet = identity, run, swarm, outlet
        self._cadences = cadences
        self._history = [ReadyHistory() for _ in cadences]
        self._forming: dict[Place, Forming] = {}
        self._sittings: OrderedDict[bytes, _Sitting] = OrderedDict()
        self._counter = 0

    # ---- gathering cells

    def on_ready(
        self, message: CellReady, sender: PeerId, verdicts: Verdicts, mine: tuple[int | None, bytes],
        now: float, *, leads: bool,
    ) -> None:  # fmt: skip
        """A cell wants to be in a round. ``mine``: our version and digest; ``leads``: whether we coordinate
        our cell's part in it. Raises ``RemoteProtocolError``."""
        fragment, round_, _ = read_key(message.key, self._swarm.shape)
        check_cell_ready(message, sender, self._swarm.cells, self._swarm.shape)
        if self._swarm.is_near(sender) and not self._swarm.is_live(sender):
            raise RemoteProtocolError("unknown peer", "CELL_READY")
        place, (version, digest) = (fragment, round_), mine
        answer = CellWaiting(fragment=fragment, round=round_)
        for at in [at for at in self._forming if at[0] == fragment and at[1] <= (version or 0)]:
            del self._forming[at]
        if version is not None and version >= round_:
            answer.version, answer.state_digest = version, digest
            near = [peer for peer in self._swarm.live if peer != self._swarm.me]
            answer.donors.extend([self._swarm.me, *near][:MAX_MEMBERS])
        elif (sitting := self._sitting_at(place)) is not None:
            if sitting.decision is not None:
                self._tell(sitting, {sender})  # made without that cell: it is what it needs next
            else:
                self._answer_begun(sitting, message, sender, now)
            return
        elif not leads:
            training = self._swarm.training()
            answer.ask = coordination_order(training or [self._swarm.me], fragment, round_)[0]
        else:
            forming = self._forming.get(place) or self._form(place, verdicts, (version or 0) + 1, now)
            if message.cell not in forming.readies:
                self._history[fragment].arrived(round_, now)
            forming.speakers.take(message, sender, now)
            answer.begins_within_s = max(0.0, forming.give_up_at - now)
        self._outlet.send(sender, answer)

    def _form(self, place: Place, verdicts: Verdicts, next_: int, now: float) -> Forming:
        """``next_``: the round that this peer needs itself."""
        fragment, round_ = place
        before = frozenset(verdicts.cells_before(round_))
        history, cadence = self._history[fragment], self._cadences[fragment]
        history.forget(round_)
        if round_ == 1:
            wait_s = bounds.GATHER_CAP_S
        elif cadence.period_s or self._swarm.shape.round_s:
            # A cell that is left out costs its peers a round and a state each.
            wait_s = cadence.gather_cap_s(round_)
        else:
            wait_s = history.deadline_s(round_)
        give_up_at = now + max(wait_s, bounds.GATHER_CAP_S)
        awake = frozenset(
            cell
            for cell, versions in self._swarm.awake.items()
            if cell not in self._swarm.finished(fragment)
            and fragment < len(versions)
            and versions[fragment] >= round_ - 1 - SEEN_LATE_BY
        )
        told = partial(verdicts.cells_told, round_ - 1)  # the answers may come only later
        forming = Forming(fragment, self._swarm, before, told, awake, now + wait_s, give_up_at)
        if len(same := [at for at in self._forming if at[0] == fragment]) >= FORMING_KEPT:
            del self._forming[min(same, key=lambda at: (at[1] == next_, len(self._forming[at].readies)))]
        self._forming[place] = forming
        return forming

    def _sitting_at(self, place: Place) -> _Sitting | None:
        """The round of this place if it is open or has committed."""
        for sitting in self._sittings.values():
            key = sitting.council.key
            if (key.fragment, key.round) == place and not sitting.has_failed:
                return sitting
        return None

    def _answer_begun(self, sitting: _Sitting, message: CellReady, sender: PeerId, now: float) -> None:
        known = sitting.readies.get(message.cell)
        if known is not None and known[0].key.attempt == message.key.attempt:
            self._outlet.send(sender, CellBegin(council=sitting.council, attempt=message.key.attempt))
            return
        if known is not None and sender != known[1] and message.cell not in sitting.results:
            sitting.contested.add(message.cell)
            if self._swarm.is_vouched(sender) and not self._swarm.is_vouched(known[1]):
                why = f"{short(sender)} spoke for cell {message.cell}, too, and is known"
                self._blame(known[1], why, SPOILT_IN_A_ROW, now, sitting)
                self._abort(sitting, f"a stranger spoke for cell {message.cell}")
                return
        if known is not None and sender != known[1]:
            sitting.doubted.add(message.cell)
        within_s = max(0.0, sitting.decide_at - now)
        key = message.key
        self._outlet.send(
            sender, CellWaiting(fragment=key.fragment, round=key.round, begins_within_s=within_s)
        )

    def close_complete(self, now: float) -> bool:
        """Begin or give up what need not or may not wait longer; True if there was one."""
        for place, forming in list(self._forming.items()):
            if forming.may_begin() and now >= forming.begins_at():
                del self._forming[place]
                self._begin(place, forming, now)
                return True
            if now >= forming.give_up_at or forming.is_too_late():
                del self._forming[place]
                came = len(forming.expected().intersection(forming.camp()[1]))
                why = f"only {came} of {len(forming.expected())} cells were ready with equal states"
                if done := len(forming.done()):
                    why += f", {done} have nothing more to offer"
                refusal = CellWaiting(fragment=place[0], round=place[1], refusal=why)
                for cell, (_, sender) in forming.readies.items():
                    self._outlet.send(sender, refusal)
                    if forming.speakers.are_several(cell):
                        self._blame(sender, "the round for which it spoke for its cell did not begin", 1, now)
                return True
        return False

    def _begin(self, place: Place, forming: Forming, now: float) -> None:
        self._counter += 1
        digest, cells = forming.camp()
        readies = {cell: forming.readies[cell] for cell in cells}
        parts_s = max(ready.parts_within_s for ready, _ in readies.values())
        sums_s = 2 * parts_s
        attempt = attempt_nonce(self._swarm.me, *place, -self._counter, now)
        council = Council(
            key=RoundKey(fragment=place[0], round=place[1], attempt=attempt),
            coordinator=self._swarm.me,
            cells=cells,
            roots=assign_roots({c: r.owners for c, (r, _) in readies.items()}, place, self._swarm.shape),
            sums_within_s=sums_s,
        )
        whole_s = result_within_s(parts_s, sums_s) + 2 * bounds.GRACE_S
        decide_at = now + min(whole_s, self._swarm.shape.round_cap_s)
        left_out = [cell for cell in range(self._swarm.cells) if cell not in readies]
        several = {cell for cell in cells if forming.speakers.are_several(cell)}
        self._sittings[attempt] = _Sitting(
            council, readies, decide_at, now, left_out, now, patience_s(council), contested=several
        )
        while len(self._sittings) > bounds.KEEP_ATTEMPTS:
            self._sittings.popitem(last=False)
        for ready, sender in readies.values():
            self._outlet.send(sender, CellBegin(council=council, attempt=ready.key.attempt))
        donors = [sender for _, sender in readies.values()][:MAX_MEMBERS]
        elsewhere = CellWaiting(
            fragment=place[0], round=place[1], version=place[1] - 1, state_digest=digest, donors=donors
        )
        soon = CellWaiting(fragment=place[0], round=place[1], begins_within_s=max(0.0, decide_at - now))
        for ready, sender in [spoke for cell, spoke in forming.readies.items() if cell not in readies]:
            if ready.state_digest == digest:  # it failed lately: it is told how this ends, as who comes late
                self._outlet.send(sender, soon)
            elif place[1] > 1:
                self._outlet.send(sender, elsewhere)

    # ---- counting

    def on_result(self, message: CellResult, sender: PeerId, now: float) -> None:
        """How a cell voted. Raises ``RemoteProtocolError``."""
        read_key(message.key, self._swarm.shape)
        if self._swarm.cell_of(sender) != message.cell:
            raise RemoteProtocolError("wrong cell", f"{message.cell}")
        sitting = self._sittings.get(message.key.attempt)
        if sitting is None:
            key = message.key  # this peer was restarted, and with it went the round: nobody's fault
            why = "its council does not know of it"
            self._outlet.send(sender, CellWaiting(fragment=key.fragment, round=key.round, refusal=why))
            return
        if message.cell not in sitting.readies:
            raise RemoteProtocolError("wrong cell", f"{message.cell}")
        is_speaker = sender == sitting.readies[message.cell][1]
        if not sitting.may_vote(message.cell, sender):
            return
        self._end_if_due(sitting, now)
        if sitting.decision is not None:
            self._tell(sitting, {sender})
            return
        if not is_speaker and self._swarm.repute.is_passed_over(sender, now):
            return
        if not message.failure:
            self._check_result(message)
            if is_speaker or message.cell not in sitting.results:
                sitting.results[message.cell] = message, sender
        elif is_speaker:
            its = NOT_BEGUN if message.failure == PASSED else 1  # over slow lines nobody waited any more
            rounds = SPOILT_IN_A_ROW if message.cell in sitting.contested else its
            self._blame(sender, "its cell failed", rounds, now, sitting)
            self._abort(sitting, failure_of(message.cell, message.failure))
            return
        else:
            self._blame(sender, "it said for its cell's coordinator that the cell failed", 2, now, sitting)
            sitting.doubted.add(message.cell)
        if sitting.is_complete() and all(map(sitting.is_certain, sitting.readies)):
            self._conclude(sitting, now)
        elif sitting.is_complete():
            sitting.decide_at = min(sitting.decide_at, now + SUCCESSOR_S)

    def _check_result(self, message: CellResult) -> None:
        slots = slot_ranges(self._swarm.shape.blocks[message.key.fragment])
        check_digest(message.roster_digest)
        if len(message.digests) != len(slots):
            raise RemoteProtocolError("wrong parts", f"{len(message.digests)} digests")
        for one in message.digests:
            check_digest(one)

    def _blame(
        self, peer: PeerId, why: str, rounds: float, now: float, sitting: _Sitting | None = None
    ) -> None:
        """A round came to nothing by the word of ``peer``: it counts less for its cell, for a while."""
        cost_s = now - sitting.began_at if sitting is not None else 0.0
        self._swarm.spoilt(peer, why, now, rounds=rounds, cost_s=cost_s)

    def _conclude(self, sitting: _Sitting, now: float) -> None:
        told = Counter(tuple(result.digests) for result, _ in sitting.results.values())
        most, count = told.most_common(1)[0]
        if len(told) > 1:
            for result, sender in sitting.results.values():
                if tuple(result.digests) != most and 2 * count > len(sitting.results):
                    self._blame(sender, "it told another mean than most cells hold", 1, now, sitting)
            self._abort(sitting, "the cells hold different means")
            return
        outcome = self._outcome(sitting)
        outcome.committed = True
        fragment = sitting.council.key.fragment
        slots = slot_ranges(self._swarm.shape.blocks[fragment])
        for (start, stop), one in zip(slots, most, strict=True):
            outcome.parts.add(start_block=start, stop_block=stop, digest=one)
        outcome.base_version = min(ready.base_version for ready, _ in sitting.readies.values())
        for cell, (_, sender) in sorted(sitting.readies.items()):
            share = sitting.results[cell][0]
            outcome.cells.add(cell=cell, roster_digest=share.roster_digest, coordinator=sender)
            self._swarm.repute.committed(sender)
        self._decide(sitting, outcome)

    def _abort(self, sitting: _Sitting, reason: str) -> None:
        outcome = self._outcome(sitting)
        outcome.reason = reason[: bounds.MAX_REASON]
        sitting.has_failed = True
        self._decide(sitting, outcome)

    def _outcome(self, sitting: _Sitting) -> Outcome:
        digest = next(iter(sitting.readies.values()))[0].state_digest
        return Outcome(key=sitting.council.key, run=self._run, state_digest=digest)

    def _decide(self, sitting: _Sitting, outcome: Outcome) -> None:
        sitting.decision = sign_outcome(self._identity, outcome)
        audience = {sender for _, sender in [*sitting.readies.values(), *sitting.results.values()]}
        for cell in sitting.left_out if outcome.committed else ():
            peers = [self._swarm.me] if cell == self._swarm.cell else self._swarm.others.get(cell, [])
            audience.update(peers[:TOLD_OF_LEFT_OUT])
        self._tell(sitting, audience)

    def _tell(self, sitting: _Sitting, audience: set[PeerId]) -> None:
        message = CellDecision(decision=sitting.decision, attempt=sitting.council.key.attempt)
        for peer in sorted(audience):
            self._outlet.send(peer, message)

    def answer(self, message: AskOutcome, sender: PeerId, now: float) -> None:
        """A cell asks how a round of ours ended, until it hears: so each sees that the other is there."""
        sitting, cell = self._sittings.get(message.key.attempt), self._swarm.cell_of(sender)
        if sitting is None:
            return
        self._end_if_due(sitting, now)
        if sitting.decision is not None:
            self._tell(sitting, {sender})
        elif cell in sitting.readies and sitting.may_vote(cell, sender):
            sitting.heard(cell, sender, now)
            key, within_s = sitting.council.key, max(0.0, sitting.due_at() - now)
            open_ = CellWaiting(fragment=key.fragment, round=key.round, begins_within_s=within_s)
            self._outlet.send(sender, open_)

    # ---- time

    def get_timer(self) -> float | None:
        times = [forming.due_at() for forming in self._forming.values()]
        sittings = [one for one in self._sittings.values() if one.decision is None]
        times += [min(one.due_at(), one.looked_at + REPEAT_S) for one in sittings]
        return min(times, default=None)

    def handle_timer(self, now: float) -> None:
        for sitting in list(self._sittings.values()):
            self._end_if_due(sitting, now)

    def _end_if_due(self, sitting: _Sitting, now: float) -> None:
        if sitting.decision is None and sitting.has_stood_still(now):
            self._abort(sitting, "the council's coordinator stood still")
        if sitting.decision is not None or now < sitting.due_at():
            return
        if sitting.is_complete():
            self._conclude(sitting, now)
            return
        silent = sitting.silent()  # they may all wait for the sums of one of them
        silent = [cell for cell in silent if now >= sitting.lost_at(cell)] or silent
        for cell in silent:
            why = "the cell that it spoke for did not vote"
            rounds = SPOILT_IN_A_ROW if cell in sitting.contested else NOT_BEGUN
            self._blame(sitting.readies[cell][1], why, rounds, now, sitting)
        self._abort(sitting, f"no result of cells {', '.join(map(str, silent[:8]))}")

    def held(self) -> dict[str, tuple[int, int]]:
        """As ``Rounds.held``."""
        return {
            "FORMING_KEPT": (len(self._forming), FORMING_KEPT * len(self._cadences)),
            "SPEAKERS_KEPT": (
                max([f.speakers.most() for f in self._forming.values()], default=0),
                SPEAKERS_KEPT,
            ),
            "COUNCILS": (len(self._sittings), bounds.KEEP_ATTEMPTS),
        }


def result_within_s(parts_s: float, sums_s: float) -> float:
    """How long a cell may take from its BEGIN to its votes, in a round over several cells."""
    return 2 * (parts_s + sums_s) + bounds.GRACE_S
