"""A clock that stands while its process stands: suspended, stopped, or starved of the processor.

    clock.wakes_by(at)    before sleeping: by then the process looks at its timers again
    clock.woke()          first thing afterwards
    clock.now()           any time, any thread

Time beyond ``STOOD_S`` after the moment at which it should have woken does not pass for it. So all machines
that reckon with this clock go on as if nothing had been. By what this process slept through nobody is silent,
and no deadline missed. Price: what another does in that time seems quicker than it is.

``within`` is the same for one wait: a limit that is looked at far too late begins anew.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

STOOD_S = 1.0
"""A busy machine may wake a thread so late: that is no standstill."""


class ProcessClock:
    """``monotonic``: seconds that never go back; ``begins_at``: what this clock shows first."""

    def __init__(self, monotonic: Callable[[], float], begins_at: float) -> None:
        self._monotonic = monotonic
        self._ahead_s = begins_at - monotonic()
        self._stands_at = math.inf

    def now(self) -> float:
        return min(self._monotonic() + self._ahead_s, self._stands_at)

    def wakes_by(self, at: float) -> None:
        """The process sleeps until ``at`` at the latest. Nothing where it has yet to see that it stood."""
        if self._monotonic() + self._ahead_s <= self._stands_at:
            self._stands_at = at + STOOD_S

    def woke(self) -> bool:
        """It is awake: time passes again, from where it stood. Whether it had stood."""
        stood_s = max(0.0, self._monotonic() + self._ahead_s - self._stands_at)
        self._ahead_s -= stood_s
        self._stands_at = math.inf
        return stood_s > 0


@asynccontextmanager
async def within(limit_s: float) -> AsyncIterator[None]:
    """As ``asyncio.timeout``; where its timer comes far too late this process stood still, and has yet to
    read what came meanwhile."""
    loop = asyncio.get_running_loop()
    timers = list[asyncio.TimerHandle]()

    def begin() -> None:
        at = loop.time() + limit_s
        timers[:] = [loop.call_at(at, look, at)]

    def look(at: float) -> None:
        if loop.time() - at > STOOD_S:
            begin()
        else:
            limit.reschedule(at)

    async with asyncio.timeout(None) as limit:
        begin()
        try:
            yield
        finally:
            timers[0].cancel()
