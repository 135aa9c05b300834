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
    Path | None, says("Use this data, where a run's own recipe takes some.", rich_help_panel=TRAINED)
]
OwnText = Annotated[Path | None, says("Use this file or folder of text.", rich_help_panel=TRAINED)]
OwnTokens = Annotated[Path | None, says("Use this file of token ids.", rich_help_panel=TRAINED)]
ConfigFile = Annotated[
    Path | None,
    says("Read these options from a file; the command line wins.", "--config", metavar="PEER.toml"),
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
    peers: Annotated[int, says("Play so many peers.")] = 32
    profile: Profile = "home-mix"
    hours: Annotated[float, says("Play so many hours, if the run's own end is not sooner.")] = 1.0
    churn: Annotated[str, says("Have each peer go so often, such as 0.1/h.")] = "0/h"
    seed: Annotated[int, says("Draw all chance from this seed.")] = 0
    folder: Annotated[Path | None, says("Write events and summary there.")] = None
    parameters: Annotated[int, says("Play a model of this size.")] = 1300000
    step_s: Annotated[
        float, says("Play a typical inner step of so many seconds; 0: as the length of a round suggests.")
    ] = 0.0
    storm: Annotated[
        bool, says("Play a short run of its own, every fault at once: --peers and --seed count.", "--storm")
    ] = False
    stages: Annotated[int, says("Play a storm of microbatches between so many stages; --seed counts.")] = 1
    as_json: Annotated[bool, says("Print JSON, as in summary.json.", "--json")] = False
