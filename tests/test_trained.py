"""trained: the agreed parameters of a checkpoint in the recipe's model, never a peer's live ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from p2p_co2.config import RunConfig
from p2p_co2.errors import ConfigError
from p2p_co2.recipes import load_recipe, recipe_digest
from p2p_co2.tensors import outer
from p2p_co2.tensors.checkpoint import Checkpoint, save
from p2p_co2.tensors.fragments import LiveParameters, plan_fragments
from p2p_co2.trained import Trained

TINY: dict[str, str | int | float | bool] = {"layers": 2, "width": 16, "heads": 2, "context": 16}
OWN = """
import torch
from torch import nn

def make():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    return model, [torch.ones(2, 3)], lambda model, x: model(x).square().mean()
"""


def run_of(name: str, options: dict[str, str | int | float | bool]) -> RunConfig:
    digest = recipe_digest(name, options)
    return RunConfig(recipe=name, recipe_options=options, recipe_digest=digest, fragments=2)


def checkpoint_of(run: RunConfig) -> tuple[Checkpoint, dict[str, Tensor]]:
    """A checkpoint whose agreed parameters are random; and those."""
    model = load_recipe(run.recipe, run.recipe_options, seed=0).model
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    agreed = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    plan = plan_fragments(model, run.fragments)
    live = LiveParameters(model, plan)
    states = tuple(outer.init(live.snapshot(fragment.index)) for fragment in plan.fragments)
    saved = Checkpoint(
        run_config_json=run.canonical_bytes().decode(),
        plan_digest=plan.digest,
        states=states,
        buffers={name: buffer + 3 * name.endswith("running_mean") for name, buffer in model.named_buffers()},
        optimizer={},
        position=1.0,
        inner_steps=7,
        tokens=70,
    )
    return saved, agreed


def parameters_of(trained: Trained) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in trained.recipe.model.named_parameters()}


def test_what_is_sampled_and_measured_are_the_agreed_parameters(tmp_path: Path) -> None:
    saved, agreed = checkpoint_of(run_of("byte-gpt", TINY))
    save(tmp_path, saved)
    trained = Trained.load(tmp_path)
    loaded = parameters_of(trained)
    assert loaded.keys() == agreed.keys()
    assert all(loaded[name].equal(agreed[name]) for name in agreed)
    reference = load_recipe("byte-gpt", TINY, seed=1)
    reference.model.load_state_dict(agreed, strict=False)
    assert reference.held_out is not None
    assert trained.held_out_loss() == reference.held_out(reference.model)


def test_a_sample_is_its_prompt_and_more_and_follows_the_seed(tmp_path: Path) -> None:
    path = save(tmp_path, checkpoint_of(run_of("byte-gpt", TINY))[0])
    trained = Trained.load(path)  # the one file does as well as its folder
    one, same, other = (trained.sample("def ", 40, seed) for seed in (1, 1, 2))
    assert one == same != other
    assert one.startswith("def ")
    assert len(one.encode()) > len("def ")


def test_an_own_recipe_is_named_again_and_its_buffers_come_along(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(OWN, encoding="utf-8")
    saved, agreed = checkpoint_of(run_of(f"{own}:make", {}))
    save(tmp_path / "checkpoint", saved)
    with pytest.raises(ConfigError, match=r"--recipe FILE\.py:function"):
        Trained.load(tmp_path / "checkpoint")
    trained = Trained.load(tmp_path / "checkpoint", f"{own}:make")
    loaded = parameters_of(trained)
    assert all(loaded[name].equal(agreed[name]) for name in agreed)
    assert dict(trained.recipe.model.named_buffers())["1.running_mean"].tolist() == [3.0] * 4
    assert not trained.recipe.model.training
    with pytest.raises(ConfigError, match="no held-out data"):
        trained.held_out_loss()
    with pytest.raises(ConfigError, match="makes no text"):
        trained.sample("x", 1, 0)


def test_parameters_of_another_model_are_refused(tmp_path: Path) -> None:
    saved, _ = checkpoint_of(run_of("byte-gpt", TINY))
    save(tmp_path, replace(saved, plan_digest=bytes(32)))
    with pytest.raises(ConfigError, match="is of another model"):
        Trained.load(tmp_path)


def test_a_recipe_that_the_run_does_not_use_is_not_ignored(tmp_path: Path) -> None:
    saved, _ = checkpoint_of(run_of("byte-gpt", TINY))
    save(tmp_path, saved)
    with pytest.raises(ConfigError, match="built-in recipe 'byte-gpt'; leave it out"):
        Trained.load(tmp_path, "mine.py:make")


def test_no_checkpoint_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no checkpoint there"):
        Trained.load(tmp_path)
