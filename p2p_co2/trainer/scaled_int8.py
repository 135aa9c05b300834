"""fp32 values kept at a quarter of their size: what a codec lost of an offer, which the payload does not say.

A peer needs its own outer gradient again when its round ends, and with error feedback what was lost goes into
the next offer. The payload is there anyway and holds the gradient but for what the codec lost: an eighth of
its norm in 4 bits, less in more. Of that a hundredth more or less is a thousandth of the gradient, whereas
error feedback's decay alone drops a twentieth.

``ScaledInt4`` has an eighth of the size, for what is finer or matters less: what a codec of 8 bits or more
lost of an offer, which is a hundredth of it, and rule "eager"'s own offer in the mean and its correction.

Law: values come back within 2^-7 of the largest of their block of ``BLOCK`` (2^-3 in four bits); a block of
nothing above 2^-100 as zeros; values that came back are kept exactly the next time. Price: one rounding each
way, on the worker, and six to eight passes over what stays in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from p2p_co2.fragments.large_tensor import large_tensor

BLOCK = 128
"""Values with one scale."""
_SMALLEST = 2.0**-100
_AT_ONCE = 512
"""Blocks: what is made on the way of 256 KiB of values stays in the cache, and small in the allocator."""


class ScaledInt8:
    """fp32 [numel], set by pieces that begin at multiples of ``BLOCK`` and, but for the last, end there."""

    _bits = 7
    """Of a magnitude."""
    _row_bytes = BLOCK

    def __init__(self, numel: int) -> None:
        self._numel = numel
        blocks = -(-numel // BLOCK)
        self._rows = large_tensor(blocks * self._row_bytes, torch.int8).view(blocks, self._row_bytes)
        self._shifts = torch.empty(blocks, dtype=torch.int8)
        """A value of 1 in row ``i`` stands for 2^_shifts[i]."""

    def __len__(self) -> int:
        return self._numel

    @property
    def held_bytes(self) -> int:
        return self._rows.numel() + self._shifts.numel()

    def set(self, at: slice, values: Tensor) -> None:
        """``values``: fp32, finite, of the one piece ``at``."""
        step, first = _AT_ONCE * BLOCK, at.start // BLOCK
        for start in range(0, len(values), step):
            some = values[start : start + step]
            if len(some) % BLOCK:
                some = torch.nn.functional.pad(some, (0, -len(some) % BLOCK))
            self._set_rows(first + start // BLOCK, some.view(-1, BLOCK))

    def _set_rows(self, first: int, rows: Tensor) -> None:
        """``rows``: fp32 [b, BLOCK], from block ``first`` on."""
        blocks, most = slice(first, first + len(rows)), 2**self._bits - 1
        largest = torch.amax(rows.abs(), dim=1)
        # The exponent of the largest, so that it becomes one of 2^(_bits - 1) to 2^_bits.
        shifts = (largest.view(torch.int32) >> 23) - (126 + self._bits)
        inverse = torch.where(largest > _SMALLEST, _power_of_two(-shifts), 0.0)
        whole = (rows * inverse.unsqueeze(1)).round_().clamp_(-most, most)
        self._pack(whole, self._rows[blocks])
        self._shifts[blocks] = shifts.clamp_(min=-126)

    def __getitem__(self, at: slice) -> Tensor:
        """fp32, a new tensor."""
        start, stop, _ = at.indices(self._numel)
        stop = max(start, stop)
        first, last = start // BLOCK, -(-stop // BLOCK)
        values = torch.empty(last - first, BLOCK)
        for begin in range(first, last, _AT_ONCE):
            blocks = slice(begin, min(begin + _AT_ONCE, last))
            some = values[begin - first : blocks.stop - first]
            self._unpack(self._rows[blocks], some)
            some.mul_(_power_of_two(self._shifts[blocks].int()).unsqueeze(1))
        return values.view(-1)[start - first * BLOCK : stop - first * BLOCK]

    def _pack(self, whole: Tensor, rows: Tensor) -> None:
        """Integers as fp32 [b, BLOCK] into int8 [b, _row_bytes]."""
        rows.copy_(whole)

    def _unpack(self, rows: Tensor, whole: Tensor) -> None:
        """The way back."""
        whole.copy_(rows)

    def with_values_of(self, before: Self | None, parts: Sequence[slice]) -> Self:
        """These values, but those of ``before`` in ``parts``, which begin and end as blocks do; zeros without
        it."""
        if not parts:
            return self
        mixed = type(self)(self._numel)
        mixed._rows.copy_(self._rows)
        mixed._shifts.copy_(self._shifts)
        for part in parts:
            blocks = slice(part.start // BLOCK, -(-part.stop // BLOCK))
            mixed._rows[blocks] = 0 if before is None else before._rows[blocks]
            mixed._shifts[blocks] = 0 if before is None else before._shifts[blocks]
        return mixed


class ScaledInt4(ScaledInt8):
    """The same in four bits for each value: those of the first half of a block are the low ones."""

    _bits = 3
    _row_bytes = BLOCK // 2

    def _pack(self, whole: Tensor, rows: Tensor) -> None:
        codes = whole.to(torch.int8)
        torch.bitwise_or(codes[:, : BLOCK // 2] & 15, codes[:, BLOCK // 2 :] << 4, out=rows)

    def _unpack(self, rows: Tensor, whole: Tensor) -> None:
        whole[:, : BLOCK // 2] = (rows << 4) >> 4  # arithmetic shifts: the sign comes along
        whole[:, BLOCK // 2 :] = rows >> 4


def _power_of_two(exponents: Tensor) -> Tensor:
    """2^exponents (int32, -126 to 127) in fp32, exactly."""
    return ((exponents + 127) << 23).view(torch.float32)
