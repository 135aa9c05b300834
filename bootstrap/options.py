"""What the commands of this room take: each option once, with its default and its help.

A field is a typer option; ``p2p_co2.cli`` makes commands of the classes. Nothing slow is imported here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from p2p_co2.codec_specs import codec_names
from p2p_co2.config import RELAY, UPNP


def says(words: str, *names: str, **settings: Any) -> Any:
    """An option with its help. A value that stands for "absent" is not shown as its default."""
    settings.setdefault("show_envvar", False)
    return typer.Option(*names, help=words, **settings)


RunFile = Annotated[Path | None, typer.Argument(metavar="RUN.toml", help="The run; a default if absent.")]
Peers = Annotated[int, says("Peer processes.")]
Carrier = Annotated[str, says("auto, grpc or libp2p.")]
OwnRecipe = Annotated[str, says("The run's own recipe, here.", metavar="FILE.py:function")]
Profile = Annotated[str, says("Their links: fibre, cable, dsl, 4g, transatlantic, satellite or home-mix.")]
Parent = Annotated[int, says("Leave when this process ends.", hidden=True)]
Figure = float | None


@dataclass(frozen=True, kw_only=True)
class SeedOptions:
    """``run_file`` None: the default run, or that of ``also``. ``announce_host`` needs a fixed ``port``."""

    run_file: RunFile = None
    host: Annotated[str, says("Address to listen on; 0.0.0.0 for all.")] = "0.0.0.0"
    port: Annotated[int, says("Fixed port, so that tickets outlive a restart; 0 for any.")] = 0
    folder: Annotated[
        Path | None, says("Keeps the seed's identity and the published run; one for each name, if absent.")
    ] = None
    announce_host: Annotated[str, says("Address that others dial, if it is not the host's.")] = ""
    also: Annotated[str, says("Become a further seed of this run.", metavar="TICKET")] = ""
    relay: Annotated[bool, says(RELAY)] = True
    upnp: Annotated[bool, says(UPNP)] = True
    json: Annotated[bool, says("Print each ticket as a line of JSON; all else on stderr.", "--json")] = False
    parent: Parent = 0


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """A swarm on this machine: a round of every fragment each ``round_s``."""

    peers: Peers = 4
    seconds: Annotated[float, says("Length of the training.")] = 150.0
    round_s: Annotated[float, says("Seconds of a round, in which every fragment is exchanged once.")] = 2.5
    stages: Annotated[int, says("Cut the model into so many; each peer holds one.", min=1)] = 1
    rule: Annotated[str, says("How new parameters arrive: keep, co2, blend or eager.")] = "keep"
    codec: Annotated[str, says(f"{codec_names()}.")] = "q2"
    carrier: Carrier = "auto"
    device: Annotated[str, says("What all peers train on: auto, cpu, cuda or cuda:1.")] = "auto"
    folder: Annotated[Path | None, says("Where the run is written; runs/demo-<time> if absent.")] = None
    text: Annotated[Path | None, says("Train on this file or folder, not Python's own text.")] = None
    recipe: Annotated[str, says("Train your own recipe.", metavar="FILE.py:function")] = "byte-gpt"
    kill_one: Annotated[bool, says("Kill a peer half-way; another joins late.", "--kill-one")] = False
    board: Annotated[bool, says("Serve the board meanwhile, at a printed address.")] = True
    seed: Annotated[int, says("Of the first parameters.")] = 0


@dataclass(frozen=True, kw_only=True)
class RehearsalOptions:
    """A run over emulated lines. Figures change those of every profile; None: as the profile says."""

    run_file: RunFile = None
    peers: Peers = 4
    profile: Annotated[
        str,
        says(
            "Line of each peer: fibre, cable, dsl, 4g, transatlantic, satellite or home-mix; several, "
            "with commas, are given out in turn."
        ),
    ] = "dsl"
    seconds: Annotated[Figure, says("Length of the training; the run's own, or 120, if absent.")] = None
    up_mbit: Annotated[Figure, says("Another upload rate, Mbit/s.")] = None
    down_mbit: Annotated[Figure, says("Another download rate, Mbit/s.")] = None
    latency_ms: Annotated[Figure, says("Another latency, one way between two peers.")] = None
    jitter_ms: Annotated[Figure, says("Another jitter.")] = None
    loss: Annotated[Figure, says("Another share of packets lost, 0.01 for 1 %.")] = None
    carrier: Carrier = "auto"
    folder: Annotated[Path | None, says("Where the run is written; runs/rehearsal-<time> if absent.")] = None
    recipe: OwnRecipe = ""


@dataclass(frozen=True, kw_only=True)
class InitOptions:
    """A run file to begin with; 0 for what is not given. Of another model ask ``plan``."""

    up_mbit: Annotated[
        float,
        says("For the built-in model: rounds as short as this upload allows, the slowest that is welcome."),
    ] = 0.0
    peers: Annotated[int, says("Of the run, for --up-mbit.")] = 4
    step_s: Annotated[float, says("Seconds of an inner step, for --up-mbit; measured here if absent.")] = 0.0


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """A run to plan; 0 and "" for what is not given."""

    run_file: Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run to plan.")]
    peers: Annotated[int, says("Peers of the run, at most its group_size (64).")] = 4
    profile: Profile = ""
    up_mbit: Annotated[float, says("Or in figures: upload, Mbit/s.")] = 0.0
    down_mbit: Annotated[float, says("Download, Mbit/s; ten times the upload if absent.")] = 0.0
    rtt_ms: Annotated[float, says("Round-trip time, milliseconds.")] = 0.0
    loss: Annotated[float, says("Share of packets lost, such as 0.002.")] = 0.0
    link: Annotated[Path | None, says("Or measured: what doctor --json printed.", metavar="FILE.json")] = None
    step_s: Annotated[float, says("Seconds of an inner step; measured here if absent.")] = 0.0
    parameters: Annotated[int, says("Model size; the recipe's model if absent.")] = 0
    target: Annotated[float, says("Compute utilisation to reach.")] = 0.95
    hours: Annotated[float, says("What of a run without an end is looked at.")] = 24.0
    batch: Annotated[int, says("Sequences of the measured step; 0 for the recipe's.")] = 0
    threads: Annotated[int, says("CPU threads of the measured step; 0 for all cores.")] = 0
    device: Annotated[str, says("Of the measured step: auto, cpu, cuda or cuda:1.")] = "auto"
    check: Annotated[bool, says("Exit status 1 if the verdict is no.", "--check")] = False
    memory_gb: Annotated[float, says("Host memory of a peer's machine; what is free here if absent.")] = 0.0
    gpu_memory_gb: Annotated[float, says("Of its GPU, if it trains on one; that of --device if absent.")] = (
        0.0
    )
    as_json: Annotated[bool, says("Print JSON, not tables.", "--json")] = False
    plot: Annotated[Path | None, says("Draw utilisation over bandwidth.", metavar="FILE.png")] = None
