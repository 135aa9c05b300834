"""Peers: everybody in one table, and a page for each with its own history."""

from __future__ import annotations

from typing import Any

from nicegui import ui

from monitoring import charts
from monitoring.board.bandwidth_page import peer_traffic
from monitoring.board.shell import Chart, Frame, Text, Tile, card, split_unit
from monitoring.facts import PeerFacts, SwarmFacts
from monitoring.words import UNKNOWN, clock, date, figure, percent, plain, size

SLOW_TABLE_PEERS = 128
"""With more peers the table is sent every other second."""
_COLUMNS = (
    ("label", "Peer", "left", 0), ("state", "State", "left", 0), ("device", "Device", "left", 0),
    ("tokens", "Tokens, own word", "right", 0), ("share", "Share, counted (%)", "right", 2),
    ("rate", "Tokens/s", "right", 0), ("loss", "Training loss", "right", 3),
    ("staleness", "Staleness (outer steps)", "right", 2), ("used", "Used (%)", "right", 1),
    ("up", "Up (kB/s)", "right", 1), ("links", "Links", "left", 0), ("version", "Software", "left", 0),
    ("seen", "Seen, s ago", "right", 0), ("joined", "Joined", "left", 0),
    ("why", "Left, and why", "left", 0),
)  # fmt: skip
"""Name, heading, side, decimals."""


def _shown_with(decimals: int) -> str:
    """How a cell becomes text, in the browser: there it is also sorted by."""
    digits = f"{{minimumFractionDigits: {decimals}, maximumFractionDigits: {decimals}}}"
    return (
        "value => value === null || value === undefined ? '-' : typeof value === 'number' "
        f"? value.toLocaleString('en-US', {digits}) : value"
    )


class PeersPage:
    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        self._rows: list[dict[str, Any]] = []
        self._turn = 0

    def build(self) -> None:
        with card("Peers") as panel, panel.default_slot.children[0]:
            self._count = Text("b-hint", "peers-count")
            ui.element("div").classes("b-grow")
            search = ui.input(placeholder="search").props("dense outlined clearable data-testid=search")
        columns = [
            {"name": name, "label": label, "field": name, "sortable": True, "align": align,
             ":format": _shown_with(decimals)}
            for name, label, align, decimals in _COLUMNS
        ]  # fmt: skip
        with panel:
            self._table = ui.table(columns=columns, rows=[], row_key="peer", pagination=25)
            self._table.props("dense flat data-testid=peers-table")
            self._table.bind_filter_from(search, "value")
            self._table.on("rowClick", _open_peer)
            ui.label(
                "Tokens, loss, rates and utilisation are a peer's own word. Its share is counted by the "
                "group: weights in decisions that a coordinator signed and another member witnessed."
            ).classes("b-foot")

    def refresh(self, facts: SwarmFacts) -> None:
        self._count.set(f"{facts.peers_online} online of {facts.peers_known} known")
        self._turn += 1
        if facts.peers_known > SLOW_TABLE_PEERS and self._turn % 2 == 0:
            return
        rows = [_row(peer, facts.at) for peer in facts.peers]
        if rows != self._rows:
            self._rows = rows
            self._table.rows = rows

    def redraw(self, facts: SwarmFacts) -> None:
        return  # no charts


def _open_peer(click: Any) -> None:
    ui.navigate.to(f"/peer/{click.args[1]['peer']}")


def _row(peer: PeerFacts, now: float) -> dict[str, Any]:
    over = peer.state in {"left", "gone", "finished", "silent", "unreachable"}
    links = ", ".join(f"{count} {carrier}" for carrier, count in peer.carriers.items())
    return {
        "peer": peer.peer,
        "label": plain(peer.label, 32),
        "state": peer.state,
        "device": plain(peer.device, 16),
        "tokens": peer.tokens,
        "share": None if peer.share_counted is None else round(100 * peer.share_counted, 2),
        "rate": round(peer.tokens_per_s),
        "loss": None if peer.loss is None else round(peer.loss, 3),
        "staleness": None if peer.staleness_mean is None else round(peer.staleness_mean, 2),
        "used": None if peer.utilisation is None else round(100 * peer.utilisation, 1),
        "up": None if peer.up_bytes_per_s is None else round(peer.up_bytes_per_s / 1000, 1),
        "links": plain(links, 40) or UNKNOWN,
        "version": plain(peer.software, 24),
        "seen": None if peer.last_seen_at is None else round(max(0.0, now - peer.last_seen_at)),
        "joined": date(peer.joined_at),
        "why": plain(peer.reason, 90) if over else "",
    }


