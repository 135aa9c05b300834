"""The time in which this process ran: a clock that stands when it does, as between SIGSTOP and SIGCONT.

A stop is known by a timers' task that runs later than it was to, and counts from when this process did
anything last. Law: it is counted once, and before anything that comes after it is judged. Price: what it was
idle for before the stop counts as standing, too, and a process that is late by more than ``STOOD_STILL_S`` at
every turn lives slowly by this clock.
"""

from __future__ import annotations

import math

STOOD_STILL_S = 3.0
"""A timers' task that is later than this did not wait for its turn: the process stood still."""


class Awake:
    """Times in seconds, by the process's own clock. ``stood_s``: for how long it stood so far."""

    def __init__(self) -> None:
        self.stood_s = 0.0
        self._due_at, self._ran_at = math.inf, -math.inf

    def runs(self, now: float) -> None:
        """This process does something: before it judges anybody's silence."""
        if now > self._due_at + STOOD_STILL_S:
            self.stood_s += now - self._ran_at
            self._due_at = now
        self._ran_at = max(self._ran_at, now)

    def begins(self, now: float) -> None:
        """A turn of the timers' task, which takes no time to speak of but for a stop amid it."""
        self.runs(now)
        self._due_at = now

    def ends(self, now: float) -> None:
        """That turn."""
        self.runs(now)
        self._due_at = math.inf

    def is_due(self, at: float) -> None:
        """The timers' task is to run then, or sooner."""
        self._due_at = min(self._due_at, at)

    def of(self, now: float) -> float:
        """``now`` by this clock, which never goes back: not where ``now`` is from before a stop either."""
        self.runs(now)
        return self._ran_at - self.stood_s

    def seen(self, now: float) -> float:
        """As ``of``, for other threads: nothing is noticed by it."""
        return (self._ran_at if now > self._due_at + STOOD_STILL_S else now) - self.stood_s

    def until(self, at: float) -> float:
        """When it will be ``at`` by this clock, unless the process stands meanwhile; whatever the sum is
        rounded to, ``of`` that is not before ``at``."""
        return math.nextafter(at + self.stood_s, math.inf) if self.stood_s else at
