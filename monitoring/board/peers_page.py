"""Peers: everybody in one table, and a page for each with its own history."""

from __future__ import annotations

from typing import Any

from nicegui import ui

from monitoring import charts
from monitoring.board.shell import Chart, Frame, Listing, Text, card, head, tiles
from monitoring.facts import PeerFacts, SwarmFacts
from monitoring.words import UNKNOWN, clock, date, figure, links, percent, plain, size

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
        self._rows: list[dict[str, Any]] = []
        self._turn = 0

    def build(self) -> None:
        with card("Peers") as panel, head(panel):
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
            self._table.on("rowClick", lambda click: ui.navigate.to(f"/peer/{click.args[1]['peer']}"))
            ui.label(
                "Tokens, loss, rates and utilisation are a peer's own word. Its share is counted by the "
                "group: weights in commits that more than half of its peers signed."
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


def _row(peer: PeerFacts, now: float) -> dict[str, Any]:
    over = peer.state in {"left", "gone", "finished", "silent", "unreachable"}
    return {
        "peer": peer.peer, "label": plain(peer.label, 32), "state": peer.state,
        "device": plain(peer.device, 16), "tokens": peer.tokens,
        "share": _rounded(peer.share_counted, 2, 100),
        "rate": round(peer.tokens_per_s), "loss": _rounded(peer.loss, 3),
        "staleness": _rounded(peer.staleness_mean, 2), "used": _rounded(peer.utilisation, 1, 100),
        "up": _rounded(peer.up_bytes_per_s, 1, 1e-3), "links": links(peer.carriers),
        "version": plain(peer.software, 24),
        "seen": None if peer.last_seen_at is None else round(max(0.0, now - peer.last_seen_at)),
        "joined": date(peer.joined_at), "why": plain(peer.reason, 90) if over else "",
    }  # fmt: skip


def _rounded(value: float | None, digits: int, times: float = 1.0) -> float | None:
    return None if value is None else round(times * value, digits)


class PeerPage:
    """One peer."""

    def __init__(self, frame: Frame, peer: str) -> None:
        self._frame, self._peer = frame, peer

    def build(self) -> None:
        with ui.element("div"):
            ui.link("All peers", "/peers").classes("b-link")
            self._title = Text("b-title", "peer-title")
            self._id = Text("b-hint b-words")
        captions = {
            "state": "State", "tokens": "Tokens trained", "share": "Share of the work",
            "staleness": "Mean staleness", "used": "Compute utilisation", "loss": "Training loss",
            "sent": "Sent", "exposed": "Stood still",
        }  # fmt: skip
        self._tiles = tiles(captions, "peer-")
        with card("Its history") as panel, head(panel):
            self._frame.range_choice()
        with panel, ui.element("div").classes("b-two"):
            names = ("tokens", "loss", "utilisation", "traffic")
            self._charts = {name: Chart(f"chart-peer-{name}", "low") for name in names}
        with ui.element("div").classes("b-two"):
            with card("What it says of itself", "own word"):
                self._own = Listing()
            with card("What happened at it"):
                self._lines = Listing(test_id="peer-events")

    def _facts(self, facts: SwarmFacts) -> PeerFacts | None:
        return next((peer for peer in facts.peers if peer.peer == self._peer), None)

    def refresh(self, facts: SwarmFacts) -> None:
        peer, shown = self._facts(facts), self._tiles
        if peer is None:
            self._title.set("No such peer is known here")
            self._id.set(plain(self._peer, 80))
            return
        self._title.set(plain(peer.label, 60))
        self._id.set(peer.peer)
        shown["state"].set(peer.state, "", plain(peer.reason, 90))
        shown["tokens"].set(figure(peer.tokens), "", "own word")
        counted = f"{figure(peer.tokens_counted)} tokens counted by the group"
        shown["share"].set(percent(peer.share_counted), "", counted)
        skipped = f"{peer.skipped_sends} send{'' if peer.skipped_sends == 1 else 's'} skipped"
        shown["staleness"].set(figure(peer.staleness_mean, 2), "outer steps", skipped)
        shown["used"].set(percent(peer.utilisation), "", "own word")
        shown["loss"].set(figure(peer.loss, 3), facts.loss_unit.replace(" per ", "/"), "own word")
        shown["sent"].set(size(peer.up_bytes), "", f"{size(peer.down_bytes)} received")
        shown["exposed"].set(figure(peer.exposed_s, 1), "s", f"{figure(peer.hidden_s, 1)} s hidden")
        self._own.show_pairs(_own_words(peer, facts.at))
        found = self._frame.history.happenings(12, peer=self._peer)
        lines = [(date(line.at), plain(line.words, 200)) for line in found]
        self._lines.show(lines, lambda: _show_lines(lines))

    def redraw(self, facts: SwarmFacts) -> None:
        peer, palette = self._facts(facts), self._frame.palette
        if peer is None:
            return
        rows = self._frame.history.series(self._peer, *self._frame.span(facts))
        for name, measure, colour, scale, unit in (
            ("tokens", "tokens_per_s", charts.GREEN, 1.0, "tokens/s"),
            ("loss", "loss", charts.ORANGE, 1.0, "training loss"),
            ("utilisation", "utilisation", charts.BLUE, 100.0, "utilisation, %"),
        ):
            options = charts.over_time(palette, rows, {unit: (measure, colour, scale)})
            options["yAxis"]["name"] = unit
            self._charts[name].set(options)
        self._charts["traffic"].set(charts.peer_traffic(palette, rows, peer))


def _show_lines(lines: list[tuple[str, str]]) -> None:
    if not lines:
        ui.label("Nothing that is worth a line yet.").classes("b-hint")
    for at, words in lines:
        with ui.element("div").classes("b-line two"):
            ui.label(at).classes("b-when")
            ui.label(words).classes("b-words")


def _own_words(peer: PeerFacts, now: float) -> list[tuple[str, str]]:
    offset_s, cap = peer.clock_offset_s, peer.upload_cap_bytes_per_s
    pairs = [
        ("device", plain(peer.device, 40)), ("software", plain(peer.software, 60)),
        ("joined", date(peer.joined_at)),
        ("last seen", f"{clock(now - peer.last_seen_at)} ago" if peer.last_seen_at else UNKNOWN),
        ("clock", "not compared" if offset_s is None else f"{offset_s:+.2f} s against this reader's"),
        ("inner steps", figure(peer.inner_steps)), ("position", f"round {figure(peer.position, 2)}"),
        ("outer versions", plain(", ".join(map(str, peer.versions)), 200)),
        ("open links", links(peer.carriers)), ("upload cap", f"{size(cap)}/s" if cap else "none"),
    ]  # fmt: skip
    for kind, told in (("refused", peer.refused), ("nonsense", peer.nonsense)):
        pairs += [(f"{kind}: {plain(why, 40)}", figure(times)) for why, times in list(told.items())[:6]]
    return pairs
