"""Catching up beside donors that are slow, silent or gone, over links that lose and double messages: it ends
in the right bytes or a failure."""

from __future__ import annotations

import itertools
import random
from itertools import count

import pytest

from p2p_co2.protocol.catchup.goals import (
    EXPORTS_FREE_BYTES,
    PATIENCE_S,
    ROUND,
    CatchUpMessage,
    DonorRefused,
    Fetched,
    FetchFailed,
    Goal,
    Shape,
    chunk_bytes_of,
)
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.limits import MAX_DATA_BYTES
from p2p_co2.protocol.wire.messages_pb2 import Chunk, Decision
from tests.catchup_world import CHUNKS, D1, D2, D3, DONORS, LARGE, LATE, SMALL, World, lying, zero

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
    failed = world.events[0]
    assert isinstance(failed, FetchFailed)
    assert world.now <= 10.0 + 2 * PATIENCE_S


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


def test_a_donor_much_slower_than_the_others_is_dropped_and_its_chunks_given_away() -> None:
    world = World(donors=3)
    world.rates |= {D1: 20e3, D2: 4e6, D3: 4e6}  # 26 s a chunk beside 0.13 s
    world.want()
    world.run()
    assert world.fetched().duration_s < LARGE / 8e6 + 3.0
    assert len(world.chunks_from(D1)) <= 2


@pytest.mark.parametrize("which", [0, 2])
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
    assert world.now - 10.0 < 3 * sum(shape.state_bytes) / 6e6 + 1.0
    assert max(machine.donor.exported_bytes() for machine in world.machines.values()) <= EXPORTS_FREE_BYTES


def many(states: int, size: int) -> Shape:
    """A small one, and ``states`` of ``size``."""
    return Shape((10,) * (states + 1), (SMALL, *(size,) * states))


@pytest.mark.parametrize("mb", [0.8, 4.0])
@pytest.mark.parametrize("donors", [1, 3])
def test_a_small_state_comes_over_ways_of_10_kb_s(donors: int, mb: float) -> None:
    """As between satellites behind relays. In chunks of half a megabyte no donor gave one in time, and a
    state that took longer than a minute was no longer kept."""
    size = int(mb * 1e6)
    world = World(donors, 10e3, Shape((10, 10), (1000, size), chunk_bytes_of([size])))
    world.want(fragment=1)
    world.run(seconds=600.0)
    event = world.fetched()
    assert event.duration_s < 1.1 * size / (donors * 10e3) + 5.0


def test_all_that_fall_silent_for_good_are_given_up() -> None:
    world, given = World(donors=4, rate=2e6), list[int]()

    def tamper(sender: PeerId, message: CatchUpMessage) -> CatchUpMessage | None:
        if sender != LATE and world.now >= 11.0:
            return None
        given.extend([message.chunk] if isinstance(message, Chunk) else [])
        return message

    world.tamper = tamper
    world.want(fragment=1)
    world.run()
    assert isinstance(world.events[-1], FetchFailed)
    assert 0 < len(given) < CHUNKS, "in the middle"
    assert world.now < 11.0 + 2 * PATIENCE_S + 60.0


def test_a_donor_that_leaves_is_replaced_at_once() -> None:
    world = World(donors=2, rate=2e6)
    world.want()
    world.run(seconds=3.0)
    before = set(world.chunks_from(D1)) | set(world.chunks_from(D2))
    del world.machines[D1]
    world.machines[LATE].fetcher.forget_donor(D1, "left", world.now)
    world.run()
    again = [chunk for chunk, times in world.chunks_sent().items() if times > 1 and chunk in before]
    assert world.fetched().donors[0] == D2
    assert len(again) <= 6  # only what the lost donor had under way


def test_a_chunk_of_the_only_donor_that_is_lost_is_asked_for_again() -> None:
    world = World(donors=1)
    lost = count()
    world.tamper = lambda sender, message: None if isinstance(message, Chunk) and next(lost) == 0 else message
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
    donor.exports.clear()
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


