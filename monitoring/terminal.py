"""The swarm in a terminal: live while it runs, readable when it ended.

Law: shows only what the view holds; missing data is a dash, never a crash; a name or reason is text, never
markup. Without a terminal (a log file, a pipe) one plain line about every ten seconds takes the table's
place. Price: one redraw costs some milliseconds of CPU, so call ``show`` once or twice a second, not per
event.
"""

from __future__ import annotations

import time
import types
from typing import Any, Self

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from monitoring.standing import in_the_run
from monitoring.words import UNKNOWN, clock, figure, news, percent, plain, size
from p2p_co2.telemetry.peer_view import PeerView
from p2p_co2.telemetry.view import SwarmView, mean_of

SILENT_AFTER_S = 10.0
"""A peer whose journal said nothing for this long is shown as silent."""
GONE_AFTER_S = 3.0
"""The same, if another peer has reported it gone: shown as gone."""
NEWS_LINES = 6
MOST_OTHERS = 8
_BAR_CELLS = 40
_PHASE_STYLES = {"training": "green", "finished": "cyan", "silent": "red", "gone": "red"}


class LiveTerminal:
    """A live table of the swarm; a context manager.

    ``expected_s``: how long the run is to train, None if it has no end. ``plain_every_s``: seconds between
    the lines that replace the table when ``console`` is no terminal. ``own``: the view has one peer's events
    alone, and the others are a line. It starts no thread: it draws when ``show`` is called.
    """

    def __init__(
        self,
        title: str,
        expected_s: float | None,
        *,
        console: Console | None = None,
        plain_every_s: float = 10.0,
        own: bool = False,
    ) -> None:
        self._own = own
        self._title, self._expected_s, self._plain_every_s = title, expected_s, plain_every_s
        self._console = console or Console()
        self.started_at = time.time()
        self._trains_since: float | None = None
        self._next_line_at = self.started_at
        self._live = Live(console=self._console, auto_refresh=False) if self._console.is_terminal else None

    def __enter__(self) -> Self:
        self.started_at = self._next_line_at = time.time()
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def show(self, view: SwarmView, now: float | None = None) -> None:
        """Draw ``view`` as it is at ``now`` (unix seconds; None for this moment)."""
        now = time.time() if now is None else now
        elapsed_s = max(0.0, now - self.started_at)
        if self._trains_since is None and any(peer.totals.inner_steps for peer in view.started_peers):
            self._trains_since = now
        trained_s = None if self._trains_since is None else max(0.0, now - self._trains_since)
        if self._live:
            rows = max(3, self._console.height - NEWS_LINES - 9)
            frame = swarm_frame(
                view,
                self._title,
                now,
                elapsed_s=elapsed_s,
                trained_s=trained_s,
                expected_s=self._expected_s,
                width=self._console.width,
                most_rows=rows,
                own=self._own,
            )
            self._live.update(frame, refresh=True)
        elif now >= self._next_line_at:
            self._next_line_at = now + self._plain_every_s
            line = plain_line(view, elapsed_s, trained_s, self._expected_s)
            self._console.print(line, markup=False, highlight=False)


def swarm_frame(
    view: SwarmView,
    title: str,
    now: float,
    *,
    elapsed_s: float,
    trained_s: float | None,
    expected_s: float | None,
    width: int = 120,
    most_rows: int = 24,
    own: bool = False,
) -> RenderableType:
    """One frame: table of peers (at most ``most_rows`` of them, fewer columns where ``width`` is small),
    rounds, news, progress. ``now`` in unix seconds; ``trained_s``: since the first inner step, None before
    it; ``expected_s`` and ``own`` as in ``LiveTerminal``."""
    return Group(
        _peer_table(view, title, now, width, most_rows, own),
        *([_others_line(view)] if own else []),
        _rounds_line(view),
        _news_lines(view),
        _progress_line(elapsed_s, trained_s, expected_s),
    )


