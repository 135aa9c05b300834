"""Training over internet lines: four peers in network namespaces, ours and hivemind's own Optimizer.

    python benchmarks/wan.py [--cases dsl transatlantic slow] [--seconds 100] [--hivemind]

Needs root (see ``p2p-co2 rehearse``). The model's exchange takes half of a round at the line's upload rate at
best (the floor of ALGORITHMS section 5), in case ``slow`` twice the round. Steps have a fixed length
(``wan_recipe``), since four peers share two cores: utilisation is what the network leaves of the wall time
between the first rounds and the last. Prints JSON; ``bars`` says what each figure should be.

``--hivemind`` runs the same recipe, data and lines with hivemind 1.1.12's ``Optimizer`` afterwards: tokens
per second, utilisation, and the held-out loss at equal wall time (ours: of the agreed parameters).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bootstrap import netns
from bootstrap.internet import Internet
from bootstrap.local_swarm import Child, LocalSwarm, environment
from p2p_co2.profiles import PROFILES

ROOT = Path(__file__).resolve().parents[1]
PEERS, STEP_S, WIDTH, PARTS, BATCH = 4, 0.5, 512, 4, 512
BITS_PER_VALUE = 4.25
"""int4: four bits, and a scale of 32 bits for 128 values."""
CASES: dict[str, dict[str, Any]] = {
    "dsl": {"profile": "dsl", "loss": 0.01, "rows": 8192, "floor": 0.5, "utilisation": 0.97, "line": 0.8},
    "transatlantic": {
        "profile": "transatlantic", "loss": None, "rows": 16384, "floor": 0.5,
        "utilisation": 0.95, "line": 0.8,
    },
    "slow": {"profile": "dsl", "loss": 0.01, "rows": 8192, "floor": 2.0, "utilisation": 0.95, "line": None},
}  # fmt: skip


def floor_s(case: dict[str, Any]) -> float:
    """Seconds of a full exchange at the line's upload rate."""
    values = case["rows"] * WIDTH * PARTS
    return float(2 * (1 - 1 / PEERS) * values * BITS_PER_VALUE / PROFILES[case["profile"]].up_bits_per_s)


def options_of(case: dict[str, Any]) -> dict[str, Any]:
    return {"rows": case["rows"], "width": WIDTH, "parts": PARTS, "step_s": STEP_S}


def ours(case: dict[str, Any], seconds: float, folder: Path) -> dict[str, Any]:
    """A rehearsal through the console script."""
    round_s = floor_s(case) / case["floor"]
    options = "\n".join(f"{key} = {value}" for key, value in options_of(case).items())
    (folder / "run.toml").write_text(
        f'name = "wan"\nrecipe = "{ROOT}/benchmarks/wan_recipe.py:make"\nfragments = 4\n'
        f"[recipe_options]\n{options}\n[clock]\nround_s = {round_s:.3f}\n"
    )
    command = [sys.executable, "-m", "bootstrap", "rehearse", str(folder / "run.toml"), "--peers", str(PEERS)]
    command += ["--profile", case["profile"], "--nat", "open", "--seconds", str(seconds)]
    command += ["--folder", str(folder / "run")]
    if case["loss"] is not None:
        command += ["--loss", str(case["loss"])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"failed": (done.stdout + done.stderr)[-2000:]}
    summary = json.loads((folder / "run" / "summary.json").read_text())
    used = summary["steady"]["utilisation"]
    exchanges = summary["exchanges"]
    return {
        "round_s": round(round_s, 2),
        "floor_s": round(floor_s(case), 2),
        "utilisation_steady": min(used.values(), default=None),
        "utilisation_whole": summary["utilisation"]["mean"],
        "line_share_median": exchanges["line_share"]["median"],
        "goodput_share_median": exchanges["goodput_share"]["median"],
        "exchange_s": exchanges["duration_s"],
        "exchanging_share": exchanges["exchanging_share"],
        "while_exchanging": exchanges["while_exchanging"],
        "staleness": summary["staleness"],
        "committed": summary["rounds"]["committed"],
        "aborted": summary["rounds"]["abort_reasons"],
        "tokens_per_s": summary["steady"]["tokens_per_s"],
        "loss": summary["loss"],
        "forwarder": summary["forwarder"],
        "bars": {"utilisation_steady": case["utilisation"], "line_share_median": case["line"]},
    }


def theirs(case: dict[str, Any], seconds: float, folder: Path) -> dict[str, Any]:
    """hivemind's Optimizer on the same lines."""
    profile = PROFILES[case["profile"]]
    loss = profile.loss if case["loss"] is None else case["loss"]
    line = replace(profile, nat="open", loss=loss)
    round_s = floor_s(case) / case["floor"]
    job = {
        "recipe": f"{ROOT}/benchmarks/wan_recipe.py:make",
        "options": options_of(case),
        "seconds": seconds,
        "target_batch_size": max(1, round(PEERS * BATCH * round_s / STEP_S)),
        "matchmaking_s": 3.0,
        "averaging_timeout_s": 60.0,
        "begin_at": time.time() + 40.0,
    }
    (folder / "job.json").write_text(json.dumps(job))
    workers: list[Child] = []
    with Internet(netns.examine(), folder, seed=0) as internet, LocalSwarm(folder, grace_s=8) as swarm:
        for index in range(PEERS):
            internet.add(f"peer{index}", line)
        internet.start()
        seed = "-"
        for index in range(PEERS):
            machine = internet.machines[f"peer{index}"]
            script = [sys.executable, str(ROOT / "benchmarks" / "wan_hivemind.py"), str(folder), str(index)]
            command = machine.command([*script, machine.address, seed, str(folder / "job.json")])
            workers.append(swarm.start(f"peer{index}", command, environment()))
            if index == 0:
                seed = json.loads("{" + swarm.wait_for_line(workers[0], "{", 90))["maddr"]
        swarm.wait(workers, 60 + seconds + 60)
        ends = [_last_figures(worker) for worker in workers]
    told = [end for end in ends if end]
    if len(told) < PEERS or any("loss" not in end for end in told):
        return {"failed": [worker.last_lines(5) for worker in workers], "figures": told}
    return {
        "tokens_per_s": round(sum(end["tokens"] / end["wall_s"] for end in told), 1),
        "utilisation": round(min(end["train_s"] / end["wall_s"] for end in told), 4),
        "loss_end": round(sum(end["loss"] for end in told) / len(told), 5),
        "epochs": [end["epoch"] for end in told],
    }


def _last_figures(worker: Child) -> dict[str, Any]:
    lines = [
        line for line in worker.log.read_text(errors="replace").splitlines() if line.startswith('{"tokens')
    ]
    return dict(json.loads(lines[-1])) if lines else {}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=list(CASES))
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--hivemind", action="store_true")
    parser.add_argument("--only-hivemind", action="store_true")
    options = parser.parse_args()
    report: dict[str, Any] = {"at": time.strftime("%F %R"), "peers": PEERS, "step_s": STEP_S}
    for name in options.cases:
        case = CASES[name]
        report[name] = {}
        if not options.only_hivemind:
            with tempfile.TemporaryDirectory() as folder:
                report[name]["ours"] = ours(case, options.seconds, Path(folder))
        if options.hivemind or options.only_hivemind:
            with tempfile.TemporaryDirectory() as folder:
                report[name]["hivemind"] = theirs(case, options.seconds, Path(folder))
        print(name, json.dumps(report[name]), file=sys.stderr)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
