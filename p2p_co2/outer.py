"""The outer optimizer: what a committed mean does to the agreed parameters, and how live parameters meet
the result.

``init`` and ``step`` are an algorithm over a plain ``OuterState``, one per fragment; nothing is hidden and
nothing is changed in place, so saving, replaying and comparing states come free. In the papers' symbols:
``params`` is CO2's x and DiLoCo's theta, ``momentum`` CO2's m, ``config.momentum`` beta, ``config.lr`` the
outer learning rate, ``config.clip_phi`` CO2's phi. The outer gradient is ``state.params - params``; the
sign is law.

Laws:

1. Agreed state. ``step`` gives the same bits on every peer. Multiplication and addition are separate
   operations, each rounded once; ``torch.add(alpha=)``, ``addcmul`` and ``lerp`` are never used, because
   some builds fuse them into one rounding and some do not, and one last bit of difference is another
   digest. There is no division of a tensor by a number either: one device divides, another multiplies by
   the inverse. Norms come from ``exact_norm``, which has no reduction order. (A process that flushes
   denormals, ``torch.set_flush_denormal``, breaks this law: leave it off.)
2. An aborted round changes nothing: there is no call for it.
3. A state is never modified, unless ``step`` is told that nobody else holds it; it works in buffers that it
   made or was given.

Sources: CO2 (arXiv 2401.16265) for the staleness gap penalty (after its Eq. 3, denominator ours) and outer
momentum clipping; DiLoCo and Streaming DiLoCo (2501.18512) for Nesterov and ``blend``; Eager updates
(2502.12996) for ``eager_correction``; ``keep`` is ours.

Price: a step holds two fp32 copies of one fragment beside the old state and the mean (one, if it may have the
mean's memory; none, if also the old state's), and passes over them twice more for the norms. All else happens
in pieces that stay in the cache: fresh pages of memory cost more than the arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from p2p_co2.codec import passes
from p2p_co2.codec.passes import Changed, Passes
from p2p_co2.config import OuterConfig
from p2p_co2.errors import LocalProtocolError, RemoteProtocolError

MOVED_NORMS_KEPT = 4
"""Changes of ``params`` whose norms are remembered: the staleness that the gap penalty measures exactly."""
_GAP_EPS = 1e-12
_MEAN_SQUARE_DECAY = 0.9
_NORM_BITS = 18
_SAFE = 1e38
"""Below this, no rounding reaches the end of fp32."""
_PIECE = 1 << 16
"""Elements worked on at once, few enough for a cache. Also few enough for ``exact_norm``: this many squares
of integers of at most 2^_NORM_BITS stay below 2^53, so fp64 adds them exactly, in any order."""


class OuterState(NamedTuple):
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
    """What one step did. ``gap`` 1 means no penalty; ``clipped_share`` is the share of momentum values
    clipped, 0 to 1; ``gradient_norm`` is that of the mean as it arrived, ``momentum_norm`` that of the
    momentum as it is stored."""

    gap: float
    gradient_norm: float
    momentum_norm: float
    clipped_share: float


class Merge(NamedTuple):
    """How live parameters change: ``live = keep * live + addend``. ``addend``: fp32 [n], host memory. One
    affine pass, so that the training thread computes nothing else, whatever it did to the live parameters
    since the snapshot."""

    keep: float
    addend: Tensor


def init(params: Tensor) -> OuterState:
    """Version 0 of a fragment from its starting values ([n], any float dtype, any device; copied)."""
    start = params.detach().to(device="cpu", dtype=torch.float32, copy=True).reshape(-1)
    return OuterState(0, start, torch.zeros_like(start), 0.0, ())


def exact_norm(values: Tensor) -> float:
    """L2 norm of ``values`` (any shape; fp32 or narrower) that has no reduction order: the same bits on every
    machine.

    A float sum depends on its order, so on thread count, vector width and device. Here the largest
    magnitude (no order in a maximum) gives a power of two that scales all values to at most 2^18; they are
    rounded to integers, and integers are squared and summed, exactly. The rounding is at most 2^-18 of the
    largest magnitude per value.

    This replaces scalars that part owners would send with their means: a peer computes these bits itself
    from the agreed mean and the agreed state, so no peer has to be believed about a number that steers
    everybody's step.

    Returns inf if any value is not finite, 0 for no values.
    """
    flat = values.detach().reshape(-1)
    largest = _magnitude(flat)
    if largest in {0.0, math.inf}:
        return largest
    shift = _norm_shift(largest)
    if (fast := _passes_for(flat)) is not None and _is_one_scale(shift):
        return _norm_of(fast.square_sum(flat, math.ldexp(1.0, shift)), shift)
    total = sum(_square_sum(piece, shift) for piece in torch.split(flat, _PIECE))
    return _norm_of(total, shift)


def _magnitude(flat: Tensor) -> float:
    """The largest magnitude; inf if any value is not finite, 0 for no values."""
    if flat.numel() == 0:
        return 0.0
    if (fast := _passes_for(flat)) is not None:
        return fast.magnitude(flat)
    low, high = torch.aminmax(flat)
    largest = max(-float(low), float(high))
    return largest if math.isfinite(largest) else math.inf


def _passes_for(*tensors: Tensor) -> Passes | None:
    """What does these in one pass, with the same bits."""
    fits = all(one.device.type == "cpu" and one.dtype == torch.float32 for one in tensors)
    return passes.kernel if fits and all(one.is_contiguous() for one in tensors) else None


def _is_one_scale(shift: int) -> bool:
    """Whether 2^shift is a normal fp32."""
    return abs(shift) < 120


def _norm_shift(largest: float) -> int:
    # frexp: largest = m * 2^exponent with m in [0.5, 1), so the scaled magnitudes stay below 2^18.
    return _NORM_BITS - math.frexp(largest)[1]


def _square_sum(piece: Tensor, shift: int) -> int:
    """The sum of the squares of ``round(values * 2^shift)``, exact. ``piece``: [at most _PIECE]."""
    # What underflows on the way rounds to 0 anyway. Two halves where the scale itself is beyond fp32.
    halves = (shift,) if _is_one_scale(shift) else (shift // 2, shift - shift // 2)
    whole = piece.float() * math.ldexp(1.0, halves[0])
    if len(halves) > 1:
        whole.mul_(math.ldexp(1.0, halves[1]))
    integers = whole.round_().double()
    return int(torch.dot(integers, integers))


def _norm_of(total: int, shift: int) -> float:
    return math.ldexp(math.sqrt(total), -shift)


def outer_gradient(state: OuterState, params: Tensor, correction: Tensor | None = None) -> Tensor:
    """``state.params - params`` (fp32 [n]): what this peer offers for ``params``, a snapshot of its live
    parameters.

    ``state`` is the one that the live parameters last met: the newest under "keep" and "blend"; under "co2"
    and "eager" the one of the last boundary merge, even if a newer one has committed since. Its version is
    the offer's base version.

    ``correction`` is the one that was merged at the peer's last boundary under rule "eager", and None
    otherwise: those parameters began at ``state.params - correction``, and what was corrected has been
    offered already, so it must not count again.
    """
    gradient = state.params - params
    return gradient if correction is None else gradient.sub_(correction)


def step(
    config: OuterConfig,
    state: OuterState,
    mean: Tensor,
    base_version: int,
    out: Tensor | None = None,
    consume: bool = False,
) -> tuple[OuterState, StepReport]:
    """Apply the committed mean outer gradient of one round.

    ``mean``: fp32 [n], host memory. ``base_version``: the outer version that the mean was measured from, at
    most ``state.version``; the difference is the staleness. ``out``: memory for the new parameters, fp32 [n];
    it may be ``mean`` itself, whose values are lost then, whatever happens. ``consume``: nobody else holds
    ``state``, so the new momentum may take the old one's memory, which it does if the step cannot fail.

    Raises ``RemoteProtocolError`` if the mean is not finite or would take the state out of fp32: every peer
    that holds the same bits refuses alike, and the state stays. Raises ``LocalProtocolError`` for a wrong
    shape or version.
    """
    _check(state, mean, base_version)
    gradient_norm = exact_norm(mean)
    gap = _gap(config, state, gradient_norm, state.version - base_version)
    applied_norm = gradient_norm * (1.0 / gap)
    # No ** on floats anywhere here: libraries round pow differently; products and sqrt are exact by IEEE 754.
    mean_square = applied_norm * applied_norm / max(1, mean.numel())
    if state.mean_square > 0.0:
        mean_square = _MEAN_SQUARE_DECAY * state.mean_square + (1.0 - _MEAN_SQUARE_DECAY) * mean_square
    consume = consume and _cannot_fail(config, state, mean, 1.0 / gap)
    momentum = state.momentum if consume else torch.empty_like(state.momentum)
    params = torch.empty_like(state.params) if out is None else out
    done = _change_of(
        config, state.momentum, mean, 1.0 / gap, _clip_bound(config, mean_square), momentum, params
    )
    # ``params`` holds the change so far.
    moved_norm, largest = _take_change_(params, done.largest_change, state.params)
    # A momentum that is not finite makes a change that is not.
    if not all(map(math.isfinite, (gradient_norm, moved_norm, largest))):
        raise RemoteProtocolError(
            "not_finite", "the mean outer gradient is not finite, or too large to apply"
        )
    moved_norms = (*state.moved_norms, moved_norm)[-MOVED_NORMS_KEPT:]
    return (
        OuterState(state.version + 1, params, momentum, mean_square, moved_norms),
        StepReport(gap, gradient_norm, math.sqrt(done.energy), done.clipped / max(1, mean.numel())),
    )


def _cannot_fail(config: OuterConfig, state: OuterState, mean: Tensor, inverse: float) -> bool:
    """Whether no value on the way can leave fp32, whatever meets whatever."""
    applied = _magnitude(mean) * inverse
    momentum = _magnitude(state.momentum) * config.momentum + applied
    change = (momentum * config.momentum + applied if config.nesterov else momentum) * config.lr
    return max(momentum, change, _magnitude(state.params) + change) < _SAFE


def _change_of(
    config: OuterConfig, old: Tensor, mean: Tensor, inverse: float, bound: float,
    momentum: Tensor, change: Tensor,
) -> Changed:  # fmt: skip
    """Fill the new ``momentum`` and ``change``, which the parameters lose.

    ``old``: the momentum so far. ``inverse``: 1 / gap. ``change`` may be the memory of ``mean``.
    """
    if (fast := _passes_for(old, mean, momentum, change)) is not None:
        return fast.change_of(
            old, mean, momentum, change, beta=config.momentum, inverse=inverse, lr=config.lr,
            nesterov=config.nesterov, bound=bound, piece=_PIECE,
        )  # fmt: skip
    clipped, energy, largest = 0, 0.0, 0.0
    for start in range(0, mean.numel(), _PIECE):
        at = slice(start, start + _PIECE)
        applied = mean[at] if inverse == 1.0 else mean[at] * inverse
        new = torch.mul(old[at], config.momentum, out=momentum[at]).add_(applied)
        if bound < math.inf and _magnitude(new) > bound:
            free = new.clone()
            clipped += int(torch.count_nonzero(new.clamp_(-bound, bound) != free))
        step = (new * config.momentum).add_(applied) if config.nesterov else new
        largest = max(largest, _magnitude(torch.mul(step, config.lr, out=change[at])))
        energy += float(torch.dot(new, new))
    return Changed(clipped, energy, largest)


def _take_change_(change: Tensor, largest_change: float, params: Tensor) -> tuple[float, float]:
    """Turn ``change`` into ``params - change``; the change's norm and the largest new magnitude."""
    if largest_change in {0.0, math.inf}:
        return largest_change, _magnitude(torch.sub(params, change, out=change))
    largest, total, shift = 0.0, 0, _norm_shift(largest_change)
    if (fast := _passes_for(change, params)) is not None and _is_one_scale(shift):
        total, largest = fast.take_change_(change, params, math.ldexp(1.0, shift))
        return _norm_of(total, shift), largest
    for start in range(0, change.numel(), _PIECE):
        piece = change[start : start + _PIECE]
        total += _square_sum(piece, shift)
        largest = max(largest, _magnitude(torch.sub(params[start : start + _PIECE], piece, out=piece)))
    return _norm_of(total, shift), largest


