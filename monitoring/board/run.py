"""Runs a board until somebody stops it: the program behind ``p2p-co2 board``, and behind a peer's own
page."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from monitoring.board.server import Activity, Place, address, listening_socket, serve
from monitoring.feeds import PastFeed
from monitoring.history import TIERS, History
from monitoring.model import Model, Recorder
from p2p_co2.config import RunConfig
from p2p_co2.errors import EnvironmentFault
from p2p_co2.system.process import StopSignals
from p2p_co2.telemetry.feed import Feed
from p2p_co2.telemetry.journal import read_events

IDLE_S = 90.0
"""A board behind a gate ends after this long without a request or an open page."""
KNOWN_WITHIN_S = 5.0
"""By then a board knows which peer it belongs to, or does without its past."""
MAX_PAST_BYTES = 4 << 20
"""Of a peer's journal, some three hours."""
PAST_ROUNDS_KEPT = 192
"""At a time: each step of the past looks at all of them."""


def run_board(feed: Feed, place: Place, history: Path | None, say: Callable[[str], None] = print) -> int:
    """Serve ``feed`` at ``place`` until SIGINT or SIGTERM; returns the exit status. Closes the feed.

    ``history``: the SQLite file; None keeps it in memory, and so does a place that cannot be written, which
    is said. Raises ``EnvironmentFault`` if the port is taken.
    """
    try:
        bound = listening_socket(place)
        say(f"board: {address(place, bound)}")
        kept = History.or_in_memory(history)
        if kept.trouble:
            say(f"warning: {kept.trouble}")
        _run(feed, place, bound, kept, lambda activity: False)
    finally:
        feed.close()
    return 0


def run_behind_gate(
    feed: Feed,
    bound: socket.socket,
    history: Path | None,
    gone: threading.Event | None = None,
    journal: Path | None = None,
) -> int:
    """Serve on an inherited loopback socket until nobody looks, or ``gone`` is set. ``journal``: what the
    feed's own peer wrote before anybody looked, to begin with."""

    def is_over(activity: Activity) -> bool:
        return activity.idle_s() > IDLE_S or (gone is not None and gone.is_set())

    kept = History.or_in_memory(history)
    try:
        if journal is not None:
            ends_at = time.monotonic() + KNOWN_WITHIN_S
            while not feed.me and time.monotonic() < ends_at:
                time.sleep(0.02)
            recall_journal(journal, feed.me, feed.run, kept)
        _run(feed, Place(), bound, kept, is_over)
    finally:
        feed.close()
    return 0


def recall_journal(journal: Path, me: str, run: RunConfig | None, history: History) -> None:
    """Put what peer ``me`` wrote into ``journal`` since ``history`` ends into it, as if a board had been
    there. Price: two or three seconds of CPU for a full journal, and only the peer's own word."""
    now = time.time()
    since = max(history.span()[1], now - TIERS[-1][1])
    try:
        told = read_events(journal, MAX_PAST_BYTES)
    except EnvironmentFault:
        return  # it was written by an own loop, or not at all
    events = [event for event in told if event.peer == me and since < event.at <= now]
    if events:
        Recorder(Model(PastFeed(events, run, me), PAST_ROUNDS_KEPT), history).follow(now)


def _run(
    feed: Feed, place: Place, bound: socket.socket, history: History, is_over: Callable[[Activity], bool]
) -> None:
    async def until_stopped() -> None:
        loop, stop = asyncio.get_running_loop(), asyncio.Event()

        def end() -> None:
            loop.call_soon_threadsafe(stop.set)

        with StopSignals(end):
            await serve(Model(feed), history, place, bound, stop, is_over)

    try:
        asyncio.run(until_stopped())
    finally:
        history.close()
