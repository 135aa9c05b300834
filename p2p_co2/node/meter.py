"""How fast this machine sends bulk data, and how fast it may: arithmetic on times that are handed in.

The upload rate sizes this peer's part of a round, so it must say what the line can do, not how busy the
processor was. What a burst begins with fills buffers, so its later half is measured, over whole bursts, and
the second best of late counts. Where the kernel says what receivers have acknowledged, that counts instead of
what it was handed.

Each receiver's bytes tell a stretch of time; what went to all in it is that receiver's opinion of the line,
and of the receivers' opinions the (upper) median counts. Laws: of three receivers one that reads as it likes
moves nothing; over any stretch the bytes that a ``Pace`` admits are at most its rate times the length, and
that of ``late_s``, plus one message. Price: bursts that buffers swallow are not measured, so a fast line with
little to send stays unknown; with one or two receivers a liar among them is believed.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import dropwhile
from statistics import median_high
from typing import NamedTuple

MOMENT_S = 0.1
"""A pause longer than this ends a burst; a later half that took as long was not swallowed by buffers; and a
pace may catch up for so long after a pause of this process."""
SEEN_S = 0.5
"""What receivers acknowledge in so long says what the line carries. What it was handed says it but roughly:
a line of 2.9 MB/s seemed to carry from 2.3 to 5.8."""
LONGEST_BURST_S = 10.0
"""A longer one is measured in stretches."""
MEASURABLE_BYTES, DRAINED_BYTES = 256 << 10, 1 << 20
"""A smaller burst says more about latency than about the line; so much was not swallowed by buffers."""
SWALLOWED_TIMES, UNPROVED_IN_A_ROW = 1.5, 8
"""Buffers have taken what was handed over for less than ``SEEN_S`` at so many times what the line has shown.
A rate that so many later bursts have exceeded, too short to be seen arriving, is old: it is unknown again."""
MAX_RECEIVERS, BURSTS_KEPT, _MAX_MARKS = 64, 5, 512
"""Whose opinions are remembered, and how many bursts of each; the second fastest of them counts."""
LINE_TIMES = 1.2
"""Bulk leaves at so much more than the line has shown: one measured low is found out in a few bursts."""
QUEUED_S, EASED_TIMES, EASED_S = 0.06, 0.82, 1.0
"""Where what is under way waits longer before the line than the first, bulk leaves at the second of what the
line has shown, for as long as it was not eased before, up to the third: in a full queue TCP's shares decide
which lane ends last. On the whole it leaves no slower than that: others' queues make no line seem slower."""
FAST_BYTES_PER_S = 25e6
"""A faster line fills as it likes: what is measured of it is this process at work as often as the line."""


class Pace:
    """A rate that is not to be exceeded, in bytes per second; 0 means no limit. It may be changed at any
    time. Who asks up to ``late_s`` late loses nothing by it."""

    def __init__(self, bytes_per_s: float = 0.0, late_s: float = 0.0) -> None:
        self.bytes_per_s = bytes_per_s
        self._late_s = late_s
        self._free_at = 0.0

    def admit_at(self, size_bytes: int, now: float) -> float:
        """When a message may go; it counts from then on, so those that ask get turns in that order."""
        if not self.bytes_per_s:
            return now
        at = max(now - self._late_s, self._free_at)
        self._free_at = at + size_bytes / self.bytes_per_s
        return max(now, at)

    def give_back(self, size_bytes: int) -> None:
        """A message that was admitted does not go: others need not wait for it."""
        if self.bytes_per_s:
            self._free_at -= size_bytes / self.bytes_per_s

    def free_in_s(self, now: float) -> float:
        """Seconds until the last of the turns that were given is over."""
        return max(0.0, self._free_at - now)


