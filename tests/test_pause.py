"""A peer that rests: the others go on without waiting, it keeps its place, and takes part again at once."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import chain, repeat

import pytest

from p2p_co2.config import ClockConfig
from p2p_co2.node.progress import Where
from p2p_co2.protocol.rounds.bounds import AHEAD_AT_MOST
from p2p_co2.telemetry.events import (
    Paused,
    Progress,
    Resumed,
    RoundAborted,
    RoundCommitted,
    SendSkipped,
    Warned,
)
from p2p_co2.trainer.synchroniser import Source
from p2p_co2.wire.messages_pb2 import Status
from tests.fuzz.world import STEP_S, Trainer, World, run_virtual
from tests.trainer_bench import Bench


async def train(world: World, resting: Trainer, seconds: float) -> None:
    """Everybody but one."""
    for _ in range(int(seconds / STEP_S)):
        for trainer in world.trainers:
            if trainer is not resting:
                trainer.step()
        await asyncio.sleep(STEP_S)


def show(trainer: Trainer, phase: Status.Phase) -> None:
    trainer.node.show(replace(trainer.node.state.local, phase=phase))


def commits(trainer: Trainer) -> int:
    return sum(isinstance(event, RoundCommitted) for event in trainer.events)


def test_the_others_do_not_wait_and_the_peer_goes_on_where_they_are() -> None:
    async def work() -> None:
        world = World("a", "b", "c")
        world.start()
        await asyncio.sleep(1.5)
        await world.train(5)
        *others, resting = world.trainers
        before = min(world.versions()[0])
        show(resting, Status.PAUSED)
        await asyncio.sleep(0.5)
        held, seen = resting.node.agreed[0].version, commits(resting)
        fetched = resting.node.router.down_bytes
        await train(world, resting, 20)
        for trainer in others:
            assert min(agreed.version for agreed in trainer.node.agreed) >= before + 19  # a round each second
            assert len(trainer.node.membership.live) == 2  # it keeps its place
            assert not [event for event in trainer.events if isinstance(event, RoundAborted | SendSkipped)]
        assert resting.node.agreed[0].version <= held + 1
        assert commits(resting) <= seen + 2
        assert resting.node.router.down_bytes - fetched < 50_000  # heartbeats and decisions

        show(resting, Status.TRAINING)
        await world.train(4)
        assert len({tuple(versions) for versions in world.versions()}) == 1
        last = [event for event in others[0].events if isinstance(event, RoundCommitted)][-1]
        assert last.group_size == last.contributors == 3
        await world.close()

    run_virtual(work())


def test_many_that_rest_do_not_hold_back_a_newcomer_nor_serve_it() -> None:
    """Two train, three rest at an old version: the newcomer goes where the two are, and by their bytes."""

    async def work() -> None:
        world = World("a", "b", "c", "d", "e")
        world.start()
        await asyncio.sleep(1.5)
        await world.train(5)
        first, second, *resting = world.trainers
        for trainer in resting:
            show(trainer, Status.PAUSED)
        await asyncio.sleep(0.5)
        for _ in range(int(8 / STEP_S)):
            first.step()
            second.step()
            await asyncio.sleep(STEP_S)
        served_before = [trainer.node.links.up_bytes for trainer in resting]
        world.add("late")
        late = world.trainers[-1]
        show(late, Status.JOINING)
        world.start()
        await asyncio.sleep(4)
        newest = min(agreed.version for agreed in first.node.agreed)
        assert newest > max(agreed.version for agreed in resting[0].node.agreed) + AHEAD_AT_MOST
        assert late.node.progress.joining.where is Where.ABREAST
        assert [agreed.version for agreed in late.node.agreed] == [
            agreed.version for agreed in first.node.agreed
        ]
        assert not late.refused
        for trainer, before in zip(resting, served_before, strict=True):
            assert trainer.node.links.up_bytes - before < 10_000  # heartbeats; a state has 17 kB
        await world.close()

    run_virtual(work())


def test_who_rests_gives_what_nobody_else_has() -> None:
    async def work() -> None:
        world = World("a", "b")
        world.start()
        await asyncio.sleep(1.5)
        await world.train(5)
        for trainer in world.trainers:
            show(trainer, Status.PAUSED)
        world.add("late")
        show(world.trainers[-1], Status.JOINING)
        world.start()
        await asyncio.sleep(4)
        assert min(world.versions()[-1]) > 1
        assert world.trainers[-1].node.progress.joining.where is Where.ABREAST
        await world.close()

    run_virtual(work())


def test_resting_says_so_and_its_time_is_in_no_figure() -> None:
    async def work() -> None:
        world = World("a")
        world.start()
        await asyncio.sleep(0)
        (trainer,) = world.trainers
        trainer.step()
        reasons = chain(["paused by hand"] * 3, ["its owner is using the GPU"] * 2, repeat(""))
        trainer.sync.rest(lambda: next(reasons), beat_s=0.02)
        said = [event for event in trainer.events if isinstance(event, Paused | Resumed)]
        assert [type(event) for event in said] == [Paused, Paused, Resumed]
        assert isinstance(said[0], Paused)
        assert said[0].reason == "paused by hand"
        assert isinstance(said[1], Paused)
        assert said[1].reason == "its owner is using the GPU"
        assert isinstance(said[2], Resumed)
        assert said[2].paused_s >= 0.04
        phases = [event.phase for event in trainer.events if isinstance(event, Progress)]
        assert phases[-2:] == ["paused", "training"]
        trainer.step()
        trainer.sync.report()
        last = [event for event in trainer.events if isinstance(event, Progress)][-1]
        assert last.wall_s + 0.04 < said[2].paused_s + last.train_s + last.exposed_s + 0.04 + 0.02
        await world.close()

    run_virtual(work())


def test_nothing_happens_without_a_reason() -> None:
    async def work() -> None:
        world = World("a")
        (trainer,) = world.trainers
        count = len(trainer.events)
        trainer.sync.rest(lambda: "")
        assert len(trainer.events) == count
        world.start()
        await asyncio.sleep(0)
        await world.close()

    run_virtual(work())


@pytest.mark.parametrize(("names", "gap_s"), [("abc", 0.1), ("abcd", 0.3)])
def test_who_wake_one_after_the_other_find_the_one_that_went_on(names: str, gap_s: float) -> None:
    """It answered its own READY with a version that no longer seemed possible once the second woke, and ended
    for refusing itself."""

    async def work() -> None:
        world = World(*names)
        world.start()
        await asyncio.sleep(1.5)
        await world.train(5)
        _, *others = world.trainers
        for trainer in others:
            show(trainer, Status.PAUSED)
        await asyncio.sleep(0.5)
        await _train_those_awake(world, 12.0)
        for trainer in others:
            show(trainer, Status.TRAINING)
            await _train_those_awake(world, gap_s)
        for _ in range(20):
            await _train_those_awake(world, 1.0)
            if all(
                len({trainer.node.agreed[fragment] for trainer in world.trainers}) == 1 for fragment in (0, 1)
            ):
                break
        else:
            raise AssertionError(world.versions())
        await world.close()

    run_virtual(work())


async def _train_those_awake(world: World, seconds: float) -> None:
    for _ in range(int(seconds / STEP_S)):
        for trainer in world.trainers:
            if trainer.node.state.local.phase == Status.TRAINING:
                trainer.step()
        await asyncio.sleep(STEP_S)


def test_rest_ends_as_the_run_does() -> None:
    now_s = [0.0]
    bench = Bench(clock=ClockConfig(mode="time", round_s=1.0, rounds=3), source=Source(lambda: now_s[0]))

    def reason() -> str:
        now_s[0] += 0.5
        assert now_s[0] < 10.0, "it rests for ever"
        assert bench.sync.position >= now_s[0] - 1.0, "it does not say where the run is"
        return "paused by hand"

    bench.sync.rest(reason, beat_s=0.0)
    assert 1.5 < bench.sync.position < 3.0  # a moment before it, so that the others see it
    (told,) = bench.wire.seen(Warned)
    assert "about to end: this peer rests no longer" in told["text"]
