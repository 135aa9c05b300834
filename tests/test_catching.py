"""node.catching: by whose word a peer knows where the swarm is."""

from __future__ import annotations

import asyncio

from p2p_co2.wire.messages_pb2 import Status
from tests.fuzz.world import World, run_virtual


def test_many_that_join_at_once_do_not_take_each_other_for_the_swarm() -> None:
    """Two train and six come, all at version 0: each of them ends where the two are."""

    async def work() -> None:
        world = World("a", "b")
        world.start()
        await asyncio.sleep(1.5)
        await world.train(6)
        for number in range(6):
            world.add(f"newcomer-{number}")
            world.trainers[-1].sync.phase = Status.JOINING
            world.trainers[-1].sync.report()
        world.start()
        await asyncio.sleep(4)
        assert min(world.versions()[0]) >= 4
        assert len(set(world.versions())) == 1
        for newcomer in world.trainers[2:]:
            assert newcomer.node.standing.abreast
            assert not newcomer.refused
        await world.close()

    run_virtual(work())
