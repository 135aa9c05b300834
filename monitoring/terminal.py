"""The swarm in a terminal: live while it runs, and the summary when it ended. Where there is no terminal it
is a plain line every ten seconds. The reader's own peer, where it has one, is the first row.

Law: shows only what the facts hold; missing data is a dash, never a crash. A name or reason is text, never
markup or control characters. Price: a frame twice a second at most, some milliseconds of CPU each.
"""

from __future__ import annotations

import io
import itertools
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any, Self

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from monitoring.columns import MILLISECONDS, PEER, STAGE
from monitoring.facts import NOT_HEARD, ONLINE, PeerFacts, RoundFacts, RunState, SwarmFacts
from monitoring.known import Known
from monitoring.model import follow
from monitoring.swarm import swarm_facts
from monitoring.words import (
    UNKNOWN,
    ago,
    as_lines,
    clock,
    end_told,
    figure,
    links,
    missed_advice,
    missed_words,
    news,
    percent,
    plain,
    size,
    to_owner,
)
from p2p_co2.telemetry.events import THE_RUN_IS_OVER
from p2p_co2.telemetry.feed import Feed

FRAME_S = 0.5
PLAIN_EVERY_S = 10.0
NEWS_LINES = 6
_LINES_BESIDE_PEERS = 21
_STATUS_LINES = 60
"""As high as what is printed once may be."""
_BAR_CELLS = 60
_STYLES = {
    "training": "green", "finished": "cyan", "left": "cyan", "gone": "red", "silent": "red",
    "unreachable": "red", "connected": "green", "connecting": "yellow", "ended": "cyan", "lost": "red",
    "Healthy": "green", "Over": "cyan", "Lost": "red", "bad": "red",
}  # fmt: skip
"""Of states and of how bad a trouble is; others are yellow."""
_NOTHING = {"connecting": "Looking for the swarm", "lost": "The swarm is out of reach",
            "over": "The run is over"}  # fmt: skip
_OUTCOME_STYLES = {"committed": ("■", "blue"), "partial": ("p", "cyan"), "late": ("L", "yellow"),
                   "alone": ("1", "magenta"), "aborted": ("A", "bold red"), "open": ("·", "dim")}  # fmt: skip
_PEER_COLUMNS = ("peer", "stage", "state", "share", "loss", "tokens_per_s", "position", "staleness", "used",
                 "exposed", "sent", "received", "tokens", "links", "waiting", "device")  # fmt: skip
_OF_STAGES = ("stage", "waiting")
_OF_ALL = ("peer", "stage", "state", "share", "links")
"""Known of a peer that was never heard itself."""
_DROP_FIRST = ("device", "received", "tokens", "exposed", "position", "links", "sent", "waiting", "used",
               "share")  # fmt: skip
"""Columns that go where the terminal is narrow, in this order."""
_STAGES_DROP_FIRST = ("aborted", "committed", "hop", "apart", "back", "forward")
Words = Sequence[tuple[float, str]]


class LiveTerminal:
    """A live view of a swarm; a context manager. It starts no thread: ``show`` draws when a frame is due.

    ``expected_s``: how long the run is to train, None if it has no end. ``screen``: take the whole screen
    while it lasts. ``note``: what is said above all, "" for nothing.
    """

    def __init__(
        self, console: Console | None = None, *, expected_s: float | None = None, screen: bool = False
    ) -> None:
        self.note = ""
        self._console = console or Console()
        self._expected_s = expected_s
        self.started_at = time.time()
        self._trains_since: float | None = None
        self._next_at = 0.0
        self._said = ""
        is_live = self._console.is_terminal
        self._live = Live(console=self._console, auto_refresh=False, screen=screen) if is_live else None

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *of_error: object) -> None:
        if self._live:
            self._live.stop()

    def show(self, known: Known, *, now: bool = False) -> None:
        """Draw what is known at ``known.now``, if a frame is due, or ``now``. That moment stands once a run
        is over: from then on a line that differs from the last one is due."""
        if self._trains_since is None and known.view.totals.inner_steps:
            self._trains_since = known.now
        is_due = now or known.now >= self._next_at
        if not (is_due or known.is_over):
            return
        facts = swarm_facts(known)
        console = self._console
        said = line(facts)
        if not is_due and said == self._said:
            return
        self._next_at = known.now + (FRAME_S if self._live else PLAIN_EVERY_S)
        self._said = said
        if self._live:
            told = news(known.view, NEWS_LINES)
            picture = frame(facts, console.width, console.height, news=told, note=self.note)
            self._live.update(Group(picture, Text(self._times(known.now))), refresh=True)
        else:
            console.print(f"[{self._times(known.now)}] {said}", markup=False, highlight=False, soft_wrap=True)

    def _times(self, now: float) -> str:
        elapsed = clock(now - self.started_at)
        if self._expected_s is None:
            return elapsed
        trained_s = 0.0 if self._trains_since is None else max(0.0, now - self._trains_since)
        return f"{elapsed}, trained {clock(min(trained_s, self._expected_s))} of {clock(self._expected_s)}"


