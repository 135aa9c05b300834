"""The rehearsal seen by ``monitoring``: where the command line puts the two applications together.

Stands on the floor of ``cli``, as ``cli.demo`` does and for the same reason. Law: the summary is the demo's
with the lines added, so that a rehearsal and a demo can be compared figure by figure.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from bootstrap.lines import Line
from bootstrap.rehearsal import RehearsalEnd
from monitoring.known import Known
from monitoring.lines import ExchangeLog, SteadyState, exchange_figures, lines_table, print_exchanges
from monitoring.picture import draw_run
from monitoring.summary import RunFacts, summarise, verdict
from monitoring.terminal import LiveTerminal, print_summary
from p2p_co2.config import RunConfig
from p2p_co2.telemetry.events import Event
from p2p_co2.telemetry.view import SwarmView


class RehearsalTerminal:
    """A ``bootstrap.rehearsal.RehearsalWatch``: the lines, the live table, and at the end the summary with
    what the lines carried."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        self._view, self._exchanges = SwarmView(), ExchangeLog()
        self._steady = SteadyState(max(1, config.outer.blocking_rounds))
        # A log file or a pipe has no width: enough for the lines that take the live table's place.
        self._console = Console(width=None if sys.stdout.isatty() else 150)
        self._config, self._place = config, f"rehearsal in {folder}"
        clock = config.clock
        self._expected_s = clock.rounds * clock.round_s if clock.mode == "time" else None
        self._terminal: LiveTerminal | None = None

    def begin(self, emulation: str, lines: Sequence[Line]) -> None:
        """Print which lines are emulated and how; then the live table begins."""
        self._console.print(f"emulation: {emulation}", markup=False, highlight=False)
        rows = [(line.peer, line.profile, line.address, line.round_trip_s) for line in lines]
        self._console.print(lines_table(rows, self._console.width))
        self._terminal = LiveTerminal(self._console, expected_s=self._expected_s)
        self._terminal.__enter__()

    def see(self, events: Sequence[Event]) -> None:
        for event in events:
            self._view.add(event)
            self._exchanges.add(event)
            self._steady.add(event)
        if self._terminal:
            self._terminal.show(Known(self._view, time.time(), self._config, place=self._place))

    def finish(self, end: RehearsalEnd) -> list[str]:
        """Write ``summary.json`` and ``loss.png``, print the summary; why the run was no success, if it was
        none."""
        self.close()
        facts = RunFacts(
            config=end.config,
            loss_start=end.loss_start,
            loss_end=end.loss_end,
            expected_peers=end.expected_peers,
            software=end.software,
        )
        summary = {**summarise(self._view, facts), **self._of_lines(end)}
        (end.folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        profiles = ", ".join(sorted({line.profile.name for line in end.lines}))
        draw_run(
            self._view,
            end.folder / "loss.png",
            title=f"{summary['peers']} peers over {profiles}",
            loss_start=end.loss_start,
            loss_end=end.loss_end,
            loss_unit=summary["loss"]["unit"],
        )
        print_summary(summary, self._console)
        print_exchanges(summary, self._console)
        self._console.print(f"written to {end.folder}", markup=False, highlight=False)
        return [*end.deaths, *verdict(summary, by_loss=False)]

    def close(self) -> None:
        """Give the terminal back; may be called twice."""
        if self._terminal:
            self._terminal.__exit__(None, None, None)
            self._terminal = None

    def _of_lines(self, end: RehearsalEnd) -> dict[str, Any]:
        profiles = {line.peer: line.profile for line in end.lines}
        since = self._steady.since() or 0.0
        return {
            "emulation": end.emulation,
            "lines": {
                line.peer: {
                    **asdict(line.profile),
                    "address": line.address,
                    "round_trip_s": None if line.round_trip_s is None else round(line.round_trip_s, 4),
                }
                for line in end.lines
            },
            "steady": self._steady.figures(),
            "exchanges": exchange_figures(self._exchanges, end.traffic, profiles, since),
            "forwarder": end.forwarded or None,
        }
