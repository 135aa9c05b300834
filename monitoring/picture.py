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

from monitoring.words import plain
from p2p_co2.errors import EnvironmentFault
from p2p_co2.telemetry.peer_view import PeerView
from p2p_co2.telemetry.view import SwarmView, mean_of

WIDTH_PIXELS, HEIGHT_PIXELS, DOTS_PER_INCH = 1400, 560, 100
PEER_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
INK, FAINT = "#222222", "#DDDDDD"
MOST_NAMED_PEERS = 6
_FONT = 13
# Past this many values a histogram is put in classes of equal width.
_MOST_BARS = 32


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
    _draw_loss(figure.add_subplot(grid[:, 0]), view, loss_start, loss_end, loss_unit)
    _draw_histogram(
        figure.add_subplot(grid[0, 1]), view.staleness, "Staleness", "outer steps behind", PEER_COLOURS[2]
    )
    _draw_histogram(
        figure.add_subplot(grid[1, 1]),
        view.sync_delay_steps,
        "Delay from send to apply",
        "inner steps",
        PEER_COLOURS[0],
    )
    if title:
        figure.suptitle(_label(title), fontsize=_FONT + 2, color=INK)
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise EnvironmentFault(f"cannot write the picture {path}: {error.strerror}") from None


def _draw_loss(
    axes: Any, view: SwarmView, loss_start: float | None, loss_end: float | None, loss_unit: str
) -> None:
    started_at = view.started_at or 0.0
    labels = view.labels()
    peers = [peer for peer in view.started_peers if peer.history.points]
    scale, unit = _time_unit((view.last_at or started_at) - started_at)
    for number, peer in enumerate(peers):
        at, loss = _curve(peer, started_at, scale)
        colour = PEER_COLOURS[number % len(PEER_COLOURS)]
        named = len(peers) <= MOST_NAMED_PEERS
        axes.plot(at, loss, color=colour, linewidth=0.8, alpha=0.25)
        smooth = _smooth(loss)
        axes.plot(at, smooth, color=colour, linewidth=1.8, label=_label(labels[peer.peer]) if named else None)
        if peer.seen_left and not peer.finished:
            _mark_left(axes, (at[-1], smooth[-1]), colour)
    first = min((peer.history.points[0][0] for peer in peers), default=started_at)
    last = max((peer.history.points[-1][0] for peer in peers), default=started_at)
    _mark(axes, ((first - started_at) / scale, loss_start), (10, 0), "o", "held-out, start")
    _mark(axes, ((last - started_at) / scale, loss_end), (0, 20), "D", "held-out, end")
    axes.set_title(
        "Training loss per peer, held-out loss of the agreed parameters",
        fontsize=_FONT,
        color=INK,
        loc="left",
    )
    axes.set_xlabel(f"wall time ({unit})", fontsize=_FONT)
    axes.set_ylabel(f"loss ({loss_unit})" if loss_unit else "loss", fontsize=_FONT)
    _dress(axes)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=_FONT - 1, frameon=False, loc="upper right")


def _mark(
    axes: Any, point: tuple[float, float | None], offset: tuple[int, int], marker: str, name: str
) -> None:
    at, loss = point
    if loss is None or not np.isfinite(loss):
        return
    axes.plot(
        [at], [loss], marker=marker, color=INK, markersize=9, linestyle="none", label=_label(name), zorder=5
    )
    axes.annotate(
        f"{loss:.2f}",
        (at, loss),
        xytext=offset,
        textcoords="offset points",
        fontsize=_FONT,
        color=INK,
        fontweight="bold",
        ha="left" if offset[0] > 0 else "center",
        va="center",
    )


def _mark_left(axes: Any, point: tuple[float, float], colour: str) -> None:
    axes.plot(
        *([value] for value in point), marker="X", color=colour, markersize=11, linestyle="none", zorder=4
    )
    axes.annotate(
        "left",
        point,
        xytext=(0, 16),
        textcoords="offset points",
        fontsize=_FONT,
        color=colour,
        ha="center",
        va="center",
    )


def _draw_histogram(axes: Any, histogram: Counter[int], title: str, unit: str, colour: str) -> None:
    axes.set_title(title, fontsize=_FONT, color=INK, loc="left")
    axes.set_xlabel(unit, fontsize=_FONT)
    axes.set_ylabel("updates (%)", fontsize=_FONT)
    _dress(axes)
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
        f"mean {mean:.2f}, max {high}",
        (0.97 if beside else 0.03, 0.98),
        xycoords="axes fraction",
        fontsize=_FONT,
        ha="right" if beside else "left",
        va="top",
    )
    axes.set_ylim(0, 1.3 * shares.max())  # the words stand above the highest bar
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))


def _dress(axes: Any) -> None:
    axes.grid(True, axis="y", color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=_FONT - 1, colors=INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _curve(peer: PeerView, started_at: float, scale: float) -> tuple[np.ndarray, np.ndarray]:
    points = np.array(peer.history.points)
    return (points[:, 0] - started_at) / scale, points[:, 2]


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


def _time_unit(span_s: float) -> tuple[float, str]:
    if span_s < 600:
        return 1.0, "s"
    return (60.0, "min") if span_s < 3 * 3600 else (3600.0, "h")


def _label(name: str) -> str:
    """A name that matplotlib draws as it is: a dollar would start mathematics, a leading underscore hides a
    line, and the built-in font lacks most scripts."""
    ascii_name = plain(name, 90).encode("ascii", "replace").decode()
    return " " + ascii_name.replace("$", r"\$")
