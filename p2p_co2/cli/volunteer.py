"""The commands of a volunteer: ``doctor`` and ``join``. Those of peers that run already are in ``here``."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

from bootstrap.options import Parent, says
from p2p_co2.cli import options as shared
from p2p_co2.cli.command import LINE, LOUDNESS, Loudness, PeerSettings, variable_of
from p2p_co2.config import STAGES
from p2p_co2.errors import ConfigError
from p2p_co2.peer_options import peer_config
from p2p_co2.system.folders import data_home, peer_folder
from p2p_co2.ticket import TICKET_VARIABLE, Ticket, read_ticket

NOTHING = PeerSettings()
"""No setting of a peer was given."""


def doctor(
    ticket: Annotated[
        str,
        typer.Argument(
            metavar="TICKET",
            show_default=False,
            help="The ticket (a word, @FILE, or - for standard input), or $P2P_CO2_TICKET; this "
            "machine alone if absent.",
        ),
    ] = "",
    config: shared.ConfigFile = None,
    json: Annotated[bool, says("Print JSON; plan --link reads it.", "--json")] = False,
    settings: PeerSettings = NOTHING,
) -> int:
    """Look whether this machine can take part, and how, before anything is downloaded; give it join's
    options. Exit status 0: all well; 1: works with limits; 2: cannot work."""
    from peers.doctor import run_doctor

    if ticket or os.environ.get(TICKET_VARIABLE):
        ticket = read_ticket(ticket)
    made = peer_config(config, settings, ticket or None, lambda: data_home() / "runs")
    is_quiet = LOUDNESS.get() is Loudness.QUIET and not json

    def say(line: str) -> None:
        if not (is_quiet and line.startswith("ok ")):
            print(line)

    return run_doctor(made, ticket, json, say)


def join(
    context: typer.Context,
    ticket: shared.TicketWord = "",
    config: shared.ConfigFile = None,
    resume: Annotated[
        bool, says("Insist on the checkpoint in the folder: it is gone on from anyway.", "--resume")
    ] = False,
    start_over: Annotated[bool, says("Begin anew, whatever was trained before.", "--start-over")] = False,
    recipe: Annotated[
        str,
        says(
            "Take the run's own recipe from this file.",
            metavar="FILE.py:function",
            rich_help_panel=shared.TRAINED,
        ),
    ] = "",
    data: shared.OwnData = None,
    text: shared.OwnText = None,
    tokens: shared.OwnTokens = None,
    settings: PeerSettings = NOTHING,
    restart_stage: Annotated[
        bool,
        says(
            "Begin the stage of --stage anew, where nobody has it any more.",
            "--restart-stage",
            rich_help_panel=STAGES,
        ),
    ] = False,
    parent: Parent = 0,
) -> None:
    """Join a run and train. Ctrl-C leaves cleanly, a second Ctrl-C at once."""
    if restart_stage and settings["stage"] is None:
        raise ConfigError.of_option("--restart-stage", "say which stage is to begin anew, with --stage N")
    is_typed = bool(ticket)
    ticket = read_ticket(ticket)
    made = peer_config(config, settings, ticket, lambda: peer_folder(Ticket.parse(ticket).run))
    from peers.daemon import JoinOptions, import_slow, join_run

    options = JoinOptions(
        ticket=ticket, config=made, recipe=recipe, data=shared.own_data(data, text, tokens), resume=resume,
        start_over=start_over or restart_stage, parent=parent,
    )  # fmt: skip
    import_slow()
    from p2p_co2.cli.join import JoinWatch

    again = "" if parent else _again(context, made.folder, is_typed)
    join_run(options, JoinWatch(loudness=LOUDNESS.get(), come_back=again, folder=made.folder))


_ANEW = {"--start-over", "--restart-stage"}


def _again(context: typer.Context, folder: Path, is_typed: bool) -> str:
    """The command that goes on later where this one ends, with the variables that it read; where no ticket
    was typed, that of ``folder``."""
    words = [f"@{folder}/ticket" if word == "-" else word for word in LINE.get() if word not in _ANEW]
    words += [] if is_typed else [f"@{folder}/ticket"]
    if folder.name.startswith("peer-") and folder.is_relative_to(data_home()):
        words += ["--folder", str(folder)]  # the first free one may be another's by then
    read = {
        variable_of(option.name): value
        for option in context.command.params
        if option.name and not _ANEW & set(option.opts)
        if (value := os.environ.get(variable_of(option.name)))
    }
    read.pop(TICKET_VARIABLE, None)
    return "".join(f"{name}={shlex.quote(value)} " for name, value in read.items()) + shlex.join(words)
