"""The pages of the board: swarm, staleness, bandwidth, peers, events; and one for each peer and round."""

from __future__ import annotations

from typing import Any

from nicegui import ui

from monitoring import charts
from monitoring.board import shell
from monitoring.board.shell import Chart, Frame, Page, Table, Trends, block, card, head, search_field, text
from monitoring.facts import ENDED, ONLINE, PeerFacts, SwarmFacts, Trouble
from monitoring.history import AGREED, MAX_LINES, SWARM, Happening
from monitoring.words import ago, clock, date, figure, links, percent, plain, size


class SwarmPage(Page):
    """Is it learning, who is here, how fast, and what is wrong now."""

    def __init__(self, frame: Frame) -> None:
        super().__init__(frame)
        self._shown: tuple[Trouble, ...] | None = None
        self._tiles = shell.tiles(
            loss="Loss", peers_online="Peers online", round="Current round", tokens="Tokens trained",
            tokens_per_s="Tokens per second", utilisation="Compute utilisation",
            bytes_per_s="Sent per second", rounds="Rounds committed",
        )  # fmt: skip
        with card("What is wrong now"):
            self._troubles = ui.element("div").props("data-testid=troubles")
        unit = frame.model.facts().loss_unit or "in the recipe's own unit"
        with card("Loss of the agreed parameters", unit) as panel:
            with head(panel):
                self._axis = shell.choice(
                    ["over time", "over tokens"], "over time", lambda _: frame.redraw_soon()
                )
                frame.range_choice()
            self._loss = Chart("chart-loss")
        self._trends = Trends("chart")
        words = (
            "What peers say of themselves is their own word, in reports they signed; work is counted from "
        )
        text("b-foot", words + "the rounds' certificates.")

    def refresh(self, facts: SwarmFacts) -> None:
        shown = self._tiles
        held_out = f"held-out{ago(facts.loss_agreed_at, facts.at)}; agreed parameters"
        kind = held_out if facts.loss_kind == "held-out" else "training, mean of peers"
        shown["loss"].set(figure(facts.loss, 3), facts.loss_unit.replace(" per ", "/"), kind)
        shown["peers_online"].set(figure(facts.peers_online), "", f"of {facts.peers_known} known")
        total = f"of {facts.rounds_total}" if facts.rounds_total else "without end"
        every = f", {figure(facts.round_s, 0)} s each" if facts.round_s else ""
        shown["round"].set(figure(facts.position, 1), "", f"{total}{every}")
        shown["tokens"].set(figure(facts.tokens), "", f"{figure(facts.tokens_counted)} counted by the group")
        shown["tokens_per_s"].set(figure(facts.tokens_per_s), "tokens/s", "sum of the peers")
        shown["utilisation"].set(percent(facts.utilisation), "", "of the time is training")
        shown["bytes_per_s"].set(f"{size(facts.up_bytes_per_s)}/s", "", f"{size(facts.up_bytes)} so far")
        alone = f"{facts.rounds_alone} alone, " if facts.rounds_alone else ""
        words = f"{alone}{facts.rounds_aborted} aborted, {facts.rounds_counted} checked"
        shown["rounds"].set(figure(facts.rounds_committed), "", words)
        if facts.troubles != self._shown:
            self._shown = facts.troubles
            self._troubles.clear()
            with self._troubles:
                _show_troubles(facts)

    def redraw(self, facts: SwarmFacts) -> None:
        history, palette, (since, until) = self.frame.history, self.frame.palette, self.frame.span(facts)
        rows, agreed = (history.series(key, since, until) for key in (SWARM, AGREED))
        self._loss.set(charts.loss(palette, rows, agreed, over_tokens=self._axis.value == "over tokens"))
        self._trends.set(palette, rows)


def _show_troubles(facts: SwarmFacts) -> None:
    if not facts.troubles:
        ended = facts.rounds_total and facts.position >= facts.rounds_total
        words = "The run is over." if ended else "Nothing: every peer is heard, and rounds commit."
        text("b-fine", words)
    for trouble in facts.troubles:
        with block(f"b-row {trouble.severity}"):
            text("b-mark", "Wrong" if trouble.severity == "bad" else "Note")
            text("b-words", plain(trouble.words, 400))
            text("b-when", f"{clock(max(0.0, facts.at - trouble.since_at))} ago")


