"""What the planner foretold against what a real swarm did. Prints JSON.

    python benchmarks/plan_accuracy.py [--cases loopback dsl transatlantic] [--seconds 60] [--folder DIR]
    python benchmarks/plan_accuracy.py --runs runs/demo-... runs/rehearsal-...    # runs that are there

Each case is a run of the console script with four peers on this machine: ``demo`` on loopback, else
``rehearse`` over emulated lines of a profile (root for real packets). Into the forecast go the run file, the
links and the inner step that the run itself shows (``train_s / inner_steps``: peers share the cores, so a
step measured alone would be another one); bytes, round time, delay, staleness and utilisation come out.

``ratio`` is predicted over actual; the delay counts outer steps that training did not stand still for. The
bar is 10 % on utilisation: of the run as it is, and ``once under way``, which is foretold for a run without
end and measured after the first rounds and before the flush. Hours of training are like that; a minute is
mostly its ends.

Price: one run per case; a busy machine shows in the round time, which on loopback is mostly waiting for
processors and for the others' steps to end.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from p2p_co2.config import read_run_config
from p2p_co2.planning.exchange import Link
from p2p_co2.planning.forecast import forecast, setting_of
from p2p_co2.planning.profiles import PROFILES
from p2p_co2.recipes import load_recipe
from p2p_co2.tensors.fragments import plan_fragments

PEERS = 4
LOOPBACK = Link(up_bytes_per_s=200e6, down_bytes_per_s=200e6, round_trip_s=0.001)
"""gRPC with TLS between processes of this machine (``docs/LOG.md``)."""
CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")
BAR = 0.1
WIDER = 'name = "accuracy"\n[recipe_options]\nwidth = 256\nlayers = 6\nheads = 4\n[clock]\nround_s = 6.0\n'
"""4.8 million parameters: on dsl the floor is a quarter of a round."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", default=["loopback", "dsl"], choices=["loopback", *PROFILES])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--folder", type=Path, help="keep the runs here")
    parser.add_argument("--runs", nargs="+", type=Path, help="folders of demos or rehearsals; runs no case")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="p2p-co2-accuracy-") as temporary:
        folder = options.folder or Path(temporary)
        if options.runs:
            cases = {str(run): compare(run) for run in options.runs}
        else:
            cases = {case: measure(case, options.seconds, folder / case) for case in options.cases}
    machine = {"platform": platform.platform(), "cpus": os.cpu_count(), "load": os.getloadavg()}
    print(json.dumps({"at": time.strftime("%F %R"), **machine, "bar": BAR, "cases": cases}, indent=2))


def measure(case: str, seconds: float, folder: Path) -> dict[str, Any]:
    """Run a case and hold the forecast against its summary."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    arguments = ["demo", "--round-s", "5", "--no-board"]
    if case != "loopback":
        run_file = folder.parent / f"{case}.toml"
        run_file.write_text(WIDER, encoding="utf-8")
        arguments = ["rehearse", str(run_file), "--profile", case, "--nat", "open"]
    arguments += ["--peers", str(PEERS), "--seconds", str(seconds), "--folder", str(folder)]
    command = [sys.executable, "-P", "-m", "p2p_co2.cli", *arguments]
    root = str(Path(__file__).resolve().parents[1])
    status = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": root}, stdout=sys.stderr, check=False
    ).returncode
    return {"status": status, **compare(folder)}


def links_of(summary: dict[str, Any]) -> list[Link]:
    """One per peer: the lines that a rehearsal emulated, else loopback. Where this machine's TCP is BBR,
    which does not slow down for losses as the planner's formula has it, they have none."""
    lines = summary.get("lines") or {}
    is_bbr = CONGESTION.read_text(encoding="ascii").strip() == "bbr"
    return [
        Link(
            up_bytes_per_s=line["up_bits_per_s"] / 8,
            down_bytes_per_s=line["down_bits_per_s"] / 8,
            round_trip_s=2e-3 * line["latency_ms"],
            loss=0.0 if is_bbr else line["loss"],
        )
        for line in lines.values()
    ] or [LOOPBACK] * summary["peers"]


def compare(folder: Path) -> dict[str, Any]:
    """Predicted, actual and their ratio, figure by figure; the step that went in."""
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    run = read_run_config(folder / "run.toml")
    peers = summary["peer_table"].values()
    step_s = statistics.mean(peer["train_s"] / peer["inner_steps"] for peer in peers)
    model = load_recipe(run.recipe, run.recipe_options, run.seed).model
    fragments = [fragment.numel for fragment in plan_fragments(model, run.fragments).fragments]
    setting = setting_of(run, fragments, step_s, links_of(summary))
    shown, under_way = forecast(setting), summary.get("steady", {}).get("utilisation")
    predicted = {
        "up_bytes_per_peer": shown.run_up_bytes,
        "round_s": shown.largest.slowest_member_s,
        "sync_delay_steps": float(shown.delay_steps),
        "staleness": shown.flow.staleness,
        "utilisation": shown.utilisation,
        "utilisation_once_under_way": forecast(replace(setting, rounds=0)).utilisation,
        "encoded_bits": shown.bits_per_value,
    }
    actual = {
        "up_bytes_per_peer": statistics.mean(summary["bytes"]["up_per_peer"].values()),
        "round_s": summary["rounds"]["duration_s"]["mean"],
        "sync_delay_steps": mean_delay(summary["sync_delay_steps"]["histogram"]),
        "staleness": summary["staleness"]["mean"],
        "utilisation": summary["utilisation"]["mean"],
        "utilisation_once_under_way": statistics.mean(under_way.values()) if under_way else None,
        "encoded_bits": summary["bytes"]["encoded_bits_per_parameter"],
    }
    ratio = {name: round(predicted[name] / actual[name], 3) for name in predicted if actual[name]}
    return {
        "parameters": sum(fragments),
        "step_s": round(step_s, 4),
        "floor_s": round(shown.floor_s, 3),
        "round_length_s": run.clock.round_s,
        "predicted": {name: round(value, 4) for name, value in predicted.items()},
        "actual": actual,
        "ratio": ratio,
        "within_bar": {name: abs(of - 1) <= BAR for name, of in ratio.items() if name.startswith("util")},
        "rounds": {key: summary["rounds"][key] for key in ("committed", "aborted", "partial")},
    }


def mean_delay(histogram: dict[str, int]) -> float | None:
    """Over outer steps that were not applied in the very step that sent them, as first and last ones are."""
    counted = {int(steps): times for steps, times in histogram.items() if int(steps)}
    total = sum(counted.values())
    return round(sum(steps * times for steps, times in counted.items()) / total, 4) if total else None


if __name__ == "__main__":
    main()
