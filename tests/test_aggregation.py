"""The mean of parts: by hand, against fp64, its laws (order, shares, chunks), and slices that must be
refused."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from p2p_co2.codec_specs import SPECS
from p2p_co2.errors import LocalProtocolError
from p2p_co2.protocol.rounds import Likeness
from p2p_co2.protocol.rounds.attempt import Share, capped
from p2p_co2.protocol.rounds.exchange import Findings
from p2p_co2.rule_specs import AGGREGATION_RULES
from p2p_co2.tensors.aggregation import AggregationRule, HostileSlice, compare, get_rule, reduce_slices
from p2p_co2.tensors.aggregation.centred import LONGEST, centred, usual_length
from p2p_co2.tensors.codec import get_codec
from p2p_co2.tensors.codec.base import Codec
from p2p_co2.wire.identity import PeerId

NAMES: tuple[str, ...] = tuple(SPECS)
RULES = [get_rule(name) for name in AGGREGATION_RULES]
SCORED, CENTRED, CLIPPED, MEDIAN, MEAN = RULES
LARGEST = torch.finfo(torch.float32).max
Part = tuple[str, float, bytes | bytearray | memoryview]


def mean_of_parts(codec: Codec, parts: Sequence[Part]) -> memoryview:
    return reduce_slices(MEAN, codec, parts).encoded


def gaussians(numel: int, seed: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def encoded(name: str, values: Tensor) -> bytes:
    return bytes(get_codec(name).encode(values).tolist())


def decoded(name: str, payload: bytes | bytearray | memoryview) -> Tensor:
    codec = get_codec(name)
    values = torch.empty(len(payload) // codec.block_bytes * codec.block_values)
    codec.admit(payload, values)
    return values


def width_of(name: str) -> int:
    return get_codec(name).block_values


def some_parts(name: str, count: int, blocks: int) -> list[Part]:
    return [
        (f"peer-{index}", 100.0 + 37 * index, encoded(name, gaussians(blocks * width_of(name), index)))
        for index in range(count)
    ]


# ---- by hand


def test_mean_by_hand() -> None:
    parts: list[Part] = [
        ("a", 1.0, encoded("fp32", torch.full((128,), 4.0))),
        ("b", 3.0, encoded("fp32", torch.full((128,), 8.0))),
    ]
    assert decoded("fp32", mean_of_parts(get_codec("fp32"), parts)).tolist() == [7.0] * 128


# ---- what a member sees in a mean


SHORT = [(name, blocks) for name in NAMES for blocks in (1, 5)]


@pytest.mark.parametrize(("name", "blocks"), [*SHORT, ("int4", 9 * 2048 + 3), ("sign", 9 * 512 + 3)])
def test_a_mean_is_compared_with_a_slice_in_it(name: str, blocks: int) -> None:
    """As the mean was before it was encoded, whatever its codec lost of it."""
    codec, size = get_codec(name), blocks * width_of(name)
    mine, other = encoded(name, gaussians(size, 0)), gaussians(size, 1)
    one = decoded(name, mine)
    for scale in (1.0, -1.0, 10.0):
        mean = scale * (0.3 * one + 0.8 * other)
        cosine, length, rms, used = compare(codec, mine, encoded(name, mean))
        wanted = float(torch.dot(mean, one) / mean.norm() / one.norm())
        assert cosine == pytest.approx(wanted, abs=0.15 if blocks < 9 else 0.04)
        assert used == 1.0
        assert rms == pytest.approx(float(one.square().mean().sqrt()), rel=0.1)
        longer = float(mean.norm() / one.norm())
        assert length == pytest.approx(longer, rel=0.3 if blocks < 9 else 0.1)


@pytest.mark.parametrize("name", ["int4", "sign"])
def test_members_that_used_few_rows_of_a_table_find_their_work(name: str) -> None:
    """Rows of very unequal length, a few hundredths of them used by each of four members: often a member's
    rows of a part are nothing beside another's. A part a hundred times too long is still seen."""
    codec, width, count, parts = get_codec(name), width_of(name), 1024, 8
    lengths = 10 ** (-3 * torch.rand(count, 1, generator=torch.Generator().manual_seed(0)))
    refused = [0, 0]
    for seed in range(15):
        rows = gaussians(count * width, seed).view(count, width) * lengths
        slices = []
        for member in range(4):
            generator = torch.Generator().manual_seed(4 * seed + member)
            used = torch.rand(count, 1, generator=generator) < 0.03
            slices.append(torch.where(used, rows, 0.0).view(parts, -1))
        for factor in (1.0, 100.0):
            findings = Findings[int]()
            for part in range(parts):
                mean = sum(one[part] for one in slices) / 4 * (factor if part == 0 else 1.0)
                like = compare(codec, encoded(name, slices[0][part]), encoded(name, mean))
                findings[part] = PeerId(f"owner {part}"), Likeness(*like)
            refused[factor > 1] += bool(findings.refused)
    assert not refused[0]
    assert refused[1] > 10


