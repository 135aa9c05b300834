"""A recipe for faults and long runs: a tiny model whose steps take a fixed time, so that processes that share
few cores do not slow each other down, and what it costs to lose peers shows. Its optimizer is its own, since
the first of ``torch.optim`` that a process makes imports torch's compiler: a second of CPU and 70 MB for each
of dozens of processes.

Two variables of the environment change one process and not the run: after ``PACED_RAISE_AFTER`` steps the
data raise, as a user's faulty code would; after ``PACED_TEAR_AFTER`` memory ends in the middle of the next
outer step.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from p2p_co2.recipes import Recipe, Stages

CLASSES = 16


class Descent:
    """Gradient descent with momentum, as far as a trainer asks of a ``torch.optim.Optimizer``."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 0.1, momentum: float = 0.5) -> None:
        self.param_groups: list[dict[str, Any]] = [
            {"params": list(parameters), "lr": lr, "momentum": momentum}
        ]
        self.state: dict[Tensor, dict[str, Tensor]] = {}

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        group = self.param_groups[0]
        for parameter in group["params"]:
            kept = self.state.setdefault(parameter, {"speed": torch.zeros_like(parameter)})
            kept["speed"].mul_(group["momentum"]).add_(parameter.grad)
            parameter.sub_(group["lr"] * kept["speed"])

    def state_dict(self) -> dict[str, Any]:
        (group,) = self.param_groups
        places = range(len(group["params"]))
        kept = {place: self.state[group["params"][place]] for place in places if self.state}
        return {"state": kept, "param_groups": [{**group, "params": list(places)}]}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        (group,) = self.param_groups
        group |= {name: value for name, value in saved["param_groups"][0].items() if name != "params"}
        self.state = {group["params"][place]: dict(kept) for place, kept in saved["state"].items()}


def make(step_s: float = 0.1, width: int = 32) -> Recipe:
    """``step_s``: seconds that a step rests; ``width`` of the two layers."""
    raise_after = int(os.environ.get("PACED_RAISE_AFTER", "0"))
    tear_after = int(os.environ.get("PACED_TEAR_AFTER", "0"))

    def batches(seed: int, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        steps = 0
        while True:
            time.sleep(step_s)
            steps += 1
            if raise_after and steps > raise_after:
                raise RuntimeError("the model of this peer is broken")
            if tear_after and steps > tear_after:
                sys.modules["p2p_co2.tensors.outer"].take_piece_ = no_memory  # type: ignore[attr-defined]
            inputs = torch.randn(batch, width, generator=generator)
            yield inputs, inputs.roll(1, 1)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
    return Recipe(model, batches, loss, optimizer=Descent)  # type: ignore[arg-type]  # see the class


class Resting(nn.Sequential):
    """Layers whose forward takes ``step_s`` more."""

    def __init__(self, step_s: float, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.step_s = step_s

    def forward(self, hidden: Tensor) -> Tensor:
        if hidden.device.type != "meta":
            time.sleep(self.step_s)
        return super().forward(hidden)  # type: ignore[no-any-return]


def make_stages(step_s: float = 0.05, width: int = 32) -> Recipe:
    """For a run of any number of stages from 2: a table, layers that rest, a head."""

    def batches(seed: int, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            inputs = torch.randint(CLASSES, (batch, 16), generator=generator)
            yield inputs, inputs.roll(1, 1)

    def loss(output: Tensor, side: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output.flatten(0, 1), side.flatten(), reduction="sum")

    def stages(count: int) -> Stages:
        makers: list[Callable[[], nn.Module]] = [lambda: Resting(step_s, nn.Embedding(CLASSES, width))]
        makers += [lambda: Resting(step_s, nn.Linear(width, width), nn.Tanh())] * (count - 2)
        makers.append(lambda: Resting(step_s, nn.Linear(width, CLASSES)))
        return Stages(makers, lambda batch: batch, loss, side_range=(0, CLASSES))

    whole = nn.Sequential(nn.Embedding(CLASSES, width), nn.Linear(width, CLASSES))
    return Recipe(
        whole, batches, lambda model, batch: loss(model(batch[0]), batch[1]) / batch[1].numel(),
        optimizer=Descent, stages=stages,  # type: ignore[arg-type]  # see the class
    )  # fmt: skip


def no_memory(*_: object) -> tuple[int, float]:
    """In place of ``outer.take_piece_``: the momentum is that of the next state then, the parameters are
    not."""
    raise MemoryError("no memory is left")
