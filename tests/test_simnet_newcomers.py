"""Simulated peers that join while nobody can be heard: they get the swarm's
state as long as anybody has it, and make none of their own."""

from __future__ import annotations

import asyncio

import pytest

from p2p_co2.config import ClockConfig, RunConfig
from p2p_co2.node.progress import WAITS_FOR_THEIR_STATE
from p2p_co2.protocol.wire.messages_pb2 import PeerRecord
from p2p_co2.simnet import EventLog, Settings, Swarm, rendezvous, training
from p2p_co2.telemetry.events import Event, FragmentSent, Warned

PEERS, ROUND_S, ROUNDS = 5, 10.0, 18
STARTS_AT = 110.0
"""Too late to replay all rounds that were made."""


def swarm_of(block_bytes: float, seed: int) -> Swarm:
    """A state is 64 times as large as what is sent of it."""
    run = RunConfig(
        name="newcomers", fragments=2, group_size=16,
        clock=ClockConfig(mode="time", round_s=ROUND_S, rounds=ROUNDS),
    )  # fmt: skip
    settings = Settings(
        run=run, peers=PEERS, seed=seed, profile="transatlantic", blocks=(16, 16),
        real_bytes_per_block=block_bytes, state_factor=64,
    )  # fmt: skip
    return Swarm(settings, EventLog(digests=False))


@pytest.mark.parametrize("cut_s", [20.0, 45.0])
def test_a_newcomer_that_loses_all_while_it_loads_waits_for_them(cut_s: float) -> None:
    """It left after half a minute, though the others were only out of reach."""
    swarm, told = swarm_of(1e4, 3), list[Warned]()

    def note(event: Event) -> None:
        if isinstance(event, Warned) and event.text == WAITS_FOR_THEIR_STATE:
            told.append(event)

    swarm.log.readers.append(note)
    swarm.world.call_at(10.0, swarm.kill, 0, True)
    swarm.world.call_at(STARTS_AT, swarm.start, 0, False)
    sides = {peer: int(index > 0) for index, peer in enumerate(swarm.peer_ids())}
    swarm.world.call_at(STARTS_AT + 3.0, swarm.split, sides)  # it loads by then
    swarm.world.call_at(STARTS_AT + 3.0 + cut_s, swarm.split, {})
    result = swarm.run()
    assert result.violations == []
    assert [event.peer for event in told] == [swarm.peer_ids()[0]]
    assert len(set(result.digests.values())) == 1
    assert len(result.digests) == PEERS


def test_a_newcomer_waits_until_it_is_concluded_what_the_first_that_it_hears_means(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It had found itself alone while the DHT was looked up; in the moment between the first answer and what
    follows from it that was taken for where the swarm is, and it offered work on the start state."""
    look_up = rendezvous.Doorway.find_peers

    async def find_slowly(self: rendezvous.Doorway) -> list[PeerRecord]:
        await asyncio.sleep(1.0)
        return await look_up(self)

    monkeypatch.setattr(rendezvous.Doorway, "find_peers", find_slowly)
    monkeypatch.setattr(training, "LOOK_EVERY_S", 1e-3)
    for seed in range(6):
        run = RunConfig(name="newcomer", fragments=2, clock=ClockConfig(mode="time", round_s=4.0, rounds=20))
        settings = Settings(run=run, peers=2, seed=seed, profile="home-mix", start_spread_s=60.0)
        swarm = Swarm(settings, EventLog(digests=False))
        begun: dict[str, tuple[float, int]] = {}

        def note(event: Event, swarm: Swarm = swarm, begun: dict[str, tuple[float, int]] = begun) -> None:
            if isinstance(event, FragmentSent):
                begun.setdefault(event.peer, (swarm.world.now, event.round))

        swarm.log.readers.append(note)
        swarm.run()
        (first_at, _), (came_at, round_) = sorted(begun.values())
        assert round_ > 1 or came_at - first_at < 8.0


def test_a_newcomer_goes_on_loading_while_one_fragment_after_the_other_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It left after ten minutes with five fragments of six (storm 2104 of ``benchmarks/ends.py wide``)."""
    bound_s = 100.0
    monkeypatch.setattr(training, "CATCH_UP_BOUND_S", bound_s)
    run = RunConfig(name="newcomers", fragments=4, clock=ClockConfig(mode="time", round_s=10.0, rounds=40))
    settings = Settings(
        run=run, peers=3, seed=1, profile="4g", blocks=(16,) * 4, real_bytes_per_block=1e4, state_factor=64
    )  # fmt: skip
    swarm = Swarm(settings, EventLog(digests=False))
    swarm.world.call_at(5.0, swarm.kill, 2, True)
    swarm.world.call_at(160.0, swarm.start, 2, False)
    result = swarm.run()
    assert result.violations == []
    assert result.lacking == []
    (joined_s,) = result.recoveries_s
    assert 2 * bound_s < joined_s < 4 * bound_s