def test_nothing_tells_nothing_and_what_is_not_finite_is_no_mean() -> None:
    codec = get_codec("fp32")
    some, zeros, huge = gaussians(128, 0), torch.zeros(128), torch.full((128,), 1e30)
    assert compare(codec, encoded("fp32", zeros), encoded("fp32", some)) == (0.0, 0.0, 0.0, 0.0)
    assert compare(codec, encoded("fp32", some), encoded("fp32", zeros))[:2] == (0.0, 0.0)
    assert compare(codec, encoded("fp32", huge), encoded("fp32", huge)) == pytest.approx(
        (1.0, 1.0, 1e30, 1.0)
    )
    assert compare(codec, encoded("fp32", some), encoded("fp32", huge))[1] > 1e29
    broken = struct.pack("<f", math.nan) + encoded("fp32", some)[4:]
    assert compare(codec, encoded("fp32", some), broken) == (-1.0, math.inf, 0.0, 0.0)


# ---- laws


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
def test_the_parts_are_the_whole(name: str) -> None:
    # However the blocks are shared out among owners, the bytes are those of one owner.
    codec = get_codec(name)
    chunk = codec.chunk_blocks
    blocks = chunk + 5
    tensors = [codec.encode(gaussians(blocks * codec.block_values, seed)) for seed in range(2)]
    payloads = [bytearray(tensor.numpy().tobytes()) for tensor in tensors]
    weights = [2.0, 3.0]

    def mean(start: int, stop: int) -> bytes:
        edges = slice(start * codec.block_bytes, stop * codec.block_bytes)
        slices = [(str(index), weights[index], memoryview(payloads[index])[edges]) for index in range(2)]
        return bytes(mean_of_parts(codec, slices))

    assert mean(0, 3) + mean(3, chunk) + mean(chunk, blocks) == mean(0, blocks)


# ---- faults


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


# ---- the rules: what a slice counts with


def along(*lengths: float) -> list[list[float]]:
    """The products of slices that all point the same way."""
    return [[a * b for a in lengths] for b in lengths]


def apart(*lengths: float) -> list[list[float]]:
    """The products of slices that have nothing in common."""
    return [[a * a if i == j else 0.0 for j in range(len(lengths))] for i, a in enumerate(lengths)]


def test_the_usual_length_is_the_median() -> None:
    assert usual_length([3.0, 2.0, 1.0], 1) == 2.0
    assert usual_length([3.0, 2.0, 1.0, 100.0], 1) == 2.0  # of four the second: one liar moves it nowhere
    assert usual_length([1e30, 2.0, 1.0, 100.0], 1) == 25.0  # two of four are no minority
    assert usual_length([1.0, 0.25], 1) == 0.25  # of two the shorter is believed
    assert usual_length([1e-12, 1.0, 1e-9, 2.0], 1) == 0.25  # newcomers silence nobody
    assert usual_length([0.0, 0.0, 0.0, 5.0, 10.0], 1) == 5.0  # zeros have no say
    assert usual_length([0.0, 0.0], 1) == usual_length([], 1) == math.inf


@given(
    honest=st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=9),
    lies=st.lists(st.floats(0, LARGEST), max_size=8),
)
def test_fewer_liars_than_honest_peers_neither_pull_harder_nor_silence(
    honest: list[float], lies: list[float]
) -> None:
    lies = lies[: len(honest) - 1]
    assert min(honest) * (1 - 1e-9) <= usual_length([*honest, *lies], 1) <= max(honest) * (1 + 1e-9)


def test_equal_slices_and_those_that_differ_alike_count_whole() -> None:
    assert centred(along(1.0, 1.0, 1.0), [1.0, 1.0, 1.0]) == (1.0, 1.0, 1.0)
    assert centred(apart(1.0, 1.0, 1.0, 1.0), [3.0] * 4) == (3.0,) * 4


def test_a_slice_may_be_longer_by_the_work_behind_it() -> None:
    """Two threads beside two peers of one; and where the work is only claimed, twice as long is the most."""
    assert min(centred(along(2.0, 1.0, 1.0), [2.0, 1.0, 1.0])) > 0.9
    assert centred(along(2.0, 1.0, 1.0), [2.0, 1.0, 1.0])[0] > 0.9 * 2.0
    eightfold = centred(along(8.0, 1.0, 1.0, 1.0, 1.0), [2.0, 1.0, 1.0, 1.0, 1.0])
    assert 0.9 * 2.0 * LONGEST <= eightfold[0] * 8.0 <= 2.0 * LONGEST  # what a peer of twice the work adds


