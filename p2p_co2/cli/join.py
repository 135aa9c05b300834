"""A volunteer's own peer on a console: a live view in a terminal, lines in a log or a pipe.

It only reads events, which come from several threads, and never raises into the thread that reports them. A
peer that did not come up leaves no view, so that a refusal is its one line.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rich.console import Console

from monitoring.swarm import swarm_facts
from monitoring.words import as_lines, clock, end_told, figure, percent
from p2p_co2.cli.command import Loudness
from p2p_co2.cli.watch import ConsoleWatch
from p2p_co2.config import RunConfig
from p2p_co2.telemetry import events as ev

LOGGED = (
    ev.PeerStarted, ev.PeerJoined, ev.PeerLeft, ev.RoundAborted, ev.CaughtUp, ev.MessageRefused,
    ev.CheckpointSaved, ev.Paused, ev.Resumed, ev.TrainingEnded, ev.Warned,
)  # fmt: skip
"""Events that get a line of their own where there is no view; with ``--verbose`` all that have words do."""
LEAVING = (
    "leaving after this inner step: what is in flight is awaited, then a checkpoint and the goodbye; Ctrl-C "
    "again ends at once"
)


class JoinWatch(ConsoleWatch):
    """A ``peers.daemon.PeerWatch``. ``come_back``: the command that goes on later, "" to say none;
    ``folder``: the peer's."""

    def __init__(
        self, console: Console | None = None, loudness: Loudness = Loudness.NORMAL, come_back: str = "",
        folder: Path = Path(),
    ) -> None:  # fmt: skip
        super().__init__(console, loudness, "this machine's peer")
        self._come_back = come_back
        self._folder = folder
        self._lock = threading.Lock()
        self._tokens_before: int | None = None
        """Of the checkpoint that it goes on from; None until it is heard."""
        self._last_words: list[str] = []
        self._closed = False

    def know(self, run: RunConfig) -> None:
        """The run that was joined."""
        self.run = run

    def see(self, events: Sequence[ev.Event]) -> None:
        """Take in events; any thread."""
        # A pipe that nobody reads any more, or a log on a full disk, must not end a peer: rich makes a
        # ``SystemExit`` of a broken pipe.
        with self._lock, suppress(OSError, SystemExit):
            for event in events:
                self.view.add(event)
                if isinstance(event, ev.Progress) and self._tokens_before is None:
                    self._tokens_before = event.tokens
                if isinstance(event, ev.PeerStarted):
                    self.me = event.peer
                    if self.terminal is None and not self._closed:
                        self.begin()
                if isinstance(event, ev.PeerFinished):
                    self._last_words = self._goodbye(event)
                if words := self._words(event):
                    super().say(f"{time.strftime('%H:%M:%S')} {words}")
                self.show(event.at)

    def say(self, text: str) -> None:
        """One line above the view; any thread."""
        with self._lock, suppress(OSError, SystemExit):
            if self.loudness is not Loudness.QUIET or text.startswith(("warning", "note")):
                super().say(text)

    def leave(self) -> None:
        """Answer a Ctrl-C; any thread."""
        with self._lock, suppress(OSError, SystemExit):
            if self.terminal is None or not self.console.is_terminal:
                super().say(LEAVING)
            else:
                self.terminal.note = LEAVING
                self.show(time.time(), now=True)

    def close(self) -> None:
        """Show where it ended and give the terminal back; may be called twice."""
        with self._lock, suppress(OSError, SystemExit):
            if self._closed:
                return
            self._closed = True
            if self.terminal is not None:
                self.terminal.note = ""
                self.show(self.view.last_at or 0.0, now=True)
            super().close()
            for line in self._last_words:
                super().say(line)

    def _words(self, event: ev.Event) -> str:
        """What a line of its own says of the event; "" if it gets none."""
        is_quiet = self.loudness is Loudness.QUIET
        is_log = not self.console.is_terminal
        if isinstance(event, ev.Warned) and (is_log or is_quiet):
            return f"warning: {event.text}"  # whole, with its cure
        is_told = is_log and isinstance(event, LOGGED)
        if is_quiet or not (is_told or self.loudness is Loudness.VERBOSE):
            return ""
        return self.describe(event, self.view.labels() | {event.peer: "this peer"})[1]

    def _goodbye(self, event: ev.PeerFinished) -> list[str]:
        """What is said when it is gone: why, what it gave, and how it comes back."""
        lines = [f"left: {event.reason}; agreed state {event.digest[:16]}"]
        facts = swarm_facts(self.known(event.at))
        own = facts.own
        if own is not None and own.inner_steps and own.joined_at is not None:
            tokens = figure(own.tokens - (self._tokens_before or 0))
            made = {one.round for one in self.view.rounds.values() if one.weights.get(own.peer, 0.0) > 0}
            share = f", {percent(own.share_counted)} of what was counted meanwhile" if made else ""
            lines.append(
                f"contributed: {tokens} tokens in {clock(event.at - own.joined_at)}, work in {len(made)} "
                f"round{'s'[: len(made) != 1]}{share}"
            )
            if made:
                lines.append(f"to show it: p2p-co2 credit {self._folder}")
        if event.reason == ev.THE_RUN_IS_OVER:
            command = f"gather {self._folder} OTHER-STAGES" if facts.stages else f"model {self._folder}"
            lines += [*as_lines(end_told(facts)), f"the model: p2p-co2 {command} --out DIR"]
        elif self._come_back:
            lines.append(f"to come back: {self._come_back}")
        return lines
