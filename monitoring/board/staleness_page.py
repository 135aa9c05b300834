"""Staleness: how late answers come, fragment by fragment and round by round."""

from __future__ import annotations

from typing import Any

from nicegui import ui

from monitoring import charts
from monitoring.board.shell import Chart, Frame, Text, Tile, card, outcome_legend
from monitoring.facts import PeerFacts, RoundFacts, SwarmFacts
from monitoring.peer_state import ONLINE
from monitoring.words import clock, figure

MAX_LINES = 8
"""Fragments whose gap and momentum are drawn; more lines than that tell nobody anything."""


class StalenessPage:
    def __init__(self, frame: Frame) -> None:
        self._frame, self._model = frame, frame.model
        self._rounds: list[RoundFacts] = []

    def build(self) -> None:
        with ui.element("div").classes("b-tiles four"):
            self._tiles = {
                name: Tile(caption, name)
                for name, caption in (
                    ("staleness-mean", "Mean staleness"), ("delay", "Send to apply"),
                    ("late", "Rounds late or partial"), ("oldest", "Oldest fragment"),
                )
            }  # fmt: skip
        with card(
            "Rounds",
            "a cell is one round of one fragment: group size inside, why on hover, click for its time line",
        ):
            outcome_legend()
            self._heat = Chart("chart-rounds", "", on_click=self._open_round)
            self._note = Text("b-hint")
        with ui.element("div").classes("b-two"):
            with card("Staleness", "outer steps between a gradient's parameters and those it met"):
                self._histogram = Chart("chart-staleness")
            with card("Age of every fragment on every peer", "seconds since agreed parameters last arrived"):
                self._ages = Chart("chart-ages")
        with card("Over time") as panel, panel.default_slot.children[0]:
            ui.element("div").classes("b-grow")
            self._frame.range_choice()
        with panel, ui.element("div").classes("b-two"):
            with ui.element("div"):
                ui.label("Gap penalty (divisor, 1 is none; the largest of the peers)").classes("b-hint")
                self._gap = Chart("chart-gap", "low")
            with ui.element("div"):
                ui.label("Momentum norm (mean of the peers)").classes("b-hint")
                self._momentum = Chart("chart-momentum", "low")

    def refresh(self, facts: SwarmFacts) -> None:
        steps = sum(facts.staleness.values())
        self._tiles["staleness-mean"].set(
            figure(facts.staleness_mean, 2), "outer steps", f"of {figure(steps)} applied"
        )
        self._tiles["delay"].set(
            figure(facts.sync_delay_steps_mean, 1), "inner steps", "mean over all applied"
        )
        odd = sum(found.outcome in {"late", "partial"} for found in facts.rounds)
        aborted = sum(found.outcome == "aborted" for found in facts.rounds)
        self._tiles["late"].set(figure(odd), "", f"of the newest {len(facts.rounds)}; {aborted} aborted")
        ages = [
            (age, peer.label)
            for peer in _those_that_count(facts)
            for age in peer.fragment_age_s
            if age is not None
        ]
        oldest, label = max(ages, default=(None, ""))
        self._tiles["oldest"].set(clock(oldest), "min:s", f"on {label}" if label else "")

    def redraw(self, facts: SwarmFacts) -> None:
        palette, history = self._frame.palette, self._model.history
        self._rounds = list(facts.rounds)
        self._heat.set(charts.rounds(palette, self._rounds, facts.fragments))
        shown = min(facts.fragments, MAX_LINES)
        self._note.set(f"Lines below: fragments 0 to {shown - 1}." if facts.fragments > shown else "")
        histograms: dict[int, dict[int, int]] = {}
        for peer in self._model.view.peers.values():
            for fragment, counts in peer.fragment_staleness.items():
                known = histograms.setdefault(fragment, {})
                for value, times in counts.items():
                    known[value] = known.get(value, 0) + times
        self._histogram.set(charts.staleness(palette, histograms))
        self._ages.set(charts.ages(palette, _those_that_count(facts), facts.fragments))
        since, until = self._frame.span(facts)
        rows = {fragment: history.fragment_series(fragment, since, until) for fragment in range(shown)}
        self._gap.set(charts.fragment_lines(palette, rows, 1))
        self._momentum.set(charts.fragment_lines(palette, rows, 2))

    def _open_round(self, click: Any) -> None:
        value = click.data["value"] if isinstance(click.data, dict) else click.value
        numbers = sorted({found.round for found in self._rounds})[-charts.MAX_ROUND_COLUMNS :]
        ui.navigate.to(f"/round/{int(value[1])}/{numbers[int(value[0])]}")


def _those_that_count(facts: SwarmFacts) -> list[PeerFacts]:
    """The peers online; once nobody is, all of them."""
    return [peer for peer in facts.peers if peer.state in ONLINE] or list(facts.peers)
