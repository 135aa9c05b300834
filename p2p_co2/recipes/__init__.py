"""What a run trains. ``load_recipe`` builds it, ``load_run_recipe`` only if it is the organiser's,
``recipe_digest`` names it. ``Recipe`` is what a user's own function returns, ``Stages`` a model that it cuts
for several peers."""

from __future__ import annotations

from p2p_co2.recipes.inner_step import InnerStep
from p2p_co2.recipes.recipe import (
    BYTE_GPT,
    Recipe,
    check_stages,
    load_measuring_recipe,
    load_recipe,
    load_run_recipe,
    recipe_digest,
)
from p2p_co2.recipes.sizes import StageSize, stage_sizes
from p2p_co2.recipes.stages import Stages, TiedTable

__all__ = [
    "BYTE_GPT",
    "InnerStep",
    "Recipe",
    "StageSize",
    "Stages",
    "TiedTable",
    "check_stages",
    "load_measuring_recipe",
    "load_recipe",
    "load_run_recipe",
    "recipe_digest",
    "stage_sizes",
]
