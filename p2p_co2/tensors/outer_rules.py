"""The outer rules: how live parameters meet the agreed ones (``outer`` says how those are made).

A rule is an object that ``get_rule`` makes of the run's outer settings; ``rule_specs.OUTER_RULES`` lists
them. Under "keep" and "blend" the live parameters take in each mean when it comes. Under "co2" and "eager"
they set out anew from the newest agreed ones with each offer.

Sources: CO2 (arXiv 2401.16265); ``blend`` is Streaming DiLoCo's (2501.18512); eager updates 2502.12996;
``keep`` is ours.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NamedTuple

import torch
from torch import Tensor

from p2p_co2.codec_specs import COARSE_BITS
from p2p_co2.config import OuterConfig
from p2p_co2.rule_specs import OUTER_RULES
from p2p_co2.tensors.codec.base import pieces
from p2p_co2.tensors.fragments import large_tensor
from p2p_co2.tensors.outer import AgreedState, Merge

HALF_PRECISION = 16


Read = Callable[[slice], Tensor]
"""Any range of fp32 [n] as a new tensor."""


class OwnWork(NamedTuple):
    """This peer's part in a step. ``offered``: the outer gradient that it offered; None for no offer.
    ``missed``: the ranges in which that did not reach the mean. ``is_back``: it had been given up, and its
    work is back in the live parameters. ``later``: the gradient of a later offer for the same round, which
    holds that work, too, and comes to nothing."""

    offered: Read | None = None
    missed: Sequence[slice] = ()
    is_back: bool = False
    later: Read | None = None


class OuterRule(ABC):
    """How live parameters meet agreed ones. ``returns_work`` and ``copies`` as ``OuterRuleSpec`` has them."""

    def __init__(self, config: OuterConfig) -> None:
        spec = OUTER_RULES[config.rule]
        self.config = config
        self.returns_work = spec.returns_work
        self.copies = spec.copies

    def keeps(self, bits: float) -> int:
        """In how many bits a value the outer gradient is kept beside a payload of ``bits`` a value; 0 for not
        at all."""
        return 0

    @abstractmethod
    def merge(
        self, old: AgreedState, new: AgreedState, work: OwnWork, out: Tensor | None = None
    ) -> Merge | None:
        """How live parameters take in the step from ``old`` to ``new``, at any moment after it; None if they
        do not. ``out``: memory for the addend; it may be ``old.params`` itself."""

    def correction(self, gap: float, share: float, fresh: Tensor, stale: Tensor) -> Tensor | None:
        """What a peer subtracts from the agreed parameters where it sets out anew; None for nothing.

        ``stale``: its outer gradient inside the newest mean (fp32 [n]), in which it had ``share`` of all
        weight and whose step had ``gap``. ``fresh``: the one it offers now.
        """
        return None


class Keep(OuterRule):
    """What a peer trained since its snapshot stays. Where its offer counted that is ``new + (live -
    snapshot)``; where it did not, ``new + (live - old)``: the work is offered again."""

    def keeps(self, bits: float) -> int:
        return HALF_PRECISION if bits < COARSE_BITS else 0

    def merge(self, old: AgreedState, new: AgreedState, work: OwnWork, out: Tensor | None = None) -> Merge:
        addend = torch.empty_like(old.params) if out is None else out
        for at in pieces(addend.numel()):
            here = torch.sub(new.params[at], old.params[at], out=addend[at])
            if work.offered is not None:
                here.add_(without(work.offered(at), at, work.missed))
        return Merge(1.0, addend)


class Blend(Keep):
    """``alpha * live + (1 - alpha) * new``. After a mean that missed some of its work a peer does as "keep",
    so as not to lose what nobody else has."""

    def merge(self, old: AgreedState, new: AgreedState, work: OwnWork, out: Tensor | None = None) -> Merge:
        if work.offered is None or work.missed:
            return super().merge(old, new, work, out)
        alpha = self.config.blend_alpha
        return Merge(alpha, torch.mul(new.params, 1.0 - alpha, out=out))


class SetOutAnew(OuterRule):
    """With each offer the live parameters become the newest agreed ones. What was offered and did not count
    is put back; what was put back and counts after all is taken out again."""

    def merge(
        self, old: AgreedState, new: AgreedState, work: OwnWork, out: Tensor | None = None
    ) -> Merge | None:
        if work.offered is None or not (work.missed or work.is_back):
            return None
        addend = large_tensor(new.params.numel())
        for at in pieces(addend.numel()):
            back = without(work.offered(at), at, work.missed)
            if not work.is_back:
                back.sub_(work.offered(at))
            addend[at] = back if work.later is None else back.sub_(work.later(at))
        return Merge(1.0, addend)


class Eager(SetOutAnew):
    """As "co2", with this peer's own fresh share in place of its stale one.

    The papers step with ``g + share * e`` in place of the mean ``g``, e being ``fresh - stale``. The step is
    linear in the mean: the parameters lose ``lr * share * e / gap`` more (heavy ball), or ``1 + beta`` times
    that (Nesterov). Each peer adds it for itself, unclipped; momentum and agreed state are those of "co2".
    """

    def correction(self, gap: float, share: float, fresh: Tensor, stale: Tensor) -> Tensor:
        config = self.config
        factor = 1.0 + config.momentum if config.nesterov else 1.0
        return (fresh - stale).mul_(config.lr * factor * share / gap)


def without(values: Tensor, at: slice, missed: Sequence[slice]) -> Tensor:
    """``values``, which lie ``at`` in a fragment, with zeros in the ranges ``missed``; in place."""
    for part in missed:
        values[within(part, at)] = 0.0
    return values


def within(part: slice, at: slice) -> slice:
    """Where ``part`` lies in the piece ``at``, counted from that one's start."""
    size = at.stop - at.start
    return slice(min(size, max(0, part.start - at.start)), min(size, max(0, part.stop - at.start)))


def get_rule(config: OuterConfig) -> OuterRule:
    """The rule of a run."""
    module, _, kind = OUTER_RULES[config.rule].made_by.partition(":")
    rule: OuterRule = getattr(import_module(module), kind)(config)
    return rule
