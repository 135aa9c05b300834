"""What all charts are made of: colours, axes, lines, and names made harmless."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from monitoring.words import plain

Options = dict[str, Any]
Series = Sequence[tuple[float, ...]]

BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILLION, YELLOW = (
    "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442",
)  # fmt: skip
COLOURS = (BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILLION)
CIVIDIS = ("#00224e", "#35456c", "#666970", "#948e77", "#c8b866", "#fee838")
OUTCOMES = {
    "committed": (BLUE, ""),
    "partial": (SKY, "p"),
    "late": (ORANGE, "L"),
    "alone": (PURPLE, ""),
    "aborted": (VERMILLION, "A"),
    "open": ("#9aa0a6", "o"),
}
"""Colour and letter; "partial": committed without some, "late": applied after its own round."""
OUTCOME_WORDS = {
    "committed": "committed",
    "partial": "committed without some (p)",
    "late": "late (L)",
    "alone": "by one peer, alone (1)",
    "aborted": "aborted (A)",
    "open": "open (o)",
}
MAX_NAMED = 6
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


def named(text: str, limit: int = 24) -> str:
    """A peer's text as a chart takes it: one line, no braces (ECharts reads them as styles)."""
    return plain(text, limit).replace("{", "(").replace("}", ")")


def base(palette: Palette, *, legend: bool = True) -> Options:
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


_EDGES = {"time": {"showMaxLabel": False}}
"""A time at the very end would be cut off."""


def axis(palette: Palette, kind: str, name: str = "", **more: Any) -> Options:  # ECharts' own axis options
    return {
        "type": kind,
        "name": name,
        "nameLocation": "middle",
        "nameGap": 30,
        "nameTextStyle": {"color": palette.soft},
        "axisLabel": {"color": palette.soft, "hideOverlap": True, **_EDGES.get(kind, {})},
        "axisLine": {"lineStyle": {"color": palette.line}},
        "splitLine": {"show": kind == "value", "lineStyle": {"color": palette.line}},
        **more,
    }


def value_axis(palette: Palette, **more: Any) -> Options:  # ECharts' own axis options
    """An upright axis. Its unit stands in the card's title, or set as ``name`` above the axis."""
    return {
        **axis(palette, "value"),
        "nameLocation": "end",
        "nameGap": 10,
        "nameTextStyle": {"color": palette.soft, "align": "left"},
        "splitNumber": 4,
        **more,
    }


def points(rows: Series, column: int, scale: float = 1.0) -> list[list[float | None]]:
    """(milliseconds, value); where nothing was sampled for long the line is broken."""
    apart = sorted(after[0] - before[0] for before, after in itertools.pairwise(rows))
    most_s = max(6 * apart[len(apart) // 2], GAP_S) if apart else math.inf
    made: list[list[float | None]] = []
    for number, row in enumerate(rows):
        if number and row[0] - rows[number - 1][0] > most_s:
            made.append([rows[number - 1][0] * 1000 + 1, None])
        made.append([row[0] * 1000, known(row[column] * scale)])
    return made


def known(value: float, digits: int = 4) -> float | None:
    return float(f"{value:.{digits + 2}g}") if math.isfinite(value) else None


def line(name: str, data: list[Any], colour: str, **more: Any) -> Options:  # ECharts' own series options
    return {
        "type": "line",
        "name": name,
        "data": data,
        "showSymbol": False,
        "connectNulls": False,
        "lineStyle": {"width": 2, "color": colour},
        "itemStyle": {"color": colour},
        **more,
    }
