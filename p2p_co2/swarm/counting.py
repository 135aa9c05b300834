"""How many tokens a model was trained on, and with which loss, seen at its forward pass: for programs that
tell neither.

Counted are the elements of a call's first integer tensor, or of its first tensor, in training mode with
gradients on. A loss is one if the model returns it: ``output.loss``, as the models of ``transformers`` do.
Micro-steps' losses are averaged. They are added up if the model was told ``num_items_in_batch``, of all of
them together, as ``transformers.Trainer`` does: then each is divided by that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from p2p_co2.recipes.recipe import tensors_in


class BatchCounter:
    """Watches ``model``; ``take`` gives what has come since the last time. ``close`` ends it."""

    def __init__(self, model: nn.Module) -> None:
        self._tokens = 0
        self._losses = list[Tensor]()
        self._are_shares = False
        self._handles = (
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after),
        )

    def take(self) -> tuple[int | Tensor, float | Tensor]:
        """Tokens (1 if no batch was seen: then all steps weigh the same) and the mean loss (NaN if
        unknown)."""
        tokens = self._tokens or 1
        losses = self._losses
        self._tokens = 0
        self._losses = []
        if not losses:
            return tokens, float("nan")
        return tokens, torch.stack(losses).sum() / (1 if self._are_shares else len(losses))

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # so torch declares it
    def _before(self, model: nn.Module, given: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        if model.training and torch.is_grad_enabled():
            self._tokens += batch_tokens([*given, *named.values()])
            self._are_shares = named.get("num_items_in_batch") is not None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _after(self, model: nn.Module, given: tuple[Any, ...], output: Any) -> None:
        loss = getattr(output, "loss", None)
        is_one = isinstance(loss, Tensor) and loss.numel() == 1
        if is_one and model.training and torch.is_grad_enabled():
            self._losses.append(loss.detach().float().reshape(()))  # type: ignore[union-attr]


def batch_tokens(batch: Any) -> int:
    """Elements of the first integer tensor in ``batch``, or of its first tensor; 1 if there is none. It may
    be nested lists, tuples and mappings."""
    first = None
    for tensor in tensors_in(batch):
        if not tensor.is_floating_point():
            return tensor.numel()
        first = tensor if first is None else first
    return 1 if first is None else first.numel()
