"""The rehearsal seen by ``monitoring``: a demo's table and summary, with what the lines carried.

Law: the summary is the demo's with the lines added, so that a rehearsal and a demo can be compared figure by
figure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bootstrap.lines import Line
from bootstrap.rehearsal import RehearsalEnd
from monitoring.lines import ExchangeLog, SteadyState, exchange_figures, exchange_words
from monitoring.summary import RunFacts, verdict
from p2p_co2.cli.demo import RunTerminal
from p2p_co2.config import RunConfig
from p2p_co2.telemetry.events import Event


class RehearsalTerminal(RunTerminal):
    """A ``bootstrap.rehearsal.RehearsalWatch``: the lines, the live table, and at the end the summary with
    what the lines carried."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        super().__init__(config, f"rehearsal in {folder}")
        self._exchanges, self._steady = ExchangeLog(), SteadyState(max(1, config.outer.blocking_rounds))

    def begin(self, emulation: str, lines: Sequence[Line]) -> None:
        """Say which lines are emulated and how; then the live table begins."""
        told = ", ".join(f"{line.peer} {line.profile.name}" for line in lines)
        self.say(f"emulation: {emulation}; lines: {told}")
        self.open()

    def see(self, events: Sequence[Event]) -> None:
        for event in events:
            self._exchanges.add(event)
            self._steady.add(event)
        super().see(events)

    def finish(self, end: RehearsalEnd) -> list[str]:
        """Write ``summary.json``, ``report.html`` and ``loss.png``, print the summary; why the run was no
        success, if it was none."""
        self.close()
        facts = RunFacts(
            config=end.config, loss_start=end.loss_start, loss_end=end.loss_end,
            expected_peers=end.expected_peers, software=end.software,
        )  # fmt: skip
        summary = self.conclude(end.folder, facts, self._of_lines(end))
        self.say(exchange_words(summary["exchanges"]))
        self.say(f"written to {end.folder}")
        return [*end.deaths, *verdict(summary, by_loss=False)]

    def _of_lines(self, end: RehearsalEnd) -> dict[str, Any]:
        profiles = {line.peer: line.profile for line in end.lines}
        lines = {
            line.peer: {
                **asdict(line.profile), "address": line.address,
                "round_trip_s": None if line.round_trip_s is None else round(line.round_trip_s, 4),
            }
            for line in end.lines
        }  # fmt: skip
        since = self._steady.since() or 0.0
        return {
            "emulation": end.emulation, "lines": lines, "steady": self._steady.figures(),
            "exchanges": exchange_figures(self._exchanges, end.traffic, profiles, since),
            "forwarder": end.forwarded or None,
        }  # fmt: skip
