"""One stage on one peer: forward, back, and the gradient of the inner step under way.

    y_s = f_s(x_s; theta)                                    forward(), which the next stage gets encoded
    (dloss/dx_s, dW) = vjp of f_s at x_s and that theta       backward(), with the decoded gradient of y_s
    G += dW;  n += tokens                                    only then: a microbatch without a gradient is in
                                                             neither sum
    theta <- Opt(theta, G / n)                               take(): G becomes the mean over n tokens

Losses are sums over tokens, so ``n`` is the only normaliser. Between a forward and its backward the
parameters stand still (drained inner steps), so the gradient is exact. While there is room, a microbatch's
graph is held. Beyond, it is its input and torch's random state: the backward runs the forward again, bit for
bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from p2p_co2.errors import LocalProtocolError
from p2p_co2.tensors.device import RandomState, random_state, random_state_kept, set_random_state

Loss = Callable[[Tensor, Any], Tensor]
"""(output, side) to the sum over tokens, a scalar."""


@dataclass(frozen=True)
class Counted:
    """What an inner step has counted: ``tokens``, and the ``loss`` summed over them."""

    tokens: int = 0
    loss: float = 0.0
    microbatches: int = 0


@dataclass
class _ForBackward:
    """The input that requires a gradient (None at the first stage), and the output with its graph, or the
    random state to make it again."""

    inputs: Any
    output: Tensor | None
    random: RandomState | None


class StageReplica:
    """``module``: the stage; ``loss``: at the last stage alone; ``is_first``: no gradient by its input.
    ``graph_room_bytes``: what graphs may take, 0 for none; the first tells how much one takes."""

    def __init__(
        self, module: nn.Module, *, is_first: bool, loss: Loss | None = None,
        graph_room_bytes: float = math.inf,
    ) -> None:  # fmt: skip
        self.module = module
        self._is_first = is_first
        self._loss = loss
        self._graph_room_bytes = graph_room_bytes
        self._graph_bytes = 0
        self._held: dict[Hashable, _ForBackward] = {}
        self.counted = Counted()

    @property
    def in_flight(self) -> int:
        """Microbatches between their forward and their backward."""
        return len(self._held)

    def forward(self, key: Hashable, inputs: Any) -> Tensor:
        """The stage's output for microbatch ``key``, without its graph."""
        if key in self._held:
            raise LocalProtocolError(f"microbatch {key} was computed before")
        if not self._is_first:
            inputs = inputs.detach().requires_grad_()
        keeps = self._has_room
        random = None if keeps else random_state(one.device for one in self.module.parameters())
        once: AbstractContextManager[dict[int, int]] = saved_bytes(self.module)
        with torch.set_grad_enabled(keeps), nullcontext({}) if self._graph_bytes else once as saved:
            output = self.module(inputs)
        self._graph_bytes += sum(saved.values())
        self._held[key] = _ForBackward(inputs, output if keeps else None, random)
        return output.detach()  # type: ignore[no-any-return]

    @property
    def _has_room(self) -> bool:
        """For one more graph; as long as it is not known what one takes, for any."""
        kept = sum(held.output is not None for held in self._held.values())
        return max(1, self._graph_bytes * (kept + 1)) <= self._graph_room_bytes

    def backward(self, key: Hashable, gradient: Tensor, tokens: int, loss: float) -> Tensor | None:
        """Count microbatch ``key``: ``gradient`` of the loss by its output. Returns that by its input, None
        at the first stage."""
        held = self._held.pop(key)
        output = held.output if held.output is not None else self._again(held)
        output.backward(gradient.to(output.dtype))  # type: ignore[no-untyped-call]
        self._count(tokens, loss)
        return None if self._is_first else held.inputs.grad

    def last(self, inputs: Tensor, side: Any, tokens: int) -> tuple[Tensor | None, float]:
        """At the last stage, forward and back at once: (gradient by the input, loss summed over
        ``tokens``)."""
        if self._loss is None:
            raise LocalProtocolError("only the last stage has a loss")
        if not self._is_first:
            inputs = inputs.detach().requires_grad_()
        total = self._loss(self.module(inputs), side)
        total.backward()  # type: ignore[no-untyped-call]
        loss = float(total.detach())
        self._count(tokens, loss)
        return None if self._is_first else inputs.grad, loss

    def forget(self, key: Hashable) -> None:
        """Microbatch ``key`` was dropped: it counts nowhere."""
        self._held.pop(key, None)

    def take_back(self) -> None:
        """Count nothing of this inner step so far, and drop its gradients."""
        self.counted = Counted()
        self.module.zero_grad(set_to_none=True)

    def take(self) -> Counted:
        """End the inner step: gradients become means over the tokens that were counted, and those begin at
        nothing. The optimizer's ``step`` and ``zero_grad`` are the caller's."""
        if self._held:
            raise LocalProtocolError(f"{len(self._held)} microbatches are in flight: the step is not drained")
        counted = self.counted
        self.counted = Counted()
        for parameter in self.module.parameters():
            if parameter.grad is not None and counted.tokens:
                parameter.grad.div_(counted.tokens)
        return counted

    def _again(self, held: _ForBackward) -> Tensor:
        """The output, computed once more with its graph."""
        assert held.random is not None
        with random_state_kept(held.random), torch.enable_grad():
            set_random_state(held.random)
            return self.module(held.inputs)  # type: ignore[no-any-return]

    def _count(self, tokens: int, loss: float) -> None:
        known = self.counted
        self.counted = Counted(known.tokens + tokens, known.loss + loss, known.microbatches + 1)


@contextmanager
def saved_bytes(module: nn.Module) -> Iterator[dict[int, int]]:
    """While entered, what autograd keeps beside the module's own tensors: bytes by storage."""
    saved = dict[int, int]()
    own = {one.untyped_storage()._cdata for one in (*module.parameters(), *module.buffers())}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            saved[storage._cdata] = storage.nbytes()
        return tensor.detach()  # an output that its own graph held would never be freed

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield saved
