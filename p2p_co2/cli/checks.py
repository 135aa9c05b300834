"""The commands that look before anybody joins: ``plan``, ``doctor`` and ``simulate``. On the floor of
``cli``, which adds them to the program; a file of their own because ``cli`` has enough.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from p2p_co2.cli.ctrl_c import hand_over, take_back
from p2p_co2.peer_options import peer_config


def add_to(app: typer.Typer) -> None:
    """Make the commands part of ``app``."""
    app.command()(plan)
    app.command()(doctor)
    app.command()(simulate)


def doctor(
    ticket: Annotated[
        str, typer.Argument(metavar="[TICKET]", help="Of the run to look at; this machine alone if absent.")
    ] = "",
    config_file: Annotated[
        Path | None, typer.Option("--config", metavar="PEER.toml", help="These options.")
    ] = None,
    folder: Annotated[Path | None, typer.Option(help="Where join will keep its checkpoints.")] = None,
    device: Annotated[str | None, typer.Option(help="torch's name of it: cpu, cuda, cuda:1.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads for training.")] = None,
    carrier: Annotated[str | None, typer.Option(help="auto, grpc or libp2p.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = None,
    announce_host: Annotated[str | None, typer.Option(help="Address that others dial.")] = None,
    grpc_port: Annotated[int | None, typer.Option(help="0 for any.")] = None,
    libp2p_port: Annotated[int | None, typer.Option(help="0 for any.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; plan --link reads it.")] = False,
) -> None:
    """Look whether this machine can take part, and how, before anything is downloaded; give it join's
    options. Exit status 0: all well; 1: works with limits; 2: cannot work."""
    from peers.doctor import DoctorOptions, run_doctor

    config = peer_config(
        config_file,
        {
            "folder": folder, "device": device, "limits.threads": threads, "carrier": carrier, "host": host,
            "announce_host": announce_host, "grpc_port": grpc_port, "libp2p_port": libp2p_port,
        },
        ticket,
    )  # fmt: skip
    raise typer.Exit(run_doctor(DoctorOptions(config=config, ticket=ticket, as_json=as_json)))


def plan(
    run_file: Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run to plan.")],
    peers: Annotated[int, typer.Option(help="Peers of the run; a round has at most its group_size.")] = 4,
    profile: Annotated[
        str, typer.Option(help="Their links: fibre, cable, dsl, 4g, transatlantic, satellite or home-mix.")
    ] = "",
    up_mbit: Annotated[float, typer.Option(help="Or in figures: upload, Mbit/s.")] = 0.0,
    down_mbit: Annotated[float, typer.Option(help="Download, Mbit/s; ten times the upload if absent.")] = 0.0,
    rtt_ms: Annotated[float, typer.Option(help="Round-trip time, milliseconds.")] = 0.0,
    loss: Annotated[float, typer.Option(help="Share of packets lost, such as 0.002.")] = 0.0,
    link: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="Or measured: what doctor --json printed.")
    ] = None,
    step_s: Annotated[float, typer.Option(help="Seconds of an inner step; measured here if absent.")] = 0.0,
    parameters: Annotated[int, typer.Option(help="Model size; the recipe's model if absent.")] = 0,
    target: Annotated[float, typer.Option(help="Compute utilisation to reach.")] = 0.95,
    hours: Annotated[float, typer.Option(help="What of a run without an end is looked at.")] = 24.0,
    batch: Annotated[int, typer.Option(help="Sequences of the measured step; 0 for the recipe's.")] = 0,
    threads: Annotated[int, typer.Option(help="CPU threads of the measured step; 0 for all cores.")] = 0,
    device: Annotated[str, typer.Option(help="Of the measured step: cpu, cuda, cuda:1.")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, not tables.")] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw utilisation over bandwidth.")
    ] = None,
) -> None:
    """What a run will cost on given links, whether they are enough, and what to change."""
    from bootstrap.plan import PlanOptions, run_plan
    from bootstrap.plan.links import GivenLink

    given = GivenLink(
        profile=profile, up_mbit=up_mbit, down_mbit=down_mbit, rtt_ms=rtt_ms, loss=loss, file=link
    )
    options = PlanOptions(
        run_file=run_file, peers=peers, step_s=step_s, parameters=parameters, link=given, target=target,
        hours=hours, batch=batch, threads=threads, device=device, as_json=as_json, plot=plot,
    )  # fmt: skip
    raise typer.Exit(run_plan(options))


def simulate(
    run_file: Annotated[
        Path | None, typer.Argument(metavar="[RUN.toml]", help="The run to play; none with --storm.")
    ] = None,
    peers: Annotated[int, typer.Option(help="Peers that take part.")] = 32,
    profile: Annotated[
        str, typer.Option(help="Their links: fibre, cable, dsl, 4g, transatlantic, satellite or home-mix.")
    ] = "home-mix",
    hours: Annotated[
        float, typer.Option(help="Virtual hours of training, if the run's own end is not sooner.")
    ] = 1.0,
    churn: Annotated[str, typer.Option(help="How often each peer goes, such as 0.1/h.")] = "0/h",
    seed: Annotated[int, typer.Option(help="Of everything that happens by chance.")] = 0,
    folder: Annotated[Path | None, typer.Option(help="Where events and summary are written.")] = None,
    parameters: Annotated[int, typer.Option(help="Size of the model.")] = 1_300_000,
    step_s: Annotated[
        float,
        typer.Option(help="Seconds of a typical peer's inner step; 0: as the length of a round suggests."),
    ] = 0.0,
    storm: Annotated[
        bool,
        typer.Option(
            "--storm", help="A short run of its own, every fault at once: --peers and --seed count."
        ),
    ] = False,
) -> None:
    """Play a run of many peers on virtual time, with the real protocol, and check its laws at every step.
    Exit status 0: no law was broken."""
    take_back()
    from p2p_co2.cli.simulate import SimulationOptions, read_churn, run_simulation

    hand_over()
    options = SimulationOptions(
        run_file=run_file, peers=peers, profile=profile, hours=hours, churn_per_h=read_churn(churn),
        seed=seed, folder=folder, parameters=parameters, step_s=step_s, storm=storm,
    )  # fmt: skip
    raise typer.Exit(run_simulation(options))
