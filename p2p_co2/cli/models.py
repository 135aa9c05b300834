"""The commands that try a trained model: ``eval`` and ``sample``."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated

import typer

from bootstrap.options import OwnRecipe, says
from monitoring.words import OWN_UNIT, loss_unit, plain
from p2p_co2.cli.options import OwnData, OwnText, OwnTokens, own_data


def checkpoint_of(folder: Path) -> Path:
    """The checkpoint in the folder of a peer or a demo; any other folder is taken for one itself."""
    inside = folder / "checkpoint"
    return inside if inside.is_dir() else folder


Checkpoint = Annotated[
    Path,
    typer.Argument(
        metavar="FOLDER", help="A peer's folder, its checkpoint, or what model wrote.", callback=checkpoint_of
    ),
]


def sample(
    checkpoint: Checkpoint,
    prompt: Annotated[str, says("Begin the text with this.")] = "def ",
    length: Annotated[int, says("Add so many tokens.", min=1)] = 300,
    seed: Annotated[int, says("Draw the text from this seed.")] = 0,
    recipe: OwnRecipe = "",
) -> None:
    """Generate text with a trained model."""
    from p2p_co2.trained import Trained

    print(Trained.load(checkpoint, recipe).sample(prompt, length, seed))


def evaluate(
    checkpoint: Checkpoint,
    recipe: OwnRecipe = "",
    data: OwnData = None,
    text: OwnText = None,
    tokens: OwnTokens = None,
    as_json: Annotated[bool, says("Print JSON.", "--json")] = False,
) -> None:
    """Held-out loss of a trained model, as its recipe measures it (byte-gpt: nats per token), on Python's
    own text unless other data is named."""
    from p2p_co2.trained import Trained

    trained = Trained.load(checkpoint, recipe, own_data(data, text, tokens))
    loss, figures = trained.measured()
    origin = trained.origin
    unit = loss_unit(origin.run.recipe)
    if not as_json:
        at = f"{origin.round:.1f}".removesuffix(".0")
        print(f"{loss:.3f} {unit or OWN_UNIT}, {plain(origin.run.name, 64)}, round {at}")
        print("".join(f"{name} {value:.6g}\n" for name, value in figures.items()), end="")
        return
    told = {
        "loss": loss if math.isfinite(loss) else None,
        "unit": unit,
        "figures": {name: value for name, value in figures.items() if math.isfinite(value)},
        "run": origin.run.name, "round": origin.round, "inner_steps": origin.inner_steps,
        "checkpoint": str(trained.path),
    }  # fmt: skip
    print(json.dumps(told))
