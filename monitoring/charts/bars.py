"""Histograms and stacked bars: staleness, communication, one round's time line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from monitoring.charts.parts import (
    BLUE,
    COLOURS,
    GREEN,
    MAX_NAMED,
    SKY,
    VERMILLION,
    Options,
    Palette,
    axis,
    base,
    named,
    value_axis,
)
from monitoring.facts import PeerFacts

MAX_BAR_PEERS = 24
MAX_MEMBERS = 64
_MOST_BARS = 24


def staleness(palette: Palette, by_fragment: Mapping[int, Mapping[int, int]]) -> Options:
    """Applied outer steps by staleness, stacked by fragment."""
    values = sorted({value for histogram in by_fragment.values() for value in histogram})
    width = max(1, -(-(values[-1] + 1) // _MOST_BARS)) if values else 1
    classes = list(range(0, max([*values, 3]) + 1, width))
    options = base(palette, legend=len(by_fragment) <= MAX_NAMED)
    options["tooltip"]["axisPointer"] = {"type": "shadow"}
    names = [str(low) if width == 1 else f"{low} to {low + width - 1}" for low in classes]
    options["xAxis"] = axis(palette, "category", "staleness (outer steps)", data=names)
    options["yAxis"] = value_axis(palette)
    options["grid"]["bottom"] = 28
    options["series"] = [
        {
            "type": "bar", "stack": "all", "name": f"fragment {fragment}", "barMaxWidth": 48,
            "itemStyle": {"color": COLOURS[number % len(COLOURS)]},
            "data": [
                sum(times for value, times in histogram.items() if low <= value < low + width)
                for low in classes
            ],
        }
        for number, (fragment, histogram) in enumerate(sorted(by_fragment.items()))
    ]  # fmt: skip
    return options


def hidden_and_exposed(palette: Palette, peers: Sequence[PeerFacts]) -> Options:
    """Seconds of communication by peer: behind training, and in its way; those that wait longest first."""
    chosen = sorted(peers, key=lambda peer: -peer.exposed_s)[:MAX_BAR_PEERS]
    chosen.sort(key=lambda peer: peer.label)
    options = base(palette)
    options["tooltip"]["axisPointer"] = {"type": "shadow"}
    options["xAxis"] = axis(palette, "value", "seconds")
    options["yAxis"] = axis(
        palette, "category", data=[named(peer.label, 16) for peer in chosen], inverse=True
    )
    options["grid"]["bottom"] = 28
    kinds = (
        ("hidden", SKY, "hidden_s"),
        ("exposed", VERMILLION, "exposed_s"),
    )
    options["series"] = [
        {"type": "bar", "stack": "s", "name": name, "barMaxWidth": 26, "itemStyle": {"color": colour},
         "data": [round(getattr(peer, field), 2) for peer in chosen]}
        for name, colour, field in kinds
    ]  # fmt: skip
    return options


_PHASES = (
    ("READY", "begin_s", "#9aa0a6"),
    ("PARTS", "parts_s", SKY),
    ("MEAN", "mean_s", BLUE),
    ("COMMIT", "commit_s", GREEN),
)
"""Short names: a phone's legend has room for these four. The card's hint says what they are."""


def round_time_line(
    palette: Palette, members: Mapping[str, Mapping[str, float]], labels: Mapping[str, str]
) -> Options:
    """READY, BEGIN, PARTS, MEAN, COMMIT of every member as bars; seconds since the first READY."""
    order = sorted(members, key=lambda peer: labels.get(peer, peer))[:MAX_MEMBERS]
    first = min((members[peer]["ready_at"] for peer in order), default=0.0)
    options = base(palette)
    options["tooltip"]["axisPointer"] = {"type": "shadow"}
    names = [named(labels.get(peer, f"~{peer[-6:]}"), 16) for peer in order]
    options["xAxis"] = axis(palette, "value", "seconds since the first READY")
    options["yAxis"] = axis(palette, "category", data=names, inverse=True)
    options["grid"]["bottom"] = 28
    waits = [round(members[peer]["ready_at"] - first, 4) for peer in order]
    unseen = {"silent": True, "itemStyle": {"color": "transparent"}, "tooltip": {"show": False}}
    series: list[Options] = [{"type": "bar", "stack": "t", "name": "", "data": waits, **unseen}]
    for number, (name, key, colour) in enumerate(_PHASES):
        data = []
        for peer in order:
            times = members[peer]
            reached = max((times[before] for _, before, _ in _PHASES[:number]), default=0.0)
            data.append(round(max(0.0, times[key] - reached), 4))
        series.append(
            {
                "type": "bar",
                "stack": "t",
                "name": name,
                "barMaxWidth": 26,
                "itemStyle": {"color": colour},
                "data": data,
            }
        )
    options["series"] = series
    return options
