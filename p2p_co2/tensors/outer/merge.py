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

    keep: where the offer counted, the drift since the snapshot survives (``new + (live - snapshot)``). Where
    it did not, all drift since ``old`` does (``new + (live - old)``), so the work is offered again.

    blend: ``alpha * live + (1 - alpha) * new`` (Streaming DiLoCo). A peer with any missed range uses "keep"
    for this one merge, so as not to lose work that nobody else has.
    """
    if config.rule not in {"keep", "blend"}:
        raise LocalProtocolError(f"merge is not for rule {config.rule!r}")
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


def eager_correction(config: OuterConfig, gap: float, share: float, fresh: Tensor, stale: Tensor) -> Tensor:
    """What a peer subtracts from the agreed parameters under rule "eager": its own fresh share in place of
    its own stale share.

    Eager updates (arXiv 2502.12996) step with ``g + share * (fresh - stale)`` in place of the mean ``g``:
    ``stale`` is this peer's outer gradient inside ``g``, ``fresh`` the one it offers now (fp32 [n] both),
    ``share`` its weight in ``g``. Call the difference e. The step is linear in the mean, so the parameters
    lose ``lr * e / gap`` more (heavy ball), or ``lr * (1 + beta) * e / gap`` (Nesterov).

    The agreed step stays that of "co2": each peer adds this for itself, unclipped, with the agreed gap. It is
    not carried into the momentum: the next mean brings the fresh gradients of all peers.
    """
    factor = 1.0 + config.momentum if config.nesterov else 1.0
    return (fresh - stale).mul_(config.lr * factor * share / gap)
