"""Charts as ECharts options: plain data made from facts and history, for the board and for ``report.html``.

Laws: what a peer said is only ever a value in here, never a key (NiceGUI runs keys that begin with a colon),
and tooltips are drawn, not HTML, so no text becomes markup or program. Colours are Okabe and Ito's (2008) and
cividis, told apart by colour-blind readers; outcomes are also told by a letter. Sizes are bounded whatever
the swarm's.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from monitoring.facts import PeerFacts, RoundFacts
from monitoring.history import MEASURES
from monitoring.words import clock, figure, plain, size

Options = dict[str, Any]
Series = Sequence[tuple[float, ...]]

BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILLION = (
    "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00",
)  # fmt: skip
COLOURS = (BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILLION)
CIVIDIS = ("#00224e", "#35456c", "#666970", "#948e77", "#c8b866", "#fee838")
OUTCOMES = {
    "committed": (BLUE, "", "committed"),
    "partial": (SKY, "p", "committed without some (p)"),
    "late": (ORANGE, "L", "late (L)"),
    "alone": (PURPLE, "", "by one peer, alone (1)"),
    "aborted": (VERMILLION, "A", "aborted (A)"),
    "open": ("#9aa0a6", "o", "open (o)"),
}
"""Colour, letter, words; "partial": committed without some, "late": applied after its own round."""
TRAFFIC = {"sent": ("up_bytes_per_s", ORANGE, 1e-3), "received": ("down_bytes_per_s", SKY, 1e-3)}
"""Lines of ``over_time``: kB/s."""
MAX_NAMED = 6
MAX_BAR_PEERS = MAX_MATRIX_PEERS = 24
MAX_AGE_PEERS = 48
MAX_MEMBERS = 64
MAX_ROUND_COLUMNS = 60
_MOST_BARS = 24
GAP_S = 180.0
"""Without a sample for so long, and for longer than usual, a line is broken."""


@dataclass(frozen=True)
class Palette:
    """Colours that depend on light and dark."""

    ink: str
    soft: str
    line: str
    panel: str


LIGHT = Palette(ink="#1c2430", soft="#5b6573", line="#e3e7ec", panel="#ffffff")
DARK = Palette(ink="#e6e9ee", soft="#9aa4b2", line="#2c333d", panel="#1a1f27")


# ---- over time


def column(name: str) -> int:
    """Where a measure stands in a row of ``History.series``."""
    return MEASURES.index(name) + 1


def loss(palette: Palette, rows: Series, agreed: Series, *, over_tokens: bool) -> Options:
    """Held-out loss of the agreed parameters ((at, tokens, loss)) and mean training loss, over time or over
    the swarm's tokens."""
    options = _base(palette)
    if over_tokens:
        options["xAxis"] = _axis(palette, "value", "tokens, all peers", scale=True)
        options["grid"]["right"] = 36  # half of the last number stands beyond the axis
        training = [[row[column("tokens")], _known(row[column("loss")])] for row in rows]
        held_out = [[row[1], _known(row[2])] for row in agreed]
    else:
        options["xAxis"] = _axis(palette, "time")
        training = _points(rows, column("loss"))
        held_out = [[row[0] * 1000, _known(row[2])] for row in agreed]
    options["yAxis"] = _value_axis(palette, scale=True)
    thin = {"width": 1.5, "color": ORANGE, "opacity": 0.8}
    options["series"] = [
        _line("agreed parameters, held-out", held_out, BLUE, showSymbol=True, symbolSize=7),
        _line("training, mean of the peers", training, ORANGE, lineStyle=thin),
    ]
    return options