class LinePace(Pace):
    """A little more than a line has shown that it can do."""

    def __init__(self) -> None:
        super().__init__(late_s=MOMENT_S)
        self._times = LINE_TIMES
        self._may_ease_s = 0.0

    def follow(self, shown_bytes_per_s: float, queued_s: float = 0.0) -> None:
        """Keep to what the line shows; 0 means that nothing is known, and no limit. ``queued_s``: how long
        what is under way waits before the line."""
        self._times = EASED_TIMES if queued_s > QUEUED_S and self._may_ease_s > 0 else LINE_TIMES
        self.bytes_per_s = self._times * shown_bytes_per_s if shown_bytes_per_s < FAST_BYTES_PER_S else 0.0

    def turn_s(self, size_bytes: int) -> float:
        """How long a message has the line; 0.0 where it needs no turn. A long one goes as it likes: turns
        count messages, and one that loads a state in half megabytes would take the line from the rounds."""
        turn_s = size_bytes / self.bytes_per_s if self.bytes_per_s else 0.0
        return turn_s if self._times * turn_s <= 1.5 * MOMENT_S * LINE_TIMES else 0.0  # eased or not

    def admit_at(self, size_bytes: int, now: float) -> float:
        """As ``Pace``, for what needs a turn."""
        turn_s = self.turn_s(size_bytes)
        self._may_ease_s = min(EASED_S, self._may_ease_s + (turn_s if self._times > 1 else -turn_s))
        return super().admit_at(size_bytes, now) if turn_s else now


class UploadMeter:
    """What the upload has shown it can do. One per process; ``bytes_per_s`` is 0 until something could be
    measured."""

    def __init__(self) -> None:
        self._burst_ended_at = -1e9
        self._sending = 0
        self.bytes_per_s = 0.0
        self._to: dict[str, _Marks] = {}
        """Bytes of this burst, as ``_all`` those to whomever."""
        self._seen: dict[str, Opinion] = {}
        """Of the whole upload, as each receiver's bytes tell it, the newest last."""
        self._begin(-1e9)

    @property
    def busy(self) -> bool:
        """Whether bulk is being handed to a link, or on its way to a peer that will say when it is there."""
        return self._sending > 0

    def started(self, now: float) -> None:
        """A bulk message is handed to a link."""
        if not self.rest(now) and now - self._burst_started_at > LONGEST_BURST_S:
            self._conclude(now)
        if not self._all.bytes and not self._sending:
            self._begin(now)
        self._sending += 1

    def _begin(self, now: float) -> None:
        self._burst_started_at = now
        self._all = _Marks(now)
        self._came: deque[_Came] = deque(maxlen=_MAX_MARKS)

    def rest(self, now: float) -> bool:
        """Whether no burst goes on. One that has ended is measured."""
        rests = self._sending == 0 and now - self._burst_ended_at > MOMENT_S
        if rests and self._all.bytes:
            self._conclude(now)
        return rests

    def held(self, now: float, until: float) -> None:
        """Bulk waits until then for its turn on the line: that is no pause."""
        if until > now and not self.rest(now):
            self._burst_ended_at = max(self._burst_ended_at, until)

    def came(self, size_bytes: int, took_s: float, is_full: bool, now: float) -> None:
        """So much came to be there until now, of all receivers' together. ``is_full``: while more waited."""
        self._came.append(_Came(now, size_bytes, took_s, is_full))

    def finished(self, to: str, size_bytes: int, now: float) -> None:
        """The line to ``to`` has taken it, or failed to (0 bytes)."""
        self._sending -= 1
        if not size_bytes:
            return
        self._burst_ended_at = max(self._burst_ended_at, now)
        self._all.add(size_bytes, now)
        if to in self._to or len(self._to) < MAX_RECEIVERS:
            self._to.setdefault(to, _Marks(self._burst_started_at)).add(size_bytes, now)

    def _conclude(self, now: float) -> None:
        """Measure the burst so far; the next one begins."""
        everything = self._all
        each = self._to
        began_at = self._burst_started_at
        seen = self._came
        self._to = {}
        self._begin(now)
        if everything.bytes < MEASURABLE_BYTES:
            return
        for to, marks in each.items():
            middle_at, last_at = marks.later_half()
            left = everything.until(last_at) - everything.until(middle_at)
            drained_s = last_at - middle_at
            if drained_s < MOMENT_S and left < DRAINED_BYTES:
                continue
            came = _came_bytes_per_s(seen, began_at, last_at)
            rate = came or left / max(1e-6, drained_s)
            is_unseen = bool(seen) and not came and drained_s < SEEN_S
            self._take(to, rate, last_at, is_unseen, seen)
        newest_at = max((one.at for one in self._seen.values()), default=0.0)
        of_late = {to: one for to, one in self._seen.items() if newest_at - one.at <= 60 * LONGEST_BURST_S}
        self._seen = dict(list(of_late.items())[-MAX_RECEIVERS:])
        believed = [_believed(one.rates) for one in self._seen.values()]
        self.bytes_per_s = median_high(believed) if believed else 0.0

    def _take(self, to: str, rate: float, at: float, is_unseen: bool, seen: Sequence[_Came]) -> None:
        """Take a burst's rate for one receiver's opinion. ``is_unseen``: it was too short to be seen
        arriving; what buffers took counts only as long as there is nothing better."""
        known = self._seen.get(to, Opinion())
        swallowed_from = SWALLOWED_TIMES * _believed(known.rates)
        is_rough = is_unseen and (known.is_rough or rate > swallowed_from)
        if is_rough and not known.is_rough:
            rate = _came_at_least(seen)
            is_rough = False
            if rate <= swallowed_from:
                self._seen[to] = known._replace(unproved=0 if rate else known.unproved + 1)
                if self._seen[to].unproved >= UNPROVED_IN_A_ROW:
                    del self._seen[to]
                return
        kept = known.rates if is_rough or not known.is_rough else ()
        self._seen.pop(to, None)
        self._seen[to] = Opinion((*kept, rate)[-BURSTS_KEPT:], at, is_rough)


