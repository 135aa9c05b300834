"""Norms that have no reduction order, and what else passes over a whole fragment needs."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from p2p_co2.tensors.codec import passes
from p2p_co2.tensors.codec.passes import Passes

_NORM_BITS = 18
PIECE = 1 << 16
"""Elements worked on at once, few enough for a cache, and for ``square_sum``: this many squares of
integers of at most 2^_NORM_BITS stay below 2^53, so fp64 adds them exactly, in any order."""


def norm_of_pieces(largest: float, pieces: Iterable[Tensor]) -> float:
    """The L2 norm of flat pieces (fp32 or narrower) whose ``largest`` magnitude is given: the same bits on
    every machine, however they are cut. Inf if a value is not finite, 0 for no values.

    A float sum depends on its order, so on thread count, vector width and device. Here the largest magnitude
    (no order in a maximum) gives a power of two that scales all values to at most 2^18; they are rounded to
    integers, and integers are squared and summed, exactly. The rounding is at most 2^-18 of the largest
    magnitude per value. So a peer computes these bits itself, and believes nobody about them.
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
