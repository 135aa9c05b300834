"""One inner optimizer step of a recipe: its micro-steps, mixed precision and clipping.

    step = InnerStep(recipe, model, optimizer)
    taken = step.take(batches)                 # None: the batches have run out
    peer.step(taken.tokens, taken.loss)

Law: between two calls of ``take`` the parameters are those after a whole step, so an outer step never falls
between micro-steps. A step that fp16's scaler skips leaves them as they were, and counts no tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from p2p_co2.recipes.recipe import Recipe
from p2p_co2.tensors.names import owned_by

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def was_skipped(scaler: torch.amp.GradScaler, optimizer: Optimizer) -> bool:
    """Whether the ``scaler.step`` that was just made left the parameters as they were: asked before
    ``update``. Of its scale nothing can be told, which may be 0 or stay."""
    return scaler.is_enabled() and any(map(bool, scaler._found_inf_per_device(optimizer).values()))


class Taken(NamedTuple):
    """``tokens``: that the step was made of. ``loss``: mean of its micro-steps; NaN if it was skipped."""

    tokens: int | Tensor
    loss: float | Tensor


class InnerStep:
    """Of ``recipe``, by ``optimizer``, on ``model``, wherever it lies. One thread."""

    def __init__(self, recipe: Recipe, model: nn.Module, optimizer: Optimizer) -> None:
        self._recipe = recipe
        self._model = model
        self._optimizer = optimizer
        self._device = next(model.parameters()).device.type
        is_scaled = recipe.autocast == "fp16"
        self._scaler = torch.amp.GradScaler(self._device) if is_scaled else None

    def take(self, batches: Iterator[Any]) -> Taken | None:
        """Draw ``accumulate`` batches and take one step. None, and no step, if there are not as many."""
        recipe = self._recipe
        tokens = 0
        losses = list[Tensor]()
        self._optimizer.zero_grad(set_to_none=True)
        for batch in islice(batches, recipe.accumulate):
            with self._autocast():
                loss = recipe.loss(self._model, batch)
            self._backward(loss if recipe.accumulate == 1 else loss / recipe.accumulate)
            tokens += recipe.tokens(batch)
            losses.append(loss.detach())
        if len(losses) < recipe.accumulate:
            return None
        mean = losses[0] if len(losses) == 1 else torch.stack(losses).mean()
        moved = make_step(self._optimizer, self._scaler, recipe.max_grad_norm)
        return Taken(tokens, mean) if moved else Taken(0, math.nan)

    def _autocast(self) -> AbstractContextManager[object]:
        if self._recipe.autocast is None:
            return nullcontext()
        return torch.autocast(self._device, DTYPES[self._recipe.autocast])

    def _backward(self, loss: Tensor) -> None:
        scaled = loss if self._scaler is None else self._scaler.scale(loss)
        scaled.backward()  # type: ignore[no-untyped-call]  # so torch declares it


def make_step(optimizer: Optimizer, scaler: torch.amp.GradScaler | None, max_grad_norm: float | None) -> bool:
    """Clip the gradients and step; whether the parameters were moved: a ``scaler`` skips some."""
    if scaler is None:
        clip_([optimizer], max_grad_norm)
        optimizer.step()
        return True
    if max_grad_norm is not None:
        scaler.unscale_(optimizer)
        clip_([optimizer], max_grad_norm)
    scaler.step(optimizer)
    stepped = not was_skipped(scaler, optimizer)
    scaler.update()
    return stepped


def clip_(optimizers: Iterable[Optimizer], max_norm: float | None) -> None:
    """Shorten the gradients of all that ``optimizers`` own to ``max_norm``, as one vector; None leaves
    them."""
    if max_norm is not None:
        nn.utils.clip_grad_norm_([one for optimizer in optimizers for one in owned_by(optimizer)], max_norm)