class StalenessPage(Page):
    """How late answers come, fragment by fragment and round by round."""

    def __init__(self, frame: Frame) -> None:
        super().__init__(frame)
        self._tiles = shell.tiles(
            staleness_mean="Mean staleness", delay="Send to apply", late="Rounds late or partial",
            oldest="Oldest fragment",
        )  # fmt: skip
        hint = "a cell is one round of one fragment: group size inside, why on hover, click for its members"
        with card("Rounds", hint):
            with block("b-legend"):
                for colour, _, words in charts.OUTCOMES.values():
                    with ui.element("span"):
                        ui.element("i").style(f"background:{colour}")
                        ui.label(words)
            self._heat = Chart("chart-rounds", "", on_click=self._open_round)
        with card("Staleness", "outer steps between a gradient's parameters and those it met"):
            self._histogram = Chart("chart-staleness")

    def refresh(self, facts: SwarmFacts) -> None:
        shown, applied = self._tiles, figure(sum(facts.staleness.values()))
        shown["staleness_mean"].set(figure(facts.staleness_mean, 2), "outer steps", f"of {applied} applied")
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
        palette = self.frame.palette
        self._heat.set(charts.rounds(palette, facts.rounds, facts.fragments))
        self._histogram.set(charts.staleness(palette, self.frame.model.view.fragment_staleness))

    def _open_round(self, click: Any) -> None:
        value = click.data["value"] if isinstance(click.data, dict) else click.value
        numbers = charts.round_columns(self.frame.model.facts().rounds)
        ui.navigate.to(f"/round/{int(value[1])}/{numbers[int(value[0])]}")


class BandwidthPage(Page):
    """What each link carries, what each peer may send and needs to, what of it training waits for."""

    def __init__(self, frame: Frame) -> None:
        super().__init__(frame)
        self._tiles = shell.tiles(
            sent="Sent so far", sent_per_s="Sent per second", hidden="Communication hidden",
            links="Links measured",
        )  # fmt: skip
        with card("Traffic", "kB/s, all peers together") as panel:
            with head(panel):
                frame.range_choice()
            self._traffic = Chart("chart-traffic")
        with card("Peers", "floor: what rounds ask of the average member, each direction; own word"):
            self._peers = Table("traffic", (
                ("peer", "Peer", -1), ("up", "Up (kB/s)", 1), ("down", "Down (kB/s)", 1),
                ("cap", "Upload cap (kB/s)", 1), ("floor", "Floor (kB/s)", 1), ("sent", "Sent (MB)", 1),
                ("received", "Received (MB)", 1), ("hidden", "Hidden (s)", 1), ("exposed", "Exposed (s)", 1),
            ))  # fmt: skip
        with card("Links", "as their senders measured them, about every ten seconds") as panel:
            with head(panel):
                search = search_field()
            self._links = Table("links-table", (
                ("from", "From", -1), ("to_peer", "To", -1), ("rate", "Mbit/s", 2),
                ("trip", "Round trip (ms)", 1), ("carrier", "Carrier", -1), ("way", "Way", -1),
                ("sent", "Sent (MB)", 1),
            ), search=search)  # fmt: skip

    def refresh(self, facts: SwarmFacts) -> None:
        shown = self._tiles
        shown["sent"].set(size(facts.up_bytes), "", "all peers, own word")
        shown["sent_per_s"].set(f"{size(facts.up_bytes_per_s)}/s", "", "all peers, last ten seconds")
        hidden_s = sum(peer.hidden_s for peer in facts.peers)
        exposed_s = sum(peer.exposed_s for peer in facts.peers)
        share = hidden_s / (hidden_s + exposed_s) if hidden_s + exposed_s else None
        shown["hidden"].set(percent(share), "", f"{figure(exposed_s, 1)} s were exposed")
        found = [link.relayed for peer in facts.peers for link in peer.links]
        words = f"{sum(found)} relayed, {len(found) - sum(found)} direct"
        shown["links"].set(figure(len(found)), "", words)

    def redraw(self, facts: SwarmFacts) -> None:
        rows = self.frame.history.series(SWARM, *self.frame.span(facts))
        self._traffic.set(charts.over_time(self.frame.palette, rows, charts.TRENDS["traffic"][2]))
        self._peers.set([
            {
                "peer": plain(peer.label, 32), "up": _times(peer.up_bytes_per_s, 1e-3),
                "down": _times(peer.down_bytes_per_s, 1e-3), "hidden": peer.hidden_s,
                "exposed": peer.exposed_s, "to": f"/peer/{peer.peer}",
                "cap": _times(peer.upload_cap_bytes_per_s, 1e-3),
                "floor": _times(peer.needed_bytes_per_s, 1e-3), "sent": peer.up_bytes / 1e6,
                "received": peer.down_bytes / 1e6,
            }
            for peer in facts.peers
        ])  # fmt: skip
        names = {peer.peer: plain(peer.label, 24) for peer in facts.peers}
        self._links.set([
            {
                "from": names[peer.peer], "to_peer": names.get(link.other, f"~{link.other[-6:]}"),
                "rate": _times(link.bytes_per_s, 8e-6), "trip": _times(link.round_trip_s, 1e3),
                "carrier": plain(link.carrier, 12), "way": "relayed" if link.relayed else "direct",
                "sent": link.sent_bytes / 1e6,
            }
            for peer in facts.peers
            for link in peer.links
        ])  # fmt: skip


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else round(value * factor, 3)


