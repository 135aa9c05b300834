"""The picture of a run that is over, ``loss.png``: its loss over time, and how stale its outer steps were."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from monitoring import charts
from monitoring.facts import SwarmFacts
from monitoring.words import figure


def draw_loss(
    path: Path,
    facts: SwarmFacts,
    rows: charts.Series,
    agreed: charts.Series,
    whole: charts.Series,
    staleness: Counter[int],
) -> None:
    """Write it (PNG, 1400 x 560); the series are those of ``charts.loss``. Raises ``OSError``."""
    picture = Figure(figsize=(14, 5.6), dpi=100)
    FigureCanvasAgg(picture)
    picture.set_layout_engine("constrained", w_pad=0.12, h_pad=0.1)
    left, right = picture.subplots(1, 2, width_ratios=(1.75, 1))
    start = min((row[0] for row in (*rows, *agreed)), default=0.0)
    place = charts.column("loss")
    for found, colour, style, name in (
        (rows, charts.ORANGE, "-", "training, mean of the peers"),
        (agreed, charts.BLUE, "o", charts.HELD_OUT),
        (whole, charts.PURPLE, "D", charts.WHOLE),
    ):
        if found:
            minutes = [(row[0] - start) / 60 for row in found]
            loss = [row[place] for row in found]
            left.plot(minutes, loss, style, color=colour, label=name)
            left.legend(frameon=False, fontsize=12)
    values = sorted(staleness)[:32]
    total = staleness.total() or 1
    at = [min(value, 2**31) for value in values]
    right.bar(at, [100 * staleness[value] / total for value in values], color=charts.GREEN)
    right.set_xlim(-0.75, max([3, *at]) + 0.75)
    right.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    for axes, title, across, up in (
        (left, f"Loss, {facts.loss_unit}", "minutes", ""),
        (right, f"Staleness, mean {figure(facts.staleness_mean, 2)}", "outer steps behind", "updates (%)"),
    ):
        axes.set_title(title, loc="left", fontsize=13)
        axes.set_xlabel(across, fontsize=13)
        axes.set_ylabel(up, fontsize=13)
        axes.grid(True, axis="y", color="#DDDDDD")
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    picture.savefig(path, format="png")
