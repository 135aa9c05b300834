"""A table that the first stage and the last share: one group's step for both is the unsplit model's."""

from __future__ import annotations

from functools import partial
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from p2p_co2.config import OuterConfig
from p2p_co2.planning.traffic import sent_and_received
from p2p_co2.recipes.byte_gpt import byte_gpt_stages
from p2p_co2.tensors import outer
from p2p_co2.tensors.codec import get_codec
from p2p_co2.trainer.ledger.kept import Encoded
from tests.stage_line import Line
from tests.test_stages import SHAPE, microbatches

FP32 = get_codec("fp32")
CLIPS = ("none", "rms", "elementwise")


def union_mean(gradients: list[Tensor], tokens: list[int], uses: int = 2) -> Encoded:
    """The token-weighted mean of all peers of both stages, as a round gives it."""
    mean = torch.zeros(gradients[0].shape)
    for weight, one in zip(tokens, gradients, strict=True):
        mean += weight / sum(tokens) * one
    return Encoded(FP32, FP32.encode(mean).numpy().data, mean.numel(), uses)


def stepped(
    config: OuterConfig, state: outer.AgreedState, mean: Encoded | Tensor, late: int
) -> outer.AgreedState:
    largest = None if isinstance(mean, Tensor) else mean.largest()
    return outer.step(config, state, mean, max(0, state.version - late), largest=largest)[0]


def config(**changes: Any) -> OuterConfig:
    return OuterConfig(rule="co2", clip_phi=0.75).model_copy(update=changes)


def drawn(seed: int, count: int, values: int = 300) -> list[Tensor]:
    """Multiples of 1/1024, so that sums of a few and halves of them are exact."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-512, 513, (values,), generator=generator) / 1024 for _ in range(count)]


def same(one: outer.AgreedState, other: outer.AgreedState) -> bool:
    return torch.equal(one.params, other.params) and torch.equal(one.momentum, other.momentum)


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("gap_penalty", [False, True])
def test_fused_is_unfused(clip: str, nesterov: bool, gap_penalty: bool) -> None:
    """Two replicas of each stage, as many tokens in both: the same bits as the unsplit model's step, whose
    outer gradient is the sum over both uses."""
    run = config(clip=clip, nesterov=nesterov, gap_penalty=gap_penalty)
    fused = unsplit = outer.init(drawn(0, 1)[0])
    for round_ in range(1, 7):
        first, last = drawn(round_, 2), drawn(100 + round_, 2)
        mean = union_mean([*first, *last], [512] * 4)
        unsplit = stepped(run, unsplit, (first[0] + last[0] + first[1] + last[1]) / 2, late=1)
        fused = stepped(run, fused, mean, late=1)
        assert same(fused, unsplit)


def test_stages_with_replicas_of_unequal_speed() -> None:
    """As many tokens in both stages, however they are spread: the sum of the stages' own means."""
    run, first, last = config(), drawn(1, 2), drawn(2, 3)
    state = outer.init(drawn(0, 1)[0])
    mean = union_mean([*first, *last], [300, 700, 100, 400, 500])
    own = 0.3 * first[0] + 0.7 * first[1] + 0.1 * last[0] + 0.4 * last[1] + 0.5 * last[2]
    found, wanted = stepped(run, state, mean, late=0), stepped(run, state, own, late=0)
    torch.testing.assert_close(found.params, wanted.params, rtol=0, atol=1e-6)


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("gap_penalty", [False, True])
@pytest.mark.parametrize("late", [0, 1])
def test_when_twice_the_rate_is_twice_the_mean(clip: str, gap_penalty: bool, late: int) -> None:
    """The same bits, but for what measures the mean with a rule that is not in proportion to it: an
    elementwise clip, and the penalty for what comes late."""
    run = config(clip=clip, gap_penalty=gap_penalty, clip_phi=0.25)
    twice_rate = run.model_copy(update={"lr": 2 * run.lr})
    by_mean = by_rate = outer.init(drawn(0, 1)[0])
    for round_ in range(1, 7):
        one, weight = drawn(round_, 1), [1]
        by_mean = stepped(run, by_mean, union_mean(one, weight), late)
        by_rate = stepped(twice_rate, by_rate, union_mean(one, weight, uses=1), late)
    expected = clip != "elementwise" and not (gap_penalty and late)
    assert torch.equal(by_mean.params, by_rate.params) == expected


