"""Schedule points on the swarm's position, which counts rounds.

Fragment f of P has a point at every ``r + f / P`` above 0, r a whole number (Streaming DiLoCo, arXiv
2501.18512): sends are spread evenly over a round, so the peak bandwidth falls by P. Points are numbered as
ticks, ``t = r * P + f``, t >= 1.

Laws: a fragment's points are passed in order, each counted once. Price: after a long sleep a peer jumps over
points instead of making them up: the work of that time goes into its next offers.
"""

from __future__ import annotations

import math

_TOLERANCE = 1e-6
"""Ticks by which a point may come early: the position is steps / H in floating point, and 3 * (1 / 3) must
count as 1."""


def points_passed(fragment: int, count: int, position: float) -> int:
    """How many schedule points of ``fragment`` (of ``count``) lie at or before ``position``, in rounds."""
    ticks = last_tick(count, position)
    return ticks // count if fragment == 0 else (ticks - fragment + count) // count


def due(count: int, last_position: float, position: float) -> tuple[int, ...]:
    """Fragments (of ``count``) that passed a point after ``last_position``, up to ``position``, in the
    order of their points.

    Each at most once: a peer that slept through several rounds sends each fragment once.
    """
    first, last = last_tick(count, last_position) + 1, last_tick(count, position)
    return tuple(tick % count for tick in range(first, min(last, first + count - 1) + 1))


def last_tick(count: int, position: float) -> int:
    """The number of the last point at or before ``position``, of all ``count`` fragments; 0 before the
    first."""
    return max(0, math.floor(position * count + _TOLERANCE))
