"""One picture of a run: how the loss fell, and how stale the outer steps were.

Law: drawn from the view alone, by matplotlib's Agg canvas without global state, so it works in any thread and
without a display. Colours are Okabe and Ito's (2008), told apart by colour-blind readers. Price: about a
second of CPU.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from monitoring.charts import COLOURS, GREEN
from monitoring.words import plain
from p2p_co2.errors import EnvironmentFault
from p2p_co2.telemetry.view import SwarmView, mean_of

WIDTH_PIXELS, HEIGHT_PIXELS, DOTS_PER_INCH = 1400, 560, 100
INK, FAINT = "#222222", "#DDDDDD"
MOST_NAMED_PEERS = 6
_FONT = 13
_MOST_BARS = 32
"""Past this many values a histogram is put in classes of equal width."""


def draw_run(
    view: SwarmView,
    path: Path,
    *,
    title: str = "",
    loss_start: float | None = None,
    loss_end: float | None = None,
    loss_unit: str = "",
) -> None:
    """Write the picture (PNG, 1400 x 560) to ``path``.

    ``loss_start``, ``loss_end``: held-out loss of the agreed parameters, in ``loss_unit``. Raises
    ``EnvironmentFault`` if the file cannot be written.
    """
    figure = Figure(figsize=(WIDTH_PIXELS / DOTS_PER_INCH, HEIGHT_PIXELS / DOTS_PER_INCH), dpi=DOTS_PER_INCH)
    FigureCanvasAgg(figure)
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.1)
    grid = figure.add_gridspec(2, 2, width_ratios=(1.75, 1))
    axes = figure.add_subplot(grid[:, 0])
    _dress(axes, "Training loss per peer, held-out loss of the agreed parameters")
    axes.set_ylabel(f"loss ({loss_unit})" if loss_unit else "loss", fontsize=_FONT)
    _draw_loss(axes, view, loss_start, loss_end)
    for place, histogram, name, unit, colour in (
        (grid[0, 1], view.staleness, "Staleness", "outer steps behind", GREEN),
        (grid[1, 1], view.sync_delay_steps, "Delay from send to apply", "inner steps", COLOURS[0]),
    ):
        axes = figure.add_subplot(place)
        _dress(axes, name)
        axes.set_xlabel(unit, fontsize=_FONT)
        axes.set_ylabel("updates (%)", fontsize=_FONT)
        _draw_histogram(axes, histogram, colour)
    if title:
        figure.suptitle(_label(title), fontsize=_FONT + 2, color=INK)
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise EnvironmentFault(f"cannot write the picture {path}: {error.strerror}") from None


def _draw_loss(axes: Any, view: SwarmView, loss_start: float | None, loss_end: float | None) -> None:
    started_at, labels = view.started_at or 0.0, view.labels()
    peers = [peer for peer in view.started_peers if peer.history.points]
    span_s = (view.last_at or started_at) - started_at
    scale, unit = (1.0, "s") if span_s < 600 else (60.0, "min") if span_s < 3 * 3600 else (3600.0, "h")
    axes.set_xlabel(f"wall time ({unit})", fontsize=_FONT)
    ends = [0.0]
    for number, peer in enumerate(peers):
        points = np.array(peer.history.points)
        at, loss = (points[:, 0] - started_at) / scale, points[:, 2]
        ends += [at[0], at[-1]]
        colour, smooth = COLOURS[number % len(COLOURS)], _smooth(loss)
        label = _label(labels[peer.peer]) if len(peers) <= MOST_NAMED_PEERS else None
        axes.plot(at, loss, color=colour, linewidth=0.8, alpha=0.25)
        axes.plot(at, smooth, color=colour, linewidth=1.8, label=label)
        if peer.seen_left and not peer.finished:
            _mark(axes, (at[-1], smooth[-1]), "X", colour, "left", (0, 16))
    first = min(ends[1:], default=0.0)
    for end, held_out, name, marker, offset in (
        (first, loss_start, "held-out, start", "o", (10, 0)),
        (max(ends), loss_end, "held-out, end", "D", (0, 20)),
    ):
        if held_out is not None and np.isfinite(held_out):
            _mark(axes, (end, held_out), marker, INK, f"{held_out:.2f}", offset, label=_label(name))
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=_FONT - 1, frameon=False, loc="upper right")


def _mark(
    axes: Any, point: tuple[float, float], marker: str, colour: str, words: str, offset: tuple[int, int],
    label: str | None = None,
) -> None:  # fmt: skip
    axes.plot(
        *([value] for value in point), marker=marker, color=colour, markersize=10, linestyle="none",
        label=label, zorder=5,
    )  # fmt: skip
    axes.annotate(
        words, point, xytext=offset, textcoords="offset points", fontsize=_FONT, color=colour,
        ha="left" if offset[0] > 0 else "center", va="center",
    )  # fmt: skip


def _draw_histogram(axes: Any, histogram: Counter[int], colour: str) -> None:
    mean = mean_of(histogram)
    if mean is None:
        axes.text(0.5, 0.5, "no outer step was applied", transform=axes.transAxes, ha="center", va="center")
        axes.set_xticks([])
        axes.set_yticks([])
        return
    low, high = min(histogram), max(histogram)
    width = -(-(high - low + 1) // _MOST_BARS)
    edges = np.arange(low, high + width + 1, width) - 0.5
    shares = np.histogram(list(histogram), bins=edges, weights=list(histogram.values()))[0]
    shares = 100 * shares / shares.sum()
    axes.bar(edges[:-1] + width / 2, shares, width=0.82 * width, color=colour)
    axes.axvline(mean, color=INK, linewidth=1.5, linestyle="--")
    # One lonely value would fill the whole width: leave room for its neighbours.
    axes.set_xlim(edges[0] - 0.25 * width, max(edges[-1] + 0.25 * width, low + 3.75))
    beside = mean < sum(axes.get_xlim()) / 2  # the words stand on the side that the line leaves free
    axes.annotate(
        f"mean {mean:.2f}, max {high}", (0.97 if beside else 0.03, 0.98), xycoords="axes fraction",
        fontsize=_FONT, ha="right" if beside else "left", va="top",
    )  # fmt: skip
    axes.set_ylim(0, 1.3 * shares.max())  # the words stand above the highest bar
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))


def _dress(axes: Any, title: str) -> None:
    axes.set_title(title, fontsize=_FONT, color=INK, loc="left")
    axes.grid(True, axis="y", color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=_FONT - 1, colors=INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _smooth(loss: np.ndarray) -> np.ndarray:
    """Centred moving mean over about a twentieth of the run. At the start, where the loss is steep, it is
    narrower, so that nothing is shifted; at the end one-sided, so that no single step bends the curve."""
    half = max(1, len(loss) // 40)
    sums = np.concatenate([[0.0], np.cumsum(loss)])
    middle = np.arange(len(loss))
    before = np.minimum(half, middle)
    after = np.minimum(before, len(loss) - 1 - middle)
    smooth: np.ndarray = (sums[middle + after + 1] - sums[middle - before]) / (before + after + 1)
    return smooth


def _label(name: str) -> str:
    """A name that matplotlib draws as it is: a dollar would start mathematics, a leading underscore hides a
    line, and the built-in font lacks most scripts."""
    ascii_name = plain(name, 90).encode("ascii", "replace").decode()
    return " " + ascii_name.replace("$", r"\$")
