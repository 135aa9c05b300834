"""How fast this machine sends bulk data, and how fast it may send or receive: arithmetic on times that are
handed in.

The upload rate sizes this peer's part of a round, so it must say what the link can do, not how busy the
processor was in one moment: it is measured over whole bursts, and the best of late count. What a burst
begins with fills buffers, which take it at any speed; its later half leaves at the speed of the link, so only
that is measured. Routers' queues still fill and empty: over a second that can make a line seem faster by a
third, so the best burst alone is not believed, but the second best.

Where the kernel says what receivers have acknowledged, that counts instead of what it was handed: while a
queue stands before the line, so much is what the line can do. Who acknowledged what has not come would break
its own stream.

A receiver that reads slowly, or says that nothing has come, or that all has, must not make a line seem slower
or faster than it is. So each receiver's bytes only tell a stretch of time, in which so much went to all, or
was acknowledged by all: who goes on alone after the others tells of its own line. That is one opinion of the
line, and of the receivers' opinions the (upper) median counts, of those of earlier bursts too. Laws: of three
receivers one that reads as it likes moves nothing; over any stretch the bytes that a ``Pace`` admits are at
most its rate times the length, and that of ``late_s``, plus one message.

Price: bursts that buffers swallow are not measured at all: a fast link with little to send stays unknown, and
counts like the others'. With one or two receivers a liar among them is believed, up to what was handed over:
what that can do to a round is bounded there (``rounds.parts``).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from itertools import dropwhile, takewhile
from statistics import median_high
from typing import NamedTuple

BURST_GAP_S = 0.1
"""A pause longer than this ends a burst."""
LONGEST_BURST_S = 10.0
"""A longer one is measured in stretches."""
MEASURABLE_BYTES = 256 << 10
"""A smaller burst says more about latency than about the link."""
DRAINED_S, DRAINED_BYTES = 0.1, 1 << 20
"""A later half that took as long, or was as much, was not swallowed by buffers."""
SEEN_S = 0.5
"""What receivers acknowledge in so long says what the line carries. What it was handed says it but roughly:
it lies in buffers, and a line of 2.9 MB/s seemed to carry from 2.3 to 5.8."""
SWALLOWED_TIMES = 1.5
"""Buffers have taken what was handed over for less than ``SEEN_S`` at so many times what the line has shown:
a line of 12 MB/s seemed to carry 20 to 85 where six connections took 2 to 8 MB in a tenth of a second. Bulk
takes turns at less than that, so a line that has become faster is not mistaken for it; where it takes none,
because the line is too fast for that, what receivers acknowledged in so short a burst tells the two apart."""
UNPROVED_IN_A_ROW = 8
"""A rate that so many later bursts have exceeded, each too short to be seen arriving, is old: it is unknown
again, and counts like the others'. What was measured in the first busy seconds of a fast line stayed for
good, and its peer was asked for a part of its work in each round."""
_MAX_MARKS = 512
MAX_RECEIVERS = 64
"""Whose opinions are remembered."""
OF_LATE_S = 600.0
"""An opinion that is this much older than the newest does not count any more."""
BURSTS_KEPT = 5
"""Of each receiver. The second fastest of them counts, of one or two the faster."""
LINE_TIMES, LATE_S = 1.2, 0.1
"""Bulk leaves at so much more than the line has shown: lanes get equal shares, and a line that was measured
low is found out in a few bursts. (At 1.05 a lane whose line stood still for a moment had no time to make up
for it: a share of 0.75 of a line of 20 Mbit/s with 1 % loss, at 1.2 it was 0.78.) After a pause of this
process it may catch up for ``LATE_S``."""
QUEUED_S, EASED_TIMES = 0.06, 0.95
"""Where what is under way waits longer before the line than that, bulk leaves at so much less than the line
has shown, until the queue has gone: in a full queue TCP's shares decide which lane ends last, and what is
lost is found out late. With it and turns by what is left to carry the last of the lanes ends 0.3 s after the
others of its line, not 0.5 (a line of 20 Mbit/s with 1 % loss)."""
LEAST_EASED_TIMES, EASE_PER_S, EASE_STEP_S = 0.8, 0.5, 0.1
"""A line that was measured too high keeps its queue at ``EASED_TIMES``. So as long as the queue stays bulk
leaves more and more slowly, by ``EASE_PER_S`` of the line each second, down to the first of these; where
there is none that is taken back. A pause counts as ``EASE_STEP_S``."""
EXPLAINED_SHARE = 0.75
"""A burst that was eased so, and was between so much and all of what the line has shown, says nothing: or a
queue that others keep on the line would make it seem slower each time. Where receivers acknowledge more than
``EASED_TIMES`` of it that is the line, since it is more than is sent."""
EASED_IN_A_ROW = 4
"""After so many bursts that were eased one is not: a line that has become a little slower, or faster again
behind a queue that stays, would else never be found out."""
FAST_BYTES_PER_S = 25e6
"""A faster line fills as it likes: what is measured of it is this process at work as often as the line. (Of
four peers on lines of 100 Mbit/s and 90 ms one uplink stood at a third in the middle of an exchange, where
lanes did not take turns: the slices that an owner waited for came last.)"""
LONGEST_TURN_S = 0.15
"""A message that would take the line for longer goes as it likes, by TCP's shares: turns count messages, and
who loads a state, in half a megabyte each, would take the line from the rounds. Theirs are shorter
(``rounds.assembly``), but on lines where the shortest is not: so such a line is not held either."""


class Pace:
    """A rate that is not to be exceeded, in bytes per second; 0 means no limit. It may be changed at any
    time. Who asks up to ``late_s`` late loses nothing by it."""

    def __init__(self, bytes_per_s: float = 0.0, late_s: float = 0.0) -> None:
        self.bytes_per_s = bytes_per_s
        self._late_s = late_s
        self._free_at = 0.0

    def admit_at(self, size_bytes: int, now: float) -> float:
        """When a message may go; it counts from then on, so those who ask get their turns in the order of
        asking."""
        if not self.bytes_per_s:
            return now
        at = max(now - self._late_s, self._free_at)
        self._free_at = at + size_bytes / self.bytes_per_s
        return max(now, at)

    def give_back(self, size_bytes: int) -> None:
        """A message that was admitted does not go: others need not wait for it."""
        if self.bytes_per_s:
            self._free_at -= size_bytes / self.bytes_per_s


class LinePace(Pace):
    """A little more than a line has shown that it can do."""

    def __init__(self) -> None:
        super().__init__(late_s=LATE_S)
        self._eased_times, self._followed_at = EASED_TIMES, 0.0

    def follow(self, shown_bytes_per_s: float, queued_s: float, now: float) -> bool:
        """Keep to what the line shows; 0 means that nothing is known, and no limit. ``queued_s``: how long
        what is under way waits before the line. Returns whether it is eased for that."""
        is_eased = queued_s > QUEUED_S and 0 < shown_bytes_per_s < FAST_BYTES_PER_S
        change = EASE_PER_S * min(EASE_STEP_S, now - self._followed_at) * (-1 if is_eased else 1)
        self._eased_times = min(EASED_TIMES, max(LEAST_EASED_TIMES, self._eased_times + change))
        self._followed_at = now
        times = self._eased_times if is_eased else LINE_TIMES
        self.bytes_per_s = times * shown_bytes_per_s if shown_bytes_per_s < FAST_BYTES_PER_S else 0.0
        return is_eased

    def turn_s(self, size_bytes: int) -> float:
        """How long a message has the line; 0.0 where it needs no turn."""
        needs_none = not self.bytes_per_s or size_bytes > LONGEST_TURN_S * self.bytes_per_s
        return 0.0 if needs_none else size_bytes / self.bytes_per_s

    def free_in_s(self, now: float) -> float:
        """Seconds until the last of the turns that were given is over."""
        return max(0.0, self._free_at - now)

    def admit_at(self, size_bytes: int, now: float) -> float:
        """As ``Pace``, for what is no longer than ``LONGEST_TURN_S``."""
        if not self.turn_s(size_bytes):
            return now
        return super().admit_at(size_bytes, now)


class UploadMeter:
    """What the upload has shown it can do. One per process; ``bytes_per_s`` is 0 until something could be
    measured."""

    def __init__(self) -> None:
        self._burst_started_at = self._burst_ended_at = -1e9
        self._all = _Marks(-1e9)
        """Bytes of this burst, to whomever."""
        self._to: dict[str, _Marks] = {}
        self._came: deque[_Came] = deque(maxlen=_MAX_MARKS)
        """Of this burst."""
        self._sending = 0
        self._is_eased, self._eased_bursts = False, 0
        self._seen: OrderedDict[str, Opinion] = OrderedDict()
        """Of the whole upload, as each receiver's bytes tell it, the newest last."""
        self.bytes_per_s = 0.0

    @property
    def busy(self) -> bool:
        """Whether a bulk message is being handed to a link, or on its way to a peer that will say when it is
        there."""
        return self._sending > 0

    def started(self, now: float) -> None:
        """A bulk message is handed to a link."""
        if not self.rest(now) and now - self._burst_started_at > LONGEST_BURST_S:
            self._conclude(now)
        if not self._all.bytes and not self._sending:
            self._begin(now)
        self._sending += 1

    def rest(self, now: float) -> bool:
        """Whether no burst goes on. One that has ended is measured."""
        rests = self._sending == 0 and now - self._burst_ended_at > BURST_GAP_S
        if rests and self._all.bytes:
            self._conclude(now)
        return rests

    def held(self, now: float, until: float) -> None:
        """Bulk waits until then for its turn on the line: that is no pause. Else what leaves at a pace, in
        messages that are ``BURST_GAP_S`` apart, would be bursts of one message, which show nothing."""
        if until > now and not self.rest(now):
            self._burst_ended_at = max(self._burst_ended_at, until)

    @property
    def may_ease(self) -> bool:
        """Whether bulk may leave at less than the line has shown: not always, or that would be all it can."""
        return self._eased_bursts < EASED_IN_A_ROW

    def eased(self, now: float) -> None:
        """Bulk that goes from now on leaves at less than the line has shown."""
        self.rest(now)
        self._is_eased = True

    def came(self, size_bytes: int, took_s: float, is_full: bool, now: float) -> None:
        """So much came to be there until now, of all receivers' together. ``is_full``: while more waited."""
        self._came.append(_Came(now, size_bytes, took_s, is_full))

    def _begin(self, now: float) -> None:
        """A burst begins."""
        self._burst_started_at, self._all = now, _Marks(now)
        self._came = deque(maxlen=_MAX_MARKS)

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
        everything, each, began_at = self._all, list(self._to.items()), self._burst_started_at
        seen = self._came
        self._begin(now)
        self._to.clear()
        was_eased, self._is_eased = self._is_eased, False
        if everything.bytes < MEASURABLE_BYTES:
            return
        self._eased_bursts = self._eased_bursts + 1 if was_eased else 0
        for to, marks in each:
            middle_at, last_at = marks.later_half()
            left, drained_s = everything.until(last_at) - everything.until(middle_at), last_at - middle_at
            if drained_s < DRAINED_S and left < DRAINED_BYTES:
                continue
            came = _came_bytes_per_s(seen, began_at, last_at)
            told_from = self.bytes_per_s * (EASED_TIMES if came else 1.0)
            rate = came or left / max(1e-6, drained_s)
            if was_eased and EXPLAINED_SHARE * self.bytes_per_s <= rate < told_from:
                continue
            self._eased_bursts = 0 if came else self._eased_bursts
            known = self._seen.get(to, Opinion())
            swallowed_from = SWALLOWED_TIMES * _believed(known.rates)
            is_rough = bool(seen) and not came and drained_s < SEEN_S
            is_rough &= known.is_rough or rate > swallowed_from
            if is_rough and not known.is_rough:
                rate, is_rough = _came_at_least(seen), False
                if rate <= swallowed_from:
                    unproved = 0 if rate else known.unproved + 1
                    self._seen[to] = known._replace(unproved=unproved)
                    if unproved >= UNPROVED_IN_A_ROW:
                        del self._seen[to]
                    continue
            kept = known.rates if is_rough or not known.is_rough else ()
            self._seen.pop(to, None)
            self._seen[to] = Opinion((*kept, rate)[-BURSTS_KEPT:], last_at, is_rough)
        if not self._seen:
            self.bytes_per_s = 0.0
            return
        newest_at = next(reversed(self._seen.values())).at
        while len(self._seen) > MAX_RECEIVERS or newest_at - next(iter(self._seen.values())).at > OF_LATE_S:
            self._seen.popitem(last=False)
        self.bytes_per_s = median_high(_believed(one.rates) for one in self._seen.values())


