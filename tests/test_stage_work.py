"""Machines and tensors together, in one process: split equals whole whatever is lost on the way."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from p2p_co2.errors import ConfigError
from p2p_co2.protocol.pipeline import DroppedMicrobatch, Key, Pipeline, Place, Sizes, Work
from p2p_co2.protocol.pipeline.machine import Do
from p2p_co2.protocol.pipeline.transit import Passage
from p2p_co2.recipes.stages import Stages
from p2p_co2.tensors.stages import Chain
from p2p_co2.trainer.stages.work import Crossings, Done, StageWork
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.messages_pb2 import Backward
from tests.test_stages import byte_stages, microbatches

M = 3


def crossings_of(stages: Stages, codec: str = "fp32", critical: str = "") -> Crossings:
    inputs, side = microbatches(0, 1)[0]
    return Crossings.of(stages, inputs, side, codec, codec, critical)


class Swarm:
    """One replica of each stage; messages are handed on at once, but for those that ``lose`` names. If
    gradients have an ``order`` of stage 2, they come in it (1, or -1 for last first), each when nothing
    else is left to do."""

    def __init__(self, count: int, critical: str = "", microbatches: int = M, order: int = 0) -> None:
        self.stages = byte_stages(count)
        self.crossings = crossings = crossings_of(self.stages, critical=critical)
        self.machines, self.works, self.optimizers = [], [], []
        self.lost: set[str] = set()
        self.order, self.kept = order, list[Any]()
        self.sent: list[tuple[int, Done]] = []
        for stage in range(count):
            sizes = Sizes(
                microbatches, microbatches if order else 2, 2 * microbatches if order else 4,
                crossings.forward_bytes(stage - 1) if stage else 0,
                crossings.backward_bytes(stage) if stage < count - 1 else [],
                crossings.digest(), 60.0,
            )  # fmt: skip
            place = Place(PeerId(f"p{stage}"), 100 * stage + 1, stage, count)
            module = self.stages.build(7, stage)
            batches = iter(self._batches()) if stage == 0 else None
            self.machines.append(Pipeline(place, sizes))
            self.works.append(StageWork(self.stages, module, stage, crossings, batches, stage == 1))
            self.optimizers.append(torch.optim.SGD(module.parameters(), lr=0.5))
        for machine in self.machines:
            for other in range(count):
                machine.join(PeerId(f"p{other}"), other)
        self.now = 0.0

    def _batches(self):  # type: ignore[no-untyped-def]
        for step in itertools.count():
            yield from microbatches(step, M)

    def deliver(self) -> bool:
        any_ = False
        for stage, machine in enumerate(self.machines):
            for peer, message in machine.messages_to_send():
                any_ = True
                if message.__class__.__name__ in self.lost:
                    self.lost.discard(message.__class__.__name__)
                    continue
                if self.order and isinstance(message, Backward) and stage == 2:
                    self.kept.append(message)
                    continue
                self.machines[int(peer[1:])].receive(message, PeerId(f"p{stage}"), self.now)
        return any_

    def step(self) -> None:
        """Until every stage has taken an inner step."""
        waiting = set(range(len(self.machines)))
        for _ in range(1000):
            moved = self.deliver()
            for stage, machine in enumerate(self.machines):
                if stage in waiting and (work := machine.next_work(self.now)) is not None:
                    moved = True
                    self._do(stage, machine, work, waiting)
                while (event := machine.next_event()) is not None:
                    if isinstance(event, DroppedMicrobatch):
                        self.works[stage].forget(event.key)
            if not waiting:
                return
            if not moved and self.kept:
                message = self.kept.pop(0 if self.order > 0 else -1)
                self.machines[1].receive(message, PeerId("p2"), self.now)
            elif not moved:
                self.now = min(m.get_timer() or 1e9 for m in self.machines)
                for machine in self.machines:
                    machine.handle_timer(self.now)
        raise AssertionError([machine.waits_for for machine in self.machines])

    def _do(self, stage: int, machine: Pipeline, work: Work, waiting: set[int]) -> None:
        done = self.works[stage].compute(work)
        assert not done.refused
        self.sent.append((stage, done))
        if work.do is Do.STEP:
            assert done.counted is not None
            self.optimizers[stage].step()
            self.optimizers[stage].zero_grad()
            machine.stepped()
            waiting.discard(stage)
        elif work.do is Do.BACKWARD or stage == len(self.machines) - 1:
            assert work.key is not None
            machine.counted(work.key, done.payload, done.tokens, done.loss, self.now, done.codec)
        else:
            assert work.key is not None
            machine.forwarded(work.key, done.payload or b"", done.tokens, self.now)


def whole_after(stages: Stages, steps: int) -> Chain:
    chain = Chain(stages.build(7, stage) for stage in range(len(stages)))
    optimizer = torch.optim.SGD(chain.parameters(), lr=0.5)
    for step in range(steps):
        batches = microbatches(step, M)
        total = torch.stack([stages.loss(chain(x), side) for x, side in batches]).sum()
        (total / sum(side.numel() for _, side in batches)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return chain


@pytest.mark.parametrize("count", [2, 3, 4])
def test_through_machines_split_equals_whole(count: int) -> None:
    swarm = Swarm(count)
    for _ in range(4):
        swarm.step()
    ours = Chain(work.replica.module for work in swarm.works).state_dict()
    for name, values in whole_after(swarm.stages, 4).state_dict().items():
        torch.testing.assert_close(ours[name], values, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["Forward", "_WithData"])
def test_a_lost_message_costs_its_microbatch_alone(kind: str) -> None:
    """What was lost is dropped, another takes its place, and training goes on."""
    swarm = Swarm(2)
    swarm.step()
    swarm.lost = {kind}
    swarm.step()
    swarm.step()
    assert all(work.replica.in_flight <= 2 for work in swarm.works)


@pytest.mark.parametrize("order", [1, -1])
def test_what_is_sent_is_the_sum_of_the_true_gradients_in_whatever_order_they_come(order: int) -> None:
    """Lazy error propagation by machines and tensors: stage 1 is told gradients first to last, or last to
    first, where several leave what low rank lost to one heir."""
    swarm = Swarm(3, "rank2", 9, order)
    true, replica = list[Tensor](), swarm.works[1].replica
    backward = replica.backward

    def watched(*given: Any) -> Tensor | None:
        true.append(backward(*given))
        return true[-1]

    replica.backward = watched  # type: ignore[method-assign]
    swarm.step()
    gradients = swarm.crossings.gradients(0)
    done = [one for stage, one in swarm.sent if stage == 1 and one.work.do is Do.BACKWARD]
    sent = [gradients[one.codec].decode(one.payload) for one in done if one.payload is not None]
    assert len(sent) == len(true) == 9
    heirs = [one.work.heir for one in done if one.codec]
    assert len(heirs) == 8
    assert (order < 0) == (len(set(heirs)) < len(heirs))
    total = torch.stack(true).sum(0)
    assert float((torch.stack(sent).sum(0) - total).norm()) < 0.01 * float(total.norm())


def work_of(payload: bytes) -> Work:
    return Work(Do.FORWARD, Key(1, 1), payload, sender=PeerId("before"))


def reason(done: Done) -> str:
    return done.refused.reason if done.refused is not None else ""


def test_what_is_no_use_is_refused_and_counts_nowhere() -> None:
    stages = byte_stages(2)
    stages = Stages(stages.makers, stages.split, stages.loss, stages.tokens, (0, 256))
    crossings = crossings_of(stages, "int8")
    last = StageWork(stages, stages.build(0, 1), 1, crossings)
    size = crossings.forward_bytes(0)
    side = torch.full((crossings.side_bytes // 8,), 256).numpy().tobytes()
    rest = size - len(side)
    wrong = {
        "out of range": side + bytes(rest),
        "not finite": bytes(len(side)) + b"\xff" * rest,
        "wrong size": bytes(size - 1),
        "too large": bytes(len(side)) + crossed(crossings, 1e9),
    }
    for why, payload in wrong.items():
        assert reason(last.compute(work_of(payload))) == why
    assert last.replica.counted.tokens == 0
    for values in 6 * (1.0,):
        assert not last.compute(work_of(bytes(len(side)) + crossed(crossings, values))).refused
    for number in range(5):  # scaled down, but not for ever
        done = last.compute(work_of(bytes(len(side)) + crossed(crossings, 900.0)))
        assert reason(done) == ("too large" if number == 4 else "")
    assert last.replica.counted.microbatches == 10


def crossed(crossings: Crossings, value: float) -> bytes:
    """Activations that are all of one value, as they cross."""
    boundary = crossings.ahead(0)
    return boundary.encode(torch.full(boundary.shape, value)).numpy().tobytes()


def test_a_gradient_that_is_no_use_is_refused_and_its_microbatch_counts_nowhere() -> None:
    stages = byte_stages(2)
    crossings = crossings_of(stages)
    first = StageWork(stages, stages.build(0, 0), 0, crossings, iter(microbatches(0, 9)))
    back, parameters = crossings.back(0), list(first.replica.module.parameters())
    for number, value in enumerate([1.0, math.nan, 1e9, 9e5]):
        key = Key(1, number)
        assert not first.compute(Work(Do.FORWARD, key)).refused
        payload = torch.full(back.shape, value).numpy().tobytes()
        done = first.compute(Work(Do.BACKWARD, key, payload, 32, 1.0, PeerId("behind")))
        assert reason(done) == ["", "not finite", "too large", ""][number]
        assert first.replica.in_flight == 0
        if number == 0:
            one = max(float(p.grad.norm()) for p in parameters if p.grad is not None)
    assert first.replica.counted.microbatches == 2
    assert all(p.grad is None or float(p.grad.norm()) < 200 * one for p in parameters)


def test_microbatches_that_are_too_large_to_cross_are_refused_by_configuration() -> None:
    makers = [lambda: torch.nn.Linear(8, 1 << 14), lambda: torch.nn.Linear(1 << 14, 8)]
    stages = Stages(makers, lambda batch: batch, lambda output, side: output.sum())
    side = torch.zeros(4096, 1, dtype=torch.long)
    Crossings.of(stages, torch.zeros(4000, 8), side[:4000], "fp32", "int8")
    with pytest.raises(ConfigError, match=r"pipeline: sequences: 4100 .* 256 MiB is the most"):
        Crossings.of(stages, torch.zeros(4100, 8), side, "fp32", "int8")


@pytest.mark.parametrize("part", [slice(0, 1), (slice(None), slice(0, 8))])
def test_a_batch_of_another_shape_is_told_where_it_is_read(part: Any) -> None:
    """The last of a data loader is shorter; a tokenizer's sequences are as long as their texts."""
    stages = byte_stages(2)
    whole, shorter = microbatches(0, 2)
    batches = iter([whole, (shorter[0][part], shorter[1][part])])
    first = StageWork(stages, stages.build(0, 0), 0, crossings_of(stages), batches)
    assert not first.compute(Work(Do.FORWARD, Key(1, 1))).refused
    with pytest.raises(ConfigError, match="all microbatches must have one shape: pad, or drop the last"):
        first.compute(Work(Do.FORWARD, Key(1, 2)))
    with pytest.raises(ConfigError, match="batches: have run out"):
        first.compute(Work(Do.FORWARD, Key(1, 3)))