class Opinion(NamedTuple):
    """What the bursts to one receiver say of the upload. ``is_rough``: buffers took them. ``unproved``:
    bursts since then that went faster, and were too short to show how fast."""

    rates: tuple[float, ...] = ()
    at: float = -1e9
    is_rough: bool = True
    unproved: int = 0


def _believed(rates: Sequence[float]) -> float:
    """Of one receiver's bursts; 0.0 of none."""
    return sorted(rates)[-2] if len(rates) > 2 else max(rates, default=0.0)


class _Came(NamedTuple):
    """What receivers' kernels acknowledged from one look to the next, and when that was seen."""

    at: float
    size_bytes: int
    took_s: float
    is_full: bool


def _came_bytes_per_s(seen: Iterable[_Came], began_at: float, last_at: float) -> float:
    """What the line carried while it was full. If it was not, or too short, what it carried at least: in the
    later half, since in the first round trip nothing comes. 0.0 where too little was seen."""
    until = [one for one in seen if one.at <= last_at]
    middle_at = (began_at + last_at) / 2
    full = [one for one in until if one.is_full]
    later = [one for one in until if one.at > middle_at]
    return _rate_of(full, SEEN_S) or _rate_of(later, SEEN_S)


def _came_at_least(seen: Sequence[_Came]) -> float:
    """What the line carried at least in a burst too short for ``_came_bytes_per_s``; 0.0 if unknown."""
    from_first = list(dropwhile(lambda one: not one.size_bytes, seen))
    return _rate_of(from_first, MOMENT_S) or _rate_of(seen, MOMENT_S)


def _rate_of(some: Sequence[_Came], least_s: float) -> float:
    took_s = sum(one.took_s for one in some)
    return sum(one.size_bytes for one in some) / took_s if took_s >= least_s else 0.0


class _Marks:
    """When how many bytes had gone, from 0 at ``began_at``."""

    def __init__(self, began_at: float) -> None:
        self._at = [began_at]
        self._sums = [0]

    @property
    def bytes(self) -> int:
        return self._sums[-1]

    def add(self, size_bytes: int, now: float) -> None:
        self._at.append(now)
        self._sums.append(self._sums[-1] + size_bytes)
        if len(self._at) > _MAX_MARKS:
            self._at = self._at[::-2][::-1]
            self._sums = self._sums[::-2][::-1]

    def later_half(self) -> tuple[float, float]:
        """(when half of the bytes had gone, when all had)."""
        middle = bisect_left(self._sums, self.bytes / 2)
        return self._at[middle], self._at[-1]

    def until(self, at: float) -> int:
        """Bytes that had gone at ``at``."""
        return self._sums[max(0, bisect_right(self._at, at) - 1)]
