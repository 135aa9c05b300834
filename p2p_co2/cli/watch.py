"""A run, or one's own peer in it, on a console: what ``demo``, ``rehearse`` and ``join`` share.

It exists so that ``bootstrap`` and ``peers`` need not know ``monitoring``. Every event is folded here, in the
process that runs the peers (some milliseconds per second).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from rich.console import Console

from monitoring.known import Known
from monitoring.terminal import LiveTerminal
from monitoring.words import describe
from p2p_co2.cli.command import Loudness
from p2p_co2.config import RunConfig
from p2p_co2.telemetry.events import Event
from p2p_co2.telemetry.view import SwarmView


class ConsoleWatch:
    """The base of a ``telemetry.watch.Watch`` on ``console``, stdout if None. ``loudness``: quiet shows no
    live view, verbose tells each event that has words. ``me``: the own peer, "" if it is nobody's."""

    def __init__(
        self, console: Console | None, loudness: Loudness, place: str, run: RunConfig | None = None
    ) -> None:
        # A log file or a pipe has no width: enough for the lines that take the live view's place.
        self.console = console or Console(width=None if sys.stdout.isatty() else 150)
        self.loudness = loudness
        self.view = SwarmView()
        self.run = run
        self.me = ""
        self.terminal: LiveTerminal | None = None
        self._place = place

    def known(self, now: float) -> Known:
        """At ``now``, unix seconds."""
        return Known(self.view, now, self.run, place=self._place, me=self.me)

    def begin(self, expected_s: float | None = None) -> None:
        """Begin the live view, unless all is to be quiet."""
        if self.loudness is not Loudness.QUIET:
            self.terminal = LiveTerminal(self.console, expected_s=expected_s)
            self.terminal.__enter__()

    def show(self, at: float, *, now: bool = False) -> None:
        if self.terminal is not None:
            self.terminal.show(self.known(at), now=now)

    def describe(self, event: Event, labels: Mapping[str, str]) -> tuple[str, str]:
        """As ``monitoring.words.describe``."""
        return describe(event, labels, self.view.stage_of(event))

    def say(self, text: str) -> None:
        """One line above the view."""
        plain = "".join(char if char.isprintable() else "?" for char in text)
        self.console.print(plain, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Give the terminal back; may be called twice."""
        if self.terminal is not None:
            self.terminal.__exit__(None, None, None)
            self.terminal = None
