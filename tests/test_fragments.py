"""Fragments: plans by hand and as laws over random modules, live parameters there and back, schedule and
clock."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from p2p_co2.config import ClockConfig
from p2p_co2.errors import ConfigError, LocalProtocolError
from p2p_co2.fragments import FragmentPlan, LiveParameters, SwarmClock, due, plan_fragments, points_passed
from p2p_co2.outer import Merge


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)


class Transformer(nn.Module):
    """The shape of a GPT: tied embedding and head, position table, blocks, last norm."""

    def __init__(self, width: int = 16, blocks: int = 6, vocabulary: int = 50, tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(8, width))
        self.blocks = nn.ModuleList([Block(width) for _ in range(blocks)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


def elements(plan: FragmentPlan) -> Counter[tuple[str, int]]:
    return Counter(
        (part.name, at)
        for fragment in plan.fragments
        for part in fragment.slices
        for at in range(part.start, part.stop)
    )


def trainable(module: nn.Module) -> Counter[tuple[str, int]]:
    return Counter(
        (name, at)
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
        for at in range(parameter.numel())
    )


def blocks_of(plan: FragmentPlan, index: int) -> set[int]:
    names = [part.name for part in plan.fragments[index].slices]
    return {int(name.split(".")[1]) for name in names if name.startswith("blocks.")}


# ---- by hand


def test_blocks_are_strided_and_the_rest_has_its_own_fragment() -> None:
    plan = plan_fragments(Transformer(), 4)
    assert [blocks_of(plan, index) for index in range(4)] == [{0, 3}, {1, 4}, {2, 5}, set()]
    assert {part.name for part in plan.fragments[3].slices} == {
        "embedding.weight",
        "positions",
        "norm.weight",
        "norm.bias",
    }
    # Whole parameters only: equal blocks are cut at their ends.
    sizes = {name: parameter.numel() for name, parameter in Transformer().named_parameters()}
    assert all(
        (part.start, part.stop) == (0, sizes[part.name])
        for fragment in plan.fragments
        for part in fragment.slices
    )


def test_a_large_embedding_is_split() -> None:
    plan = plan_fragments(Transformer(width=16, blocks=2, vocabulary=2000), 4)
    split = [fragment for fragment in plan.fragments if any("embedding" in s.name for s in fragment.slices)]
    assert len(split) >= 3
    sizes = [fragment.numel for fragment in plan.fragments]
    assert max(sizes) <= 1.5 * sum(sizes) / 4


def test_a_small_rest_rides_along() -> None:
    plan = plan_fragments(Transformer(width=32, blocks=4, vocabulary=2), 2)
    assert [blocks_of(plan, index) for index in range(2)] == [{0, 2}, {1, 3}]


def test_one_fragment_holds_everything() -> None:
    module = Transformer()
    plan = plan_fragments(module, 1)
    assert plan.numel == sum(parameter.numel() for parameter in module.parameters())


def test_a_module_without_blocks_is_cut_in_order() -> None:
    plan = plan_fragments(nn.Linear(3, 3), 4)
    ranges = [[(s.name, s.start, s.stop) for s in fragment.slices] for fragment in plan.fragments]
    assert ranges == [
        [("weight", 0, 3)],
        [("weight", 3, 6)],
        [("weight", 6, 9)],
        [("bias", 0, 3)],
    ]


def test_experts_inside_a_block_are_not_the_blocks() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList([nn.Linear(4, 4) for _ in range(8)])

    module = nn.Module()
    module.layers = nn.ModuleList([Layer() for _ in range(4)])
    plan = plan_fragments(module, 2)
    assert {part.name.split(".")[1] for part in plan.fragments[0].slices} == {"0", "2"}


def test_points_by_hand() -> None:
    assert [points_passed(0, 4, position) for position in (0, 0.5, 1, 1.9, 2)] == [0, 0, 1, 1, 2]
    assert [points_passed(1, 4, position) for position in (0, 0.25, 1, 1.25, 2)] == [0, 1, 1, 2, 2]
    assert due(4, 0.0, 0.2) == ()
    assert due(4, 0.0, 0.5) == (1, 2)
    assert due(4, 0.5, 1.0) == (3, 0)
    assert due(4, 0.5, 0.5) == ()
    assert due(4, 0.5, 9.0) == (3, 0, 1, 2)
    assert due(1, 0.0, 1.0) == (0,)


def test_clock_in_steps_mode_counts_inner_steps() -> None:
    clock = SwarmClock(ClockConfig(mode="steps", inner_steps_per_round=30))
    assert clock.position(1e9, 15) == 0.5
    clock.start(7.0, 0.0, inner_steps=100)
    assert clock.position(0.0, 160) == 9.0
    clock.observe(50.0, 0.0)
    assert clock.position(0.0, 160) == 9.0


def test_clock_in_time_mode_slews_and_jumps() -> None:
    clock = SwarmClock(ClockConfig(mode="time", round_s=10.0))
    clock.start(2.0, 1000.0)
    assert clock.position(1005.0, 0) == pytest.approx(2.5)
    clock.observe(2.55, 1005.0)
    # Half a round at one tenth faster is what it takes.
    assert clock.position(1007.5, 0) == pytest.approx(2.775)
    assert clock.position(1010.0, 0) == pytest.approx(3.05)
    assert clock.position(1015.0, 0) == pytest.approx(3.55)
    clock.observe(3.45, 1015.0)
    assert clock.position(1025.0, 0) == pytest.approx(4.45)
    assert clock.position(1035.0, 0) == pytest.approx(5.45)
    clock.observe(9.0, 1035.0)
    assert clock.position(1035.0, 0) == 9.0


# ---- against a reference


@pytest.mark.parametrize("per_round", [3, 7, 30, 48])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_every_point_falls_on_the_inner_step_that_integers_say(per_round: int, count: int) -> None:
    """steps / H against f / P in floating point and in whole numbers, over many rounds."""
    last = 0.0
    for step in range(1, 40 * per_round):
        position = step / per_round
        expected = [
            tick % count for tick in range((step - 1) * count // per_round + 1, step * count // per_round + 1)
        ]
        assert list(due(count, last, position)) == expected
        last = position


# ---- laws


@st.composite
def modules(draw: st.DrawFn) -> nn.Module:
    """Any module: blocks of any number and width or none, shared and frozen parameters, empty ones."""
    module = nn.Module()
    shapes = st.lists(st.integers(0, 9), min_size=0, max_size=3)
    for index in range(draw(st.integers(0, 5))):
        module.register_parameter(f"outside{index}", nn.Parameter(torch.zeros(draw(shapes))))
    blocks = [nn.Linear(draw(st.integers(1, 9)), 3) for _ in range(draw(st.integers(0, 7)))]
    if blocks:
        module.blocks = nn.ModuleList(blocks)
    for index in range(draw(st.integers(0, 2))):
        module.register_parameter(f"after{index}", nn.Parameter(torch.zeros(draw(shapes))))
    if len(blocks) > 1 and draw(st.booleans()):
        blocks[-1].bias = blocks[0].bias
    for parameter in module.parameters():
        parameter.requires_grad_(draw(st.integers(0, 9)) > 0)
    return module


@settings(max_examples=200)
@given(modules(), st.integers(1, 12))
def test_the_fragments_are_the_whole_once_and_even(module: nn.Module, count: int) -> None:
    total = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    if total < count:
        with pytest.raises(ConfigError, match="fragments"):
            plan_fragments(module, count)
        return
    plan = plan_fragments(module, count)
    assert elements(plan) == trainable(module)
    assert [fragment.index for fragment in plan.fragments] == list(range(count))
    sizes = [fragment.numel for fragment in plan.fragments]
    assert sizes == [sum(s.stop - s.start for s in fragment.slices) for fragment in plan.fragments]
    assert min(sizes) >= 1
    assert max(sizes) <= max(1.5 * total / count, math.ceil(total / count))
    assert plan_fragments(module, count) == plan


def test_the_digest_sees_names_shapes_and_ranges() -> None:
    plans = [
        plan_fragments(nn.Linear(6, 2), 2),
        plan_fragments(nn.Linear(2, 6), 2),
        plan_fragments(nn.Linear(6, 2), 3),
        plan_fragments(nn.Sequential(nn.Linear(6, 2)), 2),
    ]
    assert len({plan.digest for plan in plans}) == 4
    assert all(len(plan.digest) == 32 for plan in plans)


@given(
    st.integers(1, 8), st.lists(st.floats(0, 5), min_size=1, max_size=30), st.floats(0, 4, exclude_max=True)
)
def test_points_are_counted_once_in_any_steps(count: int, steps: list[float], start: float) -> None:
    positions = [start]
    for step in steps:
        positions.append(positions[-1] + step * 0.1)
    sent = Counter(f for last, now in pairwise(positions) for f in due(count, last, now))
    for fragment in range(count):
        passed = [points_passed(fragment, count, position) for position in positions]
        assert passed == sorted(passed)
        assert sent[fragment] == passed[-1] - passed[0]


@given(st.lists(st.tuples(st.floats(-5, 50), st.floats(-1e6, 1e6) | st.just(math.nan)), max_size=30))
def test_the_clock_never_goes_back(moments: list[tuple[float, float]]) -> None:
    """Whatever others say, and even if the local clock stumbles."""
    clock = SwarmClock(ClockConfig(mode="time", round_s=10.0))
    clock.start(0.0, 0.0)
    now, last = 0.0, 0.0
    for elapsed, others in moments:
        now += elapsed
        clock.observe(others, now)
        position = clock.position(now, 0)
        assert position >= last
        last = position


def test_clocks_of_peers_come_together() -> None:
    clocks = [SwarmClock(ClockConfig(mode="time", round_s=10.0)) for _ in range(4)]
    for clock, start in zip(clocks, (0.0, 0.2, 0.3, 0.7), strict=True):
        clock.start(start, 0.0)
    for second in range(1, 200):
        positions = [clock.position(float(second), 0) for clock in clocks]
        for index, clock in enumerate(clocks):
            others = sorted(positions[:index] + positions[index + 1 :])
            clock.observe(others[1], float(second))
    positions = [clock.position(200.0, 0) for clock in clocks]
    assert max(positions) - min(positions) < 0.01


class Odd(Transformer):
    """Tied, 16-bit, transposed, scalar and frozen parameters in one module."""

    def __init__(self) -> None:
        super().__init__(width=8, blocks=2, vocabulary=11)
        self.half_precision = nn.Parameter(torch.randn(5, 7).bfloat16())
        self.transposed = nn.Parameter(torch.randn(6, 9).t())
        self.scalar = nn.Parameter(torch.tensor(2.5))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        assert not self.transposed.is_contiguous()


@pytest.mark.parametrize("count", [1, 3, 7])
def test_live_parameters_there_and_back(count: int) -> None:
    module, other = Odd(), Odd()
    plan = plan_fragments(module, count)
    live, loaded = LiveParameters(module, plan), LiveParameters(other, plan)
    frozen = other.frozen.clone()
    references = {name: parameter.data_ptr() for name, parameter in other.named_parameters()}
    for index in range(count):
        loaded.load_(index, live.snapshot(index))
    for name, parameter in module.named_parameters():
        if name != "frozen":
            assert torch.equal(parameter, other.get_parameter(name)), name
    assert torch.equal(other.frozen, frozen)
    assert other.head.weight is other.embedding.weight
    assert {name: parameter.data_ptr() for name, parameter in other.named_parameters()} == references


@pytest.mark.parametrize("keep", [1.0, 0.5, 0.0])
def test_a_merge_is_affine_and_touches_one_fragment_only(keep: float) -> None:
    module = Odd()
    plan = plan_fragments(module, 3)
    live = LiveParameters(module, plan)
    before = [live.snapshot(index) for index in range(3)]
    addend = torch.randn(plan.fragments[1].numel)
    live.merge_(1, Merge(keep, addend))
    torch.testing.assert_close(live.snapshot(1), keep * before[1] + addend, rtol=8e-3, atol=8e-3)
    at = 0
    for part in plan.fragments[1].slices:
        stop = at + part.stop - part.start
        got = module.get_parameter(part.name).reshape(-1)[part.start : part.stop]
        exact = (keep * before[1][at:stop] + addend[at:stop]).to(got.dtype)
        assert torch.equal(got, exact), part.name
        at = stop
    for index in (0, 2):
        assert torch.equal(live.snapshot(index), before[index])


def test_a_snapshot_is_a_copy_and_fills_a_given_buffer() -> None:
    module = nn.Linear(4, 4)
    live = LiveParameters(module, plan_fragments(module, 1))
    buffer = torch.empty(20)
    assert live.snapshot(0, buffer) is buffer
    kept = buffer.clone()
    with torch.no_grad():
        module.weight.add_(1.0)
    assert torch.equal(buffer, kept)
    assert not buffer.requires_grad


def test_a_merge_leaves_the_inner_optimizer_working() -> None:
    module = nn.Linear(4, 4)
    live = LiveParameters(module, plan_fragments(module, 2))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    for _ in range(2):
        module(torch.ones(4)).sum().backward()
        optimizer.step()
        live.merge_(0, Merge(0.5, torch.ones(10)))
        optimizer.zero_grad()
    assert len(optimizer.state) == 2


# ---- faults


def test_impossible_plans_and_foreign_plans_are_refused() -> None:
    with pytest.raises(ConfigError, match="cannot cut 2 trainable parameters into 3 fragments; use 1 to 2"):
        plan_fragments(nn.Linear(1, 1), 3)
    with pytest.raises(ConfigError, match="cannot cut 0"):
        plan_fragments(nn.Module(), 1)
    plan = plan_fragments(nn.Linear(4, 4), 2)
    with pytest.raises(LocalProtocolError, match="another module: weight"):
        LiveParameters(nn.Linear(2, 2), plan)
    live = LiveParameters(nn.Linear(4, 4), plan)
    with pytest.raises(LocalProtocolError, match="fragment 0"):
        live.merge_(0, Merge(1.0, torch.zeros(3)))
    with pytest.raises(LocalProtocolError, match="fragment 0"):
        live.load_(0, torch.zeros(10, dtype=torch.float64))


def test_a_peer_that_slept_sends_each_fragment_once() -> None:
    clock = SwarmClock(ClockConfig(mode="time", round_s=10.0))
    clock.start(0.0, 0.0)
    last = clock.position(1.0, 0)
    clock.observe(40.3, 1.0)
    assert sorted(due(4, last, clock.position(1.0, 0))) == [0, 1, 2, 3]