def merge(
    config: OuterConfig,
    old: OuterState,
    new: OuterState,
    snapshot: Tensor | None,
    missed: Sequence[slice],
    out: Tensor | None = None,
) -> Merge:
    """Rules "keep" and "blend": how live parameters take in the step from ``old`` to ``new``, at any moment
    after it.

    ``snapshot``: fp32 [n], the live parameters that this peer's offer was measured at, from ``old``; None
    if it made no offer. ``missed``: ranges in which the offer did not reach the mean. ``out``: memory for the
    addend; it may be ``snapshot`` itself, whose values are lost then.

    keep: where the offer counted, the drift since the snapshot survives (``new + (live - snapshot)``), so
    the next outer gradient is exactly minus that drift. Where it did not, all drift since ``old`` survives
    (``new + (live - old)``), so the work is offered again. Nothing is counted twice and nothing is lost.

    blend: ``alpha * live + (1 - alpha) * new`` (Streaming DiLoCo). A peer with any missed range uses "keep"
    for this one merge: blending would throw away a share of work that nobody else has.

    Catching up over several versions at once is ``old`` as it was, ``new`` as it is, and the whole fragment
    missed.
    """
    if config.rule not in {"keep", "blend"}:
        raise LocalProtocolError(f"merge is not for rule {config.rule!r}: use boundary_merge")
    if config.rule == "blend" and snapshot is not None and not missed:
        return Merge(config.blend_alpha, torch.mul(new.params, 1.0 - config.blend_alpha, out=out))
    if snapshot is None:
        return Merge(1.0, torch.sub(new.params, old.params, out=out))
    addend = torch.sub(new.params, snapshot, out=out)
    for part in missed:
        addend[part] = new.params[part] - old.params[part]
    return Merge(1.0, addend)


