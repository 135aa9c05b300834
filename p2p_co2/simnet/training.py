"""The training thread of a simulated peer: the real ``Synchroniser`` over units of work, on virtual time.

It steps at its own speed and goes through the synchroniser's waits without blocking a thread. Law: it talks
to the node through ``trainer.network_thread.NodeView``, as a real peer does.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

from p2p_co2.config import RunConfig
from p2p_co2.errors import TransportError
from p2p_co2.simnet.ledger import CountingLedger, CountingModel
from p2p_co2.trainer.arrival import GATHER_BOUND_S, Arrival, caught_up
from p2p_co2.trainer.network_thread import NodeView
from p2p_co2.trainer.synchroniser import Progressed, Source, Synchroniser

LOOK_EVERY_S = 0.25
"""How often a training thread that waits for others looks where they are."""


@dataclass(frozen=True)
class Pace:
    """How fast a peer trains: seconds and tokens per inner step."""

    step_s: float
    tokens: int


class Training:
    """Of one process, from ``arrive`` on. ``rng`` makes steps uneven and names offers."""

    def __init__(
        self, run: RunConfig, view: NodeView, ledger: CountingLedger, pace: Pace, rng: random.Random
    ) -> None:
        self._run, self._view, self._ledger, self._pace, self._rng = run, view, ledger, pace, rng
        self._now = view.node.clock.monotonic
        self._news = asyncio.Event()
        ledger.on_outcome = self._news.set
        self._sync: Synchroniser | None = None

    @property
    def sync(self) -> Synchroniser:
        """Once it has arrived."""
        assert self._sync is not None
        return self._sync

    @property
    def asked_to_leave(self) -> bool:
        return self._sync is not None and self._sync.stopped

    @property
    def is_over(self) -> bool:
        return self.sync.account.is_over(self.sync.position)

    async def arrive(self, start: Progressed, min_peers: int) -> bool:
        """Wait for ``min_peers``, then until this peer is where the swarm is or is sure to be alone; False if
        that takes too long, or if the others went before this peer had what they had."""
        node, began_at = self._view.node, self._now()
        while node.live_peers() < min_peers - 1:
            if self._now() - began_at > GATHER_BOUND_S:
                return False
            await asyncio.sleep(LOOK_EVERY_S)
        try:
            await self._await_arrival(Arrival(node, self._now()))
        except TransportError:
            return False
        start = caught_up(start, self._view.swarm_position(), self._run.clock, self._now())
        model: Any = CountingModel(self._ledger.work, [agreed.version for agreed in self._ledger.agreed()])
        source = Source(self._now, lambda: self._rng.randbytes(8))
        self._sync = Synchroniser(self._run, model, cast(Any, self._ledger), self._view, start, source)
        self._sync.take_outcomes()
        self._sync.report()
        return True

    async def _await_arrival(self, arrival: Arrival) -> None:
        while True:
            if arrival.is_there(self._now()):
                return
            await asyncio.sleep(LOOK_EVERY_S)

    def ask_to_leave(self) -> None:
        """Ctrl-C, while it trains: whatever it waits for, it looks up."""
        self.sync.stopped = True
        self._news.set()

    async def train(self) -> None:
        """Until the run is over or this peer is asked to leave."""
        while not (self.sync.stopped or self.is_over):
            await asyncio.sleep(self._pace.step_s * self._rng.uniform(0.9, 1.1))
            self._ledger.work.units += 1
            await self._stand_still(self.sync.step_waits(self._pace.tokens, math.nan))

    async def flush(self) -> None:
        """As ``Synchroniser.flush``."""
        await self._stand_still(self.sync.flush_waits(self.is_over))

    async def _stand_still(self, waits: Iterator[float]) -> None:
        """As ``synchroniser.stand_still``; looks are rarer than a real thread's, which cost nothing."""
        for wait_s in waits:
            loop = asyncio.get_running_loop()
            alarm = loop.call_later(max(wait_s, LOOK_EVERY_S), self._news.set)
            try:
                await self._news.wait()
            finally:
                alarm.cancel()
                self._news.clear()

    def progressed(self) -> Progressed:
        """What its checkpoint says of it."""
        return Progressed(self.sync.position, self.sync.inner_steps, self.sync.tokens)