def plain_line(view: SwarmView, elapsed_s: float, trained_s: float | None, expected_s: float | None) -> str:
    """The state of the swarm in one line of plain text; times as for ``swarm_frame``."""
    peers = view.started_peers
    losses = [peer.loss for peer in in_the_run(peers) if peer.loss is not None]
    loss = sum(losses) / len(losses) if losses else None
    if expected_s is None:
        of = ""
    else:
        of = f", trained {clock(min(trained_s or 0.0, expected_s))} of {clock(expected_s)}"
    aborted = view.abort_reasons.total()
    return (
        f"[{clock(elapsed_s)}{of}] {len(peers)} peers, "
        f"{figure(sum(peer.totals.inner_steps for peer in peers))} inner steps, "
        f"loss {figure(loss, 3)}, {figure(sum(peer.tokens_per_s for peer in peers))} tokens/s, "
        f"rounds {view.committed} committed {f'{view.alone} alone ' if view.alone else ''}{aborted} aborted, "
        f"staleness {figure(mean_of(view.staleness), 2)}, "
        f"up {size(sum(peer.totals.up_bytes for peer in peers))}"
    )


def _others_line(view: SwarmView) -> Text:
    """Whom the one peer of ``view`` reaches, and by what."""
    labels = view.labels()
    reached = [
        f"{plain(labels.get(other, other), 18)} ({carrier})"
        for peer in view.started_peers
        for other, carrier in sorted(peer.carriers.items())
        if other not in peer.lost_links
    ]
    shown = ", ".join(reached[:MOST_OTHERS]) + (", ..." if len(reached) > MOST_OTHERS else "")
    return Text(
        f"peers reached: {len(reached)}{'; ' if reached else ''}{shown}", no_wrap=True, overflow="ellipsis"
    )


def _peer_table(
    view: SwarmView, title: str, now: float, width: int, most_rows: int, own: bool = False
) -> Table:
    labels = view.labels()
    known = view.started_peers if own else view.peers.values()
    peers = sorted(known, key=lambda peer: (not peer.started, labels[peer.peer]))
    rows = [_peer_row(peer, labels[peer.peer], now) for peer in peers[:most_rows]]
    if not peers:
        rows.append([Text("starting" if own else "waiting for the first peer", style="dim")])
    if len(peers) > most_rows:
        rows.append([Text(f"and {len(peers) - most_rows} more", style="dim")])
    headings = [
        "peer", "phase", "inner\nsteps", "train\nloss", "tokens\nper s", "at\nround", "stale-\nness",
        "delay\nsteps", "sent", "received", "exposed\ns", "links",
    ]  # fmt: skip
    return _table(title, headings, rows, width, drop_first=(11, 10, 7, 9, 4))


