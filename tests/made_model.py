"""A board's model of a made-up swarm, an honest one and one in which a peer says all that it may."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from monitoring import charts
from monitoring.history import AGREED, SWARM, History
from monitoring.model import Model, Recorder
from p2p_co2.telemetry import events as ev
from p2p_co2.telemetry.feed import Feed, Sighting
from tests.made_swarm import MadeFeed, MadeSwarm, peer_id

START = 1_800_000_000.0
EVIL = "<img src=x onerror=alert(1)>{a|b}\x1b[2J"


def followed(feed: Feed, now: float, history: History | None = None) -> tuple[Model, History]:
    """A model of all that ``feed`` gives by ``now``, and the history that was kept of it."""
    model, kept = Model(feed), history or History(None)
    Recorder(model, kept).follow(now)
    return model, kept


def model_after(seconds: int, peers: int = 6, **options: Any) -> tuple[Model, History]:
    feed = MadeFeed(MadeSwarm(peers, start_at=START, **options))
    feed.advance(seconds)
    return followed(feed, START + seconds)


def evil_model() -> tuple[Model, History]:
    """A swarm in which one peer says all that the checks of a report let pass."""
    feed = MadeFeed(MadeSwarm(3, start_at=START))
    feed.advance(40)
    feed.take()
    bad = peer_id(9)
    numbers = {
        "inner_steps": 2**53,
        "tokens": 2**53,
        "up_bytes": 2**53,
        "down_bytes": 0,
        "versions": (2**53,) * 256,
    }
    feed.news.events += [
        ev.PeerStarted(at=START, peer=bad, name=EVIL, pid=0, software=EVIL, device=EVIL, parameters=2**53,
                       fragments=2**53, run=EVIL),
        ev.Progress(at=START + 1, peer=bad, phase=EVIL, position=1e15, tokens_per_s=1e15, loss=math.nan,
                    train_s=1e15, exposed_s=1e15, wall_s=0.0, **numbers),
        ev.LinkMeasured(at=START + 1, peer=bad, other=peer_id(0), carrier=EVIL, relayed=True,
                        round_trip_s=1e15,
                        bytes_per_s=1e15, sent_bytes=2**53),
        ev.FragmentApplied(at=START + 1, peer=bad, fragment=255, version=2**40, contributed=True,
                           staleness=2**53, sync_delay_steps=2**53, sync_delay_s=1e15,
                           gap=1e15, momentum_norm=1e15),
        ev.RoundCommitted(at=START + 1, peer=bad, fragment=255, round=2**40, coordinator=EVIL,
                          group_size=2**53,
                          contributors=0, partial=2**53, duration_s=1e15),
        ev.RoundAborted(at=START + 1, peer=bad, fragment=255, round=2**40, reason=EVIL),
        ev.Warned(at=START + 39, peer=bad, text=EVIL),
        ev.MessageRefused(at=START + 39, peer=bad, other=EVIL, reason=EVIL),
    ]  # fmt: skip
    feed.news.sightings.append(Sighting(bad, "answering", refused=Counter({EVIL: 3})))
    feed.is_whole = False
    return followed(feed, START + 40)


def all_charts(model: Model, history: History) -> list[charts.Options]:
    facts, palette = model.facts(), charts.DARK
    rows, agreed = (history.series(key, *history.span()) for key in (SWARM, AGREED))
    return [
        charts.loss(palette, rows, agreed, over_tokens=True),
        charts.loss(palette, rows, agreed),
        *(charts.over_time(palette, rows, lines) for _, _, lines in charts.TRENDS.values()),
        charts.rounds(palette, facts.rounds, facts.fragments),
        charts.staleness(palette, {f: {0: 3, 7: 1} for f in range(3)}),
        charts.staleness(palette, {0: {2**53: 1}}),
    ]
