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
from p2p_co2.catchup.goals import EXPORTS_FREE_BYTES
from p2p_co2.catchup.source import OUTRUN_S, SLOW_CAP_S
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.limits import MAX_DATA_BYTES
from p2p_co2.wire.messages_pb2 import Chunk, Fetch, Manifest
from tests.catchup_world import D1, D2, D3, DONORS, LARGE, LATE, SMALL, World, lying, zero

HALF = 16 * MAX_DATA_BYTES - 5
"""Two states of this size are loaded side by side."""


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


@pytest.mark.parametrize("which", range(3))
def test_what_a_slow_donor_owes_of_one_state_is_still_to_be_had_when_the_next_is_asked_for(
    which: int,
) -> None:
    """The others had dropped that state to make room for the next: it ended in a failure, its chunks lost."""
    slow, shape = DONORS[which], Shape((10,) * 4, (SMALL, HALF, HALF, HALF))
    world = World(donors=4, rate=2e6, shape=shape)
    given = count(1)

    def tamper(sender: PeerId, message: CatchUpMessage) -> CatchUpMessage:
        if sender == slow and isinstance(message, Chunk) and next(given) >= 8:
            world.rates[slow] = 30e3
        return message

    world.tamper = tamper
    for fragment in (1, 2, 3, 0):
        world.want(fragment)
    world.run(enough=4)
    assert sorted(event.goal.fragment for event in world.events if isinstance(event, Fetched)) == [0, 1, 2, 3]
    assert world.now - 10.0 < sum(shape.state_bytes) / 6e6 + 1.0
    assert max(machine.donor.exported_bytes() for machine in world.machines.values()) <= EXPORTS_FREE_BYTES


def test_who_was_outrun_is_asked_for_no_more_chunks_but_where_nobody_else_is() -> None:
    world = World(donors=3)
    world.rates |= {D1: 20e3, D2: 4e6, D3: 4e6}
    world.want(fragment=1)
    world.run()
    before = world.chunks_from(D1)
    world.want(fragment=2)
    world.run(enough=2)
    assert world.chunks_from(D1) == before
    assert len(before) == 1
    world.rates[D1] = 4e6
    for peer in (D2, D3):
        world.machines[LATE].forget_donor(peer, world.now)
        del world.machines[peer]
    world.want(fragment=0)
    world.run(enough=3)
    assert len(world.chunks_from(D1)) > 1  # nobody else is left
    world = World(donors=3)
    world.rates |= {D1: 20e3, D2: 4e6, D3: 4e6}
    world.want(fragment=1)
    world.run()
    world.rates[D1] = 4e6
    world.now += OUTRUN_S
    world.want(fragment=2)
    world.run(enough=2)
    assert len(world.chunks_from(D1)) > 5  # it may be quick by now


def test_what_one_owes_who_was_outrun_in_another_download_is_asked_for_anew_as_soon_as_one_is_free() -> None:
    size = 8 * MAX_DATA_BYTES
    world = World(donors=2, rate=2e6, shape=Shape((10,) * 4, (SMALL, size, size, size)))
    world.rates[D2] = 0.4e6
    for fragment in (1, 2, 3):
        world.want(fragment)
    world.run(enough=3)
    assert world.now - 10.0 < 3 * size / 2e6  # what the quick one alone would have taken


def test_who_was_cut_off_itself_takes_none_of_its_donors_for_slow() -> None:
    world = World(donors=4)
    world.rates |= {D1: 0.5e6, D2: 0.7e6, D3: 1e6, DONORS[3]: 2e6}
    world.tamper = lambda sender, message: None if sender != LATE and 11.0 < world.now < 14.0 else message
    world.want(fragment=1)
    world.run()
    world.fetched()
    assert world.machines[LATE].held()["MAX_OUTRUN"][0] == 0


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