class Opinion(NamedTuple):
    """What the bursts to one receiver say of the upload. ``is_rough``: they were too short to be seen
    arriving, and buffers took them: nothing like that counts once there is better."""

    rates: tuple[float, ...] = ()
    at: float = -1e9
    is_rough: bool = True
    unproved: int = 0
    """Bursts since then that went faster, and were too short to show how fast."""


def _believed(rates: Sequence[float]) -> float:
    """Of one receiver's bursts; 0.0 of none."""
    return sorted(rates)[-2] if len(rates) > 2 else max(rates, default=0.0)


class _Came(NamedTuple):
    """What receivers' kernels acknowledged from one look to the next."""

    at: float
    """When that was seen."""
    size_bytes: int
    took_s: float
    is_full: bool


def _came_bytes_per_s(seen: Iterable[_Came], began_at: float, last_at: float) -> float:
    """What the line carried from ``began_at`` to ``last_at`` while it was full. If it was not, or too short,
    what it carried at least: in the later half, since in the first round trip nothing comes. 0.0 where too
    little was seen."""
    until = list(takewhile(lambda one: one.at <= last_at, seen))
    middle_at = (began_at + last_at) / 2
    for some in ([one for one in until if one.is_full], [one for one in until if one.at > middle_at]):
        took_s = sum(one.took_s for one in some)
        if took_s >= SEEN_S:
            return sum(one.size_bytes for one in some) / took_s
    return 0.0


