"""The outer optimizer: three numbers by hand, torch.optim.SGD as reference, its laws, faults."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from p2p_co2.config import OuterConfig
from p2p_co2.errors import RemoteProtocolError
from p2p_co2.tensors import outer
from p2p_co2.tensors.checkpoint.agreed import state_bytes
from p2p_co2.tensors.codec import get_codec, passes
from p2p_co2.tensors.outer_rules import OwnWork, Read, get_rule
from p2p_co2.trainer.ledger.kept import Encoded

PLAIN = OuterConfig(rule="keep", lr=1.0, momentum=0.0, nesterov=False, gap_penalty=False, clip="none")


def plain(**changes: Any) -> OuterConfig:
    return PLAIN.model_copy(update=changes)


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def values(tensor: Tensor) -> list[float]:
    return [float(value) for value in tensor]


def norm(flat: Tensor) -> float:
    return outer.norm_of_pieces(outer.magnitude(flat), (flat,))


def offered(state: outer.AgreedState, snapshot: Tensor) -> Read:
    """What a peer offered at ``snapshot``."""
    return lambda at: (state.params - snapshot)[at]


def merged(config: OuterConfig, old: outer.AgreedState, new: outer.AgreedState, work: OwnWork) -> outer.Merge:
    merge = get_rule(config).merge(old, new, work)
    assert merge is not None
    return merge


# ---- by hand


def test_heavy_ball_by_hand() -> None:
    config = plain(lr=0.5, momentum=0.5)
    first, report = outer.step(config, outer.init(numbers(1, 2, 3)), numbers(1, 0, -2), 0)
    assert values(first.params) == [0.5, 2, 4]
    assert values(first.momentum) == [1, 0, -2]
    assert report.gap == 1.0
    second, _ = outer.step(config, first, numbers(1, 1, 0), 1)
    assert values(second.momentum) == [1.5, 1, -1]
    assert values(second.params) == [-0.25, 1.5, 4.5]
    assert second.version == 2
    assert second.moved_norms == pytest.approx((math.sqrt(1.25), math.sqrt(0.75**2 + 0.25 + 0.25)))


def test_gap_is_one_plus_the_distance_moved_over_the_gradient() -> None:
    config = plain(gap_penalty=True)
    first, _ = outer.step(config, outer.init(numbers(0, 0, 0)), numbers(3, 0, 4), 0)
    second, report = outer.step(config, first, numbers(0, 5, 0), 0)
    assert report.gap == pytest.approx(2.0)
    assert values(second.params) == pytest.approx([-3, -2.5, -4])
    assert values(second.momentum) == pytest.approx([0, 2.5, 0])
    _, fresh = outer.step(config, first, numbers(0, 5, 0), 1)
    assert fresh.gap == 1.0
    _, without = outer.step(plain(), first, numbers(0, 5, 0), 0)
    assert without.gap == 1.0


def test_the_elementwise_clip_is_what_is_stored_and_what_is_applied() -> None:
    config = plain(clip="elementwise", clip_phi=1.5, momentum=0.5)
    state, report = outer.step(config, outer.init(numbers(0, 0, 0)), numbers(1, -4, 2), 0)
    assert values(state.momentum) == [1, -1.5, 1.5]
    assert values(state.params) == [-1, 1.5, -1.5]
    assert report.momentum_norm == pytest.approx(math.sqrt(1 + 2 * 1.5**2))
    # Had the unclipped momentum been stored, the second value would be -2 here.
    state, _ = outer.step(config, state, numbers(0, 0, 0), 1)
    assert values(state.momentum) == [0.5, -0.75, 0.75]


def test_the_rms_clip_follows_the_running_mean_square() -> None:
    config = plain(clip="rms", clip_phi=1.0)
    state, _ = outer.step(config, outer.init(numbers(0, 0)), numbers(1, 7), 0)
    assert state.mean_square == pytest.approx(25)
    assert values(state.momentum) == pytest.approx([1, 5])
    state, _ = outer.step(config, state, numbers(10, 0), 1)
    assert state.mean_square == pytest.approx(0.9 * 25 + 0.1 * 50)
    assert values(state.momentum) == pytest.approx([math.sqrt(27.5), 0])


def test_keep_lets_the_drift_since_the_snapshot_survive() -> None:
    old = outer.init(numbers(1, 1, 1))
    snapshot = numbers(2, 3, 4)
    new, _ = outer.step(PLAIN, old, numbers(-5, -5, -5), 0)
    merge = merged(PLAIN, old, new, OwnWork(offered(old, snapshot), [slice(1, 2)]))
    live = merge.keep * (snapshot + 0.5) + merge.addend
    # Counted: new + drift since the snapshot. Missed: new + all drift since the old agreed parameters.
    assert values(live) == [6.5, 6 + 2.5, 6.5]
    assert values(merged(PLAIN, old, new, OwnWork()).addend) == [5, 5, 5]


def test_blend_and_its_fall_back_when_work_was_missed() -> None:
    config = plain(rule="blend", blend_alpha=0.25)
    old = outer.init(numbers(0, 0))
    new, _ = outer.step(config, old, numbers(-4, 8), 0)
    merge = merged(config, old, new, OwnWork(offered(old, numbers(1, 1))))
    assert merge.keep == 0.25
    assert values(merge.addend) == [3, -6]
    missed = merged(config, old, new, OwnWork(offered(old, numbers(1, 1)), [slice(0, 1)]))
    assert missed.keep == 1.0
    assert values(missed.addend) == [4, -9]


def test_work_that_left_the_live_parameters_is_put_back_or_taken_out_again_once() -> None:
    config, state = plain(rule="co2"), outer.init(numbers(0, 0))
    first, later = offered(state, numbers(1, 1)), offered(state, numbers(3, 3))

    def put_back(*work: Any) -> list[float] | None:
        merge = get_rule(config).merge(state, state, OwnWork(*work))
        return None if merge is None else values(merge.addend)

    assert put_back() is put_back(first) is None
    assert put_back(first, [slice(1, 2)]) == [0, 1]
    assert put_back(first, [], True) == [-1, -1]
    assert put_back(first, [slice(1, 2)], True, later) == [-1 + 3, 3]


def test_stability_warning_speaks_only_of_settings_that_diverge() -> None:
    wild = plain(rule="co2", lr=0.7, momentum=0.9)
    text = outer.stability_warning(wild)
    assert text is not None
    assert "outer.gap_penalty = true" in text
    for calm in (
        wild.model_copy(update={"gap_penalty": True}),
        wild.model_copy(update={"momentum": 0.5}),
        wild.model_copy(update={"rule": "keep"}),
    ):
        assert outer.stability_warning(calm) is None


# ---- against a reference


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9])
def test_steps_equal_torch_sgd(nesterov: bool, beta: float) -> None:
    """Law 4: without delay the outer step is DiLoCo's."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.nn.Parameter(torch.randn(1000, generator=generator))
    reference = torch.optim.SGD([weight], lr=0.7, momentum=beta, nesterov=nesterov and beta > 0)
    config = plain(lr=0.7, momentum=beta, nesterov=nesterov)
    state = outer.init(weight)
    for version in range(5):
        weight.grad = torch.randn(1000, generator=generator)
        state, _ = outer.step(config, state, weight.grad.clone(), version)
        reference.step()
        torch.testing.assert_close(state.params, weight.detach(), rtol=1e-6, atol=1e-6)


