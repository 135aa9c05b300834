"""A volunteer's own peer, seen by ``monitoring``: the live table where ``join`` runs in a terminal.

Stands on the floor of ``cli``, its only user; it exists so that ``peers`` and ``monitoring`` need not know
each other. Laws: it only reads events, which come from several threads; it never raises into the thread that
reports them; a peer that did not come up leaves no table, so that a refusal is its one line.
"""

from __future__ import annotations

import threading

from rich.console import Console

from monitoring.facts import Known
from monitoring.terminal import LiveTerminal
from p2p_co2.telemetry.events import Event, PeerFinished, PeerStarted
from p2p_co2.telemetry.view import SwarmView


class JoinWatch:
    """A ``peers.daemon.Watch`` on ``console``, which is a terminal."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._lock = threading.Lock()
        self._view = SwarmView()
        self._last_words = ""
        self._terminal: LiveTerminal | None = None
        self._closed = False

    def see(self, event: Event) -> None:
        """Take in one event; any thread."""
        with self._lock:
            self._view.add(event)
            if isinstance(event, PeerStarted) and self._terminal is None and not self._closed:
                self._terminal = LiveTerminal(self._console, own=True)
                self._terminal.__enter__()
            if isinstance(event, PeerFinished):
                self._last_words = f"left: {event.reason}; agreed state {event.digest[:16]}"
            if self._terminal is not None:
                self._terminal.show(Known(self._view, event.at))

    def say(self, text: str) -> None:
        """One line above the table; any thread."""
        with self._lock:
            self._print(text)

    def close(self) -> None:
        """Show where it ended and give the terminal back; may be called twice."""
        with self._lock:
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
        self._console.print(plain, markup=False, highlight=False)
