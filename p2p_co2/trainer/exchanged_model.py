"""What a peer trains, and with what: fixed from ``start`` on, and looked at again while training goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from p2p_co2.config import PeerConfig, RunConfig
from p2p_co2.errors import ConfigError
from p2p_co2.tensors.fragments import FragmentPlan, LiveParameters
from p2p_co2.tensors.names import named_parameters
from p2p_co2.tensors.outer import OuterState
from p2p_co2.trainer.model_check import Structure


@dataclass(frozen=True)
class Plan:
    """The agreed run, a peer's own config, the cut model and the inner optimizer."""

    run: RunConfig
    config: PeerConfig
    fragments: FragmentPlan
    model: nn.Module
    optimizer: Optimizer
    learning_rate: Callable[[float], float] | None
    base_lr: tuple[float, ...]
    """The inner optimizer's learning rate per group, before any factor."""
    is_warming_up: tuple[bool, ...] = ()
    """By group: whether a scheduler that was made before ``start`` began below that."""


class ExchangedModel:
    """The model in training: its live parameters, and whether they still are what ``join`` was given. The
    training thread owns it; ``warn`` is told what a person should know."""

    def __init__(self, plan: Plan, warn: Callable[[str], None]) -> None:
        self._plan, self._warn = plan, warn
        self.live = LiveParameters(plan.model, plan.fragments)
        self._structure = Structure(plan.model, plan.optimizer)
        self.is_changed = False
        """Whether its parameters do not belong to the agreed state any more."""

    def look(self) -> None:
        """Raise ``ConfigError`` if the model has other parameters than those that are exchanged."""
        try:
            self._structure.check()
        except ConfigError as error:
            self.is_changed = True
            self._warn(str(error))  # others see why this peer leaves
            raise

    def forget_optimizer(self, fragment: int) -> None:
        """Drop the inner optimizer's state of a fragment whose parameters were not finite: its moments are
        not either."""
        parameters = named_parameters(self._plan.model)
        for part in self._plan.fragments.fragments[fragment].slices:
            self._plan.optimizer.state.pop(parameters[part.name], None)

    def named(self, states: Sequence[OuterState]) -> dict[str, Tensor]:
        """A copy of agreed parameters by name (fp32, host memory), tied ones under each of theirs."""
        shapes, flat = self._structure.shapes, dict[str, Tensor]()
        for fragment, state in zip(self._plan.fragments.fragments, states, strict=True):
            at = 0
            for part in fragment.slices:
                stop = at + part.stop - part.start
                if part.name not in flat:
                    numel = shapes[part.name].numel()
                    flat[part.name] = torch.empty(numel, dtype=torch.float32, device="cpu")
                flat[part.name][part.start : part.stop] = state.params[at:stop]
                at = stop
        named = {name: values.view(shapes[name]) for name, values in flat.items()}
        shared = self._structure.shared.items()
        return named | {name: named[first] for name, first in shared if first in named}
