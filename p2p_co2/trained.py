"""A trained model out of a checkpoint: for sampling, for its held-out loss, and for other programs.

It puts the agreed parameters, not a peer's live ones, into the recipe's model. The fragment plan's digest
must be the checkpoint's, so parameters never land in the wrong place. Of a run with stages it is the whole
model's: all stages in one process, under the names that ``Stages.join`` gives them. A run that programs of
one's own train has no recipe. Any recipe file whose model has the same names and shapes measures and samples
it; ``write_model`` needs none."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ValidationError
from torch import nn

from p2p_co2.config import OWN_LOOP, RunConfig
from p2p_co2.errors import ConfigError
from p2p_co2.recipes import Recipe, load_measuring_recipe
from p2p_co2.recipes.drawing import drawn_from
from p2p_co2.recipes.measured import measured
from p2p_co2.tensors.checkpoint.folder import Checkpoint, has_checkpoint, load_agreed
from p2p_co2.tensors.checkpoint.layout import write_kept
from p2p_co2.tensors.fragments import LiveParameters, plan_fragments
from p2p_co2.tensors.names import named_buffers, trained_parameters
from p2p_co2.tensors.pretrained import read_pretrained, write_pretrained, written_whole
from p2p_co2.tensors.stages import Chain

ORIGIN = "p2p-co2.json"


class Origin(BaseModel):
    """Which run a model is of, and where that was then, in rounds. Lies as ``ORIGIN`` beside a model that
    goes out, so that it can be measured and sampled again."""

    run: RunConfig
    round: float
    inner_steps: int


@dataclass(frozen=True)
class Trained:
    """``recipe``: with the agreed parameters in its model, on the CPU. ``path``: where it was read."""

    recipe: Recipe
    origin: Origin
    path: Path

    @classmethod
    def load(cls, checkpoint: Path, own_recipe: str = "", data: Mapping[str, str] | None = None) -> Trained:
        """Read a checkpoint's folder, one file of it, a peer's folder, or one that ``write_model`` wrote.
        ``own_recipe``, ``data``: as of ``load_measuring_recipe``.

        Raises ``ConfigError`` if there is no whole checkpoint or its recipe is not the one here.
        """
        if (checkpoint / ORIGIN).is_file():
            origin = _read_origin(checkpoint / ORIGIN)
            recipe = load_measuring_recipe(origin.run, own_recipe, data)
            model = read_pretrained(recipe.whole_model(origin.run), checkpoint).eval()
            return cls(replace(recipe, model=model), origin, checkpoint)
        return cls.of(_whole(checkpoint), str(checkpoint), own_recipe, data)

    @classmethod
    def of(
        cls, agreed: Checkpoint, where: str, own_recipe: str = "", data: Mapping[str, str] | None = None
    ) -> Trained:
        """As ``load``, of a checkpoint that was read from ``where``."""
        recipe = load_measuring_recipe(agreed.run, own_recipe, data)
        recipe = replace(recipe, model=recipe.whole_model(agreed.run))
        plan = plan_fragments(recipe.model, agreed.run.fragments)
        if plan.digest != agreed.plan_digest:
            problem = f"is of another model than the recipe makes here{_difference(agreed, recipe.model)}"
            raise ConfigError(where, "", problem)
        live = LiveParameters(recipe.model, plan)
        for index, state in enumerate(agreed.states):
            live.load_(index, state.params)
        buffers = named_buffers(recipe.model)
        with torch.no_grad():
            for name, values in agreed.buffers.items():
                if name in buffers:
                    buffers[name].copy_(values)
        recipe.model.eval()
        return cls(recipe, _origin_of(agreed), agreed.path)

    def held_out_loss(self) -> float:
        """Nats per token on text that no peer trained on. Raises ``ConfigError`` if the recipe has none."""
        return self.measured()[0]

    def measured(self) -> tuple[float, dict[str, float]]:
        """(``held_out_loss``, what else the recipe measures, by name)."""
        if self.recipe.held_out is None:
            raise ConfigError("recipe", "held_out", "this recipe has no held-out data to measure a loss on")
        return measured(self.recipe.held_out(self.recipe.model))

    def sample(self, prompt: str, length: int, seed: int) -> str:
        """``prompt`` and ``length`` more tokens as text: by the recipe's ``generate``, else by the model's
        own, with the recipe's ``tokenizer`` (transformers; no more than its context holds). Raises
        ``ConfigError`` if there is neither."""
        recipe = self.recipe
        if recipe.generate is not None:
            return recipe.generate(recipe.model, prompt, length, seed)
        if not (recipe.tokenizer_paths and hasattr(recipe.model, "generate")):
            problem = "this recipe makes no text: it has no generate, and no tokenizer for a model that has"
            raise ConfigError("recipe", "generate", problem)
        return _generated(recipe.model, recipe.tokenizer_paths[0], prompt, length, seed)

    def write(self, folder: Path) -> None:
        """Write the model, and what the recipe's ``tokenizer`` names, as ``write_pretrained`` does."""
        write_pretrained(self.recipe.model, {}, folder, beside=self.recipe.tokenizer_paths)


