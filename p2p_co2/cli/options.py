"""The options that commands share, and those of ``simulate``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from bootstrap.options import Profile, says

TicketWord = Annotated[
    str,
    typer.Argument(
        metavar="TICKET", show_default=False,
        help="The word that the organiser's seed printed, @FILE that has it, or - for standard input; "
        "$P2P_CO2_TICKET if absent.",
    ),
]  # fmt: skip
TRAINED = "What is trained"
OwnData = Annotated[
    Path | None, says("Your own data, for a run's own recipe that takes some.", rich_help_panel=TRAINED)
]
OwnText = Annotated[Path | None, says("Your own file or folder of text.", rich_help_panel=TRAINED)]
OwnTokens = Annotated[Path | None, says("Your own file of token ids.", rich_help_panel=TRAINED)]
ConfigFile = Annotated[
    Path | None, says("A file with these options; the command line wins.", "--config", metavar="PEER.toml")
]


def own_data(data: Path | None, text: Path | None, tokens: Path | None) -> dict[str, str]:
    """What was named of it, as recipes take it."""
    given = {"data": data, "text": text, "tokens": tokens}
    return {key: str(path.resolve()) for key, path in given.items() if path}


@dataclass(frozen=True, kw_only=True)
class SimulationOptions:
    """``step_s`` 0: as the length of a round suggests. ``storm``: the campaign's run, not ``run_file``'s."""

    run_file: Annotated[
        Path | None, typer.Argument(metavar="RUN.toml", help="The run to play; none with --storm.")
    ] = None
    peers: Annotated[int, says("Peers that take part.")] = 32
    profile: Profile = "home-mix"
    hours: Annotated[float, says("Virtual hours of training, if the run's own end is not sooner.")] = 1.0
    churn: Annotated[str, says("How often each peer goes, such as 0.1/h.")] = "0/h"
    seed: Annotated[int, says("Of everything that happens by chance.")] = 0
    folder: Annotated[Path | None, says("Where events and summary are written.")] = None
    parameters: Annotated[int, says("Size of the model.")] = 1300000
    step_s: Annotated[
        float, says("Seconds of a typical peer's inner step; 0: as the length of a round suggests.")
    ] = 0.0
    storm: Annotated[
        bool, says("A short run of its own, every fault at once: --peers and --seed count.", "--storm")
    ] = False
    stages: Annotated[
        int, says("Of a storm: microbatches between so many stages are played; --seed counts.")
    ] = 1
    as_json: Annotated[bool, says("Print JSON, as in summary.json.", "--json")] = False
