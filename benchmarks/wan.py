"""Training over internet lines: four peers in network namespaces, ours and hivemind's own Optimizer.

    python benchmarks/wan.py [--cases dsl transatlantic slow] [--seconds 100] [--hivemind] [--folder DIR]
                             [--scale 0.2] [--fragments 1]

Needs root (see ``p2p-co2 rehearse``). The model's exchange takes half of a round at the line's upload rate at
best (the floor of ALGORITHMS section 5), in case ``slow`` twice the round. Of a model in two fragments an
exchange on ``transatlantic`` would be over in twelve round trips, so there it is one. Steps have a fixed
length (``wan_recipe``), since four peers share two cores: utilisation is what the network leaves of the wall
time between the first rounds and the last. Prints JSON; ``bars`` says what each figure should be.

``--hivemind`` runs the same recipe, data and lines with hivemind 1.1.12's ``Optimizer`` afterwards, for as
long as ours took from its first step to its end (``--only-hivemind``: for ``--seconds``): tokens per second,
utilisation, and the held-out loss at equal wall time (ours: of the agreed parameters). ``steady`` leaves out
what comes before the first outer step, for both, and for ours what stops training without having to do with
the line, told beside it (``aside_share``: checkpoints, held-out loss); ``training`` leaves out nothing but,
for ours, the wait for the last rounds, which hivemind is given time for as well. hivemind averages
gradients, so its one step per round is given a larger learning rate (``HIVEMIND_LEARNING_RATE_TIMES``).

``line_share``: bytes on the line while an exchange is on; ``transfer_share``: payload alone, from BEGIN until
the last member has all means ("achieved bandwidth during an exchange"); ``goodput_share``: the same with
votes and decision. ``transfer_share_at_most``: of lines that carry all they can from BEGIN to the last mean.

``--scale``: model and line rates smaller by this, latency, loss and the floor's share of the round as they
are: for machines whose cores four peers' bytes at full rate would fill.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bootstrap import netns
from bootstrap.internet import Internet
from bootstrap.local_swarm import Child, LocalSwarm, environment
from p2p_co2.planning.profiles import PROFILES, LinkProfile
from p2p_co2.telemetry.events import Progress
from p2p_co2.telemetry.journal import read_events

ROOT = Path(__file__).resolve().parents[1]
RECIPE = f"{ROOT}/benchmarks/wan_recipe.py:make"
PEERS, WIDTH, PARTS, BATCH = 4, 512, 4, 512
BITS_PER_VALUE = 4.25
"""int4: four bits, and a scale and a bias of 16 bits each for 128 values."""
FRAME_BYTES, FRAMED_BYTES, TLS_RECORD_BYTES, TLS_BYTES = 1514, 1448, 16 << 10, 22
"""A full packet as the line counts it, and what it carries of TCP's stream (RFC 9293 with timestamps); a
record of TLS 1.3 (RFC 8446), and what it costs."""
HIVEMIND_LEARNING_RATE_TIMES = 20.0
"""The best of 1, 10, 20, 40, 54 and 84 (the micro-batches of a round) for the recipe's error over six steps
on mean gradients that are one step old; from 40 on it diverges."""
CASES: dict[str, dict[str, Any]] = {
    "dsl": {
        "profile": "dsl", "loss": 0.01, "rows": 8192, "fragments": 2, "step_s": 0.5, "floor": 0.5,
        "utilisation": 0.97, "line": 0.8,
    },
    "transatlantic": {
        "profile": "transatlantic", "loss": None, "rows": 16384, "fragments": 1, "step_s": 1.0, "floor": 0.5,
        "utilisation": 0.95, "line": 0.8,
    },
    "slow": {
        "profile": "dsl", "loss": 0.01, "rows": 8192, "fragments": 4, "step_s": 0.5, "floor": 2.0,
        "utilisation": 0.95, "line": None,
    },
}  # fmt: skip


def floor_s(case: dict[str, Any]) -> float:
    """Seconds of a full exchange at the line's upload rate."""
    values = case.get("values") or case["rows"] * WIDTH * PARTS
    return float(2 * (1 - 1 / PEERS) * values * BITS_PER_VALUE / line_of(case).up_bits_per_s)


