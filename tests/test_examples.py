"""What the documents show is run as it stands: the README's loop, the examples, their files."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from p2p_co2.cli import main as cli
from p2p_co2.config import ClockConfig, PipelineConfig, RunConfig, read_run_config
from p2p_co2.protocol.catchup.goals import LEAST_CHUNK_BYTES
from p2p_co2.recipes import load_run_recipe, recipe_digest
from p2p_co2.system.process import program
from p2p_co2.telemetry.events import StageProgress
from p2p_co2.tensors.checkpoint.agreed import state_digest
from p2p_co2.tensors.checkpoint.folder import load_agreed
from p2p_co2.trained import Trained
from tests.swarms import ROOT, swarm

README = (ROOT / "README.md").read_text()


def first_block() -> str:
    found = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert found
    return found.group(1)


def added_lines(program: str) -> list[str]:
    """The lines that the swarm adds to a training loop: the ones that are numbered."""
    return [line for line in program.splitlines() if re.search(r"# \d", line)]


def test_the_swarm_adds_at_most_five_lines_to_a_loop() -> None:
    program = (ROOT / "examples" / "own_loop.py").read_text()
    lines = added_lines(program)
    assert len(lines) <= 5
    rest = "\n".join(line for line in program.splitlines() if line not in lines)
    assert "p2p_co2" not in re.sub(r'""".*?"""', "", rest, flags=re.DOTALL)
    assert "peer" not in re.sub(r"print.*|#.*|\"\"\".*?\"\"\"", "", rest, flags=re.DOTALL)


@pytest.mark.swarm
def test_the_readmes_loop_and_the_example_train_together(tmp_path: Path) -> None:
    run = read_run_config(ROOT / "examples" / "own_loop.toml")
    clock = run.clock.model_copy(update={"rounds": 5})
    digest = recipe_digest(run.recipe, run.recipe_options)
    run = run.model_copy(update={"recipe_digest": digest, "clock": clock})
    (tmp_path / "my_loop.py").write_text(first_block())
    with swarm(tmp_path, run) as running:
        for name in ("one", "two"):
            place = tmp_path / name
            place.mkdir()
            given = [f"P2P_CO2_TICKET={running.ticket}", f"P2P_CO2_FOLDER={place}"]
            program = [sys.executable, str(tmp_path / "my_loop.py")]
            running.start(name, ["env", "--chdir", str(place), *given, *program])
        example = [sys.executable, str(ROOT / "examples" / "own_loop.py"), running.ticket]
        running.start("three", [*example, str(tmp_path / "three")])
        running.wait("one", "two", "three")
        assert "inner steps" in running.log("three")
        for name in ("one", "two", "three"):  # each has a page of its own (test_leaks looks at one)
            assert "board: http://127.0.0.1:" in running.log(name)
    agreed = [load_agreed(tmp_path / name / "checkpoint") for name in ("one", "two", "three")]
    assert (
        len({tuple(state_digest(state, LEAST_CHUNK_BYTES) for state in each.states) for each in agreed}) == 1
    )
    assert min(state.version for state in agreed[0].states) >= 3


@pytest.mark.swarm
def test_the_staged_recipe_is_trained_by_two_peers_of_a_stage_each(tmp_path: Path) -> None:
    recipe, options = f"{ROOT / 'examples' / 'staged_recipe.py'}:make", {"width": 16, "blocks": 2}
    run = RunConfig(
        recipe=recipe, recipe_options=options, recipe_digest=recipe_digest(recipe, options), fragments=2,
        clock=ClockConfig(round_s=2.0, rounds=6),
        pipeline=PipelineConfig(stages=2, microbatches=4, min_replicas=1),
    )  # fmt: skip
    names = ("one", "two")
    with swarm(tmp_path, run) as running:
        for name in names:
            given = ["--recipe", recipe, "--folder", str(tmp_path / name), "--no-board"]
            running.start(name, program("p2p_co2.cli", "join", running.ticket, *given))
        running.wait(*names)
        told = [running.wait_for(name, StageProgress)[-1] for name in names]
    assert {one.stage for one in told} == {0, 1}
    assert all(one.counted > 0 for one in told)
    folders = [str(tmp_path / name / "checkpoint") for name in names]
    with pytest.raises(SystemExit) as end:
        cli.main(["gather", *folders, "--out", str(tmp_path / "whole"), "--recipe", recipe])
    assert not end.value.code
    loss = Trained.load(tmp_path / "whole", recipe).held_out_loss()
    untrained = load_run_recipe(run, recipe)
    assert untrained.held_out is not None
    assert loss < untrained.held_out(untrained.whole_model(run))
