"""Charts as ECharts options: plain data made from facts and history, for the board and for ``report.html``.

Laws: what a peer said is only ever a value in here, never a key, since NiceGUI runs keys that begin with a
colon. Tooltips are drawn, not HTML, so no text becomes markup or program. Sizes are bounded whatever the
swarm's. Every chart says in a sentence what it shows (``aria``), for a reader who cannot see it. Colours are
Okabe and Ito's (2008), told apart by colour-blind readers; outcomes are also told by a letter.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from monitoring.columns import FAST_RATE
from monitoring.facts import RECENT_S, PeerFacts, RoundFacts
from monitoring.history import MEASURES, Happening
from monitoring.words import figure, plain
from p2p_co2.telemetry.view import SwarmView

Options = dict[str, Any]
Series = Sequence[tuple[float, ...]]

BLUE = "#0072B2"
ORANGE = "#E69F00"
GREEN = "#009E73"
PURPLE = "#CC79A7"
SKY = "#56B4E9"
VERMILLION = "#D55E00"
COLOURS = (BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILLION)
OUTCOMES = {
    "committed": (BLUE, "", "committed"),
    "partial": (SKY, "p", "committed without some (p)"),
    "late": (ORANGE, "L", "late (L)"),
    "alone": (PURPLE, "", "by one peer, alone (1)"),
    "aborted": (VERMILLION, "A", "aborted (A)"),
    "open": ("#9aa0a6", "o", "open (o)"),
}
"""Colour, letter, words; "partial": committed without some, "late": applied after its own round."""
TRENDS: dict[str, tuple[str, str, dict[str, tuple[str, str, float]]]] = {
    "tokens": ("Tokens per second", "own word", {"tokens/s": ("tokens_per_s", GREEN, 1.0)}),
    "utilisation": ("Compute utilisation", "%", {"utilisation": ("utilisation", BLUE, 100.0)}),
    "traffic": ("Traffic", "kB/s", {
        "sent": ("up_bytes_per_s", ORANGE, 1e-3), "received": ("down_bytes_per_s", SKY, 1e-3),
    }),
}  # fmt: skip
"""What is drawn over time of the swarm and of each peer: title, unit, and the lines for ``over_time``."""
MAX_NAMED = 6
MAX_LOW_ROWS = 10
"""Fragments that a chart of rounds of usual height has room for."""
MAX_ROUND_COLUMNS = 60


MARKED = {
    "peer_started": (GREEN, "started"), "peer_left": (VERMILLION, "left"), "peer_finished": (SKY, "finished"),
    "paused": (PURPLE, "paused"), "resumed": (PURPLE, "went on"),
}  # fmt: skip
"""Kinds of events that are drawn as lines across the charts over time: colour, and a word for several."""
MAX_MARKS = 64
MARKS_APART = 1 / 24
"""Of a chart's span: what lies nearer to each other is one mark."""


class ChartLook(NamedTuple):
    """How a user wants to see a chart. ``smooth``: weight of what was before, 0 (as measured) to 1."""

    smooth: float = 0.0
    log: bool = False


AS_MEASURED = ChartLook()


@dataclass(frozen=True)
class Palette:
    """Colours that depend on light and dark."""

    ink: str
    soft: str
    line: str
    panel: str


LIGHT = Palette(ink="#1c2430", soft="#5b6573", line="#e3e7ec", panel="#ffffff")
DARK = Palette(ink="#e6e9ee", soft="#9aa4b2", line="#2c333d", panel="#1a1f27")
HEAT = ["#d5e8f5", "#2177ad", "#00344f"]
"""Of a heat map, from little to much, in dark colours the other way round: told apart by lightness alone."""


def column(name: str) -> int:
    """Where a measure stands in a row of ``BoardHistory.series``."""
    return MEASURES.index(name) + 1


HELD_OUT = "agreed parameters, held-out"
WHOLE = "the last on all held-out data"


