"""The demo seen by ``monitoring``: where the command line puts the two applications together.

Stands on the floor of ``cli``, its only user; it exists so that ``bootstrap`` and ``monitoring`` need not
know each other. Price: every event of every peer is folded here, in the process that also starts the peers
(some milliseconds per second).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from bootstrap.demo import DemoEnd
from monitoring.known import Known
from monitoring.picture import draw_run
from monitoring.report import write_report
from monitoring.summary import RunFacts, summarise, verdict
from monitoring.terminal import LiveTerminal, print_summary
from p2p_co2.config import RunConfig
from p2p_co2.system.process import program
from p2p_co2.system.socket_activation import Gate
from p2p_co2.telemetry.events import Event
from p2p_co2.telemetry.view import SwarmView


class DemoWatch:
    """A ``bootstrap.demo.Watch``: the live table, and at the end the summary, the picture, the report and the
    verdict. ``board``: serve the board at a printed address meanwhile; idle until somebody looks."""

    def __init__(self, config: RunConfig, folder: Path, board: bool = True) -> None:
        self._view = SwarmView()
        # A log file or a pipe has no width: enough for the lines that take the live table's place.
        self._console = Console(width=None if sys.stdout.isatty() else 150)
        self._config, self._place = config, f"demo in {folder}"
        self._gate: Gate | None = None
        if board:
            command = program("monitoring", str(folder.resolve()))
            self._gate = Gate("127.0.0.1", 0, command)
            print(f"board: {self._gate.address}", flush=True)
        expected_s = config.clock.rounds * config.clock.round_s
        self._terminal: LiveTerminal | None = LiveTerminal(self._console, expected_s=expected_s)
        self._terminal.__enter__()

    def see(self, events: Sequence[Event]) -> None:
        for event in events:
            self._view.add(event)
        if self._terminal:
            self._terminal.show(Known(self._view, time.time(), self._config, place=self._place))

    def finish(self, end: DemoEnd) -> list[str]:
        """Write ``summary.json``, ``loss.png`` and ``report.html``, print the summary; why the run was no
        success, if it was none."""
        self.close()
        facts = RunFacts(
            config=end.config,
            loss_start=end.loss_start,
            loss_end=end.loss_end,
            expected_peers=end.expected_peers,
            software=end.software,
            text=end.text,
        )
        summary = summarise(self._view, facts)
        (end.folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        draw_run(
            self._view,
            end.folder / "loss.png",
            title=f"{summary['peers']} peers, {end.config.codec.name}, rule {end.config.outer.rule}",
            loss_start=end.loss_start,
            loss_end=end.loss_end,
            loss_unit=summary["loss"]["unit"],
        )
        ends = (
            (self._view.started_at, 0, end.loss_start),
            (self._view.last_at, summary["tokens"], end.loss_end),
        )
        agreed = [(at, tokens, loss) for at, tokens, loss in ends if at is not None and loss is not None]
        write_report(end.folder, end.folder / "report.html", agreed)
        print_summary(summary, self._console)
        for note in end.notes:
            self._console.print(f"note: {note}", markup=False, highlight=False)
        self._console.print(f"written to {end.folder}", markup=False, highlight=False)
        return [*end.deaths, *verdict(_without(summary, end.killed))]

    def close(self) -> None:
        """Give the terminal and the board's port back; may be called twice."""
        if self._gate is not None:
            self._gate.close()
        if self._terminal:
            self._terminal.__exit__(None, None, None)
            self._terminal = None


def _without(summary: dict[str, object], killed: Sequence[str]) -> dict[str, object]:
    """The summary as the verdict is to see it: who was killed on purpose need not have finished."""
    table = summary["peer_table"]
    assert isinstance(table, dict)
    left = {name: peer for name, peer in table.items() if name not in killed}
    expected = summary["expected_peers"]
    assert isinstance(expected, int)
    return {**summary, "peer_table": left, "expected_peers": expected - len(killed)}
