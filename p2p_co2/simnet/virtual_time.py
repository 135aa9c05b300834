"""Virtual time: one clock and one queue for a whole swarm, and an asyncio loop for each process in it.

The clock jumps to the next timer, so an hour in which nothing happens costs nothing. Each simulated process
has a loop of its own over the common queue, because processes fail one by one: a stalled one (SIGSTOP) keeps
its callbacks until it goes on, a dead one loses them.

Laws: callbacks run in the order of their times, equal times in the order in which they were asked for, and
nothing here reads a real clock, a thread or a socket. A callback that raises ends the simulation with its
traceback. Price: callbacks run in no ``contextvars`` context of their own.
"""

from __future__ import annotations

import asyncio
import heapq
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterable
from contextvars import Context
from dataclasses import dataclass
from typing import Any, TypeVar

from p2p_co2.errors import LocalProtocolError

_T = TypeVar("_T")
LATE_S = 1e-6
"""A timer is never early, not even by what a float of seconds since 1970 cannot tell: who is woken before its
time finds nothing to do, and sleeps again."""


@dataclass(slots=True, eq=False)
class Handle:
    """A callback that waits for its turn; what asyncio needs of its own class of this name."""

    callback: Callable[..., object] | None
    args: tuple[Any, ...]
    loop: ProcessLoop | None

    def cancel(self) -> None:
        self.callback = None
        self.args = ()

    def cancelled(self) -> bool:
        return self.callback is None


class VirtualTime:
    """The clock and the queue. ``now`` in seconds since the simulation began; ``turns``: callbacks run so
    far; ``ready``: to run now; ``errors``: of tasks that failed with nobody looking."""

    def __init__(self) -> None:
        self.now = 0.0
        self.turns = 0
        self.errors: list[str] = []
        self._heap: list[tuple[float, int, Handle]] = []
        self.ready: deque[Handle] = deque()
        self._asked = 0
        self._stopped = False

    def soon(self, callback: Callable[..., object], args: tuple[Any, ...], loop: ProcessLoop) -> Handle:
        """Run it in the process of ``loop`` as soon as what waits has run."""
        self.ready.append(handle := Handle(callback, args, loop))
        return handle

    def at(
        self, when: float, callback: Callable[..., object], args: tuple[Any, ...],
        loop: ProcessLoop | None = None,
    ) -> Handle:  # fmt: skip
        """Run it at ``when``, or now if that has passed, in the process of ``loop``; None: it happens to the
        world, not in a process."""
        self._asked += 1
        handle = Handle(callback, args, loop)
        heapq.heappush(self._heap, (when if when > self.now else self.now, self._asked, handle))
        return handle

    def call_at(self, when: float, callback: Callable[..., object], *args: Any) -> Handle:
        return self.at(when, callback, args)

    def stop(self) -> None:
        """Let ``run`` return after the callback that is running now, or before its first."""
        self._stopped = True

    def run(self, until: float) -> None:
        """Run callbacks up to and at ``until``, or until ``stop``, or until nothing is left to do."""
        ready = self.ready
        heap = self._heap
        before = events._get_running_loop()
        current = None
        events._set_running_loop(None)
        try:
            while not self._stopped:
                if ready:
                    handle = ready.popleft()
                elif heap and heap[0][0] <= until:
                    self.now, _, handle = heapq.heappop(heap)
                    if handle.loop is not None and handle.loop.dead:
                        continue
                else:
                    break
                callback = handle.callback
                loop = handle.loop
                if callback is None:
                    continue
                if loop is not None and loop.held is not None:
                    loop.held.append(handle)
                    continue
                if loop is not current:
                    events._set_running_loop(loop)
                    current = loop
                self.turns += 1
                callback(*handle.args)
                if loop is not None and (after_turn := loop.after_turn) is not None:
                    after_turn()
        finally:
            events._set_running_loop(before)
        if not self._stopped:
            self.now = max(self.now, until)
        self._stopped = False

    def unwind(self) -> None:
        """Run what is left to do of processes that died; no time passes."""
        self._stopped = False
        self.run(until=-1.0)


class ProcessLoop(asyncio.AbstractEventLoop):
    """The asyncio loop of one simulated process: what tasks, futures, ``sleep`` and ``timeout`` ask of
    one. ``after_turn`` is called when a turn of the process has ended; ``held``: callbacks that became due
    while it is stalled, None while it runs."""

    def __init__(self, world: VirtualTime, rate: float = 1.0) -> None:
        self._world = world
        self._rate = rate
        self.held: list[Handle] | None = None
        self.after_turn: Callable[[], None] | None = None
        self.dead = False

    def stall(self) -> None:
        """Stand still, as after SIGSTOP."""
        if self.held is None:
            self.held = []

    def go_on(self) -> None:
        """SIGCONT: everything that became due meanwhile runs now, in order."""
        self._world.ready.extend(self.held or ())
        self.held = None

    def die(self, tasks: Iterable[asyncio.Task[Any]]) -> None:
        """Its ``tasks`` are cancelled and unwound now, and no timer or message reaches it any more. The
        caller has cut it off before: what its ``finally`` blocks send and say must not leave it."""
        self.dead = True
        self.after_turn = None
        self.go_on()
        self._unwind(tasks, 100)

    def _unwind(self, tasks: Iterable[asyncio.Task[Any]], turns_left: int) -> None:
        left = [task for task in tasks if not task.done()]
        if left and not turns_left:
            raise LocalProtocolError("a simulated process does not end when its tasks are cancelled")
        for task in left:
            task.cancel()  # again, should one have answered the first time by waiting for another
        if left:
            self.call_soon(self._unwind, left, turns_left - 1)

    # ---- asyncio's side

    def time(self) -> float:
        return self._world.now

    def call_soon(  # type: ignore[override]  # asyncio's handles have more than anybody asks for
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Handle:
        return self._world.soon(callback, args, self)

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Handle:
        return self._world.at(when, callback, args, self)

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Handle:
        return self._world.at(self._world.now + delay / self._rate + LATE_S, callback, args, self)

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self, coro: Coroutine[Any, Any, _T] | Generator[Any, None, _T], *, name: str | None = None,
        context: Context | None = None,
    ) -> asyncio.Task[_T]:  # fmt: skip
        return asyncio.Task(coro, loop=self, name=name)

    def get_debug(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self._world.errors.append(f"{context.get('message')}: {context.get('exception')!r}")


def loop_of(world: VirtualTime, rate: float = 1.0) -> ProcessLoop:
    """The loop of a new process; its machine's clock makes ``rate`` seconds of one."""
    return ProcessLoop(world, rate)  # type: ignore[abstract]  # what nobody asks of a loop is left out
