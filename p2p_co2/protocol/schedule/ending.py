"""The end of a run: peers offer the rest of their work, then wait until all agree, both bounded.

Training has ended then, so this is the one time at which everybody waits for the network. It lasts as long as
the rounds that are in flight and one more of each fragment, two at a time; a line that is slow for the run's
round makes it long, a peer that is gone makes it end at its bound.
"""

from __future__ import annotations

from collections.abc import Collection
from statistics import median

FLUSH_FLOOR_S, FLUSH_CAP_S = 30.0, 600.0
"""The final flush of a run that is over takes so long at most; or, where that is more, as long as one round
of every fragment would take one after the other (two are under way at once), but never longer than the
cap."""
SETTLE_S = 25.0
"""Until all live peers agree: longer than a flush by so much, since theirs may begin with our end."""

LOADS_QUIET_S, LOADS_CAP_S = 30.0, FLUSH_CAP_S
"""Then a peer goes, unless it loads a state or gives one, or others that are done hold more or less than it
does, or a last round is made, which it would miss: while a chunk came or went, or one was made, within the
first it stays, up to the second. Who is far behind needs minutes for what the others hold, and ends with what
it has once they are gone; who joined late would have none. Where all others agree only such a newcomer is
waited for, until nothing has moved for three times the first. Price: who says to the end that its last round
is not over, or that it holds something else, keeps the others for so long."""

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


class LastOffers:
    """The order in which a peer offers the rest of its work when a run is over: the same on all peers, so
    that they meet in the same rounds.

    Few at once: each holds a snapshot until its round ends, and here no training lies between one and the
    next; the lines are busy with two. When time runs short all at once, for peers that wait for each other
    with different ones. Law: every fragment's turn comes; one that failed is tried again after the others.
    """

    def __init__(self, count: int) -> None:
        self._few = few_at_once(count)
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


class Ending:
    """What a peer does from the last step on, until its work is counted or its time is up. ``bound_s`` from
    ``began_at`` on, by the caller's clock: in its first half few offers at once, then all."""

    def __init__(self, count: int, began_at: float, bound_s: float) -> None:
        self._offers, self._ends_at, self._bound_s = LastOffers(count), began_at + bound_s, bound_s
        self._again_at = [began_at] * count

    def next(
        self, uncounted: Collection[int], in_flight: Collection[int], now: float
    ) -> tuple[list[int], float] | None:
        """Fragments to offer now, and how long to wait then until fewer are in flight; None when nothing is
        left to do."""
        left_s, half_s = self._ends_at - now, self._bound_s / 2
        if not uncounted or left_s <= 0:
            return None
        in_a_hurry = left_s <= half_s
        early = {f for f in uncounted if now < self._again_at[f] and f not in in_flight}
        offers = self._offers.next([f for f in uncounted if f not in early], in_flight, in_a_hurry)
        for fragment in offers:
            self._again_at[fragment] = now + AGAIN_S
        soon_s = min((self._again_at[fragment] - now for fragment in early), default=left_s)
        return offers, min(soon_s, left_s if in_a_hurry else left_s - half_s)
