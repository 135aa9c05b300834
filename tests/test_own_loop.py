"""Training loops as users write theirs, in processes of their own: what is allowed works, all at once."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from p2p_co2.config import OWN_LOOP, ClockConfig, RunConfig
from p2p_co2.tensors.checkpoint.folder import load
from tests.swarms import ROOT, Swarm, swarm

pytestmark = pytest.mark.swarm


def start(running: Swarm, name: str, *arguments: str) -> None:
    script = str(ROOT / "tests" / "own_loop_peer.py")
    running.start(name, [sys.executable, script, running.ticket, str(running.folder / name), *arguments])


def told(running: Swarm, name: str) -> dict[str, Any]:
    found = re.search(r"^told: (.*)$", running.log(name), re.MULTILINE)
    assert found, running.log(name)[-3000:]
    return dict(json.loads(found[1]))


def test_two_odd_loops_of_which_one_is_compiled_publish_the_same_model(tmp_path: Path) -> None:
    clock = ClockConfig(mode="time", round_s=1.0, rounds=5)
    with swarm(tmp_path, RunConfig(name="own", recipe=OWN_LOOP, fragments=3, clock=clock)) as running:
        start(running, "plain", "1")
        start(running, "compiled", "2", "--compiled")
        running.wait("plain", "compiled")
        ours, theirs = told(running, "plain"), told(running, "compiled")
    assert ours["digest"] == theirs["digest"]
    assert ours["names"] == theirs["names"]
    assert {"embed.weight", "head.weight", "module.weight", "blocks.0.bias"} <= set(ours["names"])
    assert (ours["missing"], ours["unexpected"]) == (["base.bias", "base.weight"], [])
    assert min(ours["rounds"], theirs["rounds"]) > 1
    for one in (ours, theirs):
        assert (one["still"], one["warnings"]) == ([], [])
    plans = {load(tmp_path / name / "checkpoint").plan_digest for name in ("plain", "compiled")}
    assert len(plans) == 1
