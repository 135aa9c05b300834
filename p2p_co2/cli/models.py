"""The commands that look into a checkpoint: ``eval`` and ``sample``."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated

import typer

from bootstrap.options import OwnRecipe, says
from p2p_co2.cli.options import OwnData, OwnText, OwnTokens, own_data


def checkpoint_of(folder: Path) -> Path:
    """The checkpoint in the folder of a peer or a demo; any other folder is taken for one itself."""
    inside = folder / "checkpoint"
    return inside if inside.is_dir() else folder


Checkpoint = Annotated[
    Path,
    typer.Argument(metavar="CHECKPOINT", help="A peer's folder, or its checkpoint.", callback=checkpoint_of),
]


def sample(
    checkpoint: Checkpoint,
    prompt: Annotated[str, says("Begin the text with this.")] = "def ",
    length: Annotated[int, says("Add so many tokens.", min=1)] = 300,
    seed: Annotated[int, says("Draw the text from this seed.")] = 0,
    recipe: OwnRecipe = "",
) -> None:
    """Generate text from a checkpoint."""
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
    """Held-out loss of a checkpoint, as its recipe measures it (byte-gpt: nats per token), on Python's own
    text unless other data is named."""
    from p2p_co2.tensors.checkpoint.folder import load_agreed
    from p2p_co2.trained import Trained

    loss, figures = Trained.load(checkpoint, recipe, own_data(data, text, tokens)).measured()
    if not as_json:
        print("\n".join([f"{loss:.4f}", *(f"{name} {value:.6g}" for name, value in figures.items())]))
        return
    agreed = load_agreed(checkpoint)
    told = {
        "loss": loss if math.isfinite(loss) else None,
        "unit": "nats per token" if agreed.run.recipe == "byte-gpt" else "",
        "figures": {name: value for name, value in figures.items() if math.isfinite(value)},
        "run": agreed.run.name, "round": agreed.position, "inner_steps": agreed.inner_steps,
        "checkpoint": str(agreed.path),
    }  # fmt: skip
    print(json.dumps(told))
