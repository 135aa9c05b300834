"""The training thread of a simulated peer: what ``trainer.synchroniser`` does, without tensors.

It steps at its own speed, passes the same schedule points, offers at them, merges outcomes at step
boundaries, waits (bounded) in the first rounds if the run file asks for it, and ends a run with the same
flush. Law: it talks to the node as ``trainer.network_thread`` does and reads only what that publishes.
"""

from __future__ import annotations

import asyncio
import math
import operator
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from p2p_co2.config import RunConfig
from p2p_co2.node.ledger import AgreedVersion
from p2p_co2.node.node import Node
from p2p_co2.node.progress import LocalProgress
from p2p_co2.protocol.rounds import Offer
from p2p_co2.protocol.schedule import (
    FIRST_ROUND_BOUND_S,
    LOADS_CAP_S,
    LOADS_QUIET_S,
    STILL_LOADS,
    Ending,
    SwarmClock,
    WorkAccount,
    settle_bound_s,
)
from p2p_co2.protocol.wire.messages_pb2 import Status
from p2p_co2.simnet.ledger import CountingLedger, Offered, Outcome
from p2p_co2.telemetry import events as ev

LEAVE_BOUND_S = 3.0
"""As ``trainer.synchroniser`` has it; what follows is as in ``trainer.connection``."""
LISTEN_S, LISTEN_TO_LISTED_S, GATHER_BOUND_S, CATCH_UP_BOUND_S = 3.0, 12.0, 120.0, 600.0
LEFT_BEHIND_BOUND_S = 30.0
REPORT_EVERY_S, REPORTS_IN_A_QUIET_BEAT = 1.0, 2.0
"""A real peer writes its progress down every second; a day of a thousand would be 88 million lines, so in
rounds of minutes it is so often in one of their slow heartbeats."""
LOOK_EVERY_S, SETTLE_LOOK_EVERY_S = 0.25, 0.5
"""How often a training thread that waits for others looks where they are: before its first step, at the
end."""
SHORTEST_WAIT_S = 0.001


@dataclass(frozen=True)
class Pace:
    """How fast a peer trains: seconds and tokens per inner step."""

    step_s: float
    tokens: int


@dataclass(frozen=True)
class Progressed:
    """Where a peer goes on; also what its checkpoint says of it."""

    position: float = 0.0
    inner_steps: int = 0
    tokens: int = 0


