"""Compute utilisation over bandwidth, as a picture: methods that wait beside this run.

The curves are those of ``planning.simulator`` (no latency, no loss), so they compare methods; what is
expected on the plan's link is in its table. Colours are Okabe and Ito's (2008), told apart by colour-blind
readers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from p2p_co2.codec_specs import SPECS
from p2p_co2.errors import EnvironmentFault
from p2p_co2.planning.advice import Advice
from p2p_co2.planning.forecast import Setting
from p2p_co2.planning.simulator import Job, utilisation

COLOURS = ("#D55E00", "#E69F00", "#56B4E9", "#0072B2", "#009E73")
INK, FAINT = "#222222", "#DDDDDD"


def draw_plan(name: str, setting: Setting, advice: Advice, path: Path) -> None:
    """Write the picture (PNG) of run ``name`` to ``path``. Raises ``EnvironmentFault`` if it cannot be."""
    figure = Figure(figsize=(10, 5.6), dpi=100)
    FigureCanvasAgg(figure)
    figure.set_layout_engine("constrained")
    axes = figure.add_subplot()
    bits = [10 ** (4 + 7 * point / 60) for point in range(61)]  # 10 kbit/s to 100 Gbit/s
    curves = jobs_of(setting)
    if advice.setting != setting:
        curves["shortest round"] = _overlapped(advice.setting)
    for colour, (method, job) in zip(COLOURS, curves.items(), strict=False):
        busy = [100 * utilisation(job, rate, 10) for rate in bits]  # the wait for the last is not seen
        axes.plot(bits, busy, color=colour, linewidth=2, label=method)
    slowest = 8 * min(min(link.up_bytes_per_s, link.down_bytes_per_s) for link in setting.links)
    axes.axhline(
        100 * advice.target, color=INK, linewidth=1, linestyle=":", label=f"target {advice.target:.0%}"
    )
    axes.axvline(
        slowest, color=INK, linewidth=1, linestyle="--", label=f"slowest link, {slowest / 1e6:.3g} Mbit/s"
    )
    axes.set_xscale("log")
    axes.set_xlabel("bandwidth of a peer, bit/s")
    axes.set_ylabel("compute utilisation (%)")
    axes.set_ylim(0, 103)
    axes.grid(True, color=FAINT, linewidth=0.8)
    figure.legend(frameon=False, loc="outside lower center", ncols=3, fontsize=9)
    what = f"{setting.parameters:,} parameters, {len(setting.links)} peers, step {setting.step_s:.3g} s"
    axes.set_title(f"{name}: {what}", loc="left", color=INK)
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise EnvironmentFault(f"cannot write the picture {path}: {error.strerror}") from None


def jobs_of(setting: Setting) -> dict[str, Job]:
    """The methods to compare, by the words of the legend."""
    own = _overlapped(setting)
    steps = max(1, round(setting.round_s / setting.step_s))
    diloco = replace(own, bits_per_value=32, fragments=1, delay_steps=0)
    return {
        "data-parallel, fp32": replace(diloco, step_s=setting.step_s, round_steps=1),
        f"DiLoCo, fp32, every {steps} steps": diloco,
        f"{own.fragments} fragments, {setting.codec}, waiting": replace(own, delay_steps=0),
        "this run: goes on for up to a round": own,
    }


def _overlapped(setting: Setting) -> Job:
    """The setting as a job that waits only for answers that are a round late."""
    count = len(setting.fragments)
    steps = max(count, round(setting.round_s / setting.step_s))
    unit = max(1, steps // 5000)  # in units of several steps the curve is the same, and sooner there
    round_steps = max(count, round(steps / unit))
    return Job(
        parameters=setting.parameters,
        layers=count * -(-12 // count),  # at least twelve
        step_s=setting.round_s / round_steps,
        bits_per_value=SPECS[setting.codec].bits,
        round_steps=round_steps,
        fragments=count,
        delay_steps=round_steps - 1,
        peers=max(2, len(setting.links)),
    )