def over_time(
    palette: Palette, rows: Series, lines: Mapping[str, tuple[str, str, float]], *, share: bool = False
) -> Options:
    """Some measures over time; ``lines``: (measure, colour, factor) by name. ``share``: from 0 to 100."""
    options = _base(palette, legend=len(lines) > 1)
    if len(lines) == 1:
        options["grid"]["top"] = 28
    options["xAxis"] = _axis(palette, "time")
    options["yAxis"] = _value_axis(palette, min=0, **({"max": 100, "interval": 25} if share else {}))
    options["series"] = [
        _line(name, _points(rows, column(measure), scale), colour)
        for name, (measure, colour, scale) in lines.items()
    ]
    return options


def peer_traffic(palette: Palette, rows: Series, peer: PeerFacts) -> Options:
    """Up and down of one peer over time, against its cap and what the rounds need, kB/s."""
    options = over_time(palette, rows, TRAFFIC)
    for value, name, colour in (
        (peer.upload_cap_bytes_per_s, "upload cap", VERMILLION),
        (peer.needed_bytes_per_s, "floor of the rounds", GREEN),
    ):
        style = {"type": "dashed", "color": colour, "width": 1.5}
        if value and math.isfinite(value):
            level = {"silent": True, "symbol": "none", "label": {"show": False}, "lineStyle": style,
                     "data": [{"yAxis": _known(value / 1000)}]}  # fmt: skip
            options["series"].append(_line(name, [], colour, lineStyle=style, markLine=level))
    options["yAxis"]["name"] = "kB/s"
    options["grid"]["top"] = 54  # the unit stands between legend and axis
    return options


def fragment_lines(palette: Palette, rows: Mapping[int, Series], place: int) -> Options:
    """A measure of fragments over time; ``place``: its column, 1 for the first."""
    options = _base(palette, legend=len(rows) <= MAX_NAMED)
    options["xAxis"] = _axis(palette, "time")
    options["yAxis"] = _value_axis(palette, scale=True)
    options["series"] = [
        _line(f"fragment {fragment}", _points(series, place), COLOURS[number % len(COLOURS)])
        for number, (fragment, series) in enumerate(sorted(rows.items()))
    ]
    return options


# ---- bars