def loss(
    palette: Palette, rows: Series, agreed: Series = (), whole: Series = (), *, over_tokens: bool = False,
    look: ChartLook = AS_MEASURED, marks: Sequence[Happening] = (),
) -> Options:  # fmt: skip
    """Mean training loss and held-out loss of the agreed parameters, over time or over the swarm's tokens.
    All are rows of ``BoardHistory.series``. ``whole``: the last on more data than peers measure it on.
    ``marks``: who came and went, newest first, over time only."""
    place = column("loss")
    across = _axis(palette, "time")
    training = _points(rows, place)
    held_out, last = ([[row[0] * 1000, _known(row[place])] for row in found] for found in (agreed, whole))
    if over_tokens:
        across = _axis(palette, "value", "tokens, all peers", scale=True)
        at = column("tokens")
        training, held_out, last = (
            [[row[at], _known(row[place])] for row in found] for found in (rows, agreed, whole)
        )
    up = _axis(palette, "value", scale=True, splitNumber=4)
    if look.log:
        up = _axis(palette, "log", logBase=2)
        training = _above_zero(training)
        held_out = _above_zero(held_out)
    thin = {"width": 1.5, "color": ORANGE, "opacity": 0.8}
    options = _base(palette, "Loss", across, up, [
        _line(HELD_OUT, held_out, BLUE, showSymbol=True, symbolSize=7),
        *([_line(WHOLE, last, PURPLE, showSymbol=True, symbol="diamond", symbolSize=10)] if last else []),
        *_smoothed("training, mean of the peers", training, ORANGE, look.smooth, lineStyle=thin),
        *([] if over_tokens else [_marks(palette, rows, marks, labelled=True)]),
    ])  # fmt: skip
    if over_tokens:
        options["grid"]["right"] = 36  # half of the last number stands beyond the axis
    return options


def over_time(
    palette: Palette, rows: Series, lines: Mapping[str, tuple[str, str, float]], *, title: str = "Over time",
    look: ChartLook = AS_MEASURED, marks: Sequence[Happening] = (), is_measured: bool = False,
) -> Options:  # fmt: skip
    """Some measures over time; ``lines``: (measure, colour, factor) by name. Utilisation is from 0 to 100.
    ``is_measured``: of the agreed parameters, now and then, and of any size."""
    ends: Options = {"scale": True} if is_measured else {"min": 0}
    ends |= {"max": 100, "interval": 25} if "utilisation" in lines else {}
    series = [
        one
        for name, (measure, colour, scale) in lines.items()
        for one in _smoothed(
            name, _points(rows, column(measure), scale), colour, look.smooth, showSymbol=is_measured
        )
    ]
    series.append(_marks(palette, rows, marks, labelled=False))
    up = _axis(palette, "value", splitNumber=4, **ends)
    options = _base(palette, title, _axis(palette, "time"), up, series, legend=len(lines) > 1)
    if len(lines) == 1:
        options["grid"]["top"] = 28
    return options


