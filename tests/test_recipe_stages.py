"""Recipes in stages: built one by one, joined to the whole model, trained, measured, refused."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from p2p_co2.cli import main as cli
from p2p_co2.config import PipelineConfig, RunConfig
from p2p_co2.errors import ConfigError
from p2p_co2.recipes import (
    BYTE_GPT,
    Recipe,
    Stages,
    load_recipe,
    load_run_recipe,
    recipe_digest,
    stage_sizes,
)
from p2p_co2.tensors import outer
from p2p_co2.tensors.checkpoint.folder import Checkpoint, save
from p2p_co2.tensors.fragments import LiveParameters, plan_fragments
from p2p_co2.tensors.names import named_buffers, named_parameters
from p2p_co2.trained import Trained
from p2p_co2.trainer.stages.work import Crossings
from tests.stage_line import Line
from tests.swarms import ROOT

TINY: dict[str, str | int | float | bool] = {"layers": 4, "width": 32, "heads": 2, "context": 32, "batch": 4}
QUICK = TINY | {"learning_rate": 1e-2}
EXAMPLE = f"{ROOT / 'examples' / 'staged_recipe.py'}:make"
SMALL: dict[str, str | int | float | bool] = {"width": 32, "blocks": 4}


def run_of(stages: int, name: str = BYTE_GPT, options: Any = TINY, fragments: int = 3) -> RunConfig:
    """As its organiser publishes it."""
    pipeline = PipelineConfig(stages=stages, sequences=2)
    digest = recipe_digest(name, options)
    return RunConfig(
        recipe=name, recipe_options=options, recipe_digest=digest, fragments=fragments, pipeline=pipeline
    )


def summed(output: Tensor, side: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), side.flatten(), reduction="sum")


def both(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return batch


def linears(count: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(count)))


def batches(seed: int, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        yield torch.ones(batch, 3, 4), torch.zeros(batch, 3, dtype=torch.int64)


def recipe_with(stages: Any, model: nn.Module | None = None) -> Recipe:
    return Recipe(model or linears(1), batches, lambda model, batch: model(batch[0]).sum(), stages=stages)


# ---- by hand


def test_a_sequential_is_cut_at_its_children_and_keeps_their_names() -> None:
    model = linears(5)
    stages = Stages.of_sequential(model, [2, 4], both, summed)
    parts = [stages.build(0, stage) for stage in range(3)]
    assert [[name for name, _ in part.named_children()] for part in parts] == [["0", "1"], ["2", "3"], ["4"]]
    whole, x = stages.join(parts), torch.randn(2, 4)
    assert list(whole.state_dict()) == list(model.state_dict())
    torch.testing.assert_close(whole(x), model(x))
    assert parts[2].get_parameter("4.weight") is whole.get_parameter("4.weight")
    assert stages.build(0, 1).get_parameter("2.weight") is not model.get_parameter("2.weight")


def test_makers_are_joined_under_names_that_say_the_stage() -> None:
    stages = Stages([lambda: nn.Linear(4, 4), lambda: nn.Linear(4, 2)], both, summed)
    recipe = recipe_with(stages, stages.join(stages.outlines()))
    whole = recipe.whole_model(run_of(2))
    assert list(named_parameters(whole)) == [
        "stage.0.weight", "stage.0.bias", "stage.1.weight", "stage.1.bias"
    ]  # fmt: skip
    assert all(parameter.is_meta for parameter in recipe.model.parameters())
    assert whole.get_parameter("stage.1.weight").equal(stages.build(0, 1).get_parameter("weight"))


def test_sizes_by_hand() -> None:
    stages = Stages([lambda: nn.Linear(4, 6), lambda: nn.Linear(6, 2, bias=False).double()], both, summed)
    first, last = stage_sizes(recipe_with(stages), run_of(2))
    assert (first.parameters, first.parameter_bytes) == (4 * 6 + 6, 4 * 30)
    assert (first.sequence_shape, first.activation_bytes) == ((3, 6), 2 * 3 * 6 * 4)
    assert (last.parameters, last.parameter_bytes, last.activation_bytes) == (12, 96, 0)


# ---- against a reference


@pytest.mark.parametrize("count", [2, 3, 4])
def test_byte_gpt_in_stages_is_one_model_in_one_process(count: int) -> None:
    run = run_of(count)
    recipe = load_run_recipe(run)
    assert all(parameter.is_meta for parameter in recipe.model.parameters())
    stages = recipe.in_stages(count)
    modules = [stages.build(run.seed, stage) for stage in range(count)]
    whole, batch = stages.join(modules), next(recipe.batches(0, 2))
    hidden = batch[0]
    for module in modules:
        hidden = module(hidden)
    assert torch.equal(whole(batch[0]), hidden)
    torch.testing.assert_close(recipe.loss(whole, batch), stages.mean_loss(whole, batch))
    names = list(itertools.chain(*(named_parameters(module) for module in modules)))
    assert sorted(names) == sorted(named_parameters(whole))
    assert set(names) == {*named_parameters(load_recipe(BYTE_GPT, TINY, 0).model), "head.weight"}
    assert [tuple(p.shape) for p in whole.parameters()] == [tuple(p.shape) for p in recipe.model.parameters()]
    assert recipe.held_out is not None
    assert recipe.generate is not None
    assert 5.0 < recipe.held_out(whole) < 6.0
    assert recipe.generate(whole, "def ", 5, 0).startswith("def ")


def test_a_model_that_fits_nowhere_has_sizes_and_nothing_of_it_is_made() -> None:
    """52 GB of parameters."""
    layers, width = 16, 8192
    options = {"layers": layers, "width": width, "heads": 64, "context": 256}
    run = run_of(8, BYTE_GPT, options)
    sizes = stage_sizes(load_recipe(BYTE_GPT, options, 0, 8), run)
    blocks = layers * 12 * width**2
    assert sum(size.parameters for size in sizes) == blocks + 2 * 256 * width + width
    assert sizes[3].parameter_bytes == 4 * blocks // 8
    assert sizes[3].activation_bytes == 2 * 256 * width * 4


@pytest.mark.parametrize(("name", "options"), [(BYTE_GPT, TINY), (EXAMPLE, SMALL)])
def test_sizes_are_those_of_the_stages_made(name: str, options: Any) -> None:
    run = run_of(3, name, options)
    recipe = load_recipe(name, options, 0, 3)
    stages = recipe.in_stages(3)
    inputs, side = stages.split(next(recipe.batches(0, 2)))
    crossings = Crossings.of(stages, inputs, side, "fp32", "fp32")
    hidden: Tensor = inputs
    for stage, size in enumerate(stage_sizes(recipe, run)):
        module = stages.build(0, stage)
        assert size.parameter_bytes == sum(4 * p.numel() for p in module.parameters())
        hidden = module(hidden)
        if stage < 2:
            assert size.activation_bytes == hidden.nbytes == crossings.ahead(stage).payload_bytes
            assert size.sequence_shape == tuple(hidden.shape[1:])
        assert size.graph_bytes > hidden.nbytes


def checkpoint_of(run: RunConfig, whole: nn.Module) -> Checkpoint:
    """With ``whole`` as what was agreed."""
    plan = plan_fragments(whole, run.fragments)
    live = LiveParameters(whole, plan)
    states = tuple(outer.init(live.snapshot(fragment.index)) for fragment in plan.fragments)
    return Checkpoint(
        run_config_json=run.canonical_bytes().decode(), plan_digest=plan.digest, states=states,
        buffers=named_buffers(whole), optimizer={}, position=1.0, inner_steps=7, tokens=70,
    )  # fmt: skip


@pytest.mark.parametrize(("name", "options"), [(BYTE_GPT, TINY), (EXAMPLE, SMALL)])
def test_a_whole_checkpoint_is_sampled_and_measured(name: str, options: Any, tmp_path: Path) -> None:
    run, own = run_of(2, name, options), "" if name == BYTE_GPT else name
    recipe = load_run_recipe(run, own)
    stages = recipe.in_stages(2)
    modules = [stages.build(99, stage) for stage in range(2)]
    whole = stages.join(modules)
    save(tmp_path / "whole", checkpoint_of(run, whole))
    trained = Trained.load(tmp_path / "whole", own)
    assert recipe.held_out is not None
    assert trained.held_out_loss() == recipe.held_out(whole)
    if name == BYTE_GPT:
        assert recipe.generate is not None
        assert trained.sample("a", 9, 1) == recipe.generate(whole, "a", 9, 1)
    save(tmp_path / "stage", replace(checkpoint_of(run, modules[1]), stage=1))
    with pytest.raises(ConfigError, match=r"holds stage 1 alone; .* p2p-co2 gather"):
        Trained.load(tmp_path / "stage", own)


# ---- laws


@pytest.mark.parametrize(("name", "options", "count"), [(BYTE_GPT, QUICK, 3), (EXAMPLE, SMALL, 2)])
def test_a_recipe_trains_on_real_text_in_stages(name: str, options: Any, count: int) -> None:
    run = run_of(count, name, options)
    recipe = load_recipe(name, options, 0, count)
    line = Line.of(recipe, run)
    losses = [line.step(4) for _ in range(20)]
    assert losses[-1] < losses[0] - 1.5
    assert recipe.held_out is not None
    joined = recipe.in_stages(count).join(line.modules)
    assert recipe.held_out(joined) < recipe.held_out(recipe.whole_model(run)) - 1.5


def test_a_cut_sequential_begins_as_the_whole_model_and_is_the_same_on_every_peer() -> None:
    plain, run = load_recipe(EXAMPLE, SMALL, 0), run_of(2, EXAMPLE, SMALL)
    whole, again = (load_run_recipe(run, EXAMPLE).whole_model(run).state_dict() for _ in range(2))
    assert all(values.equal(whole[name]) for name, values in plain.model.state_dict().items())
    assert all(values.equal(again[name]) for name, values in whole.items())


def test_a_made_sequential_is_drawn_stage_by_stage() -> None:
    stages = Stages.of_sequential(lambda: linears(4), [2], both, summed)
    with torch.device("meta"):  # whatever device the caller's program builds on
        alone = stages.build(5, 1)
    stages.build(5, 0)
    assert alone.get_parameter("3.weight").equal(stages.build(5, 1).get_parameter("3.weight"))
    assert not alone.get_parameter("3.weight").equal(stages.build(6, 1).get_parameter("3.weight"))
    assert list(stages.whole(5).state_dict()) == list(linears(4).state_dict())


def test_an_outline_keeps_what_is_tied() -> None:
    model = linears(4)
    model[3].weight = model[2].weight
    outline = Stages.of_sequential(model, [2], both, summed).outlines()[1]
    assert [tuple(p.shape) for p in outline.parameters()] == [(4, 4), (4,), (4,)]


def test_the_digest_covers_where_the_model_is_cut(tmp_path: Path) -> None:
    source = (ROOT / "examples" / "staged_recipe.py").read_text()
    own = tmp_path / "own.py"
    digests = set()
    for text in (source, source.replace("1 + blocks * stage", "2 + blocks * stage")):
        own.write_text(text)
        digests.add(recipe_digest(f"{own}:make", {}))
    assert len(digests) == 2


# ---- faults


def test_a_run_in_stages_needs_a_recipe_that_has_as_many() -> None:
    with pytest.raises(ConfigError, match=r"pipeline.stages: is 2, but .* brings no stages; set stages = 1"):
        recipe_with(None).in_stages(2)
    three = Stages.of_sequential(linears(3), [1, 2], both, summed)
    with pytest.raises(ConfigError, match=r"pipeline.stages: is 2, but .* 3 stages; write stages = 3"):
        recipe_with(three).in_stages(2)
    assert recipe_with(three).in_stages(3) is three
    with pytest.raises(ConfigError, match=r"pipeline.stages: is 5, .* 4 here; use 2 to 4"):
        load_run_recipe(run_of(5))
    with pytest.raises(ConfigError, match=r"use recipe_options.layers = 2 or more"):
        load_run_recipe(run_of(2, options=TINY | {"layers": 1}))


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("[pipeline]\nstages = 6", ["pipeline.stages", "is 6", "byte-gpt has 4", "use 2 to 4"]),
        ("[pipeline]\nstages = 40", ["pipeline.stages", "at most 32"]),
        ("[pipeline]\nstages = 4\nmicrobatches = 3", ["microbatches is 3", "stages = 4", "at least 4"]),
        ('[pipeline]\nstages = 2\nforward = "int4"', ["pipeline.forward", "'int8'", "got 'int4'"]),
        ('[pipeline]\nstages = 2\nbackward = "nf4"', ["pipeline.backward", "'int8' or 'int4'", "got 'nf4'"]),
        ("[pipeline]\nstages = 2\nsequences = 0", ["pipeline.sequences", "at least 1"]),
        ('recipe = "own-loop"\n[pipeline]\nstages = 2', ["pipeline.stages", "set stages = 1"]),
    ],
)
def test_a_run_file_that_cannot_be_is_refused_by_its_key(
    lines: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(lines)
    assert cli.main(["seed", str(path), "--folder", str(tmp_path / "seed")]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert re.match(rf"error: {re.escape(str(path))}(, line \d+)?: ", said)
    assert all(word in said for word in words), said


@pytest.mark.parametrize("cuts", [[0], [5], [3, 3], [4, 2], [-1], [9]])
def test_cuts_that_leave_a_stage_empty(cuts: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"cuts: .* leave a stage empty: give rising numbers from 1 to 4"):
        Stages.of_sequential(linears(5), cuts, both, summed)


def test_cuts_that_part_what_is_shared() -> None:
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.Linear(4, 4), shared)
    with pytest.raises(ConfigError, match="share a parameter"):
        Stages.of_sequential(model, [1], both, summed)


def test_a_stage_with_nothing_to_train_is_said_before_a_peer_holds_it() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    with pytest.raises(ConfigError, match="stage 1 of 3 has no parameter to train; cut the model elsewhere"):
        recipe_with(Stages.of_sequential(model, [1, 2], both, summed)).in_stages(3)


@pytest.mark.parametrize(
    ("split", "message"),
    [
        (lambda batch: (batch[0], batch[0]), r"stages.split: .* torch.float32, .*: side.view\(torch.int32\)"),
        (lambda batch: (batch[0], batch[1][:1]), r"stages.split: must give two tensors \[sequences, "),
        (lambda batch: (list(batch[0]), batch[1]), r"stages.split: must give two tensors \[sequences, "),
    ],
)
def test_a_split_that_cannot_travel_is_refused(split: Any, message: str) -> None:
    stages = Stages.of_sequential(linears(2), [1], split, summed)
    with pytest.raises(ConfigError, match=message):
        stage_sizes(recipe_with(stages), run_of(2))


OWN = """
import torch
from torch import nn
from p2p_co2.recipes import Recipe, Stages

