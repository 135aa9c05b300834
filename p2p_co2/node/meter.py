"""How fast our line carries bulk, and how fast bulk may leave: arithmetic on times that are handed in.

The upload rate sizes this peer's part of a round. So it is what receivers have, and not what buffers took.
The kernel says it of a TCP connection, the other end of a libp2p link. ``LineRate`` measures it in stretches
of ``SEEN_S``. More than was shown counts at once, less by and by, and only while bulk waits for most peers:
then it is our line that it waits for.

Laws: of three receivers or more, those that lie move little as long as they are fewer than half. Over any
stretch the bytes that a ``Pace`` admits are at most its rate times the length, and that of ``late_s``, plus
one message. Price: with one or two receivers a liar among them is believed. See
docs/design/lines-and-pacing.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median_low
from typing import Any

from p2p_co2.net.transport.flow import MOMENT_S, Seen

SEEN_S = 0.5
"""How long a stretch has to be to say what the line carries. A shorter one says what it carries at least."""
LEAST_SPAN_S = 0.04
"""Connections are asked no sooner again: 25 us each."""
MEASURABLE_BYTES = 256 << 10
"""Less says more about latency than about the line."""
UNLEARNED = 0.2
"""So much of the difference goes with each stretch in which a full line carried less than it had shown."""
LINE_TIMES = 1.2
"""Bulk leaves at so much more than the line has shown: one measured low is found out in a few stretches."""
QUEUED_S = 0.06
"""Where what is under way waits longer before the line, bulk leaves more slowly for a while."""
EASED_TIMES = 0.82
"""Of what the line has shown, while it is eased: in a full queue TCP's shares decide which lane ends last."""
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
        """It is eased for as long as it was not before, up to two stretches: else others' queues would make a
        line seem slower."""

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
        self._may_ease_s = min(2 * SEEN_S, self._may_ease_s + (turn_s if self._times > 1 else -turn_s))
        return super().admit_at(size_bytes, now) if turn_s else now


class LineRate:
    """What a line has shown that it carries. ``look`` says of each link what the other end has.

    Call ``watch`` when bulk begins or ends to be sent, and before ``bytes_per_s`` is read, which is 0 until
    something could be measured.
    """

    def __init__(self, look: Callable[[], Mapping[Any, Seen]]) -> None:
        self._look = look
        self.bytes_per_s = 0.0
        self._is_busy = self._was_full = False
        """As ``watch`` was told at last; when the stretch began, and there was no pause in it."""
        self._began: Mapping[Any, Seen] = {}
        self._began_at = -1e9
        self._seen: Mapping[Any, Seen] = {}
        """What was there when the stretch began, and at last."""
        self._seen_at = -1e9
        self._of_each: dict[Any, float] = {}
        """Bytes per second over each link, when it carried something last."""

    def watch(self, is_busy: bool, is_full: bool, now: float) -> None:
        """``is_busy``: there is bulk to send, or on its way. ``is_full``: it waits for most peers."""
        if self._is_busy:
            is_long = now - self._began_at >= SEEN_S
            if (is_long or not is_busy) and now - self._seen_at >= LEAST_SPAN_S:
                self._seen = self._look()
                self._seen_at = now
                if is_long and self._conclude(self._was_full and is_full):
                    self._was_full = is_full
        elif now - self._seen_at > MOMENT_S:
            self._conclude(False)
            if is_busy:
                self._seen = self._began = self._look()
                self._seen_at = self._began_at = now
                self._was_full = is_full
        self._is_busy = is_busy
        self._was_full &= is_busy

    def _conclude(self, is_full: bool) -> bool:
        """Measure the stretch so far, and begin the next one; False if too little was carried."""
        nothing = Seen()
        came = {
            link: max(0, one.there_bytes - self._began.get(link, nothing).there_bytes)
            for link, one in self._seen.items()
        }
        if sum(came.values()) < MEASURABLE_BYTES:
            return False
        took_s = self._seen_at - self._began_at
        rate = self._believed({link: size_bytes / took_s for link, size_bytes in came.items()})
        self._began = self._seen
        self._began_at = self._seen_at
        known = self.bytes_per_s
        if rate > known:
            is_sure = took_s >= SEEN_S or not known
            self.bytes_per_s = rate if is_sure else min(rate, LINE_TIMES * known)
        elif is_full:
            self.bytes_per_s += UNLEARNED * (rate - known)
        return True

    def _believed(self, rates: Mapping[Any, float]) -> float:
        """What came over all links together. Where three or more are known, what one end alone says counts
        no more than the (lower) median of what each link carried last: few that lie together move it little.
        """
        latest = {link: rate or self._of_each.get(link, 0.0) for link, rate in rates.items()}
        self._of_each = {link: rate for link, rate in latest.items() if rate}
        if len(self._of_each) < 3:
            return sum(rates.values())
        most = median_low(self._of_each.values())
        return sum(min(rate, most) if self._seen[link].is_word else rate for link, rate in rates.items())
