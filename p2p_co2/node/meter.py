"""How fast this machine sends bulk data, and how fast it may send or receive: arithmetic on times that are
handed in.

The upload rate sizes this peer's part of a round, so it must say what the link can do, not how busy the
processor was in one moment: it is measured over whole bursts, and the best burst of late counts. Law: over
any stretch the bytes that a ``Pace`` admits are at most its rate times the length plus one message.

Price: what the kernel or libp2p's daemon still buffers at the end of a burst counts as sent, so short bursts
flatter a slow link, and nothing corrects that yet but the owner's cap.
"""

from __future__ import annotations

BURST_GAP_S = 0.1
"""A pause longer than this ends a burst."""
MEASURABLE_BYTES = 256 << 10
"""A smaller burst says more about latency than about the link."""
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


class UploadMeter:
    """What the upload has shown it can do. One per process; ``bytes_per_s`` is 0 until something could be
    measured."""

    def __init__(self) -> None:
        self._burst_started_at = self._burst_ended_at = -1e9
        self._burst_bytes = 0
        self._sending = 0
        self.bytes_per_s = 0.0

    @property
    def busy(self) -> bool:
        """Whether a bulk message is being handed to a link."""
        return self._sending > 0

    def started(self, now: float) -> None:
        """A bulk message is handed to a link."""
        if self._sending == 0 and now - self._burst_ended_at > BURST_GAP_S:
            self._conclude()
            self._burst_started_at, self._burst_bytes = now, 0
        self._sending += 1

    def finished(self, size_bytes: int, now: float) -> None:
        """The link has taken it, or failed to (0 bytes)."""
        self._sending -= 1
        self._burst_bytes += size_bytes
        self._burst_ended_at = now

    def _conclude(self) -> None:
        if self._burst_bytes < MEASURABLE_BYTES:
            return
        rate = self._burst_bytes / max(1e-6, self._burst_ended_at - self._burst_started_at)
        known = self.bytes_per_s
        self.bytes_per_s = rate if rate > known else known + FORGETTING * (rate - known)
