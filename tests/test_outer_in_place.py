"""The outer step in the old state's memory: against ``outer.step``, then what it refuses to do."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from p2p_co2.config import CodecName, OuterConfig
from p2p_co2.tensors import outer
from p2p_co2.tensors.codec import get_codec, passes
from p2p_co2.tensors.outer import OuterState, stepping_in_place
from p2p_co2.trainer.offered import FromMean

WIDTH = 1000
SIZE = 3 * WIDTH + 77


def config_of(**settings: Any) -> OuterConfig:
    return OuterConfig.model_validate({"rule": "co2", "momentum": 0.7, "gap_penalty": True, **settings})


def copy_of(state: OuterState) -> OuterState:
    return state._replace(params=state.params.clone(), momentum=state.momentum.clone())


def same(one: OuterState, other: OuterState) -> bool:
    """Bit for bit: also the sign of zeros."""
    tensors = zip((one.params, one.momentum), (other.params, other.momentum), strict=True)
    bits = all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in tensors)
    return bits and one._replace(params=None, momentum=None) == other._replace(params=None, momentum=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("clip", ["none", "elementwise", "rms"])
@pytest.mark.parametrize("has_kernel", [True, False])
def test_in_place_gives_the_same_bits(
    nesterov: bool, clip: str, has_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_kernel:
        monkeypatch.setattr(passes, "kernel", None)
    monkeypatch.setattr(stepping_in_place, "_WIDTH", WIDTH)
    torch.manual_seed(1)
    config = config_of(nesterov=nesterov, clip=clip, clip_phi=0.9)
    state = outer.init(torch.randn(SIZE))
    mine = copy_of(state)
    for version in range(4):
        mean = torch.zeros(SIZE) if version == 2 else torch.randn(SIZE) * 10.0 ** (-20 * (version == 3))
        mean[: SIZE // 2].neg_()  # zeros of both signs
        base = max(0, version - 1)
        state, report = outer.step(config, state, mean.clone(), base)
        before = mine
        done = outer.step_in_place(config, mine, lambda at: mean[at].clone(), outer.magnitude(mean), base)  # noqa: B023
        assert done is not None
        mine, mine_report = done
        assert same(mine, state)
        assert mine.params is before.params
        assert mine.momentum is before.momentum
        assert mine_report[:2] == report[:2]
        assert mine_report.momentum_norm == pytest.approx(report.momentum_norm)
        assert mine_report.clipped_share == report.clipped_share
    assert (state.version, len(state.moved_norms)) == (4, 4)


@pytest.mark.parametrize("values", [[1e38, 1.0], [math.inf, 0.0], [math.nan, 0.0]])
def test_what_might_fail_changes_nothing(values: list[float]) -> None:
    state = outer.init(torch.tensor([1.0, 2.0]))
    before, mean = copy_of(state), torch.tensor(values)
    largest = outer.magnitude(mean)
    assert outer.step_in_place(config_of(), state, lambda at: mean[at].clone(), largest, 0) is None
    assert same(state, before)


@pytest.mark.parametrize("codec", ["fp32", "fp16", "bf16", "int8", "int4", "e3m0"])
@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_a_mean_is_read_as_it_travelled(codec: CodecName, kind: type[bytes] | type[bytearray]) -> None:
    torch.manual_seed(2)
    coder, size = get_codec(codec), (1 << 18) + 300
    payload = coder.encode(torch.randn(size))
    mean = FromMean(coder, kind(payload.numpy().tobytes()), size)
    whole = coder.decode(payload)[:size]
    assert mean.largest() == outer.magnitude(whole)
    for start, stop in ((0, size), (0, 0), (size - 1, size), (127, 1000)):
        assert torch.equal(mean[start:stop], whole[start:stop])
    mean[0:9].zero_()  # a new tensor
    assert torch.equal(mean[0:9], whole[0:9])


@pytest.mark.parametrize("codec", ["fp32", "fp16", "int8", "int4"])
def test_bytes_that_no_honest_owner_sends_have_no_largest(codec: CodecName) -> None:
    """Also where a decode would give finite values (a scale below zero): every peer must refuse alike."""
    coder, size = get_codec(codec), 2 * (1 << 18) + 5
    payload = coder.encode(torch.randn(size)).numpy().tobytes()
    hostile = bytearray(payload)
    hostile[-2:] = b"\xff\xff"  # NaN; of a scale, the end
    assert FromMean(coder, hostile, size).largest() == math.inf
    if codec.startswith("int"):
        below = bytearray(payload)
        below[-1] ^= 0x80
        assert FromMean(coder, below, size).largest() == math.inf
    for wrong in (payload[: -coder.block_bytes], payload + bytes(coder.block_bytes), b""):
        assert FromMean(coder, wrong, size).largest() == math.inf
