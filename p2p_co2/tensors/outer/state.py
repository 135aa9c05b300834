"""The agreed state of a fragment, and how live parameters change: plain values."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MOVED_NORMS_KEPT = 4
"""Changes of ``params`` whose norms are remembered: the staleness that the gap penalty measures exactly."""


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