def watch_feed(feed: Feed, seconds: float = 0.0, console: Console | None = None) -> int:
    """Show ``feed`` until Ctrl-C, or ``seconds`` have passed (0: no end). Returns the exit status; closes the
    feed."""
    with LiveTerminal(console, screen=True) as terminal, closing(follow(feed, 1.0, seconds)) as steps:
        for model, moments in steps:
            for _ in moments:
                continue  # the last one is shown
            terminal.show(model.known)
    return 0


def print_status(facts: SwarmFacts, *, is_short: bool = False) -> None:
    """How the run is in a line; what it came to, if it is over; unless it ``is_short`` what a live view would
    show."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal or a log in another encoding
    print(f"{plain(facts.run or 'a run', 64)}: {plain(facts.how, 300)}")
    if facts.has_figures and facts.state == RunState.OVER:
        print("\n".join(as_lines(end_told(facts))))
    if facts.has_figures and not is_short:
        console = Console(width=None if sys.stdout.isatty() else 150)
        console.print(frame(facts, console.width, _STATUS_LINES))


def line(facts: SwarmFacts) -> str:
    """The swarm in one line of plain text."""
    if not facts.has_figures:
        return plain(facts.how if facts.state else f"{facts.connection}: {facts.connection_words}", 300)
    count = len(facts.troubles)
    parts = [
        _peers_there(facts), _round_words(facts), f"loss {figure(facts.loss, 3)} ({facts.loss_kind})",
        f"{figure(facts.tokens)} tokens", f"{figure(facts.tokens_per_s)} tokens/s",
        f"exchanges {_rounds(facts)}", f"staleness {figure(facts.staleness_mean, 2)}",
        f"up {size(facts.up_bytes)}",
    ]  # fmt: skip
    if own := facts.own:
        parts += [f"share {percent(own.share_counted)}", f"links {links(own.carriers)}", own.loading]
        parts += [f"resting: {plain(to_owner(own.reason), 90)}"] if own.state == "paused" else []
    if facts.stages:
        replicas, queues = (
            " + ".join(figure(getattr(one, name)) for one in facts.stages) for name in ("replicas", "waiting")
        )
        dropped = figure(sum(one.dropped or 0 for one in facts.stages))
        parts.append(f"replicas by stage {replicas}, queued {queues}, {dropped} dropped")
    if count:
        parts.append(f"{count} trouble{'s'[: count > 1]}: {plain(facts.troubles[0].words, 300)}")
    # Who has left hears nothing more: the run goes on without him, or not.
    left = (own := facts.own) and own.state == "finished" and own.reason != THE_RUN_IS_OVER
    state = "Left" if left else facts.state
    return (f"{state}: " if state else "") + ", ".join(filter(None, parts))


def _rounds(facts: SwarmFacts) -> str:
    alone = f"{facts.rounds_alone} alone " if facts.rounds_alone else ""
    return f"{facts.rounds_committed} committed {alone}{facts.rounds_aborted} aborted"


def _peers_there(facts: SwarmFacts) -> str:
    reached = sum(peer.state == "reached" for peer in facts.peers)  # a peer hears itself alone
    return f"{facts.peers_online + reached} of {facts.peers_known} peers"


def _round_words(facts: SwarmFacts) -> str:
    of = f" of {facts.rounds_total}" if facts.rounds_total else ""
    left = f" ({clock(facts.time_left_s)} left)" if facts.time_left_s is not None else ""
    return f"round {figure(facts.position, 1)}{of}{left}"


def frame(facts: SwarmFacts, width: int, height: int, *, news: Words = (), note: str = "") -> RenderableType:
    """One screen of ``width`` times ``height`` cells; ``news``: (at, words), oldest first; ``note``: said
    below the head."""
    if facts.nothing:
        text = _NOTHING.get(facts.nothing, "Nobody is training right now")
        return Group(Text(text, style="bold"), Text(plain(facts.how, 400), style="dim"))
    own = facts.own
    wrong = [
        Text(f"! {plain(one.words, 300)}", style=_style(one.severity), overflow="fold")
        for one in facts.troubles
    ]
    joined_at = (peer.joined_at for peer in ([own] if own else facts.peers) if peer.joined_at is not None)
    start = min(joined_at, default=facts.at)
    return Group(
        *_head(facts, min(_BAR_CELLS, max(10, width - 20))),
        *([Text(note, style="bold yellow")] if note else []),
        *(wrong[:4] or [Text("nothing is wrong", style="green")]),
        *_stages(facts, width),
        _peers(facts, width, max(3, height - _LINES_BESIDE_PEERS - len(facts.stages))),
        *([] if own is None or own.stage is None else [_own_stage(own, facts)]),
        *_staleness(facts, width),
        *(
            Text(f"  {clock(at - start)}  {words}", style="dim", no_wrap=True, overflow="ellipsis")
            for at, words in news
        ),
    )  # fmt: skip


def _style(word: str) -> str:
    return _STYLES.get(word, "yellow")


def _head(facts: SwarmFacts, cells: int) -> list[Text]:
    kind = facts.loss_kind + (ago(facts.loss_agreed_at, facts.at) if facts.loss_kind == "held-out" else "")
    head = [
        Text.assemble(
            (plain(facts.run or "a run", 64), "bold"), f"  {plain(facts.place, 80)}  ",
            (facts.connection, _style(facts.connection)), "  ", (facts.state, _style(facts.state)),
        ),
        Text.assemble(
            "loss ", (figure(facts.loss, 3), "bold"), f" {facts.loss_unit} ({kind})   ",
            (_peers_there(facts), "bold"), "   ", (_round_words(facts), "bold"), "   utilisation ",
            (percent(facts.utilisation), "bold"),
        ),
        Text.assemble(
            "tokens ", (figure(facts.tokens), "bold"), "   ", (figure(facts.tokens_per_s), "bold"),
            f" tokens/s   sent {size(facts.up_bytes)}   exchanges ", (_rounds(facts), "bold"),
        ),
    ]  # fmt: skip
    if facts.progress is not None:
        head.append(_bar(facts.progress, cells, "green"))
    if (own := facts.own) and own.state == "paused":
        head.append(Text(f"resting: {plain(to_owner(own.reason), 90)}", style="yellow"))
    if own and own.loaded_share is not None:
        head.append(Text(f"{own.loading} ({own.loaded_share:.0%})", style="yellow"))
        head.append(_bar(own.loaded_share, cells, "yellow"))
    return head


def _bar(share: float, cells: int, style: str) -> Text:
    full = round(cells * min(1.0, max(0.0, share)))
    return Text.assemble(("█" * full, style), ("░" * (cells - full), "dim"))


def _own_stage(own: PeerFacts, facts: SwarmFacts) -> Text:
    """What the reader's own peer says of its microbatches."""
    of = (own.counted or 0) + (own.dropped or 0)
    return Text.assemble(
        f"stage {own.stage} of {len(facts.stages)}   queue ", (figure(own.waiting), "bold"),
        f"   in flight {figure(own.in_flight)}   waiting ", (percent(own.waiting_share), "bold"),
        f"   dropped {figure(own.dropped)} of {figure(of)}",
        f"   idle: {plain(own.waits_for, 60)}" if own.waits_for else "",
    )  # fmt: skip


