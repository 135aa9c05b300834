"""The end of a run: peers offer the rest of their work, then wait until all agree, both bounded.

Training has ended then, so this is the one time at which everybody waits for the network. It lasts as long as
the rounds that are in flight and one more of each fragment, two at a time; a line that is slow for the run's
round makes it long, a peer that is gone makes it end at its bound.
"""

from __future__ import annotations

from collections.abc import Collection
from statistics import median

FLUSH_FLOOR_S, FLUSH_CAP_S = 30.0, 600.0
"""The final flush takes so long at most; or, where that is more, as long as one round of every fragment would
take one after the other, but never longer than the cap."""
SETTLE_S = 25.0
"""Until all live peers agree: longer than a flush by so much, since theirs may begin with our end."""

LOADS_QUIET_S, LOADS_CAP_S = 30.0, FLUSH_CAP_S
"""Then a peer goes, unless it is still needed: it loads a state or gives one, others that are done hold more
or less than it does, or a last round is made. While a chunk came or went within the first it stays, up to the
second. Price: a liar that says to the end that it holds something else keeps the others for so long."""

STILL_LOADS = (
    "the run is over, but a last round is still being made, or not all hold the same yet, or a state or a "
    "missed round is on its way to this peer or from it: it stays for as long as that goes on, at most "
    f"{LOADS_CAP_S:.0f} s more"
)

AGAIN_S = 1.0
"""A fragment is not offered twice within this: one peer alone hears at once that no round begins any
more, and each offer takes a snapshot and its encoding."""


def flush_bound_s(count: int, delays_s: Collection[float]) -> float:
    """How long a peer tries to have the rest of its work counted, in ``count`` fragments. ``delays_s``: what
    its last rounds took, from the offer to the mean."""
    sweep_s = count * median(delays_s) if delays_s else 0.0
    return min(FLUSH_CAP_S, max(FLUSH_FLOOR_S, sweep_s))


def settle_bound_s(flush_s: float) -> float:
    """How long a peer that has nothing more to offer waits until all agree, if its flush took ``flush_s`` at
    most."""
    return flush_s + SETTLE_S


def few_at_once(count: int) -> int:
    """Of ``count`` fragments, how many a peer offers at once when a run is over."""
    return max(2, -(-count // 2))


class Ending:
    """In which order a peer offers the rest of its work, the same on all peers, so that they meet in the same
    rounds: ``bound_s`` long from ``began_at`` on, by the caller's clock.

    Few at once: each holds a snapshot until its round ends, and the lines are busy with two. In the second
    half all at once, for peers that wait for each other with different ones. Law: every fragment's turn
    comes; one that failed is tried again after the others.
    """

    def __init__(self, count: int, began_at: float, bound_s: float) -> None:
        self._ends_at, self._bound_s = began_at + bound_s, bound_s
        self._again_at, self._tries = [began_at] * count, [0] * count

    def next(
        self, uncounted: Collection[int], in_flight: Collection[int], now: float
    ) -> tuple[list[int], float] | None:
        """Fragments to offer now, of those with work that is not counted, and how long to wait then until
        fewer are in flight; None when nothing is left to do."""
        left_s, half_s, count = self._ends_at - now, self._bound_s / 2, len(self._tries)
        if not uncounted or left_s <= 0:
            return None
        in_a_hurry = left_s <= half_s
        waiting = [fragment for fragment in uncounted if fragment not in in_flight]
        early = [fragment for fragment in waiting if now < self._again_at[fragment]]
        ready = sorted(set(waiting) - set(early), key=lambda fragment: (self._tries[fragment], fragment))
        offers = ready[: count if in_a_hurry else max(0, few_at_once(count) - len(in_flight))]
        for fragment in offers:
            self._tries[fragment] += 1
            self._again_at[fragment] = now + AGAIN_S
        soon_s = min((self._again_at[fragment] - now for fragment in early), default=left_s)
        return offers, min(soon_s, left_s if in_a_hurry else left_s - half_s)
