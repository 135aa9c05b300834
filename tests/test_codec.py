"""Codecs: values by hand, against exhaustive search and bitsandbytes' own decoders, the laws that all keep,
hostile bytes."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from p2p_co2.codec_specs import SPECS
from p2p_co2.errors import EnvironmentFault, LocalProtocolError, RemoteProtocolError
from p2p_co2.tensors.codec import Codec, get_codec
from p2p_co2.tensors.codec.base import SMALLEST
from p2p_co2.tensors.codec.bitsandbytes_blocks import BitsAndBytesFourBit
from p2p_co2.tensors.codec.fourbit import FourBitCodec

NAMES: tuple[str, ...] = tuple(SPECS)
SCALED: tuple[str, ...] = ("int8", "fp4", "nf4", "e3m0")
"""Those with fp32 scales of the largest value; ``int4`` has fp16 ones, and its range is that of ``fp16``."""
PLANES: tuple[str, ...] = ("sign", "q2")
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
    payload = codec.encode(gaussians(codec.block_values * blocks))
    payload[-len(last_bytes) :] = torch.tensor(list(last_bytes), dtype=torch.uint8)
    return payload


def admit(codec: Codec, payload: Tensor) -> None:
    """Check it as a peer's."""
    codec.admit(payload.numpy(), torch.empty(len(payload) // codec.block_bytes * codec.block_values))


def relative_error(values: Tensor, decoded: Tensor) -> float:
    return float((values - decoded).double().square().sum() / values.double().square().sum())


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


def test_plain_codecs_saturate_and_keep_fp32_bits() -> None:
    values = block(1e5, -1e5, HUGE, -HUGE, 1e-40, -0.0, 1.0)
    assert get_codec("fp16").decode(get_codec("fp16").encode(values))[:4].tolist() == [65504.0, -65504.0] * 2
    assert torch.isfinite(get_codec("bf16").decode(get_codec("bf16").encode(values))).all()
    fp32 = get_codec("fp32")
    assert torch.equal(fp32.decode(fp32.encode(values)).view(torch.int32), values.view(torch.int32))


# ---- against a reference


@pytest.mark.parametrize("name", NAMES)
def test_relative_error_of_a_million_gaussians(name: str) -> None:
    values = gaussians(1 << 20)
    error = relative_error(values, get_codec(name).decode(get_codec(name).encode(values)))
    assert error == pytest.approx(SPECS[name].error, rel=0.03)


@pytest.mark.parametrize(("name", "spread"), [("int4", 0.1), ("int4", 2.0), ("e3m0", 1.0), ("e3m0", 20.0)])
def test_nearest_code_by_exhaustive_search(name: str, spread: float) -> None:
    codec = get_codec(name)
    assert isinstance(codec, FourBitCodec)
    values = gaussians(128 * 300) * torch.exp(spread * gaussians(128 * 300, seed=1))
    payload = codec.encode(values)
    scales = codec.scales(payload.view(-1, codec.block_bytes)).double()
    steps = [step for step in codec.steps_of_codes if step != -8]  # which int4 never writes
    candidates = scales.view(-1, 1, 1) * codec.unit * torch.tensor(steps).double()
    distance = (values.double().view(-1, 128, 1) - candidates).abs()
    taken = (values.double() - codec.decode(payload).double()).abs().view(-1, 128)
    # Where two codes are equally near but for the rounding of one division, either may be taken.
    assert bool((taken <= distance.amin(dim=2) + scales * 4e-6).all())


def test_the_two_codecs_of_bitsandbytes_say_so_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2p_co2.tensors.codec.bitsandbytes_blocks.find_spec", lambda name: None)
    for name in ("fp4", "nf4"):
        with pytest.raises(
            EnvironmentFault, match=rf"codec {name} needs bitsandbytes.*pip install bitsandbytes"
        ):
            BitsAndBytesFourBit(SPECS[name])
    assert get_codec("int8").encode(gaussians(256)).numel()


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
        admit(codec, payload)
        decoded = codec.decode(payload)
        assert decoded.shape == (codec.blocks(len(values)) * codec.block_values,)
        assert bool(torch.isfinite(decoded).all())
        assert not codec.has_zero or not decoded[len(values) :].any()  # padding is zero
        # What was decoded once is representable: encoding it again changes no value.
        assert torch.equal(codec.decode(codec.encode(decoded)), decoded)

    @settings(max_examples=30, deadline=None)
    @given(cut=st.integers(0, 5), blocks=st.integers(0, 5))
    def test_a_slice_of_blocks_decodes_alone(self, name: str, cut: int, blocks: int) -> None:
        codec = get_codec(name)
        width = codec.block_values
        values = gaussians(10 * width)
        payload, stop = codec.encode(values), cut + blocks
        piece = payload[cut * codec.block_bytes : stop * codec.block_bytes]
        assert torch.equal(codec.encode(values[cut * width : stop * width]), piece)
        assert torch.equal(codec.decode(piece), codec.decode(payload)[cut * width : stop * width])

    def test_writes_into_given_memory(self, name: str) -> None:
        codec = get_codec(name)
        values = gaussians(300)
        payload = torch.empty(codec.payload_bytes(300), dtype=torch.uint8)
        size = codec.blocks(300) * codec.block_values
        decoded = torch.full((size + 1,), 9.0)[1:]  # an odd start: no wider type can view this memory
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
        admit(codec, shifted)
        assert torch.equal(codec.decode(shifted), codec.decode(payload))

    def test_one_huge_value(self, name: str) -> None:
        codec = get_codec(name)
        payload = codec.encode(torch.cat([block(HUGE, -HUGE, 1.0), torch.full((128,), HUGE)]))
        admit(codec, payload)
        decoded = codec.decode(payload)
        assert bool(torch.isfinite(decoded).all())
        most = {"fp16": 65504.0, "int4": 7 * 8188.0}.get(name, HUGE)
        assert name in PLANES or decoded[:2].tolist() == pytest.approx([most, -most], rel=0.004)

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("where", [0, 200, 299])
    def test_values_that_are_not_finite_are_refused(self, name: str, bad: float, where: int) -> None:
        values = gaussians(300)
        values[where] = bad
        for base in (None, torch.zeros(300)):
            with pytest.raises(ValueError, match="not finite"):
                get_codec(name).encode(values, base=base)

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
            admit(codec, payload)
            assert bool(torch.isfinite(codec.decode(payload)).all())


@pytest.fixture
def restored() -> Iterator[None]:
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)
    torch.set_default_device(None)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.usefixtures("restored")
def test_the_bytes_are_the_same_whatever_torch_makes_by_default(name: str, dtype: torch.dtype) -> None:
    def bits(codec: Codec) -> tuple[bytes, bytes]:
        payload = codec.encode(values)
        return bytes(payload.numpy()), bytes(codec.decode(payload).view(torch.uint8).numpy())

    values, codec = gaussians(128 * 33 + 5), get_codec(name)
    expected = bits(codec)
    torch.set_default_dtype(dtype)
    torch.set_default_device("meta")
    assert bits(type(codec)(codec.spec)) == expected  # with what it holds computed now


@pytest.mark.parametrize("name", ["int4", "e3m0", "int8", *PLANES, *PLAIN])
def test_encoding_what_was_decoded_gives_the_same_bytes(name: str) -> None:
    codec = get_codec(name)
    size = 500 * codec.block_values
    for spread in (0.0, 0.5, 5.0):
        payload = codec.encode(gaussians(size) * torch.exp(spread * gaussians(size, seed=1)))
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


NOT_FINITE = (math.nan, math.inf, -math.inf)
BAD_ENDS: dict[str, list[bytes]] = {
    "fp32": [struct.pack("<f", bad) for bad in NOT_FINITE],
    "fp16": [struct.pack("<e", bad) for bad in NOT_FINITE],
    "bf16": [struct.pack("<f", bad)[2:] for bad in NOT_FINITE],
    "int4": [
        struct.pack("<ee", scale, bias)
        for scale, bias in (
            (math.nan, math.nan), (math.inf, -math.inf), (-1.0, 8.0), (8192.0, -65504.0), (1.0, -8.01),
            (0.0, 0.0), (-0.0, 0.0),
        )
    ],
}  # fmt: skip
BAD_ENDS |= {
    name: [struct.pack("<f", bad) for bad in (*NOT_FINITE, -1.0, -0.0, -1e-45)]
    + [struct.pack("<f", HUGE)] * (name in ("int8", "e3m0", "q2"))  # 1 is the largest code of the others
    for name in (*SCALED, *PLANES)
}
"""How the last block of a payload may end that no honest peer sends: values, or a scale."""


@pytest.mark.parametrize("name", NAMES)
def test_hostile_values_and_scales_are_refused(name: str) -> None:
    codec = get_codec(name)
    for bad in BAD_ENDS[name]:
        with pytest.raises(RemoteProtocolError) as refusal:
            admit(codec, hostile(codec, bad))
        assert refusal.value.reason == "not finite", bad


@pytest.mark.parametrize("name", NAMES)
def test_only_whole_blocks_of_finite_values_are_admitted(name: str) -> None:
    codec = get_codec(name)
    size = 2 * codec.block_values
    payload = codec.encode(gaussians(size)).numpy().tobytes()
    expected = codec.decode(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
    values = torch.empty(size)
    for kind in (bytes, bytearray, memoryview):
        codec.admit(kind(payload), values.zero_())
        assert torch.equal(values, expected)
    for bad, blocks in ((payload, 1), (payload, 3), (payload[:-1], 2), (b"", 2), (payload + b"\0", 2)):
        with pytest.raises(RemoteProtocolError) as refusal:
            codec.admit(bad, torch.empty(codec.block_values * blocks))
        assert refusal.value.reason == "wrong size"
    codec.admit(b"", torch.empty(0))


# ---- sign and q2


def test_planes_by_hand() -> None:
    """Bit i of byte j is value 8 j + i's; 512 values, of which a quarter is long."""
    values = torch.tensor([-1.0, 1.0, 10.0, -10.0] + [-3.0, 3.0, 3.0, 3.0] * 3).repeat(32)
    sign, two = (get_codec(name).encode(values) for name in PLANES)
    mean = float(values.abs().mean())
    assert sign[:4].tolist() == [0b00011001, 0b00010001] * 2
    assert scale_of(get_codec("sign"), sign) == mean == 3.625
    assert two[:64].tolist() == sign[:64].tolist()
    assert two[64:68].tolist() == [0b00001100, 0] * 2
    best = (20 * 10 + (2 + 36) * 3) / (2 * 100 + 14 * 9)
    assert scale_of(get_codec("q2"), two) == pytest.approx(best, rel=2.0**-8)
    assert (len(sign), len(two)) == (68, 132)


@pytest.mark.parametrize("name", PLANES)
@pytest.mark.parametrize("longs", [0, 1, 300, 358, 359, 380, 408, 511, 512])
def test_planes_settle_at_once_however_many_values_are_long(name: str, longs: int) -> None:
    codec = get_codec(name)
    values = gaussians(512).sign() * torch.cat([torch.ones(longs), torch.full((512 - longs,), 1e-3)])
    payload = codec.encode(values)
    assert torch.equal(codec.encode(codec.decode(payload)), payload)


@pytest.mark.parametrize("name", PLANES)
def test_padding_without_a_zero_is_like_the_values(name: str) -> None:
    """Zeros would shorten the last block, and lengthen it in a mean."""
    codec, values = get_codec(name), gaussians(300)
    decoded = codec.decode(codec.encode(values))
    assert torch.equal(decoded[300:], decoded[:212])
    whole = codec.decode(codec.encode(torch.cat([values, values[:212]])))
    assert torch.equal(whole, decoded)


@pytest.mark.parametrize("name", PLANES)
def test_blocks_of_nearly_nothing_are_zero(name: str) -> None:
    values = torch.cat([torch.full((512,), one) for one in (SMALLEST / 11, 1e-45, 0.0, SMALLEST * 11)])
    decoded = get_codec(name).decode(get_codec(name).encode(values))
    assert not decoded[:1536].any()
    assert torch.allclose(decoded[1536:], values[1536:], rtol=2.0**-8, atol=0.0)


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
    """Rows with every scale that is admitted and random codes, all 16 of them: uint8 [28672, 68]."""
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