class PeersPage(Page):
    """Everybody in one table."""

    def __init__(self, frame: Frame) -> None:
        super().__init__(frame)
        with card("Peers") as panel, head(panel):
            self._count = text("b-hint", test_id="peers-count")
            search = search_field()
        with panel:
            self._table = Table("peers-table", (
                ("label", "Peer", -1), ("state", "State", -1), ("device", "Device", -1),
                ("tokens", "Tokens, own word", 0), ("share", "Share, counted (%)", 2),
                ("rate", "Tokens/s", 0), ("loss", "Training loss", 3),
                ("staleness", "Staleness (outer steps)", 2), ("used", "Used (%)", 1), ("up", "Up (kB/s)", 1),
                ("links", "Links", -1), ("version", "Software", -1), ("seen", "Seen, s ago", 0),
                ("joined", "Joined", -1), ("why", "Left, and why", -1),
            ), search=search)  # fmt: skip
            words = "Tokens, loss, rates and utilisation are a peer's own word. Its share is counted by the "
            text("b-foot", words + "group: weights in commits that more than half of its peers signed.")

    def refresh(self, facts: SwarmFacts) -> None:
        self._count.text = f"{facts.peers_online} online of {facts.peers_known} known"

    def redraw(self, facts: SwarmFacts) -> None:
        self._table.set([_peer_row(peer, facts.at) for peer in facts.peers])


def _peer_row(peer: PeerFacts, now: float) -> dict[str, Any]:
    return {
        "key": peer.peer, "to": f"/peer/{peer.peer}", "label": plain(peer.label, 32), "state": peer.state,
        "device": plain(peer.device, 16), "tokens": peer.tokens, "share": _times(peer.share_counted, 100),
        "rate": round(peer.tokens_per_s), "loss": _times(peer.loss, 1),
        "staleness": _times(peer.staleness_mean, 1), "used": _times(peer.utilisation, 100),
        "up": _times(peer.up_bytes_per_s, 1e-3), "links": links(peer.carriers),
        "version": plain(peer.software, 24),
        "seen": None if peer.last_seen_at is None else round(max(0.0, now - peer.last_seen_at)),
        "joined": date(peer.joined_at), "why": plain(peer.reason, 90) if peer.state in ENDED else "",
    }  # fmt: skip


class PeerPage(Page):
    """One peer: what it says of itself, what it did over time, what happened at it."""

    def __init__(self, frame: Frame, peer: str) -> None:
        super().__init__(frame)
        self._peer = peer
        with ui.element("div"):
            ui.link("All peers", "/peers").classes("b-link")
            self._title = text("b-title", test_id="peer-title")
            text("b-hint b-words", peer[:80])
        self._trends = Trends("chart-peer")
        with card("What is known of it"):
            columns = (("name", "", -1), ("value", "", -1), ("what", "", -1))
            self._known = Table("peer-facts", columns, rows_a_page=0)
        with card("What happened at it"):
            self._events = _events_table("peer-events", 15)

    def refresh(self, facts: SwarmFacts) -> None:
        peer = next((peer for peer in facts.peers if peer.peer == self._peer), None)
        self._title.text = plain(peer.label, 60) if peer else "No such peer is known here"

    def redraw(self, facts: SwarmFacts) -> None:
        history = self.frame.history
        for peer in facts.peers:
            if peer.peer == self._peer:
                self._trends.set(self.frame.palette, history.series(peer.peer, *self.frame.span(facts)))
                self._known.set(fact_rows(peer))
        self._events.set([_event_row(line) for line in history.happenings(MAX_LINES, self._peer)])


