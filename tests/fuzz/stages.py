"""Replicas of stages in one thread on virtual time: real nodes and real computing."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from p2p_co2.node.pipeline_node import PipelineNode
from p2p_co2.protocol.pipeline import Key, Pipeline, Place, Sizes, Work
from p2p_co2.protocol.pipeline.machine import Do
from p2p_co2.recipes.stages import Stages
from p2p_co2.telemetry.events import Event, MessageRefused
from p2p_co2.trainer.stages.work import Crossings, StageWork
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.messages_pb2 import PeerRecord, Status
from tests.fuzz.world import World, make_identity

CLASSES, CONTEXT, WIDTH, SEQUENCES = 16, 40, 256, 2
MICROBATCHES = 4
COMPUTE_S, LOOK_S = 0.1, 0.05


def loss_of(output: Tensor, side: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), side.flatten(), reduction="sum")


def stages_of(count: int) -> Stages:
    """A table, layers, and a head; what crosses is larger than one unit of a piece."""
    makers: list[Callable[[], nn.Module]] = [lambda: nn.Embedding(CLASSES, WIDTH)]
    makers += [lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())] * (count - 2)
    makers.append(lambda: nn.Linear(WIDTH, CLASSES))
    return Stages(makers, lambda batch: batch, loss_of, side_range=(0, CLASSES))


def batches(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        inputs = torch.randint(CLASSES, (SEQUENCES, CONTEXT), generator=generator)
        yield inputs, inputs.roll(1, 1)


class Volunteer:
    """One replica: its node, and its training thread, which takes ``COMPUTE_S`` for each piece of work."""

    def __init__(self, world: StageWorld, name: str, stage: int) -> None:
        self.identity, self.stage = make_identity(name), stage
        self.me = self.identity.peer_id
        self.events: list[Event] = []
        self.counted: Counter[Key] = Counter()
        self.steps = 0
        last, crossings = stage == world.count - 1, world.crossings
        sizes = Sizes(
            MICROBATCHES, 3, 6,
            crossings.forward_bytes(stage - 1) if stage else 0,
            [] if last else crossings.backward_bytes(stage), crossings.digest(), 20.0,
        )  # fmt: skip
        self.place = Place(self.me, sum(name.encode()) << 32, stage, world.count)
        self.environment = world.environment(self.identity)
        self.node = PipelineNode(
            self.environment, self.place, sizes, partial(world.listed, self.me), self._status,
            self.events.append,
        )  # fmt: skip
        module = world.stages.build(0, stage)
        self.work = StageWork(world.stages, module, stage, crossings, batches(1) if stage == 0 else None)
        self.optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def _status(self) -> Status:
        return Status(phase=Status.TRAINING, position=self.steps / 100, process=self.place.process >> 32)

    @property
    def refused(self) -> list[MessageRefused]:
        return [event for event in self.events if isinstance(event, MessageRefused)]

    async def train(self) -> None:
        """As ``StagePeer`` does, without outer rounds."""
        self.node.exchange(None)
        while True:
            while self.node.handed.work.empty():  # noqa: ASYNC110 - a thread would block on it
                await asyncio.sleep(LOOK_S)
            work = self.node.handed.work.get()
            while not self.node.handed.dropped.empty():
                self.work.forget(self.node.handed.dropped.get())
            await asyncio.sleep(COMPUTE_S)
            self.node.exchange(self._result(work))

    def _result(self, work: Work) -> Callable[[Pipeline, float], None]:
        done = self.work.compute(work)
        if work.key is None:
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.steps += 1
            return lambda machine, now: machine.stepped()
        key = work.key
        if done.refused:
            return lambda machine, now: machine.failed(key, done.refused)
        if work.do is Do.BACKWARD or self.stage == self.place.stages - 1:
            self.counted[key] += 1
            said = done.payload, done.tokens, done.loss
            return lambda machine, now: machine.counted(key, *said, now, done.codec)
        return lambda machine, now: machine.forwarded(key, done.payload or b"", done.tokens, now)


class StageWorld(World):
    """``replicas``: of each stage. Make it inside a ``VirtualLoop``."""

    def __init__(self, *replicas: int) -> None:
        super().__init__()
        self.count, self.stages = len(replicas), stages_of(len(replicas))
        self.crossings = Crossings.of(self.stages, *next(batches(0)), "int8", "int8", "int4")
        self.volunteers = [
            Volunteer(self, f"s{stage} {number}", stage)
            for stage, count in enumerate(replicas)
            for number in range(count)
        ]
        self._running: list[asyncio.Task[None]] = []

    def listed(self, me: PeerId, stage: int) -> list[PeerRecord]:
        """What the DHT says of the others."""
        others = [one for one in self.volunteers if one.stage == stage and one.me != me]
        return [PeerRecord(peer=one.me, stage=stage, tokens_per_s=100.0) for one in others]

    def start(self) -> None:
        for one in self.volunteers:
            self._running += asyncio.create_task(one.node.run()), asyncio.create_task(one.train())

    async def close(self) -> None:
        """Raises what ended a node or a training thread."""
        ended = [task for task in self._running if task.done()]
        for task in self._running[1::2]:
            task.cancel()
        for one in self.volunteers:
            one.node.stop()
        await asyncio.gather(*ended)
        await asyncio.gather(*self._running[::2])
        await super().close()

    @property
    def members(self) -> Sequence[Volunteer]:
        return self.volunteers

    async def pass_time(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def done(self) -> list[int]:
        return [one.counted.total() for one in self.volunteers]

    def check(self) -> None:
        assert not any(task.done() for task in self._running)
        for one in self.volunteers:
            assert one.node.life.bug is None, one.node.life.bug
            due_at = one.node.machine.get_timer()
            assert due_at is None or due_at > asyncio.get_running_loop().time() - 1.0
            for holder in (one.node.router, one.node.machine, one.node.membership):
                for name, (held, most) in holder.held().items():
                    assert held <= most, name

    def check_agreed(self) -> None:
        """Each microbatch is counted once in a stage, and only where the stages behind have counted it."""
        by_stage = [Counter[Key]() for _ in range(self.count)]
        for one in self.volunteers:
            by_stage[one.stage] += one.counted
        for stage, counted in enumerate(by_stage):
            assert set(counted.values()) <= {1}
            assert not stage or set(by_stage[stage - 1]) <= set(counted)
