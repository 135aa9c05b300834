"""Replicas of stages in one thread on virtual time: real nodes and real computing, and a tape that decides
which of their messages come back wrong, and from whom.

What must hold, whatever the tape says: no node ends, no training thread raises, what is held stays within its
bounds, and refusals name those alone who sent what was refused. If a stranger alone lies, each microbatch
also counts once, and training goes on.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, partial

import torch
from torch import Tensor, nn

from p2p_co2.node.pipeline_node import PipelineNode
from p2p_co2.protocol.pipeline import Key, Pipeline, Place, Sizes, Work
from p2p_co2.protocol.pipeline.machine import Do
from p2p_co2.recipes.stages import Stages
from p2p_co2.telemetry.events import Event, MessageRefused
from p2p_co2.trainer.stages.work import Crossings, StageWork
from p2p_co2.wire.envelope import head_of
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.kinds import KINDS, Machine
from p2p_co2.wire.messages_pb2 import (
    Declined,
    Dropped,
    Envelope,
    MicrobatchKey,
    PeerRecord,
    Ping,
    Status,
)
from tests.envelopes import enveloped
from tests.fuzz.mutate import Mutator, Tape
from tests.fuzz.world import RUN, World, make_identity, run_virtual

KINDS_BETWEEN = sorted(name for name, kind in KINDS.items() if kind.machine is Machine.PIPELINE)
STRANGER = make_identity("mallory").peer_id
CLASSES, CONTEXT, WIDTH, SEQUENCES = 16, 40, 256, 2
MICROBATCHES = 4
COMPUTE_S, LOOK_S = 0.1, 0.05
PLAY_S, LEAST_S = 5.0, 6.0
MOST_REPEATS = 40


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

    def check(self) -> None:
        """Raises ``AssertionError``: nothing ended, and all that is held has its bound."""
        assert not any(task.done() for task in self._running)
        for one in self.volunteers:
            assert one.node.life.bug is None, one.node.life.bug
            for holder in (one.node.router, one.node.machine, one.node.membership):
                for name, (held, most) in holder.held().items():
                    assert held <= most, name

    def check_once(self) -> None:
        """Each microbatch is counted once in a stage, and only where the stages behind have counted it."""
        by_stage = [Counter[Key]() for _ in range(self.count)]
        for one in self.volunteers:
            by_stage[one.stage] += one.counted
        for stage, counted in enumerate(by_stage):
            assert set(counted.values()) <= {1}
            assert not stage or set(by_stage[stage - 1]) <= set(counted)

    def greet(self, stranger: PeerId, process: int = 1) -> bytes:
        """What makes a stranger live in others' eyes."""
        status = Status(phase=Status.TRAINING, process=process)
        return enveloped(Ping(nonce=1, sent_at=1.0, status=status), head_of(RUN.digest()))


class StageGame:
    """``insiders``: wrong messages may come in the name of the peer that sent the right one; ``losses``:
    messages may be lost; ``kind``: wrong messages are made from right ones of that kind alone."""

    def __init__(self, data: bytes, *, insiders: bool, losses: bool = False, kind: str = "") -> None:
        self._tape = Tape(data)
        self._insiders, self._losses, self._kind = insiders, losses, kind
        self._is_lossy = losses
        self._mutator = Mutator(self._tape)
        self._examples, self._next = examples_between(), self._tape.choose(16)
        self.tried: Counter[str] = Counter()
        """Wrong messages, by the kind that they were made from."""
        self.refused: Counter[tuple[str, str, str]] = Counter()
        """By (sender, kind, reason), at all."""
        self._liars = {STRANGER}

    def play(self) -> None:
        """Raises ``AssertionError`` for a law that was broken, and whatever a node or a thread raises."""
        run_virtual(self._play())

    async def _play(self) -> None:
        self.world = world = StageWorld(2, 2, 1)
        self._identities = {one.me: one.identity for one in world.volunteers}
        self._identities[STRANGER] = make_identity("mallory")
        world.tap = self._tap
        world.start()
        await asyncio.sleep(0)
        for one in world.volunteers:
            await world.deliver(STRANGER, one.me, world.greet(STRANGER))
        ends_at = asyncio.get_running_loop().time() + PLAY_S
        while not self._tape.over and asyncio.get_running_loop().time() < ends_at:  # noqa: ASYNC110
            await asyncio.sleep(0.5)
        self._insiders, stood = False, [one.counted.total() for one in world.volunteers]
        self._losses = False
        await asyncio.sleep(LEAST_S)
        world.check()
        for one in world.volunteers:
            self.refused.update(one.node.router.refusals)
        assert {sender for sender, _, _ in self.refused} <= self._liars, self.refused
        if self._liars == {STRANGER}:
            world.check_once()
            went_on = [
                one.counted.total() - before for one, before in zip(world.volunteers, stood, strict=True)
            ]
            assert self._is_lossy or min(went_on) >= MICROBATCHES, went_on
        await world.close()

    def _tap(self, sender: PeerId, receiver: PeerId, data: bytes) -> bool:
        kind = self._mutator.saw(data)
        self._next -= 1
        if self._tape.over or self._next > 0:
            return True
        self._next = self._tape.choose(24)
        if self._losses and self._tape.choose(4) == 0:
            return False
        if self._kind or self._tape.choose(4) == 0:
            kind = self._kind or KINDS_BETWEEN[self._tape.choose(len(KINDS_BETWEEN))]
            some = self._examples[kind]
            data = of_microbatch(some[self._tape.choose(len(some))], data)
        source = sender if self._insiders and self._tape.choose(2) else STRANGER
        self._liars.add(source)
        times = MOST_REPEATS if self._tape.choose(16) == 0 else 1
        self.tried[kind] += times
        wrong = self._mutator.mutate(data, self._identities[source])
        for _ in range(times):
            self.world.put(source, receiver, wrong)
        return True


def of_microbatch(data: bytes, seen: bytes) -> bytes:
    """``data`` about the microbatch that ``seen`` is about, if both are about one."""
    made, known = Envelope.FromString(data), Envelope.FromString(seen)
    body, other = (getattr(one, one.WhichOneof("body") or "ping") for one in (made, known))
    if hasattr(body, "key") and isinstance(getattr(other, "key", None), MicrobatchKey):
        body.key.CopyFrom(other.key)
    return made.SerializeToString()


@cache
def examples_between() -> dict[str, tuple[bytes, ...]]:
    """Right messages between stages, by kind."""
    found: dict[str, list[bytes]] = {}

    def keep(sender: PeerId, receiver: PeerId, data: bytes) -> bool:
        found.setdefault(Envelope.FromString(data).WhichOneof("body") or "", []).append(data)
        return True

    async def work() -> None:
        world = StageWorld(1, 2, 1)
        world.tap = keep
        world.start()
        await asyncio.sleep(6.0)
        await world.close()

    run_virtual(work())
    key = MicrobatchKey(owner=sum(b"s0 0") << 32, number=1)  # the first one
    for message in (Declined(key=key, reason="no room"), Dropped(key=key, reason="late")):  # seldom
        data = enveloped(message, head_of(RUN.digest()))
        found.setdefault(Envelope.FromString(data).WhichOneof("body") or "", []).append(data)
    return {kind: tuple(found[kind][:: max(1, len(found[kind]) // 8)]) for kind in KINDS_BETWEEN}
