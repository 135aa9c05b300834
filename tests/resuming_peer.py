"""A test's peer process: a user's own loop that writes a checkpoint each second and is started again.

    python tests/resuming_peer.py TICKET FOLDER WIDTH STEPS [--start-over]

It has what such loops have: a scheduler, a frozen base, buffers and an optimizer's entries of all kinds.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import p2p_co2
from p2p_co2.swarm.data import Place, passes

RATE, GAMMA = 1e-2, 0.99


class Adapted(nn.Module):
    """A frozen base and what is trained on top of it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base, self.adapter = nn.Linear(8, width).requires_grad_(False), nn.Linear(width, 1)
        self.register_buffer("rotary", torch.polar(torch.ones(4), torch.arange(4.0)))
        self.register_buffer("mask", torch.eye(4).to_sparse())
        self.register_buffer("cache", torch.eye(4).to_sparse(), persistent=False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.uint16))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.adapter(self.base(inputs).tanh()))


def main() -> None:
    ticket, folder, width, steps, *over = sys.argv[1:]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Adapted(int(width))
    optimizer = torch.optim.Adam(model.parameters(), lr=float(np.float32(RATE)))
    optimizer.param_groups[0].update(norms=[np.float32(1.0)], state_dtype=torch.bfloat16)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, GAMMA)
    config = p2p_co2.PeerConfig(folder=Path(folder), board=False, checkpoint_every_s=1.0)
    with p2p_co2.join(ticket, model, optimizer, config, start_over=bool(over)) as peer:
        print(f"starts at {peer.inner_steps} buffer {int(model.steps.item())}", flush=True)
        place = Place(lambda epoch: epoch, peer.keep_place(lambda: str(place)))
        rows = DataLoader(TensorDataset(torch.arange(16 * 80)), batch_size=16)
        batches, seen = passes(rows, place, lambda _: True), list[int]()
        scheduler.last_epoch = peer.inner_steps
        for _ in range(int(steps)):
            seen += next(batches)[0].tolist()
            inputs = torch.randn(16, 8)
            loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            model.steps.fill_(peer.inner_steps + 1)
            peer.step(tokens=16, loss=loss)
            time.sleep(0.05)
    print("rows", *seen, flush=True)
    print("rate", optimizer.param_groups[0]["lr"], flush=True)


if __name__ == "__main__":
    main()
