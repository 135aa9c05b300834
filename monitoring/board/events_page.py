"""Events: what happened, by peer, fragment and kind; and one round with every member's time line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from nicegui import ui

from monitoring import charts
from monitoring.board.shell import Chart, Frame, Listing, Text, card, head, tiles
from monitoring.facts import SwarmFacts
from monitoring.history import Happening
from monitoring.words import date, figure, plain

LINES = 60
_KINDS: dict[str, tuple[str, ...]] = {
    "every kind": (),
    "peers come and go": ("peer_started", "peer_joined", "peer_left", "peer_finished"),
    "rounds": ("round_committed", "round_aborted", "send_skipped"),
    "trouble": ("warned", "message_refused", "round_aborted", "send_skipped", "link_lost",
                "contribution_capped"),
    "links": ("link_opened", "link_lost"),
    "state and checkpoints": ("caught_up", "checkpoint_saved", "agreed_measured", "paused", "resumed"),
}  # fmt: skip
_NAMES = {
    "peer_started": "started", "peer_joined": "joined", "peer_left": "left", "peer_finished": "finished",
    "round_committed": "commit", "round_aborted": "abort", "send_skipped": "skipped", "warned": "warning",
    "message_refused": "refused", "link_opened": "link", "link_lost": "link lost", "caught_up": "caught up",
    "checkpoint_saved": "checkpoint", "paused": "rests", "resumed": "goes on", "agreed_measured": "measured",
    "training_ended": "trained", "contribution_capped": "capped",
}  # fmt: skip


class EventsPage:
    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        self._choices: list[dict[Any, str]] = []

    def build(self) -> None:
        with card("What happened") as panel, head(panel):
            ui.element("div").classes("b-grow")
            style = "dense options-dense outlined"
            self._kind = ui.select(list(_KINDS), value="every kind", label="kind")
            self._peer = ui.select({"": "every peer"}, value="", label="peer")
            self._fragment = ui.select({-1: "every fragment"}, value=-1, label="fragment")
            for select, name in ((self._kind, "kind"), (self._peer, "peer"), (self._fragment, "fragment")):
                select.props(f"{style} data-testid=event-{name}").style("min-width:150px")
        with panel:
            self._list = Listing(test_id="events")

    def refresh(self, facts: SwarmFacts) -> None:
        peers = {"": "every peer", **{peer.peer: plain(peer.label, 40) for peer in facts.peers}}
        fragments = {-1: "every fragment", **{f: f"fragment {f}" for f in range(facts.fragments)}}
        if [peers, fragments] != self._choices:
            self._choices = [peers, fragments]
            self._peer.set_options(peers, value=self._peer.value if self._peer.value in peers else "")
            self._fragment.set_options(fragments, value=self._fragment.value)
        chosen: Any = self._fragment.value
        found = self._frame.history.happenings(
            LINES, peer=self._peer.value or "", fragment=None if chosen == -1 else chosen,
            kinds=_KINDS.get(str(self._kind.value), ()),
        )  # fmt: skip
        self._list.show(found, lambda: _show_lines(found))

    def redraw(self, facts: SwarmFacts) -> None:
        return  # no charts


def _show_lines(found: Sequence[Happening]) -> None:
    if not found:
        ui.label("Nothing of this kind has happened.").classes("b-hint")
    for line in found:
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

    def __init__(self, frame: Frame, fragment: int, number: int) -> None:
        self._frame, self._key = frame, (fragment, number)

    def build(self) -> None:
        with ui.element("div"):
            ui.link("All events", "/events").classes("b-link")
            ui.label(f"Round {self._key[1]} of fragment {self._key[0]}").classes("b-title")
        captions = {"outcome": "Outcome", "group": "In the mean", "duration": "READY to COMMIT",
                    "staleness": "Staleness"}  # fmt: skip
        self._tiles = tiles(captions, "round-")
        hint = (
            "READY: it waits for BEGIN. PARTS: its slices go to their owners. MEAN: all means come. COMMIT."
        )
        with card("Time line of every member", hint):
            self._chart = Chart("chart-round", "tall")
            self._note = Text("b-hint", "round-note")
        hint = "counted: weights (tokens) in the commit that a quorum of the members signed"
        with card("Whose work is in the mean", hint):
            self._weights = Listing(test_id="round-weights")

    def refresh(self, facts: SwarmFacts) -> None:
        shown, kept = self._tiles, self._frame.history.round(*self._key)
        found = next((one for one in facts.rounds if (one.fragment, one.round) == self._key), None)
        found = found or (kept[0] if kept is not None else None)
        if found is None:
            shown["outcome"].set("unknown", "", "this round was never heard of here")
            return
        shown["outcome"].set(found.outcome, "", plain(found.reason, 120))
        shown["group"].set(figure(found.contributors), "", f"of {found.group_size} members")
        shown["duration"].set(figure(found.duration_s or None, 2), "s", "slowest member")
        stale = figure(found.staleness) if found.staleness >= 0 else "-"
        shown["staleness"].set(stale, "outer steps", "the most stale of its outer steps")
        view = self._frame.model.view.rounds.get(self._key)
        weights = sorted(view.weights.items(), key=lambda item: -item[1])[:64] if view is not None else []
        name = self._frame.model.known().label
        self._weights.show_pairs([(plain(name(peer), 40), f"{figure(one)} tokens") for peer, one in weights])

    def redraw(self, facts: SwarmFacts) -> None:
        kept = self._frame.history.round(*self._key)
        members = json.loads(kept[1]) if kept is not None and kept[1] else {}
        labels = {peer.peer: peer.label for peer in facts.peers}
        self._chart.set(charts.round_time_line(self._frame.palette, members, labels))
        self._note.set("" if members else "No member's times of this round are kept here.")
