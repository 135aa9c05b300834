"""The command ``gather``: what it took of each stage, and what to know about that."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bootstrap.options import OwnRecipe, says
from p2p_co2.cli.models import checkpoint_of
from p2p_co2.errors import ConfigError
from p2p_co2.ticket import PREFIX, read_ticket


def gather(
    out: Annotated[Path, says("Write the whole checkpoint to this new folder.", "--out", metavar="FOLDER")],
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FOLDER",
            show_default=False,
            help="Checkpoint folders of all stages, or the run's ticket (a word, @FILE, or - for standard "
            "input); $P2P_CO2_TICKET if absent.",
        ),
    ] = None,
    recipe: OwnRecipe = "",
) -> None:
    """Make one checkpoint of the whole model out of those of its stages, from folders or a live swarm."""
    sources = [read_ticket(source) for source in sources or [""]]
    tickets = [source for source in sources if source.startswith(PREFIX)]
    if tickets and len(sources) > 1:
        raise ConfigError.of_option("FOLDER", "give folders, or one ticket alone")
    from p2p_co2.trainer.gather import gather_folders, gather_swarm

    if tickets:
        taken = gather_swarm(tickets[0], out, recipe)
    else:
        taken = gather_folders([checkpoint_of(Path(source)) for source in sources], out, recipe)
    for source in taken:
        what = source.holds if len(taken) > 1 else "whole model"
        print(f"{what}: {source.came_to}" + ("" if tickets else f", from {source.folder}"))
        for damage in source.damaged:
            print(f"  passed over, damaged: {damage}")
    if len({source.came_to for source in taken}) > 1:
        print("the stages are of different rounds: each of them goes its own way in a swarm that trains")
    print(f"written to {out}")
