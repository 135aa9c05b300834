"""What a run trains. ``load_recipe`` builds it, ``load_run_recipe`` only if it is the organiser's,
``recipe_digest`` names it, ``Recipe`` is what a user's own function returns."""

from __future__ import annotations

from p2p_co2.recipes.corpus import check_data
from p2p_co2.recipes.recipe import BYTE_GPT, Recipe, load_recipe, load_run_recipe, recipe_digest

__all__ = ["BYTE_GPT", "Recipe", "check_data", "load_recipe", "load_run_recipe", "recipe_digest"]
