"""A recipe of stages whose computing is a rest of fixed length, for ``pipeline.py``: so that many stages fit
few cores, and only links and waits decide.

A stage rests ``stage_s`` in a forward and twice as long in a backward; what crosses is a microbatch of
``positions`` tokens of ``width`` values. ``bulk``: parameters of a stage beside, which rounds exchange.
``STAGE_SLOWER`` in the environment makes one process so many times slower, and not the run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from p2p_co2.recipes import Recipe, Stages

VOCABULARY = 16


class Rest(torch.autograd.Function):
    """The identity, which takes its time both ways."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradients[0], None


class PacedStage(nn.Module):
    """``forward``: hidden [sequences, positions, width], or at the first stage token ids [sequences,
    positions], to hidden."""

    def __init__(self, is_first: bool, width: int, stage_s: float, bulk: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width) if is_first else None
        self.scale, self.bulk = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(bulk))
        self.seconds = stage_s * float(os.environ.get("STAGE_SLOWER", "1"))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.embedding(inputs) if self.embedding is not None else inputs
        return Rest.apply(hidden * self.scale + self.bulk.mean(), self.seconds)  # type: ignore[no-any-return]


def make(stage_s: float = 0.05, positions: int = 512, width: int = 160, bulk: int = 1000) -> Recipe:
    """Arguments are the run file's ``[recipe_options]``."""

    def stages(count: int) -> Stages:
        makers = [lambda first=stage == 0: PacedStage(first, width, stage_s, bulk) for stage in range(count)]
        return Stages(makers, lambda batch: batch, stage_loss, side_range=(0, VOCABULARY))

    def stage_loss(output: Tensor, side: Tensor) -> Tensor:
        return output.mean(-1).square().sum()

    def batches(seed: int, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            ids = torch.randint(VOCABULARY, (batch, positions), generator=generator)
            yield ids, ids

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return stage_loss(model(batch[0]), batch[1]) / batch[1].numel()

    model = PacedStage(True, width, stage_s, bulk)
    return Recipe(
        model, batches, loss, optimizer=lambda p: torch.optim.SGD(p, lr=1e-3),
        learning_rate=lambda position: 1.0, stages=stages,
    )  # fmt: skip
