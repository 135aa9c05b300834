"""A recipe of one's own: ``recipe = "examples/own_recipe.py:make"`` in the run file, or
``p2p-co2 demo --recipe examples/own_recipe.py:make``.

A recipe is a function that returns a model, its data and its loss. Every peer runs the same file (its digest
is part of the run's), builds the same first parameters, and draws its own batches. Here: a small network
learns to tell two interleaved spirals apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from p2p_co2.recipes import Recipe

Batch = tuple[Tensor, Tensor]


def make(width: int = 64, noise: float = 0.1) -> Recipe:
    """Arguments are the run file's ``[recipe_options]``."""
    model = nn.Sequential(
        nn.Linear(2, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 2)
    )

    def batches(seed: int, batch: int) -> Iterator[Batch]:
        """Endless; peers pass different seeds. Points [batch, 2] and their spirals [batch]."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            spiral = torch.randint(2, (batch,), generator=generator)
            turn = torch.rand(batch, generator=generator) * 2.5 * math.pi + 0.5
            angle = turn + math.pi * spiral
            points = torch.stack([angle.cos(), angle.sin()], 1) * turn[:, None] / 4
            yield points + noise * torch.randn(batch, 2, generator=generator), spiral

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        points, spiral = (tensor.to(next(model.parameters()).device) for tensor in batch)
        return F.cross_entropy(model(points), spiral)

    def held_out(model: nn.Module) -> float:
        with torch.no_grad():
            return float(loss(model, next(batches(seed=2**40, batch=2048))))

    return Recipe(
        model=model,
        batches=batches,
        loss=loss,
        tokens=lambda batch: len(batch[0]),
        held_out=held_out,
        default_batch=64,
    )