def split(batch):
    return batch, torch.zeros(len(batch), dtype=torch.int64)

def loss(output, side):
    return output.square().sum()

def recipe(stages, model):
    return Recipe(model, lambda seed, batch: iter([torch.ones(batch, 2)]), None, stages=stages)

def only_stages():
    stages = Stages([lambda: nn.Linear(2, 3), lambda: nn.Linear(3, 1)], split, loss)
    return recipe(stages, stages.join(stages.outlines()))

def no_module():
    return recipe(Stages([lambda: nn.Linear(2, 3), lambda: 7], split, loss), nn.Linear(2, 2))

def no_stages():
    return recipe(7, nn.Linear(2, 2))

def no_sequential():
    return recipe(Stages.of_sequential(lambda: nn.Linear(2, 2), [1], split, loss), nn.Linear(2, 2))
"""


@pytest.mark.parametrize(
    ("function", "stages", "message"),
    [
        ("only_stages", 1, r"pipeline.stages: is 1, but .* only there in stages; write stages = 2"),
        ("only_stages", 3, r"pipeline.stages: is 3, but the recipe has 2 stages"),
        ("no_module", 2, r"stage 1 of 2 must be an nn.Module, got int"),
        ("no_stages", 1, r"stages must be a Stages, or a function of their number; got int"),
        ("no_sequential", 2, r"only a torch.nn.Sequential has cut points, this is a Linear"),
    ],
)
def test_an_own_recipes_stages_are_looked_at_when_it_is_loaded(
    function: str, stages: int, message: str, tmp_path: Path
) -> None:
    own = tmp_path / "own.py"
    own.write_text(OWN)
    with pytest.raises(ConfigError, match=message):
        load_recipe(f"{own}:{function}", {}, 0, stages)
    assert load_recipe(f"{own}:only_stages", {}, 0, 2).in_stages(2)
