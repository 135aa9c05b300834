"""How long a download waits for anything at all.

Law: a download to which no chunk comes for ``COMES_WITHIN_S`` ends, whoever promises what meanwhile.
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

    def moved(self, now: float) -> None:
        """A donor promised or gave something, or others are asked from now on."""
        self.moved_at = now

    def came(self, now: float) -> None:
        """A chunk that was missing is here."""
        self.moved_at = self._came_at = now

    def ends_at(self, turns: Iterable[float]) -> float:
        """``turns``: when each donor whose turn is waited for last gave anything, to whichever download."""
        turn_at = max(turns, default=-math.inf)
        return min(max(self.moved_at, turn_at) + MOVES_WITHIN_S, self._longest_at(turn_at))

    def nothing_s(self, now: float, turns: Iterable[float]) -> float:
        """For so long nothing has come, which is too long with whatever donors, or else nothing moved."""
        longest_at = self._longest_at(max(turns, default=-math.inf))
        return COMES_WITHIN_S if now >= longest_at else MOVES_WITHIN_S

    def _longest_at(self, turn_at: float) -> float:
        return max(self._came_at, turn_at) + COMES_WITHIN_S