def merge_offered(
    config: OuterConfig,
    old: OuterState,
    new: OuterState,
    offered: Callable[[slice], Tensor],
    missed: Sequence[slice],
    out: Tensor | None = None,
) -> Merge:
    """``merge`` for a peer that kept the outer gradient it offered, ``offered(slice)``, not the snapshot,
    which was ``old.params - offered``. ``out`` may be ``old.params`` itself."""
    if config.rule == "blend" and not missed:
        return Merge(config.blend_alpha, torch.mul(new.params, 1.0 - config.blend_alpha, out=out))
    # Where the offer was missed the drift is measured from ``old``, as if nothing had been offered.
    lost = [(max(0, part.start), part.stop) for part in missed]
    addend = torch.empty_like(old.params) if out is None else out
    for start in range(0, addend.numel(), _PIECE):
        at = slice(start, min(start + _PIECE, addend.numel()))
        counted = offered(at)
        for first, last in lost:
            counted[max(0, first - start) : max(0, last - start)] = 0.0
        torch.sub(new.params[at], old.params[at], out=addend[at]).add_(counted)
    return Merge(1.0, addend)


def boundary_merge(
    config: OuterConfig,
    new: OuterState,
    snapshot: Tensor,
    lost_work: Tensor | None = None,
    correction: Tensor | None = None,
    out: Tensor | None = None,
) -> Merge:
    """Rules "co2" and "eager" at a fragment's schedule point: live parameters become ``new``, plus what
    they drifted since ``snapshot``.

    ``new``: the state after the mean that was in flight, or the current one if nothing was. ``snapshot``:
    fp32 [n], the live parameters at this boundary; the gradient offered now is measured at it, from the
    state before this merge. The progress since the last boundary is dropped here and returns, averaged,
    with that offer.

    ``lost_work``: from ``lost_work_of``, if the previous offer was not wholly counted. It is put back into
    the live parameters, so that it is part of the next offer. ``correction``: from ``eager_correction``;
    None for "co2". ``out``: memory for the addend; it may be ``snapshot`` itself.
    """
    if config.rule not in {"co2", "eager"}:
        raise LocalProtocolError(f"boundary_merge is not for rule {config.rule!r}: use merge")
    addend = torch.sub(new.params, snapshot, out=out)
    if lost_work is not None:
        addend.sub_(lost_work)
    if correction is not None:
        addend.sub_(correction)
    return Merge(1.0, addend)