def _stages(facts: SwarmFacts, width: int) -> list[Table]:
    """A row for each stage; nothing in a run of one."""
    if not facts.stages:
        return []
    cells = {
        key: [Text(column.words(stage)) for stage in facts.stages]
        for key, column in STAGE.items()
        if column.short
    }
    for stage, replicas in zip(facts.stages, cells["replicas"], strict=True):
        replicas.stylize("bold red" if stage.is_empty else "yellow" if stage.trouble else "bold")
    return [_table({STAGE[key].short: column for key, column in cells.items()}, width,
                   [STAGE[key].short for key in _STAGES_DROP_FIRST])]  # fmt: skip


def _peers(facts: SwarmFacts, width: int, most: int) -> Table:
    own = facts.own
    order = sorted(
        facts.peers,
        key=lambda peer: (peer is not own, peer.state not in ONLINE | {"reached"}, peer.stage or 0),
    )
    cells = {
        PEER[key].short: [
            Text("" if peer.state in NOT_HEARD and key not in _OF_ALL else PEER[key].words(peer))
            for peer in order[:most]
        ]
        for key in _PEER_COLUMNS
        if facts.stages or key not in _OF_STAGES
    }
    for peer, label, state in zip(order, cells["peer"], cells["state"], strict=False):
        label.truncate(18, overflow="ellipsis")
        label.stylize("bold")
        state.stylize(_style(peer.state))
    if own is not None:
        cells["peer"][0].append(" (you)")
    if len(order) > most:
        cells["peer"].append(Text(f"and {len(order) - most} more", style="dim"))
    table = _table(cells, width, [PEER[key].short for key in _DROP_FIRST])
    table.caption = Text("* counted by the group; the rest is each peer's own word", style="dim")
    table.caption_justify = "left"
    return table


