"""The recipe of a run as it is on this machine: the same as the organiser's, or refused.

Law: the digest is compared before anything of the recipe is imported or run, and a file that a stranger's run
names is never run unless the user names it too. Price: the organiser's file has to reach the volunteers by
other means.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from p2p_co2.config import RunConfig
from p2p_co2.errors import ConfigError

if TYPE_CHECKING:
    from p2p_co2.recipes import Recipe


def load_run_recipe(run: RunConfig, own: str = "", data: Mapping[str, str] | None = None) -> Recipe:
    """The run's recipe.

    ``own``: where an own recipe lies on this machine ("file.py:function"), "" for a built-in one. ``data``:
    options to use in the place of the run's, for what peers need not agree on, such as their text.
    Raises ``ConfigError`` if it is another than the run's, or is not here. Imports torch.
    """
    from p2p_co2.recipes import load_recipe, recipe_digest

    name = run.recipe
    if is_own(run.recipe):
        if not own:
            raise ConfigError(
                "command line",
                "--recipe",
                f"this run trains its own recipe {run.recipe!r}: get that file from the organiser, "
                "read it, and name it with --recipe FILE.py:function",
            )
        name = own
    elif own:
        raise ConfigError(
            "command line", "--recipe", f"this run trains the built-in recipe {run.recipe!r}; leave it out"
        )
    digest = recipe_digest(name, run.recipe_options)
    if digest != run.recipe_digest:
        raise ConfigError(
            "recipe",
            name,
            f"is another than the run's (digest {digest[:12]} here, {run.recipe_digest[:12] or 'none'} "
            "there); take the organiser's file and their version of p2p-co2",
        )
    options = {**run.recipe_options, **(data or {})}
    if recipe_digest(name, options) != digest:
        raise ConfigError(
            "command line", "", "only built-in recipes let a peer choose its own text or tokens"
        )
    return load_recipe(name, options, run.seed)


def is_own(recipe: str) -> bool:
    """Whether ``recipe`` is a user's "file.py:function" rather than a built-in name."""
    return ":" in recipe
