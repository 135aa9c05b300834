"""Catching up beside donors that are slow, silent or gone, over links that lose and double messages: it ends
in the right bytes or a failure."""

from __future__ import annotations

import random
from itertools import count

import pytest

from p2p_co2.catchup import (
    CatchUpMessage,
    DonorRefused,
    Fetched,
    FetchFailed,
    Shape,
)
from p2p_co2.catchup.source import SLOW_CAP_S
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.messages_pb2 import Chunk, Fetch, Manifest
from tests.catchup_world import D1, D2, D3, DONORS, LARGE, LATE, SMALL, World, lying, zero


def test_a_silent_donor_is_replaced_and_a_silent_swarm_ends_the_wait() -> None:
    world = World(donors=2)
    world.tamper = lambda sender, message: None if sender == D1 else message
    world.want(fragment=0)
    world.run()
    assert world.fetched().donors == (D2,)

    world = World(donors=2)
    world.tamper = lambda sender, message: None if sender != LATE else message
    world.want(fragment=0)
    world.run()
    assert isinstance(world.events[0], FetchFailed)
    assert world.now <= 10.0 + 2 * SLOW_CAP_S


def test_a_donor_that_falls_silent_in_the_middle_gives_its_chunks_to_the_others() -> None:
    world = World(donors=3, rate=2e6)
    given = count()
    world.tamper = lambda sender, message: (
        None if sender == D1 and isinstance(message, Chunk) and next(given) >= 4 else message
    )
    world.want()
    world.run()
    event = world.fetched()
    assert event.duration_s < 1.6 * LARGE / (2 * 2e6) + 2.0
    assert event.chunks_wasted <= 2


def test_a_donor_much_slower_than_the_others_is_dropped_and_its_chunks_given_away() -> None:
    world = World(donors=3)
    world.rates |= {D1: 20e3, D2: 4e6, D3: 4e6}  # 26 s a chunk beside 0.13 s
    world.want()
    world.run()
    assert world.fetched().duration_s < LARGE / 8e6 + 3.0
    assert len(world.chunks_from(D1)) <= 1


def test_a_swarm_that_is_slow_throughout_is_waited_for() -> None:
    world = World(donors=2, rate=60e3)  # 9 s a chunk
    world.want(fragment=0)
    world.run()
    assert world.fetched().version == 7


def test_a_donor_that_leaves_is_replaced_at_once() -> None:
    world = World(donors=2, rate=2e6)
    world.want()
    world.run(seconds=3.0)
    before = set(world.chunks_from(D1)) | set(world.chunks_from(D2))
    del world.machines[D1]
    world.machines[LATE].forget_donor(D1, world.now)
    world.run()
    again = [chunk for chunk, times in world.chunks_sent().items() if times > 1 and chunk in before]
    assert world.fetched().donors[0] == D2
    assert len(again) <= 6  # only what the lost donor had under way


@pytest.mark.parametrize("kind", [Fetch, Manifest, Chunk])
def test_a_lost_message_of_the_only_donor_is_asked_for_again(kind: type) -> None:
    world = World(donors=1)
    lost = count()
    world.tamper = lambda sender, message: None if isinstance(message, kind) and next(lost) == 0 else message
    world.want(fragment=0)
    world.run()
    assert world.fetched().donors == (D1,)


def test_doubled_messages_are_no_offence() -> None:
    world = World(donors=2)
    world.want()
    original = world._send

    def twice(sender: PeerId, receiver: PeerId, message: CatchUpMessage) -> None:
        original(sender, receiver, message)
        original(sender, receiver, message)

    world._send = twice  # type: ignore[method-assign]
    world.run()
    world.fetched()
    assert not [event for event in world.events if isinstance(event, DonorRefused)]


def test_an_export_that_is_gone_is_made_anew() -> None:
    world = World(donors=1, rate=2e6)
    world.want()
    world.run(seconds=3.0)
    donor = world.machines[D1].donor
    world.move(D1, 9)
    donor._exports.clear()
    world.run()
    assert world.fetched().version == 9


def test_no_donor_known_is_a_failure_not_a_wait() -> None:
    world = World(donors=0)
    world.want()
    world.run()
    assert isinstance(world.events[0], FetchFailed)


def test_random_faults_end_in_the_right_bytes_or_a_failure_and_no_timer_is_left() -> None:
    for seed in range(25):
        random_ = random.Random(seed)
        world = World(donors=5, shape=Shape((10, 10, 10), (SMALL, SMALL, 3 * SMALL)))
        for donor in DONORS:
            world.rates[donor] = 10 ** random_.uniform(5.0, 7.5)
            world.move(donor, random_.choice([6, 7, 7, 7, 8]))

        def tamper(
            sender: PeerId, message: CatchUpMessage, random_: random.Random = random_
        ) -> CatchUpMessage | None:
            fate = random_.random()
            if fate < 0.03:
                return None
            return lying(sender, zero)(sender, message) if fate < 0.06 else message

        world.tamper = tamper
        for fragment in (0, 1, 2):
            world.want(fragment)
        world.run(seconds=3600.0, enough=3)
        for event in world.events:
            if isinstance(event, Fetched):
                world.check(event)
        assert sum(isinstance(event, Fetched | FetchFailed) for event in world.events) == 3, seed
        assert world.machines[LATE].get_timer() is None