class Training:
    """One per process. ``traffic``: real bytes (up, down) so far. ``rng`` makes steps uneven and offers
    distinct."""

    def __init__(
        self,
        run: RunConfig,
        node: Node,
        ledger: CountingLedger,
        pace: Pace,
        start: Progressed,
        *,
        min_peers: int,
        rng: random.Random,
        traffic: Callable[[], tuple[int, int]],
    ) -> None:
        self._run, self._node, self._ledger, self._pace = run, node, ledger, pace
        self._min_peers, self._rng, self._traffic = min_peers, rng, traffic
        self._now = node.clock.monotonic
        self._report_every_s = max(REPORT_EVERY_S, node.membership.quiet_s / REPORTS_IN_A_QUIET_BEAT)
        self._count = len(ledger.fragments)
        self.clock = SwarmClock(run.clock)
        self.position, self._advanced_at = start.position, self._now()
        self.inner_steps, self.tokens = start.inner_steps, start.tokens
        self._account = WorkAccount(run, start.tokens, [agreed.version for agreed in ledger.agreed()])
        self._is_flushing = False
        self._news = asyncio.Event()
        ledger.on_outcome = self._news.set
        self.train_s = self.exposed_s = 0.0
        self._first_step_at: float | None = None
        self._reported_at, self._reported_tokens = self._now(), start.tokens
        self.phase: Status.Phase = Status.JOINING
        self.asked_to_leave = False
        self.contributions = 0

    @property
    def over(self) -> bool:
        return self._account.is_over(self.position)

    @property
    def versions(self) -> list[int]:
        return self._account.versions

    def progressed(self) -> Progressed:
        return Progressed(self.position, self.inner_steps, self.tokens)

    # ---- before the first step

    async def catch_up(self) -> bool:
        """Wait for ``min_peers``, then until this peer is where the swarm is or is sure to be alone; False
        if that takes too long, or if the others went before this peer had what they had."""
        started_at = self._now()
        while self._node.live_peers() < self._min_peers - 1:
            if self._now() - started_at > GATHER_BOUND_S:
                return False
            await asyncio.sleep(LOOK_EVERY_S)
        if not await self._find_the_swarm():
            return False
        others, pace = self._node.progress.swarm_position, self._run.clock
        if others is not None:
            moved = (self._now() - others[1]) / pace.round_s if pace.mode == "time" else 0.0
            self.position = max(others[0] + moved, self.position)
        self.clock.start(self.position, self._now(), self.inner_steps)
        self._advanced_at = self._now()
        self.phase = Status.TRAINING
        self._take_outcomes()
        self.report()
        return True

    async def _find_the_swarm(self) -> bool:
        """As ``Connection._catch_up``."""
        started_at = followed_at = given_at = self._now()
        began_with, given = tuple(self._node.agreed), 0
        while True:
            now, heard = self._now(), self._node.progress.heard
            if (moved := sum(map(operator.ne, self._node.agreed, began_with))) > given:
                given, given_at = moved, now
            if not self._node.progress.left_behind or self._node.progress.may_be_back:
                followed_at = now
            if not self._node.progress.left_behind and (heard or self._node.live_peers() == 0):
                waited_s, unheard = now - started_at, self._node.unheard_peers()
                listened = waited_s > (LISTEN_TO_LISTED_S if unheard else LISTEN_S)
                found = waited_s > 0.2 and (self._node.progress.met or not unheard or listened)
                if found and self._node.progress.abreast if heard else listened:
                    return True
            if now - given_at > CATCH_UP_BOUND_S or now - followed_at > LEFT_BEHIND_BOUND_S:
                return False
            await asyncio.sleep(LOOK_EVERY_S)

    def ask_to_leave(self) -> None:
        """Ctrl-C, while it trains: whatever it waits for, it looks up."""
        self.asked_to_leave = True
        self._news.set()

    # ---- steps

    async def train(self) -> None:
        """Until the run is over or this peer is asked to leave."""
        while not (self.asked_to_leave or self.over):
            began_at = self._now()
            await asyncio.sleep(self._pace.step_s * self._rng.uniform(0.9, 1.1))
            if self._first_step_at is None:
                self._first_step_at = began_at
            self.train_s += self._now() - began_at
            await self._after_step()

    async def _after_step(self) -> None:
        entered_at = self._now()
        self._ledger.work.units += 1
        self.inner_steps += 1
        self.tokens += self._pace.tokens
        self._take_outcomes()
        last, self.position = self.position, self._advance(entered_at)
        due = self._account.due(last, self.position, self._node.is_line_full())
        sent = [fragment for fragment in due if self._send(fragment)]
        await self._await_first(sent)
        self.exposed_s += self._now() - entered_at
        if self._now() - self._reported_at >= self._report_every_s:
            self.report()

    def _advance(self, now: float) -> float:
        others = self._node.progress.swarm_position
        if others is not None:
            position, at = others
            self.clock.observe(position + (now - at) / self._run.clock.round_s, now)
        self._advanced_at = now
        return self.clock.position(now, self.inner_steps)

    def _send(self, fragment: int) -> bool:
        if not self._account.may_send(fragment, self._node.stage(fragment) == "asking"):
            reason = "the fragment's previous round is still in flight"
            self._node.report(ev.SendSkipped, fragment=fragment, reason=reason)
            return False
        if self._account.is_held(self._node.stage, self._pace.step_s, self._now()):
            return False
        self._offer(fragment)
        return True

    async def _await_first(self, sent: list[int]) -> None:
        first, open_ = self._account.awaited(sent), self._account.in_flight
        if first:
            await self._wait(lambda: self.asked_to_leave or first.isdisjoint(open_), FIRST_ROUND_BOUND_S)

    def _offer(self, fragment: int) -> None:
        offer_id = self._rng.randbytes(8)
        weight = self._account.send(
            fragment, position=self.position, inner_steps=self.inner_steps, tokens=self.tokens,
            now=self._now(), offer_id=offer_id,
        )  # fmt: skip
        taken = self._account.taken[fragment]
        self._ledger.submit_offer(fragment, self.versions[fragment], taken, weight, offer_id, self._encoded)

    def _encoded(self, fragment: int, offer: Offered, agreed: AgreedVersion) -> None:
        is_last = self._is_flushing or self.over
        base, weight, named = offer.round - 1, offer.weight, offer.offer_id
        self._node.offer(
            Offer(fragment, offer.round, base, agreed.digest, offer.payload, weight, is_last, named)
        )
        self._node.report(
            ev.FragmentSent,
            fragment=fragment,
            round=offer.round,
            payload_bytes=len(offer.payload),
            weight=offer.weight,
            relative_error=0.0,
        )

    # ---- outcomes

    def _take_outcomes(self) -> None:
        while self._ledger.outcomes:
            self._apply(self._ledger.outcomes.popleft())

    def _apply(self, outcome: Outcome) -> None:
        fragment, is_newer = outcome.fragment, outcome.version > self.versions[outcome.fragment]
        sent = self._account.meet(fragment, outcome.version, outcome.ends_offer)
        if not outcome.stepped:
            if is_newer:
                self._account.left_out(fragment)
            return
        self.contributions += outcome.contributed and sent is not None
        lag = self._account.step(
            fragment, sent, float(outcome.contributed),
            position=self.position, inner_steps=self.inner_steps, now=self._now(),
        )  # fmt: skip
        self._node.report(
            ev.FragmentApplied,
            fragment=fragment,
            version=outcome.version,
            contributed=outcome.contributed,
            **asdict(lag),
            gap=1.0,
            gradient_norm=0.0,
            momentum_norm=0.0,
            clipped_share=0.0,
        )

    async def _wait(self, done: Callable[[], bool], bound_s: float, look_every_s: float = math.inf) -> bool:
        """Stand still until ``done`` or the bound; it is asked again at each outcome, and every
        ``look_every_s``."""
        ends_at = self._now() + bound_s
        self._take_outcomes()
        while not done():
            left_s = ends_at - self._now()
            if left_s <= 0:
                return False
            wait_s = max(SHORTEST_WAIT_S, min(left_s, look_every_s))
            alarm = asyncio.get_running_loop().call_later(wait_s, self._news.set)
            try:
                await self._news.wait()
            finally:
                alarm.cancel()
                self._news.clear()
            self._take_outcomes()
        return True

    # ---- the end

    async def flush(self) -> None:
        """As ``Synchroniser.flush``: await what is in flight; if the run is over, offer the rest and wait
        until all agree."""
        entered_at = self._now()
        if not self.over:
            await self._wait(lambda: not self._account.in_flight, LEAVE_BOUND_S)
        else:
            bound_s = self._account.flush_bound_s
            settle_s = settle_bound_s(bound_s)
            self._is_flushing = True
            self._node.report(
                ev.TrainingEnded,
                fragments=tuple(self._account.uncounted(self.tokens)),
                offers_within_s=bound_s,
                settles_within_s=settle_s,
            )
            await self._offer_the_rest(bound_s)
            self.phase = Status.DRAINING
            self.report()
            await self._wait(self._settled, settle_s, SETTLE_LOOK_EVERY_S)
            if self._loads():
                self._node.report(ev.Warned, text=STILL_LOADS)
                await self._wait(lambda: not self._loads(), LOADS_CAP_S, SETTLE_LOOK_EVERY_S)
            if not self.asked_to_leave and (text := self._node.progress.missing()):
                self._node.report(ev.Warned, text=text)
        self.exposed_s += self._now() - entered_at
        self.report()

    def _loads(self) -> bool:
        """As ``NetworkThread.loads``."""
        return not self.asked_to_leave and self._node.progress.is_needed(LOADS_QUIET_S, self._settled())

    def _settled(self) -> bool:
        if self._finished() != self._node.progress.local.finished:
            self._show()  # what is in flight no more is told: until then others wait for our part in it
        known = [agreed.version for agreed in self._node.agreed]
        return self.asked_to_leave or (known == self.versions and self._node.progress.settled)

    async def _offer_the_rest(self, bound_s: float) -> None:
        """As ``Synchroniser._offer_the_rest``."""
        ending, open_ = Ending(self._count, self._now(), bound_s), self._account.in_flight
        while True:
            over = self._node.progress.over
            uncounted = [f for f in self._account.uncounted(self.tokens) if f not in over]
            self._show()
            todo = ending.next(uncounted, open_.keys(), self._now())
            if todo is None:
                return
            for fragment in todo[0]:
                self._offer(fragment)
            in_flight = len(open_)
            await self._wait(lambda: len(open_) < in_flight, todo[1])  # noqa: B023

    def _finished(self) -> frozenset[int]:
        if not self._is_flushing:
            return frozenset()
        offers_on = self.phase == Status.TRAINING
        return self._account.finished(self._account.uncounted(self.tokens) if offers_on else ())

    # ---- figures

    def report(self) -> None:
        now = self._now()
        elapsed_s = now - self._reported_at
        rate = (self.tokens - self._reported_tokens) / elapsed_s if elapsed_s > 0 else 0.0
        self._reported_at, self._reported_tokens = now, self.tokens
        self._show()
        up_bytes, down_bytes = self._traffic()
        fields: dict[str, Any] = {
            "phase": Status.Phase.Name(Status.DRAINING if self._is_flushing else self.phase).lower(),
            "position": self.position,
            "inner_steps": self.inner_steps,
            "tokens": self.tokens,
            "tokens_per_s": rate,
            "loss": math.nan,
            "train_s": self.train_s,
            "exposed_s": self.exposed_s,
            "wall_s": 0.0 if self._first_step_at is None else now - self._first_step_at,
            "up_bytes": up_bytes,
            "down_bytes": down_bytes,
            "versions": tuple(self.versions),
        }
        self._node.report(ev.Progress, **fields)

    def _show(self) -> None:
        finished = self._finished()
        self._node.show(
            LocalProgress(
                self.phase,
                self.position,
                self._advanced_at,
                self.inner_steps,
                self.tokens,
                0.0,
                finished,
                self._is_flushing,
            )
        )
