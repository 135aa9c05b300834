"""Four bits per value in plain torch operations: what int4 and e3m0 share, and e3m0.

``e3m0`` (Streaming DiLoCo, arXiv 2501.18512: sign, three exponent bits, no mantissa): scale = absmax / 16 per
block, magnitudes 0, 1/4, 1/2, 1, 2, 4, 8, 16 scales, rounded to nearest. ``int4`` has a file of its own.

A decoded value is a small integer times the scale: exact but for the one rounding of that product. ``passes``
does it in one. Where those were not built, two bytes are looked up at once, in a table of 65536 times four
8-bit integers, which are turned into fp32 and multiplied by the scales.

Law: encoding what was decoded gives the same bytes. For e3m0 this is plain, since its scales divide by a
power of two.

Price: without ``passes`` about ten passes of elementwise work to encode and four to decode, five times
slower. The table is 256 KiB.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from p2p_co2.codec_specs import CodecSpec
from p2p_co2.tensors.codec.base import SMALLEST, ScaledCodec, absmax
from p2p_co2.tensors.codec.passes import E3M0 as E3M0_PASSES


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
        values.copy_(steps.view(values.shape)).mul_(self._scales(rows) * self.unit)

    def _pack(self, codes: Tensor, rows: Tensor) -> None:
        """Pack uint8 codes [b, block_values], each below 16, into ``rows``: first value in the low nibble."""
        words = codes.view(torch.int16)  # first code + 256 * second code
        packed = torch.bitwise_right_shift(words, 4).bitwise_or_(words)  # low byte: first + 16 * second
        self._codes(rows).copy_(packed)


class E3M0(FourBitCodec):
    """Sign (bit 3) and the magnitudes 0 and 2**-2 .. 2**4 (bits 0..2), scale absmax / 16. The code 8 is never
    written; it decodes as 0.

    Rounding works on the bits of ``values / absmax``. Between two powers of two the arithmetic midpoint is
    1.5 times the lower one, where the top bit of the mantissa changes; so the exponent with that one bit
    (``half_exponents``) decides the code. Only the step from 0 is different: its midpoint, 1/8, is a power
    of two itself.
    """

    in_passes = E3M0_PASSES
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


@cache
def _quad_table(steps: tuple[int, ...]) -> Tensor:
    """For each two bytes, first byte low, the steps of their four values in order, as one int32: [65536]."""
    table = torch.tensor(steps, dtype=torch.int8, device="cpu")
    word = torch.arange(1 << 16, dtype=torch.int64, device="cpu")
    quads = torch.stack([table[word >> shift & 15] for shift in (0, 4, 8, 12)], dim=1)
    return quads.view(torch.int32).view(-1)
