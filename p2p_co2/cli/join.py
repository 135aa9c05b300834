"""A volunteer's own peer, seen by ``monitoring``: the live table in a terminal, lines in a log or a pipe.

It exists so that ``peers`` and ``monitoring`` need not know each other. It only reads events, which come from
several threads, and never raises into the thread that reports them. A peer that did not come up leaves no
table, so that a refusal is its one line.
"""

from __future__ import annotations

import sys
import threading
import time
from contextlib import suppress

from rich.console import Console

from monitoring.facts import Known
from monitoring.terminal import LiveTerminal
from monitoring.words import describe
from p2p_co2.telemetry import events as ev
from p2p_co2.telemetry.view import SwarmView

LOGGED = (
    ev.PeerStarted, ev.PeerJoined, ev.PeerLeft, ev.RoundAborted, ev.CaughtUp, ev.MessageRefused,
    ev.CheckpointSaved, ev.Paused, ev.Resumed, ev.TrainingEnded, ev.Warned,
)  # fmt: skip
"""Events that get a line of their own where there is no table."""


class JoinWatch:
    """A ``peers.daemon.Watch`` on ``console``, stdout if None."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(width=None if sys.stdout.isatty() else 150)
        self._lock = threading.Lock()
        self._view = SwarmView()
        self._last_words = ""
        self._terminal: LiveTerminal | None = None
        self._closed = False

    def see(self, event: ev.Event) -> None:
        """Take in one event; any thread."""
        # A pipe that nobody reads any more, or a log on a full disk, must not end a peer: rich makes a
        # ``SystemExit`` of a broken pipe.
        with self._lock, suppress(OSError, SystemExit):
            self._view.add(event)
            if isinstance(event, ev.PeerStarted) and self._terminal is None and not self._closed:
                self._terminal = LiveTerminal(self._console, own=True)
                self._terminal.__enter__()
            if isinstance(event, ev.PeerFinished):
                self._last_words = f"left: {event.reason}; agreed state {event.digest[:16]}"
            if isinstance(event, LOGGED) and not self._console.is_terminal:
                words = describe(event, {event.peer: "this peer"}, self._view.stage_of(event))[1]
                if isinstance(event, ev.Warned):
                    words = f"warning: {event.text}"  # whole, with its cure
                self._print(f"{time.strftime('%H:%M:%S')} {words}")
            if self._terminal is not None:
                self._terminal.show(Known(self._view, event.at))

    def say(self, text: str) -> None:
        """One line above the table; any thread."""
        with self._lock, suppress(OSError, SystemExit):
            self._print(text)

    def close(self) -> None:
        """Show where it ended and give the terminal back; may be called twice."""
        with self._lock, suppress(OSError, SystemExit):
            self._closed = True
            if self._terminal is None:
                return
            self._terminal.show(Known(self._view, self._view.last_at or 0.0), now=True)
            self._terminal.__exit__(None, None, None)
            self._terminal = None
            if self._last_words:
                self._print(self._last_words)

    def _print(self, text: str) -> None:
        plain = "".join(char if char.isprintable() else "?" for char in text)
        self._console.print(plain, markup=False, highlight=False, soft_wrap=True)
