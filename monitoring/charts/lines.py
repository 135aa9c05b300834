"""Measures over time or tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping

from monitoring.charts.parts import (
    BLUE,
    COLOURS,
    MAX_NAMED,
    ORANGE,
    Options,
    Palette,
    Series,
    axis,
    base,
    known,
    line,
    points,
    value_axis,
)
from monitoring.history import MEASURES


def column(name: str) -> int:
    """Where a measure stands in a row of ``History.series``."""
    return MEASURES.index(name) + 1


def loss(palette: Palette, rows: Series, agreed: Series, *, over_tokens: bool) -> Options:
    """Held-out loss of the agreed parameters ((at, tokens, loss)) and mean training loss, over time or over
    the swarm's tokens."""
    options = base(palette)
    if over_tokens:
        options["xAxis"] = axis(palette, "value", "tokens, all peers", scale=True)
        options["grid"]["right"] = 36  # half of the last number stands beyond the axis
        training = [[row[column("tokens")], known(row[column("loss")])] for row in rows]
        held_out = [[row[1], known(row[2])] for row in agreed]
    else:
        options["xAxis"] = axis(palette, "time")
        training = points(rows, column("loss"))
        held_out = [[row[0] * 1000, known(row[2])] for row in agreed]
    options["yAxis"] = value_axis(palette, scale=True)
    options["series"] = [
        line("agreed parameters, held-out", held_out, BLUE, showSymbol=True, symbolSize=7),
        line(
            "training, mean of the peers",
            training,
            ORANGE,
            lineStyle={"width": 1.5, "color": ORANGE, "opacity": 0.8},
        ),
    ]
    return options


def over_time(
    palette: Palette, rows: Series, lines: Mapping[str, tuple[str, str, float]], *, share: bool = False
) -> Options:
    """Some measures over time; ``lines``: (measure, colour, factor) by name. ``share``: from 0 to 100."""
    options = base(palette, legend=len(lines) > 1)
    if len(lines) == 1:
        options["grid"]["top"] = 28
    options["xAxis"] = axis(palette, "time")
    options["yAxis"] = value_axis(palette, min=0, **({"max": 100, "interval": 25} if share else {}))
    options["series"] = [
        line(name, points(rows, column(measure), scale), colour)
        for name, (measure, colour, scale) in lines.items()
    ]
    return options


def mark(options: Options, value: float | None, name: str, colour: str) -> None:
    """Add a level line to the first series of ``options``."""
    if value is None or not math.isfinite(value):
        return
    options["series"].append(
        line(
            name,
            [],
            colour,
            lineStyle={"type": "dashed", "color": colour, "width": 1.5},
            markLine={
                "silent": True, "symbol": "none", "label": {"show": False}, "data": [{"yAxis": known(value)}],
                "lineStyle": {"type": "dashed", "color": colour, "width": 1.5},
            },
        )
    )  # fmt: skip


def fragment_lines(palette: Palette, rows: Mapping[int, Series], place: int) -> Options:
    """A measure of fragments over time; ``place``: its column, 1 for the first."""
    options = base(palette, legend=len(rows) <= MAX_NAMED)
    options["xAxis"] = axis(palette, "time")
    options["yAxis"] = value_axis(palette, scale=True)
    options["series"] = [
        line(f"fragment {fragment}", points(series, place), COLOURS[number % len(COLOURS)])
        for number, (fragment, series) in enumerate(sorted(rows.items()))
    ]
    return options
