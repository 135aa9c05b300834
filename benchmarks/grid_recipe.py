"""The training of ``grid.py``: 30.8 million parameters in four modules, inner steps of a fixed length.

Four peers share two cores, so a step computes little (four tables of vectors learn a fixed function of their
row, a few rows at a time) and then sleeps, in a hook of the inner optimizer, until ``step_s`` after it began.
Unlike ``wan_recipe`` it makes up for nothing: what stops the training between two steps delays all later
ones. Imports torch alone at the top, since torchft's side has its own environment.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from p2p_co2.recipes import Recipe

MODULES, ROWS, WIDTH, BATCH = 4, 15_040, 512, 16
PARAMETERS = MODULES * ROWS * WIDTH
LEARNING_RATE = 4e3
"""Means over batch, width and tables make gradients small: this moves a row about a quarter of the way."""
FREQUENCIES = torch.linspace(0.001, 3.0, WIDTH)


class Training:
    """Model, data, loss and inner optimizer; the parts fit both sides' loops."""

    def __init__(self, step_s: float) -> None:
        self.model = nn.ModuleList([nn.Embedding(ROWS, WIDTH, sparse=True) for _ in range(MODULES)])
        for table in self.model:
            nn.init.zeros_(table.weight)
        self._step_s, self._ends_at = step_s, 0.0

    def batches(self, seed: int, batch: int = BATCH) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield torch.randint(ROWS, (MODULES, batch), generator=generator)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Begins an inner step."""
        self._ends_at = time.monotonic() + self._step_s
        errors = []
        for table, chosen in zip(model.children(), batch, strict=True):
            errors.append(F.mse_loss(table(chosen), torch.sin(chosen[:, None] * FREQUENCIES)))
        return torch.stack(errors).mean()

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Its ``step`` returns when an inner step's time is over; later hooks of others come after that."""
        made = torch.optim.SGD(parameters, lr=LEARNING_RATE)
        made.register_step_post_hook(self._wait)
        return made

    def _wait(self, *of_the_hook: Any) -> None:
        time.sleep(max(0.0, self._ends_at - time.monotonic()))


def make(step_s: float) -> Recipe:
    """The recipe of our side."""
    from p2p_co2.recipes import Recipe

    training = Training(step_s)
    return Recipe(
        model=training.model,
        batches=training.batches,
        loss=training.loss,
        optimizer=training.optimizer,
        tokens=lambda batch: int(batch.numel()),
        default_batch=BATCH,
    )
