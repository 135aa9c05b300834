"""Runs with stages: each peer a process of its own with one stage, over real sockets."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bootstrap.local_swarm import environment
from p2p_co2.config import ClockConfig, PipelineConfig, RunConfig
from p2p_co2.recipes import load_run_recipe, recipe_digest
from p2p_co2.telemetry.events import LinkMeasured, Progress, StageProgress
from p2p_co2.tensors.checkpoint.agreed import state_digest
from p2p_co2.tensors.checkpoint.folder import load_agreed
from p2p_co2.trained import Trained
from p2p_co2.trainer.gather import gather_folders
from p2p_co2.trainer.stages.peer import data_seed
from tests.campaign import Campaign, console
from tests.test_swarm import START_S, opened

pytestmark = pytest.mark.swarm

STEPS = 20


def run_of(
    stages: int, round_s: float, rounds: int = 0, codec: str = "fp32", min_replicas: int = 1, tied: str = "no"
) -> RunConfig:
    options: dict[str, str | int | float | bool] = {"layers": stages, "width": 32, "heads": 2, "context": 32}
    options["warmup_rounds"] = 0.5
    return RunConfig(
        name="stages",
        recipe_options=options,
        recipe_digest=recipe_digest("byte-gpt", options),
        fragments=2,
        clock=ClockConfig(mode="time", round_s=round_s, rounds=rounds),
        pipeline=PipelineConfig.model_validate(
            {
                "stages": stages,
                "microbatches": 2 * stages,
                "forward": codec,
                "backward": codec,
                "tied": tied,
                "min_replicas": min_replicas,
            }
        ),
    )


def trained_whole(run: RunConfig, owner: str) -> dict[str, torch.Tensor]:
    """What one process makes of the owner's batches with the unsplit model."""
    recipe = load_run_recipe(run)
    stages, pipeline = recipe.in_stages(run.pipeline.stages), run.pipeline
    model = recipe.whole_model(run)
    parts = [list(stages.build(run.seed, s).state_dict()) for s in range(len(stages))]
    named = dict(model.named_parameters())
    optimizers = [recipe.optimizer([named[name] for name in names if name in named]) for names in parts]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] *= recipe.learning_rate(0.0)
    draws = recipe.batches(data_seed(run, owner, 0), pipeline.sequences)
    for _ in range(STEPS):
        tokens = 0
        for _ in range(pipeline.microbatches):
            inputs, side = stages.split(next(draws))
            stages.loss(model(inputs), side).backward()
            tokens += stages.tokens(side)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.div_(tokens)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {name: values.detach() for name, values in named.items()}


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_over_sockets_split_equals_whole(stages: int, tmp_path: Path) -> None:
    """fp32, a replica a stage, no outer round in the time: the parameters of the unsplit model, to 1e-6."""
    run = run_of(stages, round_s=1e9)  # so long that the warm-up stands still
    with opened(tmp_path) as swarm:
        swarm.start_seed(run)
        peers = [start(swarm, stage) for stage in range(stages)]
        assert swarm.wait(peers, START_S), swarm.tails()
        assert [peer.exit_status() for peer in peers] == [0] * stages, swarm.tails()
        owner = swarm.wait_for_line(peers[0], "peer:", 1.0)
    split = {}
    for stage in range(stages):
        split |= load_file(tmp_path / f"stage-{stage}" / "live.safetensors")
    for name, values in trained_whole(run, owner).items():
        torch.testing.assert_close(split[name], values, rtol=0, atol=1e-6)


def start(swarm: Campaign, stage: int):  # type: ignore[no-untyped-def]
    folder = swarm.folder / f"stage-{stage}"
    script = str(Path(__file__).with_name("stage_peer_process.py"))
    command = [sys.executable, script, swarm.ticket, str(folder), str(stage), str(STEPS)]
    return swarm.start(f"stage-{stage}", command, environment())


def test_those_who_join_choose_what_is_needed_and_all_comes_to_its_end(tmp_path: Path) -> None:
    """The program itself, int8: two that come together hold both stages; nothing is dropped at the end."""
    with opened(tmp_path) as swarm:
        swarm.start_seed(run_of(2, round_s=2.0, rounds=6, codec="int8", min_replicas=2))
        peers = [swarm.join(name, recipe="") for name in ("one", "two")]
        assert swarm.wait(peers, START_S), swarm.tails()
        assert [peer.exit_status() for peer in peers] == [0, 0], [peer.last_lines() for peer in peers]
        told = [swarm.events(name, StageProgress)[-1] for name in ("one", "two")]
        assert {one.stage for one in told} == {0, 1}
        assert [one.dropped for one in told] == [0, 0]
        assert told[0].counted == told[1].counted > 0
        for name, payload_bytes in (("one", 32 * 32), ("two", 32 * 32)):  # int8, width times context
            hop = swarm.events(name, LinkMeasured)[-1]  # the group has no links: each stage has one replica
            assert hop.bytes_per_s > 0
            assert hop.sent_bytes > payload_bytes
            sent_bytes = swarm.events(name, Progress)[-1].up_bytes
            assert sent_bytes > payload_bytes * told[0].counted, "microbatches are in a peer's traffic"
        losses = [one.loss for one in swarm.events("one", Progress) if one.loss == one.loss]
        assert losses[-1] < losses[0]
        folders = [str(tmp_path / name / "checkpoint") for name in ("one", "two")]
        whole = subprocess.run(
            console("gather", *folders, "--out", str(tmp_path / "whole")),
            check=False,
            capture_output=True,
            text=True,
        )
        assert whole.returncode == 0, whole.stderr
        measured = subprocess.run(
            console("eval", str(tmp_path / "whole")), check=False, capture_output=True, text=True
        )
        assert measured.returncode == 0, measured.stderr
        assert float(measured.stdout.split()[0]) < losses[0]


def test_a_tied_table_is_one_on_both_sides_and_in_the_whole(tmp_path: Path) -> None:
    """The first stage and the last agree on their table in a group of both: bit-equal at the run's end."""
    names = ("first", "last")
    with opened(tmp_path) as swarm:
        swarm.start_seed(run_of(2, round_s=2.0, rounds=5, codec="int8", tied="fused"))
        peers = [swarm.join(name, "--stage", str(stage), recipe="") for stage, name in enumerate(names)]
        assert swarm.wait(peers, START_S), swarm.tails()
        assert [peer.exit_status() for peer in peers] == [0, 0], [peer.last_lines() for peer in peers]
        first, last = (load_agreed(tmp_path / name / "tied" / "checkpoint") for name in names)
        assert (first.stage, last.stage) == (2, 2)
        assert first.parameters == last.parameters == (("values", (256, 32)),)
        assert first.plan_digest == last.plan_digest
        for ours, theirs in zip(first.states, last.states, strict=True):
            assert ours.version == theirs.version > 0
            assert state_digest(ours, 1 << 20) == state_digest(theirs, 1 << 20)
        assert "embedding.weight" not in dict(load_agreed(tmp_path / "first" / "checkpoint").parameters)
        assert "head.weight" not in dict(load_agreed(tmp_path / "last" / "checkpoint").parameters)

        gather_folders([tmp_path / name / "checkpoint" for name in names], tmp_path / "whole")
        recipe = load_run_recipe(first.run)
        assert recipe.held_out is not None
        trained = Trained.load(tmp_path / "whole")
        table = torch.cat([state.params for state in first.states])
        assert torch.equal(
            trained.recipe.model.get_parameter("head.weight").flatten().sort()[0], table.sort()[0]
        )
        assert trained.held_out_loss() < recipe.held_out(recipe.whole_model(first.run)) - 0.1
