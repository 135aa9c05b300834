"""int4: the integers -7..7 times a scale, absmax / 7 per block, rounded to nearest.

A block is 64 bytes of codes (the integer plus 8, the first one in the low nibble), then a scale and a bias of
-8 scales, both fp16: a row of torch's own 4-bit embedding tables.

Laws: with a scale of 11 bits ``code * scale + bias`` is exact in fp32 however it is computed. Encoding what
was decoded gives the same bytes: 7 scales divided by 7 are the scale again.

Price: fp16's range. Decoded values are multiples of 2**-24 (6e-8): blocks whose largest value is below 1e-6
are sent coarsely, below 3e-8 as zeros. Values beyond 57316 saturate there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from p2p_co2.tensors.codec.base import absmax
from p2p_co2.tensors.codec.fourbit import FourBitCodec
from p2p_co2.tensors.codec.passes import INT4

_ROUNDER = 1.5 * 2.0**23 + 8.0
"""Added to a small fp32 value it leaves the nearest integer (ties to even) plus 8 in the low bits."""
_LARGEST_SCALE = 8188.0
"""The largest one whose bias is finite in fp16."""
_UNIT = 2.0**-24
"""The smallest fp16 and the distance of those below 2**-14."""


class Int4(FourBitCodec):
    """Codes 1..15 for -7..7. The code 0 is never written; it decodes as -8."""

    in_passes = INT4
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
        field = super()._scales(rows)
        half = field.view(torch.float16)[:, :1]
        as_written = _field(half).view(torch.int32) == field.view(torch.int32)
        return bool((as_written & (half.view(torch.int16) >= 0) & (half <= _LARGEST_SCALE)).all())

    def _scales(self, rows: Tensor) -> Tensor:
        return super()._scales(rows).view(torch.float16)[:, :1].float()


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
