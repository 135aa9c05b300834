"""The swarm's clock, where the swarm is in rounds as one peer estimates it, and the schedule points on it.

Fragment f of P has a point at every ``r + f / P`` above 0, r a whole number (Streaming DiLoCo, arXiv
2501.18512): sends are spread evenly over a round, so the peak bandwidth falls by P. Points are numbered as
ticks, ``t = r * P + f``, t >= 1.

Laws: positions never fall; a fragment's points are passed in order, each counted once; nothing here reads a
clock. Price: after a long sleep a peer jumps over points: the work of that time goes into its next offers.
"""

from __future__ import annotations

import math

from p2p_co2.config import ClockConfig

_TOLERANCE = 1e-6
"""Ticks by which a point may come early: the position is steps / H in floating point, and 3 * (1 / 3) must
count as 1."""
SLEW = 0.1
"""The largest correction of the clock's rate."""
_JUMP_ROUNDS = 1.0
"""A clock that is further behind than this jumps forward."""


class SwarmClock:
    """This peer's estimate of the swarm's position, in rounds.

    Mode "steps": inner steps / ``inner_steps_per_round``, counted from ``start``; other peers do not matter.

    Mode "time": one round per ``round_s``, drawn gently towards the median of the other peers. Only
    positions and durations travel between peers, never dates: a wrong date, a time zone or a clock set by
    hand changes nothing, and one lying peer cannot move a median. ``now`` is any local clock in seconds
    that does not go back.
    """

    def __init__(self, config: ClockConfig) -> None:
        self._config = config
        self.start(0.0, 0.0)

    def start(self, position: float, now: float, inner_steps: int = 0) -> None:
        """Begin at ``position`` (0 in a new run, the swarm's for a late joiner, the checkpoint's on resume).

        ``inner_steps`` is this peer's own count at that moment.
        """
        self._position, self._at = position, now
        self._inner_steps = inner_steps
        self._correction = 0.0

    def position(self, now: float, inner_steps: int) -> float:
        """The position at ``now``, after ``inner_steps`` inner steps of this peer. Never falls."""
        if self._config.mode == "steps":
            steps = max(0, inner_steps - self._inner_steps)
            return self._position + steps / self._config.inner_steps_per_round
        self._advance(now)
        return self._position

    def observe(self, others: float, now: float) -> None:
        """Take in ``others``, the median of the other peers' positions, estimated for ``now`` (their last
        word plus its age in rounds).

        The clock then runs up to 10 % faster or slower until the difference is gone. More than a round
        behind (a laptop that slept), it jumps forward; it never goes back. Does nothing in mode "steps" or
        if ``others`` is not finite.
        """
        if self._config.mode == "steps" or not math.isfinite(others):
            return
        self._advance(now)
        difference = others - self._position
        if difference > _JUMP_ROUNDS:
            self._position, difference = others, 0.0
        self._correction = difference

    def _advance(self, now: float) -> None:
        elapsed = max(0.0, now - self._at) / self._config.round_s
        reach = SLEW * elapsed
        slewed = max(-reach, min(reach, self._correction))
        self._correction -= slewed
        self._position += elapsed + slewed
        self._at = max(self._at, now)


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