def _came_at_least(seen: Sequence[_Came]) -> float:
    """What the line carried at least in a burst too short for ``_came_bytes_per_s``: what buffers have
    swallowed is not there yet. 0.0 where that was seen for less than ``DRAINED_S``."""
    for some in (list(dropwhile(lambda one: not one.size_bytes, seen)), seen):
        took_s = sum(one.took_s for one in some)
        if took_s >= DRAINED_S:
            return sum(one.size_bytes for one in some) / took_s
    return 0.0


class _Marks:
    """When how many bytes had gone, from 0 at ``began_at``."""

    def __init__(self, began_at: float) -> None:
        self._at, self._sums = [began_at], [0]

    @property
    def bytes(self) -> int:
        return self._sums[-1]

    def add(self, size_bytes: int, now: float) -> None:
        self._at.append(now)
        self._sums.append(self._sums[-1] + size_bytes)
        if len(self._at) > _MAX_MARKS:
            self._at, self._sums = self._at[::-2][::-1], self._sums[::-2][::-1]

    def later_half(self) -> tuple[float, float]:
        """(when half of the bytes had gone, when all had)."""
        middle = bisect_left(self._sums, self.bytes / 2)
        return self._at[middle], self._at[-1]

    def until(self, at: float) -> int:
        """Bytes that had gone at ``at``."""
        return self._sums[max(0, bisect_right(self._at, at) - 1)]
