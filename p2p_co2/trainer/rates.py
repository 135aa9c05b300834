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
    groups = optimizer.param_groups
    return tuple("initial_lr" in group and bool(group["lr"] < group["initial_lr"]) for group in groups)


class Rates:
    """Of one optimizer; the training thread's. ``warn`` is told once if somebody else sets them too.
    ``is_warming_up``: of a resumed peer, by group (``warming_up`` before the saved rates came back)."""

    def __init__(
        self, optimizer: Optimizer, factor: Factor | None, base: Sequence[float], warn: Callable[[str], None],
        is_warming_up: Sequence[bool] = (),
    ) -> None:  # fmt: skip
        self._optimizer, self._factor, self._warn = optimizer, factor, warn
        self._base = list(base)
        self._given = list[float]()
        """What was set last, by group."""
        self._last = [
            float(group["lr"]) if is_held and getattr(group["lr"], "is_cpu", True) else math.inf
            for group, is_held in zip(optimizer.param_groups, is_warming_up, strict=False)
        ]
        """By group, without a factor: the rate after the last look; inf where none is held."""
        self._most = [max(last, own) for last, own in zip(self._last, base, strict=False)]
        """What it is held at."""
        self._rise = [math.inf] * len(self._most)
        """What it had been multiplied by when it was put back last."""
        self._is_told = False

    def set(self, position: float) -> None:
        """The rates at ``position``. A rate that is a tensor is set in place: captured graphs hold it."""
        if self._factor is None:
            self._hold()
            return
        groups = self._optimizer.param_groups
        # What lies in a tensor, perhaps on an accelerator, is not read step after step.
        pairs = [(group["lr"], given) for group, given in zip(groups, self._given, strict=False)]
        if not self._is_told and any(not isinstance(lr, Tensor) and lr != given for lr, given in pairs):
            self._is_told = True
            self._warn(TWO_SCHEDULES)
        for group in groups[len(self._base) :]:
            self._base.append(self._base_of_later(group))
        factor = _factor_at(self._factor, position)
        self._given = [base * factor for base in self._base]
        for group, rate in zip(groups, self._given, strict=False):
            _put(group, rate)

    def _hold(self) -> None:
        """Put a rate above ``_most`` back. A warm-up multiplies what it finds by less each time: a rate that
        rises by more than the last time goes on as it is, since its schedule names it, whatever it finds."""
        for index, (group, most) in enumerate(zip(self._optimizer.param_groups, self._most, strict=False)):
            if math.isinf(most):
                continue
            rate, last = float(group["lr"]), self._last[index]
            self._last[index] = min(rate, most)
            if rate <= most * _ROUNDING:
                continue
            rise = rate / (last or most)
            if rise > self._rise[index] * _ROUNDING:
                self._most[index] = math.inf
                continue
            self._rise[index] = rise
            _put(group, most)
            if not self._is_told:
                self._is_told = True
                text = f"the learning rate rose to {rate:.3g} and was put back to {most:.3g}"
                self._warn(f"{text}: {MADE_ANEW}")

    def _base_of_later(self, group: Mapping[str, Any]) -> float:
        for earlier, base in zip(self._optimizer.param_groups, self._base, strict=False):
            if isinstance(group["lr"], Tensor) and group["lr"] is earlier["lr"]:
                return base  # one tensor, the optimizer's default, which holds a factor by now
        return _base(group, len(self._base), is_scheduled=True)


def _base(group: Mapping[str, Any], index: int, is_scheduled: bool) -> float:
    given = group.get("initial_lr", group.get("lr"))
    if given is None and not is_scheduled:
        return math.nan  # an optimizer that finds its own
    rate = _number(given)
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


def _factor_at(learning_rate: Factor, position: float) -> float:
    given = learning_rate(position)
    factor = _number(given)
    if not math.isfinite(factor) or factor < 0:
        raise ConfigError(
            "start", "learning_rate",
            f"gives {given!r} at position {position:.4g}; it must give a factor of 0 or more",
        )  # fmt: skip
    return factor


def _number(given: Any) -> float:
    """Whatever a user's optimizer or schedule gives; NaN if it is no number."""
    try:
        return float(given)
    except (TypeError, ValueError, RuntimeError):
        return math.nan
