"""The mean of parts: by hand, against fp64, its laws (order, shares, chunks), and slices that must be
refused."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from p2p_co2 import memory
from p2p_co2.averaging import admit, mean_of_parts
from p2p_co2.codec import get_codec
from p2p_co2.codec.base import CHUNK_BLOCKS
from p2p_co2.config import CodecName
from p2p_co2.errors import LocalProtocolError, RemoteProtocolError

NAMES: tuple[CodecName, ...] = get_args(CodecName)
LARGEST = torch.finfo(torch.float32).max
Part = tuple[str, float, bytes | bytearray | memoryview]


def gaussians(numel: int, seed: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def encoded(name: CodecName, values: Tensor) -> bytes:
    return bytes(get_codec(name).encode(values).tolist())


def decoded(name: CodecName, payload: bytes | bytearray | memoryview) -> Tensor:
    codec = get_codec(name)
    return codec.decode(admit(codec, payload, len(payload) // codec.block_bytes))


def some_parts(name: CodecName, count: int, blocks: int) -> list[Part]:
    return [
        (f"peer-{index}", 100.0 + 37 * index, encoded(name, gaussians(blocks * 128, index)))
        for index in range(count)
    ]


# ---- by hand


def test_mean_by_hand() -> None:
    parts: list[Part] = [
        ("a", 1.0, encoded("fp32", torch.full((128,), 4.0))),
        ("b", 3.0, encoded("fp32", torch.full((128,), 8.0))),
    ]
    assert decoded("fp32", mean_of_parts(get_codec("fp32"), parts)).tolist() == [7.0] * 128


def test_divisor_is_what_arrived() -> None:
    # The third peer's part did not arrive: the mean is that of the other two.
    parts = some_parts("fp32", 3, 1)
    expected = (100.0 * decoded("fp32", parts[0][2]) + 137.0 * decoded("fp32", parts[1][2])) / 237.0
    got = decoded("fp32", mean_of_parts(get_codec("fp32"), parts[:2]))
    torch.testing.assert_close(got, expected)


def test_no_blocks_are_no_bytes() -> None:
    codec = get_codec("int4")
    assert mean_of_parts(codec, [("a", 1.0, b""), ("b", 1.0, b"")]) == b""
    assert admit(codec, b"", 0).numel() == 0


# ---- against a reference


@pytest.mark.parametrize("name", NAMES)
def test_mean_is_the_encoded_fp64_mean(name: CodecName) -> None:
    parts = some_parts(name, 5, 40)
    total = sum(weight for _, weight, _ in parts)
    expected = torch.zeros(40 * 128, dtype=torch.float64)
    for _, weight, payload in parts:
        expected += decoded(name, payload).double() * weight / total
    got = decoded(name, mean_of_parts(get_codec(name), parts))
    # The same up to one step of the codec, where rounding to fp32 tips a value over a midpoint.
    want = get_codec(name).decode(get_codec(name).encode(expected.float()))
    differs = (got - want).abs() > 1e-6 * want.abs().amax()
    assert differs.float().mean().item() < 1e-3
    assert (got - want).abs().amax() <= expected.abs().amax() * 0.5


# ---- laws


@pytest.mark.parametrize("name", NAMES)
def test_order_of_arrival_does_not_matter(name: CodecName) -> None:
    codec, parts = get_codec(name), some_parts(name, 7, 9)
    expected = mean_of_parts(codec, parts)
    shuffler = random.Random(0)
    for _ in range(5):
        shuffler.shuffle(parts)
        assert mean_of_parts(codec, parts) == expected


@settings(max_examples=40, deadline=None)
@given(
    weights=st.lists(st.floats(1e-30, 1e30), min_size=1, max_size=6),
    order=st.randoms(use_true_random=False),
    size=st.sampled_from([1e-30, 1.0, 1e30, LARGEST]),
)
def test_mean_lies_between_its_parts(weights: list[float], order: random.Random, size: float) -> None:
    codec = get_codec("fp32")
    values = [gaussians(128, index).clamp_(-1.0, 1.0) * size for index in range(len(weights))]
    parts: list[Part] = [
        (f"p{index}", weight, encoded("fp32", values[index])) for index, weight in enumerate(weights)
    ]
    expected = mean_of_parts(codec, parts)
    order.shuffle(parts)
    assert mean_of_parts(codec, parts) == expected
    mean, stacked, slack = decoded("fp32", expected), torch.stack(values), 1e-6 * size
    assert bool(torch.isfinite(mean).all())
    assert bool((mean.double() >= stacked.amin(0).double() - slack).all())
    assert bool((mean.double() <= stacked.amax(0).double() + slack).all())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("weight", [1e-300, 1.0, 12345.678, 1e300])
def test_a_single_contributor_is_its_own_mean(name: CodecName, weight: float) -> None:
    codec, payload = get_codec(name), encoded(name, gaussians(5 * 128, 1))
    assert mean_of_parts(codec, [("a", weight, payload)]) == encoded(name, decoded(name, payload))


@pytest.mark.parametrize("name", NAMES)
def test_the_parts_are_the_whole(name: CodecName) -> None:
    # However the blocks are shared out among owners, the bytes are those of one owner.
    codec, blocks = get_codec(name), CHUNK_BLOCKS + 5
    tensors = [codec.encode(gaussians(blocks * 128, seed)) for seed in range(2)]
    payloads = [bytearray(tensor.numpy().tobytes()) for tensor in tensors]
    weights = [2.0, 3.0]

    def mean(start: int, stop: int) -> bytes:
        edges = slice(start * codec.block_bytes, stop * codec.block_bytes)
        slices = [(str(index), weights[index], memoryview(payloads[index])[edges]) for index in range(2)]
        return bytes(mean_of_parts(codec, slices))

    assert mean(0, 3) + mean(3, CHUNK_BLOCKS) + mean(CHUNK_BLOCKS, blocks) == mean(0, blocks)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, lambda data: memoryview(bytearray(data))])
def test_any_buffer_serves(kind: Callable[[bytes], bytes | bytearray | memoryview]) -> None:
    codec, payload = get_codec("e3m0"), encoded("e3m0", gaussians(256, 0))
    assert bytes(admit(codec, kind(payload), 2).tolist()) == payload
    assert mean_of_parts(codec, [("a", 1.0, kind(payload))]) == payload


def test_largest_values_do_not_overflow() -> None:
    payload = encoded("fp32", torch.full((128,), LARGEST))
    parts: list[Part] = [(str(index), 1.0, payload) for index in range(3)]
    assert torch.isfinite(decoded("fp32", mean_of_parts(get_codec("fp32"), parts))).all()


# ---- faults


@pytest.mark.parametrize("name", NAMES)
def test_wrong_sizes_are_refused(name: CodecName) -> None:
    codec, payload = get_codec(name), encoded(name, gaussians(256, 0))
    for bad, blocks in ((payload, 1), (payload, 3), (payload[:-1], 2), (b"", 2), (payload + b"\0", 2)):
        with pytest.raises(RemoteProtocolError) as refusal:
            admit(codec, bad, blocks)
        assert refusal.value.reason == "wrong size"


@pytest.mark.parametrize("name", NAMES)
def test_values_that_are_not_finite_are_refused(name: CodecName) -> None:
    codec, payload = get_codec(name), bytearray(encoded(name, gaussians(256, 0)))
    bad = struct.pack("<f", math.nan)[2:] * 2  # a NaN as one fp32, fp16 or bf16
    payload[-4:] = bad  # a scale, or the last values
    for buffer in (payload, bytes(payload)):
        with pytest.raises(RemoteProtocolError) as refusal:
            admit(codec, buffer, 2)
        assert refusal.value.reason == "not finite"


@pytest.mark.parametrize("weight", [0.0, -1.0, math.nan, math.inf, 1.7e308])
def test_impossible_weights_are_a_bug_here(weight: float) -> None:
    payload = encoded("int4", gaussians(128, 0))
    with pytest.raises(LocalProtocolError, match="weight"):
        mean_of_parts(get_codec("int4"), [("a", 1e308, payload), ("b", weight, payload)])


def test_impossible_parts_are_a_bug_here() -> None:
    codec, payload = get_codec("int4"), encoded("int4", gaussians(128, 0))
    impossible: list[list[Part]] = [
        [],
        [("a", 1.0, payload), ("a", 1.0, payload)],
        [("a", 1.0, payload), ("b", 1.0, payload * 2)],
        [("a", 1.0, payload[:-1])],
    ]
    for parts in impossible:
        with pytest.raises(LocalProtocolError):
            mean_of_parts(codec, parts)


def test_a_large_mean_is_in_pages_that_are_used_again() -> None:
    codec, payload = get_codec("fp32"), bytes(2 * memory.HUGE_PAGE_BYTES)
    before_bytes = memory._pool.held_bytes
    for _ in range(6):
        mean = mean_of_parts(codec, [("a", 1.0, payload), ("b", 1.0, payload)])
        assert len(mean) == len(payload)
        assert not any(mean[:: 64 << 10])
        assert memory._pool.held_bytes <= before_bytes + 2 * len(payload)
    assert memory._pool._used_bytes >= len(payload)