def fact_rows(peer: PeerFacts) -> list[dict[str, str]]:
    """Every fact of a peer but its links, with what it is."""
    rows = []
    for name, field in PeerFacts.model_fields.items():
        value = getattr(peer, name)
        if name == "links":
            continue
        if name.endswith("_at"):
            value = date(value)
        elif isinstance(value, float | None):
            value = figure(value, 3)
        elif isinstance(value, dict):
            value = ", ".join(f"{plain(key, 40)}: {times}" for key, times in list(value.items())[:6])
        elif isinstance(value, tuple):
            value = ", ".join(figure(one) for one in value[:16])
        words = {"name": name.replace("_", " "), "value": plain(str(value), 80)}
        rows.append({**words, "what": field.description or ""})
    return rows


class EventsPage(Page):
    """What happened, newest first."""

    def __init__(self, frame: Frame) -> None:
        super().__init__(frame)
        with card("What happened", f"the newest {MAX_LINES}; a round's line leads to its members") as panel:
            with head(panel):
                search = search_field()
            self._table = _events_table("events", 50, search)

    def redraw(self, facts: SwarmFacts) -> None:
        self._table.set([_event_row(line) for line in self.frame.history.happenings(MAX_LINES)])


def _events_table(test_id: str, rows_a_page: int, search: ui.input | None = None) -> Table:
    columns = (("at", "At", -1), ("kind", "Kind", -1), ("words", "What", -1))
    return Table(test_id, columns, rows_a_page, search)


def _event_row(line: Happening) -> dict[str, Any]:
    kind, words = line.kind.replace("_", " "), plain(line.words, 240)
    to = {"to": f"/round/{line.fragment}/{line.round}"} if line.round >= 0 and line.fragment >= 0 else {}
    return {"key": line.key, "at": date(line.at), "kind": kind, "words": words, **to}


class RoundPage(Page):
    """One round of one fragment: its outcome, and each member's times and counted work."""

    def __init__(self, frame: Frame, fragment: int, number: int) -> None:
        super().__init__(frame)
        self._key = fragment, number
        with ui.element("div"):
            ui.link("All events", "/events").classes("b-link")
            text("b-title", f"Round {number} of fragment {fragment}")
        self._tiles = shell.tiles(
            round_outcome="Outcome", round_group="In the mean", round_duration="READY to certificate",
            round_staleness="Staleness",
        )  # fmt: skip
        hint = "seconds from each member's READY; work: weights (tokens) in the certificate"
        with card("Members", hint):
            self._table = Table("round-members", (
                ("peer", "Peer", -1), ("begin", "BEGIN", 2), ("parts", "PARTS", 2), ("means", "MEAN", 2),
                ("commit", "Certificate", 2), ("work", "Work (tokens)", 0),
            ))  # fmt: skip

    def refresh(self, facts: SwarmFacts) -> None:
        shown = self._tiles
        found = next((one for one in facts.rounds if (one.fragment, one.round) == self._key), None)
        if found is None:
            shown["round_outcome"].set("unknown", "", "this round is not among the newest here")
            return
        shown["round_outcome"].set(found.outcome, "", plain(found.reason, 120))
        shown["round_group"].set(figure(found.contributors), "", f"of {found.group_size} members")
        shown["round_duration"].set(figure(found.duration_s or None, 2), "s", "slowest member")
        stale = figure(found.staleness) if found.staleness >= 0 else "-"
        shown["round_staleness"].set(stale, "outer steps", "the most stale of its outer steps")

    def redraw(self, facts: SwarmFacts) -> None:
        view = self.frame.model.view.rounds.get(self._key)
        if view is None:
            return
        rows: dict[str, dict[str, Any]] = {
            peer: {"peer": plain(self.frame.model.known.label(peer), 40)}
            for peer in [*list(view.weights)[:64], *list(view.commits)[:64]]
        }
        for peer, row in rows.items():
            if peer in view.weights:
                row["work"] = round(view.weights[peer])
            if told := view.commits.get(peer):
                times = {"begin": told.begun_s, "parts": told.parts_s, "means": told.means_s,
                         "commit": told.duration_s}  # fmt: skip
                row |= {key: _times(value or None, 1) for key, value in times.items()}
        self._table.set(list(rows.values()))
