"""Heat maps: rounds by fragments, ages of fragments by peers, links by sender and receiver."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from monitoring.charts.parts import CIVIDIS, OUTCOMES, Options, Palette, axis, base, named
from monitoring.facts import PeerFacts, RoundFacts
from monitoring.words import clock, figure, size

MAX_MATRIX_PEERS = 24
MAX_AGE_PEERS = 48
MAX_ROUND_COLUMNS = 60


def rounds(palette: Palette, found: Sequence[RoundFacts], fragments: int) -> Options:
    """Fragments by rounds: outcome as colour and letter, group size inside, reason on hover."""
    numbers = sorted({facts.round for facts in found})[-MAX_ROUND_COLUMNS:]
    at = {number: index for index, number in enumerate(numbers)}
    options = base(palette, legend=False)
    options["tooltip"] = {**options["tooltip"], "trigger": "item", "formatter": "{b}"}
    options["xAxis"] = axis(palette, "category", "round (outer version)", data=[str(n) for n in numbers])
    names = [f"fragment {fragment}" for fragment in range(fragments)]
    options["yAxis"] = axis(palette, "category", data=names, inverse=True, splitArea={"show": False})
    options["grid"]["bottom"] = 28
    kinds = list(OUTCOMES)
    colours = [{"value": index, "color": OUTCOMES[kind][0]} for index, kind in enumerate(kinds)]
    options["visualMap"] = {"type": "piecewise", "dimension": 2, "show": False, "pieces": colours}
    cells = [
        {
            "value": [at[facts.round], facts.fragment, kinds.index(facts.outcome), _size_and_letter(facts)],
            "name": round_words(facts),
            "label": {"color": "#ffffff" if facts.outcome == "committed" else "#101418"},
        }
        for facts in found
        if facts.round in at and facts.fragment < fragments
    ]
    label = {"show": len(numbers) <= 40, "fontSize": 11, "formatter": "{@[3]}"}
    style = {"borderColor": palette.panel, "borderWidth": 2, "borderRadius": 3}
    options["series"] = [_heat(cells, label, style)]
    return options


def _size_and_letter(facts: RoundFacts) -> str:
    return f"{facts.group_size or ''}{OUTCOMES[facts.outcome][1]}"


def round_words(facts: RoundFacts) -> str:
    """One round in a few lines."""
    lines = [
        f"fragment {facts.fragment}, round {facts.round}: {facts.outcome}",
        f"{facts.contributors} of {facts.group_size} in the mean, {figure(facts.duration_s, 2)} s",
    ]
    if facts.staleness >= 0:
        lines.append(f"staleness at most {facts.staleness}")
    if facts.reason:
        lines.append(named(facts.reason, 160))
    return "\n".join(lines)


def ages(palette: Palette, peers: Sequence[PeerFacts], fragments: int) -> Options:
    """Seconds since agreed parameters last reached each fragment on each peer; the oldest peers first."""
    chosen = sorted(peers, key=lambda peer: -max((age or 0.0 for age in peer.fragment_age_s), default=0.0))
    chosen = sorted(chosen[:MAX_AGE_PEERS], key=lambda peer: peer.label)
    cells: list[dict[str, Any]] = [
        {"value": [fragment, row, round(age, 1)],
         "name": f"{named(peer.label)}, fragment {fragment}: {clock(age)} old"}
        for row, peer in enumerate(chosen)
        for fragment, age in enumerate(peer.fragment_age_s)
        if age is not None
    ]  # fmt: skip
    most = max((cell["value"][2] for cell in cells), default=1.0)
    for cell in cells:
        cell["label"] = {"color": _on_cividis(float(cell["value"][2]) / max(1.0, most))}
    options = base(palette, legend=False)
    options["tooltip"] = {**options["tooltip"], "trigger": "item", "formatter": "{b}"}
    options["xAxis"] = axis(palette, "category", "fragment", data=[str(f) for f in range(fragments)])
    options["yAxis"] = axis(
        palette, "category", data=[named(peer.label, 16) for peer in chosen], inverse=True
    )
    options["grid"]["bottom"] = 28
    options["grid"]["right"] = 78
    options["visualMap"] = _scale(palette, 0.0, max(1.0, float(most)), "s")
    labels = {"show": fragments * len(chosen) <= 160, "fontSize": 11, "formatter": "{@[2]}"}
    cell_style = {"borderColor": palette.panel, "borderWidth": 2, "borderRadius": 3}
    options["series"] = [_heat(cells, labels, cell_style)]
    return options


def _scale(palette: Palette, low: float, high: float, unit: str) -> Options:
    return {
        "type": "continuous", "min": low, "max": high, "calculable": False, "dimension": 2, "right": 0,
        "top": "middle", "itemHeight": 110, "itemWidth": 12,
        "text": [f"{high:.3g} {unit}", f"{low:.3g} {unit}"],
        "textStyle": {"color": palette.soft}, "inRange": {"color": list(CIVIDIS)},
    }  # fmt: skip


_BELOW = {"orient": "horizontal", "left": "center", "right": None, "top": None, "bottom": 0}


def link_matrix(palette: Palette, peers: Sequence[PeerFacts]) -> Options:
    """Sender by receiver: Mbit/s as colour and number (an R where it is relayed), below it the round trip in
    milliseconds; in words on hover."""
    chosen = list(peers)[:MAX_MATRIX_PEERS]
    at = {peer.peer: index for index, peer in enumerate(chosen)}
    cells: list[dict[str, Any]] = []
    for row, peer in enumerate(chosen):
        for link in peer.links:
            if link.other not in at:
                continue
            rate = link.bytes_per_s * 8 / 1e6 if link.bytes_per_s else None
            words = (
                f"{named(peer.label)} to {named(chosen[at[link.other]].label)}\n"
                f"{figure(rate, 1)} Mbit/s, round trip {_milliseconds(link.round_trip_s)}\n"
                f"{named(link.carrier)}, {'relayed' if link.relayed else 'direct'}, "
                f"{size(link.sent_bytes)} sent"
            )
            text = f"{_short(rate)}{' R' if link.relayed else ''}\n{_short(link.round_trip_s, 1000)}"
            cells.append({"value": [at[link.other], row, rate or 0.0, text], "name": words})
    most = max((float(cell["value"][2]) for cell in cells), default=1.0)
    for cell in cells:
        cell["label"] = {"color": _on_cividis(float(cell["value"][2]) / max(1.0, most))}
    names = [named(peer.label, 14) for peer in chosen]
    options = base(palette, legend=False)
    options["tooltip"] = {**options["tooltip"], "trigger": "item", "formatter": "{b}"}
    options["xAxis"] = axis(palette, "category", "to", data=names, position="top")
    options["yAxis"] = axis(palette, "category", data=names, inverse=True)
    options["grid"] = {"left": 8, "right": 8, "top": 48, "bottom": 40, "containLabel": True}
    # Below, not beside: a phone needs all of its width for the cells.
    options["visualMap"] = {**_scale(palette, 0.0, max(1.0, most), "Mbit/s"), **_BELOW}
    label = {"show": len(chosen) <= 10, "fontSize": 11, "lineHeight": 14, "formatter": "{@[3]}"}
    cell_style = {"borderColor": palette.panel, "borderWidth": 2, "borderRadius": 3}
    options["series"] = [_heat(cells, label, cell_style)]
    return options


def _heat(cells: list[dict[str, Any]], label: Options, style: Options) -> Options:
    """The series of a heat map; where cells are too narrow for their labels, some go."""
    return {
        "type": "heatmap", "data": cells, "label": label, "itemStyle": style,
        "labelLayout": {"hideOverlap": True},
    }  # fmt: skip


def _on_cividis(share: float) -> str:
    """What can be read on the colour at ``share`` (0 to 1) of the scale."""
    return "#101418" if share > 0.5 else "#ffffff"


def _short(value: float | None, times: float = 1.0) -> str:
    """At most three digits and no unit: cells are narrow on a phone."""
    return "-" if value is None else f"{value * times:.3g}"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.3g} ms"
