"""How often a peer tells the others that it lives: the paces of ``membership``, without any state."""

from __future__ import annotations

HEARTBEAT_S = 1.0
TOLD_PER_S = 6.4
SLOWEST_HEARTBEAT_S = 5.0
"""A peer that the DHT still lists is tried again this long after it left."""
SILENCE_FLOOR_S = 6.0
"""A peer is never declared silent sooner: a busy laptop may starve a thread for seconds."""
SILENCE_CAP_S = 6 * SLOWEST_HEARTBEAT_S
"""Nor later: silence must stand out from the beat."""
QUIET_SHARE = 0.1
"""Of a round, between the heartbeats of a peer that only trains."""
LONGEST_HEARTBEAT_S = 120.0
"""At most so long."""
MEASURE_EVERY_S = 20.0
"""A round trip is measured so often."""
MEASURED_BEATS = 5.0
"""Or once in so many slow beats."""


def heartbeat_among_s(others: int, quiet_s: float = 0.0) -> float:
    """Seconds between the heartbeats of one that ``others`` hear; ``quiet_s``: of one that rests."""
    return max(quiet_s, min(SLOWEST_HEARTBEAT_S, max(HEARTBEAT_S, others / TOLD_PER_S)))


def quiet_beat_s(round_s: float) -> float:
    """Seconds between heartbeats in the quiet of a round of ``round_s``; 0 where rounds are too short to have
    any."""
    beat_s = min(LONGEST_HEARTBEAT_S, QUIET_SHARE * round_s)
    return beat_s if beat_s > SLOWEST_HEARTBEAT_S else 0.0


def measure_every_s(heartbeat_s: float) -> float:
    """Seconds between two measurements of the way to a peer."""
    return MEASURE_EVERY_S if heartbeat_s <= SLOWEST_HEARTBEAT_S else MEASURED_BEATS * heartbeat_s
