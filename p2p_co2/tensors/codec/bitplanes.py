"""One and two bits per value, in planes of a bit each: sign and q2.

``sign``: a value is plus or minus the mean magnitude of its block of 512 (Karimireddy et al., arXiv
1901.09847). ``q2``: it is 3 or 10 scales long, Lloyd and Max's levels of Gaussian values (0.4528 and 1.5104
sigma) but for 1 in 1,500. It is a long one beyond ``LONG`` mean magnitudes; the scale is the best one for the
codes (least squares), rounded to 8 bits of mantissa.

A block is its planes, then the scale in fp32. Of a plane bit i of byte j is value 8 j + i's. The first one
holds the signs, 1 for negative, the second what is long.

Law: encoding what was decoded gives the same bytes, but for blocks of zeros. The mean is summed in fp32 by
halves that are added to each other, so it is alike on every machine, and exact where all values are alike.
The 8 bits make q2's sums of decoded values exact, too.

Price: there is no zero. What the codec loses (0.36 and 0.12 of all) is for error feedback, which is on with
these unless a run says otherwise.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from p2p_co2.codec_specs import CodecSpec
from p2p_co2.tensors.codec import passes
from p2p_co2.tensors.codec.base import NOT_FINITE, SMALLEST, ScaledCodec

LONG = 1.25
MOST_LONG = 358
"""More than 7 in 10 long ones would be short ones when they are encoded again: such a block has none."""


class Sign(ScaledCodec):
    """Plus or minus the scale."""

    code_bits = 1
    largest_code = 1.0
    has_zero = False
    in_passes = passes.SIGN

    def _encode_blocks(self, values: Tensor, rows: Tensor) -> None:
        magnitudes = values.abs()
        mean = _mean(magnitudes)
        if not bool(torch.isfinite(mean).all()):
            raise ValueError(NOT_FINITE)
        planes = self._codes(rows).view(len(rows), self.code_bits, -1)
        planes[:, 0] = _packed(torch.signbit(values))
        scale = self._scale(mean, magnitudes, planes)
        self._write_scales(rows, scale.masked_fill_(scale < SMALLEST, 0.0))

    def _scale(self, mean: Tensor, magnitudes: Tensor, planes: Tensor) -> Tensor:
        """The scales of blocks with this mean magnitude, fp32 [b, 1]; writes the other ``planes``."""
        return mean

    def _decode_blocks(self, rows: Tensor, values: Tensor) -> None:
        planes = self._codes(rows).view(len(rows), self.code_bits, -1)
        bits = torch.from_numpy(np.unpackbits(planes.numpy(), axis=2, bitorder="little"))
        torch.mul(bits[:, 0], -2.0, out=values).add_(1.0)
        if self.code_bits > 1:
            values.mul_(bits[:, 1] * 7.0 + 3.0)
        values.mul_(self.scales(rows))


class TwoBits(Sign):
    """Plus or minus 3 or 10 scales."""

    code_bits = 2
    largest_code = 10.0
    in_passes = passes.Q2

    def __init__(self, spec: CodecSpec) -> None:
        super().__init__(spec)
        self.scale_limit_bits &= -0x10000

    def _scale(self, mean: Tensor, magnitudes: Tensor, planes: Tensor) -> Tensor:
        is_long = magnitudes > mean * LONG
        is_long &= is_long.sum(dim=1, keepdim=True) <= MOST_LONG
        planes[:, 1] = _packed(is_long)
        long = _mean(magnitudes * is_long).double()
        squares = is_long.sum(dim=1, keepdim=True).double() * (91.0 / self.block_values) + 9.0
        bits = (mean.double() * 3.0 + long * 7.0).div_(squares).float().view(torch.int32)
        rounded = bits.add_(0x8000).bitwise_and_(-0x10000).clamp_(max=self.scale_limit_bits)
        return rounded.view(torch.float32)


def _mean(magnitudes: Tensor) -> Tensor:
    """Of each row of fp32 [b, 2^n], as fp32 [b, 1]: one half is added to the other until one value is left.
    Divided before, so that finite values have a finite sum."""
    sums = magnitudes * (1.0 / magnitudes.shape[1])
    while (half := sums.shape[1] // 2) > 0:
        sums = sums[:, :half] + sums[:, half:]
    return sums


def _packed(bits: Tensor) -> Tensor:
    return torch.from_numpy(np.packbits(bits.numpy(), axis=1, bitorder="little"))
