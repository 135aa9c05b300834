"""A state that somebody holds while the swarm goes on.

A round that commits gives a fragment new values in the memory of the old ones, unless somebody holds those: a
checkpoint that is on its way to the disk would cost a second copy of all that commits meanwhile. So whoever
holds a state can say how to take what they need of it at once (into the file's pages, at the speed of
memory), and the commit has them do that first.

Law: what was lent does not change before its loan has ended; what they need is taken once; a taking that
fails raises where it was asked for, and leaves the loan open. Price: a commit may wait for the file's pages,
at most ``SETTLE_S`` for another fragment's; then it takes memory after all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

SETTLE_S = 0.25


class Loan:
    """Of one state. Any thread; of loans that share ``busy`` one is settled at a time."""

    def __init__(self, busy: threading.Lock | None = None) -> None:
        self._busy = busy or threading.Lock()
        self._take: Callable[[], None] | None = None
        self.has_ended = False

    def offer(self, take: Callable[[], None]) -> None:
        """``take`` takes what they need, in whatever thread comes first."""
        self._take = take

    def settle(self, within_s: float = -1.0) -> None:
        """Have them take what they need, and end the loan, if they can; not if another is being settled for
        longer than ``within_s`` (-1: wait for it)."""
        if not self._busy.acquire(timeout=within_s):
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
        with self._busy:
            self._end()

    def _end(self) -> None:
        self.has_ended, self._take = True, None
