"""How fast this machine sends bulk data, and how fast it may send or receive: arithmetic on times that are
handed in.

The upload rate sizes this peer's part of a round, so it must say what the link can do, not how busy the
processor was in one moment: it is measured over whole bursts, and the best burst of late counts. What a burst
begins with fills buffers, which take it at any speed; its later half leaves at the speed of the link, so only
that is measured. Law: over any stretch the bytes that a ``Pace`` admits are at most its rate times the length
plus one message.

Price: bursts that buffers swallow are not measured at all: a fast link with little to send stays unknown, and
counts like the others'. libp2p's daemon has buffers of its own, which flatter a slow link in short bursts.
"""

from __future__ import annotations

BURST_GAP_S = 0.1
"""A pause longer than this ends a burst."""
PROGRESS_S = 1.0
"""What a lane did before this is half forgotten."""
LONGEST_BURST_S = 10.0
"""A longer one is measured in stretches."""
MEASURABLE_BYTES = 256 << 10
"""A smaller burst says more about latency than about the link."""
DRAINED_S, DRAINED_BYTES = 0.1, 1 << 20
"""A later half that took as long, or was as much, was not swallowed by buffers."""
_MAX_MARKS = 512
FORGETTING = 0.1
"""Share of the way down that a slower burst takes the rate; a faster one takes it up at once."""


class Pace:
    """A rate that is not to be exceeded, in bytes per second; 0 means no limit. It may be changed at any
    time."""

    def __init__(self, bytes_per_s: float = 0.0) -> None:
        self.bytes_per_s = bytes_per_s
        self._free_at = 0.0

    def admit_at(self, size_bytes: int, now: float) -> float:
        """When a message may go; it counts from then on, so those who ask get their turns in the order of
        asking."""
        if not self.bytes_per_s:
            return now
        at = max(now, self._free_at)
        self._free_at = at + size_bytes / self.bytes_per_s
        return at


class Progress:
    """How fast one lane gets on while it has something to carry, over the last second or two."""

    def __init__(self) -> None:
        self._since = self._last_at = -1e9
        self._bytes = 0.0

    def sent(self, size_bytes: int, started_at: float, now: float) -> None:
        """A message was handed over from ``started_at`` to ``now``."""
        if started_at - self._last_at > BURST_GAP_S:
            self._since, self._bytes = started_at, 0.0
        self._last_at = now
        self._bytes += size_bytes
        if now - self._since > 2 * PROGRESS_S:
            self._since, self._bytes = (self._since + now) / 2, self._bytes / 2

    def bytes_per_s(self, now: float) -> float:
        """0 until it has been going on for a while."""
        elapsed_s = now - self._since
        return self._bytes / elapsed_s if elapsed_s > BURST_GAP_S else 0.0


class UploadMeter:
    """What the upload has shown it can do. One per process; ``bytes_per_s`` is 0 until something could be
    measured."""

    def __init__(self) -> None:
        self._burst_started_at = self._burst_ended_at = -1e9
        self._marks: list[tuple[float, int]] = []
        """When the links had taken how many bytes of this burst."""
        self._burst_bytes = 0
        self._sending = 0
        self.bytes_per_s = 0.0

    @property
    def busy(self) -> bool:
        """Whether a bulk message is being handed to a link."""
        return self._sending > 0

    def started(self, now: float) -> None:
        """A bulk message is handed to a link."""
        rested = self._sending == 0 and now - self._burst_ended_at > BURST_GAP_S
        if rested or now - self._burst_started_at > LONGEST_BURST_S:
            self._conclude()
            self._burst_started_at, self._burst_bytes, self._marks = now, 0, [(now, 0)]
        self._sending += 1

    def finished(self, size_bytes: int, now: float) -> None:
        """The link has taken it, or failed to (0 bytes)."""
        self._sending -= 1
        self._burst_bytes += size_bytes
        self._burst_ended_at = now
        self._marks.append((now, self._burst_bytes))
        if len(self._marks) > _MAX_MARKS:
            self._marks = self._marks[::2]

    def _conclude(self) -> None:
        if self._burst_bytes < MEASURABLE_BYTES:
            return
        middle_at, taken = next(mark for mark in self._marks if 2 * mark[1] >= self._burst_bytes)
        left, drained_s = self._burst_bytes - taken, self._burst_ended_at - middle_at
        if drained_s < DRAINED_S and left < DRAINED_BYTES:
            return
        rate = left / max(1e-6, drained_s)
        known = self.bytes_per_s
        self.bytes_per_s = rate if rate > known else known + FORGETTING * (rate - known)
