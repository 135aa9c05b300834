"""The inner optimizer's learning rates: each group's own rate times the factor of the swarm's position, and
of its size where they fit themselves to it.

A group's own rate is the one that torch's schedulers take for it: ``initial_lr`` where there is one. A rate
of 0 is refused. A group that is added later has its own.

Without a factor the rates are the program's. But a scheduler whose own state is not loaded after a resume
warms up from the saved rate to a multiple of it. Law: where a scheduler began below a group's own rate, its
multiples stay at the larger of that rate and the saved one. One line says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from p2p_co2.errors import ConfigError
from p2p_co2.planning.advice import swarm_factor

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


@dataclass
class _Held:
    """A rate that a warm-up which was made anew may not raise above ``most``. ``last``: after the last look;
    ``rise``: what it had been multiplied by when it was put back last."""

    last: float
    most: float
    rise: float = math.inf


class LearningRates:
    """Of one optimizer, by group; the training thread's. ``factor`` of the position, in rounds; None leaves
    the rates to the program. ``fits``: they are ``swarm_factor`` times as large. Without it ``warn`` is told
    when the swarm's size changes what would fit. It is told once if somebody else sets the rates too.

    Raises ``ConfigError`` for a ``factor`` that is no schedule, for a rate that trains nothing, and for none
    that a schedule could multiply."""

    def __init__(
        self, optimizer: Optimizer, factor: Factor | None, warn: Callable[[str], None], fits: bool = False
    ) -> None:
        factor = (lambda _: 1.0) if fits and factor is None else factor
        groups = optimizer.param_groups
        is_scheduled = factor is not None
        self._optimizer = optimizer
        self._factor = factor
        self._warn = warn
        self._fits = fits
        self.is_followed = fits
        """Whether somebody fits the rates to the swarm: then its size is no news."""
        self._told_least = self._told_most = 0.0
        self.peers = 0.0
        """In the last means, by their weights."""
        self._base = [_base(group, index, is_scheduled) for index, group in enumerate(groups)]
        self._warming_up = [
            index
            for index, group in enumerate(groups)
            if "initial_lr" in group and bool(group["lr"] < group["initial_lr"])
        ]
        """Groups that a scheduler which was made already begins below their own rates."""
        self._held: dict[int, _Held] = {}
        self._given = list[float]()
        """What was set last, by group."""
        self._is_told = False
        if factor is not None and not callable(factor):
            raise ConfigError(
                "start", "learning_rate",
                f"is {factor!r}; give a function from the swarm's position (rounds) to a factor on the "
                "optimizer's own rates, such as lambda position: min(1, 0.1 + position / 10)",
            )  # fmt: skip
        if factor is not None:
            _factor_at(factor, 0.0)

    def resumed(self) -> None:
        """The saved rates are back, and no warm-up multiplies them."""
        for index in self._warming_up:
            rate = self._optimizer.param_groups[index]["lr"]
            if getattr(rate, "is_cpu", True):
                self._held[index] = _Held(float(rate), max(float(rate), self._base[index]))

    def suggested(self, base: float) -> float:
        """The rate that fits the swarm as it is now. ``base``: a lone peer's, for a run of that length. The
        swarm's size is told no more then."""
        self.is_followed = True
        return base * swarm_factor(self.peers)

    def set(self, position: float, peers: float = 0.0) -> None:
        """The rates at ``position`` in a swarm of so many equal ``peers``; 0 if that is not known yet."""
        self.peers = peers
        times = swarm_factor(peers)
        if peers and not self._told_most:
            self._told_least = self._told_most = times
        elif peers and not (self.is_followed or self._told_least / 1.5 <= times <= self._told_most * 1.5):
            self._tell_of(times)
        if self._factor is None:
            self._put_back()
            return
        groups = self._optimizer.param_groups
        # What lies in a tensor, perhaps on an accelerator, is not read step after step.
        pairs = [(group["lr"], given) for group, given in zip(groups, self._given, strict=False)]
        if not self._is_told and any(not isinstance(lr, Tensor) and lr != given for lr, given in pairs):
            self._is_told = True
            self._warn(TWO_SCHEDULES)
        for group in groups[len(self._base) :]:
            self._base.append(self._base_of_later(group))
        factor = _factor_at(self._factor, position) * (times if self._fits else 1.0)
        self._given = [base * factor for base in self._base]
        for group, rate in zip(groups, self._given, strict=False):
            put_rate(group, rate)

    def _tell_of(self, times: float) -> None:
        self._told_least = min(times, self._told_least)
        self._told_most = max(times, self._told_most)
        self._warn(
            f"the swarm is of about {self.peers:.0f} equal peers now: the learning rate that fits it is "
            f"{times:.2g} times that of one machine alone (fits_swarm of join, or Swarm.suggested_lr)"
        )

    def _put_back(self) -> None:
        """Put a held rate back where it rose. A warm-up multiplies what it finds by less each time. A rate
        that rises by more than the last time goes on as it is: its schedule names it."""
        for index, held in list(self._held.items()):
            group = self._optimizer.param_groups[index]
            rate = float(group["lr"])
            last = held.last
            held.last = min(rate, held.most)
            if rate <= held.most * _ROUNDING:
                continue
            rise = rate / (last or held.most)
            if rise > held.rise * _ROUNDING:
                del self._held[index]
                continue
            held.rise = rise
            put_rate(group, held.most)
            if not self._is_told:
                self._is_told = True
                text = f"the learning rate rose to {rate:.3g} and was put back to {held.most:.3g}"
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


def put_rate(group: dict[str, Any], rate: float | Tensor) -> None:
    """In place where it is a tensor: captured graphs hold it."""
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
