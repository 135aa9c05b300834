"""What a peer trains, and with what: fixed from ``start`` on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from p2p_co2.config import PeerConfig, RunConfig
from p2p_co2.tensors.fragments.plan import FragmentPlan


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
    most_lr: tuple[float, ...] = ()
    """Per group: what a scheduler that warms up goes up to after a resume (``rates.most_rates``)."""
