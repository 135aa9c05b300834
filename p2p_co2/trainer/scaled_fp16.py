"""fp32 values kept at half their size: under "keep" and "blend" what a peer offered until its round has
ended, and under "co2" and "eager" how far the agreed parameters moved, where nothing else tells it.

A peer needs its own outer gradient again when the round commits (how far its live parameters have come since)
or is given up (its work goes back). With a codec that rounds to 8 bits or less the mean does not hold more
of it than that, so half precision, scaled by the largest value of each piece, is a hundred times finer than
what was lost on the way. Under "keep" and "blend" even that rounding is not lost: it stays in the live
parameters and is in the next offer.

Law: values come back within 2^-11 of themselves, or 2^-39 of the largest of their piece; a piece of zeros, or
of nothing above 2^-100, as zeros; values that came back are kept exactly the next time. Price: one rounding
each way, on the worker.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from p2p_co2.tensors.codec import passes
from p2p_co2.tensors.fragments.large_tensor import large_tensor

_BITS = 15
"""The largest value of a piece is kept as one below 2^_BITS: fp16 ends at 65504."""
_SMALLEST = 2.0**-100


class ScaledFp16:
    """fp32 [numel], set piece by piece: [0, piece), [piece, 2 piece) and so on."""

    def __init__(self, numel: int, piece: int) -> None:
        self._values, self._piece = large_tensor(numel, torch.float16), piece
        self._scales = [1.0] * -(-numel // piece)

    def __len__(self) -> int:
        return self._values.numel()

    @property
    def held_bytes(self) -> int:
        return 2 * self._values.numel()

    def set(self, at: slice, values: Tensor) -> None:
        """``values``: fp32, finite, of the one piece ``at``."""
        fast = passes.kernel if values.is_contiguous() else None
        largest = fast.magnitude(values) if fast is not None else _largest(values)
        # A power of two, so that scaling rounds nothing; what no scale can hold is zero.
        scale = math.ldexp(1.0, math.frexp(largest)[1] - _BITS) if largest > _SMALLEST else math.inf
        self._scales[at.start // self._piece] = 0.0 if scale == math.inf else scale
        if fast is not None:
            fast.halve(values, 1.0 / scale, self._values[at])
        else:
            self._values[at] = values * (1.0 / scale)

    def __getitem__(self, at: slice) -> Tensor:
        """fp32, a new tensor."""
        start, stop, _ = at.indices(self._values.numel())
        values = self._values[start:stop].float()
        while start < stop:
            index = start // self._piece
            end = min(stop, (index + 1) * self._piece)
            values[len(values) - (stop - start) : len(values) - (stop - end)].mul_(self._scales[index])
            start = end
        return values


def _largest(values: Tensor) -> float:
    return float(values.abs().max()) if values.numel() else 0.0
