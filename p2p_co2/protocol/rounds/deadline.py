"""How long to wait, from what was measured: nobody sets a timeout by hand.

Laws: every deadline lies between its floor and its cap. It grows when arrivals get later, also of those too
late to be used. One outlier among many moves it little (median and MAD, Hampel 1974). The READY deadline
looks at the *last* arrival of each past round: the median would shut one late peer out for ever. Nobody is
waited for longer than a share of the time between two rounds (``Cadence``). A peer that was late for two
deadlines is not waited for until it has been in time again (``Punctuality``).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Sequence
from statistics import median

from p2p_co2.protocol.rounds import bounds
from p2p_co2.wire.identity import PeerId

WINDOW = 16
"""Past rounds that a deadline looks at."""
SPREADS = 4.0
"""MADs above the median."""
MARGIN = 0.25
"""At least this share of the median on top: equal arrivals have no spread but the next one has jitter."""
SAFETY = 4.0
"""A link is allowed to be this much slower than its measured rate."""
GATHER_LEAST = 1 / 4
"""Of their cap, READYs are waited for at least this share: a sixteenth of the time between two rounds costs
nobody anything. It is an inner step's time where that is more, since offers come at the ends of steps."""
GATHER_LEAST_CAP_S = 2.0
"""At most so long, by that share."""
BEHIND_SHARE = 1 / 2
"""Of the time between two rounds, how long peers that are one round behind are waited for: else they would
trail for good."""
MISSES = 2
"""Deadlines that a peer may miss in a row and still be waited for."""


def adaptive_deadline_s(samples: Sequence[float], default_s: float, floor_s: float, cap_s: float) -> float:
    """``median + max(4 MAD, median / 4)`` of the samples (seconds), within floor and cap; ``default_s``
    without any."""
    if not samples:
        return min(max(default_s, floor_s), cap_s)
    middle = median(samples)
    spread = median(abs(sample - middle) for sample in samples)
    return min(max(middle + max(SPREADS * spread, MARGIN * middle), floor_s), cap_s)


def gather_least_s(cap_s: float, step_s: float = 0.0) -> float:
    """Seconds that READYs are waited for at the least, of at most ``cap_s``. ``step_s``: an inner step's
    length; peers that end one at the same moment may be one apart at the next point."""
    of_steps_s = min((1 + MARGIN) * step_s, cap_s)
    return max(bounds.GATHER_FLOOR_S, min(GATHER_LEAST * cap_s, GATHER_LEAST_CAP_S), of_steps_s)


class Durations:
    """The last ``WINDOW`` measured durations of one kind, in seconds."""

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=WINDOW)

    def add(self, duration_s: float) -> None:
        self._samples.append(max(0.0, duration_s))

    def deadline_s(self, default_s: float, floor_s: float, cap_s: float) -> float:
        return adaptive_deadline_s(tuple(self._samples), default_s, floor_s, cap_s)


class Cadence:
    """Times of the rounds of one fragment, as past ones have shown them: how often one is committed, and how
    long after the first READY the last one comes. ``slices``: from BEGIN to the last slice, as the parts that
    we own have seen it. ``planned_s``: between two rounds before any is known, 0 if the run plans none.
    READYs are waited for a ``share`` of that time at most."""

    def __init__(self, planned_s: float = 0.0, share: float = bounds.GATHER_SHARE) -> None:
        self._planned_s = planned_s
        self._share = share
        self._last: tuple[int, float] | None = None
        self._periods: deque[float] = deque(maxlen=WINDOW // 2)
        self._readies: OrderedDict[int, tuple[float, float]] = OrderedDict()
        """By round, when the first one came, and the last."""
        self.slices = Durations()

    def committed(self, round_: int, now: float) -> None:
        if self._last is not None and round_ > self._last[0]:
            self._periods.append((now - self._last[1]) / (round_ - self._last[0]))
        if self._last is None or round_ > self._last[0]:
            self._last = (round_, now)

    def ready_came(self, round_: int, now: float) -> None:
        first_at, _ = self._readies.get(round_, (now, now))
        self._readies[round_] = (first_at, now)
        while len(self._readies) > WINDOW:
            self._readies.popitem(last=False)

    def gather_s(self, round_: int, step_s: float = 0.0) -> float:
        """Seconds to wait from the first READY of a new attempt at ``round_``, measured on other rounds.
        ``step_s``: as in ``gather_least_s``."""
        self._readies.pop(round_, None)
        past = [last - first for first, last in self._readies.values() if last > first]
        cap_s = self.gather_cap_s(round_)
        return adaptive_deadline_s(past, bounds.GATHER_DEFAULT_S, gather_least_s(cap_s, step_s), cap_s)

    @property
    def period_s(self) -> float:
        """Seconds between two rounds; 0 until known."""
        return median(self._periods) if self._periods else self._planned_s

    def gather_cap_s(self, round_: int) -> float:
        """What READYs of a round are waited for at most. Peers that start a run together are not there at
        the same moment: what it plans says nothing of their first round."""
        share_s = self._share * (self.period_s if self._periods or round_ > 1 else 0.0)
        return (
            min(bounds.GATHER_CAP_S, max(share_s, bounds.GATHER_FLOOR_S)) if share_s else bounds.GATHER_CAP_S
        )

    @property
    def last_gather_s(self) -> float:
        """The same for the last rounds of a run: as long as a round of training, at most."""
        return min(bounds.GATHER_DEFAULT_S, self.period_s or bounds.GATHER_DEFAULT_S)

    @property
    def behind_s(self) -> float:
        """What peers that are one round behind are waited for at most, from the first READY; 0 before the
        time between rounds is known."""
        return min(bounds.GATHER_CAP_S, BEHIND_SHARE * self.period_s)

    @property
    def cheap_s(self) -> float:
        """A round of this length costs nobody anything."""
        return max(bounds.CHEAP_S, bounds.CHEAP_SHARE * self.period_s)


class Punctuality:
    """Who comes in time for one kind of thing: one entry per peer that missed a deadline."""

    def __init__(self) -> None:
        self._missed: dict[PeerId, tuple[int, object]] = {}

    def came(self, peer: PeerId) -> None:
        self._missed.pop(peer, None)

    def missed(self, peer: PeerId, occasion: object) -> None:
        """It was waited for until the deadline, in vain; what belongs to one ``occasion`` counts once."""
        times, last = self._missed.get(peer, (0, None))
        if last != occasion:
            self._missed[peer] = (times + 1, occasion)

    def is_awaited(self, peer: PeerId) -> bool:
        return self._missed.get(peer, (0, None))[0] < MISSES

    def keep(self, live: Collection[PeerId]) -> None:
        """Forget peers that are gone."""
        if self._missed:
            self._missed = {peer: missed for peer, missed in self._missed.items() if peer in live}


def parts_deadline_s(transfer_s: float, observed: Durations, cap_s: float = bounds.PARTS_CAP_S) -> float:
    """How long owners wait for slices, at most ``cap_s``: the time that the links need with a safety factor,
    or what past rounds took. The latter counts up to ``SAFETY`` times the former, so one absent member slows
    nobody for ever."""
    floor_s = min(max(SAFETY * transfer_s, bounds.PARTS_FLOOR_S), cap_s)
    return observed.deadline_s(floor_s, floor_s, min(SAFETY * floor_s, cap_s))