def write_model(checkpoint: Path, out: Path, own_recipe: str = "", base: Path | None = None) -> list[str]:
    """Write the trained model of a checkpoint into ``out``, as other programs load it; what to know about it,
    in words. Without a recipe, the checkpoint of an own loop: by what its peer kept when it joined; ``base``:
    as of ``write_kept``.

    Raises ``ConfigError`` as ``Trained.load`` and ``write_kept``, and if ``out`` is in use;
    ``EnvironmentFault``.
    """
    refuse_used(out)
    agreed = _whole(checkpoint)
    notes = list[str]()
    if agreed.run.recipe == OWN_LOOP and not own_recipe:
        notes = write_kept(agreed, out, base)
    elif base is not None:
        raise ConfigError.of_option(
            "--base", "is for own loops without a recipe, which has it all; leave it out"
        )
    else:
        trained = Trained.of(agreed, str(checkpoint), own_recipe)
        trained.write(out)
        if isinstance(trained.recipe.model, Chain):
            problem = "no other program loads this: its tensors are called stage.S.NAME, and it has no config"
            notes = [f"{problem}; give the recipe's Stages a join that makes the library's own model"]
    with written_whole(out) as place:
        (place / ORIGIN).write_text(_origin_of(agreed).model_dump_json(indent=1) + "\n", encoding="utf-8")
    return notes


def refuse_used(out: Path) -> None:
    """Raises ``ConfigError`` if something is in ``out`` already."""
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise ConfigError.of_option("--out", f"{out} is not empty; name another folder")


def _origin_of(agreed: Checkpoint) -> Origin:
    position = min(agreed.position, agreed.run.clock.rounds or agreed.position)  # the clock goes on
    return Origin(run=agreed.run, round=position, inner_steps=agreed.inner_steps)


def _read_origin(path: Path) -> Origin:
    try:
        return Origin.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        problem = "cannot be read, or is of another version; write the model anew with p2p-co2 model"
        raise ConfigError(str(path), "", problem) from None


def _whole(checkpoint: Path) -> Checkpoint:
    within = checkpoint / "checkpoint"  # of a peer's folder
    agreed = load_agreed(within if not has_checkpoint(checkpoint) and has_checkpoint(within) else checkpoint)
    if agreed.stage is not None:
        problem = f"holds {agreed.holds} alone; make a checkpoint of the whole model with p2p-co2 gather"
        raise ConfigError(str(checkpoint), "", problem)
    return agreed


def _difference(agreed: Checkpoint, model: nn.Module) -> str:
    """The first parameter that is another one, in words."""
    here = {name: tuple(one.shape) for name, one in trained_parameters(model).items()}
    there = dict(agreed.parameters)
    for name in [*there, *here]:
        if there.get(name) != here.get(name):
            return f": {name} is {there.get(name, 'missing')} there and {here.get(name, 'missing')} here"
    return ""


def _generated(model: nn.Module, tokenizer: Path, prompt: str, length: int, seed: int) -> str:
    try:
        transformers = importlib.import_module("transformers")
    except ImportError:
        cure = "pip install transformers, or give the recipe a generate"
        raise ConfigError("recipe", "tokenizer", f"this recipe samples by transformers; {cure}") from None
    tokens = transformers.AutoTokenizer.from_pretrained(tokenizer if tokenizer.is_dir() else tokenizer.parent)
    inputs = tokens(prompt, return_tensors="pt")
    told = inputs["input_ids"].shape[1]
    config: Any = getattr(model, "config", None)
    room = getattr(config, "max_position_embeddings", None) or told + length
    generate: Any = model.generate
    with drawn_from(seed), torch.no_grad():
        ids = generate(**inputs, do_sample=True, max_new_tokens=max(1, min(length, room - told)))
    return str(tokens.decode(ids[0], skip_special_tokens=True))
