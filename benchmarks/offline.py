"""What is foretold, played on virtual time, and kept by a board: no lines, no root.

    python benchmarks/offline.py plan [--cases loopback dsl] [--seconds 60]
    python benchmarks/offline.py storms [--seeds 1 200]
    python benchmarks/offline.py board

``plan``: the planner's forecast against a run of the console script with four peers, ``demo`` on loopback or
``rehearse`` with carriers slowed to a profile. Into the forecast go the run file, the links and the inner
step that the run shows. ``ratio`` is predicted over actual. The bar is 10 % on utilisation, of the run as it
is and ``once under way``: after the first rounds and before the flush.

``storms``: so many simulated storms of 32 peers, all faults at once: laws broken, and seconds of a core.

``board``: a week of 64 peers as a board keeps it, its size and the time to open it (about 2 min); and the
fold and the facts of 512 peers, the share of a core at one update a second."""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from common import ROOT, Figures, against, command, folder_of, parser_of, run

from monitoring.history import MEASURES, SWARM, Batch, BoardHistory, Happening
from monitoring.model import Model, Recorder
from p2p_co2.config import read_run_config
from p2p_co2.planning.exchange import LinkFigures
from p2p_co2.planning.forecast import forecast, setting_of
from p2p_co2.planning.profiles import PROFILES
from p2p_co2.recipes import load_recipe
from p2p_co2.simnet import EventLog, VirtualSwarm
from p2p_co2.simnet.campaign import storm_settings
from p2p_co2.tensors.fragments import plan_fragments
from tests.made_swarm import MadeFeed, MadeSwarm, peer_id

# ---- the planner

PEERS = 4
LOOPBACK = LinkFigures(up_bytes_per_s=200e6, down_bytes_per_s=200e6, round_trip_s=0.001)
"""gRPC with TLS between processes of this machine (``docs/LOG.md``)."""
BAR = 0.1
WIDER = 'name = "accuracy"\n[recipe_options]\nwidth = 256\nlayers = 6\nheads = 4\n[clock]\nround_s = 6.0\n'
"""4.8 million parameters: on dsl the floor is a quarter of a round."""


def plan(options: argparse.Namespace) -> Figures:
    """The planner's forecast against real swarms."""
    answer: Figures = {}
    for case in options.cases:
        with folder_of(options.folder, "plan") as folder:
            answer[case] = _played(case, options.seconds, folder / case)
    return answer


