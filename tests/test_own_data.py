"""What an organiser says opens no file of a volunteer: ``join`` in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from p2p_co2.config import RunConfig
from p2p_co2.recipes import BYTE_GPT, recipe_digest
from tests.swarms import ROOT, swarm

HEARD_JOIN = """
import sys
diary, *sys.argv[1:] = sys.argv[1:]
opened = []
def hear(event, args):
    if event in ("open", "os.listdir", "os.scandir") and diary in str(args[0]):
        print("OPENED", args[0], flush=True)
sys.addaudithook(hear)
from p2p_co2.cli.main import main
sys.exit(main())
"""
SHAPE: dict[str, str | int | float | bool] = {"layers": 1, "width": 16, "heads": 2, "context": 16}


@pytest.mark.swarm
@pytest.mark.parametrize("is_recipe", [False, True])
def test_a_hostile_run_file_opens_no_file_of_a_volunteer(is_recipe: bool, tmp_path: Path) -> None:
    diary = tmp_path / "diary"
    diary.mkdir()
    (diary / "pin.txt").write_text("the PIN is 1234\n" * 1000)
    named = dict.fromkeys(("text", "tokens", "data"), str(diary / "pin.txt"))
    run = RunConfig(
        name="run", recipe_options={**SHAPE, **named}, recipe_digest=recipe_digest(BYTE_GPT, SHAPE)
    )
    if is_recipe:
        run = run.model_copy(update={"recipe": f"{diary / 'own.py'}:make", "recipe_options": SHAPE})
        (diary / "own.py").write_text("raise SystemExit('run')")
    with swarm(tmp_path, run) as running:
        command = ["join", running.ticket, "--folder", str(tmp_path / "peer"), "--no-board"]
        done = subprocess.run(
            [sys.executable, "-c", HEARD_JOIN, diary.name, *command],
            cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
    assert "OPENED" not in done.stdout
    assert done.returncode == 2, done.stdout + done.stderr
    cure = "name it with --recipe" if is_recipe else "joins with --text PATH"
    assert cure in done.stdout + done.stderr
