"""Gradients as two thin matrices: what is sent, what is left over, and how that is made good."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from p2p_co2.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from p2p_co2.protocol.pipeline import Key, Work
from p2p_co2.protocol.pipeline.machine import Do
from p2p_co2.tensors.stages import Boundary, LowRank
from p2p_co2.trainer.stages.work import Crossings, StageWork
from tests.test_stages import byte_stages, microbatches

SHAPE = (24, 16)
"""Of one sequence; a microbatch has two."""


def made(seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, *SHAPE, generator=generator, dtype=dtype)


def decoded(low: LowRank, payload: Tensor) -> Tensor:
    return low.decode(payload.numpy())


def test_a_matrix_of_that_rank_comes_through() -> None:
    """Powers of two survive bf16: u v^T with u of 16 equal entries, by hand."""
    column = torch.zeros(48, 1)
    column[:16] = 0.25
    row = torch.tensor([[1.0, -2.0, 4.0] + 13 * [0.5]])
    low = LowRank(1, SHAPE, 2)
    payload, rest = low.encode((column @ row).view(2, *SHAPE))
    assert len(payload) == low.payload_bytes == 256  # 48 + 16 values in bf16, in one block of 128
    torch.testing.assert_close(decoded(low, payload), (column @ row).view(2, *SHAPE), rtol=0, atol=1e-6)
    assert float(rest.abs().max()) < 1e-6


def test_it_nears_the_best_that_this_rank_can() -> None:
    """Eckart and Young: no matrix of rank r is nearer than the first r singular values'. Starting from the
    last Q makes a gradient that stays the same converge to that."""
    values, low = made(1), LowRank(4, SHAPE, 2)
    singular = torch.linalg.svdvals(values.view(-1, 16))
    best = float(singular[4:].square().sum().sqrt())
    errors = [float(low.encode(values)[1].norm()) for _ in range(30)]
    assert best <= errors[-1] < 1.01 * best < errors[0]


@pytest.mark.parametrize("rank", [1, 5, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_what_a_receiver_decodes_and_the_rest_are_all_of_it(rank: int, dtype: torch.dtype) -> None:
    low = LowRank(rank, SHAPE, 2)
    nothing = torch.zeros(2, *SHAPE)
    for values in (made(0), made(1), made(2), nothing, nothing + 1e-30, 1e-20 * made(0)):
        payload, rest = low.encode(values.to(dtype))
        assert bool(torch.isfinite(rest).all())
        found = decoded(low, payload).to(rest) + rest
        torch.testing.assert_close(
            found, values.to(dtype).to(rest), rtol=1e-5, atol=1e-5 * float(values.max())
        )


def test_the_identity_of_lazy_error_propagation() -> None:
    """What a layer below accumulates, against what it should have, with every e accounted for."""
    low, steps, rest = LowRank(3, SHAPE, 2), 7, torch.zeros(2, *SHAPE, dtype=torch.float64)
    generator = torch.Generator().manual_seed(5)
    inputs = [torch.randn(48, 9, generator=generator, dtype=torch.float64) for _ in range(steps)]
    rests, sent, true = [], torch.zeros(9, 16, dtype=torch.float64), torch.zeros(9, 16, dtype=torch.float64)
    for step in range(steps):
        gradient = made(step, torch.float64)
        held = gradient + rest
        _, rest = low.encode(held)
        rests.append(rest.view(48, 16))
        sent += inputs[step].T @ (held - rest).view(48, 16)
        true += inputs[step].T @ gradient.view(48, 16)
    for step in range(steps - 1):
        true += (inputs[step + 1] - inputs[step]).T @ rests[step]
    true -= inputs[-1].T @ rests[-1]
    torch.testing.assert_close(sent, true, rtol=1e-13, atol=1e-13)
    assert float(rests[-1].norm()) > 1.0


def test_a_flush_leaves_its_own_error_alone() -> None:
    low, flush = LowRank(2, SHAPE, 2), Boundary("int8", SHAPE, 2)
    true, sent, rest = torch.zeros(2, *SHAPE), torch.zeros(2, *SHAPE), torch.zeros(2, *SHAPE)
    for step in range(6):
        payload, rest = low.encode(made(step) + rest)
        true, sent = true + made(step), sent + decoded(low, payload)
    last = made(6) + rest
    sent += flush.decode(flush.encode(last).numpy())
    true += made(6)
    assert float((sent - true).abs().max()) <= 1.01 * float(last.abs().max()) / 254
    assert float((sent - true).norm()) < 0.05 * float(rest.norm())


def test_what_is_refused() -> None:
    low = LowRank(4, SHAPE, 2)
    sent, _ = low.encode(made(0))
    for size in (0, len(sent) - 1, len(sent) + 1, 1 << 20):
        with pytest.raises(RemoteProtocolError, match="wrong size"):
            low.decode(bytes(size))
    with pytest.raises(RemoteProtocolError, match="not finite"):
        low.decode(b"\xff" * len(sent))
    huge = torch.full((len(sent) // 2,), 1e38, dtype=torch.bfloat16).view(torch.uint8)
    with pytest.raises(RemoteProtocolError, match="not finite"):
        low.decode(huge.numpy())
    with pytest.raises(LocalProtocolError, match="shape"):
        low.encode(torch.zeros(1, *SHAPE))
    for value in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="diverged"):
            low.encode(torch.full((2, *SHAPE), value))
    again, _ = low.encode(made(0))
    assert len(again) == len(sent)


@pytest.mark.parametrize(("critical", "problem"), [("rank17", "at most rank16"), ("rank16", "saves nothing")])
def test_a_rank_that_is_of_no_use_is_said(critical: str, problem: str) -> None:
    inputs, side = (part[:, :16] for part in microbatches(0, 1)[0])
    stages = byte_stages(2)
    inputs, side = inputs[:1], side[:1]
    with pytest.raises(ConfigError, match=problem) as caught:
        Crossings.of(stages, inputs, side, "int8", "int8", critical)
    assert caught.value.key == "pipeline.backward_critical"


def last_stage(critical: str) -> tuple[StageWork, list[bytes], Crossings]:
    """The last of two stages, and three payloads as the first sends them."""
    stages = byte_stages(2)
    crossings = Crossings.of(stages, *microbatches(0, 1)[0], "fp32", "fp32", critical)
    first = StageWork(stages, stages.build(7, 0), 0, crossings, iter(microbatches(0, 3)))
    works = [Work(Do.FORWARD, Key(1, number)) for number in range(3)]
    payloads = [bytes(first.compute(work).payload or b"") for work in works]
    return StageWork(stages, stages.build(7, 1), 1, crossings), payloads, crossings


def sent_back(
    critical: str, heirs: list[Key | None], forgotten: Key | None = None
) -> tuple[list[int], Tensor]:
    """The codecs of three urgent gradients of the last stage, and their sum as the first decodes it."""
    work, payloads, crossings = last_stage(critical)
    codecs, total = [], torch.zeros(())
    for number, (payload, heir) in enumerate(zip(payloads, heirs, strict=True)):
        done = work.compute(Work(Do.FORWARD, Key(1, number), payload, is_urgent=bool(critical), heir=heir))
        work.forget(forgotten)
        assert done.payload is not None
        assert len(memoryview(done.payload)) == crossings.backward_bytes(0)[done.codec]
        codecs.append(done.codec)
        total = total + crossings.gradients(0)[done.codec].decode(done.payload)
    return codecs, total


def test_heirs_make_good_what_was_left_out() -> None:
    """The sum that the first stage decodes is that of the true gradients, once the last has no heir."""
    _, true = sent_back("", [None] * 3)
    codecs, summed = sent_back("rank2", [Key(1, 1), Key(1, 2), None])
    assert codecs == [1, 1, 0]
    torch.testing.assert_close(summed, true, rtol=0, atol=1e-5)
    codecs, summed = sent_back("rank2", [Key(1, 2), None, None])
    assert codecs == [1, 0, 0]
    torch.testing.assert_close(summed, true, rtol=0, atol=1e-5)
    codecs, summed = sent_back("rank2", [Key(1, 2), Key(1, 2), None])  # two leave theirs to one
    assert codecs == [1, 1, 0]
    torch.testing.assert_close(summed, true, rtol=0, atol=1e-5)


def test_a_dropped_heir_takes_along_what_it_was_left() -> None:
    """Nothing of it is added to another: without the repayment the sum misses it."""
    _, true = sent_back("", [None] * 3)
    codecs, summed = sent_back("rank2", [Key(1, 9), None, None], Key(1, 9))
    assert codecs == [1, 0, 0]
    assert float((summed - true).norm()) > 0.01 * float(true.norm())


def test_four_bits_need_no_heir() -> None:
    _, true = sent_back("", [None] * 3)
    codecs, summed = sent_back("int4", [None] * 3)
    assert codecs == [1, 1, 1]
    assert 0 < float((summed - true).norm()) < 0.2 * float(true.norm())
