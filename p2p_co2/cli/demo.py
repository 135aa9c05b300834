"""A demo or a rehearsal seen by ``monitoring``: where the command line puts the applications together.

Stands on the floor of ``cli``, its only user; it exists so that ``bootstrap`` and ``monitoring`` need not
know each other. Price: every event of every peer is folded here, in the process that also starts the peers
(some milliseconds per second).
"""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from bootstrap.demo import DemoEnd
from monitoring.facts import Known
from monitoring.report import write_report
from monitoring.summary import RunFacts, summarise, verdict
from monitoring.terminal import LiveTerminal, print_summary
from p2p_co2.config import RunConfig
from p2p_co2.system.process import program
from p2p_co2.system.socket_activation import Gate
from p2p_co2.telemetry.events import Event
from p2p_co2.telemetry.view import SwarmView


class RunTerminal:
    """The live table of a run of this process's children, and its summary. ``place``: what it is."""

    def __init__(self, config: RunConfig, place: str) -> None:
        self.view = SwarmView()
        # A log file or a pipe has no width: enough for the lines that take the live table's place.
        self.console = Console(width=None if sys.stdout.isatty() else 150)
        self._config, self._place = config, place
        self._terminal: LiveTerminal | None = None

    def open(self) -> None:
        """Begin the table."""
        clock = self._config.clock
        expected_s = clock.rounds * clock.round_s if clock.mode == "time" else None
        self._terminal = LiveTerminal(self.console, expected_s=expected_s)
        self._terminal.__enter__()

    def see(self, events: Sequence[Event]) -> None:
        for event in events:
            self.view.add(event)
        if self._terminal:
            self._terminal.show(Known(self.view, time.time(), self._config, place=self._place))

    def close(self) -> None:
        """Give the terminal back; may be called twice."""
        if self._terminal:
            self._terminal.__exit__(None, None, None)
            self._terminal = None

    def conclude(self, folder: Path, facts: RunFacts, more: Mapping[str, Any]) -> dict[str, Any]:
        """Write ``summary.json``, with ``more``, ``report.html`` and ``loss.png``; print the summary and
        return it."""
        summary = {**summarise(self.view, facts), **more}
        (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        ends = (
            (self.view.started_at, 0, facts.loss_start),
            (self.view.last_at, summary["tokens"], facts.loss_end),
        )
        words = Console(file=io.StringIO(), width=120, record=True)
        print_summary(summary, words)
        agreed = [(at, tokens, loss) for at, tokens, loss in ends if at is not None and loss is not None]
        write_report(folder, words.export_text(), agreed)
        print_summary(summary, self.console)
        return summary

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False)


class DemoWatch(RunTerminal):
    """A ``bootstrap.demo.Watch``: the live table, and at the end the summary, the picture, the report and the
    verdict. ``board``: serve the board at a printed address meanwhile; idle until somebody looks."""

    def __init__(self, config: RunConfig, folder: Path, board: bool = True) -> None:
        super().__init__(config, f"demo in {folder}")
        self._gate: Gate | None = None
        if board:
            self._gate = Gate("127.0.0.1", 0, program("monitoring", str(folder.resolve())))
            print(f"board: {self._gate.address}", flush=True)
        self.open()

    def finish(self, end: DemoEnd) -> list[str]:
        """Write ``summary.json``, ``loss.png`` and ``report.html``, print the summary; why the run was no
        success, if it was none."""
        self.close()
        facts = RunFacts(
            config=end.config, loss_start=end.loss_start, loss_end=end.loss_end,
            expected_peers=end.expected_peers, software=end.software, text=end.text,
        )  # fmt: skip
        summary = self.conclude(end.folder, facts, {})
        for text in (*(f"note: {note}" for note in end.notes), f"written to {end.folder}"):
            self.say(text)
        # Who was killed on purpose need not have finished.
        left = {name: peer for name, peer in summary["peer_table"].items() if name not in end.killed}
        expected = summary["expected_peers"] - len(end.killed)
        return [*end.deaths, *verdict({**summary, "peer_table": left, "expected_peers": expected})]

    def close(self) -> None:
        """Give the terminal and the board's port back; may be called twice."""
        super().close()
        if self._gate is not None:
            self._gate.close()