def staleness(palette: Palette, by_fragment: Mapping[int, Mapping[int, int]]) -> Options:
    """Applied outer steps by staleness, stacked by fragment."""
    values = sorted({value for histogram in by_fragment.values() for value in histogram})
    width = max(1, -(-(values[-1] + 1) // _MOST_BARS)) if values else 1
    classes = list(range(0, max([*values, 3]) + 1, width))
    names = [str(low) if width == 1 else f"{low} to {low + width - 1}" for low in classes]
    options = _base(palette, legend=len(by_fragment) <= MAX_NAMED)
    options["tooltip"]["axisPointer"] = {"type": "shadow"}
    options["xAxis"] = _axis(palette, "category", "staleness (outer steps)", data=names)
    options["yAxis"] = _value_axis(palette)
    options["grid"]["bottom"] = 28
    options["series"] = [
        _bar(f"fragment {fragment}", COLOURS[number % len(COLOURS)], [
            sum(times for value, times in histogram.items() if low <= value < low + width) for low in classes
        ])
        for number, (fragment, histogram) in enumerate(sorted(by_fragment.items()))
    ]  # fmt: skip
    return options


def hidden_and_exposed(palette: Palette, peers: Sequence[PeerFacts]) -> Options:
    """Seconds of communication by peer: behind training, and in its way; those that wait longest first."""
    chosen = sorted(peers, key=lambda peer: -peer.exposed_s)[:MAX_BAR_PEERS]
    chosen.sort(key=lambda peer: peer.label)
    options = _sideways(palette, "seconds", [peer.label for peer in chosen])
    options["series"] = [
        _bar(name, colour, [round(getattr(peer, f"{name}_s"), 2) for peer in chosen])
        for name, colour in (("hidden", SKY), ("exposed", VERMILLION))
    ]
    return options


_PHASES = (("READY", "begin_s", "#9aa0a6"), ("PARTS", "parts_s", SKY), ("MEAN", "mean_s", BLUE),
           ("COMMIT", "commit_s", GREEN))  # fmt: skip
"""Short names: a phone's legend has room for these four. The card's hint says what they are."""


def round_time_line(
    palette: Palette, members: Mapping[str, Mapping[str, float]], labels: Mapping[str, str]
) -> Options:
    """READY, BEGIN, PARTS, MEAN, COMMIT of every member as bars; seconds since the first READY."""
    order = sorted(members, key=lambda peer: labels.get(peer, peer))[:MAX_MEMBERS]
    first = min((members[peer]["ready_at"] for peer in order), default=0.0)
    names = [labels.get(peer, f"~{peer[-6:]}") for peer in order]
    options = _sideways(palette, "seconds since the first READY", names)
    waits = [round(members[peer]["ready_at"] - first, 4) for peer in order]
    unseen = {**_bar("", "transparent", waits), "silent": True, "tooltip": {"show": False}}
    options["series"], reached = [unseen], dict.fromkeys(order, 0.0)
    for name, key, colour in _PHASES:
        data = []
        for peer in order:
            data.append(round(max(0.0, members[peer][key] - reached[peer]), 4))
            reached[peer] = max(reached[peer], members[peer][key])
        options["series"].append(_bar(name, colour, data))
    return options


# ---- heat maps


def rounds(palette: Palette, found: Sequence[RoundFacts], fragments: int) -> Options:
    """Fragments by rounds: outcome as colour and letter, group size inside, reason on hover."""
    numbers = round_columns(found)
    at = {number: index for index, number in enumerate(numbers)}
    kinds = list(OUTCOMES)
    colours = [{"value": index, "color": OUTCOMES[kind][0]} for index, kind in enumerate(kinds)]
    cells = [
        {
            "value": [at[facts.round], facts.fragment, kinds.index(facts.outcome),
                      f"{facts.group_size or ''}{OUTCOMES[facts.outcome][1]}"],
            "name": _round_words(facts),
            "label": {"color": "#ffffff" if facts.outcome == "committed" else "#101418"},
        }
        for facts in found
        if facts.round in at and facts.fragment < fragments
    ]  # fmt: skip
    options = _heat(palette, cells, "{@[3]}", len(numbers) <= 40)
    options["xAxis"] = _axis(palette, "category", "round (outer version)", data=[str(n) for n in numbers])
    names = [f"fragment {fragment}" for fragment in range(fragments)]
    options["yAxis"] = _axis(palette, "category", data=names, inverse=True, splitArea={"show": False})
    options["visualMap"] = {"type": "piecewise", "dimension": 2, "show": False, "pieces": colours}
    return options


def round_columns(found: Iterable[RoundFacts]) -> list[int]:
    """The rounds that ``rounds`` shows, by column."""
    return sorted({facts.round for facts in found})[-MAX_ROUND_COLUMNS:]


def _round_words(facts: RoundFacts) -> str:
    lines = [
        f"fragment {facts.fragment}, round {facts.round}: {facts.outcome}",
        f"{facts.contributors} of {facts.group_size} in the mean, {figure(facts.duration_s, 2)} s",
    ]
    lines += [f"staleness at most {facts.staleness}"] if facts.staleness >= 0 else []
    return "\n".join(lines + ([_named(facts.reason, 160)] if facts.reason else []))


def ages(palette: Palette, peers: Sequence[PeerFacts], fragments: int) -> Options:
    """Seconds since agreed parameters last reached each fragment on each peer; the oldest peers first."""
    chosen = sorted(peers, key=lambda peer: -max((age or 0.0 for age in peer.fragment_age_s), default=0.0))
    chosen = sorted(chosen[:MAX_AGE_PEERS], key=lambda peer: peer.label)
    cells: list[Options] = [
        {"value": [fragment, row, round(age, 1)],
         "name": f"{_named(peer.label)}, fragment {fragment}: {clock(age)} old"}
        for row, peer in enumerate(chosen)
        for fragment, age in enumerate(peer.fragment_age_s)
        if age is not None
    ]  # fmt: skip
    options = _heat(palette, cells, "{@[2]}", fragments * len(chosen) <= 160)
    options["xAxis"] = _axis(palette, "category", "fragment", data=[str(f) for f in range(fragments)])
    options["yAxis"] = _axis(
        palette, "category", data=[_named(one.label, 16) for one in chosen], inverse=True
    )
    options["grid"]["right"] = 78
    options["visualMap"] = _scale(palette, cells, "s")
    return options


def link_matrix(palette: Palette, peers: Sequence[PeerFacts]) -> Options:
    """Sender by receiver: Mbit/s as colour and number (an R where it is relayed), below it the round trip in
    milliseconds; in words on hover."""
    chosen = list(peers)[:MAX_MATRIX_PEERS]
    at = {peer.peer: index for index, peer in enumerate(chosen)}
    cells: list[Options] = []
    for row, peer in enumerate(chosen):
        for link in peer.links:
            if link.other not in at:
                continue
            rate = link.bytes_per_s * 8 / 1e6 if link.bytes_per_s else None
            trip = _short(link.round_trip_s, 1000)
            words = (
                f"{_named(peer.label)} to {_named(chosen[at[link.other]].label)}\n"
                f"{figure(rate, 1)} Mbit/s, round trip {trip} ms\n{_named(link.carrier)}, "
                f"{'relayed' if link.relayed else 'direct'}, {size(link.sent_bytes)} sent"
            )
            text = f"{_short(rate)}{' R' if link.relayed else ''}\n{trip}"
            cells.append({"value": [at[link.other], row, rate or 0.0, text], "name": words})
    names = [_named(peer.label, 14) for peer in chosen]
    options = _heat(palette, cells, "{@[3]}", len(chosen) <= 10)
    options["xAxis"] = _axis(palette, "category", "to", data=names, position="top")
    options["yAxis"] = _axis(palette, "category", data=names, inverse=True)
    options["grid"] = {"left": 8, "right": 8, "top": 48, "bottom": 40, "containLabel": True}
    # Below, not beside: a phone needs all of its width for the cells.
    below = {"orient": "horizontal", "left": "center", "right": None, "top": None, "bottom": 0}
    options["visualMap"] = {**_scale(palette, cells, "Mbit/s"), **below}
    return options


def _scale(palette: Palette, cells: Sequence[Options], unit: str) -> Options:
    """The scale of colours for the cells' values; each cell's text is set to what can be read on its own."""
    high = max(1.0, max((float(cell["value"][2]) for cell in cells), default=1.0))
    for cell in cells:
        cell["label"] = {"color": "#101418" if cell["value"][2] / high > 0.5 else "#ffffff"}
    return {
        "type": "continuous", "min": 0.0, "max": high, "calculable": False, "dimension": 2, "right": 0,
        "top": "middle", "itemHeight": 110, "itemWidth": 12, "text": [f"{high:.3g} {unit}", f"0 {unit}"],
        "textStyle": {"color": palette.soft}, "inRange": {"color": list(CIVIDIS)},
    }  # fmt: skip


def _heat(palette: Palette, cells: Sequence[Options], text: str, labelled: bool) -> Options:
    """A heat map without its axes; where cells are too narrow for their labels, some go."""
    options = _base(palette, legend=False)
    options["tooltip"] = {**options["tooltip"], "trigger": "item", "formatter": "{b}"}
    options["grid"]["bottom"] = 28
    options["series"] = [{
        "type": "heatmap", "data": list(cells), "labelLayout": {"hideOverlap": True},
        "label": {"show": labelled, "fontSize": 11, "lineHeight": 14, "formatter": text},
        "itemStyle": {"borderColor": palette.panel, "borderWidth": 2, "borderRadius": 3},
    }]  # fmt: skip
    return options


# ---- what all are made of


def _named(text: str, limit: int = 24) -> str:
    """A peer's text as a chart takes it: one line, no braces (ECharts reads them as styles)."""
    return plain(text, limit).replace("{", "(").replace("}", ")")


def _short(value: float | None, times: float = 1.0) -> str:
    """At most three digits and no unit: cells are narrow on a phone."""
    return "-" if value is None else f"{value * times:.3g}"


def _base(palette: Palette, *, legend: bool = True) -> Options:
    return {
        "animation": False,
        "textStyle": {"color": palette.ink, "fontFamily": "inherit"},
        "grid": {"left": 8, "right": 16, "top": 40 if legend else 16, "bottom": 8, "containLabel": True},
        "legend": {"show": legend, "top": 0, "left": 0, "type": "scroll", "icon": "roundRect",
                   "itemWidth": 12, "itemHeight": 8, "textStyle": {"color": palette.soft}},
        "tooltip": {"renderMode": "richText", "trigger": "axis", "confine": True,
                    "backgroundColor": palette.panel, "borderColor": palette.line,
                    "textStyle": {"color": palette.ink, "fontSize": 12}},
    }  # fmt: skip


def _sideways(palette: Palette, unit: str, labels: Sequence[str]) -> Options:
    """Bars of ``unit`` to the right, a row for each label."""
    options = _base(palette)
    options["tooltip"]["axisPointer"] = {"type": "shadow"}
    options["xAxis"] = _axis(palette, "value", unit)
    options["yAxis"] = _axis(palette, "category", data=[_named(one, 16) for one in labels], inverse=True)
    options["grid"]["bottom"] = 28
    return options


def _axis(palette: Palette, kind: str, name: str = "", **more: Any) -> Options:  # ECharts' own axis options
    ends = {"showMaxLabel": False} if kind == "time" else {}  # a time at the very end would be cut off
    return {
        "type": kind, "name": name, "nameLocation": "middle", "nameGap": 30,
        "nameTextStyle": {"color": palette.soft},
        "axisLabel": {"color": palette.soft, "hideOverlap": True, **ends},
        "axisLine": {"lineStyle": {"color": palette.line}},
        "splitLine": {"show": kind == "value", "lineStyle": {"color": palette.line}}, **more,
    }  # fmt: skip


def _value_axis(palette: Palette, **more: Any) -> Options:  # ECharts' own axis options
    """An upright axis. Its unit stands in the card's title, or set as ``name`` above the axis."""
    style = {"color": palette.soft, "align": "left"}
    own = {"nameLocation": "end", "nameGap": 10, "nameTextStyle": style, "splitNumber": 4}
    return {**_axis(palette, "value"), **own, **more}


def _points(rows: Series, column: int, scale: float = 1.0) -> list[list[float | None]]:
    """(milliseconds, value); where nothing was sampled for long the line is broken."""
    apart = sorted(after[0] - before[0] for before, after in itertools.pairwise(rows))
    most_s = max(6 * apart[len(apart) // 2], GAP_S) if apart else math.inf
    made: list[list[float | None]] = []
    for number, row in enumerate(rows):
        if number and row[0] - rows[number - 1][0] > most_s:
            made.append([rows[number - 1][0] * 1000 + 1, None])
        made.append([row[0] * 1000, _known(row[column] * scale)])
    return made


def _known(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _line(name: str, data: Sequence[Any], colour: str, **more: Any) -> Options:  # ECharts' own series options
    return {
        "type": "line", "name": name, "data": data, "showSymbol": False, "connectNulls": False,
        "lineStyle": {"width": 2, "color": colour}, "itemStyle": {"color": colour}, **more,
    }  # fmt: skip


def _bar(name: str, colour: str, data: Sequence[float]) -> Options:
    return {
        "type": "bar", "stack": "all", "name": name, "barMaxWidth": 32, "itemStyle": {"color": colour},
        "data": data,
    }  # fmt: skip