def _played(case: str, seconds: float, folder: Path) -> Figures:
    """Run a case and hold the forecast against its summary."""
    arguments = ["demo", "--round-s", "5", "--no-board"]
    if case != "loopback":
        run_file = folder.parent / f"{case}.toml"
        run_file.write_text(WIDER, encoding="utf-8")
        arguments = ["rehearse", str(run_file), "--profile", case]
    arguments += ["--peers", str(PEERS), "--seconds", str(seconds), "--folder", str(folder)]
    command = [sys.executable, "-P", "-m", "p2p_co2.cli", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    status = subprocess.run(command, env=environment, stdout=sys.stderr, check=False).returncode
    return {"status": status, **compare(folder)}


def links_of(summary: Mapping[str, Any]) -> list[LinkFigures]:
    """One per peer: its line of the rehearsal, else loopback. A slowed carrier goes on at its rate after a
    lost packet, so they have no loss."""
    lines = (summary.get("lines") or {}).values()
    return [
        LinkFigures(
            up_bytes_per_s=line["up_bits_per_s"] / 8, down_bytes_per_s=line["down_bits_per_s"] / 8,
            round_trip_s=2e-3 * line["latency_ms"], loss=0.0,
        )
        for line in lines
    ] or [LOOPBACK] * summary["peers"]  # fmt: skip


def compare(folder: Path) -> Figures:
    """Predicted, actual and their ratio, figure by figure; the step that went in."""
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    settings = read_run_config(folder / "run.toml")
    peers = summary["peer_table"].values()
    step_s = fmean(peer["train_s"] / peer["inner_steps"] for peer in peers)
    model = load_recipe(settings.recipe, settings.recipe_options, settings.seed).model
    fragments = [fragment.numel for fragment in plan_fragments(model, settings.fragments).fragments]
    setting = setting_of(settings, fragments, step_s, links_of(summary))
    shown, steady = forecast(setting), summary.get("steady", {}).get("utilisation")
    under_way = fmean(steady.values()) if steady else None
    both = {
        "up_bytes_per_peer": (shown.run_up_bytes, fmean(summary["bytes"]["up_per_peer"].values())),
        "round_s": (shown.largest.slowest_member_s, summary["rounds"]["duration_s"]["mean"]),
        "sync_delay_steps": (shown.delay_steps, mean_delay(summary["sync_delay_steps"]["histogram"])),
        "staleness": (shown.flow.staleness, summary["staleness"]["mean"]),
        "utilisation": (shown.utilisation, summary["utilisation"]["mean"]),
        "utilisation_once_under_way": (forecast(replace(setting, rounds=0)).utilisation, under_way),
        "encoded_bits": (shown.bits_per_value, summary["bytes"]["encoded_bits_per_parameter"]),
    }  # fmt: skip
    ratio = {name: round(foretold / actual, 3) for name, (foretold, actual) in both.items() if actual}
    return {
        "parameters": sum(fragments), "step_s": round(step_s, 4), "floor_s": round(shown.floor_s, 3),
        "round_length_s": settings.clock.round_s,
        "predicted": {name: round(foretold, 4) for name, (foretold, _) in both.items()},
        "actual": {name: actual for name, (_, actual) in both.items()}, "ratio": ratio,
        "within_bar": {name: abs(of - 1) <= BAR for name, of in ratio.items() if name.startswith("util")},
        "rounds": {key: summary["rounds"][key] for key in ("committed", "aborted", "partial")},
    }  # fmt: skip


def mean_delay(histogram: dict[str, int]) -> float | None:
    """Over outer steps that were not applied in the very step that sent them, as first and last ones are."""
    counted = {int(steps): times for steps, times in histogram.items() if int(steps)}
    total = sum(counted.values())
    return round(sum(steps * times for steps, times in counted.items()) / total, 4) if total else None


# ---- virtual time


def storms(options: argparse.Namespace) -> Figures:
    """Simulated storms of 32 peers, all faults at once."""
    broken, began_s = list[str](), time.process_time()
    first, last = options.seeds
    for seed in range(first, last + 1):
        result = VirtualSwarm(storm_settings(seed), EventLog(digests=False)).run()
        broken += [f"seed {seed}: {violation}" for violation in result.violations[:3]]
    used_s = (time.process_time() - began_s) * 200 / (last + 1 - first)
    return {"broken": broken, "core_s_of_200": against(used_s, 360.0, at_most=True)}


# ---- a board

BOARD_PEERS, FRAGMENTS, ROUND_S = 64, 4, 60
START = 1_800_000_000.0


def board(options: argparse.Namespace) -> Figures:
    """What a board keeps of a week, and what it costs each second."""
    with folder_of(None) as folder:
        return {"history": history(folder, options.days * 86400), "facts": facts()}


def history(folder: Path, length_s: int) -> Figures:
    """Write so long as a board would have, sample by sample, and open it."""
    path = folder / "board.sqlite"
    kept = BoardHistory(path)
    started_at = time.monotonic()
    names = [*(peer_id(number) for number in range(BOARD_PEERS)), SWARM]
    # A board writes every 2 s. Fine samples live for 20 minutes and 4 hours only, so where they would be gone
    # by the end a minute's step leaves the same rows in the tiers that are kept.
    at = 0
    while at < length_s:
        kept.write(_batch(at, names, with_round=at % ROUND_S < 2))
        left_s = length_s - at
        at += 60 if left_s > 5 * 3600 else 20 if left_s > 1500 else 2
    wrote_s = time.monotonic() - started_at
    kept.close()
    opened_at = time.monotonic()
    again = BoardHistory(path)
    Recorder(Model(MadeFeed(MadeSwarm(0))), again)
    since, until = again.span()
    points = len(again.series(SWARM, since, until))
    rounds, lines = len(again.counted_rounds()), len(again.happenings(60))
    opened_s = time.monotonic() - opened_at
    again.close()
    on_disk = sum(file.stat().st_size for file in folder.iterdir())
    return {
        "on_disk_mb": against(on_disk / 1e6, 200.0, at_most=True),
        "open_s": against(opened_s, 2.0, at_most=True),
        "series_points": points, "rounds": rounds, "lines": lines,
        "writing_s": round(wrote_s, 1), "span_days": round((until - since) / 86400, 2),
    }  # fmt: skip


def _batch(at: int, names: list[str], *, with_round: bool) -> Batch:
    now = START + at
    samples: dict[str, tuple[float, ...]] = {
        name: tuple(float((at * 7 + place * 13 + number) % 9973) for place in range(len(MEASURES)))
        for number, name in enumerate(names)
    }
    if not with_round:
        return Batch(at=now, samples=samples)
    number = at // ROUND_S + 1
    happenings = [
        Happening(now, "round_committed", names[f], f, number,
                  f"exchange {number} of fragment {f} committed: 64 of 64", f"commit {f} {number}")
        for f in range(FRAGMENTS)
    ]  # fmt: skip
    return Batch(
        at=now, samples=samples, happenings=happenings,
        counted_rounds={(f, number) for f in range(FRAGMENTS)},
        counted={name: float(at) for name in names[:-1]},
    )  # fmt: skip


def facts(peers: int = 512) -> Figures:
    """Fold and facts of a large swarm, per second of its time."""
    feed = MadeFeed(MadeSwarm(peers, start_at=START, round_s=30.0))
    feed.is_whole = False
    feed.advance(30)
    model = Model(feed)
    recorder = Recorder(model, BoardHistory(None))
    recorder.follow(START + 30)
    steps, events, used_s = 0, 0, 0.0
    for t in range(30, 60):
        feed.advance(t + 1)
        events += len(feed.news.events)
        before = time.process_time()
        recorder.follow(START + t)
        made = model.facts()
        used_s += time.process_time() - before
        steps += 1
    before = time.process_time()
    text = made.model_dump_json()
    return {
        "peers": made.peers_known, "events_per_s": events / steps, "core_share": round(used_s / steps, 4),
        "api_bytes": len(text), "api_s": round(time.process_time() - before, 4),
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }  # fmt: skip


def main() -> None:
    parser = parser_of(__doc__)
    commands = parser.add_subparsers(required=True)
    made = command(
        commands, "plan", plan, seconds=(60.0, "of a run"), folder=(None, "keep the runs here"),
    )  # fmt: skip
    made.add_argument("--cases", nargs="+", default=["loopback", "dsl"], choices=["loopback", *PROFILES])
    command(commands, "storms", storms, seeds=([1, 200], "first and last"))
    command(commands, "board", board, days=(7, "that are kept"))
    run(parser)


if __name__ == "__main__":
    main()
