"""Fragments: plans by hand and as laws over random modules, live parameters there and back, schedule and
clock."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from p2p_co2.errors import ConfigError, LocalProtocolError
from p2p_co2.tensors.fragments import FragmentPlan, LiveParameters, plan_fragments
from p2p_co2.tensors.names import named_buffers, named_modules, named_parameters, shared_names
from p2p_co2.tensors.outer import Merge


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


# ---- names


class Gpt(nn.Module):
    """Blocks in a list, a tied head, a buffer, and a module that its author called ``module``."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(4))
        self.module = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(self.module(hidden)))


def whole(model: Gpt) -> nn.Module:
    return torch.compile(model, backend="eager")


def parallel(model: Gpt) -> nn.Module:
    return nn.DataParallel(model)


def compiled_in_parallel(model: Gpt) -> nn.Module:
    return nn.DataParallel(torch.compile(model, backend="eager"))


def by_block(model: Gpt) -> nn.Module:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, backend="eager")
    return model


def some_blocks(model: Gpt) -> nn.Module:
    model.blocks[1] = checkpoint_wrapper(torch.compile(model.blocks[1], backend="eager"))
    return model


def bare(model: Gpt) -> nn.Module:
    return model


WRAPPERS = [whole, parallel, compiled_in_parallel, by_block, some_blocks]


@pytest.mark.parametrize("wrap", [bare, *WRAPPERS])
def test_a_wrapped_model_has_the_models_names_and_is_cut_as_it_is(
    wrap: Callable[[Gpt], nn.Module],
) -> None:
    model = Gpt()
    names, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    modules = dict(model.named_modules())
    plans = [plan_fragments(model, count) for count in (1, 3, 7)]
    wrapped = wrap(model)
    assert [plan_fragments(wrapped, count) for count in (1, 3, 7)] == plans
    assert list(named_parameters(wrapped)) == list(names)
    assert all(named_parameters(wrapped)[name] is parameter for name, parameter in names.items())
    assert list(named_buffers(wrapped)) == list(buffers)
    assert dict(named_modules(wrapped)) == modules
    assert "module.weight" in names  # the author's own


@pytest.mark.parametrize("wrap", [bare, *WRAPPERS])
def test_names_and_further_names_are_those_of_the_models_state(wrap: Callable[[Gpt], nn.Module]) -> None:
    """A tied weight and a shared buffer have two, and so has all of a module that stands in two places."""
    model = Gpt()
    model.again = model.blocks[2]
    model.register_buffer("mask", torch.ones(2))
    model.blocks[0].register_buffer("mask", model.mask)
    model.blocks[1].register_buffer("mask", model.mask, persistent=False)
    state = dict(model.state_dict())
    wrapped = wrap(model)
    further = shared_names(wrapped)
    assert further["head.weight"] == "embed.weight"
    assert further["blocks.0.mask"] == "mask"
    assert len(further) == 2 + len(model.blocks[2].state_dict())
    assert {*named_parameters(wrapped), *further, *named_buffers(wrapped, persistent=True)} == set(state)
    assert all(state[name].data_ptr() == state[first].data_ptr() for name, first in further.items())
