"""The council: the one coordinator that begins a round for all cells and signs its one outcome.

Laws: one council commits one round once; a round begins with more than half of the cells that made the round
before (of all, for the first one; half is enough with the lowest of them), so that two halves of a split
swarm cannot both go on; it commits only if every cell that began holds the same means, and else nothing
changes anywhere; a cell that does not come in time is left out and catches up. Nobody waits for a cell that
is done, and one that was seen to train is waited for as long as cells take as a rule.

Price: one cell that fails in the middle costs all of them the round.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.rounds import bounds
from p2p_co2.rounds.attempt import check_digest, read_key
from p2p_co2.rounds.cells import assign_roots, check_cell_ready, slot_ranges
from p2p_co2.rounds.deadline import Cadence, ReadyHistory
from p2p_co2.rounds.decision import Verdicts, sign_outcome
from p2p_co2.rounds.gathering import attempt_nonce
from p2p_co2.rounds.swarm import Outlet, Swarm, coordination_order
from p2p_co2.wire.identity import Identity, PeerId
from p2p_co2.wire.limits import MAX_MEMBERS
from p2p_co2.wire.messages_pb2 import (
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
STALE_S = 12.0
"""A cell that did not repeat its CELL_READY for so long may speak through anybody again: its coordinator is
gone, or has given up. Longer than it ever waits before it does (``delegate.AGAIN_CAP_S``)."""
TOLD_OF_LEFT_OUT = 2
"""Peers of a cell that was left out who are told of a commit: the others see it in their heartbeats."""


@dataclass
class _Forming:
    """The CELL_READYs of one round: by cell, with who sent it. ``before``: the cells that made the round
    before, as far as this peer knows; ``awake``: those that were seen to train of late; ``heard_at``: when
    each was heard last."""

    fragment: int
    swarm: Swarm
    before: frozenset[int]
    awake: frozenset[int]
    close_at: float
    give_up_at: float
    readies: dict[int, tuple[CellReady, PeerId]] = field(default_factory=dict)
    heard_at: dict[int, float] = field(default_factory=dict)

    def take(self, message: CellReady, sender: PeerId, now: float) -> None:
        """Where two coordinate one cell, because their views differ, the one with more members counts."""
        known, heard_at = self.readies.get(message.cell), self.heard_at.get(message.cell, now)
        if known is None or known[1] == sender or message.members >= known[0].members or (
            now - heard_at > STALE_S
        ):  # fmt: skip
            self.readies[message.cell], self.heard_at[message.cell] = (message, sender), now

    def camp(self) -> tuple[bytes, list[int]]:
        """The state that most peers start from, and its cells."""
        camps: dict[bytes, list[int]] = {}
        for cell, (ready, _) in sorted(self.readies.items()):
            camps.setdefault(ready.state_digest, []).append(cell)

        def strength(digest: bytes) -> tuple[int, bytes]:
            return sum(self.readies[cell][0].members for cell in camps[digest]), digest

        best = max(camps, key=strength)
        return best, camps[best]

    def expected(self) -> frozenset[int]:
        """The cells of the round before: this peer's word of them, or that of the first who knows."""
        told = (frozenset(self.readies[cell][0].before) for cell in self.camp()[1])
        return self.before or next((cells for cells in told if cells), frozenset(range(self.swarm.cells)))

    def done(self) -> frozenset[int]:
        """Those of them that are done with the fragment, and will not come."""
        return self.expected() & self.swarm.finished(self.fragment) - self.readies.keys()

    def may_begin(self) -> bool:
        """Cells that are done count: few others would make a version that all these had to load."""
        expected = self.expected()
        came = expected & set(self.camp()[1])
        if 2 * len(came) == len(expected):
            return min(expected) in came and not self.done()
        return 2 * len(came) > len(expected)

    def is_complete(self) -> bool:
        return (self.expected() | self.awake) - self.done() <= self.readies.keys()

    def due_at(self) -> float:
        if self.is_too_late():
            return 0.0
        return self.close_at if self.may_begin() else self.give_up_at

    def is_too_late(self) -> bool:
        """Whether too many cells are done for another round."""
        done, expected = self.done(), self.expected()
        return bool(done) and 2 * (len(expected) - len(done)) <= len(expected)


@dataclass
class _Sitting:
    """A round that began over several cells."""

    council: Council
    readies: dict[int, tuple[CellReady, PeerId]]
    decide_at: float
    left_out: list[int]
    """Cells that are not in it."""
    results: dict[int, CellResult] = field(default_factory=dict)
    senders: set[PeerId] = field(default_factory=set)
    decision: Decision | None = None
    has_failed: bool = False


