# Made by `make docs` from the code: declare an option on PeerConfig, or in swarm.joining._join.
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypedDict

import torch
from torch import nn

from p2p_co2.config import PeerConfig
from p2p_co2.swarm.joining import EventSink

class Options(TypedDict, total=False):
    run: str | None
    "The ticket, or \"@file\" that holds it; $P2P_CO2_TICKET if left out."
    config: str | Path | PeerConfig | None
    "A peer file, or what was read of one: the other options override it."
    resume: bool | None
    "True insists on a checkpoint in the folder; False begins with this model. Left out: as it comes."
    start_over: bool
    "Begin anew, whatever others have trained and left."
    lr_schedule: Callable[[float], float] | None
    "A factor on the optimizer's own rates at a position, in rounds. Left out: the rates are the program's."
    fits_swarm: bool
    "Multiply the rates, one machine's, by the root of the number of peers in the last means."
    evaluate: Callable[[nn.Module], float | Mapping[str, float]] | None
    "A held-out loss, measured on the agreed parameters now and then, for boards; or a mapping of figures, one of them \"loss\"."
    journal: bool
    "Whether the folder gets an `events.jsonl`; it does if left out."
    on_event: EventSink | None
    "Hears every event, from several threads. Left out: warnings are printed, and `progress`."
    progress: bool
    "A line each ten seconds on stderr, if `on_event` is left out: round, time left, share, loss."
    scaler: torch.amp.GradScaler | None
    "With which `Swarm.step` steps: the loss is scaled by the program."
    max_grad_norm: float | None
    "`Swarm.step` clips gradients to this norm."
    folder: str | Path | None
    "Keep identity, checkpoints, events here; one for each run, if absent. ~ is your home."
    name: str | None
    "Give this peer a name; two words of its key, if absent."
    min_peers: int | None
    "Wait (bounded) for this many before training."
    checkpoint_every: float | None
    "Write a checkpoint so often; 0 for what 100 GB of writes a day allow."
    carrier: str | None
    "Carry by auto, grpc or libp2p."
    host: str | None
    "Listen on this address; all of this machine's, if the seeds are elsewhere."
    announce_host: str | None
    "Have others dial this address, if it is not the host's."
    grpc_port: int | None
    "Receive here what peers send; 0 for any."
    libp2p_port: int | None
    "Find peers, and relay, here; 0 for any."
    upnp: bool | None
    "Ask the router to let others in (UPnP, NAT-PMP)."
    relay: bool | None
    "Pass on traffic between peers that cannot reach each other directly."
    board: bool | None
    "Serve a page on loopback; idle until looked at."
    board_port: int | None
    "Serve that page there; 0 for any."
    upload: float | str | None
    "Send at most this: bytes per second, or 500k, 2M, 20Mbit; 0 for no cap."
    download: float | str | None
    "Receive at most this, likewise."
    threads: int | None
    "Train with so many CPU threads; 0 for the number of cores."
    hours: str | None
    "Train only then, local time: 22:00-07:00, or several with commas."
    rest_while: str | None
    "Rest while you use gpu, input, load; or while on battery, or in heat."
    rest_for: str | None
    "Rest while programs of these names run: blender,steam."
    idle_for: float | str | None
    "Go on when none of that was in use for so long: 90s, 5m, 1h."