def test_exact_norm_at_its_edges() -> None:
    assert norm(torch.zeros(0)) == 0.0
    assert norm(torch.zeros(5)) == 0.0
    assert norm(numbers(3, -4)) == 5.0
    assert norm(numbers(-(2.0**-149))) == 2.0**-149
    assert norm(numbers(1, math.inf)) == math.inf
    assert norm(numbers(1, math.nan)) == math.inf
    # The worst case for the integer sum: every value at the top of the scale.
    assert norm(torch.full((1 << 19,), 1 - 2.0**-24)) == pytest.approx(math.sqrt(1 << 19))


@pytest.mark.parametrize("nesterov", [False, True])
def test_the_eager_correction_is_the_step_with_its_own_fresh_share(nesterov: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    mean, fresh, stale, momentum, params = torch.randn(5, 64, generator=generator).unbind()
    config = plain(rule="eager", lr=0.7, momentum=0.6, nesterov=nesterov)
    state = outer.AgreedState(1, params, momentum, 1.0, (0.1,))
    agreed, report = outer.step(config, state, mean, 0)
    own, _ = outer.step(config, state, mean + 0.25 * (fresh - stale), 0)
    correction = get_rule(config).correction(report.gap, 0.25, fresh, stale)
    assert correction is not None
    torch.testing.assert_close(agreed.params - correction, own.params, rtol=1e-5, atol=1e-6)


# ---- laws


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1), st.randoms())
def test_exact_norm_has_no_order(items: list[float], random: Any) -> None:
    shuffled = list(items)
    random.shuffle(shuffled)
    found = norm(numbers(*items))
    assert found == norm(numbers(*shuffled))
    assert found == pytest.approx(float(numbers(*items).double().norm()), rel=1e-5)


