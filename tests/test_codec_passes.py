"""What is done in one pass has the bits of torch's operations: peers with and without a compiler agree."""

from __future__ import annotations

import math
import shlex
import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

import pytest
import torch
from torch import Tensor

from p2p_co2.config import OuterConfig
from p2p_co2.errors import RemoteProtocolError
from p2p_co2.tensors import outer
from p2p_co2.tensors.aggregation import get_rule, reduce_slices
from p2p_co2.tensors.codec import Codec, get_codec, passes
from p2p_co2.tensors.codec.passes import Passes
from tests.test_codec import int4_rows_of_every_scale

WIDTH = 128
MAGNITUDES = (0.0, 1.0, 1e-2, 3e-5, 1e-7, 2.0**-112, 2.0**-140, 65504.0, 65519.9, 65520.0, 1e30, 3.4e38)
SIZES = (0, 1, 127, 128, 129, 7 * WIDTH, 2049 * WIDTH + 5)
STREAMED = (32768 + 3) * WIDTH
"""What does not fit the cache is written past it."""
T = TypeVar("T")


class BothWays(Protocol):
    def __call__(self, function: Callable[[], T]) -> tuple[T, T]:
        """(what ``function`` gives with the passes, what it gives without)."""


def builds_here() -> bool:
    """Whether this Python's C compiler is here and compiles the kernel."""
    compiler = shlex.split(sysconfig.get_config_var("CC") or "cc")
    source = Path(passes.__file__).with_name("passes.c")
    command = [*compiler, "-std=c11", "-fsyntax-only", str(source)]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


@pytest.fixture(autouse=True)
def kernel() -> Passes:
    if passes.kernel is None and not builds_here():
        pytest.skip("no C compiler here, so the installation has no passes")
    assert passes.kernel is not None, "there is a C compiler, but the installation did not build the passes"
    return passes.kernel


@pytest.fixture(params=["fp16", "int8", "int4", "e3m0", "sign", "q2"])
def codec(request: pytest.FixtureRequest) -> Codec:
    return get_codec(request.param)


@pytest.fixture
def both_ways(monkeypatch: pytest.MonkeyPatch) -> BothWays:
    def run(function: Callable[[], T]) -> tuple[T, T]:
        with_passes = function()
        with monkeypatch.context() as without:
            without.setattr(passes, "kernel", None)
            return with_passes, function()

    return run


