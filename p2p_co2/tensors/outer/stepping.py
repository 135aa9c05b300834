"""What a committed mean does to the agreed parameters: momentum, the staleness gap penalty, clipping.

Price: two fp32 copies of one fragment beside the old state and the mean (one, if it may have the mean's
memory; none, if also the old state's), and two passes more for the norms. All else happens in pieces that
stay in the cache: fresh pages of memory cost more than the arithmetic. ``stepping_in_place`` needs not even
the mean whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from p2p_co2.config import OuterConfig
from p2p_co2.errors import LocalProtocolError, RemoteProtocolError
from p2p_co2.tensors.codec.passes import Changed
from p2p_co2.tensors.outer.norms import (
    PIECE,
    exact_norm,
    is_one_scale,
    magnitude,
    norm_of,
    norm_shift,
    passes_for,
    square_sum,
)
from p2p_co2.tensors.outer.state import MOVED_NORMS_KEPT, OuterState

_GAP_EPS = 1e-12
_MEAN_SQUARE_DECAY = 0.9
_SAFE = 1e38
"""Below this, no rounding reaches the end of fp32."""


class StepReport(NamedTuple):
    """What one step did. ``gap`` 1 means no penalty; ``clipped_share`` is the share of momentum values
    clipped, 0 to 1; ``gradient_norm`` is that of the mean as it arrived, ``momentum_norm`` that of the
    momentum as it is stored."""

    gap: float
    gradient_norm: float
    momentum_norm: float
    clipped_share: float


def _fresh(numel: int) -> Tensor:
    return torch.empty(numel, dtype=torch.float32, device="cpu")


def step(
    config: OuterConfig,
    state: OuterState,
    mean: Tensor,
    base_version: int,
    out: Tensor | None = None,
    consume: bool = False,
    new: Callable[[int], Tensor] = _fresh,
) -> tuple[OuterState, StepReport]:
    """Apply the committed mean outer gradient of one round.

    ``mean``: fp32 [n], host memory. ``base_version``: the outer version that the mean was measured from, at
    most ``state.version``; the difference is the staleness. ``out``: memory for the new parameters, fp32 [n];
    it may be ``mean`` itself, whose values are lost then, whatever happens. ``consume``: nobody else holds
    ``state``, so the new momentum may take the old one's memory, which it does if the step cannot fail.
    ``new``: gives all other memory, by its number of values.

    Raises ``RemoteProtocolError`` if the mean is not finite or would take the state out of fp32: every peer
    that holds the same bits refuses alike, and the state stays. Raises ``LocalProtocolError`` for a wrong
    shape or version.
    """
    _check(state, mean, base_version)
    gradient_norm = exact_norm(mean)
    gap, mean_square = gap_and_mean_square(config, state, gradient_norm, state.version - base_version)
    consume = consume and cannot_fail(config, state, magnitude(mean), 1.0 / gap)
    momentum = state.momentum if consume else new(mean.numel())
    params = new(mean.numel()) if out is None else out
    done = change_of(
        config, state.momentum, mean, 1.0 / gap, clip_bound(config, mean_square), momentum, params
    )
    # ``params`` holds the change so far.
    moved_norm, largest = _take_change_(params, done.largest_change, state.params)
    # A momentum that is not finite makes a change that is not.
    if not all(map(math.isfinite, (gradient_norm, moved_norm, largest))):
        raise RemoteProtocolError(
            "not_finite", "the mean outer gradient is not finite, or too large to apply"
        )
    return (
        OuterState(
            state.version + 1,
            params,
            momentum,
            mean_square,
            (*state.moved_norms, moved_norm)[-MOVED_NORMS_KEPT:],
        ),
        StepReport(gap, gradient_norm, math.sqrt(done.energy), done.clipped / max(1, mean.numel())),
    )


def gap_and_mean_square(
    config: OuterConfig, state: OuterState, gradient_norm: float, staleness: int
) -> tuple[float, float]:
    """The staleness gap penalty, and the running mean square after this step."""
    gap = _gap(config, state, gradient_norm, staleness)
    applied_norm = gradient_norm * (1.0 / gap)
    # No ** on floats anywhere here: libraries round pow differently; products and sqrt are exact by IEEE 754.
    mean_square = applied_norm * applied_norm / max(1, state.params.numel())
    if state.mean_square > 0.0:
        mean_square = _MEAN_SQUARE_DECAY * state.mean_square + (1.0 - _MEAN_SQUARE_DECAY) * mean_square
    return gap, mean_square


def _check(state: OuterState, mean: Tensor, base_version: int) -> None:
    if mean.shape != state.params.shape or mean.dtype != torch.float32:
        raise LocalProtocolError(
            f"mean is {mean.dtype} {tuple(mean.shape)}, the state float32 {tuple(state.params.shape)}"
        )
    if not 0 <= base_version <= state.version:
        raise LocalProtocolError(f"base version {base_version} is not in 0..{state.version}")


def _gap(config: OuterConfig, state: OuterState, gradient_norm: float, staleness: int) -> float:
    """1 + how far the agreed parameters moved during the delay, in units of the gradient about to be applied.

    The distance is bounded by the sum of the norms of the steps (triangle inequality), so no old parameters
    are kept. A staleness beyond the remembered norms is charged at their average.
    """
    recent = state.moved_norms[-staleness:] if staleness else ()
    if not config.gap_penalty or not recent or gradient_norm in {0.0, math.inf}:
        return 1.0
    # fsum, because the rounding of sum() differs between versions of Python.
    moved = math.fsum(recent) * (staleness / len(recent))
    return 1.0 + moved / (gradient_norm + _GAP_EPS)


def clip_bound(config: OuterConfig, mean_square: float) -> float:
    """The magnitude at which momentum is clipped; inf for never."""
    if config.clip == "none":
        return math.inf
    bound = config.clip_phi * (math.sqrt(mean_square) if config.clip == "rms" else 1.0)
    return bound if bound < torch.finfo(torch.float32).max else math.inf


def cannot_fail(config: OuterConfig, state: OuterState, largest: float, inverse: float) -> bool:
    """Whether no value on the way can leave fp32, whatever meets whatever. ``largest``: magnitude in the
    mean."""
    applied = largest * inverse
    momentum = magnitude(state.momentum) * config.momentum + applied
    change = (momentum * config.momentum + applied if config.nesterov else momentum) * config.lr
    return max(momentum, change, magnitude(state.params) + change) < _SAFE


def change_of(
    config: OuterConfig, old: Tensor, mean: Tensor, inverse: float, bound: float,
    momentum: Tensor, change: Tensor,
) -> Changed:  # fmt: skip
    """Fill the new ``momentum`` and ``change``, which the parameters lose.

    ``old``: the momentum so far. ``inverse``: 1 / gap. ``change`` may be the memory of ``mean``.
    """
    if (fast := passes_for(old, mean, momentum, change)) is not None:
        return fast.change_of(
            old, mean, momentum, change, beta=config.momentum, inverse=inverse, lr=config.lr,
            nesterov=config.nesterov, bound=bound, piece=PIECE,
        )  # fmt: skip
    clipped, energy, largest = 0, 0.0, 0.0
    for start in range(0, mean.numel(), PIECE):
        at = slice(start, start + PIECE)
        applied = mean[at] if inverse == 1.0 else mean[at] * inverse
        new = torch.mul(old[at], config.momentum, out=momentum[at]).add_(applied)
        if bound < math.inf and magnitude(new) > bound:
            free = new.clone()
            clipped += int(torch.count_nonzero(new.clamp_(-bound, bound) != free))
        step = (new * config.momentum).add_(applied) if config.nesterov else new
        largest = max(largest, magnitude(torch.mul(step, config.lr, out=change[at])))
        energy += float(torch.dot(new, new))
    return Changed(clipped, energy, largest)


def last_change(config: OuterConfig, momentum: Tensor, mean: Tensor | None, gap: float) -> Tensor:
    """What the parameters lost in the step that left ``momentum``: the bits that were taken from them.

    ``momentum``: fp32 [n], of the new state; ``mean``: fp32 [n], which that step applied (heavy ball needs
    none); ``gap``: from its ``StepReport``. Any range of both gives that range. A new tensor.
    """
    if not config.nesterov:
        return momentum * config.lr
    assert mean is not None
    applied = mean if gap == 1.0 else mean * (1.0 / gap)
    return (momentum * config.momentum).add_(applied).mul_(config.lr)


def _take_change_(change: Tensor, largest_change: float, params: Tensor) -> tuple[float, float]:
    """Turn ``change`` into ``params - change``; the change's norm and the largest new magnitude."""
    if largest_change in {0.0, math.inf}:
        return largest_change, magnitude(torch.sub(params, change, out=change))
    shift = norm_shift(largest_change)
    total, largest = take_piece_(change, params, shift)
    return norm_of(total, shift), largest


