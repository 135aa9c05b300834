"""Events: what happened, by peer, fragment and kind; and one round with every member's time line."""

from __future__ import annotations

import json
from typing import Any

from nicegui import ui

from monitoring import charts
from monitoring.board.shell import Chart, Frame, Text, Tile, card
from monitoring.facts import RoundFacts, SwarmFacts
from monitoring.history import Happening
from monitoring.words import date, figure, plain

LINES = 60
KINDS = {
    "": "every kind",
    "peers": "peers come and go",
    "rounds": "rounds",
    "trouble": "trouble",
    "links": "links",
    "state": "state and checkpoints",
}
_OF_KIND = {
    "peers": ("peer_started", "peer_joined", "peer_left", "peer_finished"),
    "rounds": ("round_committed", "round_aborted", "send_skipped"),
    "trouble": ("warned", "message_refused", "round_aborted", "send_skipped", "link_lost"),
    "links": ("link_opened", "link_lost"),
    "state": ("caught_up", "checkpoint_saved", "agreed_measured", "paused", "resumed"),
}
_NAMES = {
    "peer_started": "started", "peer_joined": "joined", "peer_left": "left", "peer_finished": "finished",
    "round_committed": "commit", "round_aborted": "abort", "send_skipped": "skipped", "warned": "warning",
    "message_refused": "refused", "link_opened": "link", "link_lost": "link lost", "caught_up": "caught up",
    "checkpoint_saved": "checkpoint", "paused": "rests", "resumed": "goes on", "agreed_measured": "measured",
}  # fmt: skip


class EventsPage:
    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        self._shown: list[Happening] = []
        self._peers: dict[str, str] = {}
        self._fragments: dict[int, str] = {}

    def build(self) -> None:
        with card("What happened") as panel, panel.default_slot.children[0]:
            ui.element("div").classes("b-grow")
            style = "dense options-dense outlined"
            self._kind = ui.select(KINDS, value="", label="kind").props(f"{style} data-testid=event-kind")
            self._peer = ui.select({"": "every peer"}, value="", label="peer").props(
                f"{style} data-testid=event-peer"
            )
            self._fragment = ui.select({-1: "every fragment"}, value=-1, label="fragment").props(style)
            for select in (self._kind, self._peer, self._fragment):
                select.style("min-width:150px")
        with panel:
            self._list = ui.element("div").props("data-testid=events")

    def refresh(self, facts: SwarmFacts) -> None:
        peers = {"": "every peer", **{peer.peer: plain(peer.label, 40) for peer in facts.peers}}
        if peers != self._peers:
            self._peers = peers
            self._peer.set_options(peers, value=self._peer.value if self._peer.value in peers else "")
        fragments = {-1: "every fragment", **{f: f"fragment {f}" for f in range(facts.fragments)}}
        if fragments != self._fragments:
            self._fragments = fragments
            self._fragment.set_options(fragments, value=self._fragment.value)
        chosen: Any = self._fragment.value
        found = self._frame.model.history.happenings(
            LINES,
            peer=self._peer.value or None,
            fragment=None if chosen == -1 else chosen,
            kinds=_OF_KIND.get(str(self._kind.value), ()),
        )
        if found != self._shown:
            self._shown = found
            self._show()

    def redraw(self, facts: SwarmFacts) -> None:
        return  # no charts

    def _show(self) -> None:
        self._list.clear()
        with self._list:
            if not self._shown:
                ui.label("Nothing of this kind has happened.").classes("b-hint")
            for line in self._shown:
                with ui.element("div").classes("b-line"):
                    ui.label(date(line.at)).classes("b-when")
                    ui.label(_NAMES.get(line.kind, line.kind)).classes("b-kind")
                    if line.round >= 0 and line.fragment >= 0:
                        place = f"/round/{line.fragment}/{line.round}"
                        ui.link(plain(line.words, 240), place).classes("b-words b-link")
                    else:
                        ui.label(plain(line.words, 240)).classes("b-words")


class RoundPage:
    """One round of one fragment."""

    def __init__(self, frame: Frame, fragment: int, round_: int) -> None:
        self._frame, self._fragment, self._round = frame, fragment, round_
        self._weights_shown: dict[str, float] = {}

    def build(self) -> None:
        with ui.element("div"):
            ui.link("All events", "/events").classes("b-link")
            ui.label(f"Round {self._round} of fragment {self._fragment}").classes("b-title")
        with ui.element("div").classes("b-tiles four"):
            self._tiles = {
                name: Tile(caption, f"round-{name}")
                for name, caption in (
                    ("outcome", "Outcome"), ("group", "In the mean"), ("duration", "READY to COMMIT"),
                    ("staleness", "Staleness"),
                )
            }  # fmt: skip
        with card(
            "Time line of every member",
            "READY: it waits for BEGIN. PARTS: its slices go to their owners. MEAN: all means come. COMMIT.",
        ):
            self._chart = Chart("chart-round", "tall")
            self._note = Text("b-hint", "round-note")
        with card(
            "Whose work is in the mean",
            "counted: weights (tokens) in the decision that the coordinator signed",
        ):
            self._weights = ui.element("div").classes("b-dl").props("data-testid=round-weights")

    def refresh(self, facts: SwarmFacts) -> None:
        found = (
            next(
                (one for one in facts.rounds if (one.fragment, one.round) == (self._fragment, self._round)),
                None,
            )
            or self._kept()
        )
        if found is None:
            self._tiles["outcome"].set("unknown", "", "this round was never heard of here")
            return
        self._tiles["outcome"].set(found.outcome, "", plain(found.reason, 120))
        self._tiles["group"].set(figure(found.contributors), "", f"of {found.group_size} members")
        self._tiles["duration"].set(figure(found.duration_s or None, 2), "s", "slowest member")
        stale = figure(found.staleness) if found.staleness >= 0 else "-"
        self._tiles["staleness"].set(stale, "outer steps", "the most stale of its outer steps")
        view = self._frame.model.view.rounds.get((self._fragment, self._round))
        weights = view.weights if view is not None else {}
        if weights != self._weights_shown:
            self._weights_shown = dict(weights)
            labels = {peer.peer: peer.label for peer in facts.peers}
            self._weights.clear()
            with self._weights:
                for peer, weight in sorted(weights.items(), key=lambda item: -item[1])[:64]:
                    ui.label(plain(labels.get(peer, f"~{peer[-6:]}"), 40))
                    ui.label(f"{figure(weight)} tokens")

    def _kept(self) -> RoundFacts | None:
        for row in self._frame.model.history.rounds(20_000, self._fragment):
            if row.round == self._round:
                return RoundFacts(
                    fragment=row.fragment, round=row.round, at=row.at, outcome=row.outcome,
                    group_size=row.group_size, contributors=row.contributors, staleness=row.staleness,
                    duration_s=row.duration_s, reason=row.reason, counted=bool(row.counted),
                )  # fmt: skip
        return None

    def redraw(self, facts: SwarmFacts) -> None:
        text = self._frame.model.history.time_line(self._fragment, self._round)
        members = json.loads(text) if text else {}
        labels = {peer.peer: peer.label for peer in facts.peers}
        self._chart.set(charts.round_time_line(self._frame.palette, members, labels))
        self._note.set("" if members else "No member's times of this round are kept here.")
