"""Swarm: is it learning, who is here, how fast, and what is wrong now."""

from __future__ import annotations

from nicegui import ui

from monitoring import charts
from monitoring.board.shell import Chart, Frame, Listing, card, head, tiles
from monitoring.facts import SwarmFacts
from monitoring.history import SWARM
from monitoring.words import ago, clock, figure, percent, plain, size


class SwarmPage:
    def __init__(self, frame: Frame) -> None:
        self._frame = frame

    def build(self) -> None:
        self._tiles = tiles({
            "loss": "Loss", "peers-online": "Peers online", "round": "Current round",
            "tokens": "Tokens trained", "tokens-per-s": "Tokens per second",
            "utilisation": "Compute utilisation", "bytes-per-s": "Sent per second",
            "rounds": "Rounds committed",
        })  # fmt: skip
        with card("What is wrong now"):
            self._troubles = Listing(test_id="troubles")
        unit = self._frame.model.facts().loss_unit or "in the recipe's own unit"
        with card("Loss of the agreed parameters", unit) as panel:
            with head(panel):
                self._axis = ui.toggle(
                    ["over time", "over tokens"], value="over time", on_change=self._frame.redraw_soon
                )
                self._axis.props("dense unelevated no-caps size=sm toggle-color=primary")
                self._frame.range_choice()
            self._loss = Chart("chart-loss")
        with ui.element("div").classes("b-three"):
            with card("Tokens per second", "all peers together"):
                self._speed = Chart("chart-tokens", "low")
            with card("Compute utilisation", "%, mean of the peers"):
                self._used = Chart("chart-utilisation", "low")
            with card("Traffic", "kB/s, all peers together"):
                self._traffic = Chart("chart-traffic", "low")
        ui.label(
            "What peers say of themselves is their own word, in reports they signed; work is counted from "
            "the group's signed decisions."
        ).classes("b-foot")

    def refresh(self, facts: SwarmFacts) -> None:
        shown = self._tiles
        held_out = f"held-out{ago(facts.loss_agreed_at, facts.at)}; agreed parameters"
        kind = held_out if facts.loss_kind == "held-out" else "training, mean of peers"
        shown["loss"].set(figure(facts.loss, 3), facts.loss_unit.replace(" per ", "/"), kind)
        shown["peers-online"].set(figure(facts.peers_online), "", f"of {facts.peers_known} known")
        total = f"of {facts.rounds_total}" if facts.rounds_total else "without end"
        every = f", {figure(facts.round_s, 0)} s each" if facts.round_s else ""
        shown["round"].set(figure(facts.position, 1), "", f"{total}{every}")
        shown["tokens"].set(figure(facts.tokens), "", f"{figure(facts.tokens_counted)} counted by the group")
        shown["tokens-per-s"].set(figure(facts.tokens_per_s), "tokens/s", "sum of the peers")
        expected = facts.utilisation_predicted
        words = f"{percent(expected)} predicted" if expected is not None else "of the time is training"
        shown["utilisation"].set(percent(facts.utilisation), "", words)
        shown["bytes-per-s"].set(f"{size(facts.up_bytes_per_s)}/s", "", f"{size(facts.up_bytes)} so far")
        alone = f"{facts.rounds_alone} alone, " if facts.rounds_alone else ""
        words = f"{alone}{facts.rounds_aborted} aborted, {facts.rounds_counted} checked"
        shown["rounds"].set(figure(facts.rounds_committed), "", words)
        self._troubles.show(facts.troubles, lambda: _show_troubles(facts))

    def redraw(self, facts: SwarmFacts) -> None:
        since, until = self._frame.span(facts)
        palette, rows = self._frame.palette, self._frame.history.series(SWARM, since, until)
        agreed = [row for row in self._frame.history.agreed() if row[0] >= since - 900]
        over_tokens = self._axis.value == "over tokens"
        self._loss.set(charts.loss(palette, rows, agreed, over_tokens=over_tokens))
        self._speed.set(charts.over_time(palette, rows, {"tokens/s": ("tokens_per_s", charts.GREEN, 1.0)}))
        used = {"utilisation": ("utilisation", charts.BLUE, 100.0)}
        self._used.set(charts.over_time(palette, rows, used, share=True))
        self._traffic.set(charts.over_time(palette, rows, charts.TRAFFIC))


def _show_troubles(facts: SwarmFacts) -> None:
    if not facts.troubles:
        ended = facts.rounds_total and facts.position >= facts.rounds_total
        words = "The run is over." if ended else "Nothing: every peer is heard, and rounds commit."
        ui.label(words).classes("b-fine")
    for trouble in facts.troubles:
        with ui.element("div").classes(f"b-row {trouble.severity}"):
            ui.label("Wrong" if trouble.severity == "bad" else "Note").classes("b-mark")
            ui.label(plain(trouble.words, 400)).classes("b-words")
            ui.label(f"{clock(max(0.0, facts.at - trouble.since_at))} ago").classes("b-when")