def values_of_all_sizes(size: int, seed: int = 0, width: int = WIDTH) -> Tensor:
    """fp32 [size]: each block of this ``width`` has a largest magnitude of its own, and some values half-way
    between codes."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.rand(size, generator=generator) * 2 - 1
    scales = torch.tensor([MAGNITUDES[block % len(MAGNITUDES)] for block in range(size // width + 1)])
    values[::width] = 1.0
    values[1::width] = 0.5 / 127
    values[2::width] = -0.0
    return values * scales.repeat_interleave(width)[:size]


def bits(values: Tensor) -> Tensor:
    return values.view(torch.int32)


@pytest.mark.parametrize("size", [*SIZES, STREAMED])
def test_encoding_and_decoding(codec: Codec, size: int, both_ways: BothWays) -> None:
    for width in {WIDTH, codec.block_values}:
        values = values_of_all_sizes(size, width=width)
        payload, expected = both_ways(lambda values=values: codec.encode(values))
        assert torch.equal(payload, expected)
        decoded, expected = both_ways(lambda payload=payload: codec.decode(payload))
        assert torch.equal(bits(decoded), bits(expected))


def test_decoding_of_every_code(codec: Codec, both_ways: BothWays) -> None:
    rows = (
        torch.arange(256, dtype=torch.uint8)
        .repeat(600)[: 512 * codec.block_bytes]
        .view(-1, codec.block_bytes)
    )
    if codec.name in {"int8", "e3m0", "sign", "q2"}:
        limit = torch.tensor(codec.scale_limit_bits, dtype=torch.int32).view(1, 1)
        scales = torch.tensor([0.0, 1e-44, 2.0**-110, 0.1, 1.0]).view(torch.int32).view(-1, 1)
        rows[:, -4:] = torch.cat([scales, limit]).repeat(86, 1)[:512].view(torch.uint8)
    if codec.name == "int4":
        rows = int4_rows_of_every_scale()
    decoded, expected = both_ways(lambda: codec.decode(rows.reshape(-1)))
    unclear = expected.isnan()  # not a number is not a number, whatever its bits
    assert torch.equal(unclear, decoded.isnan())
    assert torch.equal(bits(decoded)[~unclear], bits(expected)[~unclear])


@pytest.mark.parametrize("size", SIZES)
def test_a_difference_is_encoded(codec: Codec, size: int, both_ways: BothWays) -> None:
    base, live = values_of_all_sizes(size), values_of_all_sizes(size, seed=1) * 1e-5
    residual, decay = values_of_all_sizes(size, seed=2) * 1e-5, 0.95

    def encoded() -> list[Tensor]:
        rows = [torch.empty(codec.payload_bytes(size), dtype=torch.uint8) for _ in range(2)]
        wanted, more, lost = (torch.empty(size) for _ in range(3))
        codec.encode(live, rows[0], base=base, wanted=wanted)
        assert torch.equal(bits(wanted), bits(base - live))
        codec.encode(live, rows[1], base=base, residual=residual, decay=decay, wanted=more, lost=lost)
        assert torch.equal(bits(more), bits((base - live) + residual * decay))
        assert torch.equal(bits(lost), bits(more - codec.decode(rows[1])[:size]))
        return rows

    for plain, with_residual in both_ways(encoded):
        assert torch.equal(plain, codec.encode(base - live))
        assert torch.equal(with_residual, codec.encode((base - live) + residual * decay))


@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_mean_of_slices(codec: Codec, count: int, both_ways: BothWays) -> None:
    slices = [
        codec.encode(values_of_all_sizes(2100 * WIDTH, seed)).numpy().tobytes() for seed in range(count)
    ]
    parts = [(f"peer {seed}", 1.0 + seed / 3, payload) for seed, payload in enumerate(slices)]
    mean, expected = both_ways(lambda: reduce_slices(get_rule("mean"), codec, parts).encoded)
    assert mean == expected


def is_admitted(codec: Codec, payload: bytes, values: Tensor) -> bool:
    try:
        codec.admit(payload, values)
    except RemoteProtocolError:
        return False
    return True


@pytest.mark.parametrize("size", SIZES)
def test_what_a_peer_sent_is_decoded_if_it_is_sound(codec: Codec, size: int, both_ways: BothWays) -> None:
    payload = codec.encode(values_of_all_sizes(size))
    sent, expected = payload.numpy().tobytes(), codec.decode(payload)[:size]

    def taken() -> bool:
        values = torch.full((size,), 7.0)
        assert is_admitted(codec, sent, values)
        assert torch.equal(bits(values), bits(expected))
        assert not is_admitted(codec, sent + bytes(codec.block_bytes), values)
        return bool(size) and is_admitted(codec, sent[:-4] + b"\xff\xff\xff\xff", values)

    assert both_ways(taken) == (False, False)


@pytest.mark.parametrize("factor", [1.0, 1 - 2.0**-12, 1 + 2.0**-12, 0.93, 1.07, 8.0])
def test_int4_with_every_scale(factor: float, both_ways: BothWays) -> None:
    """Where scales are rounded to powers of two, to subnormals of fp16, and where they are the largest."""
    codec, rows = get_codec("int4"), int4_rows_of_every_scale()
    values = codec.decode(rows.view(-1)).view(-1, WIDTH)
    values[:, 0] = values.abs().amax(dim=1) * factor
    values[0, 0] = factor * 2.0**-25
    payload, expected = both_ways(lambda: codec.encode(values.view(-1)))
    assert torch.equal(payload, expected)


@pytest.mark.parametrize("name", ["int4", "int8", "e3m0", "sign", "q2"])
def test_what_is_admitted_is_the_same_without_passes(name: str, both_ways: BothWays) -> None:
    codec = get_codec(name)
    generator = torch.Generator().manual_seed(0)
    fields = torch.randint(256, (4000, 4), dtype=torch.uint8, generator=generator)
    if name == "int4":  # by chance hardly one is sound
        fields[::2] = int4_rows_of_every_scale()[:: 28672 // 2000][:2000, -4:]
        fields[2::6, 3] ^= 0x80
        odd = [(-1.0, 8.0), (8192.0, -math.inf), (math.inf, -math.inf), (math.nan, math.nan), (-0.0, 0.0)]
        fields[1 : 2 * len(odd) : 2] = torch.tensor(odd).half().view(torch.uint8)
    sound = 0
    for field in fields:
        codes = torch.randint(256, (codec.block_bytes - 4,), dtype=torch.uint8, generator=generator)
        row = torch.cat([codes, field]).numpy().tobytes()

        def taken(row: bytes = row) -> tuple[bool, Tensor]:
            values = torch.empty(codec.block_values)
            return is_admitted(codec, row, values), values

        (is_sound, values), (expected, others) = both_ways(taken)
        assert is_sound == expected, field
        if is_sound:  # a scale of 0 with codes below it among them
            assert torch.equal(bits(values), bits(others))
        sound += is_sound
    assert 500 < sound < 3500


OUTERS = [
    OuterConfig(),
    OuterConfig(momentum=0.9, nesterov=False, clip="none"),
    OuterConfig(clip="elementwise", clip_phi=0.004),
    OuterConfig(clip="rms", clip_phi=0.5, nesterov=False),
    OuterConfig(clip="elementwise", clip_phi=1e-50),  # no bound that fp32 can tell from zero
]


@pytest.mark.parametrize("config", OUTERS)
@pytest.mark.parametrize("size", [7, 3 * 65536 + 11])
@pytest.mark.parametrize("factor", [1.0, 1e-30, 1e-38, 1e30])
def test_outer_steps(config: OuterConfig, size: int, factor: float, both_ways: BothWays) -> None:
    def two_steps() -> list[tuple[outer.AgreedState, outer.StepReport]]:
        state = outer.init(torch.randn(size, generator=torch.Generator().manual_seed(1)))
        steps = []
        for seed in (2, 3):
            mean = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 1e-2 * factor
            state, report = outer.step(config, state, mean, 0)
            steps.append((state, report))
        return steps

    for (state, report), (expected, other) in zip(*both_ways(two_steps), strict=True):
        assert torch.equal(bits(state.params), bits(expected.params))
        assert torch.equal(bits(state.momentum), bits(expected.momentum))
        assert (state.version, *state[3:]) == (expected.version, *expected[3:])
        assert report.gap == other.gap
        if factor == 1.0:  # elsewhere its squares are beyond fp32, in which torch sums
            assert report.momentum_norm == pytest.approx(other.momentum_norm, rel=1e-4)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_mean_that_is_not_finite_is_refused_alike(bad: float, both_ways: BothWays) -> None:
    state = outer.init(torch.ones(1000))
    mean = torch.ones(1000)
    mean[999] = bad

    def refused() -> str:
        with pytest.raises(RemoteProtocolError) as caught:
            outer.step(OuterConfig(clip="elementwise", clip_phi=1.0), state, mean, 0)
        return str(caught.value)

    first, second = both_ways(refused)
    assert first == second
    assert outer.magnitude(mean) == math.inf
