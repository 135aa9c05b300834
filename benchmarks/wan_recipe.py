"""A recipe for links: many parameters, little computing, steps of a fixed length.

On a machine whose peers share two cores the training cannot be both real and undisturbed, so here a step
computes little (a table of vectors learns a fixed function of its row, a few rows at a time) and then sleeps
until ``step_s`` is over. What is measured is what the network costs; the loss falls all the same, faster the
more rows all peers together have seen. Gradients are ``sparse``, with the same sums: dense ones are as large
as the tables, and four peers that fill 134 MB of zeros every second take a quarter of two cores with it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from p2p_co2.recipes import Recipe

LEARNING_RATE = 2.5e5
"""The mean over batch, width and tables makes gradients small: this moves a row a quarter of the way."""
HELD_OUT_ROWS = 512
"""At once: more would take its megabytes from the system anew each time, while others exchange."""
FREQUENCIES = torch.linspace(0.001, 3.0, 512)


def make(
    rows: int = 8192, width: int = 512, parts: int = 4, step_s: float = 0.5, sparse: bool = True
) -> Recipe:
    """``parts`` tables of ``rows`` by ``width`` parameters."""
    model = nn.ModuleList([nn.Embedding(rows, width, sparse=sparse) for _ in range(parts)])
    for table in model:
        nn.init.zeros_(table.weight)
    began_at = [0.0]

    def batches(seed: int, batch: int) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield torch.randint(rows, (parts, batch), generator=generator)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        began_at[0] = max(began_at[0] + step_s, time.monotonic() - step_s)
        time.sleep(max(0.0, began_at[0] - time.monotonic()))
        return _loss(model, batch)

    def _loss(model: nn.Module, batch: Tensor) -> Tensor:
        errors = []
        for table, chosen in zip(model.children(), batch, strict=True):
            wanted = torch.sin(chosen[:, None] * FREQUENCIES[:width])
            errors.append(F.mse_loss(table(chosen), wanted))
        return torch.stack(errors).mean()

    def held_out(model: nn.Module) -> float:
        errors = 0.0
        chosen = torch.arange(0, rows, 7)
        with torch.no_grad():
            for some in chosen.split(HELD_OUT_ROWS):
                errors += len(some) * float(_loss(model, some.expand(parts, -1)))
        return errors / len(chosen)

    return Recipe(
        model=model,
        batches=batches,
        loss=loss,
        tokens=lambda batch: int(batch.numel()),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=LEARNING_RATE),
        held_out=held_out,
        default_batch=512,
    )
