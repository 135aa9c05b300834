"""A loop of one's own that trains two models: one with the whole run, one in a further group.

python tests/group_peer.py TICKET FOLDER
"""

from __future__ import annotations

import hashlib
import sys
import time
from pathlib import Path

import torch
from torch import nn

import p2p_co2
from p2p_co2.node.environment import RunGroup
from p2p_co2.telemetry.journal import Journal

GROUP = RunGroup(hashlib.sha256(b"a group that is no stage").digest(), name="another")


def main(ticket: str, folder: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    models = nn.Linear(8, 4), nn.Linear(5, 3)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
    folder.mkdir(exist_ok=True)
    journal = Journal(folder / "events.jsonl")
    connection = p2p_co2.connect(
        ticket, p2p_co2.PeerConfig(folder=folder, board=False, min_peers=2), journal.write
    )
    peers = [connection.start(models[0], optimizers[0])]
    peers.append(connection.beside(GROUP, "another").start(models[1], optimizers[1]))
    generator = torch.Generator().manual_seed(int.from_bytes(peers[0].peer_id.encode()[-4:]))
    with peers[0], peers[1]:
        goes_on = True
        while goes_on:
            for model, optimizer in zip(models, optimizers, strict=True):
                inputs = torch.randn(4, model.in_features, generator=generator)
                model(inputs).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            goes_on = any([peer.step(tokens=4, loss=1.0) for peer in peers])
            time.sleep(0.02)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
