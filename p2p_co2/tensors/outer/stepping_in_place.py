"""``step`` in the memory of the old state, of a mean that is read piece by piece: nothing of the fragment's
size is made.

Law: the bits of the new state are those of ``step``, which every other way of taking the mean gives as well;
where ``step`` could fail nothing is changed. Price: the mean is read three times, four with Nesterov, in
pieces that stay in the cache, in place of being written and read as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from p2p_co2.config import OuterConfig
from p2p_co2.tensors.outer.norms import PIECE, norm_of, norm_of_pieces, norm_shift
from p2p_co2.tensors.outer.state import MOVED_NORMS_KEPT, OuterState
from p2p_co2.tensors.outer.stepping import (
    StepReport,
    cannot_fail,
    change_of,
    clip_bound,
    gap_and_mean_square,
    last_change,
    take_piece_,
)

_WIDTH = 2 * PIECE
"""Values at once: with what is made of them they stay in the cache."""


def step_in_place(
    config: OuterConfig,
    state: OuterState,
    read: Callable[[slice], Tensor],
    largest: float,
    base_version: int,
) -> tuple[OuterState, StepReport] | None:
    """``step`` that uses up ``state``, which nobody else may hold. ``read``: any range of the mean, fp32, a
    new tensor each time; ``largest``: the largest magnitude in it, inf if it is not finite. ``base_version``
    as in ``step``.

    None, with ``state`` as it was, if a value might leave fp32 on the way: then ``step`` finds out.
    """
    size = state.params.numel()
    norm = norm_of_pieces(largest, (read(at) for at in _pieces(size)))
    gap, mean_square = gap_and_mean_square(config, state, norm, state.version - base_version)
    if not cannot_fail(config, state, largest, 1.0 / gap):
        return None
    bound = clip_bound(config, mean_square)
    scratch = torch.empty(min(_WIDTH, size), dtype=torch.float32, device="cpu")
    clipped, energy, largest_change = 0, 0.0, 0.0
    for at in _pieces(size):
        momentum = state.momentum[at]
        change = scratch[: len(momentum)]
        done = change_of(config, momentum, read(at), 1.0 / gap, bound, momentum, change)
        clipped, energy = clipped + done.clipped, energy + done.energy
        largest_change = max(largest_change, done.largest_change)
    moved_norm = _take_change_(config, state, read, gap, largest_change)
    return (
        OuterState(
            state.version + 1, state.params, state.momentum, mean_square,
            (*state.moved_norms, moved_norm)[-MOVED_NORMS_KEPT:],
        ),
        StepReport(gap, norm, math.sqrt(energy), clipped / max(1, size)),
    )  # fmt: skip


def _take_change_(
    config: OuterConfig, state: OuterState, read: Callable[[slice], Tensor], gap: float, largest: float
) -> float:
    """Take from the parameters what the momentum says, in place; the change's norm."""
    shift, total = norm_shift(largest) if largest else 0, 0
    for at in _pieces(state.params.numel()):
        mean = read(at) if config.nesterov else None
        change = last_change(config, state.momentum[at], mean, gap)
        total += take_piece_(change, state.params[at], shift)[0]
        state.params[at] = change
    return norm_of(total, shift) if largest else 0.0


def _pieces(size: int) -> Iterator[slice]:
    return (slice(start, min(start + _WIDTH, size)) for start in range(0, size, _WIDTH))
