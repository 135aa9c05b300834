"""Every benchmark answers on its smallest size, so that none breaks unseen."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from laboratory import BENCHMARKS, load

from tests.campaign import paced_run

pytestmark = pytest.mark.swarm
PARTS = {"common", "lines", "recipes", "rivals"}
"""Others start these: ``wan`` lines, ``pipeline`` recipes, ``averaging`` rivals."""
STORM = "storms --seeds 1 1"
STORMS = {"core, s": (("core_s_of_200", "figure"), 1e6, True)}
GUARD = load("guards").Guard(("benchmarks/offline.py", *STORM.split()), STORMS)
FLOODED = {"HONEST": "a", "RUN": paced_run(0.3, 2, 0.02), "SETTLE_S": 0.2}
AVERAGED = "round --codecs fp16 --megabytes 1 --rounds 1 --warm-up 0 --sides hivemind grpc"
SMALLEST: dict[str, tuple[str, str, dict[str, Any]]] = {
    "averaging": (AVERAGED, "times_less_than", {"TOLERANCE": {"fp16": 2e-5}}),
    "exposure": ("phases --layouts two --pairs 1 --phase-s 1 --round-s 0.5", "ratio", {"LEAD_S": 0.2}),
    "faults": ("catchup --cases one --width 16", "rate_bytes_per_s", {"ROUND_S": 0.5}),
    "gpu": ("--sizes small --device cpu", "utilisation", {}),
    "guards": ("", "here", {"GUARDS": {"storms": GUARD}}),
    "hostile": ("flood --pairs 1 --window-s 0.5 --kinds ping", "tokens_flooded_by_quiet", FLOODED),
    "loss": ("table --rounds 1 --seeds 0 --only 'keep d3' --out OUT", "keep d3, 1 rounds", {}),
    "offline": (STORM, "core_s_of_200", {}),
    "peer": ("step --models gpt --pairs 1 --steps 6", "cpu_s", {}),
    "pipeline": ("dsl --turns 1 --seconds 0", "computing", {"STAGE_S": 0.002, "POSITIONS": 16}),
    "wan": (
        "--lines near-1000 --systems ours --seconds 5 --steps 13",
        "line_used",
        {"ROWS": 100, "PEERS": 2},
    ),
}
"""By file: its words, a figure of its answer, and constants that have no option."""


@pytest.mark.parametrize("name", sorted({path.stem for path in BENCHMARKS.glob("*.py")} - PARTS))
def test_a_benchmark_answers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if name == "wan" and os.geteuid():
        pytest.skip("a network namespace needs root")
    words, figure, constants = SMALLEST[name]
    monkeypatch.setenv("RIVALS", "2")
    monkeypatch.delitem(sys.modules, "rivals", raising=False)
    module = load(name)
    for constant, value in constants.items():
        monkeypatch.setattr(module, constant, value)
    for of, function in ((signal, "signal"), (os, "sched_setaffinity")):  # this process stays as it is
        monkeypatch.setattr(of, function, lambda *of_the_call: None)
    monkeypatch.setattr(sys, "argv", [name, *shlex.split(words.replace("OUT", str(tmp_path / "out")))])
    module.main()
    assert f'"{figure}": ' in capsys.readouterr().out