def test_agreed_state_has_the_same_bits_whatever_the_number_of_threads() -> None:
    """Law 1, with everything on: gap, Nesterov, clipping."""
    config = OuterConfig(rule="co2", clip="rms", clip_phi=0.5)
    threads = torch.get_num_threads()
    ends = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        generator = torch.Generator().manual_seed(9)
        state = outer.init(torch.randn(100_003, generator=generator))
        for version in range(4):
            mean = torch.randn(100_003, generator=generator)
            state, _ = outer.step(config, state, mean, max(0, version - 1))
        ends.append(state)
    torch.set_num_threads(threads)
    for end in ends[1:]:
        assert torch.equal(end.params, ends[0].params)
        assert torch.equal(end.momentum, ends[0].momentum)
        assert (end.mean_square, end.moved_norms) == (ends[0].mean_square, ends[0].moved_norms)


# ---- in the old state's memory, of a mean as it travelled


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("clip", ["none", "rms"])
@pytest.mark.parametrize("has_kernel", [True, False])
@pytest.mark.parametrize("reuse", ["momentum", "all"])
def test_reused_memory_and_pieces_give_the_same_bits(
    nesterov: bool, clip: str, has_kernel: bool, reuse: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_kernel:
        monkeypatch.setattr(passes, "kernel", None)
    torch.manual_seed(1)
    config = plain(rule="co2", momentum=0.7, gap_penalty=True, nesterov=nesterov, clip=clip, clip_phi=0.9)
    coder, size = get_codec("fp16"), (1 << 17) + 77
    state, mine = outer.init(torch.randn(size)), outer.init(torch.zeros(size))
    mine.params.copy_(state.params)
    for version in range(4):
        payload = coder.encode(torch.zeros(size) if version == 2 else torch.randn(size))
        mean, base = Encoded(coder, payload.numpy().data, size), max(0, version - 1)
        state, report = outer.step(config, state, coder.decode(payload)[:size], base)
        before = mine
        mine, same = outer.step(config, mine, mean, base, largest=mean.largest(), reuse=reuse)
        assert state_bytes(mine) == state_bytes(state)
        assert same == report
        assert mine.momentum is before.momentum
        assert (mine.params is before.params) is (reuse == "all")


@pytest.mark.parametrize("bad", [[1e38, 3e38], [math.inf, 0.0], [math.nan, 0.0]])
def test_what_might_fail_takes_no_memory(bad: list[float]) -> None:
    state = outer.AgreedState(1, numbers(-3e38, 2), numbers(3e38, 3e38), 1.0, (1.0,))
    before = state_bytes(state)
    with pytest.raises(RemoteProtocolError, match="too large"):
        outer.step(plain(momentum=0.9, lr=1.0), state, numbers(*bad), 1, reuse="all")
    assert state_bytes(state) == before


@pytest.mark.parametrize("codec", ["fp32", "fp16", "bf16", "int8", "int4", "e3m0"])
@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_a_mean_is_read_as_it_travelled(codec: str, kind: type[bytes] | type[bytearray]) -> None:
    torch.manual_seed(2)
    coder, size = get_codec(codec), (1 << 18) + 300
    payload = coder.encode(torch.randn(size))
    mean = Encoded(coder, kind(payload.numpy().tobytes()), size)
    whole = coder.decode(payload)[:size]
    assert mean.largest() == outer.magnitude(whole)
    for start, stop in ((0, size), (0, 0), (size - 1, size), (127, 1000)):
        assert torch.equal(mean[start:stop], whole[start:stop])
    mean[0:9].zero_()  # a new tensor
    assert torch.equal(mean[0:9], whole[0:9])


@pytest.mark.parametrize("codec", ["fp32", "fp16", "int8", "int4"])
def test_bytes_that_no_honest_owner_sends_have_no_largest(codec: str) -> None:
    """Also where a decode would give finite values (a scale below zero): every peer must refuse alike."""
    coder, size = get_codec(codec), 2 * (1 << 18) + 5
    payload = coder.encode(torch.randn(size)).numpy().tobytes()
    hostile = bytearray(payload)
    hostile[-2:] = b"\xff\xff"  # NaN; of a scale, the end
    assert Encoded(coder, hostile, size).largest() == math.inf
    if codec.startswith("int"):
        below = bytearray(payload)
        below[-1] ^= 0x80
        assert Encoded(coder, below, size).largest() == math.inf
    for wrong in (payload[: -coder.block_bytes], payload + bytes(coder.block_bytes), b""):
        assert Encoded(coder, wrong, size).largest() == math.inf
