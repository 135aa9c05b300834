"""What the training thread does for the swarm: schedule points, snapshots, merges, and the end of a run.

Law: the training thread never waits for the network, except in the final flush and in the first rounds that
the run file wants awaited (``outer.blocking_rounds``), both bounded. All time spent in ``after_step`` is
counted as ``exposed_s`` (``figures``).
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from p2p_co2.config import RunConfig
from p2p_co2.node.state import LocalProgress
from p2p_co2.protocol.rounds import Offer
from p2p_co2.telemetry import events as ev
from p2p_co2.trainer.exchanged_model import ExchangedModel
from p2p_co2.trainer.figures import Figures
from p2p_co2.trainer.ledger.fragment_state import EncodedOffer, FragmentOutcome
from p2p_co2.trainer.ledger.worker import NOT_FINITE, TensorWorker
from p2p_co2.trainer.session import CLOSE_BOUND_S
from p2p_co2.trainer.views import NodeView
from p2p_co2.wire.messages_pb2 import Status
from p2p_co2.wire.schedule import (
    FIRST_ROUND_BOUND_S,
    LOADS_CAP_S,
    SETTLE_S,
    STILL_LOADS,
    Ending,
    SwarmClock,
    WorkAccount,
)
from p2p_co2.wire.terms import RunTerms

REPORT_EVERY_S = 1.0
"""How often a peer tells of itself. One that rests does so a tenth as often, and sees within a tenth of it
that it may go on. One that stands still looks for news within a hundredth."""

EMPTY_STEPS = 10
NO_TOKENS = (
    f"{EMPTY_STEPS} steps in a row were of no tokens, and such work weighs next to nothing in the mean: if a "
    "GradScaler skips them, look for NaN in the data and the loss; else tell the tokens, as in "
    "exchange(tokens=labels.numel()). This is told once"
)


@dataclass(frozen=True)
class Progressed:
    """Where a peer goes on: counters of a new peer, a late joiner or a checkpoint."""

    position: float = 0.0
    inner_steps: int = 0
    tokens: int = 0
    data: str = ""


class Source(NamedTuple):
    """Where a training thread has its time from, and the random bytes that name its offers."""

    now: Callable[[], float] = time.monotonic
    offer_id: Callable[[], bytes] = partial(os.urandom, 8)


SYSTEM = Source()
Waits = Iterator[float]
"""Where training stands still: for how many seconds at most, which an outcome ends."""


class Activity(Enum):
    """What a peer is at: it trains or rests. Once the run is over it offers the rest of its work, then waits
    until all agree."""

    TRAINING = Status.TRAINING
    RESTING = Status.PAUSED
    OFFERING_THE_REST = -1
    SETTLING = Status.DRAINING

    @property
    def is_ending(self) -> bool:
        return self in (Activity.OFFERING_THE_REST, Activity.SETTLING)

    @property
    def phase(self) -> Status.Phase:
        """What others are told. While it offers the rest they take it for one that trains."""
        phase: Status.Phase = Status.TRAINING if self is Activity.OFFERING_THE_REST else self.value
        return phase


class Synchroniser:
    """One per peer; every method is called by the training thread. It looks at ``model`` before the first
    step and before parameters are copied or merged into. ``after_step`` and ``flush`` stand still on the
    thread; who has no thread to block goes through ``step_waits`` and ``flush_waits``."""

    def __init__(
        self, run: RunConfig, model: ExchangedModel, ledger: TensorWorker, wire: NodeView, start: Progressed,
        source: Source = SYSTEM, terms: RunTerms | None = None,
    ) -> None:  # fmt: skip
        self._run = run
        self._model = model
        self._ledger = ledger
        self._wire = wire
        self._source = source
        now = source.now()
        self.clock = SwarmClock(run.clock)
        self.clock.start(start.position, now, start.inner_steps)
        self.position = start.position
        self._advanced_at = now
        self.inner_steps = start.inner_steps
        self.figures = Figures(start.tokens, now)
        versions = [agreed.version for agreed in ledger.agreed()]
        self.account = WorkAccount(run, start.tokens, versions, terms)
        self.account.done_elsewhere = wire.over
        self._held: deque[tuple[int, FragmentOutcome]] = deque()
        """Outcomes that wait for ``sync_delay_steps``: (inner step at which they may be applied, outcome)."""
        self.activity = Activity.TRAINING
        self._told_finished = frozenset[int]()
        self.stopped = False
        """Set by a person's wish to end, in any thread: waits that only finish nicely are given up."""

    @property
    def versions(self) -> list[int]:
        """Of the agreed states that the live parameters have met, by fragment."""
        return self.account.versions

    # ---- one inner step

    def after_step(self, tokens: int | Tensor, loss: float | Tensor) -> None:
        """Count an inner step, merge what is ready, send what is due; begun after the run's end, it counts
        for nothing. ``tokens``, ``loss``: as ``figures`` gives them."""
        self._stand_still(self.step_waits(tokens, loss))

    def step_waits(self, tokens: int | Tensor, loss: float | Tensor) -> Waits:
        """As ``after_step``."""
        now = self._source.now()
        self._check()
        self._model.look_back()
        if not self.figures.has_begun or not self._ledger.outcomes.empty():
            self._model.look(self.position)
        is_too_late = self.account.is_over(self.position)  # it joined then: this is the work of no round
        step_s = self.figures.trained(now, 0 if is_too_late else tokens, loss)
        self.inner_steps += 1
        if self.figures.empty_steps == EMPTY_STEPS and not is_too_late:
            self._model.warn_once(NO_TOKENS)
        is_encoded = not self._ledger.is_encoding  # before its merge, in the snapshot's memory, is taken
        self.take_outcomes()
        last = self.position
        self.position = self._advance(now)
        due = [] if is_too_late else self.account.due(last, self.position, self._wire.is_line_full())
        if due:
            self._model.look(self.position)
        first = self.account.awaited(self._send_due(due, is_encoded, step_s))
        if first:  # stand still for the first rounds of what was just sent, if the run file asks for it
            open_ = self.account.in_flight
            yield from self._wait(lambda: self.stopped or first.isdisjoint(open_), FIRST_ROUND_BOUND_S)
        self.stood_still()
        if self._source.now() - self.figures.made_at >= REPORT_EVERY_S:
            self._model.look(self.position)
            self.report()

    def _advance(self, now: float) -> float:
        if (others := self._wire.swarm_position()) is not None:
            self.clock.observe(others[0] + (now - others[1]) / self._run.clock.round_s, now)
        self._advanced_at = now
        return self.clock.position(now, self.inner_steps)

    def _send_due(self, due: Sequence[int], is_encoded: bool, step_s: float) -> list[int]:
        """Offer what is due and has its turn. Returns what was sent.

        A snapshot that would wait behind another (not ``is_encoded``) is taken some steps later, at most half
        of the fragments so. Long steps take several."""
        sent = list[int]()
        one_by_one = step_s < REPORT_EVERY_S and not self.account.awaited(due)
        for waiting, fragment in zip(range(len(due), 0, -1), due, strict=True):
            stage = self._wire.stage(fragment)
            if not self.account.may_send(fragment, stage == "asking"):
                reason = "the fragment's previous exchange is still in flight"
                self._report(ev.SendSkipped, fragment=fragment, reason=reason)
                continue
            if self.account.is_held(self._wire.stage, step_s, self._source.now()):
                continue
            is_busy = not is_encoded or (one_by_one and bool(sent))
            if not (is_busy and 2 * waiting <= len(self.versions)):
                self._offer(fragment)
                sent.append(fragment)
        return sent

    def _offer(self, fragment: int) -> None:
        """Take a snapshot, which takes a fragment's size in fp32 until it is encoded, and offer it."""
        state = self.account.send(
            fragment, position=self.position, inner_steps=self.inner_steps, tokens=self.figures.tokens,
            now=self._source.now(), offer_id=self._source.offer_id(),
        )  # fmt: skip
        is_last = self.activity.is_ending or self.account.is_over(self.position)

        def encoded(made: EncodedOffer) -> None:
            payload = made.payload
            offer = Offer(
                fragment, made.round, made.base_version, made.state_digest, payload, state.weight, is_last,
                state.offer_id,
            )  # fmt: skip
            self._wire.offer(offer)
            self._report(
                ev.FragmentSent, fragment=fragment, round=made.round, payload_bytes=len(payload),
                weight=state.weight,
            )  # fmt: skip

        self._ledger.submit_offer(fragment, self._model.live.snapshot(fragment), state, encoded)

    # ---- outcomes

    def take_outcomes(self) -> None:
        """Merge what has arrived and may be applied now."""
        while not self._ledger.outcomes.empty():
            outcome = self._ledger.outcomes.get_nowait()
            sent = self.account.in_flight.get(outcome.fragment)
            delay = self._run.outer.sync_delay_steps
            if sent is not None and outcome.report and self.inner_steps < sent.inner_steps + delay:
                self._held.append((sent.inner_steps + delay, outcome))
            else:
                self._apply_next(outcome)
        self._release_held(self.inner_steps)

    def _apply_next(self, outcome: FragmentOutcome) -> None:
        """Apply it; before it, what is held back of its fragment: a state that is loaded has met that."""
        if any(held.fragment == outcome.fragment for _, held in self._held):
            self._release_held()
        self._apply(outcome)

    def _release_held(self, until: float = math.inf) -> None:
        """Apply what ``sync_delay_steps`` holds back, up to this inner step."""
        while self._held and self._held[0][0] <= until:
            self._apply(self._held.popleft()[1])

    def _apply(self, outcome: FragmentOutcome) -> None:
        fragment = outcome.fragment
        is_newer = outcome.version > self.versions[outcome.fragment]
        offer = self.account.meet(fragment, outcome.version, outcome.number, outcome.ended)
        if outcome.merge is not None:
            self._model.merge_(fragment, outcome.merge)
            if outcome.merge.keep == 0.0 and outcome.report is None:
                self._model.forget_optimizer(fragment)
        if outcome.trouble == NOT_FINITE:
            self._model.begin_anew()
            self._model.warn_once(NOT_FINITE)
        elif outcome.trouble:
            self._report(ev.Warned, text=f"fragment {fragment}: {outcome.trouble}")
        for other in outcome.others:
            self._apply_next(other)
        if outcome.report is None:
            if is_newer:
                self.account.left_out(fragment)
            return
        lag = self.account.step(
            fragment, offer, outcome.share, outcome.peers,
            position=self.position, inner_steps=self.inner_steps, now=self._source.now(),
        )  # fmt: skip
        self._report(
            ev.FragmentApplied, fragment=fragment, version=outcome.version,
            contributed=outcome.share == 1.0, gap=outcome.report.gap,
            momentum_norm=outcome.report.momentum_norm, **asdict(lag),
        )  # fmt: skip

    def _stand_still(self, waits: Waits) -> None:
        for wait_s in waits:
            with contextlib.suppress(queue.Empty):
                self._apply_next(self._ledger.outcomes.get(timeout=wait_s))

    def _wait(self, done: Callable[[], bool], bound_s: float) -> Waits:
        """Stand still until ``done`` or the bound, taking outcomes as they come."""
        ends_at = self._source.now() + bound_s
        while not done() and (left_s := ends_at - self._source.now()) > 0:
            self._check()
            if self.activity.is_ending and self._source.now() - self.figures.made_at >= REPORT_EVERY_S:
                self.stood_still()
                self.report()
            if self._ledger.outcomes.empty():
                yield min(left_s, REPORT_EVERY_S / 100)
            else:
                self._apply_next(self._ledger.outcomes.get_nowait())

    def _check(self) -> None:
        failure = self._wire.failure() or self._ledger.failure
        if failure is not None:
            raise failure

    # ---- pauses

    def pause(self, duration_s: float) -> None:
        """Time between two steps that was neither training nor communication (a checkpoint)."""
        self.figures.skip(duration_s)
        self._model.live.take_computing_s()  # is in it

    def rest(self, reason: Callable[[], str], beat_s: float = REPORT_EVERY_S / 10) -> None:
        """Stand still as long as ``reason`` gives one, and say so; what comes in is merged, nothing is sent.
        Its time is in no figure; the work done before goes into the next offers."""
        began_at = self._source.now()
        why = reason()
        if not why:
            return
        self.activity = Activity.RESTING
        self._report(ev.Paused, reason=why)
        self.report()
        while (now := reason()) and not self.stopped:
            if now != why:
                why = now
                self._report(ev.Paused, reason=why)
            self.position = self._advance(self._source.now())
            if self.account.is_near_end(self.position):
                self._report(
                    ev.Warned, text="the run is about to end: this peer rests no longer, and ends with it"
                )
                break
            self._check()
            self.take_outcomes()
            if self._source.now() - self.figures.made_at >= 10 * REPORT_EVERY_S:
                self.report()
            time.sleep(beat_s)
        rested_s = self._source.now() - began_at
        self.figures.skip(rested_s, rested=True)
        self._model.live.take_computing_s()
        self.position = self._advance(self._source.now())
        self.activity = Activity.TRAINING
        self.account.forget_missed()
        self._report(ev.Resumed, paused_s=rested_s)
        self.report()

    def stood_still(self) -> None:
        """Count the time since the last step, or since this was asked last."""
        self.figures.stood_still(self._source.now(), self._model.live.take_computing_s())

    # ---- the end

    def flush(self, finished: bool) -> None:
        """Await what is in flight; if the run is over, offer what is left and wait until all agree."""
        self._stand_still(self.flush_waits(finished))

    def flush_waits(self, finished: bool) -> Waits:
        """As ``flush``."""
        self.figures.since = self._source.now()
        self._release_held()
        if not finished:
            yield from self._wait(lambda: not self.account.in_flight, CLOSE_BOUND_S / 2)
        else:
            self.activity = Activity.OFFERING_THE_REST
            bound_s = self.account.flush_bound_s
            settle_s = bound_s + SETTLE_S
            self._report(
                ev.TrainingEnded, fragments=tuple(self.account.uncounted(self.figures.tokens)),
                offers_within_s=bound_s, settles_within_s=settle_s,
            )  # fmt: skip
            yield from self._offer_the_rest(bound_s)
            self.activity = Activity.SETTLING
            self.report()
            yield from self._wait(self._has_settled, settle_s)
            if not self.stopped and self._wire.loads(self._has_settled()):
                self._report(ev.Warned, text=STILL_LOADS)
                yield from self._wait(
                    lambda: self.stopped or not self._wire.loads(self._has_settled()), LOADS_CAP_S
                )
            self._release_held()
            if not self.stopped:
                self._wire.tell_what_is_missing()
        self.stood_still()
        self.report()

    def _has_settled(self) -> bool:
        """Whether all agree. What is in flight no more is told: until then others wait for our part in it."""
        if self._finished() != self._told_finished:
            self._show()
        return self.stopped or self._wire.settled(self.versions)

    def _offer_the_rest(self, bound_s: float) -> Waits:
        """Offer what this peer learned since its last contributions until it is counted, or time is up."""

        def has_room() -> bool:  # the last snapshot's memory is free again
            return self.stopped or (not self._ledger.is_encoding and self._ledger.outcomes.empty())

        ending = Ending(len(self.versions), self._source.now(), bound_s)
        open_ = self.account.in_flight
        yield from self._wait(has_room, bound_s)
        while not self.stopped:
            uncounted = [f for f in self.account.uncounted(self.figures.tokens) if f not in self._wire.over()]
            self._show()
            todo = ending.next(uncounted, open_.keys(), self._source.now())
            if todo is None:
                return
            in_flight = len(open_) + len(todo[0])
            for fragment in todo[0]:
                self._offer(fragment)
                yield from self._wait(has_room, todo[1])
            yield from self._wait(lambda: self.stopped or len(open_) < in_flight, todo[1])  # noqa: B023

    def _finished(self) -> frozenset[int]:
        """Once the run is over: fragments for which this peer has nothing more to offer."""
        if not self.activity.is_ending:
            return frozenset()
        offers_on = self.activity is Activity.OFFERING_THE_REST
        return self.account.finished(self.account.uncounted(self.figures.tokens) if offers_on else ())

    # ---- figures

    def report(self) -> None:
        """Show where this peer is: to the others, and as an event."""
        now = self._source.now()
        figures = self.figures
        figures.make(now, keeps_rate=self.activity.is_ending)
        self._show()
        up_bytes, down_bytes = self._wire.traffic_bytes()
        phase = Status.DRAINING if self.activity.is_ending else self.activity.phase
        self._report(
            ev.Progress, phase=Status.Phase.Name(phase).lower(), position=self.position,
            inner_steps=self.inner_steps, tokens=figures.tokens, tokens_per_s=figures.tokens_per_s,
            loss=figures.loss, train_s=figures.train_s, exposed_s=figures.exposed_s,
            wall_s=figures.wall_s(now), up_bytes=up_bytes, down_bytes=down_bytes,
            versions=tuple(self.versions), rounds=self.account.terms.rounds(math.inf),
        )  # fmt: skip

    def _show(self) -> None:
        finished = self._told_finished = self._finished()
        where = self.position, self._advanced_at, self.inner_steps
        phase = self.activity.phase
        is_ending = self.activity.is_ending
        self._wire.show(LocalProgress(phase, *where, finished, is_ending))

    def _report(self, kind: type[ev.Event], **fields: Any) -> None:  # the fields of one frozen event type
        self._wire.report(kind, fields)
