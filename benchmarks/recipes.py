"""Trainings of a fixed speed, for swarms whose processes share few cores: a step computes little and sleeps.

``tables`` has many parameters, for lines. ``gpt`` learns text at a fixed speed, for losses over lines.
``stages`` rests instead of computing, for pipelines. Imports torch alone at the top: torchft's environment
has nothing of ours.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from p2p_co2.recipes import Recipe, Stages

PARTS, WIDTH = 4, 512
FREQUENCIES = torch.linspace(0.001, 3.0, WIDTH)
MOVES = 0.5
"""How far a step moves a row to what it should be; the learning rate undoes the mean over all values."""
HELD_OUT_ROWS = 512
VOCABULARY = 16


class Tables:
    """Four tables of vectors that learn a fixed function of their row, a few rows at a time.

    A step takes ``step_s``: the sleep is in the inner optimizer's hook, before hooks of others, and makes up
    for nothing that stopped the training. Gradients are sparse, which need no memory of the tables' size.
    ``plain``, for hivemind's ``Optimizer``: they are dense, and the sleep is in the loss, since the inner
    optimizer steps once a round there.
    """

    def __init__(self, rows: int, step_s: float, batch: int = 16, plain: bool = False) -> None:
        self.model = nn.ModuleList([nn.Embedding(rows, WIDTH, sparse=not plain) for _ in range(PARTS)])
        for table in self.model:
            nn.init.zeros_(table.weight)
        self.batch, self._plain = batch, plain
        self._rows, self._step_s, self._ends_at = rows, step_s, 0.0

    def batches(self, seed: int, batch: int) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield torch.randint(self._rows, (PARTS, batch), generator=generator)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Begins an inner step."""
        self._ends_at = time.monotonic() + self._step_s
        error = self._error(model, batch)
        if self._plain:
            self._wait()
        return error

    def _error(self, model: nn.Module, batch: Tensor) -> Tensor:
        errors = []
        for table, chosen in zip(model.children(), batch, strict=True):
            errors.append(F.mse_loss(table(chosen), torch.sin(chosen[:, None] * FREQUENCIES)))
        return torch.stack(errors).mean()

    @torch.no_grad()
    def held_out(self, model: nn.Module) -> float:
        chosen, errors = torch.arange(0, self._rows, 7), 0.0
        for some in chosen.split(HELD_OUT_ROWS):
            errors += len(some) * float(self._error(model, some.expand(PARTS, -1)))
        return errors / len(chosen)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        made = torch.optim.SGD(parameters, lr=MOVES / 2 * self.batch * WIDTH * PARTS)
        if not self._plain:
            made.register_step_post_hook(self._wait)
        return made

    def _wait(self, *of_the_hook: Any) -> None:
        time.sleep(max(0.0, self._ends_at - time.monotonic()))


def tables(rows: int, step_s: float, batch: int = 16, plain: bool = False) -> Recipe:
    """``Tables`` as a recipe: 4 tables of ``rows`` by 512 parameters."""
    from p2p_co2.recipes import Recipe

    made = Tables(rows, step_s, batch, plain)
    return Recipe(
        model=made.model, batches=made.batches, loss=made.loss, optimizer=made.optimizer,
        held_out=made.held_out if plain else None, tokens=lambda batch: int(batch.numel()),
        default_batch=batch,
    )  # fmt: skip


def gpt(step_s: float = 0.5, batch: int = 8) -> Recipe:
    """The built-in byte GPT of 1.27 million parameters on its text, ``batch`` sequences of 64 bytes a step.
    Its held-out loss is taken over few windows, the same for everybody."""
    from dataclasses import replace

    from p2p_co2.recipes import load_recipe
    from p2p_co2.recipes.byte_gpt import next_token_loss
    from p2p_co2.recipes.corpus import embedded_corpus

    made = load_recipe("byte-gpt", {"batch": batch}, 0)
    text = embedded_corpus().held_out
    starts = torch.randint(len(text) - 64, (48, 1), generator=torch.Generator().manual_seed(0))
    windows = text[starts + torch.arange(65)].long()
    ends_at = [0.0]

    def loss(model: nn.Module, of: Any) -> Tensor:
        ends_at[0] = max(ends_at[0] + step_s, time.monotonic() - step_s)
        time.sleep(max(0.0, ends_at[0] - time.monotonic()))
        return next_token_loss(model, of)

    @torch.no_grad()
    def held_out(model: nn.Module) -> float:
        return float(next_token_loss(model, (windows[:, :-1], windows[:, 1:])))

    return replace(made, loss=loss, held_out=held_out)


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
    positions], to hidden. ``STAGE_SLOWER`` in the environment makes one process so many times slower."""

    def __init__(self, is_first: bool, width: int, stage_s: float, bulk: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width) if is_first else None
        self.scale, self.bulk = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(bulk))
        self.seconds = stage_s * float(os.environ.get("STAGE_SLOWER", "1"))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.embedding(inputs) if self.embedding is not None else inputs
        return Rest.apply(hidden * self.scale + self.bulk.mean(), self.seconds)  # type: ignore[no-any-return]


def stages(stage_s: float, positions: int, width: int, bulk: int = 1000) -> Recipe:
    """A stage rests ``stage_s`` in a forward and twice as long in a backward; what crosses is ``positions``
    tokens of ``width`` values. ``bulk``: parameters of a stage beside, which rounds exchange."""
    from p2p_co2.recipes import Recipe, Stages

    def in_stages(count: int) -> Stages:
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

    return Recipe(
        PacedStage(True, width, stage_s, bulk), batches, loss, stages=in_stages,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3), learning_rate=lambda position: 1.0,
    )  # fmt: skip
