"""int4: its block by hand, its fused kernel against the table, and the range of its fp16 scales."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from torch import Tensor

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.tensors.codec import get_codec, relative_error
from p2p_co2.tensors.codec.fourbit import FourBitCodec
from tests.codec_blocks import block, gaussians, hostile, scale_of


def test_int4_block_by_hand() -> None:
    codec = get_codec("int4")
    payload = codec.encode(block(7.0, -7.0, 1.4, -1.6, 0.5, 1.5))
    assert scale_of(codec, payload) == 1.0
    # A code is the value plus 8, the first one low; halves go to the even neighbour.
    assert payload[:4].tolist() == [0x1F, 0x69, 0xA8, 0x88]
    assert payload[64:].tolist() == [0x00, 0x3C, 0x00, 0xC8]  # 1 and -8 in fp16
    assert codec.decode(payload)[:6].tolist() == [7.0, -7.0, 1.0, -2.0, 0.0, 2.0]
    assert codec.block_bytes == 68


def int4_rows_of_every_scale() -> Tensor:
    """Rows with every scale that ``check`` admits and random codes, all 16 of them: uint8 [28672, 68]."""
    half = torch.arange(0x7000, dtype=torch.int16).view(torch.float16).view(-1, 1)
    assert half[-1].item() == 8188.0
    field = torch.cat([half, half * -8.0], dim=1).view(torch.uint8)
    codes = torch.randint(256, (len(half), 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return torch.cat([codes, field], dim=1)


def test_the_fused_kernel_and_the_table_give_the_same_bits() -> None:
    """Accelerators decode by the table: so do peers whose torch lacks the kernel."""
    codec, rows = get_codec("int4"), int4_rows_of_every_scale()
    assert isinstance(codec, FourBitCodec)
    codec.check(rows.view(-1))
    by_table = torch.empty(len(rows), 128)
    FourBitCodec._decode_blocks(codec, rows, by_table)
    expected = by_table.add_(0.0).view(torch.int32).view(-1)
    assert torch.equal(codec.decode(rows.view(-1)).view(torch.int32), expected)
    given = torch.empty(rows.numel() // 68 * 128)
    assert torch.equal(codec.decode(rows.view(-1), given).view(torch.int32), expected)


def test_every_scale_of_int4_settles() -> None:
    codec, rows = get_codec("int4"), int4_rows_of_every_scale()
    payload = codec.encode(codec.decode(rows.view(-1)).clamp(-57316.0, 57316.0))
    assert torch.equal(codec.encode(codec.decode(payload)), payload)


def test_int4_has_the_resolution_of_fp16() -> None:
    codec, unit = get_codec("int4"), 2.0**-24
    tiny = torch.cat([block(7 * unit, -3 * unit, unit), block(6.6 * unit, -2.9 * unit), block(0.49 * unit)])
    decoded = codec.decode(codec.encode(tiny)) / unit
    assert decoded[:3].tolist() == [7.0, -3.0, 1.0]
    assert decoded[128:130].tolist() == [7.0, -3.0]
    assert not decoded[256:].any()
    small = gaussians(1 << 16) * 1e-5
    assert relative_error(small, codec.decode(codec.encode(small))) == pytest.approx(0.014, rel=0.05)


@pytest.mark.parametrize(
    ("scale", "bias"),
    [
        (math.nan, math.nan),
        (math.inf, -math.inf),
        (-1.0, 8.0),
        (8192.0, -65504.0),
        (1.0, -8.01),
        (0.0, 0.0),
        (-0.0, 0.0),
    ],
)
def test_hostile_int4_scales_are_refused(scale: float, bias: float) -> None:
    codec = get_codec("int4")
    with pytest.raises(RemoteProtocolError) as refusal:
        codec.check(hostile(codec, struct.pack("<ee", scale, bias)))
    assert refusal.value.reason == "not finite"
