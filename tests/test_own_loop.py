"""Training loops as users write theirs, in processes of their own: what is allowed works, all at once."""

from __future__ import annotations

import json
import os
import re
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from p2p_co2.config import OWN_LOOP, ClockConfig, RunConfig
from p2p_co2.tensors.checkpoint.folder import load
from tests.swarms import ROOT, Swarm, swarm

pytestmark = pytest.mark.swarm
KINDS: list[tuple[str, list[str], list[str]]] = [
    ("plain", [], ["1"]),
    ("compiled", [], ["2", "--compiled"]),
    ("odd", ["-O", "-W", "error"], ["3", "--odd"]),
]
"""(name, flags of the interpreter, options of ``own_loop_peer``)"""


def told(running: Swarm, name: str) -> dict[str, Any]:
    found = re.search(r"^told: (.*)$", running.log(name), re.MULTILINE)
    assert found, running.log(name)[-3000:]
    return dict(json.loads(found[1]))


def test_whatever_a_program_is_and_has_set_it_publishes_the_same_model_as_the_others(tmp_path: Path) -> None:
    """From a folder whose modules have the names of ours, and with a page of its own."""
    (home := tmp_path / "home").mkdir()
    for name in ("monitoring", "bootstrap", "peers", "tests"):
        (home / f"{name}.py").write_text("raise SystemExit('this is the user\\'s own')\n")
    clock = ClockConfig(mode="time", round_s=1.0, rounds=6)
    with swarm(tmp_path, RunConfig(name="own", recipe=OWN_LOOP, fragments=3, clock=clock)) as running:
        for name, flags, words in KINDS:
            script = [sys.executable, *flags, str(ROOT / "tests" / "own_loop_peer.py")]
            there = ["env", "-C", str(home), f"PYTHONPATH={home}{os.pathsep}{ROOT}"]
            running.start(name, [*there, *script, running.ticket, str(tmp_path / name), *words])
            if name == "plain":  # it waits for the two others
                address = running.said(name, r"board: (http\S+)")[1]
                with urllib.request.urlopen(address, timeout=120) as page:
                    assert page.status == 200
        names = [name for name, _, _ in KINDS]
        running.wait(*names)
        ours, *others = (told(running, name) for name in names)
        assert not any("Traceback" in running.log(name) for name in names)
    for one in (ours, *others):
        assert (one["digest"], one["names"]) == (ours["digest"], ours["names"])
        assert (one["still"], one["warnings"], one["nobody drew"]) == ([], [], True)
        assert one["rounds"] > 1
        assert one["together"] == 3
    assert {"embed.weight", "head.weight", "module.weight", "blocks.0.bias"} <= set(ours["names"])
    assert (ours["missing"], ours["unexpected"]) == (["base.bias", "base.weight"], [])
    plans = {load(tmp_path / name / "checkpoint").plan_digest for name in names}  # the folder joined with
    assert len(plans) == 1
    assert (tmp_path / "odd" / "identity").stat().st_mode & 0o777 == 0o600