def transfer_share_at_most(case: dict[str, Any]) -> float:
    """By law: headers, each lost packet twice, BEGIN's way to the others and the last mean's."""
    line, fragments = line_of(case), int(case["fragments"])
    transfer_s = floor_s(case) / fragments
    wire = FRAME_BYTES / FRAMED_BYTES * (1 + TLS_BYTES / TLS_RECORD_BYTES) / (1 - line.loss)
    return transfer_s / (wire * transfer_s + 2 * line.latency_ms / 1e3)


def line_of(case: dict[str, Any]) -> LinkProfile:
    """The case's line, without a router that hides anybody."""
    profile, scale = PROFILES[case["profile"]], case["scale"]
    loss = profile.loss if case["loss"] is None else case["loss"]
    up, down = int(scale * profile.up_bits_per_s), int(scale * profile.down_bits_per_s)
    return replace(profile, nat="open", loss=loss, up_bits_per_s=up, down_bits_per_s=down)


def scaled(case: dict[str, Any], scale: float) -> dict[str, Any]:
    """The case with a model and a line smaller by ``scale``."""
    return {**case, "rows": round(scale * case["rows"]), "scale": scale}


def options_of(case: dict[str, Any]) -> dict[str, Any]:
    return case.get("options") or {
        "rows": case["rows"],
        "width": WIDTH,
        "parts": PARTS,
        "step_s": case["step_s"],
        "sparse": case["sparse"],
    }


def ours(case: dict[str, Any], seconds: float, folder: Path) -> dict[str, Any]:
    """A rehearsal through the console script."""
    round_s = floor_s(case) / case["floor"]
    options = "\n".join(f"{key} = {json.dumps(value)}" for key, value in options_of(case).items())
    (folder / "run.toml").write_text(
        f'name = "wan"\nrecipe = "{case.get("recipe", RECIPE)}"\nfragments = {case["fragments"]}\n'
        f"[recipe_options]\n{options}\n[clock]\nround_s = {round_s:.3f}\n"
    )
    command = [sys.executable, "-m", "bootstrap", "rehearse", str(folder / "run.toml"), "--peers", str(PEERS)]
    line = line_of(case)
    command += ["--profile", case["profile"], "--nat", line.nat, "--seconds", str(seconds)]
    command += ["--up-mbit", str(line.up_bits_per_s / 1e6), "--down-mbit", str(line.down_bits_per_s / 1e6)]
    command += ["--loss", str(line.loss), "--folder", str(folder / "run")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"failed": (done.stdout + done.stderr)[-2000:]}
    summary = json.loads((folder / "run" / "summary.json").read_text())
    steady = summary["steady"]
    used = steady["utilisation"]
    aside = {peer: steady["saving_share"][peer] + steady["measuring_share"][peer] for peer in used}
    exchanges = summary["exchanges"]
    return {
        "round_s": round(round_s, 2),
        "floor_s": round(floor_s(case), 2),
        "utilisation_steady": min(used[peer] / (1 - aside[peer]) for peer in used),
        "utilisation_with_all": min(used.values()),
        "aside_share": max(aside.values()),
        "wall_s": max(peer["wall_s"] for peer in summary["peer_table"].values()),
        "training": _training(folder / "run" / "events.jsonl"),
        "line_share": exchanges["line_share"],
        "goodput_share": exchanges["goodput_share"],
        "transfer_share": exchanges["transfer_share"],
        "transfer_share_at_most": round(transfer_share_at_most(case), 3),
        "exchange_s": exchanges["duration_s"],
        "exchanging_share": exchanges["exchanging_share"],
        "while_exchanging": exchanges["while_exchanging"],
        "staleness": summary["staleness"],
        "committed": summary["rounds"]["committed"],
        "aborted": summary["rounds"]["abort_reasons"],
        "tokens_per_s_steady": summary["steady"]["tokens_per_s"],
        "loss": summary["loss"],
        "forwarder": summary["forwarder"],
        "bars": {"utilisation_steady": case["utilisation"], "transfer_share": case["line"]},
    }


def _training(journal: Path) -> dict[str, float]:
    """From the first inner step until the training loop ended, first rounds included: before the last rounds
    are waited for."""
    last = {
        event.peer: event
        for event in read_events(journal)
        if isinstance(event, Progress) and event.phase == "training" and event.inner_steps
    }
    return {
        "wall_s": round(max(event.wall_s for event in last.values()), 1),
        "tokens_per_s": round(sum(event.tokens / event.wall_s for event in last.values()), 1),
        "utilisation": round(min(event.train_s / event.wall_s for event in last.values()), 4),
    }


