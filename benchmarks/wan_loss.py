"""Held-out loss over wall time on one internet line: four peers of ours, then of hivemind's own Optimizer.

    python benchmarks/wan_loss.py ours hivemind [--seconds 100] [--folder DIR] [--times 1.4]
    python benchmarks/wan_loss.py --folder DIR       # only the report of sides that have run

Needs root (see ``wan.py``). The byte GPT on the embedded text (``wan_gpt_recipe``), on dsl with 1 % loss, the
rates smaller by as much as the model is smaller than that of ``wan.py``, so that an exchange takes half of a
round at best. Loss: ours of the agreed parameters, as the peers measured it on the way and from their
checkpoints; hivemind's of every peer's own. Wall time counts from the first inner step; what measuring takes
is left out, for both. Both have the recipe's AdamW; hivemind's takes one step per round, on the mean gradient
of all peers, and gets the learning rate that ``wan_learning_rate.py`` finds best for that.

A side takes about two minutes more than ``--seconds``, and writes its figures into the folder; the report
puts both beside each other: tokens per second, utilisation, and the loss at equal times.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import wan
from p2p_co2.telemetry.events import AgreedMeasured, CheckpointSaved, Progress
from p2p_co2.telemetry.journal import read_events
from p2p_co2.trained import Trained

VALUES, BATCH, STEP_S = 1_269_920, 8, 0.5
MEASURE_EVERY_S = 5.0
SCALE = VALUES / (8192 * wan.WIDTH * wan.PARTS)
CASE: dict[str, Any] = {
    "profile": "dsl", "loss": 0.01, "fragments": 2, "step_s": STEP_S, "floor": 0.5, "scale": SCALE,
    "values": VALUES, "batch": BATCH, "recipe": f"{wan.ROOT}/benchmarks/wan_gpt_recipe.py:make",
    "options": {"step_s": STEP_S, "batch": BATCH}, "measure_every_s": MEASURE_EVERY_S,
    "utilisation": 0.97, "line": 0.8,
}  # fmt: skip
Curve = list[tuple[float, float]]
"""(wall seconds, held-out loss in nats per byte)"""


def our_curve(journal: Path) -> Curve:
    """What all peers measured of the agreed parameters, and what their last checkpoints hold, by that peer's
    wall clock."""
    clocks: dict[str, tuple[float, float]] = {}
    curve: Curve = []
    for event in sorted(read_events(journal), key=lambda event: event.at):
        if isinstance(event, Progress) and event.wall_s:
            clocks[event.peer] = (event.at, event.wall_s)
        elif isinstance(event, AgreedMeasured) and event.peer in clocks:
            at, wall_s = clocks[event.peer]
            curve.append((wall_s + event.at - event.duration_s - at, event.loss))
        elif isinstance(event, CheckpointSaved) and event.peer in clocks and Path(event.path).exists():
            at, wall_s = clocks[event.peer]
            loss = Trained.load(Path(event.path), CASE["recipe"]).held_out_loss()
            curve.append((wall_s + event.at - event.duration_s - at, loss))
    return sorted(curve)


def at_time(curve: Curve, wall_s: float) -> float | None:
    """The newest loss known at a time; None before the first."""
    known = [loss for at, loss in curve if at <= wall_s]
    return round(known[-1], 4) if known else None


def report(sides: dict[str, Any]) -> dict[str, Any]:
    """The three measures side by side."""
    table: dict[str, Any] = {}
    for name, side in sides.items():
        if "failed" in side:
            table[name] = side
            continue
        table[name] = {
            "at": side["at"], "load": side["load"], "tokens_per_s_steady": side["tokens_per_s_steady"],
            "utilisation_steady": side["utilisation_steady"], "training": side["training"],
        }  # fmt: skip
    curves = {name: side["curves"] for name, side in sides.items() if "curves" in side}
    ends_s = min((max(at for curve in side for at, _ in curve) for side in curves.values()), default=0.0)
    rows = []
    for at in range(20, int(ends_s) + 1, 10):
        row: dict[str, Any] = {"wall_s": at}
        for name, side in curves.items():
            losses = [loss for curve in side if (loss := at_time(curve, at)) is not None]
            row[name] = losses[0] if len(side) == 1 and losses else losses
            if len(losses) > 1:
                row[f"{name} median"] = round(statistics.median(losses), 4)
        rows.append(row)
    return {"sides": table, "held_out_loss": rows}


def play(side: str, seconds: float, times: float, folder: Path) -> dict[str, Any]:
    at, load = time.strftime("%F %R"), os.getloadavg()[0]
    place = folder / f"{side}-files"
    place.mkdir()
    if side == "ours":
        told = wan.ours(CASE, seconds, place)
        if "failed" not in told:
            told["tokens_per_s_steady"] = sum_of(told["tokens_per_s_steady"])
            told["curves"] = [our_curve(place / "run" / "events.jsonl")]
    else:
        told = wan.theirs({**CASE, "learning_rate_times": times}, seconds, place)
    return {"at": at, "load": load, **told}


def sum_of(figure: Any) -> float:
    """Of all peers, if it is told by peer."""
    return float(sum(figure.values())) if isinstance(figure, dict) else float(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sides", nargs="*", choices=["ours", "hivemind", []])
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--times", type=float, default=1.4)
    parser.add_argument("--folder", type=Path, default=Path("wan-loss"))
    options = parser.parse_args()
    folder = options.folder.resolve()  # rehearsals run elsewhere
    folder.mkdir(parents=True, exist_ok=True)
    for side in options.sides:
        told = play(side, options.seconds, options.times, folder)
        (folder / f"{side}.json").write_text(json.dumps(told, indent=2))
    kept = [path for side in ("ours", "hivemind") if (path := folder / f"{side}.json").exists()]
    print(json.dumps(report({path.stem: json.loads(path.read_text()) for path in kept}), indent=2))


if __name__ == "__main__":
    main()
