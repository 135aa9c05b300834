"""Codecs: values by hand, against exhaustive search and bitsandbytes' own decoders, the laws that all keep,
hostile bytes."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_co2.config import CodecName
from p2p_co2.errors import LocalProtocolError, RemoteProtocolError
from p2p_co2.tensors.codec import encode_with_residual, get_codec, relative_error
from p2p_co2.tensors.codec.base import CHUNK_BLOCKS, SMALLEST
from p2p_co2.tensors.codec.bitsandbytes_blocks import BitsAndBytesFourBit
from p2p_co2.tensors.codec.fourbit import FourBitCodec
from tests.codec_blocks import HUGE, block, gaussians, hostile, scale_of

NAMES: tuple[CodecName, ...] = get_args(CodecName)
SCALED: tuple[CodecName, ...] = ("int8", "fp4", "nf4", "e3m0")
"""Those with fp32 scales; ``int4`` has fp16 ones, and its range is that of ``fp16``."""
PLAIN: tuple[CodecName, ...] = ("fp32", "fp16", "bf16")


# ---- by hand


def test_e3m0_block_by_hand() -> None:
    codec = get_codec("e3m0")
    values = block(-16.0, 11.9, 12.1, 0.12, 0.13, 0.37, 0.38, -0.74, 0.76, 1.49, 1.51, 5.9, -6.1)
    payload = codec.encode(values)
    assert scale_of(codec, payload) == 1.0
    assert payload[:2].tolist() == [0x6F, 0x07]
    expected = [-16.0, 8.0, 16.0, 0.0, 0.25, 0.25, 0.5, -0.5, 1.0, 1.0, 2.0, 4.0, -8.0]
    assert codec.decode(payload)[:13].tolist() == expected


def test_int8_block_by_hand() -> None:
    codec = get_codec("int8")
    payload = codec.encode(block(-127.0, 127.0, 1.2, 0.0, -63.9))
    assert scale_of(codec, payload) == 1.0
    assert payload[:5].tolist() == [0, 254, 128, 127, 63]
    assert codec.decode(payload)[:5].tolist() == [-127.0, 127.0, 1.0, 0.0, -64.0]


def test_four_bit_tables_of_bitsandbytes_by_hand() -> None:
    fp4 = get_codec("fp4")
    payload = fp4.encode(block(12.0, -8.0, 0.07, 0.0, 2.1))
    assert scale_of(fp4, payload) == 12.0
    assert payload[0].item() == 0x3A  # first value in the high nibble
    expected = [12.0, -8.0, 0.0625, 0.0, 2.0]
    assert fp4.decode(payload)[:5].tolist() == pytest.approx(expected, rel=1e-6)
    nf4 = get_codec("nf4")
    payload = nf4.encode(block(-1.0, 1.0, 0.0, 0.45))
    assert payload[:2].tolist() == [0x0F, 0x7C]
    assert nf4.decode(payload)[:4].tolist() == pytest.approx([-1.0, 1.0, 0.0, 0.44070983], rel=1e-7)


def test_plain_codecs_saturate_and_keep_fp32_bits() -> None:
    values = block(1e5, -1e5, HUGE, -HUGE, 1e-40, -0.0, 1.0)
    assert get_codec("fp16").decode(get_codec("fp16").encode(values))[:4].tolist() == [65504.0, -65504.0] * 2
    assert torch.isfinite(get_codec("bf16").decode(get_codec("bf16").encode(values))).all()
    fp32 = get_codec("fp32")
    assert torch.equal(fp32.decode(fp32.encode(values)).view(torch.int32), values.view(torch.int32))


def test_relative_error_by_hand() -> None:
    assert relative_error(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 3.0, 9.0])) == 1 / 25
    assert relative_error(torch.zeros(2), torch.zeros(2)) == 0.0
    assert relative_error(torch.zeros(1), torch.ones(1)) == math.inf
    assert relative_error(torch.tensor([HUGE]), torch.tensor([0.0])) == 1.0


def test_error_feedback_by_hand() -> None:
    codec = get_codec("int4")
    payload, residual = encode_with_residual(codec, block(7.0, 0.4), None, 0.5)
    assert codec.decode(payload)[:2].tolist() == [7.0, 0.0]
    assert residual[:2].tolist() == pytest.approx([0.0, 0.4])
    # 0.4 + 0.5 * 0.4 = 0.6 is sent as 1, and -0.4 is carried on.
    payload, residual = encode_with_residual(codec, block(7.0, 0.4), residual, 0.5)
    assert codec.decode(payload)[:2].tolist() == [7.0, 1.0]
    assert residual[:2].tolist() == pytest.approx([0.0, -0.4])


# ---- against a reference


@pytest.mark.parametrize(
    ("name", "expected"),
    [("e3m0", 0.037), ("int4", 0.014), ("int8", 4.2e-5), ("fp4", 0.0165), ("nf4", 0.0091), ("bf16", 2.8e-6)],
)
def test_relative_error_of_a_million_gaussians(name: CodecName, expected: float) -> None:
    values = gaussians(1 << 20)
    error = relative_error(values, get_codec(name).decode(get_codec(name).encode(values)))
    assert error == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize(("name", "spread"), [("int4", 0.1), ("int4", 2.0), ("e3m0", 1.0), ("e3m0", 20.0)])
def test_nearest_code_by_exhaustive_search(name: CodecName, spread: float) -> None:
    codec = get_codec(name)
    assert isinstance(codec, FourBitCodec)
    values = gaussians(128 * 300) * torch.exp(spread * gaussians(128 * 300, seed=1))
    payload = codec.encode(values)
    scales = codec._scales(payload.view(-1, codec.block_bytes)).double()
    steps = [step for step in codec.steps_of_codes if step != -8]  # which int4 never writes
    candidates = scales.view(-1, 1, 1) * codec.unit * torch.tensor(steps).double()
    distance = (values.double().view(-1, 128, 1) - candidates).abs()
    taken = (values.double() - codec.decode(payload).double()).abs().view(-1, 128)
    # Where two codes are equally near but for the rounding of one division, either may be taken.
    assert bool((taken <= distance.amin(dim=2) + scales * 4e-6).all())


@pytest.mark.parametrize("name", ["fp4", "nf4"])
def test_tables_and_packing_agree_with_bitsandbytes(name: CodecName) -> None:
    from bitsandbytes import functional

    codec = get_codec(name)
    assert isinstance(codec, BitsAndBytesFourBit)
    theirs = functional.get_4bit_type(name, device="cpu")
    assert torch.equal(torch.tensor(codec.values_of_codes), theirs)
    values = gaussians(128 * 64)
    packed, state = functional.quantize_4bit(values, blocksize=128, quant_type=name)
    decoded = functional.dequantize_4bit(packed, state).view(-1)
    torch.testing.assert_close(codec.decode(codec.encode(values)), decoded, rtol=1e-6, atol=0.0)


def test_int8_agrees_with_bitsandbytes_within_one_code() -> None:
    from bitsandbytes import functional

    values = gaussians(128 * 4096)
    table = (torch.arange(256, dtype=torch.float32).clamp_max_(254) - 127.0) / 127.0
    codes, state = functional.quantize_blockwise(values, code=table, blocksize=128)
    theirs = functional.dequantize_blockwise(codes, state)
    codec = get_codec("int8")
    payload = codec.encode(values)
    rows = payload.view(-1, codec.block_bytes)
    apart = (rows[:, :128].int() - codes.view(-1, 128).int()).abs()
    assert int(apart.max()) <= 1
    assert int(apart.sum()) <= values.numel() // 500  # values about half-way between two entries
    ours = codec.decode(payload)
    same = apart.view(-1) == 0
    torch.testing.assert_close(ours[same], theirs[same], rtol=1e-6, atol=0.0)
    assert relative_error(values, ours) <= 4.2e-5
    assert relative_error(values, ours) == pytest.approx(relative_error(values, theirs), rel=1e-3)


@pytest.mark.parametrize("levels", [7.0, 127.0])
def test_dividing_the_decoded_maximum_gives_the_same_scale_for_every_mantissa(levels: float) -> None:
    most = (torch.arange(1 << 23, dtype=torch.int32) + (127 << 23)).view(torch.float32)
    scale = most / levels
    assert torch.equal(scale * levels / levels, scale)


# ---- laws: every codec passes all of these

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
flat = st.one_of(
    st.lists(finite, max_size=300),
    st.lists(st.sampled_from([0.0, -0.0, 1e-45, -1e-40, 1e-38, SMALLEST, HUGE, -HUGE, 1.0]), max_size=300),
)


@pytest.mark.parametrize("name", NAMES)
class TestConformance:
    @settings(max_examples=60, deadline=None)
    @given(values=flat)
    def test_finite_values_stay_finite_and_settle(self, name: CodecName, values: Sequence[float]) -> None:
        codec = get_codec(name)
        tensor = torch.tensor(values, dtype=torch.float32)
        payload = codec.encode(tensor)
        assert payload.dtype == torch.uint8
        assert payload.shape == (codec.payload_bytes(len(values)),)
        codec.check(payload)
        decoded = codec.decode(payload)
        assert decoded.shape == (codec.blocks(len(values)) * codec.block_values,)
        assert bool(torch.isfinite(decoded).all())
        assert not decoded[len(values) :].any()  # padding is zero
        # What was decoded once is representable: encoding it again changes no value.
        assert torch.equal(codec.decode(codec.encode(decoded)), decoded)

    @settings(max_examples=30, deadline=None)
    @given(cut=st.integers(0, 5), blocks=st.integers(0, 5))
    def test_a_slice_of_blocks_decodes_alone(self, name: CodecName, cut: int, blocks: int) -> None:
        codec = get_codec(name)
        values = gaussians(10 * 128)
        payload, stop = codec.encode(values), cut + blocks
        piece = payload[cut * codec.block_bytes : stop * codec.block_bytes]
        assert torch.equal(codec.encode(values[cut * 128 : stop * 128]), piece)
        assert torch.equal(codec.decode(piece), codec.decode(payload)[cut * 128 : stop * 128])

    def test_chunks_of_work_do_not_show(self, name: CodecName) -> None:
        codec = get_codec(name)
        values = gaussians((CHUNK_BLOCKS + 3) * 128 + 5)
        tail = values[CHUNK_BLOCKS * 128 :]
        payload = codec.encode(values)
        assert torch.equal(payload[CHUNK_BLOCKS * codec.block_bytes :], codec.encode(tail))
        assert torch.equal(codec.decode(payload)[CHUNK_BLOCKS * 128 :], codec.decode(codec.encode(tail)))

    def test_writes_into_given_memory(self, name: CodecName) -> None:
        codec = get_codec(name)
        values = gaussians(300)
        payload = torch.empty(codec.payload_bytes(300), dtype=torch.uint8)
        decoded = torch.full((385,), 9.0)[1:]  # an odd start: no wider type can view this memory
        assert codec.encode(values, payload) is payload
        assert codec.decode(payload, decoded) is decoded
        assert torch.equal(decoded, codec.decode(codec.encode(values)))

    def test_any_memory_layout_and_gradients(self, name: CodecName) -> None:
        codec = get_codec(name)
        values = gaussians(256)
        spread = torch.stack([values, values], dim=1)[:, 0].requires_grad_()
        assert torch.equal(codec.encode(spread), codec.encode(values))
        payload = codec.encode(values)
        shifted = torch.cat([torch.zeros(1, dtype=torch.uint8), payload])[1:]
        codec.check(shifted)
        assert torch.equal(codec.decode(shifted), codec.decode(payload))

    def test_encoding_changes_no_input(self, name: CodecName) -> None:
        codec, values = get_codec(name), gaussians(300)
        payload = codec.encode(values)
        assert torch.equal(values, gaussians(300))
        before = payload.clone()
        codec.check(payload)
        codec.decode(payload)
        assert torch.equal(payload, before)

    def test_zero_is_exact_beside_large_values(self, name: CodecName) -> None:
        codec = get_codec(name)
        assert not codec.decode(codec.encode(torch.zeros(256))).any()
        decoded = codec.decode(codec.encode(block(1.0, -3.0, 2.5)))
        assert not decoded[3:].any()

    def test_one_huge_value(self, name: CodecName) -> None:
        codec = get_codec(name)
        payload = codec.encode(torch.cat([block(HUGE, -HUGE, 1.0), torch.full((128,), HUGE)]))
        codec.check(payload)
        decoded = codec.decode(payload)
        assert bool(torch.isfinite(decoded).all())
        most = {"fp16": 65504.0, "int4": 7 * 8188.0}.get(name, HUGE)
        assert decoded[:2].tolist() == pytest.approx([most, -most], rel=0.004)

    def test_residual_is_what_was_lost(self, name: CodecName) -> None:
        codec = get_codec(name)
        values, residual = gaussians(300), gaussians(300, seed=1)
        kept = values.clone(), residual.clone()
        payload, new = encode_with_residual(codec, values, residual, 0.9)
        assert torch.equal(values, kept[0])
        assert torch.equal(residual, kept[1])
        torch.testing.assert_close(codec.decode(payload)[:300] + new, values + 0.9 * residual)

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("where", [0, 200, 299])
    def test_values_that_are_not_finite_are_refused(self, name: CodecName, bad: float, where: int) -> None:
        values = gaussians(300)
        values[where] = bad
        with pytest.raises(ValueError, match="not finite"):
            get_codec(name).encode(values)

    def test_wrong_tensors_are_a_bug_here(self, name: CodecName) -> None:
        codec = get_codec(name)
        payload = codec.encode(gaussians(128))
        wrong: list[Callable[[], object]] = [
            lambda: codec.encode(gaussians(128).double()),
            lambda: codec.encode(gaussians(128).view(2, 64)),
            lambda: codec.encode(gaussians(128), payload[1:]),
            lambda: codec.decode(payload.view(torch.int8)),
            lambda: codec.decode(payload, torch.empty(127)),
            lambda: encode_with_residual(codec, gaussians(128), gaussians(127), 1.0),
        ]
        for call in wrong:
            with pytest.raises(LocalProtocolError):
                call()

    def test_bytes_that_are_not_whole_blocks_are_refused(self, name: CodecName) -> None:
        codec = get_codec(name)
        for call in (codec.check, codec.decode):
            with pytest.raises(RemoteProtocolError) as refusal:
                call(codec.encode(gaussians(256))[:-1])
            assert refusal.value.reason == "wrong size"
        codec.check(torch.empty(0, dtype=torch.uint8))

    @settings(max_examples=60, deadline=None)
    @given(data=st.data())
    def test_whatever_bytes_pass_decode_to_finite_values(self, name: CodecName, data: st.DataObject) -> None:
        codec = get_codec(name)
        size = 2 * codec.block_bytes
        payload = torch.tensor(list(data.draw(st.binary(min_size=size, max_size=size))), dtype=torch.uint8)
        with suppress(RemoteProtocolError):
            codec.check(payload)
            assert bool(torch.isfinite(codec.decode(payload)).all())


@pytest.mark.parametrize("name", ["int4", "e3m0", "int8", *PLAIN])
def test_encoding_what_was_decoded_gives_the_same_bytes(name: CodecName) -> None:
    codec = get_codec(name)
    payload = codec.encode(gaussians(128 * 500) * torch.exp(5 * gaussians(128 * 500, seed=1)))
    assert torch.equal(codec.encode(codec.decode(payload)), payload)


@pytest.mark.parametrize("name", SCALED)
def test_small_blocks_are_zero_and_never_subnormal(name: CodecName) -> None:
    codec = get_codec(name)
    decoded = codec.decode(codec.encode(torch.cat([block(SMALLEST * 0.99), block(1e-45), block(SMALLEST)])))
    assert not decoded[:256].any()
    assert decoded[256].item() == pytest.approx(SMALLEST, rel=1e-6)
    taken = decoded[decoded != 0.0].abs()
    assert bool((taken >= torch.finfo(torch.float32).tiny).all())


def test_error_feedback_delivers_everything_in_the_end() -> None:
    codec, values = get_codec("e3m0"), gaussians(1024)
    sent, residual = torch.zeros(1024), None
    for _ in range(50):
        payload, residual = encode_with_residual(codec, values, residual, 1.0)
        sent += codec.decode(payload)
    assert relative_error(values, sent / 50) < 1e-3


# ---- faults


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf, -1.0, -0.0, HUGE, -1e-45])
def test_hostile_scales_are_refused(name: CodecName, scale: float) -> None:
    codec = get_codec(name)
    payload = hostile(codec, struct.pack("<f", scale))
    if name in ("fp4", "nf4") and scale == HUGE:  # their largest code is 1: nothing overflows
        codec.check(payload)
        return
    with pytest.raises(RemoteProtocolError) as refusal:
        codec.check(payload)
    assert refusal.value.reason == "not finite"


@pytest.mark.parametrize("name", SCALED)
def test_the_largest_admitted_scale_never_overflows(name: CodecName) -> None:
    codec = get_codec(name)
    limit = getattr(codec, "scale_limit")  # noqa: B009
    payload = hostile(codec, struct.pack("<f", limit), blocks=1)
    for byte in range(256):
        payload[:-4] = byte
        codec.check(payload)
        assert bool(torch.isfinite(codec.decode(payload)).all())


@pytest.mark.parametrize("name", PLAIN)
def test_hostile_floats_are_refused(name: CodecName) -> None:
    codec = get_codec(name)
    pattern = {"fp32": "<f", "fp16": "<e"}
    for value in (math.nan, math.inf, -math.inf):
        raw = struct.pack(pattern[name], value) if name in pattern else struct.pack("<f", value)[2:]
        with pytest.raises(RemoteProtocolError) as refusal:
            codec.check(hostile(codec, raw))
        assert refusal.value.reason == "not finite"


def test_an_unknown_name_is_a_bug_here() -> None:
    with pytest.raises(LocalProtocolError, match="int3"):
        get_codec("int3")  # type: ignore[arg-type]
