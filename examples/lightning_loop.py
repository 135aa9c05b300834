"""A Lightning ``Trainer`` in a swarm: the callback is the one line.

    p2p-co2 seed examples/own_loop.toml            # prints a ticket
    python examples/lightning_loop.py TICKET       # in as many terminals, on as many machines, as you like

Needs ``pip install '.[lightning]'`` in a clone of p2p-co2. Each peer goes through the data in an order of its
own. When the run is over the trainer stops, and the module holds what all peers have agreed on.
"""

from __future__ import annotations

import sys
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import p2p_co2 as co2


class Regression(lightning.LightningModule):
    """Learns the sum of the sines of sixteen numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(self.layers(inputs), targets)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)]


def main(ticket: str | None = None) -> None:
    torch.set_num_threads(1)  # several peers may share this machine, and steps this small need no more
    lightning.seed_everything(0, verbose=False)  # every peer starts from the same parameters
    inputs = torch.randn(2048, 16)
    data = TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))
    module = Regression()
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=-1, accumulate_grad_batches=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[co2.integrations.lightning.SwarmCallback(ticket)],
    )  # fmt: skip
    trainer.fit(module, DataLoader(data, batch_size=32, shuffle=True))
    with torch.no_grad():
        loss = nn.functional.mse_loss(module.layers(inputs), data.tensors[1])
    print(f"{trainer.global_step} inner steps, loss of the agreed parameters {loss.item():.4f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
