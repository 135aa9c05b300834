"""The command ``model``: the trained model as a folder that other programs load."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from bootstrap.options import OwnRecipe, says
from p2p_co2.cli.models import checkpoint_of
from p2p_co2.ticket import PREFIX, read_ticket


def model(
    out: Annotated[
        Path, says("Write to a new folder: safetensors, config, what the recipe adds.", metavar="DIR")
    ],
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            show_default=False,
            help="A checkpoint's or a peer's folder, or a ticket (a word, @FILE, or - for standard input): "
            "the run goes on. $P2P_CO2_TICKET if absent.",
        ),
    ] = "",
    recipe: OwnRecipe = "",
    base: Annotated[
        Path | None,
        says("Take an own loop's frozen parameters from the model that it began with.", metavar="DIR"),
    ] = None,
) -> None:
    """Write the trained model as safetensors that from_pretrained loads."""
    from p2p_co2.trained import refuse_used, write_model

    refuse_used(out)
    source = read_ticket(source)
    if source.startswith(PREFIX):
        from p2p_co2.trainer.gather import gather_swarm

        out.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as place:
            whole = Path(place) / "checkpoint"
            taken = gather_swarm(source, whole, recipe)
            print(f"the model of {taken[0].came_to}, as the swarm agrees on it", flush=True)
            notes = write_model(whole, out, recipe, base)
    else:
        notes = write_model(checkpoint_of(Path(source)), out, recipe, base)
    for note in notes:
        print(f"note: {note}")
    print(f"written to {out}")
