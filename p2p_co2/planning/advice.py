"""What to change: the shortest round that links, processors and the target utilisation allow, and what binds.

Of all settings that reach the target the one with the shortest round is advised, the nearest to data-parallel
training, but none of fewer than ``LEAST_STEPS``; fragments so that an answer comes within about a third of a
round, where a delay costs little; one bit a value where the link binds. Twice the meetings are worth more
than twice the bits. It satisfies every bound by the same forecast that it is shown with."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from p2p_co2.codec_specs import SPECS
from p2p_co2.planning.exchange import flow
from p2p_co2.planning.forecast import (
    COPY_BYTES_PER_S,
    STEP_OVERHEAD_S,
    Forecast,
    Setting,
    even_fragments,
    exposed_ends_s,
    forecast,
    time_of,
)

Bounds = dict[str, float]
"""The shortest round (seconds) that each constraint allows, by its name."""
LEAST_STEPS = 8
"""Inner steps of a round: half as many were worth nothing more."""
_LINK_BOUNDS = {"upload", "download", "loss", "latency"}


def swarm_factor(peers: float) -> float:
    """What a lone peer's inner learning rate is multiplied by in a swarm of so many equal peers: the root.
    Adam divides by the noise of each peer's gradient, which is a root of N larger than the mean's. From 16 on
    it grows no more: larger swarms were not measured, and peers are cheap to invent."""
    return math.sqrt(min(max(peers, 1.0), 16.0))


@dataclass(frozen=True, kw_only=True)
class Advice:
    """``is_reached``: whether the given setting reaches the target within one round of staleness.
    ``binding``: the constraint that sets the shortest round of the given setting, ``bounds`` all of them.
    ``setting`` and ``forecast``: what is advised. ``inner_steps``: its round in inner steps, DiLoCo's H."""

    target: float
    is_reached: bool
    binding: str
    bounds: Bounds
    setting: Setting
    inner_steps: int
    advised_binding: str
    forecast: Forecast


def advise(setting: Setting, target: float) -> Advice:
    """The shortest round at which ``setting``'s peers reach ``target`` (0 to below 1), and how it is cut and
    encoded."""
    own = bounds_of(setting, target)
    shown = forecast(setting)
    binding = max(own, key=own.__getitem__)
    best = _shortest(setting, target)
    least = "sign" if len(setting.links) > 2 else "q2"  # of two the heavier one's signs are the mean's
    if binding in _LINK_BOUNDS and SPECS[setting.codec].bits > SPECS[least].bits:
        fewest = replace(setting, codec=least, error_feedback=True)
        best = min(best, _shortest(fewest, target), key=lambda found: found.round_s)
    limits = bounds_of(best, target)
    return Advice(
        target=target,
        is_reached=min(shown.utilisation, shown.utilisation_if_waiting) >= target and not shown.troubles,
        binding=binding,
        bounds=own,
        setting=best,
        inner_steps=max(len(best.fragments), math.ceil(best.round_s / best.step_s)),
        advised_binding=max(limits, key=limits.__getitem__),
        forecast=forecast(best),
    )


def bounds_of(setting: Setting, target: float) -> Bounds:
    """What keeps the round of ``setting`` from being shorter, each alone. Links may be busy for 0.8 of the
    time, since rounds are repeated and peers catch up; the core that does the exchange's tensor work for half
    of it."""
    times = [time_of(setting, values) for values in setting.fragments]
    slowest = max(times, key=lambda time: time.to_apply_s)
    spare = max(1e-6, 1.0 - target - STEP_OVERHEAD_S / setting.step_s)
    bounds: Bounds = {
        slowest.limited_by: math.fsum(time.transfer_s for time in times) / 0.8,
        "latency": slowest.to_apply_s,
        "processor": math.fsum(time.compute_s for time in times) / 0.5,
        "inner step": max(LEAST_STEPS, len(times)) * setting.step_s,
        "copies": 8 * setting.parameters / COPY_BYTES_PER_S / spare,
    }
    if setting.rounds:
        bounds["first and last rounds"] = (
            math.fsum(exposed_ends_s(setting, times, flow(times, setting.round_s))) / setting.rounds / spare
        )
    return bounds


def _shortest(setting: Setting, target: float) -> Setting:
    """The shortest round over the number of fragments; fewer fragments where more do not make it shorter and
    an answer comes within a third of it."""
    found = [_with_fragments(setting, count, target) for count in _counts(setting)]
    least_s = min(candidate.round_s for candidate in found)
    good = [candidate for candidate in found if candidate.round_s <= 1.1 * least_s]
    soon = [
        candidate
        for candidate in good
        if time_of(candidate, max(candidate.fragments)).to_apply_s <= candidate.round_s / 3
    ]
    return (soon or good[-1:])[0]


def _counts(setting: Setting) -> list[int]:
    """Numbers of fragments to try: the given one, and powers of two up to 64 with payloads of 64 KiB or
    more: smaller ones are all messages."""
    values = int(8 * (64 << 10) / SPECS[setting.codec].bits)
    most = max(1, setting.parameters // values)
    return sorted({len(setting.fragments)} | {1 << power for power in range(7) if 1 << power <= most})


def _with_fragments(setting: Setting, count: int, target: float) -> Setting:
    """``setting`` cut into ``count`` fragments, with the shortest round that its bounds allow."""
    if count != len(setting.fragments):
        setting = replace(setting, fragments=even_fragments(setting.parameters, count))
    return replace(setting, round_s=_nice(max(bounds_of(setting, target).values())))


def _nice(seconds: float) -> float:
    """The next number up with two digits."""
    if seconds <= 0:
        return 0.1
    unit = 10.0 ** (math.floor(math.log10(seconds)) - 1)
    return round(math.ceil(seconds / unit - 1e-9) * unit, 9)
