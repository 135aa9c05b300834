"""A trained model out of a checkpoint: for sampling and for its held-out loss.

It puts the agreed parameters, not a peer's live ones, into the recipe's model. The fragment plan's digest
must be the checkpoint's, so parameters never land in the wrong place. Of a run with stages it is the whole
model's: all stages in one process, under the names that ``Stages.join`` gives them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from p2p_co2.errors import ConfigError
from p2p_co2.recipes import Recipe, load_run_recipe
from p2p_co2.tensors.checkpoint.folder import load_agreed
from p2p_co2.tensors.fragments import LiveParameters, plan_fragments
from p2p_co2.tensors.names import named_buffers


@dataclass(frozen=True)
class Trained:
    """``recipe``: with the agreed parameters in its model, on the CPU."""

    recipe: Recipe

    @classmethod
    def load(cls, checkpoint: Path, own_recipe: str = "") -> Trained:
        """Read a checkpoint's folder, or one file of it. ``own_recipe``: see ``load_run_recipe``.

        Raises ``ConfigError`` if there is no whole checkpoint or its recipe is not the one here.
        """
        agreed = load_agreed(checkpoint)
        if agreed.stage is not None:
            problem = f"holds {agreed.holds} alone; make a checkpoint of the whole model with p2p-co2 gather"
            raise ConfigError(str(checkpoint), "", problem)
        recipe = load_run_recipe(agreed.run, own_recipe)
        recipe = replace(recipe, model=recipe.whole_model(agreed.run))
        plan = plan_fragments(recipe.model, agreed.run.fragments)
        if plan.digest != agreed.plan_digest:
            raise ConfigError(str(checkpoint), "", "is of another model than the recipe makes here")
        live = LiveParameters(recipe.model, plan)
        for index, state in enumerate(agreed.states):
            live.load_(index, state.params)
        buffers = named_buffers(recipe.model)
        with torch.no_grad():
            for name, values in agreed.buffers.items():
                if name in buffers:
                    buffers[name].copy_(values)
        recipe.model.eval()
        return cls(recipe)

    def held_out_loss(self) -> float:
        """Nats per token on text that no peer trained on. Raises ``ConfigError`` if the recipe has none."""
        if self.recipe.held_out is None:
            raise ConfigError("recipe", "held_out", "this recipe has no held-out data to measure a loss on")
        return self.recipe.held_out(self.recipe.model)

    def sample(self, prompt: str, length: int, seed: int) -> str:
        """``prompt`` and ``length`` more tokens as text. Raises ``ConfigError`` if the recipe cannot
        generate."""
        if self.recipe.generate is None:
            raise ConfigError("recipe", "generate", "this recipe makes no text; it has a held-out loss only")
        return self.recipe.generate(self.recipe.model, prompt, length, seed)
