"""The commands that look before anybody joins: ``plan``, ``doctor`` and ``simulate``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from bootstrap.options import PlanOptions, says
from p2p_co2.cli.options import AnnounceHost, Carrier, ConfigFile, Device, Port, SimulationOptions, takes
from p2p_co2.system.ctrl_c import hand_over, take_back


def doctor(
    ticket: Annotated[
        str,
        typer.Argument(
            metavar="[TICKET]",
            show_default=False,
            help="Of the run to look at (a word, @FILE, or - for standard input), or $P2P_CO2_TICKET; this "
            "machine alone if absent.",
        ),
    ] = "",
    config_file: ConfigFile = None,
    folder: Annotated[Path | None, says("Where join will keep its checkpoints.")] = None,
    device: Device = None,
    threads: Annotated[int | None, says("CPU threads for training.")] = None,
    carrier: Carrier = None,
    host: Annotated[str | None, says("Address to listen on; 0.0.0.0 for all.")] = None,
    announce_host: AnnounceHost = None,
    grpc_port: Port = None,
    libp2p_port: Port = None,
    as_json: Annotated[bool, says("Print JSON; plan --link reads it.", "--json")] = False,
) -> None:
    """Look whether this machine can take part, and how, before anything is downloaded; give it join's
    options. Exit status 0: all well; 1: works with limits; 2: cannot work."""
    from p2p_co2.peer_options import peer_config
    from p2p_co2.system.folders import data_home
    from p2p_co2.ticket import TICKET_VARIABLE, read_ticket
    from peers.doctor import run_doctor

    if ticket or os.environ.get(TICKET_VARIABLE):
        ticket = read_ticket(ticket)

    config = peer_config(
        config_file,
        {
            "folder": folder, "device": device, "limits.threads": threads, "carrier": carrier, "host": host,
            "announce_host": announce_host, "grpc_port": grpc_port, "libp2p_port": libp2p_port,
        },
        ticket or None,
        lambda: data_home() / "runs",
    )  # fmt: skip
    raise typer.Exit(run_doctor(config, ticket, as_json))


@takes(PlanOptions)
def plan(options: PlanOptions) -> int:
    """What a run will cost on given links, whether they are enough, and what to change."""
    from bootstrap.plan.stages import run_any_plan

    return run_any_plan(options)


@takes(SimulationOptions)
def simulate(options: SimulationOptions) -> int:
    """Play a run of many peers on virtual time, with the real protocol, and check its laws at every step.
    Exit status 0: no law was broken."""
    take_back()
    from p2p_co2.cli.simulate import run_simulation

    hand_over()
    return run_simulation(options)
