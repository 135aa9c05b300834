"""When fragments are sent: schedule points on the swarm's position, and the clock that says the position.

The position counts rounds. Fragment f of P has a point at every ``r + f / P`` above 0, r a whole number
(Streaming DiLoCo, arXiv 2501.18512): sends are spread evenly over a round, so the peak bandwidth falls by
P. Points are numbered as ticks, ``t = r * P + f``, t >= 1.

Laws: positions never fall; a fragment's points are passed in order, each counted once; nothing here reads a
clock.

Price: after a long sleep a peer jumps over points instead of making them up: the work of that time goes
into its next offers.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from statistics import median

from p2p_co2.config import ClockConfig

_TOLERANCE = 1e-6
"""Ticks by which a point may come early: the position is steps / H in floating point, and 3 * (1 / 3) must
count as 1."""
_SLEW = 0.1
"""The largest correction of the clock's rate."""
_JUMP_ROUNDS = 1.0
"""A clock that is further behind than this jumps forward."""
FLUSH_FLOOR_S, FLUSH_CAP_S = 30.0, 600.0
"""The final flush of a run that is over takes so long at most; or, where that is more, as long as one round
of every fragment would take one after the other (two are under way at once), but never longer than the
cap."""
SETTLE_S = 25.0
"""Until all live peers agree: longer than a flush by so much, since theirs may begin with our end."""
COUNCIL_SETTLE_S = 60.0
"""The same on top over several cells: a last round gathers twice there, and then states travel."""


def flush_bound_s(count: int, delays_s: Collection[float]) -> float:
    """How long a peer tries to have the rest of its work counted, in ``count`` fragments. ``delays_s``: what
    its last rounds took, from the offer to the mean."""
    sweep_s = count * median(delays_s) if delays_s else 0.0
    return min(FLUSH_CAP_S, max(FLUSH_FLOOR_S, sweep_s))


def settle_bound_s(flush_s: float, cells: int) -> float:
    """How long a peer that has nothing more to offer waits until all agree, if its flush took ``flush_s`` at
    most."""
    return flush_s + SETTLE_S + (COUNCIL_SETTLE_S if cells > 1 else 0.0)


def points_passed(fragment: int, count: int, position: float) -> int:
    """How many schedule points of ``fragment`` (of ``count``) lie at or before ``position``, in rounds."""
    ticks = _ticks(count, position)
    return ticks // count if fragment == 0 else (ticks - fragment + count) // count


def due(count: int, last_position: float, position: float) -> tuple[int, ...]:
    """Fragments (of ``count``) that passed a point after ``last_position``, up to ``position``, in the
    order of their points.

    Each at most once: a peer that slept through several rounds sends each fragment once.
    """
    first, last = _ticks(count, last_position) + 1, _ticks(count, position)
    return tuple(tick % count for tick in range(first, min(last, first + count - 1) + 1))


def _ticks(count: int, position: float) -> int:
    return max(0, math.floor(position * count + _TOLERANCE))


class LastOffers:
    """The order in which a peer offers the rest of its work when a run is over: the same on all peers, so
    that they meet in the same rounds.

    Few at once: each holds a snapshot until its round ends, and here no training lies between one and the
    next; the lines are busy with two. When time runs short all at once, for peers that wait for each other
    with different ones. Law: every fragment's turn comes; one that failed is tried again after the others.
    """

    def __init__(self, count: int) -> None:
        self._few = max(2, -(-count // 2))
        self._tries = [0] * count

    def next(self, uncounted: Collection[int], in_flight: Collection[int], in_a_hurry: bool) -> list[int]:
        """Fragments to offer now: of those with work that is not counted (``uncounted``), and not
        ``in_flight``."""
        room = len(self._tries) if in_a_hurry else max(0, self._few - len(in_flight))
        waiting = [fragment for fragment in uncounted if fragment not in in_flight]
        chosen = sorted(waiting, key=lambda fragment: (self._tries[fragment], fragment))[:room]
        for fragment in chosen:
            self._tries[fragment] += 1
        return chosen


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
        reach = _SLEW * elapsed
        slewed = max(-reach, min(reach, self._correction))
        self._correction -= slewed
        self._position += elapsed + slewed
        self._at = max(self._at, now)
