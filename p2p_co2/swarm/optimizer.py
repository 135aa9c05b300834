"""The drop-in: an optimizer whose steps are those of a swarm, for loops that own their steps (``accelerate``,
``GradScaler``, accumulation).

    optimizer = co2.Optimizer(torch.optim.AdamW(model.parameters(), 3e-4), model, run=TICKET)
    for batch in optimizer.swarm.until_done(loader): ...

Each ``step`` of it is an inner step. It joins when it is made, since the swarm's parameters take the place of
the model's. It leaves when the run is over, by ``leave``, or when the program ends.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor, nn

from p2p_co2.recipes.optimizers import Optimizers
from p2p_co2.swarm.counting import BatchCounter
from p2p_co2.swarm.joining import join
from p2p_co2.swarm.swarm import Swarm, at_exit
from p2p_co2.tensors.names import owned_by

if TYPE_CHECKING:
    from p2p_co2.swarm.options import Options


class Optimizer(Optimizers):
    """``inner``: the optimizer that steps, or a list of them; ``model``: what it trains. Options as those of
    ``join``. ``swarm``: the ``Swarm``.

    Tokens and losses are seen at the model's forward passes; ``report`` tells them better. A step that a
    ``GradScaler`` skips is one of no tokens. After the run is over it steps without the swarm. Raises as
    ``join``."""

    _step_supports_amp_scaling = True
    """So that a ``GradScaler`` calls ``step`` for one that is to be skipped, too."""

    def __init__(
        self, inner: torch.optim.Optimizer | Sequence[torch.optim.Optimizer], model: nn.Module,
        **options: Unpack[Options],
    ) -> None:  # fmt: skip
        super().__init__(list(inner) if isinstance(inner, list | tuple) else [inner])  # type: ignore[list-item]
        given = self.parts[0] if len(self.parts) == 1 else list(self.parts)
        self.swarm: Swarm = join(model, given, **options).__enter__()  # SIGTERM asks, as in a block
        self._counter = BatchCounter(model)
        self._reported: tuple[int | Tensor, float | Tensor] | None = None
        self._is_fresh = True
        """Nothing was trained since it joined."""
        self._call_off = at_exit(self._leave_at_exit)

    def report(self, tokens: int | Tensor, loss: float | Tensor = float("nan")) -> None:
        """What the next step was made of, in the place of what was seen."""
        self._reported = tokens, loss

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        skipped = self._unscale()
        result = None
        if not skipped:
            result = super().step(closure)
            self._is_fresh = False
        seen = self._reported or self._counter.take()
        self._reported = None
        tokens, loss = (0, float("nan")) if skipped else seen
        if not self.swarm.done and not self.swarm.exchange(tokens, loss):
            self.leave()
        return result

    def _unscale(self) -> bool:
        """Whether a ``GradScaler`` has this step skipped; else gradients are what they are without it."""
        scale = getattr(self, "grad_scale", None)
        if bool(getattr(self, "found_inf", False)):
            return True
        for parameter in owned_by(self):
            if scale is not None and parameter.grad is not None:
                parameter.grad.div_(scale.to(parameter.grad.device))
        return False

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As of ``inner``. Before the first step the model gets the swarm's parameters again. Programs that
        go on from a checkpoint of their own have loaded that one's before."""
        super().load_state_dict(state_dict)
        if self._is_fresh:
            self.swarm.load_agreed()

    def leave(self) -> None:
        """Leave the swarm; steps go on without it. May be called twice."""
        self._call_off()
        self._counter.close()
        self.swarm.leave()

    def _leave_at_exit(self) -> None:
        self._counter.close()
        self.swarm.leave(error=getattr(sys, "last_value", None))
