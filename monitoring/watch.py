"""A run in a terminal: the swarm's and the staleness page's essentials, for machines reached over ssh.

Law: what a peer said is text, never markup or control characters; without a terminal a plain line every ten
seconds takes the table's place. Price: one redraw a second, some milliseconds.
"""

from __future__ import annotations

import time

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from monitoring.facts import PeerFacts, SwarmFacts
from monitoring.history import History
from monitoring.model import Model
from monitoring.peer_state import ONLINE
from monitoring.words import UNKNOWN, ago, clock, figure, percent, plain, size
from p2p_co2.system.process import StopSignals
from p2p_co2.telemetry.feed import Feed

TICK_S = 1.0
PLAIN_EVERY_S = 10.0
_LINES_BESIDE_PEERS = 20
_BAR_CELLS = 30
_STATE_STYLES = {"training": "green", "finished": "cyan", "left": "cyan", "gone": "red", "silent": "red",
                 "unreachable": "red", "unknown": "yellow", "behind": "yellow"}  # fmt: skip
_CONNECTION_STYLES = {"connected": "green", "connecting": "yellow", "ended": "cyan"}
_OUTCOME_STYLES = {"committed": ("■", "blue"), "partial": ("p", "cyan"), "late": ("L", "yellow"),
                   "alone": ("1", "magenta"), "aborted": ("A", "bold red"), "open": ("·", "dim")}  # fmt: skip


def watch_feed(feed: Feed, seconds: float = 0.0, console: Console | None = None) -> int:
    """Show ``feed`` until Ctrl-C, or ``seconds`` have passed (0: no end). Returns the exit status; closes the
    feed."""
    console = console or Console()
    model = Model(feed, History(None))
    stop = StopSignals(lambda: None)
    live = Live(console=console, auto_refresh=False, screen=True) if console.is_terminal else None
    ends_at = time.monotonic() + seconds if seconds else float("inf")
    next_line_at = 0.0
    try:
        with stop:
            if live:
                live.start()
            while not stop.asked and time.monotonic() < ends_at:
                model.feed.watched(time.monotonic())
                model.step(time.time())
                model.keep(time.time())
                if live:
                    live.update(frame(model.facts(), console.width, console.height), refresh=True)
                elif time.monotonic() >= next_line_at:
                    next_line_at = time.monotonic() + PLAIN_EVERY_S
                    console.print(line(model.facts()), markup=False, highlight=False)
                time.sleep(TICK_S if not stop.asked else 0.0)
    finally:
        if live:
            live.stop()
        feed.close()
        model.history.close()
    return 0


def line(facts: SwarmFacts) -> str:
    """The swarm in one line of plain text."""
    if not facts.peers_known:
        return f"{facts.connection}: {plain(facts.connection_words, 200)}"
    count = len(facts.troubles)
    wrong = f", {count} trouble{'s'[: count > 1]}: {plain(facts.troubles[0].words, 300)}" if count else ""
    return (
        f"{facts.peers_online} of {facts.peers_known} peers, round {figure(facts.position, 1)}, "
        f"loss {figure(facts.loss, 3)} ({facts.loss_kind}), {figure(facts.tokens)} tokens, "
        f"{figure(facts.tokens_per_s)} tokens/s, "
        f"rounds {facts.rounds_committed} committed {_alone(facts)}{facts.rounds_aborted} aborted, "
        f"staleness {figure(facts.staleness_mean, 2)}, up {size(facts.up_bytes)}{wrong}"
    )


def _alone(facts: SwarmFacts) -> str:
    return f"{facts.rounds_alone} alone " if facts.rounds_alone else ""


def frame(facts: SwarmFacts, width: int, height: int) -> RenderableType:
    """One screen of ``width`` times ``height`` cells."""
    if not facts.peers_known:
        head = {"connecting": "Looking for the swarm", "lost": "The swarm is out of reach"}
        text = head.get(facts.connection, "Nobody is training right now")
        return Group(Text(text, style="bold"), Text(plain(facts.connection_words, 400), style="dim"))
    return Group(
        _head(facts),
        _troubles(facts),
        _peers(facts, width, max(3, height - _LINES_BESIDE_PEERS)),
        _staleness(facts, width),
    )


