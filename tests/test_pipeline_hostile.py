"""Replicas that lie, among real nodes on virtual time: named, made to pay, shut out, and the others go on."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from p2p_co2.node.router import USELESS_PAYLOAD_UNITS, useless_units
from p2p_co2.protocol.pipeline import Key, Work
from p2p_co2.protocol.pipeline.machine import Do
from p2p_co2.protocol.pipeline.neighbours import NeighbourPeer
from p2p_co2.trainer.stages.work import Done
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.messages_pb2 import Dropped, Envelope
from tests.fuzz.stages import MICROBATCHES, StageWorld, Volunteer
from tests.fuzz.world import run_virtual

Scene = Callable[[StageWorld], Awaitable[None]]


def play(scene: Scene, *replicas: int) -> None:
    """A scene in a world whose peers have met and train."""

    async def work() -> None:
        world = StageWorld(*replicas)
        world.start()
        await asyncio.sleep(3.0)
        await scene(world)
        world.check()
        await world.close()

    run_virtual(work())


def refused(victim: Volunteer) -> Counter[tuple[str, str]]:
    """How often what was refused, by (sender, reason)."""
    counted: Counter[tuple[str, str]] = Counter()
    for (sender, _, reason), times in victim.node.router.refusals.items():
        counted[sender, reason] += times
    return counted


def lie(volunteer: Volunteer) -> None:
    """Have it hand on bytes that are no activations and no gradients."""
    compute = volunteer.work.compute

    def computed(work: Work) -> Done:
        done = compute(work)
        size = 0 if done.payload is None else memoryview(done.payload).nbytes
        return replace(done, payload=b"\xff" * size) if size else done

    volunteer.work.compute = computed  # type: ignore[method-assign]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_one_whose_payloads_are_no_use_is_named_and_shut_out_and_the_others_go_on(stage: int) -> None:
    async def scene(world: StageWorld) -> None:
        liar = next(one for one in world.volunteers if one.stage == stage)
        honest = [one for one in world.volunteers if one is not liar]
        lie(liar)
        await asyncio.sleep(15.0)
        named = sum((refused(one) for one in honest), Counter[tuple[str, str]]())
        assert {sender for sender, _ in named} == {liar.me}
        assert named[liar.me, "not finite"] + named[liar.me, "out of range"] > 3
        assert named[liar.me, "shut out"]
        stood = {one.me: one.counted.total() for one in honest}
        await asyncio.sleep(8.0)
        made = {one.me: one.counted.total() - stood[one.me] for one in honest if one.stage == 0}
        assert min(made.values()) >= 2 * MICROBATCHES, made

    play(scene, *(2 if stage == other else 1 for other in range(3)))


def test_one_that_answers_nothing_holds_up_an_inner_step_a_round() -> None:
    async def scene(world: StageWorld) -> None:
        silent = next(one for one in world.volunteers if one.stage == 1)
        silent.node.router.take = lambda sender, data: 0.0  # type: ignore[method-assign]
        silent.work.compute = Done  # type: ignore[method-assign]
        await asyncio.sleep(12.0)
        first = world.volunteers[0]
        stood = first.counted.total()
        await asyncio.sleep(12.0)
        assert first.counted.total() > stood + 4 * MICROBATCHES

    play(scene, 1, 2, 1)


def test_one_that_drops_all_at_once_gets_no_more_than_a_window() -> None:
    """It would always have the most room: nothing else came to be counted."""

    async def scene(world: StageWorld) -> None:
        first, liar = world.volunteers[:2]
        machine = liar.node.machine

        def drop(message: Any, key: Key, sender: PeerId, peer: NeighbourPeer, now: float) -> bool:
            machine._transit.out.append((sender, Dropped(key=key.on_wire())))
            peer.granted += 1
            machine._transit.peers.introduce(sender)
            return True

        machine._transit.take_forward = drop  # type: ignore[method-assign]
        stood = first.counted.total()
        await asyncio.sleep(12.0)
        assert first.counted.total() > stood + 4 * MICROBATCHES

    play(scene, 1, 2, 1)


def test_bulk_that_was_asked_for_is_free_and_other_bulk_is_paid_for() -> None:
    """A piece that comes again, one for nobody, and one that is no use."""

    async def scene(world: StageWorld) -> None:
        first, second = world.volunteers
        charged: list[float] = []
        quotas = second.environment.quotas
        charge = quotas.charge

        def note(sender: str, units: float, now: float) -> float:
            charged.append(units)
            return charge(sender, units, now)  # type: ignore[arg-type]

        quotas.charge = note  # type: ignore[method-assign, assignment]
        sizes: list[int] = []

        def twice(sender: str, receiver: str, data: bytes) -> bool:
            if Envelope.FromString(data).WhichOneof("body") == "forward":
                sizes.append(len(data))
                world.put(first.me, second.me, data)
            return True

        world.tap = twice
        await asyncio.sleep(3.0)
        assert len(sizes) > 3
        bulk = [units for units in charged if units == 0.0 or units == useless_units(sizes[0])]
        assert abs(bulk.count(0.0) - len(bulk) / 2) <= 1
        assert second.node.router.refusals == Counter()
        lie(first)
        await asyncio.sleep(2.0)
        assert USELESS_PAYLOAD_UNITS in charged

    play(scene, 1, 1)


def test_the_end_waits_for_those_before_as_long_as_something_comes_of_it() -> None:
    """Whose training thread hangs says for ever that it trains."""

    async def scene(world: StageWorld) -> None:
        first, second = world.volunteers
        second.node.finish(at_once=False)
        await asyncio.sleep(45.0)
        assert not second.node.handed.is_over
        stood = second.counted.total()
        assert stood > 45
        first.node.exchange = lambda result: None  # type: ignore[method-assign]
        await asyncio.sleep(42.0)
        assert second.node.handed.is_over

    play(scene, 1, 1)


def test_what_was_dropped_is_told_before_the_step_that_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The training thread looks as soon as it has work: a step with graphs in flight would end it."""

    async def scene(world: StageWorld) -> None:
        first, second = world.volunteers
        node, machine = first.node, first.node.machine
        second.node.exchange = lambda result: None  # type: ignore[method-assign]
        await asyncio.sleep(2.0)
        assert machine.waits_for == "gradients from stage 1"
        assert machine._counted
        told: list[int] = []
        monkeypatch.setattr(node, "report", lambda kind, **fields: told.append(node.handed.work.qsize()))
        node.finish(at_once=True)
        node._link_lost(second.me, "", "gone")
        assert node.handed.work.get_nowait().do is Do.STEP
        assert told
        assert not any(told)

    play(scene, 1, 1)
