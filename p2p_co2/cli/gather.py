"""The command ``gather``: what it took of each stage, and what to know about that."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bootstrap.options import OwnRecipe, says
from p2p_co2.errors import ConfigError
from p2p_co2.system.ctrl_c import hand_over, take_back
from p2p_co2.ticket import PREFIX


def gather(
    sources: Annotated[
        list[str],
        typer.Argument(metavar="FOLDER", help="Checkpoint folders of all stages, or the run's ticket."),
    ],
    out: Annotated[Path, says("A new folder for the whole checkpoint.", "--out", metavar="FOLDER")],
    recipe: OwnRecipe = "",
) -> None:
    """Make one checkpoint of the whole model out of those of its stages, from folders or a live swarm."""
    tickets = [source for source in sources if source.strip().startswith(PREFIX)]
    if tickets and len(sources) > 1:
        raise ConfigError.of_option("FOLDER", "give folders, or one ticket alone")
    take_back()
    from p2p_co2.trainer.gather import gather_folders, gather_swarm

    hand_over()
    if tickets:
        taken = gather_swarm(tickets[0], out, recipe)
    else:
        taken = gather_folders([Path(source) for source in sources], out, recipe)
    for source in taken:
        what = source.holds if len(taken) > 1 else "whole model"
        print(f"{what}: {source.came_to}" + ("" if tickets else f", from {source.folder}"))
        for damage in source.damaged:
            print(f"  passed over, damaged: {damage}")
    if len({source.came_to for source in taken}) > 1:
        print("the stages are of different rounds: each of them goes its own way in a swarm that trains")
    print(f"written to {out}")
