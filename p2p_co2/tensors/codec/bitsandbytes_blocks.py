"""int8, fp4 and nf4: the block-wise formats of bitsandbytes, whose kernels encode the last two (arXiv
2110.02861, and QLoRA, 2305.14314).

Law: decoding needs only the tables below, which are part of the protocol. So the peers agree bit for bit,
whichever version of bitsandbytes each one encodes with.

``int8`` uses a symmetric linear table, (code - 127) / 127, in place of bitsandbytes' dynamic one. It has 2.5
times less squared error on Gaussian values, and the nearest entry needs no search.

Price: fp4 and nf4 encode about twenty times slower than int4. Importing bitsandbytes takes seconds, so it is
imported at the first encode that needs it.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from p2p_co2.codec_specs import CodecSpec
from p2p_co2.errors import EnvironmentFault
from p2p_co2.tensors.codec.base import SMALLEST, ScaledCodec, absmax
from p2p_co2.tensors.codec.passes import INT8

_FP4 = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)
"""Magnitudes of fp4 in the order of its codes, before division by 12."""
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""Quantiles of a normal distribution, exact in fp32 (QLoRA, appendix E)."""


class BitsAndBytesFourBit(ScaledCodec):
    """fp4 or nf4: scale = absmax; the first value of a pair is in the high nibble, as bitsandbytes packs it.

    fp4 has two codes for zero; which of them the encoder writes is its own business, both decode to +0.
    ``values_of_codes``: the 16 decoded values in units of the scale. A byte is decoded by looking up the
    fp32 values of its pair.
    """

    code_bits = 4
    largest_code = 1.0

    def __init__(self, spec: CodecSpec) -> None:
        if find_spec("bitsandbytes") is None:
            cure = "pip install bitsandbytes, or take another codec in the run file (int4, q2)"
            raise EnvironmentFault(f"codec {spec.name} needs bitsandbytes, which is not installed: {cure}")
        magnitudes = tuple(value / 12.0 for value in _FP4)
        fp4 = magnitudes + tuple(0.0 - value for value in magnitudes)
        self.values_of_codes = _NF4 if spec.name == "nf4" else fp4
        super().__init__(spec)

    def _encode_blocks(self, values: Tensor, rows: Tensor) -> None:
        from bitsandbytes import functional

        scale = _flushed(absmax(values))
        packed, _ = functional.quantize_4bit(
            values.view(-1), blocksize=self.block_values, compress_statistics=False, quant_type=self.name
        )
        self._write_scales(rows, scale)
        self._codes(rows).copy_(packed.view(len(rows), -1))

    def _decode_blocks(self, rows: Tensor, values: Tensor) -> None:
        packed = self._codes(rows)
        codes = torch.empty(packed.shape, dtype=torch.int32, device="cpu").copy_(packed)
        pairs = torch.index_select(_pair_table(self.values_of_codes), 0, codes.view(-1))
        torch.mul(pairs.view(torch.float32).view(values.shape), self.scales(rows), out=values)


class Int8(ScaledCodec):
    """Codes 0..254 for -127..127, scale = absmax / 127. The code 255 is never written; it decodes as 127."""

    code_bits = 8
    largest_code = 127.0
    in_passes = INT8

    def _encode_blocks(self, values: Tensor, rows: Tensor) -> None:
        scratch = torch.empty_like(values)
        scale = _flushed(absmax(values, scratch)).div_(127.0).clamp_(max=self.scale_limit)
        self._write_scales(rows, scale)
        # The nearest entry of a linear table is a rounding; a zero scale gives the code of zero.
        inverse = torch.where(scale > 0.0, 1.0 / scale, 0.0)
        torch.mul(values, inverse, out=scratch).round_().add_(127.0).clamp_(0.0, 254.0)
        self._codes(rows).copy_(scratch)

    def _decode_blocks(self, rows: Tensor, values: Tensor) -> None:
        # The table of 256 integers, computed: exact in fp32.
        integers = torch.empty_like(values).copy_(self._codes(rows)).clamp_max_(254.0)
        torch.mul(integers.sub_(127.0), self.scales(rows), out=values)


def _flushed(most: Tensor) -> Tensor:
    # With a zero scale the block decodes to zeros, whatever codes the kernel made of such small values.
    return most.masked_fill(most < SMALLEST, 0.0)


@cache
def _pair_table(values: tuple[float, ...]) -> Tensor:
    """For each byte the fp32 bits of its two values, in order, as one int64: [256]."""
    table = torch.tensor(values, dtype=torch.float32, device="cpu")
    byte = torch.arange(256, dtype=torch.int64, device="cpu")
    return torch.stack([table[byte >> 4], table[byte & 15]], dim=1).view(torch.int64).view(256)
