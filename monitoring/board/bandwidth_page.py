"""Bandwidth: what each link carries, what each peer may send and needs to, what of it training waits for."""

from __future__ import annotations

from nicegui import ui

from monitoring import charts
from monitoring.board.shell import Chart, Frame, Listing, Text, card, head, tiles
from monitoring.facts import LinkFacts, PeerFacts, SwarmFacts
from monitoring.words import figure, percent, plain, size

MAX_SLOW = 8


class BandwidthPage:
    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        self._chosen = ""
        self._options: dict[str, str] = {}

    def build(self) -> None:
        self._tiles = tiles({
            "sent": "Sent so far", "sent-per-s": "Sent per second", "hidden": "Communication hidden",
            "links": "Links measured",
        })  # fmt: skip
        with ui.element("div").classes("b-two"):
            with card("Links", "row sends to column: Mbit/s, below it the round trip in ms; R: relayed"):
                self._matrix = Chart("chart-links", "tall")
                self._matrix_note = Text("b-hint", "links-note")
            hint = "seconds since each peer started: behind training, and with training standing still"
            with card("Hidden and exposed communication", hint):
                self._bars = Chart("chart-hidden", "tall")
        with card("A peer's traffic") as panel, head(panel):
            self._select = ui.select({}, label="peer", on_change=self._choose)
            self._select.props("dense options-dense outlined data-testid=traffic-peer").style(
                "min-width:170px"
            )
            self._frame.range_choice()
        with panel:
            self._traffic = Chart("chart-peer-traffic")
            self._words = Text("b-hint", "traffic-words")
        with card("Slowest links"):
            self._slow = Listing(test_id="slow-links")

    def _choose(self) -> None:
        self._chosen = str(self._select.value or "")
        self._frame.redraw_soon()

    def refresh(self, facts: SwarmFacts) -> None:
        shown = self._tiles
        shown["sent"].set(size(facts.up_bytes), "", "all peers, own word")
        shown["sent-per-s"].set(f"{size(facts.up_bytes_per_s)}/s", "", "all peers, last ten seconds")
        hidden_s = sum(peer.hidden_s for peer in facts.peers)
        exposed_s = sum(peer.exposed_s for peer in facts.peers)
        share = hidden_s / (hidden_s + exposed_s) if hidden_s + exposed_s else None
        shown["hidden"].set(percent(share), "", f"{figure(exposed_s, 1)} s were exposed")
        links = [(peer, link) for peer in facts.peers for link in peer.links]
        relayed = sum(link.relayed for _, link in links)
        shown["links"].set(figure(len(links)), "", f"{relayed} relayed, {len(links) - relayed} direct")
        options = {peer.peer: plain(peer.label, 40) for peer in facts.peers}
        if options != self._options:
            self._options = options
            if self._chosen not in options:
                self._chosen = next(iter(options), "")
            self._select.set_options(options, value=self._chosen)
        slow = sorted((link.bytes_per_s, one.label, link) for one, link in links if link.bytes_per_s)[
            :MAX_SLOW
        ]
        names = {peer.peer: peer.label for peer in facts.peers}
        pairs = [
            (f"{plain(label, 24)} to {plain(names.get(one.other, f'~{one.other[-6:]}'), 24)}", _of_link(one))
            for _, label, one in slow
        ]
        self._slow.show_pairs(pairs, "Measured about every ten seconds, once payload has been sent.")

    def redraw(self, facts: SwarmFacts) -> None:
        palette = self._frame.palette
        self._matrix.set(charts.link_matrix(palette, facts.peers))
        more, most = len(facts.peers) - charts.MAX_MATRIX_PEERS, charts.MAX_MATRIX_PEERS
        words = f"The first {most} peers; {more} more are in the table of peers." if more > 0 else ""
        measured = any(peer.links for peer in facts.peers)
        self._matrix_note.set(words if measured else "No link has been measured yet.")
        self._bars.set(charts.hidden_and_exposed(palette, facts.peers))
        chosen = next((peer for peer in facts.peers if peer.peer == self._chosen), None)
        if chosen is not None:
            rows = self._frame.history.series(chosen.peer, *self._frame.span(facts))
            self._traffic.set(charts.peer_traffic(palette, rows, chosen))
            self._words.set(_against(chosen))


def _of_link(link: LinkFacts) -> str:
    rate = figure((link.bytes_per_s or 0.0) * 8 / 1e6, 2)
    trip = f"{figure(1000 * link.round_trip_s, 1)} ms" if link.round_trip_s else "not measured"
    how = "relayed" if link.relayed else "direct"
    return f"{rate} Mbit/s, round trip {trip}, {plain(link.carrier, 12)}, {how}"


def _against(peer: PeerFacts) -> str:
    cap = f"{size(peer.upload_cap_bytes_per_s)}/s" if peer.upload_cap_bytes_per_s else "none"
    need = f"{size(peer.needed_bytes_per_s)}/s" if peer.needed_bytes_per_s else "not known yet"
    return f"Its owner's cap: {cap}. Floor, what rounds ask of the average member each direction: {need}."