def _table(
    title: str, headings: list[str], rows: list[list[Text]], width: int, drop_first: tuple[int, ...]
) -> Table:
    """A table not wider than ``width``: columns go in the order of ``drop_first`` until the rest fits
    unshortened. The first two columns are text, numbers follow."""
    widths = [max(len(line) for line in heading.split("\n")) for heading in headings]
    for row in rows:
        widths = [max(known, cell.cell_len) for known, cell in zip(widths, row, strict=False)] + widths[
            len(row) :
        ]
    kept = list(range(len(headings)))
    for column in drop_first:
        # One cell of padding and one of the frame's between columns.
        if sum(widths[i] + 2 for i in kept) - 2 > width:
            kept.remove(column)
    table = Table(
        title=Text(plain(title, 80), style="bold") if title else None,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        header_style="bold",
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    for i in kept:
        table.add_column(headings[i], justify="left" if i < 2 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(row[i] for i in kept if i < len(row)))
    return table


def _peer_row(peer: PeerView, label: str, now: float) -> list[Text]:
    phase, style = _phase(peer, now)
    cells = [Text(plain(label, 18), style="bold"), Text(plain(phase, 18), style=style)]
    if not peer.started:
        return cells
    totals = peer.totals
    is_here = not peer.finished and phase != "gone"
    for cell in (
        figure(totals.inner_steps),
        figure(peer.loss, 3),
        figure(peer.tokens_per_s),
        figure(peer.position, 1),
        figure(peer.last_staleness),
        figure(peer.last_sync_delay_steps),
        size(totals.up_bytes),
        size(totals.down_bytes),
        figure(totals.exposed_s, 1),
        _links(peer) if is_here else UNKNOWN,
    ):
        cells.append(Text(cell))
    return cells


def _phase(peer: PeerView, now: float) -> tuple[str, str]:
    if peer.last_seen_at is None:
        return ("gone", _PHASE_STYLES["gone"]) if peer.seen_left else ("not seen yet", "dim")
    silent_s = now - peer.last_seen_at
    # Others may have lost their links to a peer that trains on: only together with its silence is it gone.
    if not peer.finished and peer.seen_left and silent_s > GONE_AFTER_S:
        return "gone", _PHASE_STYLES["gone"]
    if not peer.finished and silent_s > SILENT_AFTER_S:
        return f"silent {clock(silent_s)}", _PHASE_STYLES["silent"]
    return peer.phase, _PHASE_STYLES.get(peer.phase, "yellow")


def _links(peer: PeerView) -> str:
    open_links = [carrier for other, carrier in peer.carriers.items() if other not in peer.lost_links]
    if not open_links:
        return UNKNOWN
    return plain(
        ", ".join(f"{open_links.count(carrier)} {carrier}" for carrier in sorted(set(open_links))), 20
    )


def _rounds_line(view: SwarmView) -> Text:
    reasons = view.abort_reasons
    line = Text("rounds: ")
    line.append(str(view.committed), style="bold green")
    line.append(" committed, ")
    if view.alone:
        line.append(str(view.alone), style="bold yellow")
        line.append(" alone, ")
    line.append(str(reasons.total()), style="bold red" if reasons else "bold")
    line.append(" aborted")
    if reasons:
        most = ", ".join(f"{plain(reason, 40)} ({times})" for reason, times in reasons.most_common(3))
        line.append(f": {most}")
    staleness = f"mean {figure(mean_of(view.staleness), 2)}, max {figure(max(view.staleness, default=None))}"
    line.append(
        f"\nstaleness: {staleness}; delay: mean {figure(mean_of(view.sync_delay_steps), 1)} inner steps"
    )
    return line


def _news_lines(view: SwarmView) -> Group:
    lines = news(view, NEWS_LINES)
    started_at = view.started_at or 0.0
    rows = [
        Text(f"  {clock(at - started_at)}  {words}", style="dim", no_wrap=True, overflow="ellipsis")
        for at, words in lines
    ]
    return Group(*rows)


def _progress_line(elapsed_s: float, trained_s: float | None, expected_s: float | None) -> RenderableType:
    if not expected_s:
        return Text(f"{clock(elapsed_s)} elapsed")
    line = Table.grid(padding=(0, 1))
    done_s = min(trained_s or 0.0, expected_s)
    words = f"about {clock(expected_s - done_s)} to go" if done_s < expected_s else "finishing"
    line.add_row(
        Text(f"{clock(elapsed_s)} elapsed"),
        ProgressBar(total=expected_s, completed=done_s, width=_BAR_CELLS, finished_style="green"),
        Text("starting" if trained_s is None else words),
    )
    return line


def print_summary(summary: dict[str, Any], console: Console) -> None:
    """The summary of ``monitoring.summary.summarise`` for a reader."""
    console.print(_summary_table(summary))
    console.print(_per_peer_table(summary, console.width))
    console.print()
    console.print(_bars("staleness (outer steps)", summary["staleness"]))
    console.print(_bars("delay from send to apply (inner steps)", summary["sync_delay_steps"]))
    if summary["text"]:
        console.print(Text("text generated by the trained model", style="bold"))
        text = "".join(char if char.isprintable() or char in "\n\t" else "?" for char in summary["text"])
        console.print(Text(text.rstrip(), style="dim"))


def _summary_table(summary: dict[str, Any]) -> Table:
    loss, rounds, sent = summary["loss"], summary["rounds"], summary["bytes"]
    table = Table(
        title=Text(f"run {plain(summary['run'], 64)}", style="bold"), title_justify="left", show_header=False
    )
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    reasons = ", ".join(f"{plain(reason, 60)}: {times}" for reason, times in rounds["abort_reasons"].items())
    ended = sum(peer["finished"] for peer in summary["peer_table"].values())
    equal = Text(
        "yes" if summary["digests_equal"] else "no", style="green" if summary["digests_equal"] else "bold red"
    )
    equal.append(
        f", {ended} of {max(summary['peers'], summary['expected_peers'])} peers finished", style="default"
    )
    carriers = ", ".join(f"{times} {plain(carrier, 20)}" for carrier, times in summary["carriers"].items())
    for name, value in (
        (
            "held-out loss, agreed parameters",
            f"{figure(loss['start'], 4)} to {figure(loss['end'], 4)} {loss['unit']}".strip(),
        ),
        ("same digest of the agreed state", equal),
        ("peers, parameters", f"{summary['peers']} peers, {figure(summary['parameters'])} parameters"),
        ("trained", f"{figure(summary['tokens'])} tokens in {clock(summary['wall_s'])}"),
        ("rounds committed", f"{rounds['committed']} ({rounds['partial']} partial)"),
        ("rounds aborted", f"{rounds['aborted']}{' (' + reasons + ')' if reasons else ''}"),
        ("compute utilisation, mean", percent(summary["utilisation"]["mean"])),
        ("exposed, worst peer", f"{figure(summary['exposed_s']['max'], 2)} s"),
        ("sent per parameter and round", f"{figure(sent['per_parameter_per_round'], 3)} bytes"),
        ("fp32 data-parallel would send", _data_parallel(sent)),
        ("codec, apply rule, links", f"{summary['codec']}, {summary['apply_rule']}, {carriers or UNKNOWN}"),
    ):
        table.add_row(name, value if isinstance(value, Text) else Text(value))
    return table


def _data_parallel(sent: dict[str, Any]) -> str:
    step, steps = sent["fp32_data_parallel_per_parameter_per_step"], sent["inner_steps_per_sweep"]
    if step is None or steps is None:
        return UNKNOWN
    times = sent["times_less_than_data_parallel"]
    return (
        f"{figure(step * steps, 1)} bytes per parameter in the same {figure(steps, 1)} steps"
        f" ({figure(times)} times as much)"
    )


def _per_peer_table(summary: dict[str, Any], width: int) -> Table:
    rows: list[list[Text]] = []
    for name, peer in summary["peer_table"].items():
        ended = (
            peer["left_reason"]
            if peer["finished"]
            else f"not finished: {peer['left_reason'] or peer['phase']}"
        )
        rows.append(
            [
                Text(plain(name, 18), style="bold"),
                Text(plain(ended or UNKNOWN, 32), style="" if peer["finished"] else "red"),
                *(
                    Text(cell)
                    for cell in (
                        figure(peer["inner_steps"]),
                        figure(peer["tokens_per_s"]),
                        figure(peer["loss"], 3),
                        size(peer["up_bytes"]),
                        size(peer["down_bytes"]),
                        percent(peer["utilisation"]),
                        figure(peer["exposed_s"], 2),
                        size(peer["peak_memory_bytes"] or None),
                        plain(peer["digest"], 200)[:8] or UNKNOWN,
                    )
                ),
            ]
        )
    headings = [
        "peer", "ended", "inner\nsteps", "tokens\nper s", "train\nloss", "sent", "received", "compute\nused",
        "exposed\ns", "peak\nmemory", "digest",
    ]  # fmt: skip
    return _table("", headings, rows, width, drop_first=(6, 4, 9, 3, 2))


def _bars(title: str, distribution: dict[str, Any], most_bars: int = 12) -> Group:
    """A histogram as bars; more than ``most_bars`` values are put in equal classes."""
    counts = {int(value): times for value, times in distribution["histogram"].items()}
    mean = f"mean {figure(distribution['mean'], 2)}, max {figure(distribution['max'])}"
    rows: list[Text] = [Text.assemble((title, "bold"), f"   {mean if counts else 'none applied'}")]
    if counts:
        low = min(counts)
        width = -(-(max(counts) - low + 1) // most_bars)
        classes: dict[int, int] = {}
        for value, times in counts.items():
            first = low + (value - low) // width * width
            classes[first] = classes.get(first, 0) + times
        most = max(classes.values())
        for first in sorted(classes):
            name = str(first) if width == 1 else f"{first} to {first + width - 1}"
            bar = "█" * max(1, round(_BAR_CELLS * classes[first] / most))
            rows.append(Text.assemble(f"{name:>12} ", (bar, "blue"), f" {classes[first]}"))
    return Group(*rows)
