"""How long a download waits for anything at all.

Law: a download for which no missing chunk comes within ``COMES_WITHIN_S``, nor anything for our other
downloads from those it waits for, leaves these for others that promise anything, once until a chunk comes,
or ends, whoever promises what meanwhile. Price: donors that give one chunk each time may hold it up for long.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

MOVES_WITHIN_S = 60.0
"""Donors that say "again" and give us nothing, of anything, are believed for so long: until they give,
promise, or what is loaded is another thing."""
COMES_WITHIN_S = 300.0
"""And those that promise by turns, and then give nothing, for so long."""


class Waiting:
    """When anything moved last, and when any of what was missing came."""

    def __init__(self, now: float) -> None:
        self.moved_at = self._came_at = now
        self._has_gone_on = False

    def moved(self, now: float) -> None:
        """A donor promised or gave something, or others are asked from now on."""
        self.moved_at = now

    def came(self, now: float) -> None:
        """A chunk that was missing is here."""
        self.moved_at = self._came_at = now
        self._has_gone_on = False

    def looks(self, turns: Iterable[float]) -> None:
        """Before it is looked whether to wait on, or a turn is over. ``turns``: when each donor whose turn is
        waited for last gave anything, to whichever download."""
        self._came_at = max(self._came_at, *turns, -math.inf)

    def ends_at(self, turns: Iterable[float]) -> float:
        turn_at = max(turns, default=-math.inf)
        return min(max(self.moved_at, turn_at) + MOVES_WITHIN_S, max(self._came_at, turn_at) + COMES_WITHIN_S)

    def nothing_s(self, now: float) -> float:
        """For so long nothing has come, with whatever donors, or else nothing moved."""
        return COMES_WITHIN_S if now >= self._came_at + COMES_WITHIN_S else MOVES_WITHIN_S

    def goes_on(self, now: float, loses: bool) -> bool:
        """Whether it may go on with others without those that gave nothing (``loses``: there are any); where
        nothing came with whatever donors, once until something does."""
        if now < self._came_at + COMES_WITHIN_S:
            return loses
        if self._has_gone_on:
            return False
        self.came(now)
        self._has_gone_on = True
        return True
