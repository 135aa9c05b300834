"""How a run is, once: waits until the peers that are there have answered, or nobody is there."""

from __future__ import annotations

import time
from contextlib import closing

from monitoring.facts import SILENT_AFTER_S, SwarmFacts
from monitoring.model import Model, follow
from monitoring.terminal import FRAME_S
from p2p_co2.telemetry.feed import Feed


def look(feed: Feed, seconds: float) -> SwarmFacts:
    """The facts of ``feed``, which it closes. Raises ``TransportError`` if the run was not reached in
    ``seconds``."""
    answered_at = None
    with closing(follow(feed, FRAME_S, seconds)) as steps:
        for model, moments in steps:
            for _ in moments:
                continue  # the last one counts
            if _is_complete(model):
                answered_at = answered_at or time.monotonic()
                if feed.is_whole or time.monotonic() - answered_at >= 2 * FRAME_S:  # newer figures come
                    break
            else:
                answered_at = None
            if feed.state.phase == "lost":
                break
    model.require_reached()
    return model.facts()


def _is_complete(model: Model) -> bool:
    """Whether there is nothing more to come soon."""
    if model.feed.is_whole:
        return True
    sightings = model.sightings.values()
    if not sightings:
        return model.feed.state.phase == "connected" and "listed yet" not in model.feed.state.words
    since = model.known.now - SILENT_AFTER_S  # a long story comes in several answers, the oldest first
    heard = {peer.peer for peer in model.view.peers.values() if (peer.last_seen_at or 0.0) >= since}
    return all(one.reason or one.refused or one.peer in heard for one in sightings)
