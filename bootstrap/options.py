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
Peers = Annotated[int, says("Start so many peers, each a process of its own.")]
Carrier = Annotated[str, says("Carry messages by auto, grpc or libp2p.")]
OwnRecipe = Annotated[str, says("Take the run's own recipe from this file.", metavar="FILE.py:function")]
Profile = Annotated[
    str, says("Set their lines: fibre, cable, dsl, 4g, transatlantic, satellite or home-mix.")
]
Parent = Annotated[int, says("Leave when this process ends.", hidden=True)]
Figure = float | None


@dataclass(frozen=True, kw_only=True)
class SeedOptions:
    """``run_file`` None: the default run, or that of ``also``. ``announce_host`` needs a fixed ``port``."""

    run_file: RunFile = None
    host: Annotated[str, says("Listen on this address; 0.0.0.0 for all.")] = "0.0.0.0"
    port: Annotated[int, says("Keep this port, so that tickets outlive a restart; 0 for any.")] = 0
    folder: Annotated[
        Path | None,
        says("Keep the seed's identity and the published run here; one for each name, if absent."),
    ] = None
    announce_host: Annotated[str, says("Have others dial this address, if it is not the host's.")] = ""
    also: Annotated[str, says("Become a further seed of this run.", metavar="TICKET")] = ""
    relay: Annotated[bool, says(RELAY)] = True
    upnp: Annotated[bool, says(UPNP)] = True
    json: Annotated[bool, says("Print each ticket as a line of JSON; all else on stderr.", "--json")] = False
    parent: Parent = 0


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """A swarm on this machine: a round of every fragment each ``round_s``."""

    peers: Peers = 4
    seconds: Annotated[float, says("Train for so many seconds.")] = 150.0
    round_s: Annotated[
        float, says("Make a round, in which every fragment is exchanged once, so many seconds.")
    ] = 2.5
    stages: Annotated[int, says("Cut the model into so many; each peer holds one.", min=1)] = 1
    rule: Annotated[str, says("Choose how new parameters arrive: keep, co2, blend or eager.")] = "keep"
    codec: Annotated[str, says(f"Encode with {codec_names()}.")] = "q2"
    carrier: Carrier = "auto"
    device: Annotated[str, says("Train all peers on auto, cpu, cuda or cuda:1.")] = "auto"
    folder: Annotated[Path | None, says("Write the run there; to runs/demo-<time> if absent.")] = None
    text: Annotated[Path | None, says("Train on this file or folder, not Python's own text.")] = None
    recipe: Annotated[str, says("Train your own recipe.", metavar="FILE.py:function")] = "byte-gpt"
    kill_one: Annotated[bool, says("Kill a peer half-way; another joins late.", "--kill-one")] = False
    board: Annotated[bool, says("Serve the board meanwhile, at a printed address.")] = True
    seed: Annotated[int, says("Draw the first parameters from this seed.")] = 0


@dataclass(frozen=True, kw_only=True)
class RehearsalOptions:
    """A run over emulated lines. Figures change those of every profile; None: as the profile says."""

    run_file: RunFile = None
    peers: Peers = 4
    profile: Annotated[
        str,
        says(
            "Give each peer such a line: fibre, cable, dsl, 4g, transatlantic, satellite or home-mix; "
            "several, with commas, are given out in turn."
        ),
    ] = "dsl"
    seconds: Annotated[Figure, says("Train so many seconds; the run's own, or 120, if absent.")] = None
    up_mbit: Annotated[Figure, says("Play another upload rate, Mbit/s.")] = None
    down_mbit: Annotated[Figure, says("Play another download rate, Mbit/s.")] = None
    latency_ms: Annotated[Figure, says("Play another latency, one way between two peers.")] = None
    jitter_ms: Annotated[Figure, says("Play another jitter.")] = None
    loss: Annotated[Figure, says("Play another share of packets lost, 0.01 for 1 %.")] = None
    carrier: Carrier = "auto"
    folder: Annotated[Path | None, says("Write the run there; to runs/rehearsal-<time> if absent.")] = None
    recipe: OwnRecipe = ""


@dataclass(frozen=True, kw_only=True)
class InitOptions:
    """A run file to begin with; 0 for what is not given. Of another model ask ``plan``."""

    up_mbit: Annotated[
        float,
        says("Make the built-in model's rounds as short as this upload, the slowest welcome, allows."),
    ] = 0.0
    peers: Annotated[int, says("Take so many peers, with --up-mbit.")] = 4
    step_s: Annotated[
        float, says("Take so many seconds for an inner step, with --up-mbit; measured here if absent.")
    ] = 0.0


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """A run to plan; 0 and "" for what is not given."""

    run_file: Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run to plan.")]
    peers: Annotated[int, says("Plan for so many peers, at most the run's group_size (64).")] = 4
    profile: Profile = ""
    up_mbit: Annotated[float, says("Plan for this upload, Mbit/s.")] = 0.0
    down_mbit: Annotated[float, says("Plan for this download, Mbit/s; ten times the upload if absent.")] = 0.0
    rtt_ms: Annotated[float, says("Plan for this round-trip time, milliseconds.")] = 0.0
    loss: Annotated[float, says("Plan for this share of packets lost, such as 0.002.")] = 0.0
    link: Annotated[Path | None, says("Read what doctor --json printed.", metavar="FILE.json")] = None
    step_s: Annotated[float, says("Plan for inner steps of so many seconds; measured here if absent.")] = 0.0
    parameters: Annotated[int, says("Plan for a model of this size; the recipe's if absent.")] = 0
    target: Annotated[float, says("Aim at this compute utilisation.")] = 0.95
    hours: Annotated[float, says("Look at so many hours of a run without an end.")] = 24.0
    batch: Annotated[int, says("Measure a step of so many sequences; 0 for the recipe's.")] = 0
    threads: Annotated[int, says("Measure with so many CPU threads; 0 for all cores.")] = 0
    device: Annotated[str, says("Measure on auto, cpu, cuda or cuda:1.")] = "auto"
    check: Annotated[bool, says("End with exit status 1 if the verdict is no.", "--check")] = False
    memory_gb: Annotated[float, says("Plan for this host memory; what is free here if absent.")] = 0.0
    gpu_memory_gb: Annotated[float, says("Plan for this memory of a GPU; that of --device if absent.")] = 0.0
    as_json: Annotated[bool, says("Print JSON, not tables.", "--json")] = False
    plot: Annotated[Path | None, says("Draw utilisation over bandwidth.", metavar="FILE.png")] = None
