"""Which lane waits for which, so that all lanes of an upload end together: arithmetic on times handed in.

A round waits for the last of all lanes. On one line TCP gives each connection what it likes, some twice what
others get, and the last lane of three goes on alone for half a second in which it cannot take what the others
have left: it finds out over tens of round trips. Before, the line has a queue, and each lane more under way
than its share: a lane that waits for a moment is made up for by the others at once. So lanes that have less
left than another wait for it while the line is full without them.

Laws: nobody waits while the line carries less than it has shown it can; a lane that stands still (a lost
packet, a receiver that is slow or gone) is waited for no longer than ``MOVING_S``; where waiting has emptied
the line it is not tried again for ``EMPTIED_S``, so a receiver that is slow by nature costs the others
little; what a peer fetches for itself is neither waited for nor held up. Price: nobody waits on a line that
has not carried anything for ``STARTS_S`` yet; what a lane was handed is known, and not what has left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Protocol

AHEAD_S = 0.02
"""A lane is ahead of another if it has less left by more than what the line carries in so long."""
FULL, FULL_S = 0.75, 0.3
"""A line that took this share of the most it has ever carried over so long is full: what it carries in single
stretches is more than it can, since queues fill and empty."""
STARTS_S, PAUSE_S = 0.6, 0.2
"""What comes first after a pause fills buffers and says nothing of the line."""
BURSTS_KEPT = 4
"""Between two pauses is a burst: of so many the fastest stretch is what the line can carry."""
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
        self._began_at = self._last_at = -1e9
        self._most_bytes = deque([0], BURSTS_KEPT)
        """In ``FULL_S``, burst by burst."""
        self._emptied_at = -1e9
        self._has_held = False

    def took(self, size_bytes: int, now: float) -> None:
        """A lane took bulk."""
        if now - self._last_at > PAUSE_S:
            self._began_at = now
            self._most_bytes.append(0)
        self._last_at = now
        self._taken.append((now, size_bytes))
        self._taken_bytes += size_bytes
        self._forget(now)
        if now - self._began_at > STARTS_S:
            self._most_bytes[-1] = max(self._most_bytes[-1], self._taken_bytes)

    def is_ahead(self, lane: Carried, lanes: Iterable[Carried], now: float) -> bool:
        """Whether ``lane`` is to wait for others of ``lanes``."""
        most_bytes = max(self._most_bytes)
        if not most_bytes or now - self._emptied_at < EMPTIED_S or _is_fetched(lane, now):
            return False
        moving = [one for one in lanes if now - one.moved_at < MOVING_S and not _is_fetched(one, now)]
        most_left = max((one.bulk_bytes for one in moving), default=0)
        if most_left - lane.bulk_bytes <= AHEAD_S / FULL_S * most_bytes:
            return False
        self._forget(now)
        if self._taken_bytes >= FULL * most_bytes:
            self._has_held, lane.moved_at = True, now
            return True
        if self._has_held:
            self._emptied_at, self._has_held = now, False
        return False

    def _forget(self, now: float) -> None:
        while self._taken and self._taken[0][0] < now - FULL_S:
            self._taken_bytes -= self._taken.popleft()[1]


def _is_fetched(lane: Carried, now: float) -> bool:
    return now - lane.fetched_at < FETCHED_S