def _table(cells: dict[str, list[Text]], width: int, drop_first: Sequence[str]) -> Table:
    """A table of ``cells`` by heading, without those of ``drop_first`` for which ``width`` has no room."""
    widths = {
        heading: max([*map(len, heading.split("\n")), *(cell.cell_len for cell in column)])
        for heading, column in cells.items()
    }
    for heading in drop_first:  # until the rest fits unshortened; a cell of padding and one between columns
        if sum(widths[kept] + 2 for kept in cells) - 2 > width:
            cells.pop(heading, None)
    table = Table(
        box=box.SIMPLE_HEAD, header_style="bold", padding=(0, 1, 0, 0), pad_edge=False, show_edge=False
    )
    for heading in cells:
        table.add_column(heading, justify="left" if heading in {"peer", "state"} else "right", no_wrap=True)
    for row in itertools.zip_longest(*cells.values()):
        table.add_row(*row)
    return table


def _staleness(facts: SwarmFacts, width: int) -> list[Text]:
    """Staleness as numbers, and the newest exchanges of each fragment as one letter each."""
    mean = f" mean {figure(facts.staleness_mean, 2)} outer steps ({_histogram(facts.staleness)}); "
    delay = f"send to apply {figure(facts.sync_delay_steps_mean, 1)} inner steps"
    online = [peer for peer in facts.peers if peer.state in ONLINE]
    oldest = max((age or 0.0 for peer in online for age in peer.fragment_age_s), default=0.0)
    legend = "fragment exchanges, newest right (■ committed, p without some, L late, 1 alone, A aborted); "
    rows = [
        Text.assemble(("staleness", "bold"), mean, delay),
        Text(f"{legend}oldest fragment: merged {clock(oldest)} ago"),
    ]
    newest: dict[str, list[RoundFacts]] = {f"fragment {one}": [] for one in range(min(facts.fragments, 4))}
    if facts.stages:
        newest = {f"stage {one.stage}": [] for one in facts.stages}
    for told in facts.rounds:
        name = f"stage {told.stage}" if facts.stages else f"fragment {told.fragment}"
        newest.get(name, []).append(told)
    for name, found in newest.items():
        letters = Text(f"  {name} ")
        for one in reversed(found[: max(8, width - 20)]):
            letters.append(*_OUTCOME_STYLES[one.outcome])
        rows.append(letters)
    reasons = ", ".join(f"{plain(why, 40)} ({times})" for why, times in list(facts.abort_reasons.items())[:3])
    missed = missed_words(facts.missed)
    lines = [f"aborted: {reasons}"] if reasons else []
    lines += [f"slices not counted: {missed}; {missed_advice(facts.missed)}"] if missed else []
    return [*rows, *map(Text, lines)]


def _histogram(counts: Mapping[str, int]) -> str:
    """How often each value was; only some of many."""
    shown = sorted(counts.items(), key=lambda item: int(item[0]))[:6]
    return ", ".join(f"{value}: {times}" for value, times in shown) + (", ..." if len(counts) > 6 else "")


# ---- the end


def print_summary(summary: dict[str, Any], console: Console) -> None:
    """The summary of ``monitoring.summary.summarise`` for a reader."""
    console.print(_summary_table(summary))
    if summary["text"]:
        console.print(Text("text generated by the trained model", style="bold"))
        text = "".join(char if char.isprintable() or char in "\n\t" else "?" for char in summary["text"])
        console.print(Text(text.rstrip(), style="dim"))


