"""How fast this machine sends bulk data, and how fast it may: arithmetic on times that are handed in.

The rate sizes this peer's part of a round, so it must say what the link can do, not how busy the processor
was in one moment: it is measured over whole bursts, and the best burst of late counts. Law: over any stretch
the bytes admitted are at most ``cap_bytes_per_s`` times its length plus one message.

Price: what the kernel still buffers at the end of a burst counts as sent, so short bursts flatter a slow
link; the deadline for parts learns the truth from the rounds themselves.
"""

from __future__ import annotations

BURST_GAP_S = 0.1
"""A pause longer than this ends a burst."""
MEASURABLE_BYTES = 256 << 10
"""A smaller burst says more about latency than about the link."""
FORGETTING = 0.1
"""Share of the way down that a slower burst takes the rate; a faster one takes it up at once."""


class UploadMeter:
    """One per process. ``cap_bytes_per_s`` 0 means no cap. ``bytes_per_s`` is 0 until something could be
    measured."""

    def __init__(self, cap_bytes_per_s: float) -> None:
        self._cap = cap_bytes_per_s
        self._free_at = 0.0
        self._burst_started_at = self._burst_ended_at = -1e9
        self._burst_bytes = 0
        self._sending = 0
        self.bytes_per_s = 0.0

    @property
    def busy(self) -> bool:
        """Whether a bulk message is being handed to a link."""
        return self._sending > 0

    def delay_s(self, size_bytes: int, now: float) -> float:
        """Admit a message: how long to wait before it is sent."""
        if not self._cap:
            return 0.0
        wait_s = max(0.0, self._free_at - now)
        self._free_at = now + wait_s + size_bytes / self._cap
        return wait_s

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
