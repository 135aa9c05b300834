"""Four bits per value in plain torch operations: int4, e3m0, and the decoding of all 4-bit codecs.

``int4``: scale = absmax / 7 per block, codes -7..7. ``e3m0`` (Streaming DiLoCo, arXiv 2501.18512: sign,
three exponent bits, no mantissa): scale = absmax / 16 per block, magnitudes 0, 1/4, 1/2, 1, 2, 4, 8, 16.
Both round to nearest.

Law: encoding what was decoded gives the same bytes. For e3m0 this is plain, since its scales divide by a
power of two; for int4 it holds because 7 * (absmax / 7) in fp32, divided by 7 again, gives the same
quotient (tested for every mantissa).

Price: about ten passes of elementwise work over a chunk that fits the cache, instead of one fused kernel
that would need a compiler on the volunteer's machine.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from p2p_co2.codec.base import SCALE_BYTES, SMALLEST, ScaledCodec, absmax

_ROUNDER = 1.5 * 2.0**23
"""Added to a small fp32 value it leaves the nearest integer (ties to even), in two's complement, in the low
bits."""
_E3M0_MAGNITUDES = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)


class FourBitCodec(ScaledCodec):
    """Two values in each byte, decoded by looking up the byte in a table of 256 pairs of fp32 values.

    ``values_of_codes`` are the 16 decoded values before scaling. The first value of a pair is in the low
    nibble unless ``high_first``.
    """

    code_bits = 4
    values_of_codes: tuple[float, ...]
    high_first = False

    def __init__(self) -> None:
        self.largest_code = max(map(abs, self.values_of_codes))
        super().__init__()

    def _decode_blocks(self, rows: Tensor, values: Tensor) -> None:
        codes = torch.empty(len(rows), self.block_bytes - SCALE_BYTES, dtype=torch.int32, device=rows.device)
        codes.copy_(rows[:, SCALE_BYTES:])
        pairs = _pair_table(self.values_of_codes, self.high_first, rows.device)
        looked_up = torch.index_select(pairs, 0, codes.view(-1)).view(torch.float32)
        torch.mul(looked_up.view(values.shape), self._scales(rows), out=values)

    def _pack(self, codes: Tensor, rows: Tensor) -> None:
        """Pack uint8 codes [b, block_values], each below 16, into ``rows``: first value in the low nibble."""
        words = codes.view(torch.int16)  # first code + 256 * second code
        packed = torch.bitwise_right_shift(words, 4).bitwise_or_(words)  # low byte: first + 16 * second
        rows[:, SCALE_BYTES:].copy_(packed)


class Int4(FourBitCodec):
    """Codes -7..7 in two's complement, scale absmax / 7. The code -8 is never written; it decodes as -7."""

    name = "int4"
    values_of_codes = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, -7.0, -7.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0)

    def _encode_blocks(self, values: Tensor, rows: Tensor) -> None:
        scratch = torch.empty_like(values)
        most = absmax(values, scratch)
        scale = most.div(7.0).clamp_(max=self.scale_limit).masked_fill_(most < SMALLEST, 0.0)
        self._write_scales(rows, scale)
        # A block of zeros is divided by 1: below SMALLEST, every value then rounds to 0.
        torch.div(values, scale.masked_fill(scale == 0.0, 1.0), out=scratch)
        integers = scratch.add_(_ROUNDER).view(torch.int32)
        codes = torch.empty(values.shape, dtype=torch.uint8, device=values.device).copy_(integers)
        self._pack(codes.bitwise_and_(15), rows)


class E3M0(FourBitCodec):
    """Sign (bit 3) and the magnitudes 0 and 2**-2 .. 2**4 (bits 0..2), scale absmax / 16.

    Rounding works on the bits of ``values / absmax``. Between two powers of two the arithmetic midpoint is
    1.5 times the lower one, where the top bit of the mantissa changes; so the exponent with that one bit
    (``half_exponents``) decides the code. Only the step from 0 is different: its midpoint, 1/8, is a power
    of two itself.
    """

    name = "e3m0"
    values_of_codes = (*_E3M0_MAGNITUDES, *(-value for value in _E3M0_MAGNITUDES))

    def _encode_blocks(self, values: Tensor, rows: Tensor) -> None:
        scratch = torch.empty_like(values)
        most = absmax(values, scratch)
        most.masked_fill_(most < SMALLEST, 0.0)
        self._write_scales(rows, most / 16.0)
        bits = torch.div(values, most.masked_fill(most == 0.0, 1.0), out=scratch).view(torch.int32)
        shifted = torch.empty_like(bits)
        codes = torch.empty(values.shape, dtype=torch.uint8, device=values.device)
        # |value / absmax| <= 1 has an exponent of at most 127: twice it, and the mantissa bit, fit one byte.
        half_exponents = codes.copy_(torch.bitwise_right_shift(bits, 22, out=shifted))
        steps = half_exponents.clamp_min_(239).sub_(239)  # 1 is 1/8 of a scale, 15 is 16 scales
        magnitudes = torch.bitwise_right_shift(steps, 1)  # right but for steps == 1, which rounds up to 1/4
        torch.maximum(magnitudes, steps.clamp_max_(1), out=magnitudes)
        signs = codes.copy_(torch.bitwise_right_shift(bits, 28, out=shifted)).bitwise_and_(8)
        self._pack(magnitudes.bitwise_or_(signs), rows)


@cache
def _pair_table(values: tuple[float, ...], high_first: bool, device: torch.device) -> Tensor:
    """For each byte the fp32 bits of its two values, in order, as one int64: [256] on ``device``."""
    table = torch.tensor(values, dtype=torch.float32)
    byte = torch.arange(256)
    low, high = table[byte & 15], table[byte >> 4]
    pairs = torch.stack([high, low] if high_first else [low, high], dim=1)
    return pairs.view(torch.int64).view(256).to(device)
