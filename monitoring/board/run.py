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
from monitoring.history import History
from monitoring.model import Model
from monitoring.past import recall_journal
from p2p_co2.system.process import StopSignals
from p2p_co2.telemetry.feed import Feed

IDLE_S = 90.0
"""A board behind a gate ends after this long without a request or an open page."""
KNOWN_WITHIN_S = 5.0
"""By then a board knows which peer it belongs to, or does without its past."""


def run_board(feed: Feed, place: Place, history: Path | None, say: Callable[[str], None] = print) -> int:
    """Serve ``feed`` at ``place`` until SIGINT or SIGTERM; returns the exit status. Closes the feed.

    ``history``: the SQLite file; None keeps it in memory, and so does a place that cannot be written, which
    is said. Raises ``EnvironmentFault`` if the port is taken.
    """
    try:
        bound = listening_socket(place)
        say(f"board: {address(place, bound)}")
        _run(feed, place, bound, history, lambda activity: False, say)
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

    try:
        _run(feed, Place(), bound, history, is_over, lambda words: None, journal)  # the page says it
    finally:
        feed.close()
    return 0


def _run(
    feed: Feed, place: Place, bound: socket.socket, history: Path | None, over: Callable[[Activity], bool],
    say: Callable[[str], None], journal: Path | None = None,
) -> None:  # fmt: skip
    kept = History.or_in_memory(history)
    if kept.trouble:
        say(f"warning: {kept.trouble}")
    try:
        if journal is not None and journal.exists():
            ends_at = time.monotonic() + KNOWN_WITHIN_S
            while not feed.me and time.monotonic() < ends_at:
                time.sleep(0.02)
            recall_journal(journal, feed.me, feed.run, kept)
        asyncio.run(_serve_until_stopped(Model(feed, kept), place, bound, over))
    finally:
        kept.close()


async def _serve_until_stopped(
    model: Model, place: Place, bound: socket.socket, is_over: Callable[[Activity], bool]
) -> None:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    with StopSignals(lambda: _set(loop, stop)):
        await serve(model, place, bound, stop, is_over)


def _set(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    loop.call_soon_threadsafe(stop.set)
