"""What happened before a board was opened, from its peer's own journal: as if the board had been there.

Law: a history that reaches further than the journal is left alone, so nothing is told twice; of a journal at
most ``MAX_PAST_BYTES`` are read, and what is no event of this peer is skipped. Price: two or three seconds of
CPU for a full journal, before the first page, and only the peer's own word: what the others did meanwhile is
not in it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from monitoring.history import TIERS, History
from monitoring.model import Model
from p2p_co2.config import RunConfig
from p2p_co2.telemetry.events import Event
from p2p_co2.telemetry.feed import FeedState, News
from p2p_co2.telemetry.journal import newest_events

MAX_PAST_BYTES = 4 << 20
"""Some three hours of a peer."""
ROUNDS_KEPT = 192
"""At a time: each step of the past looks at all of them."""


def recall_journal(journal: Path, me: str, run: RunConfig | None, history: History) -> None:
    """Put what peer ``me`` wrote into ``journal`` since ``history`` ends into it."""
    now = time.time()
    since = max(history.span()[1], now - TIERS[-1][1])
    events = [
        event
        for event in newest_events(journal, MAX_PAST_BYTES)
        if event.peer == me and since < event.at <= now
    ]
    if not events:
        return
    model = Model(_Past(events, run, me), history, ROUNDS_KEPT)
    model.step(now)
    model.keep(now)


@dataclass
class _Past:
    """A ``telemetry.feed.Feed`` that is over."""

    events: list[Event]
    run: RunConfig | None
    me: str
    place: str = "a journal"
    state: FeedState = field(default_factory=lambda: FeedState("ended"))
    is_whole: bool = True

    def take(self) -> News:
        events, self.events = self.events, []
        return News(events)

    def watched(self, now: float) -> None:
        return

    def close(self) -> None:
        return
