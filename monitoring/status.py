"""How a run is, once: waits until the peers that are there have answered, or nobody is there."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import closing

from monitoring.facts import SILENT_AFTER_S, SwarmFacts
from monitoring.model import Model, follow
from monitoring.terminal import FRAME_S, line
from monitoring.words import plain
from p2p_co2.telemetry.feed import Feed


def look(feed: Feed, seconds: float, so_far: Callable[[str], None] = lambda words: None) -> SwarmFacts:
    """The facts of ``feed``, which it closes. ``so_far`` hears once, if it takes long, what is known by then
    and who has not answered. Raises ``TransportError`` if the run was not reached in ``seconds``."""
    answered_at = None
    tells_at = time.monotonic() + 4 * FRAME_S
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
                if time.monotonic() >= tells_at:
                    tells_at = math.inf
                    so_far(f"so far: {line(model.facts())}{_still_waits_for(model, seconds)}")
            if feed.state.phase == "lost":
                break
    model.require_reached()
    return model.facts()


def _is_complete(model: Model) -> bool:
    """Whether there is nothing more to come soon."""
    if model.feed.is_whole:
        return True
    if not model.sightings:
        return model.feed.state.phase == "connected" and "listed yet" not in model.feed.state.words
    return not _unanswered(model)


def _unanswered(model: Model) -> list[str]:
    """Peers that are listed, and of which nothing is known yet: neither news nor why there are none."""
    since = model.known.now - SILENT_AFTER_S  # a long story comes in several answers, the oldest first
    heard = {peer.peer for peer in model.view.peers.values() if (peer.last_seen_at or 0.0) >= since}
    listed = model.sightings.values()
    return [one.peer for one in listed if not (one.reason or one.refused or one.peer in heard)]


def _still_waits_for(model: Model, seconds: float) -> str:
    names = [plain(model.known.label(peer), 40) for peer in _unanswered(model)]
    who = f"; no answer yet from {', '.join([*names[:8], '...'][: len(names)])}" if names else ""
    return f"{who} (waits {seconds:g} s at most: --seconds)"
