"""fp32 values kept at a quarter of their size: what a codec lost of an offer, which the payload does not say.

A peer needs its own outer gradient again when its round ends, and with error feedback what was lost goes into
the next offer. The payload is there anyway and holds the gradient but for what the codec lost: an eighth of
its norm in 4 bits, less in more. Of that a hundredth more or less is a thousandth of the gradient, whereas
error feedback's decay alone drops a twentieth.

Law: values come back within 2^-7 of the largest of their block of ``BLOCK``; a block of nothing above 2^-100
as zeros; values that came back are kept exactly the next time. Price: one rounding each way, on the worker,
and six passes over a piece that stays in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from p2p_co2.fragments.large_tensor import large_tensor

BLOCK = 128
"""Values with one scale."""
_BITS = 7
_SMALLEST = 2.0**-100


class ScaledInt8:
    """fp32 [numel], set by pieces that begin at multiples of ``BLOCK`` and, but for the last, end there."""

    def __init__(self, numel: int) -> None:
        self._numel = numel
        blocks = -(-numel // BLOCK)
        self._rows = large_tensor(blocks * BLOCK, torch.int8).view(blocks, BLOCK)
        self._shifts = torch.empty(blocks, dtype=torch.int8)
        """A value of 1 in row ``i`` stands for 2^_shifts[i]."""

    def __len__(self) -> int:
        return self._numel

    @property
    def held_bytes(self) -> int:
        return self._rows.numel() + self._shifts.numel()

    def set(self, at: slice, values: Tensor) -> None:
        """``values``: fp32, finite, of the one piece ``at``."""
        blocks = slice(at.start // BLOCK, -(-at.stop // BLOCK))
        rows = values
        if len(values) % BLOCK:
            rows = torch.nn.functional.pad(values, (0, -len(values) % BLOCK))
        rows = rows.view(-1, BLOCK)
        largest = torch.amax(rows.abs(), dim=1)
        # The exponent of the largest, so that it becomes one of 2^(_BITS - 1) to 2^_BITS.
        shifts = (largest.view(torch.int32) >> 23) - (126 + _BITS)
        inverse = torch.where(largest > _SMALLEST, _power_of_two(-shifts), 0.0)
        whole = (rows * inverse.unsqueeze(1)).round_().clamp_(-127, 127)
        self._rows[blocks] = whole
        self._shifts[blocks] = shifts.clamp_(min=-126)

    def __getitem__(self, at: slice) -> Tensor:
        """fp32, a new tensor."""
        start, stop, _ = at.indices(self._numel)
        stop = max(start, stop)
        first, last = start // BLOCK, -(-stop // BLOCK)
        scales = _power_of_two(self._shifts[first:last].int())
        values = self._rows[first:last].float().mul_(scales.unsqueeze(1))
        return values.view(-1)[start - first * BLOCK : stop - first * BLOCK]

    def with_values_of(self, before: ScaledInt8 | None, parts: Sequence[slice]) -> ScaledInt8:
        """These values, but those of ``before`` in ``parts``, which begin and end as blocks do; zeros without
        it."""
        if not parts:
            return self
        mixed = ScaledInt8(self._numel)
        mixed._rows.copy_(self._rows)
        mixed._shifts.copy_(self._shifts)
        for part in parts:
            blocks = slice(part.start // BLOCK, -(-part.stop // BLOCK))
            mixed._rows[blocks] = 0 if before is None else before._rows[blocks]
            mixed._shifts[blocks] = 0 if before is None else before._shifts[blocks]
        return mixed


def _power_of_two(exponents: Tensor) -> Tensor:
    """2^exponents (int32, -126 to 127) in fp32, exactly."""
    return ((exponents + 127) << 23).view(torch.float32)