def test_how_far_a_slow_load_is_gets_told_every_ten_seconds() -> None:
    """A newcomer said nothing for minutes."""
    world = World(donors=2, rate=200e3)
    began_at = world.now
    world.want(1)
    world.want(2)
    world.run(enough=2)
    times, told = zip(*((at - began_at, event) for at, event in world.told), strict=True)
    assert times == pytest.approx([10.0 * (beat + 1) for beat in range(len(told))])
    assert len(told) == int((world.now - began_at) / 10.0)
    first = [event for event in told if event.fragments == (1, 2)]  # large: one after the other
    last = [event for event in told if event.fragments == (2,)]
    assert len(first) + len(last) == len(told)
    assert {event.donors for event in told[1:]} <= {1, 2}
    for events, total_bytes in ((first, 2 * LARGE), (last, LARGE)):
        assert {event.total_bytes for event in events} == {total_bytes}
        received = [event.received_bytes for event in events]
        assert received == sorted(set(received))
        for less, more in itertools.pairwise(received):
            assert more - less == pytest.approx(10.0 * 400e3, rel=0.3)


def test_rounds_that_wait_for_their_turn_with_a_slow_donor_are_not_given_up() -> None:
    """Of twelve fragments, each a round behind, one chunk came every 6.5 s: the twelfth's turn came after
    more than a minute, and all twelve were given up for whole states."""
    fragments, mean_bytes = 12, 4 * (64 << 10)
    shape = Shape((mean_bytes,) * fragments, (4 * mean_bytes,) * fragments, 64 << 10)
    world, mean = World(donors=1, rate=10e3, shape=shape), random.Random(1).randbytes(mean_bytes)
    for fragment in range(fragments):
        world.machines[D1].donor.history.remember(fragment, 7, Decision(outcome=b"x"), mean)
        world.machines[LATE].fetcher.want(Goal(ROUND, fragment, 7, (D1,)), world.now)
    began_at = world.now
    world.run(400.0, enough=fragments)
    assert [bytes(event.data) for event in world.events if isinstance(event, Fetched)] == 12 * [mean]
    assert world.now - began_at < 1.05 * fragments * mean_bytes / 10e3


def test_what_is_on_its_way_moves_and_what_is_only_asked_for_or_doubled_does_not() -> None:
    """By this a peer whose run is over knows that it has to stay."""
    world = World(donors=1, rate=1e6)
    late, donor = world.machines[LATE], world.machines[D1]
    chunks: list[Chunk] = []

    def tamper(sender: PeerId, message: CatchUpMessage) -> CatchUpMessage | None:
        if isinstance(message, Chunk):
            chunks.append(message)
            return message if len(chunks) == 1 else None  # all others are lost
        return message

    world.tamper = tamper
    assert not late.moves(world.now, 1e9)
    assert not donor.moves(world.now, 1e9)
    world.want()
    world.run(1.0)  # one chunk came
    now = world.now
    assert late.moves(now, 1.0)
    assert donor.moves(now, 1.0)
    late.receive(chunks[0], D1, now + 5.0)  # doubled under way
    assert not late.moves(now + 5.0, 4.0)
    assert not donor.moves(now + 5.0, 4.0)
    late.is_busy(D1, now + 6.0)  # a round's bytes, before which no chunk comes
    assert late.moves(now + 6.0, 0.1)
    donor.is_busy(LATE, now + 6.0)
    assert not donor.moves(now + 6.0, 0.1)


@pytest.mark.parametrize("waits", [False, True])
def test_what_is_forgotten_tells_nothing_and_leaves_its_room_to_who_waits(waits: bool) -> None:
    """Two large states, one at a time: the one that is loaded is forgotten, or the one that waits."""
    world = World(donors=1, rate=2e6)
    late = world.machines[LATE]
    for fragment in (1, 2):
        world.want(fragment)
    world.run(0.3)
    assert late.fetcher.fetching(1)
    assert late.fetcher.fetching(2)
    late.fetcher.forget(2 if waits else 1, world.now)
    assert late.fetcher.fetching(1) is waits
    assert late.fetcher.fetching(2) is not waits
    world.run()
    (ended,) = (event for event in world.events if isinstance(event, Fetched | FetchFailed))
    assert isinstance(ended, Fetched)
    assert ended.goal.fragment == (1 if waits else 2)
    assert late.get_timer() is None
