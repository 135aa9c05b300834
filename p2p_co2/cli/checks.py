"""The commands that look before anybody joins: ``plan``, ``doctor`` and ``simulate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from p2p_co2.system.ctrl_c import hand_over, take_back


def says(words: str, *names: str, **settings: Any) -> Any:
    """An option with its help."""
    return typer.Option(*names, help=words, **settings)


ConfigFile = Annotated[Path | None, typer.Option("--config", metavar="PEER.toml", help="These options.")]
Device = Annotated[str | None, typer.Option(help="torch's name of it: cpu, cuda, cuda:1.")]
Carrier = Annotated[str | None, typer.Option(help="auto, grpc or libp2p.")]
AnnounceHost = Annotated[str | None, typer.Option(help="Address that others dial.")]
Port = Annotated[int | None, typer.Option(help="0 for any.")]


def add_to(app: typer.Typer) -> None:
    """Make the commands part of ``app``."""
    app.command()(plan)
    app.command()(doctor)
    app.command()(simulate)


def doctor(
    ticket: Annotated[
        str, typer.Argument(metavar="[TICKET]", help="Of the run to look at; this machine alone if absent.")
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
    peers: Annotated[int, says("Peers of the run, at most its group_size (64).")] = 4,
    profile: Annotated[
        str, says("Their links: fibre, cable, dsl, 4g, transatlantic, satellite or home-mix.")
    ] = "",
    up_mbit: Annotated[float, says("Or in figures: upload, Mbit/s.")] = 0.0,
    down_mbit: Annotated[float, says("Download, Mbit/s; ten times the upload if absent.")] = 0.0,
    rtt_ms: Annotated[float, says("Round-trip time, milliseconds.")] = 0.0,
    loss: Annotated[float, says("Share of packets lost, such as 0.002.")] = 0.0,
    link: Annotated[
        Path | None, says("Or measured: what doctor --json printed.", metavar="FILE.json")
    ] = None,
    step_s: Annotated[float, says("Seconds of an inner step; measured here if absent.")] = 0.0,
    parameters: Annotated[int, says("Model size; the recipe's model if absent.")] = 0,
    target: Annotated[float, says("Compute utilisation to reach.")] = 0.95,
    hours: Annotated[float, says("What of a run without an end is looked at.")] = 24.0,
    batch: Annotated[int, says("Sequences of the measured step; 0 for the recipe's.")] = 0,
    threads: Annotated[int, says("CPU threads of the measured step; 0 for all cores.")] = 0,
    device: Annotated[str, says("Of the measured step: cpu, cuda, cuda:1.")] = "cpu",
    as_json: Annotated[bool, says("Print JSON, not tables.", "--json")] = False,
    plot: Annotated[Path | None, says("Draw utilisation over bandwidth.", metavar="FILE.png")] = None,
) -> None:
    """What a run will cost on given links, whether they are enough, and what to change."""
    from bootstrap.plan.links import GivenLink
    from bootstrap.plan.plan import PlanOptions
    from bootstrap.plan.report import run_plan

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
    peers: Annotated[int, says("Peers that take part.")] = 32,
    profile: Annotated[
        str, says("Their links: fibre, cable, dsl, 4g, transatlantic, satellite or home-mix.")
    ] = "home-mix",
    hours: Annotated[float, says("Virtual hours of training, if the run's own end is not sooner.")] = 1.0,
    churn: Annotated[str, says("How often each peer goes, such as 0.1/h.")] = "0/h",
    seed: Annotated[int, says("Of everything that happens by chance.")] = 0,
    folder: Annotated[Path | None, says("Where events and summary are written.")] = None,
    parameters: Annotated[int, says("Size of the model.")] = 1300000,
    step_s: Annotated[
        float, says("Seconds of a typical peer's inner step; 0: as the length of a round suggests.")
    ] = 0.0,
    storm: Annotated[
        bool,
        says("A short run of its own, every fault at once: --peers and --seed count.", "--storm"),
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
