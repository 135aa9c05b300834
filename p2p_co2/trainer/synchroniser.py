"""What the training thread does for the swarm: schedule points, snapshots, merges, and the figures about
them.

Law: the training thread never waits for the network, except in the final flush and, if the run file asks for
it (``outer.blocking_rounds``), in the first rounds of each fragment, both bounded. What ``after_step`` does
otherwise is copy a fragment out when it is due, and add a merge in when one is ready; all time spent in it is
counted as ``exposed_s``, so the figure cannot flatter.
"""

from __future__ import annotations

import math
import queue
import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from p2p_co2.config import RunConfig
from p2p_co2.fragments.live import LiveParameters
from p2p_co2.fragments.plan import FragmentPlan
from p2p_co2.node.ledger import AgreedVersion
from p2p_co2.node.progress import LocalProgress
from p2p_co2.rounds import Offer
from p2p_co2.schedule import LastOffers, SwarmClock, due, flush_bound_s, points_passed, settle_bound_s
from p2p_co2.telemetry import events as ev
from p2p_co2.trainer.fragment_ledger import EncodedOffer
from p2p_co2.trainer.ledger import Moment, Outcome, TensorLedger
from p2p_co2.wire.messages_pb2 import Status

FIRST_ROUND_BOUND_S = 15.0
"""Training waits at most this long for the first rounds of what was sent in one step."""
LEAVE_BOUND_S = 3.0
"""Waiting for rounds in flight when a person stops the peer."""
DISTINCT = 2.0**-10
"""Tokens at most that a weight is off. A commit names offers by peer and weight: a peer that was restarted
must not take the offer of its last process for its own."""
OVERDUE_POINTS = 2
"""A fragment that missed so many schedule points is sent as soon as its round has ended."""
REPORT_EVERY_S = 1.0
REST_BEAT_S, REST_REPORT_EVERY_S = 0.1, 10.0
"""While resting: how soon a wish to go on is seen, and how often the peer tells of itself."""
WAIT_BEAT_S = 0.01
"""While standing still: how soon what the network thread has concluded is seen. Outcomes are at once."""
RATE_DECAY = 0.8


class Wire(Protocol):
    """What the training thread asks of the network thread; the calls return at once."""

    def offer(self, offer: Offer) -> None: ...
    def show(self, progress: LocalProgress) -> None: ...
    def swarm_position(self) -> tuple[float, float] | None: ...
    def settled(self, versions: Sequence[int]) -> bool: ...
    def over(self) -> frozenset[int]: ...
    def traffic_bytes(self) -> tuple[int, int]: ...
    def failure(self) -> BaseException | None: ...
    def report(self, kind: type[ev.Event], fields: Mapping[str, Any]) -> None: ...


@dataclass
class _Sent:
    """A fragment that is in flight, as the training thread knows it."""

    inner_steps: int
    at: float
    points: int
    tokens: int


@dataclass(frozen=True)
class Progressed:
    """Where a peer goes on: counters of a new peer, a late joiner or a checkpoint."""

    position: float = 0.0
    inner_steps: int = 0
    tokens: int = 0