class PeerPage:
    """One peer."""

    def __init__(self, frame: Frame, peer: str) -> None:
        self._frame, self._peer = frame, peer
        self._known = False

    def build(self) -> None:
        with ui.element("div"):
            ui.link("All peers", "/peers").classes("b-link")
            self._title = Text("b-title", "peer-title")
            self._id = Text("b-hint b-words")
        with ui.element("div").classes("b-tiles four"):
            self._tiles = {
                name: Tile(caption, f"peer-{name}")
                for name, caption in (
                    ("state", "State"), ("tokens", "Tokens trained"), ("share", "Share of the work"),
                    ("staleness", "Mean staleness"), ("used", "Compute utilisation"),
                    ("loss", "Training loss"), ("sent", "Sent"), ("exposed", "Stood still"),
                )
            }  # fmt: skip
        with card("Its history") as panel, panel.default_slot.children[0]:
            ui.element("div").classes("b-grow")
            self._frame.range_choice()
        with panel, ui.element("div").classes("b-two"):
            self._speed = Chart("chart-peer-tokens", "low")
            self._loss = Chart("chart-peer-loss", "low")
            self._used = Chart("chart-peer-utilisation", "low")
            self._traffic = Chart("chart-peer-traffic", "low")
        with ui.element("div").classes("b-two"):
            with card("What it says of itself", "own word"):
                self._own = ui.element("div").classes("b-dl")
            with card("What happened at it"):
                self._lines = ui.element("div").props("data-testid=peer-events")
        self._own_shown: list[tuple[str, str]] = []
        self._lines_shown: list[tuple[str, str]] = []

    def refresh(self, facts: SwarmFacts) -> None:
        peer = next((peer for peer in facts.peers if peer.peer == self._peer), None)
        if peer is None:
            self._title.set("No such peer is known here")
            self._id.set(plain(self._peer, 80))
            return
        self._title.set(plain(peer.label, 60))
        self._id.set(peer.peer)
        self._set_tiles(peer)
        pairs = _own_words(peer, facts.at)
        if pairs != self._own_shown:
            self._own_shown = pairs
            self._own.clear()
            with self._own:
                for name, value in pairs:
                    ui.label(name)
                    ui.label(value)
        self._show_lines()

    def _set_tiles(self, peer: PeerFacts) -> None:
        tiles = self._tiles
        tiles["state"].set(peer.state, "", plain(peer.reason, 90))
        tiles["tokens"].set(figure(peer.tokens), "", "own word")
        share = percent(peer.share_counted).removesuffix(" %")
        tiles["share"].set(share, "%", f"{figure(peer.tokens_counted)} tokens counted by the group")
        skipped = f"{peer.skipped_sends} send{'' if peer.skipped_sends == 1 else 's'} skipped"
        tiles["staleness"].set(figure(peer.staleness_mean, 2), "outer steps", skipped)
        tiles["used"].set(percent(peer.utilisation).removesuffix(" %"), "%", "own word")
        unit = self._frame.model.facts().loss_unit.replace(" per ", "/")
        tiles["loss"].set(figure(peer.loss, 3), unit, "own word")
        tiles["sent"].set(*split_unit(size(peer.up_bytes)), f"{size(peer.down_bytes)} received")
        hidden = f"{figure(peer.hidden_s, 1)} s hidden"
        tiles["exposed"].set(figure(peer.exposed_s, 1), "s", hidden)

    def _show_lines(self) -> None:
        found = self._frame.model.history.happenings(12, peer=self._peer)
        lines = [(date(line.at), plain(line.words, 200)) for line in found]
        if lines == self._lines_shown:
            return
        self._lines_shown = lines
        self._lines.clear()
        with self._lines:
            if not lines:
                ui.label("Nothing that is worth a line yet.").classes("b-hint")
            for at, words in lines:
                with ui.element("div").classes("b-line two"):
                    ui.label(at).classes("b-when")
                    ui.label(words).classes("b-words")

    def redraw(self, facts: SwarmFacts) -> None:
        peer = next((peer for peer in facts.peers if peer.peer == self._peer), None)
        if peer is None:
            return
        palette = self._frame.palette
        since, until = self._frame.span(facts)
        rows = self._frame.model.history.series(self._peer, since, until)
        for chart, lines, unit in (
            (self._speed, {"tokens/s": ("tokens_per_s", charts.GREEN, 1.0)}, "tokens/s"),
            (self._loss, {"training loss": ("loss", charts.ORANGE, 1.0)}, "training loss"),
            (self._used, {"utilisation": ("utilisation", charts.BLUE, 100.0)}, "utilisation, %"),
        ):
            options = charts.over_time(palette, rows, lines)
            options["yAxis"]["name"] = unit
            chart.set(options)
        self._traffic.set(peer_traffic(self._frame, peer, since, until))


def _own_words(peer: PeerFacts, now: float) -> list[tuple[str, str]]:
    links = ", ".join(f"{count} {carrier}" for carrier, count in peer.carriers.items())
    offset_s = peer.clock_offset_s
    pairs = [
        ("device", plain(peer.device, 40)), ("software", plain(peer.software, 60)),
        ("joined", date(peer.joined_at)),
        ("last seen", f"{clock(now - peer.last_seen_at)} ago" if peer.last_seen_at else UNKNOWN),
        ("clock", "not compared" if offset_s is None else f"{offset_s:+.2f} s against this reader's"),
        ("inner steps", figure(peer.inner_steps)), ("position", f"round {figure(peer.position, 2)}"),
        ("outer versions", plain(", ".join(map(str, peer.versions)), 200)),
        ("open links", plain(links, 80) or UNKNOWN),
        ("upload cap", f"{size(peer.upload_cap_bytes_per_s)}/s" if peer.upload_cap_bytes_per_s else "none"),
    ]  # fmt: skip
    pairs += [(f"refused: {plain(why, 40)}", figure(times)) for why, times in list(peer.refused.items())[:6]]
    pairs += [
        (f"nonsense: {plain(why, 40)}", figure(times)) for why, times in list(peer.nonsense.items())[:6]
    ]
    return pairs
