"""What a node asks the DHT for beside its machines: nobody waits for it, and a node that stops ends it.

With the seeds down one question takes half a minute, and who leaves is to be gone in seconds. Price: what a
peer decided last may not be found in the DHT.
"""

from __future__ import annotations

import asyncio


class Errands:
    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def end(self, within_s: float) -> None:
        """Let them come to their end, but no longer than this."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=within_s)
        for task in self._tasks:
            task.cancel()