def test_twice_what_is_too_large_is_refused() -> None:
    mean = FP32.encode(torch.full((4,), 3e38)).numpy().data
    assert Encoded(FP32, mean, 4).largest() < Encoded(FP32, mean, 4, uses=2).largest() == float("inf")


def test_both_stages_begin_with_the_same_table() -> None:
    for count in (2, 4):
        stages, apart = byte_gpt_stages(SHAPE, count, tied=True), byte_gpt_stages(SHAPE, count)
        modules = [stages.build(7, stage) for stage in range(count)]
        names = [stages.tied_name(stage) for stage in range(count)]
        assert names == ["embedding.weight", *[""] * (count - 2), "head.weight"]
        assert torch.equal(modules[0].get_parameter(names[0]), modules[-1].get_parameter(names[-1]))
        assert not torch.equal(modules[0].get_parameter(names[0]), stages.build(8, 0).get_parameter(names[0]))
        own = [apart.build(7, 0).get_parameter(names[0]), apart.build(7, count - 1).get_parameter(names[-1])]
        assert not torch.equal(*own)
        whole = stages.join(modules)
        table = SHAPE.width * SHAPE.vocab_size
        assert sum(p.numel() for p in whole.parameters()) == sum(
            p.numel() for module in modules for p in module.parameters()
        ) - table  # fmt: skip


@pytest.mark.parametrize("count", [2, 4])
def test_fused_training_is_the_unsplit_tied_model(count: int) -> None:
    """A round after every inner step of SGD: the same parameters as those of the model that has one table."""
    stages = byte_gpt_stages(SHAPE, count, tied=True)
    optimizer_of = partial(torch.optim.SGD, lr=0.5)
    batches = (one for step in range(5) for one in microbatches(step, 3))
    line = Line(stages, chain(microbatches(0, 1), batches), optimizer_of, 7, "fp32", "fp32")
    whole = stages.whole(7)
    optimizer = optimizer_of(whole.parameters())
    tables = [line.modules[stage].get_parameter(stages.tied_name(stage)) for stage in (0, count - 1)]
    run = config(lr=1.0, momentum=0.0, nesterov=False, clip="none", gap_penalty=False)
    state = outer.init(tables[0])
    for step in range(5):
        line.step(3)
        moved = [state.params - table.detach().flatten() for table in tables]
        state = stepped(run, state, union_mean(moved, [1, 1]), late=0)
        with torch.no_grad():
            for table in tables:
                table.copy_(state.params.view_as(table))
        step_whole(whole, optimizer, stages.loss, microbatches(step, 3))
    ours = stages.join(line.modules).state_dict()
    for name, values in whole.state_dict().items():
        torch.testing.assert_close(ours[name], values, rtol=0, atol=1e-5)


def step_whole(
    whole: nn.Module, optimizer: torch.optim.Optimizer, loss: Any, batches: list[tuple[Tensor, Tensor]]
) -> None:
    total = sum(loss(whole(inputs), side) for inputs, side in batches)
    (total / sum(side.numel() for _, side in batches)).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("replicas", [1, 2, 4, 16])
def test_one_exchange_moves_less_than_two(replicas: int) -> None:
    """Of a table of V bytes, a peer sends V (2D - 1) / D in one group of both stages; with a group of each
    stage and then one of a pair, V (3D - 2) / D."""

    def sent(peers: int) -> float:
        slices, _, means, _ = sent_and_received(1.0, 1 / peers, peers)
        return slices + means

    fused, apart = sent(2 * replicas), sent(replicas) + sent(2)
    assert fused == pytest.approx((2 * replicas - 1) / replicas)
    assert apart / fused == pytest.approx((3 * replicas - 2) / (2 * replicas - 1))
