"""Blocks of values and payloads that the tests of several codecs share."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from p2p_co2.tensors.codec import Codec

HUGE = 3.4028234663852886e38  # the largest fp32


def gaussians(numel: int, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def block(*values: float) -> Tensor:
    """One block that starts with these values, the rest zero."""
    return torch.tensor(list(values) + [0.0] * (128 - len(values)))


def scale_of(codec: Codec, payload: Tensor) -> float:
    """Of the first block, whose last four bytes it is."""
    field = bytes(payload[codec.block_bytes - 4 : codec.block_bytes].tolist())
    if codec.name == "int4":
        scale, bias = struct.unpack("<ee", field)
        assert bias == -8.0 * scale
        return float(scale)
    return float(struct.unpack("<f", field)[0])


def hostile(codec: Codec, last_bytes: bytes, blocks: int = 3) -> Tensor:
    """A good payload whose last block ends with these bytes."""
    payload = codec.encode(gaussians(128 * blocks))
    payload[-len(last_bytes) :] = torch.tensor(list(last_bytes), dtype=torch.uint8)
    return payload
