"""How a command is made of a class of options, the options that commands share, and those of ``simulate``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from bootstrap.options import Profile, says

_Options = TypeVar("_Options")

TicketWord = Annotated[
    str,
    typer.Argument(
        metavar="[TICKET]", show_default=False,
        help="The word that the organiser's seed printed, @FILE that has it, or - for standard input; "
        "$P2P_CO2_TICKET if absent.",
    ),
]  # fmt: skip
ConfigFile = Annotated[Path | None, typer.Option("--config", metavar="PEER.toml", help="These options.")]
Device = Annotated[str | None, says("torch's name of it: cpu, cuda, cuda:1.")]
Carrier = Annotated[str | None, says("auto, grpc or libp2p.")]
AnnounceHost = Annotated[str | None, says("Address that others dial.")]
Port = Annotated[int | None, says("0 for any.")]


def takes(options: type[_Options]) -> Callable[[Callable[[_Options], int]], Callable[..., None]]:
    """Make a typer command of a function that takes ``options``, a dataclass whose fields are annotated as
    typer's parameters are, and returns the exit status."""

    def command_of(run: Callable[[_Options], int]) -> Callable[..., None]:
        def command(**given: Any) -> None:
            raise typer.Exit(run(options(**given)))

        hints = get_type_hints(options, include_extras=True)
        command.__name__, command.__doc__ = run.__name__, run.__doc__
        command.__signature__ = inspect.Signature([  # type: ignore[attr-defined]
            inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY, annotation=hints[field.name],
                default=inspect.Parameter.empty if field.default is MISSING else field.default,
            )
            for field in fields(options)  # type: ignore[arg-type]
        ])  # fmt: skip
        return command

    return command_of


@dataclass(frozen=True, kw_only=True)
class SimulationOptions:
    """``step_s`` 0: as the length of a round suggests. ``storm``: the campaign's run, not ``run_file``'s."""

    run_file: Annotated[
        Path | None, typer.Argument(metavar="[RUN.toml]", help="The run to play; none with --storm.")
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
