"""A state that somebody holds while the swarm goes on.

A round that commits gives a fragment new values in the memory of the old ones, unless somebody holds those: a
checkpoint that is on its way to the disk would cost a second copy of all that commits meanwhile. So whoever
holds a state can say how to take what they need of it at once (into the file's pages, at the speed of
memory), and the commit has them do that first.

Law: what was lent does not change before its loan has ended; what they need is taken once; a taking that
fails raises where it was asked for, and leaves the loan open; who asks is served in the order of asking.
Price: a commit may wait for the file's pages, and at most ``SETTLE_S`` for another fragment's; then it takes
memory after all.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

SETTLE_S = 1.0
"""On a busy machine one fragment's share of a checkpoint takes a quarter of a second."""


class Turns:
    """A lock for those who come in the order in which they come. ``threading.Lock`` is had by whoever asks at
    the right moment: a thread that gives it back and takes it again leaves nobody else a turn."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting = deque[threading.Event]()
        self._is_taken = False

    def acquire(self, timeout: float = -1.0) -> bool:
        """As ``threading.Lock.acquire``."""
        with self._lock:
            if not self._is_taken:
                self._is_taken = True
                return True
            mine = threading.Event()
            self._waiting.append(mine)
        if mine.wait(None if timeout < 0 else timeout):
            return True
        with self._lock:
            if mine.is_set():
                return True  # at the last moment
            self._waiting.remove(mine)
        return False

    def release(self) -> None:
        """The next one's turn."""
        with self._lock:
            if self._waiting:
                self._waiting.popleft().set()
            else:
                self._is_taken = False


class Loan:
    """Of one state. Any thread; of loans that share ``busy`` one is settled at a time."""

    def __init__(self, busy: Turns | None = None) -> None:
        self._busy = busy or Turns()
        self._take: Callable[[], None] | None = None
        self._may_end = threading.Event()
        self.has_ended = False

    def offer(self, take: Callable[[], None]) -> None:
        """``take`` takes what they need, in whatever thread comes first."""
        self._take = take
        self._may_end.set()

    def settle(self, within_s: float = -1.0) -> None:
        """Have them take what they need, and end the loan, if they can; not if they cannot yet, or another is
        being settled, for longer than ``within_s`` (-1: wait for the other, not for them)."""
        ends_at = time.monotonic() + within_s
        if within_s > 0:
            self._may_end.wait(within_s)
        if not self._busy.acquire(timeout=max(0.0, ends_at - time.monotonic()) if within_s >= 0 else -1.0):
            return
        try:
            take = self._take
            if take is not None and not self.has_ended:
                self._take = None  # once, also where it fails: it cannot be begun again
                take()
                self._end()
        finally:
            self._busy.release()

    def end(self) -> None:
        """They need nothing (more) of it. When this returns, nobody takes anything for them."""
        self._busy.acquire()
        try:
            self._end()
        finally:
            self._busy.release()

    def _end(self) -> None:
        self.has_ended, self._take = True, None
        self._may_end.set()
