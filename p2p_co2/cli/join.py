"""A volunteer's own peer, seen by ``monitoring``: a live view in a terminal, lines in a log or a pipe.

It exists so that ``peers`` and ``monitoring`` need not know each other. It only reads events, which come from
several threads, and never raises into the thread that reports them. A peer that did not come up leaves no
view, so that a refusal is its one line.
"""

from __future__ import annotations

import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from rich.console import Console

from monitoring.facts import Known, swarm_facts
from monitoring.own_peer import OwnPeer
from monitoring.terminal import LiveTerminal
from monitoring.words import describe
from p2p_co2.cli.command import Loudness
from p2p_co2.config import RunConfig
from p2p_co2.telemetry import events as ev
from p2p_co2.telemetry.view import SwarmView

LOGGED = (
    ev.PeerStarted, ev.PeerJoined, ev.PeerLeft, ev.RoundAborted, ev.CaughtUp, ev.MessageRefused,
    ev.CheckpointSaved, ev.Paused, ev.Resumed, ev.TrainingEnded, ev.Warned,
)  # fmt: skip
"""Events that get a line of their own where there is no view; with ``--verbose`` all that have words do."""
LEAVING = (
    "leaving after this inner step: what is in flight is awaited, then a checkpoint and the goodbye; Ctrl-C "
    "again ends at once"
)


class JoinWatch:
    """A ``peers.daemon.Watch`` on ``console``, stdout if None. ``come_back``: the command that goes on later,
    "" to say none; ``folder``: the peer's."""

    def __init__(
        self, console: Console | None = None, loudness: Loudness = Loudness.NORMAL, come_back: str = "",
        folder: Path = Path(),
    ) -> None:  # fmt: skip
        self._console = console or Console(width=None if sys.stdout.isatty() else 150)
        self._loudness = loudness
        self._come_back = come_back
        self._folder = folder
        self._lock = threading.Lock()
        self._view = SwarmView()
        self._own = OwnPeer()
        self._run: RunConfig | None = None
        self._last_words: list[str] = []
        self._terminal: LiveTerminal | None = None
        self._closed = False

    def know(self, run: RunConfig) -> None:
        """The run that was joined."""
        self._run = run

    def see(self, event: ev.Event) -> None:
        """Take in one event; any thread."""
        # A pipe that nobody reads any more, or a log on a full disk, must not end a peer: rich makes a
        # ``SystemExit`` of a broken pipe.
        with self._lock, suppress(OSError, SystemExit):
            self._view.add(event)
            self._own.see(event)
            is_quiet = self._loudness is Loudness.QUIET
            if isinstance(event, ev.PeerStarted) and not (self._terminal or self._closed or is_quiet):
                self._terminal = LiveTerminal(self._console, picture=self._own)
                self._terminal.__enter__()
            if isinstance(event, ev.PeerFinished):
                self._last_words = self._goodbye(event)
            if words := self._words(event):
                self._print(f"{time.strftime('%H:%M:%S')} {words}")
            if self._terminal is not None:
                self._terminal.show(self._known(event.at))

    def say(self, text: str) -> None:
        """One line above the view; any thread."""
        with self._lock, suppress(OSError, SystemExit):
            if self._loudness is not Loudness.QUIET or text.startswith(("warning", "note")):
                self._print(text)

    def leave(self) -> None:
        """Answer a Ctrl-C; any thread."""
        with self._lock, suppress(OSError, SystemExit):
            self._own.leaving = LEAVING
            if self._terminal is None or not self._console.is_terminal:
                self._print(LEAVING)
            else:
                self._terminal.show(self._known(time.time()), now=True)

    def close(self) -> None:
        """Show where it ended and give the terminal back; may be called twice."""
        with self._lock, suppress(OSError, SystemExit):
            if self._closed:
                return
            self._closed = True
            self._own.leaving = ""
            if self._terminal is not None:
                self._terminal.show(self._known(self._view.last_at or 0.0), now=True)
                self._terminal.__exit__(None, None, None)
                self._terminal = None
            for line in self._last_words:
                self._print(line)

    def _known(self, now: float) -> Known:
        return Known(self._view, now, self._run, me=self._own.peer)

    def _words(self, event: ev.Event) -> str:
        """What a line of its own says of the event; "" if it gets none."""
        is_quiet = self._loudness is Loudness.QUIET
        is_log = not self._console.is_terminal
        if isinstance(event, ev.Warned) and (is_log or is_quiet):
            return f"warning: {event.text}"  # whole, with its cure
        is_told = is_log and isinstance(event, LOGGED)
        if is_quiet or not (is_told or self._loudness is Loudness.VERBOSE):
            return ""
        return describe(event, {event.peer: "this peer"}, self._view.stage_of(event))[1]

    def _goodbye(self, event: ev.PeerFinished) -> list[str]:
        """What is said when it is gone: why, what it gave, and how it comes back."""
        facts = swarm_facts(self._known(event.at))
        lines = [f"left: {event.reason}; agreed state {event.digest[:16]}", self._own.contribution(facts)]
        if event.reason == "the run is over":
            lines.append(f"the model: p2p-co2 model {self._folder / 'checkpoint'} --out DIR")
        elif self._come_back:
            lines.append(f"to come back: {self._come_back}")
        return [line for line in lines if line]

    def _print(self, text: str) -> None:
        plain = "".join(char if char.isprintable() else "?" for char in text)
        self._console.print(plain, markup=False, highlight=False, soft_wrap=True)