def staleness(
    palette: Palette, by_fragment: Mapping[int, Mapping[int, int]], of: str = "fragment"
) -> Options:
    """Applied outer steps by staleness, stacked by fragment, or by whatever the numbers are ``of``."""
    values = sorted({value for histogram in by_fragment.values() for value in histogram})
    width = max(1, -(-(values[-1] + 1) // 24)) if values else 1
    classes = list(range(0, max([*values, 3]) + 1, width))
    names = [str(low) if width == 1 else f"{low} to {low + width - 1}" for low in classes]
    series: list[Options] = [{
        "type": "bar", "stack": "all", "name": f"{of} {fragment}", "barMaxWidth": 32,
        "itemStyle": {"color": COLOURS[number % len(COLOURS)]},
        "data": [sum(n for value, n in found.items() if low <= value < low + width) for low in classes],
    } for number, (fragment, found) in enumerate(sorted(by_fragment.items()))]  # fmt: skip
    across = _axis(palette, "category", "staleness (outer steps)", data=names)
    up = _axis(palette, "value", splitNumber=4)
    options = _base(palette, "Staleness", across, up, series, legend=len(by_fragment) <= MAX_NAMED)
    total = sum(sum(found.values()) for found in by_fragment.values())
    parts = (f"{sum(one['data'][place] for one in series)} at {name}" for place, name in enumerate(names[:8]))
    options["aria"]["label"]["description"] = f"Staleness of {total} outer steps: {', '.join(parts)}."
    options["tooltip"]["axisPointer"] = {"type": "shadow"}
    options["grid"]["bottom"] = 28
    return options


def staleness_of(palette: Palette, view: SwarmView, has_stages: bool) -> Options:
    """``staleness`` of a swarm, by stage where it has several."""
    return staleness(palette, view.staleness_by(stage=has_stages), "stage" if has_stages else "fragment")


def rounds(palette: Palette, found: Sequence[RoundFacts], fragments: int, stages: int = 0) -> Options:
    """Fragment exchanges, a row for each fragment and a column for each round: outcome as colour and letter,
    group size inside, reason on hover. ``stages``: each has ``fragments`` of its own, and rows for them; 0 in
    a run of one stage."""
    numbers = round_columns(found)
    at = {number: index for index, number in enumerate(numbers)}
    kinds = list(OUTCOMES)
    colours = [{"value": index, "color": OUTCOMES[kind][0]} for index, kind in enumerate(kinds)]
    cells = [
        {
            "value": [at[facts.round], facts.stage * fragments + facts.fragment, kinds.index(facts.outcome),
                      f"{facts.group_size or ''}{OUTCOMES[facts.outcome][1]}"],
            "name": _round_words(facts, stages),
            "label": {"color": "#ffffff" if facts.outcome == "committed" else "#101418"},
        }
        for facts in found
        if facts.round in at and facts.fragment < fragments and facts.stage < max(1, stages)
    ]  # fmt: skip
    series = [_heat(palette, cells)]
    across = _axis(palette, "category", "round", data=[str(n) for n in numbers])
    names = [f"fragment {fragment}" for fragment in range(fragments)]
    if stages:
        names = [f"stage {stage}, {name}" for stage in range(stages) for name in names]
    up = _axis(palette, "category", data=names, inverse=True, splitArea={"show": False})
    options = _base(palette, "Fragment exchanges", across, up, series, legend=False)
    outcomes = Counter(facts.outcome for facts in found)
    parts = (f"{times} {outcome}" for outcome, times in outcomes.most_common())
    options["aria"]["label"]["description"] = (
        f"Fragment exchanges of the newest {len(numbers)} rounds: {', '.join(parts) or 'none yet'}."
    )
    options["tooltip"] |= {"trigger": "item", "formatter": "{b}"}
    options["grid"]["bottom"] = 28
    options["visualMap"] = {"type": "piecewise", "dimension": 2, "show": False, "pieces": colours}
    return options


def round_columns(found: Iterable[RoundFacts]) -> list[int]:
    """The rounds that ``rounds`` shows, by column."""
    return sorted({facts.round for facts in found})[-MAX_ROUND_COLUMNS:]


def scale_end(values: Iterable[float]) -> float:
    """Where the scale of a heat map, or of bars, of these values ends. They are own word: what is far above
    the median, a liar's word say, makes no scale for the others."""
    found = sorted(value for value in values if value > 0)
    return min(found[-1], 8 * found[len(found) // 2]) if found else 1.0


def busiest(peers: Sequence[PeerFacts], most: int = 16) -> list[PeerFacts]:
    """Those with measured links that sent and received most, ``most`` of them, by label."""
    told = sorted((peer for peer in peers if peer.links), key=lambda peer: -(peer.up_bytes + peer.down_bytes))
    return sorted(told[:most], key=lambda peer: peer.label)


def links(palette: Palette, peers: Sequence[PeerFacts]) -> Options:
    """The rate of each link in Mbit/s: a row for each sender, a column for each receiver, of the busiest."""
    shown = busiest(peers)
    names = {peer.peer: _drawn(peer.label, 24) for peer in shown}
    found = [
        (peer.peer, link.other, link.bytes_per_s * FAST_RATE.factor, link.relayed)
        for peer in shown
        for link in peer.links
        if link.other in names and link.bytes_per_s
    ]
    end = scale_end(rate for _, _, rate, _ in found)
    places = list(names)
    cells = []
    for sender, receiver, rate, relayed in found:
        told = figure(min(rate, 99_999), (rate < 100) + (rate < 1))
        cells.append({
            "value": [places.index(receiver), places.index(sender), _known(min(rate, end)), told],
            "name": f"{names[sender]} to {names[receiver]}: {told} Mbit/s{', relayed' * relayed}",
            "label": {"color": palette.ink if rate < 0.42 * end else palette.panel},
        })  # fmt: skip
    across = _axis(palette, "category", "to", data=list(names.values()), position="top")
    up = _axis(palette, "category", data=list(names.values()), inverse=True)
    for axis, width in ((across, 880 // max(1, len(names))), (up, 96)):
        axis["axisLabel"] |= {"interval": 0, "width": width, "overflow": "truncate"}
    options = _base(palette, "Who sends to whom", across, up, [_heat(palette, cells)], legend=False)
    told = "; ".join(str(cell["name"]) for cell in cells[:16]) or "none yet"
    options["aria"]["label"]["description"] = f"Rates of {len(cells)} of the links: {told}."
    options["tooltip"] |= {"trigger": "item", "formatter": "{b}"}
    options["grid"] |= {"top": 52, "bottom": 44}
    options["visualMap"] = {
        "type": "continuous", "dimension": 2, "min": 0, "max": _known(end), "itemHeight": 180,
        "orient": "horizontal", "left": "center", "bottom": 0, "itemWidth": 12,
        "inRange": {"color": HEAT if palette is LIGHT else HEAT[::-1]}, "textStyle": {"color": palette.soft},
        "text": [f"{figure(end, 1)} Mbit/s", "0"],
    }  # fmt: skip
    return options


def _heat(palette: Palette, cells: Sequence[Options]) -> Options:
    """The series of a heat map whose cells say the fourth of their values."""
    return {
        "type": "heatmap", "data": cells, "labelLayout": {"hideOverlap": True},
        "label": {"show": True, "fontSize": 11, "lineHeight": 14, "formatter": "{@[3]}"},
        "itemStyle": {"borderColor": palette.panel, "borderWidth": 2, "borderRadius": 3},
    }  # fmt: skip


def _round_words(facts: RoundFacts, stages: int) -> str:
    stage = f"stage {facts.stage}, " if stages else ""
    lines = [
        f"{stage}fragment {facts.fragment}, exchange {facts.round}: {facts.outcome}",
        f"{facts.contributors} of {facts.group_size} in the mean, {figure(facts.duration_s, 2)} s",
    ]
    lines += [f"staleness at most {facts.staleness}"] if facts.staleness >= 0 else []
    reason = _drawn(facts.reason, 160)
    return "\n".join(lines + ([reason] if reason else []))


# ---- what all are made of


def _base(
    palette: Palette, title: str, across: Options, up: Options, series: list[Options], legend: bool = True
) -> Options:
    shown = [one["name"] for one in series if one.get("name") and "tooltip" not in one]
    lines = [_told(one) for one in series if one["type"] == "line" and one["data"] and one["name"] in shown]
    picture = {"title": "save as a picture", "name": f"p2p-co2 {title.lower()}".replace(" ", "-"),
               "backgroundColor": palette.panel, "pixelRatio": 2}  # fmt: skip
    tools: Options = {"saveAsImage": picture}
    if across["type"] != "category":
        hint = {"zoom": "zoom: drag across the chart", "back": "zoom back"}
        tools = {
            "dataZoom": {"title": hint, "yAxisIndex": "none"},
            "restore": {"title": "all of it"},
            **tools,
        }
    return {
        "xAxis": across, "yAxis": up, "series": series,
        "animation": False,
        "aria": {"enabled": True, "label": {"description": f"{title}. {' '.join(lines) or 'Nothing yet.'}"}},
        "textStyle": {"color": palette.ink, "fontFamily": "inherit"},
        "grid": {"left": 8, "right": 16, "top": 40 if legend else 28, "bottom": 8, "containLabel": True},
        "legend": {"show": legend, "top": 0, "left": 0, "width": "64%", "type": "scroll",
                   "icon": "roundRect", "itemWidth": 12, "itemHeight": 8, "data": shown,
                   "textStyle": {"color": palette.soft}},
        "toolbox": {"top": -10, "right": 0, "itemSize": 13, "itemGap": 10, "feature": tools,
                    "iconStyle": {"borderColor": palette.soft},
                    "emphasis": {"iconStyle": {"borderColor": palette.ink, "textFill": palette.ink,
                                               "textBackgroundColor": palette.panel, "textPadding": 3}}},
        "tooltip": {"renderMode": "richText", "trigger": "axis", "confine": True,
                    "backgroundColor": palette.panel, "borderColor": palette.line,
                    "textStyle": {"color": palette.ink, "fontSize": 12}},
    }  # fmt: skip


def _told(line: Options) -> str:
    """A line in a sentence."""
    known = [point[1] for point in line["data"] if point[1] is not None]
    if not known:
        return f"{line['name']}: not known."
    shown = (known[-1], min(known), max(known))
    newest, low, high = (figure(value) if value >= 1000 else f"{value:.4g}" for value in shown)
    return f"{line['name']}: {newest} at the end, between {low} and {high}."


def _drawn(text: str, limit: int) -> str:
    """What a peer may have said as a text in a chart: ECharts reads braces as styles and as names."""
    return plain(text, limit).replace("{", "(").replace("}", ")")


def _axis(palette: Palette, kind: str, name: str = "", **more: Any) -> Options:  # ECharts' own axis options
    ends = {"showMaxLabel": False} if kind == "time" else {}  # a time at the very end would be cut off
    return {
        "type": kind, "name": name, "nameLocation": "middle", "nameGap": 30,
        "nameTextStyle": {"color": palette.soft},
        "axisLabel": {"color": palette.soft, "hideOverlap": True, **ends},
        "axisLine": {"lineStyle": {"color": palette.line}},
        "splitLine": {"show": kind in {"value", "log"}, "lineStyle": {"color": palette.line}}, **more,
    }  # fmt: skip


def _points(rows: Series, column: int, scale: float = 1.0) -> list[list[float | None]]:
    """(milliseconds, value); without a sample for long, and for longer than usual, the line is broken."""
    apart = sorted(after[0] - before[0] for before, after in itertools.pairwise(rows))
    most_s = max(6 * apart[len(apart) // 2], RECENT_S) if apart else math.inf
    made: list[list[float | None]] = []
    for number, row in enumerate(rows):
        if number and row[0] - rows[number - 1][0] > most_s:
            made.append([rows[number - 1][0] * 1000 + 1, None])
        made.append([row[0] * 1000, _known(row[column] * scale)])
    return made


def _above_zero(points: Iterable[Sequence[float | None]]) -> list[list[float | None]]:
    """A logarithm is of nothing else."""
    return [[at, value if value is not None and value > 0 else None] for at, value in points]


def _smoothed(name: str, points: list[Any], colour: str, weight: float, **more: Any) -> list[Options]:
    """The line, or its exponential moving mean with the line behind it, pale. The mean is over what came
    before, without the bias of its beginning (Adam's correction), and begins anew after a gap."""
    if not weight:
        return [_line(name, points, colour, **more)]
    made: list[list[float | None]] = []
    mean = shares = 0.0
    for at, value in points:
        if value is None:
            mean = shares = 0.0
        else:
            mean = weight * mean + (1 - weight) * value
            shares = weight * shares + (1 - weight)
        made.append([at, None if value is None else _known(mean / shares)])
    pale = {"width": 1, "color": colour, "opacity": 0.3}
    behind = _line(
        f"{name}, as measured", points, colour, lineStyle=pale, tooltip={"show": False}, silent=True
    )
    return [behind, _line(name, made, colour)]


def _marks(palette: Palette, rows: Series, happenings: Sequence[Happening], *, labelled: bool) -> Options:
    """Lines across a chart over time where somebody came, went or rested, as a series without points."""
    start, end = (rows[0][0], rows[-1][0]) if rows else (0.0, 0.0)
    groups: list[list[Happening]] = []
    for one in sorted(
        (one for one in happenings[:MAX_MARKS] if start <= one.at <= end), key=lambda one: one.at
    ):
        if not groups or one.at - groups[-1][0].at > (end - start) * MARKS_APART:
            groups.append([])
        groups[-1].append(one)
    data = []
    for group in groups:
        kinds = {one.kind for one in group}
        colour, word = MARKED[group[0].kind] if len(kinds) == 1 else (palette.soft, "changes")
        first = _drawn(group[0].words.partition(":")[0], 24)
        is_early = group[0].at < (start + end) / 2  # its label stands right of the line, where there is room
        data.append({
            "xAxis": group[0].at * 1000, "name": "\n".join(_drawn(one.words, 80) for one in group[:6]),
            "lineStyle": {"color": colour},
            "label": {"formatter": first if len(group) == 1 else f"{len(group)} {word}", "color": colour,
                      "position": "insideEndBottom" if is_early else "insideEndTop"},
        })  # fmt: skip
    name = "who came and went" if labelled else ""  # without a name it has no place in the legend
    return _line(name, [], palette.soft, markLine={
        "data": data, "symbol": "none", "animation": False, "lineStyle": {"type": "dashed", "width": 1},
        "label": {"show": labelled, "fontSize": 10.5},
        "tooltip": {"show": True, "formatter": "{b}"},
    })  # fmt: skip


def _known(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _line(name: str, data: Sequence[Any], colour: str, **more: Any) -> Options:  # ECharts' own series options
    return {
        "type": "line", "name": name, "data": data, "showSymbol": False, "connectNulls": False,
        "lineStyle": {"width": 2, "color": colour}, "itemStyle": {"color": colour}, **more,
    }  # fmt: skip
