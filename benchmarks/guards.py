"""The guards of a change: figures of this checkout beside those of another one, medians in one table.

    python benchmarks/guards.py --beside /path/to/other/checkout [--pairs 1] [--only demo flood] [--more]

Each guard is a command that runs as a process of its own, with the virtual environment of its checkout. They
take turns: this one is first in every other pair. Short variants of the benchmarks: about 25 minutes for a
pair of all on two quiet cores. ``--more`` adds those that no release waits for. Lines and the traffic at
rest need root. A checkout that does not know a command gives no figure of it.

Prints the table on stderr and JSON on stdout: the figure's bar, each checkout's median and all its values.
Exit status 1 if a guard of this checkout misses its bar, and if one gave no figure.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import ROOT, Figures, folder_of, note, parser_of, run

BOUND_S = 600.0
"""A command that takes longer gives no figure."""
Keys = tuple[str, ...]
"""From the answer to a figure."""


@dataclass(frozen=True)
class Guard:
    """``figures``: by name, (keys in the answer, bar, whether the bar is the most). ``words``: after the
    interpreter; "FOLDER" is a new folder, whose ``summary.json``, if there is one, is the answer."""

    words: tuple[str, ...]
    figures: dict[str, tuple[Keys, float, bool]]
    more: bool = False


def file(name: str, words: str = "") -> tuple[str, ...]:
    return (f"benchmarks/{name}.py", *words.split())


GUARDS: dict[str, Guard] = {
    "demo": Guard(
        ("-m", "p2p_co2.cli", "demo", "--seconds", "30", "--no-board", "--folder", "FOLDER"),
        {"rounds aborted": (("rounds", "aborted"), 0, True)},
    ),
    "lines": Guard(
        file("wan", "--lines 50 200 --systems ours --seconds 16"),
        {
            "utilisation at 50 Mbit/s": (("50", "ours", "utilisation"), 0.97, False),
            "utilisation at 200 Mbit/s": (("200", "ours", "utilisation"), 0.97, False),
        },
    ),
    "averaging": Guard(
        file("averaging", "round --codecs fp16 --rounds 3 --sides hivemind grpc"),
        {"32 MB, times as fast as hivemind": (
            ("fp16", "grpc", "times_less_than", "total_s", "hivemind"), 3.0, False
        )},
    ),
    "memory": Guard(
        file("peer", "memory --cases int4-keep --repeats 1"),
        {"memory, copies": (("cases", "int4-keep", "copies", "figure"), 4.0, True)},
    ),
    "kills": Guard(
        file("faults", "kills --peers 4 --calm-s 12 --kill-s 30"),
        {
            "others' speed amid kills": (("throughput", "ratio", "figure"), 0.95, False),
            "newcomer, s": (("newcomer_alone", "join_to_contribution_s", "median"), 10.0, True),
        },
    ),
    "storms": Guard(
        file("offline", "storms --seeds 1 10"),
        {"200 storms, core s": (("core_s_of_200", "figure"), 360.0, True)},
    ),
    "control": Guard(
        file("peer", "control --peers 24 --after-s 10 --seconds 15"),
        {"traffic at rest of 24 peers, B/s": (("24", "bytes_per_s"), 12_000, True)},
    ),
    "flood": Guard(
        file("hostile", "flood --pairs 1 --window-s 6"),
        {"speed amid floods": (("tokens_flooded_by_quiet", "figure"), 0.95, False)},
    ),
    "stages": Guard(
        file("pipeline", "kills"),
        {"2 x 2 stages amid kills": (("of_what_is_left", "figure"), 0.8, False)},
    ),
    "codecs": Guard(
        file("pipeline", "codecs --stages 2 --turns 1"),
        {"int8 by fp32, 2 stages": (("2 stages", "int8_by_fp32", "figure"), 1.8, False)},
    ),
    "exposure": Guard(
        file("exposure", "phases --layouts four --pairs 3"),
        {
            "speed with exchange by without": (("four", "ratio"), 0.95, False),
            "held up by communication": (("four", "exposed_share"), 0.01, True),
        },
        more=True,
    ),
    "catchup": Guard(
        file("faults", "catchup --cases one four"),
        {"load from four donors by one": (("four_over_one", "figure"), 3.0, False)}, more=True,
    ),
    "checkpoint": Guard(
        file("peer", "checkpoint --peers 1"),
        {"longest stop for a checkpoint, s": (("1 peers", "stopped_s", "most"), 0.3, True)}, more=True,
    ),
    "step": Guard(
        file("peer", "step --models resnet --pairs 3"),
        {"a step joined by plain": (("resnet", "seconds", "figure"), 1.02, True)}, more=True,
    ),
    "plan": Guard(
        file("offline", "plan --cases loopback"),
        {"utilisation foretold by actual": (("loopback", "ratio", "utilisation"), 1.1, True)}, more=True,
    ),
}  # fmt: skip


def ask(checkout: Path, guard: Guard) -> dict[str, float]:
    """What a checkout answers: its figures by name; those that it does not give are left out."""
    name = " ".join(guard.words[:4])
    with folder_of(None) as folder:
        place = folder / "run"
        words = (str(place) if word == "FOLDER" else word for word in guard.words)
        command = [str(checkout / ".venv" / "bin" / "python"), *words]
        try:
            done = subprocess.run(
                command, cwd=checkout, capture_output=True, text=True, timeout=BOUND_S, check=False
            )
            summary = place / "summary.json"
            answer = json.loads(summary.read_text() if summary.exists() else done.stdout)
        except (subprocess.TimeoutExpired, ValueError) as error:
            note(name, f"gave no figure: {error}")
            return {}
    if done.returncode:
        note(name, f"ended with {done.returncode}:", done.stderr[-1000:])
        return {}
    read = {figure: _at(answer, keys) for figure, (keys, _, _) in guard.figures.items()}
    return {figure: value for figure, value in read.items() if value is not None}


def _at(answer: Any, keys: Keys) -> float | None:
    for key in keys:
        if not isinstance(answer, Mapping) or key not in answer:
            return None
        answer = answer[key]
    return float(answer) if isinstance(answer, int | float) else None


def measure(options: argparse.Namespace) -> dict[str, Figures]:
    """By figure's name: bar, and of each checkout the median and all values."""
    checkouts = {"here": ROOT} | ({"beside": options.beside.resolve()} if options.beside else {})
    chosen = options.only or [name for name, guard in GUARDS.items() if options.more or not guard.more]
    table: dict[str, Figures] = {}
    for name in chosen:
        guard, values = GUARDS[name], {side: dict[str, list[float]]() for side in checkouts}
        for pair in range(options.pairs):
            for side in list(checkouts)[:: 1 if pair % 2 == 0 else -1]:
                for figure, value in ask(checkouts[side], guard).items():
                    values[side].setdefault(figure, []).append(value)
        for figure, (_, bar, at_most) in guard.figures.items():
            row: Figures = {"bar": bar, "bar_is_the_most": at_most}
            for side in checkouts:
                each = values[side].get(figure, [])
                row[side] = round(statistics.median(each), 4) if each else None
                row[f"{side}_all"] = each
            own = row["here"]
            row["met"] = own is not None and (own <= bar if at_most else own >= bar)
            table[figure] = row
            note(f"{figure:36}{bar!s:>8}", *(f"{side} {row[side]!s:>10}" for side in checkouts),
                 "" if row["met"] else "missed")  # fmt: skip
    return table


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--beside", type=Path, help="another checkout, with its .venv")
    parser.add_argument("--pairs", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=tuple(GUARDS))
    parser.add_argument("--more", action="store_true", help="those that no release waits for, too")
    parser.set_defaults(run_it=lambda options: {"guards": measure(options)})
    if not all(row["met"] for row in run(parser)["guards"].values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
