"""How long to wait, from what was measured: nobody sets a timeout by hand.

Laws: every deadline lies between its floor and its cap; it grows when arrivals get later, also when they came
too late to be used (a late arrival is a measurement); one outlier among many moves it little (median and MAD,
Hampel 1974).

The READY deadline looks at the *last* arrival of each past round, not at all arrivals: with three quick peers
and one that is always five seconds late the median of all arrivals would shut the late one out for ever, and
waiting is cheap here because the answer is one step stale anyway. The price: one always-slow peer sets the
pace, up to the cap.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from statistics import median

from p2p_co2.rounds import bounds

WINDOW = 16
"""Past rounds that a deadline looks at."""
SPREADS = 4.0
"""MADs above the median."""
MARGIN = 0.25
"""At least this share of the median on top: equal arrivals have no spread but the next one has jitter."""
SAFETY = 4.0
"""A link is allowed to be this much slower than its measured rate."""
SLOWEST_SHARE = 1 / 16
"""A claim below this share of the median rate does not slow the round down: that peer will miss it."""


def adaptive_deadline_s(samples: Sequence[float], default_s: float, floor_s: float, cap_s: float) -> float:
    """``median + max(4 MAD, median / 4)`` of the samples (seconds), within floor and cap; ``default_s``
    without any."""
    if not samples:
        return min(max(default_s, floor_s), cap_s)
    middle = median(samples)
    spread = median(abs(sample - middle) for sample in samples)
    return min(max(middle + max(SPREADS * spread, MARGIN * middle), floor_s), cap_s)


class Durations:
    """The last ``WINDOW`` measured durations of one kind, in seconds."""

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=WINDOW)

    def add(self, duration_s: float) -> None:
        self._samples.append(max(0.0, duration_s))

    def deadline_s(self, default_s: float, floor_s: float, cap_s: float) -> float:
        return adaptive_deadline_s(tuple(self._samples), default_s, floor_s, cap_s)


class ReadyHistory:
    """When the last READY of each past round of one fragment came, counted from the first."""

    def __init__(self) -> None:
        self._rounds: OrderedDict[int, tuple[float, float]] = OrderedDict()

    def arrived(self, round_: int, now: float) -> None:
        first_at, _ = self._rounds.get(round_, (now, now))
        self._rounds[round_] = (first_at, now)
        while len(self._rounds) > WINDOW:
            self._rounds.popitem(last=False)

    def forget(self, round_: int) -> None:
        """A new attempt at the same round counts afresh."""
        self._rounds.pop(round_, None)

    def deadline_s(self, round_: int) -> float:
        """Seconds to wait from the first READY of ``round_``, measured on the other rounds."""
        past = [last - first for key, (first, last) in self._rounds.items() if key != round_ and last > first]
        return adaptive_deadline_s(past, bounds.GATHER_DEFAULT_S, bounds.GATHER_FLOOR_S, bounds.GATHER_CAP_S)


def expected_transfer_s(payload_bytes: int, uploads_bytes_per_s: Iterable[float]) -> float:
    """Seconds in which the slowest credible member uploads a payload. Rates of 0 are unknown."""
    known = sorted(rate for rate in uploads_bytes_per_s if rate > 0)
    if not known:
        return payload_bytes / bounds.ASSUMED_UPLOAD_BYTES_PER_S
    return payload_bytes / max(known[0], median(known) * SLOWEST_SHARE)


def parts_deadline_s(payload_bytes: int, uploads_bytes_per_s: Iterable[float], observed: Durations) -> float:
    """How long owners wait for slices: the link's rate with a safety factor, or what past rounds took if that
    is more, up to ``SAFETY`` times as much, so that a member whose slices never come does not slow the others
    down for ever."""
    expected_s = SAFETY * expected_transfer_s(payload_bytes, uploads_bytes_per_s)
    floor_s = min(max(expected_s, bounds.PARTS_FLOOR_S), bounds.PARTS_CAP_S)
    return observed.deadline_s(floor_s, floor_s, min(SAFETY * floor_s, bounds.PARTS_CAP_S))