class Councils:
    """What this peer decides for all cells."""

    def __init__(
        self, identity: Identity, run: bytes, swarm: Swarm, outlet: Outlet, cadences: list[Cadence]
    ) -> None:
        self._identity, self._run, self._swarm, self._outlet = identity, run, swarm, outlet
        self._cadences = cadences
        self._history = [ReadyHistory() for _ in cadences]
        self._forming: dict[Place, _Forming] = {}
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
        place, (version, digest) = (fragment, round_), mine
        answer = CellWaiting(fragment=fragment, round=round_)
        if version is not None and version >= round_:
            answer.version, answer.state_digest = version, digest
            answer.donors.extend([self._swarm.me, *self._neighbours()][:MAX_MEMBERS])
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
            forming = self._forming.get(place) or self._form(place, verdicts, now)
            if message.cell not in forming.readies:
                self._history[fragment].arrived(round_, now)
            forming.take(message, sender, now)
            answer.begins_within_s = max(0.0, forming.give_up_at - now)
        self._outlet.send(sender, answer)

    def _neighbours(self) -> list[PeerId]:
        return [peer for peer in self._swarm.live if peer != self._swarm.me]

    def _form(self, place: Place, verdicts: Verdicts, now: float) -> _Forming:
        fragment, round_ = place
        before = frozenset(cells_before(verdicts, round_))
        history, cadence = self._history[fragment], self._cadences[fragment]
        history.forget(round_)
        if round_ == 1:
            wait_s = bounds.GATHER_CAP_S
        elif cadence.period_s:
            wait_s = cadence.gather_cap_s  # a cell that is left out costs its peers a round and a state each
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
        forming = _Forming(fragment, self._swarm, before, awake, now + wait_s, give_up_at)
        self._forming = {at: known for at, known in self._forming.items() if at[0] != fragment}
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
        within_s = max(0.0, sitting.decide_at - now)
        key = message.key
        self._outlet.send(
            sender, CellWaiting(fragment=key.fragment, round=key.round, begins_within_s=within_s)
        )

    def close_complete(self, now: float) -> bool:
        """Begin or give up what need not or may not wait longer; True if there was one."""
        for place, forming in list(self._forming.items()):
            due = forming.is_complete() or now >= forming.close_at
            if due and forming.may_begin():
                del self._forming[place]
                self._begin(place, forming, now)
                return True
            if now >= forming.give_up_at or forming.is_too_late():
                del self._forming[place]
                came = len(forming.camp()[1])
                why = f"only {came} of {len(forming.expected())} cells were ready with equal states"
                if done := len(forming.done()):
                    why += f", {done} have nothing more to offer"
                refusal = CellWaiting(fragment=place[0], round=place[1], refusal=why)
                for _, sender in forming.readies.values():
                    self._outlet.send(sender, refusal)
                return True
        return False

    def _begin(self, place: Place, forming: _Forming, now: float) -> None:
        self._counter += 1
        digest, cells = forming.camp()
        readies = {cell: forming.readies[cell] for cell in cells}
        parts_s = max(ready.parts_within_s for ready, _ in readies.values())
        sums_s = min(2 * parts_s, 2 * bounds.PARTS_CAP_S)
        attempt = attempt_nonce(self._swarm.me, *place, -self._counter, now)
        council = Council(
            key=RoundKey(fragment=place[0], round=place[1], attempt=attempt),
            coordinator=self._swarm.me,
            cells=cells,
            roots=assign_roots({c: r.owners for c, (r, _) in readies.items()}, place, self._swarm.shape),
            sums_within_s=sums_s,
        )
        decide_at = now + min(result_within_s(parts_s, sums_s) + 2 * bounds.GRACE_S, bounds.ROUND_CAP_S)
        left_out = [cell for cell in range(self._swarm.cells) if cell not in readies]
        self._sittings[attempt] = _Sitting(council, readies, decide_at, left_out)
        while len(self._sittings) > bounds.KEEP_ATTEMPTS:
            self._sittings.popitem(last=False)
        for ready, sender in readies.values():
            self._outlet.send(sender, CellBegin(council=council, attempt=ready.key.attempt))
        donors = [sender for _, sender in readies.values()][:MAX_MEMBERS]
        elsewhere = CellWaiting(
            fragment=place[0], round=place[1], version=place[1] - 1, state_digest=digest, donors=donors
        )
        for cell, (_, sender) in forming.readies.items():
            if cell not in readies and place[1] > 1:
                self._outlet.send(sender, elsewhere)

    # ---- counting

    def on_result(self, message: CellResult, sender: PeerId, now: float) -> None:
        """How a cell voted. Raises ``RemoteProtocolError``."""
        read_key(message.key, self._swarm.shape)
        sitting = self._sittings.get(message.key.attempt)
        if sitting is None:
            key = message.key  # this peer was restarted, and with it went the round
            why = "its council does not know of it"
            self._outlet.send(sender, CellWaiting(fragment=key.fragment, round=key.round, refusal=why))
            raise RemoteProtocolError("unknown round", "CELL_RESULT")
        if message.cell not in sitting.readies or self._swarm.cell_of(sender) != message.cell:
            raise RemoteProtocolError("wrong cell", f"{message.cell}")
        if sitting.decision is not None:
            self._tell(sitting, {sender})
            return
        if not message.failure:
            slots = slot_ranges(self._swarm.shape.blocks[message.key.fragment])
            check_digest(message.roster_digest)
            if len(message.digests) != len(slots):
                raise RemoteProtocolError("wrong parts", f"{len(message.digests)} digests")
            for one in message.digests:
                check_digest(one)
        sitting.senders.add(sender)
        sitting.results.setdefault(message.cell, message)
        if message.failure:
            self._abort(sitting, f"cell {message.cell}: {message.failure}")
        elif len(sitting.results) == len(sitting.readies):
            self._conclude(sitting)

    def _conclude(self, sitting: _Sitting) -> None:
        contents = {tuple(result.digests) for result in sitting.results.values()}
        if len(contents) > 1:
            self._abort(sitting, "the cells hold different means")
            return
        outcome = self._outcome(sitting)
        outcome.committed = True
        fragment = sitting.council.key.fragment
        slots = slot_ranges(self._swarm.shape.blocks[fragment])
        for (start, stop), one in zip(slots, contents.pop(), strict=True):
            outcome.parts.add(start_block=start, stop_block=stop, digest=one)
        outcome.base_version = min(ready.base_version for ready, _ in sitting.readies.values())
        for cell, (_, sender) in sorted(sitting.readies.items()):
            share = sitting.results[cell]
            outcome.cells.add(cell=cell, roster_digest=share.roster_digest, coordinator=sender)
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
        audience = sitting.senders | {sender for _, sender in sitting.readies.values()}
        for cell in sitting.left_out if outcome.committed else ():
            peers = [self._swarm.me] if cell == self._swarm.cell else self._swarm.others.get(cell, [])
            audience.update(peers[:TOLD_OF_LEFT_OUT])
        self._tell(sitting, audience)

    def _tell(self, sitting: _Sitting, audience: set[PeerId]) -> None:
        message = CellDecision(decision=sitting.decision, attempt=sitting.council.key.attempt)
        for peer in sorted(audience):
            self._outlet.send(peer, message)

    def answer(self, message: AskOutcome, sender: PeerId) -> None:
        """Tell a cell that has another coordinator now how a round of ours ended, if it has."""
        sitting = self._sittings.get(message.key.attempt)
        if sitting is not None and sitting.decision is not None:
            self._tell(sitting, {sender})

    # ---- time

    def get_timer(self) -> float | None:
        times = [forming.due_at() for forming in self._forming.values()]
        times += [sitting.decide_at for sitting in self._sittings.values() if sitting.decision is None]
        return min(times, default=None)

    def handle_timer(self, now: float) -> None:
        for sitting in list(self._sittings.values()):
            if sitting.decision is None and now >= sitting.decide_at:
                silent = sorted(sitting.readies.keys() - sitting.results.keys())
                self._abort(sitting, f"no result of cells {', '.join(map(str, silent[:8]))}")

    def held(self) -> dict[str, tuple[int, int]]:
        """As ``Rounds.held``."""
        return {
            "COUNCILS forming": (len(self._forming), len(self._cadences)),
            "COUNCILS": (len(self._sittings), bounds.KEEP_ATTEMPTS),
        }


def cells_before(verdicts: Verdicts, round_: int) -> list[int]:
    """The cells that made the round before ``round_``; none if it is not known."""
    known = verdicts.commit(round_ - 1)
    return [share.cell for share in known[1].cells] if known is not None else []


def result_within_s(parts_s: float, sums_s: float) -> float:
    """How long a cell may take from its BEGIN to its votes, in a round over several cells."""
    return 2 * (parts_s + sums_s) + bounds.GRACE_S