def take_piece_(change: Tensor, params: Tensor, shift: int) -> tuple[int, float]:
    """Turn ``change`` into ``params - change``; the change's ``square_sum`` and the largest new magnitude.
    Any piece of both."""
    if (fast := passes_for(change, params)) is not None and is_one_scale(shift):
        return fast.take_change_(change, params, math.ldexp(1.0, shift))
    largest, total = 0.0, 0
    for start in range(0, change.numel(), PIECE):
        piece = change[start : start + PIECE]
        total += square_sum(piece, shift)
        largest = max(largest, magnitude(torch.sub(params[start : start + PIECE], piece, out=piece)))
    return total, largest


def stability_warning(config: OuterConfig, delayed: bool) -> str | None:
    """Words for a person if these settings are known to diverge under a full round of delay, else None.

    Linear model, with delta in (0, 1) the contraction of one round of training: one round late, heavy ball
    is stable for ``lr * delta < 1 - beta``. So ``lr / (1 - beta)`` below 1 always is, and above 2 only a
    model that covers less than half of its way per round is.
    """
    speed = config.lr / (1.0 - config.momentum)
    if not delayed or config.rule not in {"co2", "eager"} or config.gap_penalty or speed <= 2.0:
        return None
    return (
        f"outer.rule {config.rule!r} applies means one round late; with outer.lr / (1 - outer.momentum) = "
        f"{speed:.1f} (above 2) and no gap penalty this diverges on most models: set outer.gap_penalty = "
        "true, or lower outer.lr or outer.momentum"
    )
