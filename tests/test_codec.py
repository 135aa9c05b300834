"""Codecs: values by hand, against exhaustive search and bitsandbytes' own decoders, the laws that all keep,
hostile bytes."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from p2p_co2.codec_specs import SPECS, CodecSpec, codec_names
from p2p_co2.config import CodecConfig, RunConfig
from p2p_co2.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from p2p_co2.node.ledger import PartWeights
from p2p_co2.planning.traffic import payload_bytes
from p2p_co2.tensors.aggregation import Part, clipped_mean, reduce_slices
from p2p_co2.tensors.codec import Codec, get_codec, relative_error
from p2p_co2.tensors.codec.base import CHUNK_BLOCKS, SMALLEST, absmax
from p2p_co2.tensors.codec.bitsandbytes_blocks import BitsAndBytesFourBit
from p2p_co2.tensors.codec.fourbit import FourBitCodec
from tests.test_fragment_state import PLAIN as PLAIN_OUTER
from tests.test_fragment_state import Simulated

NAMES: tuple[str, ...] = tuple(SPECS)
SCALED: tuple[str, ...] = ("int8", "fp4", "nf4", "e3m0")
"""Those with fp32 scales; ``int4`` has fp16 ones, and its range is that of ``fp16``."""
PLAIN: tuple[str, ...] = ("fp32", "fp16", "bf16")


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


# ---- against a reference


@pytest.mark.parametrize(
    ("name", "expected"),
    [("e3m0", 0.037), ("int4", 0.014), ("int8", 4.2e-5), ("fp4", 0.0165), ("nf4", 0.0091), ("bf16", 2.8e-6)],
)
def test_relative_error_of_a_million_gaussians(name: str, expected: float) -> None:
    values = gaussians(1 << 20)
    error = relative_error(values, get_codec(name).decode(get_codec(name).encode(values)))
    assert error == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize(("name", "spread"), [("int4", 0.1), ("int4", 2.0), ("e3m0", 1.0), ("e3m0", 20.0)])
def test_nearest_code_by_exhaustive_search(name: str, spread: float) -> None:
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
def test_tables_and_packing_agree_with_bitsandbytes(name: str) -> None:
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
    def test_finite_values_stay_finite_and_settle(self, name: str, values: Sequence[float]) -> None:
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
    def test_a_slice_of_blocks_decodes_alone(self, name: str, cut: int, blocks: int) -> None:
        codec = get_codec(name)
        values = gaussians(10 * 128)
        payload, stop = codec.encode(values), cut + blocks
        piece = payload[cut * codec.block_bytes : stop * codec.block_bytes]
        assert torch.equal(codec.encode(values[cut * 128 : stop * 128]), piece)
        assert torch.equal(codec.decode(piece), codec.decode(payload)[cut * 128 : stop * 128])

    def test_chunks_of_work_do_not_show(self, name: str) -> None:
        codec = get_codec(name)
        values = gaussians((CHUNK_BLOCKS + 3) * 128 + 5)
        tail = values[CHUNK_BLOCKS * 128 :]
        payload = codec.encode(values)
        assert torch.equal(payload[CHUNK_BLOCKS * codec.block_bytes :], codec.encode(tail))
        assert torch.equal(codec.decode(payload)[CHUNK_BLOCKS * 128 :], codec.decode(codec.encode(tail)))

    def test_writes_into_given_memory(self, name: str) -> None:
        codec = get_codec(name)
        values = gaussians(300)
        payload = torch.empty(codec.payload_bytes(300), dtype=torch.uint8)
        decoded = torch.full((385,), 9.0)[1:]  # an odd start: no wider type can view this memory
        assert codec.encode(values, payload) is payload
        assert codec.decode(payload, decoded) is decoded
        assert torch.equal(decoded, codec.decode(codec.encode(values)))

    def test_any_memory_layout_and_gradients(self, name: str) -> None:
        codec = get_codec(name)
        values = gaussians(256)
        spread = torch.stack([values, values], dim=1)[:, 0].requires_grad_()
        assert torch.equal(codec.encode(spread), codec.encode(values))
        payload = codec.encode(values)
        shifted = torch.cat([torch.zeros(1, dtype=torch.uint8), payload])[1:]
        codec.check(shifted)
        assert torch.equal(codec.decode(shifted), codec.decode(payload))

    def test_one_huge_value(self, name: str) -> None:
        codec = get_codec(name)
        payload = codec.encode(torch.cat([block(HUGE, -HUGE, 1.0), torch.full((128,), HUGE)]))
        codec.check(payload)
        decoded = codec.decode(payload)
        assert bool(torch.isfinite(decoded).all())
        most = {"fp16": 65504.0, "int4": 7 * 8188.0}.get(name, HUGE)
        assert decoded[:2].tolist() == pytest.approx([most, -most], rel=0.004)

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("where", [0, 200, 299])
    def test_values_that_are_not_finite_are_refused(self, name: str, bad: float, where: int) -> None:
        values = gaussians(300)
        values[where] = bad
        with pytest.raises(ValueError, match="not finite"):
            get_codec(name).encode(values)

    def test_wrong_tensors_are_a_bug_here(self, name: str) -> None:
        codec = get_codec(name)
        payload = codec.encode(gaussians(128))
        wrong: list[Callable[[], object]] = [
            lambda: codec.encode(gaussians(128).double()),
            lambda: codec.encode(gaussians(128).view(2, 64)),
            lambda: codec.encode(gaussians(128), payload[1:]),
            lambda: codec.decode(payload.view(torch.int8)),
            lambda: codec.decode(payload, torch.empty(127)),
        ]
        for call in wrong:
            with pytest.raises(LocalProtocolError):
                call()

    @settings(max_examples=60, deadline=None)
    @given(data=st.data())
    def test_whatever_bytes_pass_decode_to_finite_values(self, name: str, data: st.DataObject) -> None:
        codec = get_codec(name)
        size = 2 * codec.block_bytes
        payload = torch.tensor(list(data.draw(st.binary(min_size=size, max_size=size))), dtype=torch.uint8)
        with suppress(RemoteProtocolError):
            codec.check(payload)
            assert bool(torch.isfinite(codec.decode(payload)).all())


@pytest.mark.parametrize("name", ["int4", "e3m0", "int8", *PLAIN])
def test_encoding_what_was_decoded_gives_the_same_bytes(name: str) -> None:
    codec = get_codec(name)
    payload = codec.encode(gaussians(128 * 500) * torch.exp(5 * gaussians(128 * 500, seed=1)))
    assert torch.equal(codec.encode(codec.decode(payload)), payload)


@pytest.mark.parametrize("name", SCALED)
def test_small_blocks_are_zero_and_never_subnormal(name: str) -> None:
    codec = get_codec(name)
    decoded = codec.decode(codec.encode(torch.cat([block(SMALLEST * 0.99), block(1e-45), block(SMALLEST)])))
    assert not decoded[:256].any()
    assert decoded[256].item() == pytest.approx(SMALLEST, rel=1e-6)
    taken = decoded[decoded != 0.0].abs()
    assert bool((taken >= torch.finfo(torch.float32).tiny).all())


# ---- faults


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf, -1.0, -0.0, HUGE, -1e-45])
def test_hostile_scales_are_refused(name: str, scale: float) -> None:
    codec = get_codec(name)
    payload = hostile(codec, struct.pack("<f", scale))
    if name in ("fp4", "nf4") and scale == HUGE:  # their largest code is 1: nothing overflows
        codec.check(payload)
        return
    with pytest.raises(RemoteProtocolError) as refusal:
        codec.check(payload)
    assert refusal.value.reason == "not finite"


@pytest.mark.parametrize("name", SCALED)
def test_the_largest_admitted_scale_never_overflows(name: str) -> None:
    codec = get_codec(name)
    limit = getattr(codec, "scale_limit")  # noqa: B009
    payload = hostile(codec, struct.pack("<f", limit), blocks=1)
    for byte in range(256):
        payload[:-4] = byte
        codec.check(payload)
        assert bool(torch.isfinite(codec.decode(payload)).all())


@pytest.mark.parametrize("name", PLAIN)
def test_hostile_floats_are_refused(name: str) -> None:
    codec = get_codec(name)
    pattern = {"fp32": "<f", "fp16": "<e"}
    for value in (math.nan, math.inf, -math.inf):
        raw = struct.pack(pattern[name], value) if name in pattern else struct.pack("<f", value)[2:]
        with pytest.raises(RemoteProtocolError) as refusal:
            codec.check(hostile(codec, raw))
        assert refusal.value.reason == "not finite"


@pytest.mark.parametrize("name", NAMES)
def test_only_whole_blocks_of_finite_values_are_admitted(name: str) -> None:
    codec = get_codec(name)
    payload = codec.encode(gaussians(256)).numpy().tobytes()
    for kind in (bytes, bytearray, memoryview):
        assert bytes(codec.admit(kind(payload), 2).tolist()) == payload
    for bad, blocks in ((payload, 1), (payload, 3), (payload[:-1], 2), (b"", 2), (payload + b"\0", 2)):
        with pytest.raises(RemoteProtocolError) as refusal:
            codec.admit(bad, blocks)
        assert refusal.value.reason == "wrong size"
    assert codec.admit(b"", 0).numel() == 0


# ---- int4


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


# ---- one more codec


class Thirds(Codec):
    """A byte for each value of 64, in thirds: what a codec has to say."""

    def _encode_blocks(self, values: Tensor, rows: Tensor) -> None:
        absmax(values)
        rows.copy_((3.0 * values).round().clamp(-100, 100) + 100.0)

    def _decode_blocks(self, rows: Tensor, values: Tensor) -> None:
        values.copy_((rows.float() - 100.0) / 3.0)

    def _finite(self, rows: Tensor) -> bool:
        return bool((rows <= 200).all())


def test_a_codec_is_one_class_and_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Config, planner and help know it; two peers train with it."""
    with pytest.raises(ConfigError, match=r"codec.name: no codec is called that"):
        RunConfig.from_canonical_bytes(RunConfig().canonical_bytes().replace(b'"int4"', b'"thirds"'))
    spec = CodecSpec("thirds", 64, f"{__name__}:Thirds", block_values=64)
    monkeypatch.setitem(SPECS, "thirds", spec)
    assert (spec.bits, payload_bytes("thirds", 65)) == (8.0, 128)
    assert codec_names().endswith("or thirds")
    run = RunConfig(codec=CodecConfig(name="thirds", error_feedback=True), outer=PLAIN_OUTER)
    peers = [Simulated(name, run, torch.zeros(130)) for name in "ab"]
    for peer, learned in zip(peers, (2.0, 4.0), strict=True):
        peer.live = peer.live + learned
    payloads: list[Part] = [(peer.name, 1.0, peer.offer()) for peer in peers]
    mean = reduce_slices(clipped_mean, peers[0].codec, payloads)
    assert mean.weights == (1.0, 0.5)
    for peer in peers:
        peer.commit(bytes(mean.encoded), [PartWeights(0, 3, {"a": 1.0, "b": 0.5})])
        torch.testing.assert_close(peer.ledger.state.params, torch.full((130,), 8 / 3))
