"""A demo or a rehearsal on a console, and the files that it leaves.

The summary of a rehearsal is the demo's with the lines added, so that they can be compared figure by figure.
"""

from __future__ import annotations

import io
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from bootstrap.stage import Line, RunEnd
from monitoring.lines import SteadyState, exchange_figures, exchange_words
from monitoring.report import write_report
from monitoring.summary import RunFacts, summarise, verdict
from monitoring.swarm import swarm_facts
from monitoring.terminal import loss_words, print_summary, same_words
from monitoring.words import as_lines, end_told
from p2p_co2.cli.command import Loudness
from p2p_co2.cli.watch import ConsoleWatch
from p2p_co2.config import RunConfig
from p2p_co2.system.extras import missing
from p2p_co2.system.process import program
from p2p_co2.system.socket_activation import SocketActivation
from p2p_co2.telemetry.events import Event


class RunWatch(ConsoleWatch):
    """A ``bootstrap.stage.SwarmWatch``: the live table, and at the end summary, pictures and verdict.

    ``emulation``, ``lines``: of a rehearsal. ``board``: serve the board at a printed address meanwhile, idle
    until somebody looks.
    """

    def __init__(
        self, config: RunConfig, folder: Path, emulation: str = "", lines: Sequence[Line] = (),
        board: bool = False, loudness: Loudness = Loudness.NORMAL,
    ) -> None:  # fmt: skip
        super().__init__(None, loudness, f"{'rehearsal' if emulation else 'demo'} in {folder}", config)
        self._config = config
        self._folder = folder
        self._emulation = emulation
        self._lines = lines
        self._steady = SteadyState(max(1, config.outer.blocking_rounds))
        self._told: set[str] = set()
        self._board: SocketActivation | None = None
        if board:
            where = missing("board")
            if not where:
                self._board = SocketActivation("127.0.0.1", 0, program("monitoring", str(folder.resolve())))
                where = self._board.address
            print(f"board: {where}", flush=True)
        if emulation:
            told = ", ".join(f"{line.peer} {line.profile.name}" for line in lines)
            self.say(f"emulation: {emulation}; lines: {told}")
        clock = config.clock
        self.begin(clock.rounds * clock.round_s if clock.mode == "time" else None)

    def see(self, events: Sequence[Event]) -> None:
        for event in events:
            self.view.add(event)
            self._steady.add(event)
            if self.loudness is Loudness.VERBOSE:
                self._tell(event)
        self.show(time.time())

    def _tell(self, event: Event) -> None:
        """Each event once, though every member reports it."""
        key, words = self.describe(event, self.view.labels())
        if words and key not in self._told:
            self._told.add(key)
            self.say(f"{time.strftime('%H:%M:%S', time.localtime(event.at))} {words}")

    def finish(self, end: RunEnd) -> list[str]:
        """Write ``summary.json``, ``report.html`` and ``loss.png``; print the summary. Returns why the run
        was no success, if it was none."""
        self.close()
        facts = RunFacts(
            config=self._config, loss_start=end.loss_start, loss_end=end.loss_end,
            loss_whole=end.loss_whole, expected_peers=end.expected_peers, software=end.software,
            text=end.text,
        )  # fmt: skip
        summary = summarise(self.view, facts)
        if self._emulation:
            summary |= self._of_lines()
        (self._folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        first = (self.view.started_at, 0)
        last = (self.view.last_at, summary["tokens"])
        agreed, whole = (
            [(at, tokens, loss) for (at, tokens), loss in ends if at is not None and loss is not None]
            for ends in (((first, end.loss_start), (last, end.loss_end)), ((last, end.loss_whole),))
        )
        words = Console(file=io.StringIO(), width=120, record=True)
        print_summary(summary, words)
        left_out = write_report(self._folder, words.export_text(), agreed, whole)
        notes = [f"note: {note}" for note in (*end.notes, *left_out)]
        told = [*notes, *self._came_to(summary)]
        if self._emulation:
            print_summary(summary, self.console)
            told = [exchange_words(summary["exchanges"]), *notes, f"written to {self._folder}"]
        for text in told:
            self.say(text)
        # Who was killed on purpose need not have finished.
        left = {name: peer for name, peer in summary["peer_table"].items() if name not in end.killed}
        expected = summary["expected_peers"] - len(end.killed)
        judged = {**summary, "peer_table": left, "expected_peers": expected}
        return [*end.deaths, *verdict(judged, by_loss=not self._emulation)]

    def _came_to(self, summary: dict[str, Any]) -> list[str]:
        """What every run says at its end, with what only a demo knows; and what to do next."""
        told = end_told(swarm_facts(self.known(self.view.last_at or 0.0)))
        told["end-loss"] = ("Held-out loss", loss_words(summary), "", "")
        told["end-same"] = ("Same parameters", same_words(summary), "", "")
        steps = {
            f"{self._folder / 'report.html'}": "the run on a page, for a browser",
            f"p2p-co2 sample {self._folder}": "text by the trained model",
            f"p2p-co2 board {self._folder}": "the board again, to look around",
        }
        width = max(map(len, steps))
        return [*as_lines(told), "next:", *(f"  {what:{width}}  {why}" for what, why in steps.items())]

    def close(self) -> None:
        """Give the terminal and the board's port back; may be called twice."""
        super().close()
        if self._board is not None:
            self._board.close()

    def _of_lines(self) -> dict[str, Any]:
        profiles = [line.profile for line in self._lines]
        return {
            "emulation": self._emulation,
            "lines": {line.peer: asdict(line.profile) for line in self._lines},
            "steady": self._steady.figures(),
            "exchanges": exchange_figures(self.view, profiles, self._steady.since() or 0.0),
        }
