"""The figures of ``exposure``: from what each peer counted in its windows to ratios of on and off. Pure
arithmetic; what each figure means is told there."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

QUIET = 0.1
"""CPU seconds per second of others, above which a window counts as disturbed."""

Figures = dict[str, Any]


def sum_up(layout: str, answers: Sequence[Figures], others: Sequence[float]) -> Figures:
    """``layout``: in words. ``answers``: per peer, ``windows`` (off, on, off, on, ...), and ``events`` of the
    on windows; ``others``: foreign CPU per window."""
    peers = [answer["windows"] for answer in answers]
    rates = [[window["steps"] / window["wall_s"] for window in windows] for windows in peers]
    swarm = [sum(together) for together in zip(*rates, strict=True)]
    phases = {"off": [w for windows in peers for w in windows[::2]],
              "on": [w for windows in peers for w in windows[1::2]]}  # fmt: skip
    on_by_peer = [windows[1::2] for windows in peers]
    pairs = _on_by_off(swarm)
    quiet = [pair for pair, *both in zip(pairs, others[::2], others[1::2], strict=True) if max(both) <= QUIET]
    equal_cpu = _on_by_off([_steps_per_cpu_s(together) for together in zip(*peers, strict=True)])
    exposed = [_share(windows, "in_step_s") for windows in on_by_peer]
    threads = {phase: _training_thread(windows) for phase, windows in phases.items()}
    own_s = {phase: figures["cpu_and_sleep_ms_per_step"] for phase, figures in threads.items()}
    taken = {phase: _other_threads(windows)["all"] for phase, windows in phases.items()}
    trains = {
        phase: threads[phase]["cpu_share"] / (threads[phase]["cpu_share"] + taken[phase]) for phase in taken
    }
    up_bytes = [sum(w["up_bytes"] for w in ws) / sum(w["wall_s"] for w in ws) for ws in on_by_peer]
    return {
        "layout": layout,
        "steps_per_s": {
            "off": rounded([statistics.mean(rate[::2]) for rate in rates]),
            "on": rounded([statistics.mean(rate[1::2]) for rate in rates]),
        },
        "ratio": round(statistics.median(pairs), 4),
        "ratio_of_pairs": rounded(pairs),
        "ratio_of_quiet_pairs": round(statistics.median(quiet), 4) if quiet else None,
        "ratio_by_peer": rounded([statistics.median(_on_by_off(rate)) for rate in rates]),
        "ratio_at_equal_cpu": round(statistics.median(equal_cpu), 4),
        "ratio_at_equal_cpu_of_pairs": rounded(equal_cpu),
        "ratio_of_cpu_for_training": round(trains["on"] / trains["off"], 4),
        "ratio_without_queue": round(own_s["off"] / own_s["on"], 4),
        "exposed_share": round(max(exposed), 5),
        "exposed_share_by_peer": rounded(exposed, 5),
        "exposed_s_share": round(max(_share(windows, "exposed_s") for windows in on_by_peer), 5),
        "longest_step_call_ms": round(1e3 * max(w["longest_s"] for w in phases["on"]), 1),
        "training_thread": threads,
        "cpu_s_per_s": {phase: _other_threads(windows) for phase, windows in phases.items()},
        "up_bytes_per_s": round(statistics.mean(up_bytes)),
        "events": dict(sum((Counter(answer["events"]) for answer in answers), Counter())),
        "round_s_median": round(statistics.median(s for answer in answers for s in answer["round_s"]), 3),
    }


def _on_by_off(values: Sequence[float]) -> list[float]:
    return [on / off for off, on in zip(values[::2], values[1::2], strict=True)]


def _steps_per_cpu_s(windows: Sequence[Figures]) -> float:
    """Of one window of all peers, with the CPU of all their threads and daemons."""
    cpu_s = sum(value for window in windows for kind, value in window["cpu_s"].items() if kind != "queued")
    steps: int = sum(window["steps"] for window in windows)
    return steps / cpu_s


def _share(windows: Sequence[Figures], key: str) -> float:
    return sum(w[key] for w in windows) / sum(w["wall_s"] for w in windows)


def _training_thread(windows: Sequence[Figures]) -> Figures:
    wall_s, steps = sum(w["wall_s"] for w in windows), sum(w["steps"] for w in windows)
    cpu_s, queued_s = (sum(w["cpu_s"][key] for w in windows) for key in ("training", "queued"))
    return {
        "cpu_share": round(cpu_s / wall_s, 4),
        "queued_share": round(queued_s / wall_s, 4),
        "slept_share": round(1 - (cpu_s + queued_s) / wall_s, 4),
        "cpu_ms_per_step": round(1e3 * cpu_s / steps, 3),
        "cpu_and_sleep_ms_per_step": round(1e3 * (wall_s - queued_s) / steps, 3),
    }


def _other_threads(windows: Sequence[Figures]) -> Figures:
    wall_s = sum(w["wall_s"] for w in windows)
    kinds = sorted(windows[0]["cpu_s"].keys() - {"training", "queued"})
    shares = {kind: sum(w["cpu_s"][kind] for w in windows) / wall_s for kind in kinds}
    return {kind: round(value, 5) for kind, value in {**shares, "all": sum(shares.values())}.items()}


def rounded(values: Sequence[float], digits: int = 4) -> list[float]:
    return [round(value, digits) for value in values]