def loss_words(summary: dict[str, Any]) -> str:
    """The held-out loss at the start and at the end."""
    loss = summary["loss"]
    words = f"{figure(loss['start'], 4)} to {figure(loss['end'], 4)} {loss['unit']}".strip()
    return words + (f" ({figure(loss['whole'], 4)} on all of the held-out data)" if loss["whole"] else "")


def same_words(summary: dict[str, Any]) -> str:
    """Whether all that finished hold the same bits, and how many did."""
    ended = sum(peer["finished"] for peer in summary["peer_table"].values())
    of = f"{ended} of {max(summary['peers'], summary['expected_peers'])} peers finished"
    return f"{'yes' if summary['digests_equal'] else 'no'}, {of}"


def _summary_table(summary: dict[str, Any]) -> Table:
    rounds = summary["rounds"]
    sent = summary["bytes"]
    table = Table(
        Column(style="bold", no_wrap=True), Column(), title_justify="left", show_header=False,
        title=Text(f"run {plain(summary['run'], 64)}", style="bold"),
    )  # fmt: skip
    reasons = ", ".join(f"{plain(reason, 60)}: {times}" for reason, times in rounds["abort_reasons"].items())
    carriers = ", ".join(f"{times} {plain(carrier, 20)}" for carrier, times in summary["carriers"].items())
    stages = [(f"stage {one['stage']}", _stage_summary(one)) for one in summary.get("stages", ())]
    with_hops = ", with hops" if stages else ""
    rows = [
        ("held-out loss, agreed parameters", loss_words(summary)),
        ("same digest of the agreed state", same_words(summary)),
        ("peers, parameters", f"{summary['peers']} peers, {figure(summary['parameters'])} parameters"),
        ("trained", f"{figure(summary['tokens'])} tokens in {clock(summary['wall_s'])}"),
        ("fragment exchanges committed", f"{rounds['committed']} ({rounds['partial']} partial)"),
        ("fragment exchanges aborted", f"{rounds['aborted']}{' (' + reasons + ')' if reasons else ''}"),
        ("compute utilisation, mean", percent(summary["utilisation"]["mean"])),
        ("exposed, worst peer", f"{figure(summary['exposed_s']['max'], 2)} s"),
        ("sent per parameter and round", f"{figure(sent['per_parameter_per_round'], 3)} bytes{with_hops}"),
        ("fp32 data-parallel would send", _data_parallel(sent)),
        ("codec, apply rule, links", f"{summary['codec']}, {summary['apply_rule']}, {carriers or UNKNOWN}"),
    ]
    for name, value in (*rows, *stages):
        table.add_row(name, Text(value))
    return table


def _stage_summary(stage: dict[str, Any]) -> str:
    """Who finished, what was computed, and how fast the hops are: a line each."""
    rounds = stage["rounds"]
    done = stage["microbatches"]
    hops = stage["hops"]
    made = f"{rounds['committed']} fragment exchanges ({rounds['alone']} alone, {rounds['aborted']} aborted)"
    ways = ", ".join(
        f"{way} {size(hops[f'{way}_bytes_per_s'])}/s, {MILLISECONDS.words(hops[f'{way}_round_trip_s'])} ms"
        for way in ("forward", "back")
        if hops[f"{way}_bytes_per_s"] is not None
    )
    digests = "equal" if stage["digests_equal"] else "differ" if stage["finished"] else "unknown"
    held = f"{stage['finished']} of {stage['peers']} peers finished, digests {digests}, {made}"
    microbatches = figure(done["counted"] + done["dropped"])
    work = (
        f"{figure(stage['tokens_per_s'])} tokens/s, waiting {percent(done['waiting_share'])}, "
        f"{figure(done['dropped'])} of {microbatches} microbatches dropped"
    )
    return "\n".join(filter(None, (held, work, ways)))


def _data_parallel(sent: dict[str, Any]) -> str:
    step = sent["fp32_data_parallel_per_parameter_per_step"]
    steps = sent["inner_steps_per_sweep"]
    if step is None or steps is None:
        return UNKNOWN
    times = figure(sent["times_less_than_data_parallel"])
    bytes_ = f"{figure(step * steps, 1)} bytes per parameter in the same {figure(steps, 1)} steps"
    return f"{bytes_} ({times} times as much)"