def theirs(case: dict[str, Any], seconds: float, folder: Path) -> dict[str, Any]:
    """hivemind's Optimizer on the same lines."""
    line, round_s = line_of(case), floor_s(case) / case["floor"]
    job = {
        "recipe": case.get("recipe", RECIPE),
        "options": options_of(case),
        "seconds": seconds,
        "target_batch_size": max(1, round(PEERS * case.get("batch", BATCH) * round_s / case["step_s"])),
        "matchmaking_s": 3.0,
        "averaging_timeout_s": 60.0,
        "next_chunk_timeout_s": 30.0,  # its default, the matchmaking time, ends transfers on such lines
        "learning_rate_times": case.get("learning_rate_times", HIVEMIND_LEARNING_RATE_TIMES),
        "measure_every_s": case.get("measure_every_s", seconds),
        "begin_at": time.time() + 32.0,
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
        moved = {name: up for name, (up, _) in internet.traffic_bytes().items()}
        told = [_figures(worker) for worker in workers]
    if any(not figures or "loss" not in figures[-1] for figures in told):
        return {"failed": [worker.last_lines(5) for worker in workers], "figures": told}
    ends = [figures[-1] for figures in told]
    return {
        "wall_s": round(max(end["wall_s"] for end in ends), 1),
        "training": {
            "tokens_per_s": round(sum(end["tokens"] / end["wall_s"] for end in ends), 1),
            "utilisation": round(min(end["train_s"] / end["wall_s"] for end in ends), 4),
        },
        "utilisation_steady": min(_share(figures, "train_s") for figures in told),
        "tokens_per_s_steady": round(sum(_share(figures, "tokens") for figures in told), 1),
        "loss": [figures[-1]["loss"] for figures in told],
        "curves": [
            [(each["wall_s"], each["loss"]) for each in figures if "loss" in each] for figures in told
        ],
        "steps_taken": [figures[-1]["epoch"] for figures in told],
        "swarm_seen": [figures[-1]["peers"] for figures in told],
        "up_bytes_per_peer": moved,
    }


def _figures(worker: Child) -> list[dict[str, Any]]:
    lines = worker.log.read_text(errors="replace").splitlines()
    return [json.loads(line) for line in lines if line.startswith('{"tokens')]


def _share(figures: list[dict[str, Any]], name: str) -> float:
    """Growth of ``name`` per second since the first outer step."""
    first = next((each for each in figures if each["epoch"]), figures[0])
    seconds = figures[-1]["wall_s"] - first["wall_s"]
    return round((figures[-1][name] - first[name]) / seconds, 4) if seconds else 0.0


@contextmanager
def _folder(kept: Path | None, name: str) -> Iterator[Path]:
    """A new folder for a case, removed afterwards unless it is to be ``kept``."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = kept / name if kept else Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        yield folder


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=list(CASES))
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--folder", type=Path, help="keep our runs here, one folder each")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--fragments", type=int, help="other than the case's own")
    parser.add_argument("--hivemind", action="store_true")
    parser.add_argument("--only-hivemind", action="store_true")
    options = parser.parse_args()
    report: dict[str, Any] = {"at": time.strftime("%F %R"), "peers": PEERS, "scale": options.scale}
    for name in options.cases:
        # hivemind's Optimizer averages dense gradients alone: both sides get them where they are compared.
        case = scaled(CASES[name], options.scale)
        case["sparse"] = not (options.hivemind or options.only_hivemind)
        case["fragments"] = options.fragments or case["fragments"]
        report[name] = {}
        if not options.only_hivemind:
            with _folder(options.folder, name) as folder:
                report[name]["ours"] = ours(case, options.seconds, folder)
            print(name, json.dumps(report[name]), file=sys.stderr, flush=True)
        if options.hivemind or options.only_hivemind:
            with tempfile.TemporaryDirectory() as folder:
                seconds = report[name].get("ours", {}).get("wall_s") or options.seconds
                report[name]["hivemind"] = theirs(case, seconds, Path(folder))
        print(name, json.dumps(report[name]), file=sys.stderr)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
