"""Plain floating-point codecs: fp32, fp16, bf16. No scale; the block is 128 values so that parts cut alike
everywhere.

Law: ``fp32`` gives back the same bits. ``fp16`` and ``bf16`` round to nearest, ties to even. A value beyond
the format becomes its largest one (65504 for fp16), so that an outlier costs accuracy and not the round.

Price: 2 to 8 times the bytes of the block-wise codecs. ``fp16`` loses values below 6e-8, which outer
gradients of large models do reach: ``bf16`` keeps them, with 8 bits of precision.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from p2p_co2.codec_specs import CodecSpec
from p2p_co2.tensors.codec import passes
from p2p_co2.tensors.codec.base import LARGEST, Codec, absmax
from p2p_co2.tensors.codec.passes import FP16


class PlainCodec(Codec):
    """Values as torch.float32, float16 or bfloat16, little-endian, nothing else."""

    def __init__(self, spec: CodecSpec) -> None:
        super().__init__(spec)
        self._dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[spec.name]
        self._limit = torch.finfo(self._dtype).max
        self.in_passes = FP16 if spec.name == "fp16" else None

    def _take(self, view: memoryview, values: Tensor, blocks: int) -> bool:
        if self.name != "fp32" or passes.kernel is None:
            return super()._take(view, values, blocks)
        sent = np.frombuffer(view, "<f4")
        np.copyto(values.numpy(), sent[: len(values)])
        is_padded_well = bool(np.isfinite(sent[len(values) :]).all())
        return is_padded_well and math.isfinite(passes.kernel.magnitude(values))

    def _encode_blocks(self, values: Tensor, rows: Tensor) -> None:
        absmax(values)  # raises if not finite
        if self._limit < LARGEST:
            values = values.clamp(-self._limit, self._limit)
        rows.view(self._dtype).copy_(values)

    def _decode_blocks(self, rows: Tensor, values: Tensor) -> None:
        values.copy_(rows.view(self._dtype))

    def _finite(self, rows: Tensor) -> bool:
        return bool(torch.isfinite(rows.view(self._dtype).abs().amax()))
