"""A test's peer with an own loop, a frozen base and running statistics.

    python tests/meeting_peer.py TICKET FOLDER KIND

KIND "right" is the model that all peers share; "turned" has a matrix of the same size and another shape,
"other-base" other frozen values. It says its held-out loss: "joined at LOSS" before its first step, "fresh at
LOSS" with statistics of nothing, "left at LOSS" after its last step; stop it with SIGINT.
"""

from __future__ import annotations

import copy
import signal
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from p2p_co2.config import PeerConfig
from p2p_co2.telemetry.journal import Journal
from p2p_co2.trainer import join
from tests.paced_recipe import Descent


def make_model(kind: str) -> nn.Sequential:
    torch.manual_seed(0)
    base, inner = nn.Linear(16, 16), nn.Linear(16, 64, bias=False)
    if kind == "turned":
        inner = nn.Linear(64, 16, bias=False)
    if kind == "other-base":
        with torch.no_grad():
            base.weight.add_(0.01)
    base.requires_grad_(False)
    return nn.Sequential(base, inner, nn.BatchNorm1d(64), nn.Linear(64, 1))


def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Inputs far from what fresh running statistics expect."""
    inputs = 5.0 + 3.0 * torch.randn(64, 16, generator=generator)
    return inputs, inputs.mean(1, keepdim=True)


@torch.no_grad()
def held_out_loss(model: nn.Module) -> float:
    inputs, wanted = draw(torch.Generator().manual_seed(99))
    model.eval()
    loss = float(((model(inputs) - wanted) ** 2).mean())
    model.train()
    return loss


def main(ticket: str, folder: Path, kind: str) -> None:
    torch.set_num_threads(1)
    model = make_model(kind)
    optimizer = Descent([one for one in model.parameters() if one.requires_grad], lr=0.01)
    generator = torch.Generator().manual_seed(len(folder.name))
    folder.mkdir(parents=True, exist_ok=True)
    with Journal(folder / "events.jsonl") as journal:
        config = PeerConfig(folder=folder, board=False)
        with join(ticket, model, optimizer, config, journal.write) as peer:  # type: ignore[arg-type]
            signal.signal(signal.SIGINT, lambda *_: peer.stop())
            fresh = copy.deepcopy(model)
            fresh[2].reset_running_stats()  # type: ignore[operator]
            print(f"fresh at {held_out_loss(fresh)}", flush=True)
            print(f"joined at {held_out_loss(model)}", flush=True)
            while True:
                inputs, wanted = draw(generator)
                loss = ((model(inputs) - wanted) ** 2).mean()
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                time.sleep(0.02)
                if not peer.step(tokens=64, loss=loss):
                    break
    print(f"left at {held_out_loss(model)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
