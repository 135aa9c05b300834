"""Four bits per value in plain torch operations: e3m0 and int4.

``e3m0``: sign, three exponent bits, no mantissa (Streaming DiLoCo, arXiv 2501.18512). The scale is absmax /
16 per block, magnitudes are 0, 1/4, 1/2, 1, 2, 4, 8, 16 scales, rounded to nearest.

``int4``: the integers -7..7 times a scale, absmax / 7 per block, rounded to nearest. A block is 64 bytes of
codes (the integer plus 8, the first one in the low nibble), then a scale and a bias of -8 scales, both fp16.
Torch's own 4-bit embedding tables have such rows. Price: fp16's range. Blocks whose largest value is below
1e-6 are sent coarsely, below 3e-8 as zeros. Values beyond 57316 saturate.

A decoded value is a small integer times the scale: exact but for the one rounding of that product. ``passes``
does it in one. Where those were not built, two bytes are looked up at once in a table of 256 KiB.

Law: encoding what was decoded gives the same bytes. For e3m0's scales divide by a power of two, and 7 scales
of int4 divided by 7 are the scale again.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from p2p_co2.codec_specs import CodecSpec
from p2p_co2.tensors.codec import passes
from p2p_co2.tensors.codec.base import SMALLEST, ScaledCodec, absmax

_ROUNDER = 1.5 * 2.0**23 + 8.0
"""Added to a small fp32 value it leaves the nearest integer (ties to even) plus 8 in the low bits."""
_LARGEST_SCALE = 8188.0
"""The largest one whose bias is finite in fp16."""
_UNIT = 2.0**-24
"""The smallest fp16 and the distance of those below 2**-14."""


class FourBitCodec(ScaledCodec):
    """Two values in each byte, the first in the low nibble.

    ``steps_of_codes``: the 16 decoded values in units of ``scale * unit``, integers of 8 bits; ``unit`` is a
    power of two.
    """

    code_bits = 4
    steps_of_codes: tuple[int, ...]
    unit = 1.0

    def __init__(self, spec: CodecSpec) -> None:
        self.largest_code = max(map(abs, self.steps_of_codes)) * self.unit
        super().__init__(spec)

    def _decode_blocks(self, rows: Tensor, values: Tensor) -> None:
        words = rows.view(torch.uint16)[:, : self.block_values // 4]
        quads = torch.empty(words.shape, dtype=torch.int32, device="cpu").copy_(words)
        table = _quad_table(self.steps_of_codes)
        steps = torch.index_select(table, 0, quads.view(-1)).view(torch.int8)
        values.copy_(steps.view(values.shape)).mul_(self.scales(rows) * self.unit)

    def _pack(self, codes: Tensor, rows: Tensor) -> None:
        """Pack uint8 codes [b, block_values], each below 16, into ``rows``: first value in the low nibble."""
        words = codes.view(torch.int16)  # first code + 256 * second code
        packed = torch.bitwise_right_shift(words, 4).bitwise_or_(words)  # low byte: first + 16 * second
        self._codes(rows).copy_(packed)


class E3M0(FourBitCodec):
    """Sign (bit 3) and the magnitudes 0 and 2**-2 .. 2**4 (bits 0..2), scale absmax / 16. The code 8 is never
    written; it decodes as 0.

    Rounding works on the bits of ``values / absmax``. Between two powers of two the midpoint is 1.5 times the
    lower one, where the top bit of the mantissa changes. So the exponent with that one bit
    (``half_exponents``) decides the code. Only the step from 0 is different: its midpoint, 1/8, is a power of
    two itself.
    """

    in_passes = passes.E3M0
    steps_of_codes = (0, 1, 2, 4, 8, 16, 32, 64, 0, -1, -2, -4, -8, -16, -32, -64)
    unit = 0.25

    def _encode_blocks(self, values: Tensor, rows: Tensor) -> None:
        scratch = torch.empty_like(values)
        most = absmax(values, scratch)
        most.masked_fill_(most < SMALLEST, 0.0)
        self._write_scales(rows, most / 16.0)
        bits = torch.div(values, most.masked_fill(most == 0.0, 1.0), out=scratch).view(torch.int32)
        shifted = torch.empty_like(bits)
        codes = torch.empty(values.shape, dtype=torch.uint8, device="cpu")
        # |value / absmax| <= 1 has an exponent of at most 127: twice it, and the mantissa bit, fit one byte.
        half_exponents = codes.copy_(torch.bitwise_right_shift(bits, 22, out=shifted))
        steps = half_exponents.clamp_min_(239).sub_(239)  # 1 is 1/8 of a scale, 15 is 16 scales
        magnitudes = torch.bitwise_right_shift(steps, 1)  # right but for steps == 1, which rounds up to 1/4
        torch.maximum(magnitudes, steps.clamp_max_(1), out=magnitudes)
        signs = codes.copy_(torch.bitwise_right_shift(bits, 28, out=shifted)).bitwise_and_(8)
        signs.mul_(magnitudes.clamp_max(1))  # zero has no sign
        self._pack(magnitudes.bitwise_or_(signs), rows)


class Int4(FourBitCodec):
    """Codes 1..15 for -7..7. The code 0 is never written; it decodes as -8."""

    in_passes = passes.INT4
    steps_of_codes = tuple(range(-8, 8))

    def _encode_blocks(self, values: Tensor, rows: Tensor) -> None:
        scratch = torch.empty_like(values)
        most = absmax(values, scratch)
        half = _scale_of(most)
        self._write_scales(rows, _field(half))
        scale = half.float()
        # A block without a scale is divided by 1: its values are so small that they round to 0.
        torch.div(values, scale.masked_fill(scale == 0.0, 1.0), out=scratch)
        if bool((most >= 7.5 * _LARGEST_SCALE).any()):
            scratch.clamp_(-7.0, 7.0)
        integers = scratch.add_(_ROUNDER).view(torch.int32)
        codes = torch.empty(values.shape, dtype=torch.uint8, device="cpu").copy_(integers)
        self._pack(codes, rows)

    def _decode_blocks(self, rows: Tensor, values: Tensor) -> None:
        super()._decode_blocks(rows, values)
        values.add_(0.0)  # no negative zeros, which hostile codes make of a scale of 0

    def _finite(self, rows: Tensor) -> bool:
        field = super().scales(rows)
        half = field.view(torch.float16)[:, :1]
        as_written = _field(half).view(torch.int32) == field.view(torch.int32)
        return bool((as_written & (half.view(torch.int16) >= 0) & (half <= _LARGEST_SCALE)).all())

    def scales(self, rows: Tensor) -> Tensor:
        return super().scales(rows).view(torch.float16)[:, :1].float()


def _scale_of(most: Tensor) -> Tensor:
    """The scales of blocks with these largest magnitudes, fp32 to fp16 [b, 1].

    Below 8 units rounding would cut values off, or not settle: such a scale goes up to a power of two.
    """
    scale = most.div(7.0).clamp_(max=_LARGEST_SCALE)
    power = ((scale.view(torch.int32) + 0x7FFFFF) & ~0x7FFFFF).view(torch.float32)
    scale = torch.where(scale < 8.0 * _UNIT, power.clamp_(min=_UNIT), scale)
    return scale.masked_fill_(most <= 0.5 * _UNIT, 0.0).half()


def _field(half: Tensor) -> Tensor:
    """Scales, fp16 [b, 1], and their biases, as the bits of fp32 [b, 1]."""
    return torch.cat([half, half * -8.0], dim=1).view(torch.float32)


@cache
def _quad_table(steps: tuple[int, ...]) -> Tensor:
    """For each two bytes, first byte low, the steps of their four values in order, as one int32: [65536]."""
    table = torch.tensor(steps, dtype=torch.int8, device="cpu")
    word = torch.arange(1 << 16, dtype=torch.int64, device="cpu")
    quads = torch.stack([table[word >> shift & 15] for shift in (0, 4, 8, 12)], dim=1)
    return quads.view(torch.int32).view(-1)
