"""One's own peer in a terminal: what it gives and gets, where the run is, and what it waits for.

A reader that hears one peer alone knows of the others what the certificates and the links say: whose work was
counted, and who is reached. So the own row is whole, and the others' rows are short. Law: as ``terminal``,
whose parts it uses.
"""

from __future__ import annotations

from dataclasses import replace

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from monitoring.facts import Known, PeerFacts, SwarmFacts
from monitoring.terminal import Words, own_stage, table_of
from monitoring.words import UNKNOWN, clock, figure, percent, plain, size
from p2p_co2.telemetry import events as ev
from p2p_co2.telemetry.view import PeerView

_LINES_BESIDE_OTHERS = 20
_BAR_CELLS = 60
_DROP_FIRST = ("device", "received", "loss", "compute\nused", "sent", "reached by")
Row = tuple[str, ...]
COLUMNS = (
    "peer", "state", "share of\nthe work", "tokens\nper s", "loss", "compute\nused", "sent", "received",
    "device", "reached by",
)  # fmt: skip


class OwnPeer:
    """A ``terminal.Picture`` of the peer whose events it sees. ``leaving``: what it does before it is gone,
    in words; "" while it trains."""

    def __init__(self) -> None:
        self.leaving = ""
        self.peer = ""
        """Its id; "" before it has started."""
        self._loading: ev.StateLoading | None = None
        self._tokens_before: int | None = None
        """Of the checkpoint that it goes on from; None until it is heard."""
        self._rounds: set[int] = set()
        """Whose means hold work of this peer."""

    def see(self, event: ev.Event) -> None:
        match event:
            case ev.PeerStarted():
                self.peer = event.peer
            case ev.Progress() if self._tokens_before is None:
                self._tokens_before = event.tokens
            case ev.StateLoading():
                self._loading = event
            case ev.CaughtUp() if self._loading is not None:
                left = tuple(one for one in self._loading.fragments if one != event.fragment)
                self._loading = replace(self._loading, fragments=left) if left else None
            case ev.RoundCounted() if event.weights.get(event.peer, 0.0) > 0:
                self._rounds.add(event.round)

    @property
    def loading(self) -> str:
        """How far the state is that it loads, in words; "" if it loads none."""
        now = self._loading
        if now is None:
            return ""
        how_far = f"{size(now.received_bytes)} of {size(now.total_bytes)}"
        return f"loading the agreed state: {how_far} from {now.donors} peer{'s'[: now.donors != 1]}"

    def frame(self, known: Known, facts: SwarmFacts, width: int, height: int, news: Words) -> RenderableType:
        me = self._me(facts)
        wrong = [
            Text(f"! {plain(one.words, 300)}", style="red" if one.severity == "bad" else "yellow")
            for one in facts.troubles
            if me is None or one.peer in {"", me.peer}
        ]
        began = me.joined_at if me is not None and me.joined_at is not None else facts.at
        return Group(
            *self._head(facts, width),
            self._table(known, facts, width, max(3, height - _LINES_BESIDE_OTHERS)),
            *(own_stage([me], facts) if me is not None else []),
            *(wrong[:4] or [Text("nothing is wrong", style="green")]),
            *(
                Text(f"  {clock(at - began)}  {words}", style="dim", no_wrap=True, overflow="ellipsis")
                for at, words in news
            ),
        )  # fmt: skip

    def line(self, known: Known, facts: SwarmFacts) -> str:
        """The same in one line of plain text."""
        me = self._me(facts)
        reached = len(self._links(known))
        count = len(facts.troubles)
        wrong = f", {count} trouble{'s'[: count > 1]}: {plain(facts.troubles[0].words, 300)}" if count else ""
        of = f" of {facts.rounds_total}{_left(facts, ', ')}" if facts.rounds_total else ""
        carriers = ", ".join(f"{number} {name}" for name, number in (me.carriers if me else {}).items())
        return (
            f"peers reached: {reached}{f' ({carriers})' if carriers else ''}, "
            f"round {figure(facts.position, 1)}{of}, share {percent(me.share_counted if me else None)}, "
            f"loss {figure(facts.loss, 3)} ({facts.loss_kind}), {figure(facts.tokens)} tokens, "
            f"{figure(facts.tokens_per_s)} tokens/s, up {size(facts.up_bytes)}"
            f"{f', {self.loading}' if self._loading else ''}{wrong}"
        )

    def contribution(self, facts: SwarmFacts) -> str:
        """What it gave, for its last words; "" if it never trained."""
        me = self._me(facts)
        if me is None or not me.inner_steps or me.joined_at is None:
            return ""
        rounds = len(self._rounds)
        tokens = figure(me.tokens - (self._tokens_before or 0))
        share = f", {percent(me.share_counted)} of what was counted meanwhile" if rounds else ""
        return (
            f"contributed: {tokens} tokens in {clock(facts.at - me.joined_at)}, "
            f"work in {rounds} round{'s'[: rounds != 1]}{share}"
        )

    def _me(self, facts: SwarmFacts) -> PeerFacts | None:
        return next((peer for peer in facts.peers if peer.peer == self.peer), None)

    def _links(self, known: Known) -> dict[str, str]:
        """The carrier by peer that is reached."""
        own = known.view.peers.get(self.peer)
        return own.open_links if own is not None else {}

    def _head(self, facts: SwarmFacts, width: int) -> list[Text]:
        total = facts.rounds_total
        cells = min(_BAR_CELLS, max(10, width - 20))
        of = f" of {total}" if total else ""
        kind = f" {facts.loss_unit} ({facts.loss_kind})"
        head = [
            Text.assemble(
                (plain(facts.run or "a run", 64), "bold"), "   round ",
                (f"{figure(facts.position, 1)}{of}", "bold"),
                _left(facts, "   ") if total else "   no end",
                f"   loss {figure(facts.loss, 3)}{kind}",
            )
        ]  # fmt: skip
        if total:
            head.append(_bar(facts.progress or 0.0, cells, "green"))
        if self._loading is not None:
            done = self._loading.received_bytes / max(1, self._loading.total_bytes)
            head += [
                Text(f"{self.loading} ({done:.0%})", style="yellow"),
                _bar(done, cells, "yellow"),
            ]
        if self.leaving:
            head.append(Text(self.leaving, style="bold yellow"))
        return head

    def _table(self, known: Known, facts: SwarmFacts, width: int, most: int) -> Table:
        me = self._me(facts)
        links = self._links(known)
        own_id = me.peer if me is not None else ""
        others = sorted(
            ((known.view.counted.get(peer, 0.0), peer) for peer in {*links, *known.view.counted} - {own_id}),
            reverse=True,
        )
        total = sum(known.view.counted.values())
        rows = [_own_row(me)] if me is not None else []
        rows += [
            (known.label(peer)[:18], _state(known.view.peers.get(peer), peer in links),
             percent(work / total if total else None), "", "", "", "", "", "", links.get(peer, ""))
            for work, peer in others[:most]
        ]  # fmt: skip
        if len(others) > most:
            rows.append((f"and {len(others) - most} more", *[""] * (len(COLUMNS) - 1)))
        cells = {heading: [Text(row[at]) for row in rows] for at, heading in enumerate(COLUMNS)}
        for column in cells.values() if me is not None else ():
            column[0].stylize("bold green")
        return table_of(cells, width, _DROP_FIRST)


def _left(facts: SwarmFacts, before: str) -> str:
    """How long the run still goes, in words; "" if that is not known."""
    return f"{before}{clock(facts.time_left_s)} left" if facts.time_left_s is not None else ""


def _bar(share: float, cells: int, style: str) -> Text:
    full = round(cells * min(1.0, max(0.0, share)))
    return Text.assemble(("█" * full, style), ("░" * (cells - full), "dim"))


def _own_row(me: PeerFacts) -> Row:
    return (
        f"{plain(me.label, 12)} (you)", plain(me.state, 12), percent(me.share_counted),
        figure(me.tokens_per_s), figure(me.loss, 3), percent(me.utilisation), size(me.up_bytes),
        size(me.down_bytes), plain(me.device, 10), "",
    )  # fmt: skip


def _state(other: PeerView | None, is_reached: bool) -> str:
    if is_reached:
        return "reached"
    return plain(other.left_reason, 24) if other is not None and other.left_reason else UNKNOWN
