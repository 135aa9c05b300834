"""Staleness: how late answers come, fragment by fragment and round by round."""

from __future__ import annotations

from typing import Any

from nicegui import ui

from monitoring import charts
from monitoring.board.shell import Chart, Frame, Text, card, head, outcome_legend, tiles
from monitoring.facts import ONLINE, SwarmFacts
from monitoring.history import fragment_key
from monitoring.words import clock, figure

MAX_LINES = 8
"""Fragments whose gap and momentum are drawn; more lines than that tell nobody anything."""


class StalenessPage:
    def __init__(self, frame: Frame) -> None:
        self._frame = frame

    def build(self) -> None:
        self._tiles = tiles({
            "staleness-mean": "Mean staleness", "delay": "Send to apply", "late": "Rounds late or partial",
            "oldest": "Oldest fragment",
        })  # fmt: skip
        hint = "a cell is one round of one fragment: group size inside, why on hover, click for its time line"
        with card("Rounds", hint):
            outcome_legend()
            self._heat = Chart("chart-rounds", "", on_click=self._open_round)
            self._note = Text("b-hint")
        with ui.element("div").classes("b-two"):
            with card("Staleness", "outer steps between a gradient's parameters and those it met"):
                self._histogram = Chart("chart-staleness")
            with card("Age of every fragment on every peer", "seconds since agreed parameters last arrived"):
                self._ages = Chart("chart-ages")
        with card("Over time") as panel, head(panel):
            self._frame.range_choice()
        with panel, ui.element("div").classes("b-two"):
            with ui.element("div"):
                ui.label("Gap penalty (divisor, 1 is none; the largest of the peers)").classes("b-hint")
                self._gap = Chart("chart-gap", "low")
            with ui.element("div"):
                ui.label("Momentum norm (mean of the peers)").classes("b-hint")
                self._momentum = Chart("chart-momentum", "low")

    def refresh(self, facts: SwarmFacts) -> None:
        shown, applied = self._tiles, figure(sum(facts.staleness.values()))
        shown["staleness-mean"].set(figure(facts.staleness_mean, 2), "outer steps", f"of {applied} applied")
        delay = figure(facts.sync_delay_steps_mean, 1)
        shown["delay"].set(delay, "inner steps", "mean over all applied")
        odd = sum(found.outcome in {"late", "partial"} for found in facts.rounds)
        aborted = sum(found.outcome == "aborted" for found in facts.rounds)
        shown["late"].set(figure(odd), "", f"of the newest {len(facts.rounds)}; {aborted} aborted")
        ages = [
            (age, peer.label)
            for peer in facts.peers
            for age in peer.fragment_age_s
            if age is not None and (peer.state in ONLINE or not facts.peers_online)
        ]
        oldest, label = max(ages, default=(None, ""))
        shown["oldest"].set(clock(oldest), "min:s", f"on {label}" if label else "")

    def redraw(self, facts: SwarmFacts) -> None:
        palette, shown = self._frame.palette, min(facts.fragments, MAX_LINES)
        # The peers online; once nobody is, all of them.
        peers = [peer for peer in facts.peers if peer.state in ONLINE] or facts.peers
        self._heat.set(charts.rounds(palette, facts.rounds, facts.fragments))
        self._note.set(f"Lines below: fragments 0 to {shown - 1}." if facts.fragments > shown else "")
        self._histogram.set(charts.staleness(palette, self._frame.model.view.fragment_staleness))
        self._ages.set(charts.ages(palette, peers, facts.fragments))
        span = self._frame.span(facts)
        rows = {number: self._frame.history.series(fragment_key(number), *span) for number in range(shown)}
        self._gap.set(charts.fragment_lines(palette, rows, 1))
        self._momentum.set(charts.fragment_lines(palette, rows, 2))

    def _open_round(self, click: Any) -> None:
        value = click.data["value"] if isinstance(click.data, dict) else click.value
        numbers = charts.round_columns(self._frame.model.facts().rounds)
        ui.navigate.to(f"/round/{int(value[1])}/{numbers[int(value[0])]}")
