"""The commands that look into a checkpoint: ``eval`` and ``sample``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bootstrap.options import OwnRecipe, says
from p2p_co2.system.ctrl_c import hand_over, take_back

Checkpoint = Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="A checkpoint's folder.")]


def sample(
    checkpoint: Checkpoint,
    prompt: Annotated[str, says("What the text begins with.")] = "def ",
    length: Annotated[int, says("Tokens to add.", min=1)] = 300,
    seed: Annotated[int, says("Of the sampling.")] = 0,
    recipe: OwnRecipe = "",
) -> None:
    """Generate text from a checkpoint."""
    take_back()
    from p2p_co2.trained import Trained

    hand_over()
    print(Trained.load(checkpoint, recipe).sample(prompt, length, seed))


def evaluate(checkpoint: Checkpoint, recipe: OwnRecipe = "") -> None:
    """Held-out loss of a checkpoint, as its recipe measures it (byte-gpt: nats per token)."""
    take_back()
    from p2p_co2.trained import Trained

    hand_over()
    print(f"{Trained.load(checkpoint, recipe).held_out_loss():.4f}")