def _head(facts: SwarmFacts) -> RenderableType:
    kind = facts.loss_kind
    if kind == "held-out":
        kind += ago(facts.loss_agreed_at, facts.at)
    of = f" of {facts.rounds_total}" if facts.rounds_total else ""
    title = Text.assemble(
        (plain(facts.run or "a run", 64), "bold"), f"  {plain(facts.place, 80)}  ",
        (facts.connection, _CONNECTION_STYLES.get(facts.connection, "red")),
    )  # fmt: skip
    first = Text.assemble(
        "loss ", (figure(facts.loss, 3), "bold"), f" {facts.loss_unit} ({kind})   peers ",
        (f"{facts.peers_online} of {facts.peers_known}", "bold"), "   round ",
        (f"{figure(facts.position, 1)}{of}", "bold"), "   utilisation ", (percent(facts.utilisation), "bold"),
    )  # fmt: skip
    second = Text.assemble(
        "tokens ", (figure(facts.tokens), "bold"), "   ", (figure(facts.tokens_per_s), "bold"),
        " tokens/s   sent ", (f"{size(facts.up_bytes_per_s)}/s", "bold"),
        f" ({size(facts.up_bytes)})\nrounds ",
        (figure(facts.rounds_committed), "bold"), " committed, ",
        f"{_alone(facts)}{facts.rounds_aborted} aborted",
    )  # fmt: skip
    return Group(title, first, second)


def _troubles(facts: SwarmFacts) -> RenderableType:
    if not facts.troubles:
        return Text("nothing is wrong", style="green")
    rows = [
        Text(f"! {plain(trouble.words, 300)}", style="red" if trouble.severity == "bad" else "yellow",
             overflow="fold")
        for trouble in facts.troubles[:4]
    ]  # fmt: skip
    return Group(*rows)


def _peers(facts: SwarmFacts, width: int, most: int) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    headings = [
        "peer",
        "state",
        "loss",
        "share*",
        "tokens",
        "tok/s",
        "stale",
        "used",
        "sent",
        "links",
        "device",
    ]
    headings = headings[: 4 if width < 70 else 8 if width < 100 else len(headings)]
    for number, heading in enumerate(headings):
        text = number < 2 or heading in {"links", "device"}
        table.add_column(heading, justify="left" if text else "right", no_wrap=True)
    order = sorted(facts.peers, key=lambda peer: (peer.state not in ONLINE, peer.label))
    for peer in order[:most]:
        table.add_row(*_row(peer)[: len(headings)])
    if len(order) > most:
        table.add_row(Text(f"and {len(order) - most} more", style="dim"))
    table.caption = Text("* counted by the group; the rest is each peer's own word", style="dim")
    table.caption_justify = "left"
    return table


def _row(peer: PeerFacts) -> list[Text]:
    links = ", ".join(f"{count} {carrier}" for carrier, count in peer.carriers.items())
    return [
        Text(plain(peer.label, 18), style="bold"),
        Text(plain(peer.state, 12), style=_STATE_STYLES.get(peer.state, "yellow")),
        Text(figure(peer.loss, 3)), Text(percent(peer.share_counted)), Text(figure(peer.tokens)),
        Text(figure(peer.tokens_per_s)), Text(figure(peer.staleness_mean, 2)),
        Text(percent(peer.utilisation)), Text(size(peer.up_bytes)), Text(plain(links, 20) or UNKNOWN),
        Text(plain(peer.device, 10)),
    ]  # fmt: skip


def _staleness(facts: SwarmFacts, width: int) -> RenderableType:
    """Histogram of staleness, and the newest rounds of each fragment as one letter each."""
    rows: list[Text] = [
        Text.assemble(
            ("staleness", "bold"), f" mean {figure(facts.staleness_mean, 2)} outer steps; send to apply "
            f"{figure(facts.sync_delay_steps_mean, 1)} inner steps",
        )
    ]  # fmt: skip
    most = max(facts.staleness.values(), default=1)
    for value, times in list(facts.staleness.items())[:3]:
        rows.append(
            Text.assemble(
                f"  {value} ", ("█" * max(1, round(_BAR_CELLS * times / most)), "blue"), f" {times}"
            )
        )
    oldest = max(
        (age or 0.0 for peer in facts.peers if peer.state in ONLINE for age in peer.fragment_age_s),
        default=0.0,
    )
    rows.append(
        Text(
            "rounds, newest right (■ committed, p without some, L late, 1 alone, A aborted)\n"
            f"  oldest fragment: merged {clock(oldest)} ago"
        )
    )
    for fragment in range(min(facts.fragments, 4)):
        letters = Text(f"  fragment {fragment} ")
        found = [one for one in facts.rounds if one.fragment == fragment][: max(8, width - 20)]
        for one in reversed(found):
            letter, style = _OUTCOME_STYLES[one.outcome]
            letters.append(letter, style=style)
        rows.append(letters)
    return Group(*rows)
