"""The outer optimizer: momentum, the staleness gap penalty and clipping.

``init`` and ``step`` are an algorithm over a plain ``AgreedState``, one per fragment: what a committed mean
does to the agreed parameters. How live parameters meet the result the ``outer_rules`` say. In the papers'
symbols ``params`` is CO2's x and DiLoCo's theta, ``momentum`` CO2's m, ``config.momentum`` beta. The outer
gradient is ``state.params - params``; the sign is law.

Laws:

1. Agreed state. ``step`` gives the same bits on every peer. Multiplication and addition are separate
   operations, each rounded once: ``torch.add(alpha=)``, ``addcmul`` and ``lerp`` are never used. No tensor is
   divided by a number. Norms have no reduction order. A process that flushes denormals breaks this law.
2. An aborted round changes nothing: there is no call for it.
3. A state is never modified, unless ``step`` is told that nobody else holds it (``docs/design/memory.md``).

Sources: CO2 (arXiv 2401.16265) for the gap penalty (after its Eq. 3, denominator ours) and momentum clipping;
DiLoCo (2311.08105) for Nesterov.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from p2p_co2.config import OuterConfig
from p2p_co2.errors import LocalProtocolError, RemoteProtocolError
from p2p_co2.tensors.codec import passes
from p2p_co2.tensors.codec.passes import Changed, Passes

_NORM_BITS = 18
PIECE = 1 << 16
"""Elements worked on at once. So many squares of integers of at most 2^_NORM_BITS stay below 2^53: fp64 adds
them exactly, in any order."""
MOVED_NORMS_KEPT = 4
"""Changes of ``params`` whose norms are remembered: the staleness that the gap penalty measures exactly."""
_WIDTH = 2 * PIECE
"""Values at once: with what is made of them they stay in the cache."""
_GAP_EPS = 1e-12
_MEAN_SQUARE_DECAY = 0.9
_SAFE = 1e38
"""Below this, no rounding reaches the end of fp32."""


class AgreedState(NamedTuple):
    """The agreed state of one fragment after ``version`` outer steps; the same bits on every peer.

    ``params`` and ``momentum``: fp32 [n], host memory. ``mean_square``: running mean square of the applied
    gradient, 0 before the first. ``moved_norms``: L2 norms of the last changes of ``params``, at most
    ``MOVED_NORMS_KEPT``, newest last.
    """

    version: int
    params: Tensor
    momentum: Tensor
    mean_square: float
    moved_norms: tuple[float, ...]


class StepReport(NamedTuple):
    """What one step did. ``gap`` 1 means no penalty; ``momentum_norm``: of the momentum as it is stored."""

    gap: float
    momentum_norm: float


class Readable(Protocol):
    """fp32 [n], read by slices: a tensor, or what decodes one piece after the other."""

    def __getitem__(self, at: slice, /) -> Tensor: ...


def init(params: Tensor) -> AgreedState:
    """Version 0 of a fragment from its starting values ([n], any float dtype, any device; copied)."""
    start = params.detach().to(device="cpu", dtype=torch.float32, copy=True).reshape(-1)
    return AgreedState(0, start, torch.zeros_like(start), 0.0, ())


def _fresh(numel: int) -> Tensor:
    return torch.empty(numel, dtype=torch.float32, device="cpu")


def step(
    config: OuterConfig,
    state: AgreedState,
    mean: Readable,
    base_version: int,
    *,
    largest: float | None = None,
    reuse: str = "",
    new: Callable[[int], Tensor] = _fresh,
) -> tuple[AgreedState, StepReport]:
    """Apply the committed mean outer gradient of one round.

    ``mean``: fp32 [n], with ``largest``, its largest magnitude (inf if it is not finite), unless it is a
    tensor. ``base_version``: the outer version that the mean was measured from, at most ``state.version``;
    the difference is the staleness. ``reuse``: what of ``state`` nobody else holds, "momentum" or "all": the
    new state takes that memory, if the step cannot fail. ``new`` gives all other memory, by its number of
    values.

    Raises ``RemoteProtocolError`` if the mean is not finite or would take the state out of fp32. Every peer
    that holds the same bits refuses alike, and the state stays. Raises ``LocalProtocolError`` for a wrong
    shape or version.
    """
    size = state.params.numel()
    if isinstance(mean, Tensor) and (mean.shape, mean.dtype) != (state.params.shape, torch.float32):
        raise LocalProtocolError(f"mean is {mean.dtype} {tuple(mean.shape)}, the state float32 ({size},)")
    if not 0 <= base_version <= state.version:
        raise LocalProtocolError(f"base version {base_version} is not in 0..{state.version}")
    largest = magnitude(mean) if largest is None and isinstance(mean, Tensor) else largest
    assert largest is not None
    if largest == math.inf:
        raise _not_finite()
    norm = norm_of_pieces(largest, (mean[at] for at in _pieces(size)))
    gap, mean_square = _gap_and_mean_square(config, state, norm, state.version - base_version)
    if not reuse or not _cannot_fail(config, state, largest, 1.0 / gap):
        reuse = ""
    momentum = state.momentum if reuse else new(size)
    params = state.params if reuse == "all" else new(size)
    # The change waits in the new parameters' memory, if they have one of their own.
    change = None if params is state.params else params
    done = _momentum_step_(config, state.momentum, mean, gap, mean_square, momentum, change)
    moved_norm, is_finite = _params_step_(config, state.params, mean, gap, momentum, params, done)
    # A momentum that is not finite makes a change that is not.
    if not (math.isfinite(norm) and math.isfinite(moved_norm) and is_finite):
        raise _not_finite()
    moved = (*state.moved_norms, moved_norm)[-MOVED_NORMS_KEPT:]
    after = AgreedState(state.version + 1, params, momentum, mean_square, moved)
    return after, StepReport(gap, math.sqrt(done.energy))


def _not_finite() -> RemoteProtocolError:
    return RemoteProtocolError("not_finite", "the mean outer gradient is not finite, or too large to apply")


def _momentum_step_(
    config: OuterConfig, old: Tensor, mean: Readable, gap: float, mean_square: float, out: Tensor,
    change: Tensor | None,
) -> Changed:  # fmt: skip
    """Fill ``out``, which may be ``old``, with the new momentum, and ``change``, if given, with what the
    parameters lose."""
    bound = clip_bound(config, mean_square)
    scratch = torch.empty(min(_WIDTH, old.numel()), dtype=torch.float32, device="cpu")
    energy = 0.0
    largest = 0.0
    for at in _pieces(old.numel()):
        room = scratch[: at.stop - at.start] if change is None else change[at]
        done = change_of(config, old[at], mean[at], 1.0 / gap, bound, out[at], room)
        energy = energy + done.energy
        largest = max(largest, done.largest_change)
    return Changed(energy, largest)


def _params_step_(
    config: OuterConfig, old: Tensor, mean: Readable, gap: float, momentum: Tensor, out: Tensor, done: Changed
) -> tuple[float, bool]:
    """Fill ``out`` with the new parameters: it is ``old``, or holds the change. The change's norm, and
    whether all of it is finite."""
    if done.largest_change == math.inf:
        return math.inf, False
    shift = norm_shift(done.largest_change) if done.largest_change else 0
    total = 0
    largest = 0.0
    for at in _pieces(old.numel()):
        change = out[at]
        if out is old:
            change = last_change(config, momentum[at], mean[at] if config.nesterov else None, gap)
        here, most = take_piece_(change, old[at], shift)
        total = total + here
        largest = max(largest, most)
        if out is old:
            out[at] = change
    return norm_of(total, shift) if done.largest_change else 0.0, math.isfinite(largest)


def _gap_and_mean_square(
    config: OuterConfig, state: AgreedState, gradient_norm: float, staleness: int
) -> tuple[float, float]:
    """The staleness gap penalty, and the running mean square after this step."""
    gap = _gap(config, state, gradient_norm, staleness)
    applied_norm = gradient_norm * (1.0 / gap)
    # No ** on floats anywhere here: libraries round pow differently; products and sqrt are exact by IEEE 754.
    mean_square = applied_norm * applied_norm / max(1, state.params.numel())
    if state.mean_square > 0.0:
        mean_square = _MEAN_SQUARE_DECAY * state.mean_square + (1.0 - _MEAN_SQUARE_DECAY) * mean_square
    return gap, mean_square


def _gap(config: OuterConfig, state: AgreedState, gradient_norm: float, staleness: int) -> float:
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


def _cannot_fail(config: OuterConfig, state: AgreedState, largest: float, inverse: float) -> bool:
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
    """Fill the new ``momentum``, which may be ``old``, and ``change``, which the parameters lose: fp32 [n].
    ``inverse``: 1 / gap."""
    if (fast := passes_for(old, mean, momentum, change)) is not None:
        return fast.change_of(
            old, mean, momentum, change, beta=config.momentum, inverse=inverse, lr=config.lr,
            nesterov=config.nesterov, bound=bound, piece=PIECE,
        )  # fmt: skip
    applied = mean if inverse == 1.0 else mean * inverse
    new = torch.mul(old, config.momentum, out=momentum).add_(applied)
    if bound < math.inf and magnitude(new) > bound:
        new.clamp_(-bound, bound)
    moved = (new * config.momentum).add_(applied) if config.nesterov else new
    largest = magnitude(torch.mul(moved, config.lr, out=change))
    return Changed(float(torch.dot(new, new)), largest)


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


def take_piece_(change: Tensor, params: Tensor, shift: int) -> tuple[int, float]:
    """Turn ``change`` into ``params - change``; the change's ``square_sum`` and the largest new magnitude.
    Any piece of both."""
    if (fast := passes_for(change, params)) is not None and is_one_scale(shift):
        return fast.take_change_(change, params, math.ldexp(1.0, shift))
    total = sum(square_sum(piece, shift) for piece in torch.split(change, PIECE))
    return total, magnitude(torch.sub(params, change, out=change))


def _pieces(size: int) -> Iterator[slice]:
    return (slice(start, min(start + _WIDTH, size)) for start in range(0, size, _WIDTH))


def stability_warning(config: OuterConfig) -> str | None:
    """Words for a person if these settings are known to diverge under a full round of delay, else None.

    Linear model: delta in (0, 1) is the contraction of one round of training. One round late, heavy ball is
    stable for ``lr * delta < 1 - beta``. So ``lr / (1 - beta)`` below 1 always is, and above 2 only a model
    that covers less than half of its way per round is.
    """
    speed = config.lr / (1.0 - config.momentum)
    if not config.is_delayed or config.gap_penalty or speed <= 2.0:
        return None
    return (
        f"outer.rule {config.rule!r} applies means one round late; with outer.lr / (1 - outer.momentum) = "
        f"{speed:.1f} (above 2) and no gap penalty this diverges on most models: set outer.gap_penalty = "
        "true, or lower outer.lr or outer.momentum"
    )


class Merge(NamedTuple):
    """How live parameters change: ``live = keep * live + addend``. ``addend``: fp32 [n], host memory. One
    affine pass, so that the training thread computes nothing else, whatever it did to the live parameters
    since the snapshot."""

    keep: float
    addend: Tensor


# ---- norms that have no reduction order, and passes over whole fragments


def norm_of_pieces(largest: float, pieces: Iterable[Tensor]) -> float:
    """The L2 norm of flat pieces (fp32 or narrower) whose ``largest`` magnitude is given: the same bits on
    every machine, however they are cut. Inf if a value is not finite, 0 for no values.

    A float sum depends on its order, so on thread count, vector width and device. Here the largest magnitude
    gives a power of two that scales all values to at most 2^18. They are rounded to integers, which are
    squared and summed exactly. The rounding is at most 2^-18 of the largest magnitude per value. So a peer
    computes these bits itself, and believes nobody about them.
    """
    if largest in {0.0, math.inf}:
        return largest
    shift = norm_shift(largest)
    return norm_of(sum(square_sum_of(piece, shift) for piece in pieces), shift)


def square_sum_of(flat: Tensor, shift: int) -> int:
    """``square_sum`` of any number of values."""
    if (fast := passes_for(flat)) is not None and is_one_scale(shift):
        return fast.square_sum(flat, math.ldexp(1.0, shift))
    return sum(square_sum(piece, shift) for piece in torch.split(flat, PIECE))


def magnitude(flat: Tensor) -> float:
    """The largest magnitude; inf if any value is not finite, 0 for no values."""
    if flat.numel() == 0:
        return 0.0
    if (fast := passes_for(flat)) is not None:
        return fast.magnitude(flat)
    low, high = torch.aminmax(flat)
    largest = abs(max(-float(low), float(high)))
    return largest if math.isfinite(largest) else math.inf


def passes_for(*tensors: Tensor) -> Passes | None:
    """What does these in one pass, with the same bits."""
    fits = all(one.device.type == "cpu" and one.dtype == torch.float32 for one in tensors)
    return passes.kernel if fits and all(one.is_contiguous() for one in tensors) else None


def is_one_scale(shift: int) -> bool:
    """Whether 2^shift is a normal fp32."""
    return abs(shift) < 120


def norm_shift(largest: float) -> int:
    # frexp: largest = m * 2^exponent with m in [0.5, 1), so the scaled magnitudes stay below 2^18.
    return _NORM_BITS - math.frexp(largest)[1]


def square_sum(piece: Tensor, shift: int) -> int:
    """The sum of the squares of ``round(values * 2^shift)``, exact. ``piece``: [at most PIECE]."""
    # What underflows on the way rounds to 0 anyway. Two halves where the scale itself is beyond fp32.
    halves = (shift,) if is_one_scale(shift) else (shift // 2, shift - shift // 2)
    whole = piece.float() * math.ldexp(1.0, halves[0])
    if len(halves) > 1:
        whole.mul_(math.ldexp(1.0, halves[1]))
    integers = whole.round_().double()
    return int(torch.dot(integers, integers))


def norm_of(total: int, shift: int) -> float:
    return math.ldexp(math.sqrt(total), -shift)