def lost_work_of(gradient: Tensor, missed: Sequence[slice]) -> Tensor | None:
    """The outer gradient that this peer offered, in the ranges where it did not reach the mean, 0
    elsewhere; None if none was missed."""
    if not missed:
        return None
    lost = torch.zeros_like(gradient)
    for part in missed:
        lost[part] = gradient[part]
    return lost


def eager_correction(config: OuterConfig, gap: float, share: float, fresh: Tensor, stale: Tensor) -> Tensor:
    """What a peer subtracts from the agreed parameters under rule "eager": its own fresh share in place of
    its own stale share.

    Eager updates (arXiv 2502.12996) step with ``g + share * (fresh - stale)`` in place of the mean ``g``,
    where ``stale`` is this peer's outer gradient inside ``g``, ``fresh`` the one it offers now (fp32 [n]
    both), and ``share`` its weight in ``g`` (1/M for equal peers, 0 if it was missed). Call the difference
    e. The step is linear in the mean: the momentum gains ``e / gap``, so the parameters lose

    - heavy ball, step = momentum: ``lr * e / gap`` more;
    - Nesterov, step = g / gap + beta * momentum: ``lr * (e / gap + beta * e / gap) = lr * (1 + beta) * e /
      gap`` more.

    So the agreed step stays that of "co2", and each peer adds this correction for itself. It uses the
    agreed gap and does not pass through clipping, both of which would need norms that only this peer has.
    It is not carried into the momentum: the next mean brings the fresh gradients of all peers.
    """
    factor = 1.0 + config.momentum if config.nesterov else 1.0
    return (fresh - stale).mul_(config.lr * factor * share / gap)


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


def _clip_bound(config: OuterConfig, mean_square: float) -> float:
    """The magnitude at which momentum is clipped; inf for never."""
    if config.clip == "none":
        return math.inf
    bound = config.clip_phi * (math.sqrt(mean_square) if config.clip == "rms" else 1.0)
    return bound if bound < torch.finfo(torch.float32).max else math.inf
