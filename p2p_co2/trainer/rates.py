"""The inner optimizer's learning rates: each group's own rate times the factor of the swarm's position.

A group's own rate is the one that torch's schedulers take for it: ``initial_lr`` where a scheduler was made
already, which may have left ``lr`` at 0 for its first step. A rate of 0 is refused: it would stay 0 whatever
the factor, and nothing would tell. A group that is added later has its own.

Without a factor the rates are the program's. But a resume puts the saved ones back, and torch's schedulers
multiply what they find: one that is made anew, and whose own state is not loaded, warms up from the full rate
to a multiple of it. Law: where a scheduler began below a group's own rate, its multiples stay at the larger
of that rate and the saved one, and one line says so. Price: one step above it is seen only when it was made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from p2p_co2.errors import ConfigError

Factor = Callable[[float], float]

TWO_SCHEDULES = (
    "something else sets the optimizer's learning rate beside the learning_rate given to start, which holds "
    "from the next peer.step on: use one of the two"
)

MADE_ANEW = (
    "a scheduler that is made anew warms up again, from the saved rate; load its state "
    "(scheduler.load_state_dict), or make it after start with last_epoch=peer.inner_steps"
)
_ROUNDING = 1 + 1e-6


def check_factor(learning_rate: Factor | None, position: float = 0.0) -> None:
    """Raise ``ConfigError`` unless it is a schedule: a function of the position that gives a factor."""
    if learning_rate is None:
        return
    if not callable(learning_rate):
        raise ConfigError(
            "start", "learning_rate",
            f"is {learning_rate!r}; give a function from the swarm's position (rounds) to a factor on the "
            "optimizer's own rates, such as lambda position: min(1, 0.1 + position / 10)",
        )  # fmt: skip
    _factor_at(learning_rate, position)


def base_rates(optimizer: Optimizer, is_scheduled: bool) -> tuple[float, ...]:
    """By group. Raises ``ConfigError`` for a rate that trains nothing, and for none at all if a schedule is
    to multiply it."""
    return tuple(_base(group, index, is_scheduled) for index, group in enumerate(optimizer.param_groups))


def warming_up(optimizer: Optimizer) -> tuple[bool, ...]:
    """By group: whether a scheduler that was made already begins below the group's own rate."""
    return tuple(
        bool(group["lr"] < group["initial_lr"]) if {"lr", "initial_lr"} <= set(group) else False
        for group in optimizer.param_groups
    )


def most_rates(
    optimizer: Optimizer, base: Sequence[float], is_warming_up: Sequence[bool]
) -> tuple[float, ...]:
    """By group, once the saved rates are back: what a scheduler that ``is_warming_up`` goes up to."""
    groups = zip(optimizer.param_groups, base, is_warming_up, strict=True)
    return tuple(
        max(own, float(group["lr"]), float(group.get("max_lr", 0.0))) if is_warming else math.inf
        for group, own, is_warming in groups
    )


class Rates:
    """Of one optimizer; the training thread's. ``warn`` is told once if somebody else sets them too.
    ``most``: by group, what is held without a factor (``most_rates``)."""

    def __init__(
        self,
        optimizer: Optimizer,
        factor: Factor | None,
        base: Sequence[float],
        warn: Callable[[str], None],
        most: Sequence[float] = (),
    ) -> None:
        self._most, self._above = list(most), [math.inf] * len(most)
        """``_above``: what was put back last."""
        self._optimizer, self._factor, self._warn = optimizer, factor, warn
        self._base = list(base)
        self._given = list[float]()
        """What was set last, by group."""
        self._is_told = False

    def set(self, position: float) -> None:
        """The rates at ``position``. A rate that is a tensor is set in place: captured graphs hold it."""
        if self._factor is None:
            self._hold()
            return
        groups = self._optimizer.param_groups
        self._look(groups)
        for group in groups[len(self._base) :]:
            self._base.append(self._base_of_later(group))
        factor = _factor_at(self._factor, position)
        self._given = [base * factor for base in self._base]
        for group, rate in zip(groups, self._given, strict=False):
            _put(group, rate)

    def _hold(self) -> None:
        """Put a rate above ``most`` back. One that is larger still the next time goes on as it is: its
        schedule names it, whatever it finds."""
        for index, (group, most) in enumerate(zip(self._optimizer.param_groups, self._most, strict=False)):
            if math.isinf(most) or _is_far(group["lr"]):
                continue
            rate = float(group["lr"])
            if rate <= most * _ROUNDING:
                continue
            if rate > self._above[index] * _ROUNDING:
                self._most[index] = math.inf
                continue
            self._above[index] = rate
            _put(group, most)
            if not self._is_told:
                self._is_told = True
                self._warn(
                    f"the learning rate rose to {rate:.3g} and was put back to {most:.3g}: {MADE_ANEW}"
                )

    def _base_of_later(self, group: Mapping[str, Any]) -> float:
        for earlier, base in zip(self._optimizer.param_groups, self._base, strict=False):
            if isinstance(group["lr"], Tensor) and group["lr"] is earlier["lr"]:
                return base  # one tensor, the optimizer's default, which holds a factor by now
        return _base(group, len(self._base), is_scheduled=True)

    def _look(self, groups: Sequence[Mapping[str, Any]]) -> None:
        pairs = zip(groups, self._given, strict=False)
        if not self._is_told and any(_is_other(group["lr"], given) for group, given in pairs):
            self._is_told = True
            self._warn(TWO_SCHEDULES)


def _base(group: Mapping[str, Any], index: int, is_scheduled: bool) -> float:
    given = group.get("initial_lr", group.get("lr"))
    if given is None and not is_scheduled:
        return math.nan  # an optimizer that finds its own
    try:
        rate = float(given)  # whatever a user's optimizer has there
    except (TypeError, ValueError, RuntimeError):
        rate = math.nan
    if not math.isfinite(rate) or rate <= 0:
        raise ConfigError(
            "optimizer", f"param_groups[{index}]",
            f"has the learning rate {given!r}; give it the rate that schedules start from, above 0 "
            "(and freeze what is not to be trained)",
        )  # fmt: skip
    return rate


def _put(group: dict[str, Any], rate: float) -> None:
    if isinstance(group["lr"], Tensor):
        with torch.no_grad():
            group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def _is_far(rate: object) -> bool:
    """What lies on an accelerator is not read step after step."""
    return isinstance(rate, Tensor) and rate.device.type != "cpu"


def _is_other(rate: object, given: float) -> bool:
    """Whether somebody changed it; what lies on an accelerator is not read for that."""
    if isinstance(rate, Tensor):
        return False
    return rate != given


def _factor_at(learning_rate: Factor, position: float) -> float:
    given = learning_rate(position)
    try:
        factor = float(given)
    except (TypeError, ValueError, RuntimeError):
        factor = math.nan
    if not math.isfinite(factor) or factor < 0:
        raise ConfigError(
            "start", "learning_rate",
            f"gives {given!r} at position {position:.4g}; it must give a factor of 0 or more",
        )  # fmt: skip
    return factor
