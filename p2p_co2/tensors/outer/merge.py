"""How live parameters meet the agreed ones: outer gradients, and the merges of each apply rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from p2p_co2.config import OuterConfig
from p2p_co2.errors import LocalProtocolError
from p2p_co2.tensors.outer.norms import PIECE
from p2p_co2.tensors.outer.step import OuterState


class Merge(NamedTuple):
    """How live parameters change: ``live = keep * live + addend``. ``addend``: fp32 [n], host memory. One
    affine pass, so that the training thread computes nothing else, whatever it did to the live parameters
    since the snapshot."""

    keep: float
    addend: Tensor


def outer_gradient(state: OuterState, params: Tensor) -> Tensor:
    """``state.params - params`` (fp32 [n]): what this peer offers for ``params``, a snapshot of its live
    parameters.

    ``state`` is the one that the live parameters last met: the newest under "keep" and "blend"; under "co2"
    and "eager" the one of the last boundary merge, even if a newer one has committed since. Its version is
    the offer's base version.
    """
    return state.params - params


def merge(
    config: OuterConfig,
    old: OuterState,
    new: OuterState,
    offered: Callable[[slice], Tensor] | None,
    missed: Sequence[slice],
    out: Tensor | None = None,
) -> Merge:
    """Rules "keep" and "blend": how live parameters take in the step from ``old`` to ``new``, at any moment
    after it.

    ``offered``: any range of the outer gradient that this peer offered, from ``old``, as a new tensor; None
    if it made no offer. ``missed``: ranges in which the offer did not reach the mean. ``out``: memory for the
    addend; it may be ``old.params`` itself.

    keep: where the offer counted, the drift since the snapshot survives (``new + (live - snapshot)``), so
    the next outer gradient is exactly minus that drift. Where it did not, all drift since ``old`` survives
    (``new + (live - old)``), so the work is offered again. Nothing is counted twice and nothing is lost.

    blend: ``alpha * live + (1 - alpha) * new`` (Streaming DiLoCo). A peer with any missed range uses "keep"
    for this one merge: blending would throw away a share of work that nobody else has.
    """
    if config.rule not in {"keep", "blend"}:
        raise LocalProtocolError(f"merge is not for rule {config.rule!r}: use boundary_merge")
    if config.rule == "blend" and offered is not None and not missed:
        return Merge(config.blend_alpha, torch.mul(new.params, 1.0 - config.blend_alpha, out=out))
    addend = torch.empty_like(old.params) if out is None else out
    # Where the offer was missed the drift is measured from ``old``, as if nothing had been offered.
    lost = [(max(0, part.start), part.stop) for part in missed]
    for start in range(0, addend.numel(), PIECE):
        at = slice(start, min(start + PIECE, addend.numel()))
        here = torch.sub(new.params[at], old.params[at], out=addend[at])
        if offered is not None:
            counted = offered(at)
            for first, last in lost:
                counted[max(0, first - start) : max(0, last - start)] = 0.0
            here.add_(counted)
    return Merge(1.0, addend)


def boundary_merge(
    config: OuterConfig, new: OuterState, snapshot: Tensor, out: Tensor | None = None
) -> Merge:
    """Rules "co2" and "eager" at a fragment's schedule point: live parameters become ``new``, plus what
    they drifted since ``snapshot``.

    ``new``: the state after the mean that was in flight, or the current one if nothing was. ``snapshot``:
    fp32 [n], the live parameters at this boundary; the gradient offered now is measured at it, from the
    state before this merge. The progress since the last boundary is dropped here and returns, averaged,
    with that offer. ``out``: memory for the addend; it may be ``snapshot`` itself.
    """
    if config.rule not in {"co2", "eager"}:
        raise LocalProtocolError(f"boundary_merge is not for rule {config.rule!r}: use merge")
    return Merge(1.0, torch.sub(new.params, snapshot, out=out))


def lost_work_of(gradient: Tensor, missed: Sequence[slice]) -> Tensor:
    """The outer gradient that this peer offered, in the ranges where it did not reach the mean, 0
    elsewhere."""
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