def test_a_slice_against_all_others_moves_the_mean_by_their_own_spread() -> None:
    """Three that agree to a third, and one that sends their mean turned round, as long as theirs."""
    draws = [gaussians(4096, index) for index in range(4)]
    honest = [draw + draws[3] for draw in draws[:3]]
    mean = sum(honest) / 3
    for length in (1.0, 1e3, 1e30):
        lie = -mean * (float(honest[0].norm()) / float(mean.norm())) * length
        every = torch.stack([*honest, lie]).double()
        weights = centred((every @ every.T).tolist(), [1.0, 1.0, 1.0, 1.5])
        moved = torch.tensor(weights, dtype=torch.float64) @ every / sum(weights)
        along_mean = float(moved @ mean.double() / (mean @ mean))
        assert along_mean > 0.2, length  # where lengths alone are cut it is 0.06


def test_zeros_neither_silence_the_others_nor_vanish() -> None:
    """Of a table that two of five peers used, their work is in the mean, a fifth each."""
    counted = centred(apart(0.0, 0.0, 0.0, 5.0, 5.0), [1.0] * 5)
    assert min(counted) > 0.5


def test_a_centred_mean_by_hand() -> None:
    values = {"a": 1.0, "b": 1.0, "liar": 1000.0}
    parts: list[Part] = [(peer, 2.0, encoded("fp32", torch.full((128,), v))) for peer, v in values.items()]
    mean, weights, _ = reduce_slices(CENTRED, get_codec("fp32"), parts)
    assert weights[:2] == (2.0, 2.0)
    assert weights[2] == pytest.approx(0.002, rel=1e-3)
    assert decoded("fp32", mean)[0] == pytest.approx(6.0 / 4.002, rel=1e-3)
    mean, weights, _ = reduce_slices(CENTRED, get_codec("fp32"), parts[1:])
    assert weights == (2.0, pytest.approx(0.002, rel=1e-3))  # of a pair the shorter one is believed
    assert decoded("fp32", mean)[0] == pytest.approx(4.0 / 2.002, rel=1e-3)
    assert reduce_slices(CENTRED, get_codec("fp32"), parts[2:]).weights == (2.0,)


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule is not MEDIAN])
@pytest.mark.parametrize("name", NAMES)
def test_a_mean_is_by_the_weights_that_its_rule_returns(name: str, rule: AggregationRule) -> None:
    """Whoever asks what counted reads these; and the order of arrival changes nothing."""
    codec, parts = get_codec(name), some_parts(name, 5, 9)
    parts[2] = (parts[2][0], 50.0, encoded(name, 70 * gaussians(9 * width_of(name), 2)))
    mean, weights, _ = reduce_slices(rule, codec, parts)
    named = [(peer, weight, payload) for (peer, _, payload), weight in zip(parts, weights, strict=True)]
    assert mean == mean_of_parts(codec, named)
    assert (weights[2] < 1.0) == (rule is not MEAN)
    again, reversed_weights, _ = reduce_slices(rule, codec, parts[::-1])
    assert again == mean
    assert reversed_weights == weights[::-1]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", NAMES)
def test_hostile_slices_are_refused_and_named(name: str, rule: AggregationRule) -> None:
    codec, parts = get_codec(name), some_parts(name, 3, 2)
    bad = bytearray(parts[1][2])
    bad[-4:] = struct.pack("<f", math.nan)[2:] * 2  # a NaN as one fp32, fp16 or bf16
    with pytest.raises(HostileSlice) as refused:
        reduce_slices(rule, codec, [parts[0], (parts[1][0], 1.0, bytes(bad)), parts[2]])
    assert (refused.value.peer, refused.value.cause.reason) == (parts[1][0], "not finite")


# ---- three honest peers and a liar


def trained(rule: AggregationRule, cap: float, honest: int, liars: int) -> float:
    """The loss of a least-squares problem after 20 rounds of 10 noisy steps: fp32, outer lr 0.7."""
    codec, target = get_codec("fp32"), gaussians(1024, 0)
    agreed, random_ = torch.zeros(1024), torch.Generator().manual_seed(1)
    shares = {PeerId(f"p{i}"): Share(100.0 * (1.0 if i < honest else 1e6), 0) for i in range(honest + liars)}
    weights = capped(shares, cap)
    for _ in range(20):
        parts: list[Part] = []
        for index, (peer, weight) in enumerate(weights.items()):
            live = agreed.clone()
            for _ in range(10):
                live -= 0.05 * (live - target + torch.randn(1024, generator=random_))
            if index >= honest:
                live += 0.5 * torch.randn(1024, generator=random_)
            parts.append((peer, weight, encoded("fp32", agreed - live)))
        agreed -= 0.7 * decoded("fp32", reduce_slices(rule, codec, parts).encoded)
    return 1.0 + float((agreed - target).square().mean())


def test_a_liar_costs_the_others_next_to_nothing() -> None:
    alone = trained(CENTRED, 2.0, honest=3, liars=0)
    assert trained(CENTRED, 2.0, honest=3, liars=1) < 1.05 * alone
    assert trained(MEAN, 0.0, honest=3, liars=1) > 1.05 * alone  # what it is about
    assert trained(CENTRED, 2.0, honest=4, liars=0) < 1.003 * trained(MEAN, 0.0, 4, 0)
