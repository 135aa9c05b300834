"""Train in your own loop: any ``torch.nn.Module``, any inner ``torch.optim`` optimizer, five lines for the
swarm. This is the lower layer, a ``Peer``; ``co2.join(model, optimizer, run=TICKET)`` gives the upper one,
with ``swarm.step`` and ``swarm.until_done`` (docs/how-to/training-loops.md).

    p2p-co2 seed examples/own_loop.toml            # prints a ticket
    python examples/own_loop.py TICKET             # in as many terminals, on as many machines, as you like

Every peer must build the same model with the same starting parameters, hence the fixed seed; the data is each
peer's own.
"""

import os
import sys
from pathlib import Path

import torch

import p2p_co2  # 1


def main(ticket: str = "", folder: str = f"runs/own-loop-{os.getpid()}") -> None:
    ticket = ticket or os.environ.get("P2P_CO2_TICKET", "")
    torch.set_num_threads(1)  # several peers may share this machine, and steps this small need no more
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(torch.seed())

    with p2p_co2.join(ticket, model, optimizer, p2p_co2.PeerConfig(folder=Path(folder))) as peer:  # 2
        while True:
            inputs = torch.randn(64, 16, generator=data)
            loss = ((model(inputs) - inputs.sin().sum(1, keepdim=True)) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if not peer.step(tokens=64, loss=loss):  # 3
                break  # 4
        print(f"{peer.inner_steps} inner steps, loss {loss.item():.4f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
