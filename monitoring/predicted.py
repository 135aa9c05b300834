"""What the planner would have said of the swarm as it is now: predicted against actual utilisation.

``planning.forecast`` is given the run's settings, the measured time of an inner step and the measured links.
Law: a function of facts; None while something is not measured yet, or when what peers say cannot be.
Price: some milliseconds, so the model asks for it every ``EVERY_S``.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from monitoring.facts import PeerFacts
from monitoring.peer_state import ONLINE
from p2p_co2.config import RunConfig
from p2p_co2.planning import Link, even_fragments, forecast, setting_of

EVERY_S = 10.0
MAX_PARAMETERS = 10**13
MAX_LINKS = 64
_STEP_S = (1e-5, 1e4)
_RATE = (100.0, 1e12)
_MOST_TRIP_S = 60.0


def predicted_utilisation(
    run: RunConfig | None, parameters: int, fragments: int, peers: Sequence[PeerFacts]
) -> float | None:
    """The utilisation, 0 to 1, that was to be expected of the peers online by now."""
    online = [peer for peer in peers if peer.state in ONLINE and peer.inner_steps][:MAX_LINKS]
    links = [link for peer in online if (link := _link(peer, peers)) is not None]
    steps = [_step_s(peer) for peer in online]
    if run is None or len(links) < 2 or not 0 < fragments <= parameters <= MAX_PARAMETERS:
        return None
    step_s = statistics.median(steps)
    elapsed_s = max(peer.wall_s for peer in online)
    if not _STEP_S[0] <= step_s <= _STEP_S[1] or elapsed_s <= 0:
        return None
    setting = setting_of(run, even_fragments(parameters, fragments), step_s, links)
    so_far = dataclasses.replace(setting, rounds=0)
    return forecast(so_far, horizon_s=max(elapsed_s, setting.round_s)).utilisation


def _step_s(peer: PeerFacts) -> float:
    """Seconds of one inner step, from the peer's own counters."""
    return (peer.utilisation or 0.0) * peer.wall_s / peer.inner_steps


def _link(peer: PeerFacts, peers: Sequence[PeerFacts]) -> Link | None:
    """What its link has shown: its fastest burst out, at most its cap, the fastest burst to it, and the
    median round trip."""
    rates = [link.bytes_per_s for link in peer.links if link.bytes_per_s]
    trips = [link.round_trip_s for link in peer.links if link.round_trip_s]
    inward = [
        link.bytes_per_s
        for other in peers
        for link in other.links
        if link.other == peer.peer and link.bytes_per_s
    ]
    if not rates or not inward:
        return None
    up = min(max(rates), peer.upload_cap_bytes_per_s or max(rates))
    down, trip_s = max(inward), statistics.median(trips) if trips else 0.0
    if not all(_RATE[0] <= rate <= _RATE[1] for rate in (up, down)) or trip_s > _MOST_TRIP_S:
        return None
    return Link(up_bytes_per_s=up, down_bytes_per_s=down, round_trip_s=trip_s)