class Synchroniser:
    """One per peer; every method is called by the training thread."""

    def __init__(
        self,
        run: RunConfig,
        module: nn.Module,
        plan: FragmentPlan,
        ledger: TensorLedger,
        wire: Wire,
        start: Progressed,
    ) -> None:
        self._run, self._ledger, self._wire = run, ledger, wire
        self._count = len(plan.fragments)
        self.live = LiveParameters(module, plan)
        self.clock = SwarmClock(run.clock)
        self.clock.start(start.position, time.monotonic(), start.inner_steps)
        self.position, self._advanced_at = start.position, time.monotonic()
        self.inner_steps, self.tokens = start.inner_steps, start.tokens
        self._contributed_tokens = [float(start.tokens)] * self._count
        """Tokens whose work has been counted. Of an offer that was counted in part, that share: what is
        contributed each time is a part at random, so the parts' mean age is their weight."""
        self._counted_tokens = [start.tokens] * self._count
        """Tokens at the newest offer that was counted at least in part."""
        self._sent: dict[int, _Sent] = {}
        self._delays_s: deque[float] = deque(maxlen=2 * self._count)
        """From the offer to the mean, of the last rounds."""
        self._is_flushing = False
        self._told_finished = frozenset[int]()
        self._missed = [0] * self._count
        """Schedule points in a row that passed while the fragment's last round was in flight."""
        self._taken = [0] * self._count
        """Outcomes of each fragment that the live parameters have met."""
        self._held: deque[tuple[int, Outcome]] = deque()
        """Outcomes that wait for ``sync_delay_steps``: (inner step at which they may be applied, outcome)."""
        self.versions = [agreed.version for agreed in ledger.agreed()]
        self._started_at = time.monotonic()
        self._first_step_at: float | None = None
        self._returned_at = self._started_at
        self.train_s = self.exposed_s = 0.0
        self._losses: list[float | Tensor] = []
        self._loss = math.nan
        self._tokens_per_s = 0.0
        self._reported_at, self._reported_tokens = self._started_at, start.tokens
        self.phase: Status.Phase = Status.TRAINING
        self.stopped = False
        """Set by a person's wish to end, in any thread: waits that only finish nicely are given up."""
        self.on_reset: Callable[[int], None] = lambda fragment: None
        """Called when a fragment's live parameters were replaced because they were not finite."""
        self.on_moment: Callable[[Moment], None] = lambda moment: None
        """Called when the live parameters fit the agreed states that it brings: save them together."""
        self._saving_s = 0.0
        """Of the time in ``after_step``, what went into ``on_moment``."""

    # ---- one inner step

    def after_step(self, tokens: int, loss: float | Tensor) -> None:
        """Count an inner step, merge what is ready, send what is due."""
        entered_at = time.monotonic()
        if self._first_step_at is None:
            self._first_step_at = self._returned_at
        self.train_s += entered_at - self._returned_at
        self._saving_s = 0.0
        self._check()
        self.inner_steps += 1
        self.tokens += tokens
        self._losses.append(loss)
        self.take_outcomes()
        last, self.position = self.position, self._advance(entered_at)
        points = due(self._count, last, self.position)
        self._await_first([f for f in (*points, *self._overdue(points)) if self._send(f)])
        self._returned_at = time.monotonic()
        self.exposed_s += self._returned_at - entered_at - self._saving_s
        if self._returned_at - self._reported_at >= REPORT_EVERY_S:
            self.report()

    def _advance(self, now: float) -> float:
        others = self._wire.swarm_position()
        if others is not None:
            position, at = others
            self.clock.observe(position + (now - at) / self._run.clock.round_s, now)
        self._advanced_at = now
        return self.clock.position(now, self.inner_steps)

    def _overdue(self, points: Sequence[int]) -> list[int]:
        """Fragments to be sent before their next point, since the line brings less than a round in a round:
        their rounds ended at one moment for all members, whose next points may be a whole round apart."""
        if self._run.clock.mode != "time":
            return []
        late = [fragment for fragment, missed in enumerate(self._missed) if missed >= OVERDUE_POINTS]
        return [fragment for fragment in late if fragment not in self._sent and fragment not in points]

    def _send(self, fragment: int) -> bool:
        """Offer it, unless its last round is still in flight; whether it did."""
        if fragment in self._sent:
            self._report(
                ev.SendSkipped, fragment=fragment, reason="the fragment's previous round is still in flight"
            )
            self._missed[fragment] += 1
            return False
        self._missed[fragment] = 0
        self._offer(fragment)
        return True

    def _await_first(self, sent: Sequence[int]) -> None:
        """Of what was just sent, await the rounds that the run file wants awaited: all of them at once. One
        after the other, peers that were held up differently would each wait for a fragment that the others
        are yet to send."""
        first = {f for f in sent if self.versions[f] < self._run.outer.blocking_rounds}
        if first:
            self._wait(lambda: self.stopped or first.isdisjoint(self._sent), FIRST_ROUND_BOUND_S)

    def _offer(self, fragment: int) -> None:
        self._sent[fragment] = _Sent(
            self.inner_steps,
            time.monotonic(),
            points_passed(fragment, self._count, self.position),
            self.tokens,
        )
        weight = max(1, self.tokens - self._contributed_tokens[fragment]) + DISTINCT * random.random()
        is_last = self._is_flushing

        def encoded(index: int, offer: EncodedOffer, agreed: AgreedVersion) -> None:
            base, payload = offer.base_version, offer.payload
            self._wire.offer(Offer(index, offer.round, base, agreed.digest, payload, weight, is_last))
            self._report(
                ev.FragmentSent,
                fragment=index,
                round=offer.round,
                payload_bytes=len(offer.payload),
                weight=weight,
                relative_error=offer.relative_error,
            )

        snapshot, taken = self.live.snapshot(fragment), self._taken[fragment]
        self._ledger.submit_offer(fragment, snapshot, weight, taken, encoded)

    # ---- outcomes

    def take_outcomes(self) -> bool:
        """Merge what has arrived and may be applied now; True if something came."""
        came = False
        while True:
            try:
                outcome = self._ledger.outcomes.get_nowait()
            except queue.Empty:
                break
            came = True
            if isinstance(outcome, Moment):
                self._save(outcome)
            else:
                self._hold_or_apply(outcome)
        while self._held and self._held[0][0] <= self.inner_steps:
            self._apply(self._held.popleft()[1])
        return came

    def _save(self, moment: Moment) -> None:
        began_at = time.monotonic()
        self.release_held()
        self.on_moment(moment)
        self._saving_s += time.monotonic() - began_at

    def release_held(self) -> None:
        """Apply what ``sync_delay_steps`` holds back: for a checkpoint, and at the end."""
        while self._held:
            self._apply(self._held.popleft()[1])

    def pause(self, duration_s: float) -> None:
        """Time between two steps that was neither training nor communication (a checkpoint)."""
        self._returned_at += duration_s

    def rest(self, reason: Callable[[], str], beat_s: float = REST_BEAT_S) -> None:
        """Stand still as long as ``reason`` gives one, and say so; what comes in is merged, nothing is sent.

        The swarm does not wait for a peer that rests. Its time is in no figure, and points that pass
        meanwhile are not made up: the work done before goes into the next offers.
        """
        began_at, why = time.monotonic(), reason()
        if not why:
            return
        self.phase = Status.PAUSED
        self._report(ev.Paused, reason=why)
        self.report()
        while reason() and not self.stopped:
            self._check()
            self.take_outcomes()
            if time.monotonic() - self._reported_at >= REST_REPORT_EVERY_S:
                self.report()
            time.sleep(beat_s)
        rested_s = time.monotonic() - began_at
        self.pause(rested_s)
        if self._first_step_at is not None:
            self._first_step_at += rested_s
        self.position, self.phase = self._advance(time.monotonic()), Status.TRAINING
        self._missed = [0] * self._count
        self._report(ev.Resumed, paused_s=rested_s)
        self.report()

    def _check(self) -> None:
        failure = self._wire.failure() or self._ledger.failure
        if failure is not None:
            raise failure

    def _hold_or_apply(self, outcome: Outcome) -> None:
        sent = self._sent.get(outcome.fragment)
        delay = self._run.outer.sync_delay_steps
        if sent is not None and outcome.report is not None and self.inner_steps < sent.inner_steps + delay:
            self._held.append((sent.inner_steps + delay, outcome))
        else:
            self._apply(outcome)

    def _apply(self, outcome: Outcome) -> None:
        fragment = outcome.fragment
        self._taken[fragment] += 1
        if outcome.merge is not None:
            if outcome.merge.keep == 0.0:
                self.live.load_(fragment, outcome.merge.addend)
                if outcome.report is None:
                    self.on_reset(fragment)
            else:
                self.live.merge_(fragment, outcome.merge)
        self.versions[fragment] = max(self.versions[fragment], outcome.version)
        sent = self._sent.pop(fragment, None) if outcome.ends_offer else self._sent.get(fragment)
        if outcome.trouble:
            self._report(ev.Warned, text=f"fragment {fragment}: {outcome.trouble}")
        if outcome.report is None:
            return
        if outcome.share > 0 and sent is not None:
            known = self._contributed_tokens[fragment]
            self._contributed_tokens[fragment] = known + outcome.share * (sent.tokens - known)
            self._counted_tokens[fragment] = sent.tokens
        now = time.monotonic()
        if sent is not None:
            self._delays_s.append(now - sent.at)
        passed = points_passed(fragment, self._count, self.position)
        self._report(
            ev.FragmentApplied,
            fragment=fragment,
            version=outcome.version,
            contributed=outcome.contributed,
            staleness=0 if sent is None else max(0, passed - sent.points),
            sync_delay_steps=0 if sent is None else self.inner_steps - sent.inner_steps,
            sync_delay_s=0.0 if sent is None else now - sent.at,
            gap=outcome.report.gap,
            gradient_norm=outcome.report.gradient_norm,
            momentum_norm=outcome.report.momentum_norm,
            clipped_share=outcome.report.clipped_share,
        )

    def _wait(self, done: Callable[[], bool], bound_s: float) -> bool:
        """Stand still until ``done`` or the bound, taking outcomes as they come; True if done."""
        ends_at = time.monotonic() + bound_s
        while not done():
            left_s = ends_at - time.monotonic()
            self._check()
            if left_s <= 0:
                return False
            try:
                outcome = self._ledger.outcomes.get(timeout=min(left_s, WAIT_BEAT_S))
            except queue.Empty:
                continue
            if isinstance(outcome, Moment):
                self._save(outcome)
            else:
                self._apply(outcome)
        return True

    # ---- the end

    def flush(self, finished: bool) -> None:
        """Await what is in flight; if the run is over, offer the rest of this peer's work and wait until all
        agree."""
        entered_at = time.monotonic()
        self.release_held()
        if not finished:
            self._wait(lambda: not self._sent, LEAVE_BOUND_S)
        else:
            bound_s = flush_bound_s(self._count, self._delays_s)
            self._is_flushing = True
            self._offer_the_rest(bound_s)
            self.phase = Status.DRAINING
            self.report()
            settle_s = settle_bound_s(bound_s, self._run.cells)
            self._wait(lambda: self.stopped or self._has_settled(), settle_s)
            self.release_held()
        self.exposed_s += time.monotonic() - entered_at
        self.report()

    def _has_settled(self) -> bool:
        """Whether all agree. What is in flight no more is told: until then others wait for our part in it."""
        if self._finished() != self._told_finished:
            self._show()
        return self._wire.settled(self.versions)

    def _offer_the_rest(self, bound_s: float) -> None:
        """Offer what this peer learned since its last contributions until it is counted, or time is up."""
        entered_at, offers = time.monotonic(), LastOffers(self._count)
        while (left_s := entered_at + bound_s - time.monotonic()) > 0 and not self.stopped:
            uncounted = [f for f in self._uncounted() if f not in self._wire.over()]
            self._show()
            if not uncounted:
                return
            in_a_hurry = left_s <= bound_s / 2
            for fragment in offers.next(uncounted, self._sent.keys(), in_a_hurry):
                self._offer(fragment)
            in_flight = len(self._sent)
            wait_s = left_s if in_a_hurry else left_s - bound_s / 2
            self._wait(lambda: self.stopped or len(self._sent) < in_flight, wait_s)  # noqa: B023

    def _uncounted(self) -> list[int]:
        """Fragments with work of this peer that is in no mean yet."""
        return [f for f in range(self._count) if self._contributed_tokens[f] < self.tokens]

    def _finished(self) -> frozenset[int]:
        """Once the run is over: fragments for which this peer has nothing more to offer."""
        if not self._is_flushing:
            return frozenset()
        open_ = self._sent.keys() | set(self._uncounted() if self.phase == Status.TRAINING else ())
        return frozenset(range(self._count)) - open_

    # ---- figures

    def report(self) -> None:
        """Show where this peer is: to the others, and as an event."""
        now = time.monotonic()
        elapsed_s = now - self._reported_at
        if elapsed_s > 0:
            rate = (self.tokens - self._reported_tokens) / elapsed_s
            known = self._tokens_per_s
            self._tokens_per_s = RATE_DECAY * known + (1 - RATE_DECAY) * rate if known else rate
        if self._losses:
            self._loss = sum(float(loss) for loss in self._losses) / len(self._losses)
            self._losses.clear()
        self._reported_at, self._reported_tokens = now, self.tokens
        self._show()
        up_bytes, down_bytes = self._wire.traffic_bytes()
        self._report(
            ev.Progress,
            phase=Status.Phase.Name(self.phase).lower(),
            position=self.position,
            inner_steps=self.inner_steps,
            tokens=self.tokens,
            tokens_per_s=self._tokens_per_s,
            loss=self._loss,
            train_s=self.train_s,
            exposed_s=self.exposed_s,
            wall_s=0.0 if self._first_step_at is None else now - self._first_step_at,
            up_bytes=up_bytes,
            down_bytes=down_bytes,
            versions=tuple(self.versions),
        )

    def _show(self) -> None:
        loss = self._loss if math.isfinite(self._loss) else 0.0
        finished = self._told_finished = self._finished()
        self._wire.show(
            LocalProgress(
                self.phase, self.position, self._advanced_at, self.inner_steps, self.tokens, loss, finished
            )
        )

    def _report(self, kind: type[ev.Event], **fields: Any) -> None:  # the fields of one frozen event type
        self._wire.report(kind, fields)
