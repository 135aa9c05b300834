"""Bandwidth: what each link carries, what each peer may send and needs to, what of it training waits for."""

from __future__ import annotations

from nicegui import ui

from monitoring import charts
from monitoring.board.shell import Chart, Frame, Text, Tile, card, split_unit
from monitoring.facts import LinkFacts, PeerFacts, SwarmFacts
from monitoring.words import figure, percent, plain, size

MAX_SLOW = 8


class BandwidthPage:
    def __init__(self, frame: Frame) -> None:
        self._frame, self._model = frame, frame.model
        self._chosen = ""
        self._options: dict[str, str] = {}

    def build(self) -> None:
        with ui.element("div").classes("b-tiles four"):
            self._tiles = {
                name: Tile(caption, name)
                for name, caption in (
                    ("sent", "Sent so far"), ("sent-per-s", "Sent per second"),
                    ("hidden", "Communication hidden"), ("links", "Links measured"),
                )
            }  # fmt: skip
        with ui.element("div").classes("b-two"):
            with card(
                "Links",
                "row sends to column: Mbit/s, below it the round trip in ms; R: relayed",
            ):
                self._matrix = Chart("chart-links", "tall")
                self._matrix_note = Text("b-hint", "links-note")
            with card(
                "Hidden and exposed communication",
                "seconds since each peer started: behind training, and with training standing still",
            ):
                self._bars = Chart("chart-hidden", "tall")
        with card("A peer's traffic") as panel, panel.default_slot.children[0]:
            self._select = (
                ui.select({}, label="peer", on_change=self._choose)
                .props("dense options-dense outlined data-testid=traffic-peer")
                .style("min-width:170px")
            )
            ui.element("div").classes("b-grow")
            self._frame.range_choice()
        with panel:
            self._traffic = Chart("chart-peer-traffic")
            self._words = Text("b-hint", "traffic-words")
        with card("Slowest links"):
            self._slow = ui.element("div").props("data-testid=slow-links")
        self._slow_shown: list[tuple[str, str]] = []

    def _choose(self) -> None:
        self._chosen = str(self._select.value or "")
        self._frame.redraw_soon()

    def refresh(self, facts: SwarmFacts) -> None:
        self._tiles["sent"].set(*split_unit(size(facts.up_bytes)), "all peers, own word")
        per_s = split_unit(f"{size(facts.up_bytes_per_s)}/s")
        self._tiles["sent-per-s"].set(*per_s, "all peers, last ten seconds")
        hidden_s = sum(peer.hidden_s for peer in facts.peers)
        exposed_s = sum(peer.exposed_s for peer in facts.peers)
        share = hidden_s / (hidden_s + exposed_s) if hidden_s + exposed_s else None
        self._tiles["hidden"].set(
            percent(share).removesuffix(" %"), "%", f"{figure(exposed_s, 1)} s were exposed"
        )
        links = [link for peer in facts.peers for link in peer.links]
        relayed = sum(link.relayed for link in links)
        self._tiles["links"].set(figure(len(links)), "", f"{relayed} relayed, {len(links) - relayed} direct")
        options = {peer.peer: plain(peer.label, 40) for peer in facts.peers}
        if options != self._options:
            self._options = options
            if self._chosen not in options:
                self._chosen = next(iter(options), "")
            self._select.set_options(options, value=self._chosen)
        self._show_slow(facts)

    def redraw(self, facts: SwarmFacts) -> None:
        palette = self._frame.palette
        self._matrix.set(charts.link_matrix(palette, facts.peers))
        more = len(facts.peers) - charts.MAX_MATRIX_PEERS
        words = (
            f"The first {charts.MAX_MATRIX_PEERS} peers; {more} more are in the table of peers."
            if more > 0
            else ""
        )
        self._matrix_note.set(
            words if any(peer.links for peer in facts.peers) else "No link has been measured yet."
        )
        self._bars.set(charts.hidden_and_exposed(palette, facts.peers))
        chosen = next((peer for peer in facts.peers if peer.peer == self._chosen), None)
        if chosen is not None:
            since, until = self._frame.span(facts)
            self._traffic.set(peer_traffic(self._frame, chosen, since, until))
            self._words.set(_against(chosen))

    def _show_slow(self, facts: SwarmFacts) -> None:
        labels = {peer.peer: peer.label for peer in facts.peers}
        links = [
            (link.bytes_per_s or 0.0, peer, link)
            for peer in facts.peers
            for link in peer.links
            if link.bytes_per_s
        ]
        lines = []
        for _, peer, link in sorted(links, key=lambda found: found[0])[:MAX_SLOW]:
            other = labels.get(link.other, f"~{link.other[-6:]}")
            lines.append((f"{plain(peer.label, 24)} to {plain(other, 24)}", _of_link(link)))
        if lines == self._slow_shown:
            return
        self._slow_shown = lines
        self._slow.clear()
        with self._slow:
            if not lines:
                ui.label("Measured about every ten seconds, once payload has been sent.").classes("b-hint")
            with ui.element("div").classes("b-dl"):
                for names, words in lines:
                    ui.label(names)
                    ui.label(words)


def _of_link(link: LinkFacts) -> str:
    rate = figure((link.bytes_per_s or 0.0) * 8 / 1e6, 2)
    trip = f"{figure(1000 * link.round_trip_s, 1)} ms" if link.round_trip_s else "not measured"
    how = "relayed" if link.relayed else "direct"
    return f"{rate} Mbit/s, round trip {trip}, {plain(link.carrier, 12)}, {how}"


def _against(peer: PeerFacts) -> str:
    cap = f"{size(peer.upload_cap_bytes_per_s)}/s" if peer.upload_cap_bytes_per_s else "none"
    need = f"{size(peer.needed_bytes_per_s)}/s" if peer.needed_bytes_per_s else "not known yet"
    return f"Its owner's cap: {cap}. Floor, what rounds ask of the average member each direction: {need}."


def peer_traffic(frame: Frame, peer: PeerFacts, since: float, until: float) -> charts.Options:
    """Up and down of one peer over time, against its cap and what the rounds need."""
    rows = frame.model.history.series(peer.peer, since, until)
    lines = {
        "sent": ("up_bytes_per_s", charts.ORANGE, 1e-3),
        "received": ("down_bytes_per_s", charts.SKY, 1e-3),
    }
    options = charts.over_time(frame.palette, rows, lines)
    for value, name, colour in (
        (peer.upload_cap_bytes_per_s, "upload cap", charts.VERMILLION),
        (peer.needed_bytes_per_s, "floor of the rounds", charts.GREEN),
    ):
        charts.mark(options, value / 1000 if value else None, name, colour)
    options["yAxis"]["name"] = "kB/s"
    options["grid"]["top"] = 54  # the unit stands between legend and axis
    return options