def test_a_stage_that_makes_nan_refuses_itself_and_charges_nobody() -> None:
    stages = byte_stages(2)
    crossings = crossings_of(stages)
    first = StageWork(stages, stages.build(0, 0), 0, crossings, iter(microbatches(0, 9)))
    last = StageWork(stages, stages.build(0, 1), 1, crossings)
    payload = first.compute(Work(Do.FORWARD, Key(1, 1))).payload
    assert payload is not None
    assert not last.compute(Work(Do.FORWARD, Key(1, 1), bytes(payload), sender=PeerId("p0"))).refused
    with torch.no_grad():
        next(last.replica.module.parameters()).fill_(math.nan)
    done = last.compute(Work(Do.FORWARD, Key(1, 2), bytes(payload), sender=PeerId("p0")))
    assert isinstance(done.refused, ValueError)
    assert last.is_between_steps
    assert all(one.grad is None for one in last.replica.module.parameters())
    machine = Pipeline(Place(PeerId("p1"), 1, 1, 2), Sizes(M, 2, 4, len(payload), [], b"", 60.0))
    machine._transit.held[Key(1, 2)] = SimpleNamespace(phase=Passage.COMPUTING, sender=PeerId("p0"))  # type: ignore[assignment]
    machine._transit.drop = lambda key, why: None  # type: ignore[method-assign]
    machine.failed(Key(1, 2), done.refused)
    assert machine.next_event() is None
