"""Which lane waits for which, so that all lanes of an upload end together: arithmetic on times handed in.

A round waits for the last of all lanes. On one line TCP gives each connection what it likes, some twice what
others get, and the last lane of three goes on alone for half a second in which it cannot take what the others
have left: it finds out over tens of round trips. Between two lanes that both have enough to carry a full line
does not mind which of them is served. So the lane that has least left waits for the others while the line is
full without it.

Laws: nobody waits while the line carries less than it has shown it can; a lane that stands still (a lost
packet, a receiver that is slow or gone) is waited for no longer than ``MOVING_S``; where waiting has emptied
the line it is not tried again for ``EMPTIED_S``, so a receiver that is slow by nature costs the others next
to nothing; what a peer fetches for itself is neither waited for nor held up. Price: no lane waits before an
upload was measured; which lane is served is known by what it was handed, and TCP holds a tenth of a second.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Protocol

AHEAD_S = 0.02
"""A lane is ahead of another if it has less left by more than what the line carries in so long."""
FULL, FULL_S = 0.85, 0.3
"""A line that took this share of what it can, over so long, is full."""
MOVING_S = 0.15
"""A lane that took nothing for so long stands still."""
EMPTIED_S = 1.0
FETCHED_S = 5.0
"""A lane counts as fetched from for so long after a message that its peer had asked for."""


class Carried(Protocol):
    """A lane, as far as it matters here. Times on the clock of ``now``."""

    bulk_bytes: int
    """What it has left to carry."""
    moved_at: float
    """When it took bulk last, or waited for others with it."""
    fetched_at: float
    """When something was put into it that its peer had asked for."""


class Evenness:
    """Of all lanes of one upload."""

    def __init__(self) -> None:
        self._taken: deque[tuple[float, int]] = deque()
        self._taken_bytes = 0
        """Of the last ``FULL_S``, by all lanes."""
        self._emptied_at = -1e9
        self._has_held = False

    def took(self, size_bytes: int, now: float) -> None:
        """A lane took bulk."""
        self._taken.append((now, size_bytes))
        self._taken_bytes += size_bytes
        self._forget(now)

    def is_ahead(self, lane: Carried, lanes: Iterable[Carried], line_bytes_per_s: float, now: float) -> bool:
        """Whether ``lane`` is to wait for others of ``lanes``. ``line_bytes_per_s``: what the line has shown
        it can carry, 0 if nothing is known."""
        if not line_bytes_per_s or now - self._emptied_at < EMPTIED_S or _is_fetched(lane, now):
            return False
        moving = [one for one in lanes if now - one.moved_at < MOVING_S and one.bulk_bytes]
        moving = [one for one in moving if not _is_fetched(one, now)]
        if not moving or min(moving, key=_left) is not lane:
            return False
        if max(map(_left, moving)) - lane.bulk_bytes <= AHEAD_S * line_bytes_per_s:
            return False
        if self._is_full(line_bytes_per_s, now):
            self._has_held, lane.moved_at = True, now
            return True
        if self._has_held:
            self._emptied_at, self._has_held = now, False
        return False

    def _is_full(self, line_bytes_per_s: float, now: float) -> bool:
        self._forget(now)
        return self._taken_bytes >= FULL * FULL_S * line_bytes_per_s

    def _forget(self, now: float) -> None:
        while self._taken and self._taken[0][0] < now - FULL_S:
            self._taken_bytes -= self._taken.popleft()[1]


def _left(lane: Carried) -> int:
    return lane.bulk_bytes


def _is_fetched(lane: Carried, now: float) -> bool:
    return now - lane.fetched_at < FETCHED_S
