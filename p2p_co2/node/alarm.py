"""When the node looks at its timers next: one sleeper, woken at the earliest time that anybody names."""

from __future__ import annotations

import asyncio
import math

from p2p_co2.system.clock import ProcessClock


class Alarm:
    """``sleep`` is for one task; ``ring_by`` for anybody on its loop, at no cost but for an earlier time."""

    def __init__(self, clock: ProcessClock) -> None:
        self._clock = clock
        self._rung = asyncio.Event()
        self._at = -math.inf
        """Until when the task sleeps; it looks for the next time itself as long as it is awake."""
        self._handle: asyncio.TimerHandle | None = None

    async def sleep(self, until: float) -> bool:
        """Until then, or an earlier time that is named meanwhile. Whether the process has stood still."""
        self._rung.clear()
        self._at = math.inf
        self.ring_by(until)
        try:
            await self._rung.wait()
        finally:
            self._at = -math.inf
        return self._clock.woke()

    def ring_by(self, at: float) -> None:
        """Let it sleep no longer than until ``at``."""
        if at >= self._at:
            return
        self._at = at
        if self._handle is not None:
            self._handle.cancel()
        wait_s = max(0.001, at - self._clock.now())
        self._clock.wakes_by(self._clock.now() + wait_s)
        self._handle = asyncio.get_running_loop().call_later(wait_s, self._rung.set)  # cheaper than a timeout

    @property
    def is_awake(self) -> bool:
        """Whether nobody need wake the task."""
        return self._at == -math.inf
