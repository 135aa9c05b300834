"""The pages of the board: swarm, staleness, bandwidth, peers, events; one for each peer and each fragment
exchange. ``run_page`` has the page of the run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

from nicegui import ui

from monitoring import charts
from monitoring.board.cards import MachineCard, OwnCard, RunCard
from monitoring.board.shell import BoardTable, Chart, Frame, Page, Told, Trends, block, card, text
from monitoring.columns import (
    COUNT,
    FAST_RATE,
    HUNDREDTHS,
    MILLISECONDS,
    PEER,
    STAGE,
    TEXT,
    VOLUME,
    Column,
    a_month,
)
from monitoring.facts import (
    ENDED,
    OF_STAGES,
    ONLINE,
    PeerFacts,
    RoundFacts,
    RunState,
    StageFacts,
    SwarmFacts,
    Trouble,
)
from monitoring.history import AGREED, MAX_LINES, SWARM, Happening
from monitoring.words import (
    OWN_UNIT,
    ago,
    clock,
    date,
    exchange,
    figure,
    missed_advice,
    missed_words,
    percent,
    plain,
    size,
    staleness_verdict,
)
from p2p_co2.telemetry.view import numbered
from p2p_co2.wire.limits import MAX_FRAGMENTS
from p2p_co2.wire.names import words_of

EVENTS: dict[str, tuple[str, ...]] = {
    "comings, goings, faults": (
        "peer_started", "peer_joined", "peer_left", "peer_finished", "paused", "resumed", "training_ended",
        "caught_up", "link_lost", "round_aborted", "contribution_capped", "message_refused", "warned",
    ),
    "exchanges": ("round_committed", "round_aborted", "slice_missed", "send_skipped"),
    "all": (),
}  # fmt: skip
"""The kinds of events that the page of events shows, by the words of its buttons; () are all."""


class SwarmPage(Page):
    """Is it learning, who is here, how fast, and what is wrong now."""

    def __init__(self, frame: Frame) -> None:
        facts = frame.model.facts()
        model = frame.model
        self._you = OwnCard(facts, model.feed, model.wish_token) if facts.me else None
        self._run = RunCard(facts)
        super().__init__(frame, swarm_told)
        self._shown: tuple[Trouble, ...] | None = None
        self._over_tokens = False
        with card("What is wrong now"):
            self._troubles = ui.element("div").props("data-testid=troubles")
        self._stages = _stages_table() if frame.model.facts().stages else None
        unit = frame.model.facts().loss_unit or OWN_UNIT
        with card("Loss of the agreed parameters", unit, self._add_controls):
            self._loss = Chart("chart-loss", "Loss")
        self._figures = _AgreedFigures()
        self._trends = Trends("chart")
        if facts.me:
            MachineCard(frame)
        words = "What peers say of themselves is their own word, in reports they signed; work is counted "
        text("b-foot", words + "from the certificates of fragment exchanges.")

    def _add_controls(self) -> None:
        block("b-grow")
        over = {"over time": False, "over tokens": True}
        self.frame.choice("what the loss is over", over, self._show_over)
        self.frame.axis_choice()
        self.frame.range_choice()

    def _show_over(self, tokens: bool) -> None:
        self._over_tokens = tokens

    def refresh(self, facts: SwarmFacts) -> None:
        super().refresh(facts)
        self._run.set(facts)
        if self._you is not None:
            self._you.set(facts)
        if facts.troubles != self._shown:
            self._shown = facts.troubles
            self._troubles.clear()
            with self._troubles:
                _show_troubles(facts)

    def redraw(self, facts: SwarmFacts) -> None:
        history = self.frame.history
        palette = self.frame.palette
        (since, until) = self.frame.span(facts)
        rows, agreed = (history.series(key, since, until) for key in (SWARM, AGREED))
        self._loss.set(charts.loss(
            palette, rows, agreed, over_tokens=self._over_tokens, look=self.frame.look,
            marks=self.frame.marks(),
        ))  # fmt: skip
        self._figures.set(self.frame, facts)
        self._trends.set(self.frame, rows)
        if self._stages is not None:
            self._stages.set(facts.stages)


class _AgreedFigures:
    """What peers measure of the agreed parameters beside their loss: a small chart for each figure."""

    def __init__(self) -> None:
        self._row = block("b-three")
        self._charts: dict[str, Chart] = {}
        self._row.set_visibility(False)

    def set(self, frame: Frame, facts: SwarmFacts) -> None:
        names = facts.figures_agreed
        if list(names) != list(self._charts):
            self._row.clear()
            self._row.set_visibility(bool(names))
            with self._row:
                for name in names:
                    with card(name, "agreed parameters, held-out"):
                        self._charts[name] = Chart(f"chart-figure-{name}", name, "low")
            self._charts = {name: self._charts[name] for name in names}
        for name, chart in self._charts.items():
            rows = frame.history.series(f"{AGREED}/{name}", *frame.span(facts))
            chart.set(charts.over_time(
                frame.palette, rows, {name: ("loss", charts.BLUE, 1.0)}, title=name, look=frame.look,
                is_measured=True,
            ))  # fmt: skip


def _stages_table() -> BoardTable:
    """A row for each stage of a run with several."""
    hint = "from the first to the last; hops: the median link while microbatches are under way, own word"
    shown = ("stage", "replicas", "apart", "tokens_per_s", "queue", "waiting", "dropped", "forward", "back",
             "hop", "committed", "waits_for")  # fmt: skip
    columns = [STAGE[name] for name in shown]
    columns.insert(2, Column("Is", TEXT, _staffed))
    with card("Stages", hint):
        return BoardTable("stages", columns, rows_a_page=0)


def _staffed(stage: StageFacts) -> str:
    if stage.is_empty:
        return "without replica"
    return "understaffed" if stage.trouble else "staffed" if stage.replicas else "over"


def swarm_told(facts: SwarmFacts) -> Told:
    held_out = f"held-out{ago(facts.loss_agreed_at, facts.at)}; agreed parameters"
    kind = held_out if facts.loss_kind == "held-out" else "training, mean of peers"
    total = f"of {facts.rounds_total}" if facts.rounds_total else "without end"
    every = f", {facts.round_s:g} s each" if facts.round_s else ""
    alone = f"{facts.rounds_alone} alone, " if facts.rounds_alone else ""
    made = f"committed; {alone}{facts.rounds_aborted} aborted, {facts.rounds_counted} checked"
    per_s = "through all stages" if facts.stages else "sum of the peers"
    counted = f"{figure(facts.tokens_counted)} counted by the group"
    rate = f"{size(facts.up_bytes_per_s)}/s"
    return {
        "loss": ("Loss", figure(facts.loss, 3), facts.loss_unit.replace(" per ", "/"), kind),
        "peers-online": ("Peers online", figure(facts.peers_online), "", f"of {facts.peers_known} known"),
        "round": ("Current round", figure(facts.position, 1), "", f"{total}{every}"),
        "tokens": ("Tokens trained", figure(facts.tokens), "", counted),
        "tokens-per-s": ("Tokens per second", figure(facts.tokens_per_s), "tokens/s", per_s),
        "utilisation": ("Compute utilisation", percent(facts.utilisation), "", "of the time is training"),
        "bytes-per-s": ("Sent per second", rate, "", f"{size(facts.up_bytes)} so far"),
        "rounds": ("Fragment exchanges", figure(facts.rounds_committed), "", made),
    }


def _show_troubles(facts: SwarmFacts) -> None:
    if not facts.troubles:
        fine = "Nothing: every peer is heard, and fragment exchanges commit."
        text("b-fine", "The run is over." if facts.state == RunState.OVER else fine)
    for trouble in facts.troubles:
        with block(f"b-row {trouble.severity}"):
            text("b-mark", "Wrong" if trouble.severity == "bad" else "Note")
            text("b-words", plain(trouble.words, 400))
            text("b-when", f"{clock(max(0.0, facts.at - trouble.since_at))} ago")


class StalenessPage(Page):
    """How late answers come, fragment by fragment and round by round."""

    def __init__(self, frame: Frame) -> None:
        with card("Staleness"):
            self._verdict = text("b-words", test_id="verdict")
        super().__init__(frame, staleness_told)
        hint = "a column is a round; group size inside, why on hover, click for its members"
        with card("Fragment exchanges", hint):
            with block("b-legend"):
                for colour, _, words in charts.OUTCOMES.values():
                    with ui.element("span"):
                        ui.element("i").style(f"background:{colour}")
                        ui.label(words)
            known = frame.model.known
            kind = "tall" if known.stages * known.fragments > charts.MAX_LOW_ROWS else ""
            self._heat = Chart("chart-rounds", "Fragment exchanges", kind, on_click=self._open_round)
        with card("How stale", "outer steps between a gradient's parameters and those it met"):
            self._histogram = Chart("chart-staleness", "Staleness")

    def refresh(self, facts: SwarmFacts) -> None:
        super().refresh(facts)
        run = self.frame.model.known.run
        is_delayed = run is not None and run.outer.is_delayed
        self._verdict.text = staleness_verdict(facts.staleness, is_delayed)

    def redraw(self, facts: SwarmFacts) -> None:
        palette = self.frame.palette
        self._heat.set(charts.rounds(palette, facts.rounds, facts.fragments, len(facts.stages)))
        self._histogram.set(charts.staleness_of(palette, self.frame.model.view, bool(facts.stages)))

    def _open_round(self, click: Any) -> None:
        value = click.data["value"] if isinstance(click.data, dict) else click.value
        facts = self.frame.model.facts()
        numbers = charts.round_columns(facts.rounds)
        fragment = int(value[1])
        if facts.stages:
            fragment = numbered(*divmod(fragment, max(1, facts.fragments)))
        ui.navigate.to(f"/round/{fragment}/{numbers[int(value[0])]}")


def staleness_told(facts: SwarmFacts) -> Told:
    outcomes = [found.outcome for found in facts.rounds]
    odd = figure(outcomes.count("late") + outcomes.count("partial"))
    of = f"of the newest {len(outcomes)}; {outcomes.count('aborted')} aborted"
    shown = [peer for peer in facts.peers if peer.state in ONLINE or not facts.peers_online]
    ages = [(age, peer.label) for peer in shown for age in peer.fragment_age_s if age is not None]
    oldest, label = max(ages, default=(None, ""))
    applied = f"of {figure(sum(facts.staleness.values()))} applied"
    delay = figure(facts.sync_delay_steps_mean, 1)
    return {
        "staleness-mean": ("Mean staleness", figure(facts.staleness_mean, 2), "outer steps", applied),
        "delay": ("Send to apply", delay, "inner steps", "mean over all applied"),
        "late": ("Late or partial exchanges", odd, "", of),
        "missed": ("Slices not counted", missed_words(facts.missed) or "0", "", missed_advice(facts.missed)),
        "oldest": ("Oldest fragment", clock(oldest), "min:s", f"on {label}" if label else ""),
    }


class BandwidthPage(Page):
    """What each link carries, what each peer may send and needs to, what of it training waits for."""

    def __init__(self, frame: Frame) -> None:
        super().__init__(frame, bandwidth_told)
        with card("Traffic", "kB/s, all peers together", frame.range_choice):
            self._traffic = Chart("chart-traffic", "Traffic")
        shown_peers = charts.busiest(frame.model.facts().peers)
        kind = "tall" if len(shown_peers) > charts.MAX_NAMED else ""
        hint = "a row sends to a column, Mbit/s while payload is under way; the busiest peers"
        with card("Who sends to whom", hint, self._add_month):
            self._matrix = Chart("chart-links", "Who sends to whom", kind)
        hint = "a month: at this rate, both ways; floor: what a round asks of a member, each way; own word"
        with card("Peers", hint):
            shown = ("peer", "up", "down", "month", "cap", "floor", "sent", "received", "hidden", "exposed")
            self._peers = _peers_table(frame, "traffic", [PEER[name] for name in shown])
        self._hops = None
        if frame.model.facts().stages:
            hint = (
                "activations go forward, gradients back; the median link while they are under way, own word"
            )
            with card("Hops between stages", hint):
                self._hops = BoardTable("hops", _HOPS, rows_a_page=0)
        with card("Links", "as their senders measured them, about every ten seconds"):
            self._links = BoardTable("links-table", _LINKS, 10, search=True)

    def _add_month(self) -> None:
        block("b-grow")
        self._month = text("b-hint", test_id="month")

    def redraw(self, facts: SwarmFacts) -> None:
        month = [a_month(peer, peer.up_bytes) for peer in facts.peers]
        sent = sum(one for one in month if one is not None)
        self._month.text = f"at this rate {size(sent)} a month, all peers" if sent else ""
        self._matrix.set(charts.links(self.frame.palette, facts.peers))
        rows = self.frame.history.series(SWARM, *self.frame.span(facts))
        title, _, lines = charts.TRENDS["traffic"]
        look = self.frame.look
        marks = self.frame.marks()
        drawn = charts.over_time(self.frame.palette, rows, lines, title=title, look=look, marks=marks)
        self._traffic.set(drawn)
        self._peers.set(facts.peers)
        if self._hops is not None:
            self._hops.set(itertools.pairwise(facts.stages))
        names = {
            peer.peer: plain(peer.label, 24) + ("" if peer.stage is None else f", stage {peer.stage}")
            for peer in facts.peers
        }
        self._links.set([
            (names[peer.peer], names.get(link.other) or words_of(link.other), link)
            for peer in facts.peers
            for link in peer.links
        ])  # fmt: skip


_HOPS = (
    Column("Between", TEXT, lambda hop: f"stage {hop[0].stage} and {hop[1].stage}"),
    Column("Forward", FAST_RATE, lambda hop: hop[0].forward_bytes_per_s),
    Column("Back", FAST_RATE, lambda hop: hop[1].back_bytes_per_s),
    Column("Round trip", MILLISECONDS, lambda hop: hop[0].forward_round_trip_s),
    Column("And back", MILLISECONDS, lambda hop: hop[1].back_round_trip_s),
    Column("Sent forward", VOLUME, lambda hop: hop[0].forward_bytes),
    Column("Sent back", VOLUME, lambda hop: hop[1].back_bytes),
)
"""Of two neighbouring stages."""
_LINKS = (
    Column("From", TEXT, lambda link: link[0]),
    Column("To", TEXT, lambda link: link[1]),
    Column("Rate", FAST_RATE, lambda link: link[2].bytes_per_s),
    Column("Round trip", MILLISECONDS, lambda link: link[2].round_trip_s),
    Column("Carrier", TEXT, lambda link: plain(link[2].carrier, 12)),
    Column("Way", TEXT, lambda link: "relayed" if link[2].relayed else "direct"),
    Column("Sent", VOLUME, lambda link: link[2].sent_bytes),
)
"""Of (name of the sender, of the receiver, ``LinkFacts``)."""


def bandwidth_told(facts: SwarmFacts) -> Told:
    hidden_s, exposed_s = (
        sum(getattr(peer, name) for peer in facts.peers) for name in ("hidden_s", "exposed_s")
    )
    share = hidden_s / (hidden_s + exposed_s) if hidden_s + exposed_s else None
    relayed = [link.relayed for peer in facts.peers for link in peer.links]
    ways = f"{sum(relayed)} relayed, {len(relayed) - sum(relayed)} direct"
    exposed = f"{figure(exposed_s, 1)} s were exposed"
    rate = f"{size(facts.up_bytes_per_s)}/s"
    return {
        "sent": ("Sent so far", size(facts.up_bytes), "", "all peers, own word"),
        "sent-per-s": ("Sent per second", rate, "", "all peers, last ten seconds"),
        "hidden": ("Communication hidden", percent(share), "", exposed),
        "links": ("Links measured", figure(len(relayed)), "", ways),
    }


def _peers_table(frame: Frame, test_id: str, columns: Sequence[Column], **more: Any) -> BoardTable:
    """Whose rows lead to the peers' pages; the reader's own is tinted."""
    me = frame.model.feed.me
    return BoardTable(
        test_id, columns, to=lambda peer: f"/peer/{peer.peer}", is_mine=lambda peer: peer.peer == me, **more
    )


class PeersPage(Page):
    """Everybody in one table."""

    def __init__(self, frame: Frame) -> None:
        super().__init__(frame)
        of_stages = ("stage", "waiting") if frame.model.facts().stages else ()
        shown = ("peer", "state", *of_stages, "tokens_per_s", "share", "device", "tokens", "loss",
                 "staleness", "missed", "used", "up", "links", "software")  # fmt: skip
        columns = [
            *(PEER[name] for name in shown),
            Column("Seen, s ago", COUNT, self._seen_s),
            PEER["joined"],
            Column("Left, and why", TEXT, lambda peer: plain(peer.reason, 90) * (peer.state in ENDED)),
        ]
        with card("Peers", controls=self._add_count):
            speed = PEER["tokens_per_s"].heading
            on_phone = ("Peer", "State", speed, PEER["share"].heading)
            self._table = _peers_table(
                frame, "peers-table", columns, search=True, on_phone=on_phone, bars=speed
            )
            words = "Tokens, loss, rates and utilisation are a peer's own word. Its share is counted by the "
            text("b-foot", words + "group: weights in commits that more than half of its peers signed.")

    def _add_count(self) -> None:
        self._count = text("b-hint", test_id="peers-count")

    def _seen_s(self, peer: PeerFacts) -> int | None:
        now = self.frame.model.facts().at
        return None if peer.last_seen_at is None else round(max(0.0, now - peer.last_seen_at))

    def refresh(self, facts: SwarmFacts) -> None:
        self._count.text = f"{facts.peers_online} online of {facts.peers_known} known"

    def redraw(self, facts: SwarmFacts) -> None:
        self._table.set(facts.peers)


class PeerPage(Page):
    """One peer: what it says of itself, what it did over time, what happened at it."""

    def __init__(self, frame: Frame, peer: str) -> None:
        super().__init__(frame)
        self._peer = peer
        with ui.element("div"):
            ui.link("All peers", "/peers").classes("b-link")
            self._title = text("b-title", test_id="peer-title", tag="h2")
            text("b-hint b-words", peer[:80])
        headings = enumerate(("Fact", "Value", "What it is"))
        columns = [Column(heading, TEXT, itemgetter(place)) for place, heading in headings]
        with block("b-page-part") as self._told_of:
            self._trends = Trends("chart-peer")
            with card("What is known of it"):
                self._known = BoardTable(
                    "peer-facts", columns, rows_a_page=0, on_phone=("Fact", "Value"), explain=itemgetter(2)
                )
            with card("What happened at it"):
                self._events = _events_table("peer-events", 15)

    def refresh(self, facts: SwarmFacts) -> None:
        peer = next((peer for peer in facts.peers if peer.peer == self._peer), None)
        self._title.text = plain(peer.label, 60) if peer else "No such peer is known here"

    def redraw(self, facts: SwarmFacts) -> None:
        history = self.frame.history
        known = [peer for peer in facts.peers if peer.peer == self._peer]
        happened = history.happenings(MAX_LINES, self._peer)
        self._told_of.set_visibility(bool(known or happened))
        self._trends.set(self.frame, history.series(self._peer, *self.frame.span(facts)))
        for peer in known:
            self._known.set(fact_rows(peer))
        self._events.set(happened)


def fact_rows(peer: PeerFacts) -> list[tuple[str, str, str]]:
    """(name, value, what it is) of every fact of a peer but its links."""
    rows = []
    for name, field in type(peer).model_fields.items():
        value = getattr(peer, name)
        if name == "links" or (name in OF_STAGES and peer.stage is None):
            continue
        if name.endswith("_at"):
            value = date(value)
        elif isinstance(value, float | int | None):
            value = figure(value, 3 if isinstance(value, float) else 0)
        elif isinstance(value, dict):
            value = ", ".join(f"{plain(key, 40)}: {times}" for key, times in list(value.items())[:6])
        elif isinstance(value, tuple):
            value = ", ".join(figure(one) for one in value[:16])
        rows.append((name.replace("_", " "), plain(str(value), 80), field.description or ""))
    return rows


class EventsPage(Page):
    """What happened, newest first."""

    def __init__(self, frame: Frame) -> None:
        super().__init__(frame)
        self._kinds = next(iter(EVENTS.values()))
        hint = f"the newest {MAX_LINES}; that of a fragment exchange leads to its members"
        with card("What happened", hint, self._add_choice):
            self._table = _events_table("events", 50, search=True)

    def _add_choice(self) -> None:
        self.frame.choice("which events", EVENTS, self._show)

    def _show(self, kinds: tuple[str, ...]) -> None:
        self._kinds = kinds

    def redraw(self, facts: SwarmFacts) -> None:
        self._table.set(self.frame.history.happenings(MAX_LINES, kinds=self._kinds))


def _events_table(test_id: str, rows_a_page: int, search: bool = False) -> BoardTable:
    def place(line: Happening) -> str:
        return f"/round/{line.fragment}/{line.round}" if line.round >= 0 and line.fragment >= 0 else ""

    def kind(line: Happening) -> str:
        return line.kind.replace("round_", "exchange_").replace("_", " ")

    columns = (
        Column("At", TEXT, lambda line: date(line.at)),
        Column("Kind", TEXT, kind),
        Column("What", TEXT, lambda line: plain(line.words, 240)),
    )
    return BoardTable(test_id, columns, rows_a_page, place, search, on_phone=("At", "What"))


def _key_of(found: RoundFacts) -> tuple[int, int]:
    return numbered(found.stage, found.fragment), found.round


class RoundPage(Page):
    """One fragment exchange: its outcome, and each member's times and counted work."""

    def __init__(self, frame: Frame, fragment: int, number: int) -> None:
        self._key = fragment, number
        with ui.element("div"):
            ui.link("All events", "/events").classes("b-link")
            stage, own = divmod(fragment, MAX_FRAGMENTS)
            name = exchange(own, number, stage if frame.model.facts().stages else None)
            text("b-title", name.capitalize(), tag="h2")
        super().__init__(frame, self._round_told)

        def seconds(name: str) -> Callable[[Any], float | None]:
            return lambda row: getattr(row[1], name, None) or None

        times = {"BEGIN": "begun_s", "PARTS": "parts_s", "MEAN": "means_s", "Certificate": "duration_s"}
        with card("Members", "seconds from each member's READY; work: tokens in the certificate"):
            self._table = BoardTable("round-members", (
                Column("Peer", TEXT, itemgetter(0)),
                *(Column(heading, HUNDREDTHS, seconds(name)) for heading, name in times.items()),
                Column("Work (tokens)", COUNT, itemgetter(2)),
            ))  # fmt: skip

    def redraw(self, facts: SwarmFacts) -> None:
        if view := self.frame.model.view.rounds.get(self._key):
            name = self.frame.model.known.label
            told = view.commits
            counted = view.weights
            members = dict.fromkeys([*list(counted)[:64], *list(told)[:64]])
            self._table.set((plain(name(peer), 40), told.get(peer), counted.get(peer)) for peer in members)

    def _round_told(self, facts: SwarmFacts) -> Told:
        found = next((one for one in facts.rounds if _key_of(one) == self._key), None)
        outcome, group, duration, stale = [("", "", "")] * 4
        if found is None:
            outcome = "unknown", "", "this exchange is not among the newest here"
        else:
            outcome = found.outcome, "", plain(found.reason, 120)
            group = figure(found.contributors), "", f"of {found.group_size} members"
            duration = figure(found.duration_s or None, 2), "s", "slowest member"
            late = figure(found.staleness) if found.staleness >= 0 else "-"
            stale = late, "outer steps", "the most stale of its outer steps"
        return {
            "round-outcome": ("Outcome", *outcome), "round-group": ("In the mean", *group),
            "round-duration": ("READY to certificate", *duration), "round-staleness": ("Staleness", *stale),
        }  # fmt: skip
