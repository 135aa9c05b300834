"""Stages of a model: split equals whole, what crosses, what counts."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor, nn

from p2p_co2.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from p2p_co2.recipes.byte_gpt import ByteGPTStage, Shape, next_token_sum, stage_edges
from p2p_co2.recipes.stages import Stages
from p2p_co2.tensors.stages import Boundary, Counted, StageReplica, UsualSizes
from p2p_co2.tensors.stages.boundary import MOST_TIMES, SEVERAL

SHAPE = Shape(layers=4, width=32, heads=2, context=16)


def byte_stages(count: int) -> Stages:
    makers = [lambda edges=edges: ByteGPTStage(SHAPE, *edges) for edges in stage_edges(SHAPE.layers, count)]
    return Stages(makers, lambda batch: batch, next_token_sum)  # type: ignore[arg-type]


def microbatches(seed: int, count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    windows = [torch.randint(256, (2, SHAPE.context + 1), generator=generator) for _ in range(count)]
    return [(window[:, :-1], window[:, 1:]) for window in windows]


def test_recomputation_draws_the_same_numbers() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(self.inner(x), 0.5)  # type: ignore[no-any-return]

    gradients, forwards = [], []
    for room_bytes in (math.inf, 0, 1):  # of all, of none, of the first, which tells what one takes
        torch.manual_seed(1)
        module = Noisy()
        replica = StageReplica(module, is_first=False, graph_room_bytes=room_bytes)
        calls = [0]
        module.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        inputs = torch.randn(2, 8)
        for number in range(3):
            replica.forward(number, inputs + number)
        torch.rand(3)  # what the training thread draws meanwhile
        backs = [replica.backward(number, torch.ones(2, 8), 16, 1.0) for number in range(3)]
        assert all(back is not None for back in backs)
        gradients.append(torch.stack([back for back in backs if back is not None]))
        forwards.append(sum(calls))
    assert torch.equal(gradients[0], gradients[1])
    assert torch.equal(gradients[0], gradients[2])
    assert forwards == [3, 6, 5]


def test_a_dropped_microbatch_is_in_neither_sum() -> None:
    torch.manual_seed(0)
    module = nn.Linear(4, 4)
    replica, x = StageReplica(module, is_first=True), torch.randn(2, 4)
    replica.forward(1, x)
    replica.forward(2, 3 * x)
    with pytest.raises(LocalProtocolError, match="in flight"):
        replica.take()
    replica.backward(1, torch.ones(2, 4), 2, 5.0)
    replica.forget(2)
    assert replica.take() == Counted(2, 5.0, 1)
    assert module.weight.grad is not None
    torch.testing.assert_close(module.weight.grad, x.sum(0).expand(4, 4) / 2)
    assert replica.take() == Counted()


def test_what_crosses_is_known_without_computing() -> None:
    assert byte_stages(3).crossing(torch.zeros(5, 9).long()) == [(9, 32), (9, 32)]
    wrong = Stages([lambda: nn.Flatten(0), lambda: nn.Linear(4, 4)], lambda batch: batch, next_token_sum)
    with pytest.raises(ConfigError, match="stage 0 must make one float tensor"):
        wrong.crossing(torch.zeros(2, 4))
    with pytest.raises(ConfigError, match="no parameter to train"):
        wrong.build(0, 0)


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8"])
def test_hostile_bytes_at_a_boundary(codec: str) -> None:
    boundary = Boundary(codec, (3, 50), 2)
    sent = boundary.encode(torch.randn(2, 3, 50))
    assert len(sent) == boundary.payload_bytes
    assert boundary.decode(sent.numpy().tobytes()).shape == (2, 3, 50)
    for size in (0, len(sent) - 1, len(sent) + 1):
        with pytest.raises(RemoteProtocolError, match="wrong size"):
            boundary.decode(bytes(size))
    with pytest.raises(RemoteProtocolError, match="not finite"):
        boundary.decode(b"\xff" * len(sent))
    with pytest.raises(LocalProtocolError, match="shape"):
        boundary.encode(torch.randn(1, 3, 50))
    with pytest.raises(ValueError, match="diverged"):
        boundary.encode(torch.full((2, 3, 50), float("nan")))


def test_edges_cover_all_blocks() -> None:
    for layers, stages in itertools.product(range(1, 9), range(1, 9)):
        edges = stage_edges(layers, stages)
        assert [first for first, _ in edges] == [0, *(stop for _, stop in edges[:-1])]
        assert edges[-1][1] == layers


def test_values_far_beyond_their_senders_usual_ones_are_scaled_down() -> None:
    """To a hundred times the median; not those of others, and not for ever."""
    usual, values = UsualSizes(), torch.ones(2, 3)
    usual.admit("small", 1e-3 * values)
    for _ in range(3):
        usual.admit("a", values)
    assert usual.admit("a", 99 * values).equal(99 * values)
    torch.testing.assert_close(usual.admit("a", 1e5 * values), 100 * values)
    assert usual.admit("b", 101 * values).equal(101 * values)
    scaled = sum(not usual.admit("small", 2 * values).equal(2 * values) for _ in range(10))
    assert scaled == 1  # the median of two is between them
    usual.admit("none", 0 * values)
    usual.admit("none", values)
    for wrong in (1e7, 1e30):  # whoever sends it, and the first already
        with pytest.raises(RemoteProtocolError, match="too large"):
            usual.admit("c", wrong * values)


def test_a_sender_of_several_that_are_far_too_large_is_refused_and_its_effect_is_bounded() -> None:
    """One in forty of 350 times, as an honest RMSNorm makes them, is never refused."""
    usual, values = UsualSizes(), torch.ones(2, 3)
    for number in range(640):
        usual.admit("honest", (350 if number % 40 == 39 else 1) * values)
    taken, refused = 0.0, 0
    for number in range(64):
        try:
            taken += float(usual.admit("hostile", (9e5 if number % 4 == 3 else 1) * values).mean())
        except RemoteProtocolError:
            refused += 1
    assert refused == 16 - SEVERAL
    assert taken <= 49 + SEVERAL * MOST_TIMES
