"""Catching up, a late peer and its donors on virtual time: what it is for, donors that are slow, silent or
gone, and donors that lie. It ends in the right bytes or a failure, whatever they do."""

from __future__ import annotations

import itertools
import random
from collections import (
    Counter,
)
from collections.abc import (
    Callable,
)
from itertools import (
    count,
)

import pytest

from p2p_co2.digest import (
    chunk_digests,
)
from p2p_co2.errors import (
    RemoteProtocolError,
)
from p2p_co2.protocol.catchup.goals import (
    EXPORTS_FREE_BYTES,
    PATIENCE_S,
    ROUND,
    STATE,
    CatchUpMessage,
    DonorRefused,
    ExportWanted,
    Fetched,
    FetchFailed,
    Goal,
    Shape,
    chunk_bytes_of,
    split_donors,
)
from p2p_co2.protocol.catchup.history import (
    HISTORY_BYTES_SHARE,
    HISTORY_ROUNDS_KEPT,
)
from p2p_co2.protocol.catchup.machine import (
    CatchUp,
)
from p2p_co2.protocol.catchup.manifest import (
    chunk_count,
)
from p2p_co2.wire.identity import (
    PeerId,
)
from p2p_co2.wire.limits import (
    MAX_DATA_BYTES,
)
from p2p_co2.wire.messages_pb2 import (
    Chunk,
    Decision,
    Fetch,
    Manifest,
    Refusal,
    Vote,
)
from tests.catchup_world import (
    CHUNKS,
    D1,
    D2,
    D3,
    D4,
    DONORS,
    IDENTITIES,
    LARGE,
    LATE,
    MEAN,
    RUN,
    SHAPE,
    SMALL,
    World,
    export,
    lying,
    named,
    state_of,
    zero,
)

# ---- what it is for


def test_a_state_travels_in_checked_chunks_from_one_donor() -> None:
    world = World(donors=1)
    world.want()
    world.run()
    assert (world.fetched().version, world.fetched().donors) == (7, (D1,))
    assert world.chunks_sent() == Counter(range(CHUNKS))
    assert not world.machines[LATE].fetcher.fetching(1)


def test_four_equal_donors_are_nearly_four_times_as_fast_as_one() -> None:
    took = []
    for donors in (1, 4):
        world = World(donors, rate=2e6)
        world.want()
        world.run()
        took.append(world.fetched().duration_s)
        assert set(world.chunks_sent()) == set(range(CHUNKS))
        assert sum(world.chunks_sent().values()) <= CHUNKS + donors  # the end is repeated at most a little
    assert took[0] >= 3.5 * took[1]


def test_each_donor_gives_what_its_link_carries() -> None:
    world = World(donors=3)
    world.rates |= {D1: 4e6, D2: 2e6, D3: 2e6}
    world.want()
    world.run()
    fast, *slow = (len(world.chunks_from(donor)) for donor in (D1, D2, D3))
    assert world.fetched().donors[0] == D1
    assert all(1.5 * given < fast < 3 * given for given in slow)


def test_donors_that_become_known_later_take_part() -> None:
    world = World(donors=4, rate=2e6)
    world.machines[LATE].fetcher.want(Goal(STATE, 1, 7, (D1,)), world.now)
    world.machines[LATE].fetcher.want(Goal(STATE, 2, 7, (D1,)), world.now)
    world.run(seconds=1.0)
    for fragment in (1, 2):
        world.machines[LATE].fetcher.add_donors(fragment, DONORS[:4], world.now)
        world.machines[LATE].fetcher.add_donors(fragment, DONORS[:4], world.now)
    world.run(enough=2)
    assert [len(event.donors) for event in world.events if isinstance(event, Fetched)] == [4, 4]
    assert world.now - 10.0 < 2 * LARGE / 8e6 + 2.0


def test_a_round_is_replayed_from_the_history_with_its_decision() -> None:
    world = World()
    decision = Decision(outcome=b"outcome", votes=[Vote(member=0, signature=b"signature")])
    world.machines[D1].donor.history.remember(0, 3, decision, MEAN)
    world.machines[LATE].fetcher.want(Goal(ROUND, 0, 3, (D1, D2)), world.now)
    world.run()
    (event,) = world.events
    assert isinstance(event, Fetched)
    assert (event.data, event.decision, event.donors) == (MEAN, decision, (D1,))


def test_a_round_that_nobody_kept_fails() -> None:
    world = World()
    world.machines[D1].donor.history.remember(0, 9, Decision(), MEAN)
    world.machines[LATE].fetcher.want(Goal(ROUND, 0, 3, (D1, D2)), world.now)
    world.run()
    (event,) = world.events
    assert isinstance(event, FetchFailed)


def test_a_round_that_a_donor_has_not_applied_yet_is_waited_for() -> None:
    world = World(donors=1)
    world.move(D1, 2)
    world.machines[LATE].fetcher.want(Goal(ROUND, 0, 3, (D1,)), world.now)
    world.run(seconds=0.5)
    assert not world.events
    world.move(D1, 3)
    world.machines[D1].donor.history.remember(0, 3, Decision(), MEAN)
    world.run()
    (event,) = world.events
    assert isinstance(event, Fetched)


# ---- versions: the swarm goes on while somebody loads


def test_a_version_stays_whole_while_the_donors_move_on() -> None:
    world = World(donors=4, rate=2e6)
    world.want()
    for version in range(8, 14):
        world.run(seconds=0.5)
        for donor in DONORS[:4]:
            world.move(donor, version)
            world.machines[donor].donor.history.remember(1, version, Decision(), bytes(10))
    world.run()
    assert world.fetched().version == 7
    for donor in DONORS[:4]:  # what the newcomer replays next is there
        assert all(world.machines[donor].donor.history.find(1, version) for version in range(8, 14))


def test_donors_of_another_version_are_no_use_and_do_no_harm() -> None:
    world = World(donors=4)
    world.move(D1, 9)
    world.move(D2, 6)
    world.want()
    world.run()
    event = world.fetched()
    assert event.version == 7
    assert set(event.donors) == {D3, D4}
    assert not world.chunks_from(D1)
    assert not world.chunks_from(D2)


def test_what_most_peers_report_goes_before_what_most_donors_promise() -> None:
    world = World(donors=3)
    for donor in (D1, D2):
        world.move(donor, 8)
    world.want(digest=named(state_of(1, 7)))
    world.run()
    assert world.fetched().donors == (D3,)


def test_large_states_are_loaded_one_after_the_other_and_small_ones_at_once() -> None:
    assert SMALL < EXPORTS_FREE_BYTES < LARGE
    world = World(donors=2, rate=2e6)
    for fragment in (2, 1, 0):
        world.want(fragment)
    most = 0
    while len(world.events) < 3:
        world.run(seconds=0.5, enough=3)
        most = max(most, *(machine.donor.exported_bytes() for machine in world.machines.values()))
    assert [event.goal.fragment for event in world.events if isinstance(event, Fetched)] == [2, 0, 1]
    assert most <= max(LARGE, EXPORTS_FREE_BYTES)


# ---- what a donor holds


def test_the_history_is_bounded_and_keeps_the_newest_of_each_fragment() -> None:
    machine = CatchUp(IDENTITIES[0], RUN, Shape((1000, 10), (2000, 2000)))
    for version in range(1, 100):
        machine.donor.history.remember(0, version, Decision(), bytes(1000))
        machine.donor.history.remember(1, version, Decision(), bytes(10))
    history = machine.donor.history
    assert len(history) <= 2 * HISTORY_ROUNDS_KEPT
    assert history.find(0, 99) is not None
    assert history.find(1, 99) is not None
    assert history.held_bytes <= max(1010, HISTORY_BYTES_SHARE * 2000 + 1000)


@pytest.mark.parametrize("mean_bytes", [140, 500])
def test_a_mean_beyond_the_bound_goes_once_all_have_it(mean_bytes: int) -> None:
    """Unless somebody who loads a state needs it next; small ones only as far as the bound asks for it."""
    everywhere: set[tuple[int, int]] = set()
    shape = Shape((mean_bytes,) * 4, (2000,) * 4)  # of small ones 1000 bytes may stay
    machine = CatchUp(IDENTITIES[1], RUN, shape, lambda *place: place in everywhere)
    history = machine.donor.history
    for version in (1, 2):
        for fragment in range(4):
            machine.donor.moved(fragment, version)
            machine.donor.history.remember(fragment, version, Decision(), bytes(mean_bytes))
    history.shrink()
    newest = {(fragment, 2) for fragment in range(4)}
    kept = {place for place in itertools.product(range(4), (1, 2)) if history.find(*place)}
    assert kept == newest if mean_bytes == 500 else newest < kept
    assert history.held_bytes == (2000 if mean_bytes == 500 else 980)  # somebody may still need them
    history.hold({0: 1})
    everywhere |= newest
    history.shrink()
    if mean_bytes == 140:
        assert history.held_bytes == 980
        return
    assert [fragment for fragment in range(4) if history.find(fragment, 2)] == [0]
    machine.receive(Fetch(what=ROUND, fragment=1, version=2, request=1), LATE, 0.0)
    [(_, refusal)] = machine.messages_to_send()
    assert isinstance(refusal, Refusal)
    assert not refusal.again


def test_who_has_loaded_a_state_has_time_to_replay_the_rounds_since() -> None:
    """As soon as it asks for the state of another fragment, the one that it has loaded makes room; the rounds
    after that went with it, a moment before it asked for the first of them (run 802396 of
    ``benchmarks/offline.py ends``)."""
    large = 3 * EXPORTS_FREE_BYTES // 4  # no room for two
    machine = CatchUp(IDENTITIES[1], RUN, Shape((1000, 10), (large, large)))
    chunks = chunk_count(large, machine.donor.shape.chunk_bytes)

    def kept() -> list[int]:
        return [version for version in range(20) if machine.donor.history.find(0, version)]

    for fragment in (0, 1):
        machine.donor.moved(fragment, 5)
        machine.receive(Fetch(what=STATE, fragment=fragment, version=5, request=1), LATE, 1.0)
        while (event := machine.next_event()) is not None:
            assert isinstance(event, ExportWanted)
            machine.donor.exported(event.fragment, 5, bytes(large), bytes(32), [bytes(32)] * chunks, 1.0)
        if fragment == 0:
            fetch = Fetch(what=STATE, fragment=0, version=5, want_chunk=True)
            machine.receive(fetch, LATE, 1.0)
            for version in range(4, 9):
                machine.donor.history.remember(0, version, Decision(), bytes(large // 4))
            assert kept() == [6, 7, 8]
    assert machine.donor.exported_bytes() == large  # the other one
    assert kept() == [6, 7, 8]
    until = 1.0 + PATIENCE_S
    machine.handle_timer(until - 0.5)
    assert kept() == [6, 7, 8]
    machine.handle_timer(until)
    assert kept() == [8]
    assert machine.get_timer() is None


def test_an_export_ends_when_nobody_asks_and_in_any_case() -> None:
    world = World(donors=1)
    world.want()
    world.run()
    donor = world.machines[D1].donor
    assert donor.exported_bytes() == LARGE
    world.machines[D1].handle_timer(world.now + PATIENCE_S)
    assert donor.exported_bytes() == 0
    world.machines[D1].handle_timer(world.now + PATIENCE_S + PATIENCE_S)
    assert donor.get_timer() is None

    world.want()
    world.run(enough=2)
    began_at = world.now
    while donor.exported_bytes():
        assert world.now - began_at < 2 * 10 * PATIENCE_S + LARGE / 250e3
        world.now += 2.0  # somebody who trickles
        fetch = Fetch(what=STATE, fragment=1, version=7, want_chunk=True, chunk=0)
        world.machines[D1].receive(fetch, LATE, world.now)
        world.machines[D1].handle_timer(world.now)


def test_a_request_for_what_cannot_be_makes_no_export() -> None:
    world = World(donors=1)
    donor = world.machines[D1]
    for fetch in (Fetch(version=1 << 60), Fetch(version=1, newest=3)):
        fetch.what, fetch.fragment = STATE, 1
        donor.receive(fetch, LATE, 1.0)
        assert donor.next_event() is None
        (answer,) = [message for _, message in donor.messages_to_send()]
        assert isinstance(answer, Refusal)
        assert answer.newest_version == 7


def test_what_does_not_exist_is_refused() -> None:
    machine = World(donors=1).machines[D1]
    with pytest.raises(RemoteProtocolError, match="unknown fragment"):
        machine.receive(Fetch(what=STATE, fragment=9), LATE, 1.0)
    machine.donor.history.remember(1, 1, Decision(), bytes(10))
    with pytest.raises(RemoteProtocolError, match="unknown chunk"):
        machine.receive(Fetch(what=ROUND, fragment=1, version=1, want_chunk=True, chunk=5), LATE, 1.0)


def test_an_answer_that_was_not_asked_for_is_ignored() -> None:
    machine = World(donors=1).machines[LATE]
    machine.receive(Chunk(request=5, fragment=0, chunk=1, data=b"x"), D1, 1.0)
    machine.receive(Manifest(request=5, fragment=0), D1, 1.0)
    assert machine.next_event() is None


def test_fragments_start_with_different_donors() -> None:
    peers = [PeerId(name) for name in "abc"]
    assert [split_donors(peers, fragment)[0] for fragment in range(4)] == ["a", "b", "c", "a"]
    assert split_donors([], 1) == ()


def test_chunks_are_as_small_as_a_slow_way_needs_and_as_large_as_a_large_state_allows() -> None:
    assert chunk_bytes_of([1, 0]) == chunk_bytes_of([8 << 20]) == 64 << 10
    assert chunk_bytes_of([1, 16 << 20]) == 128 << 10
    assert chunk_bytes_of([64 << 20]) == chunk_bytes_of([1 << 40]) == MAX_DATA_BYTES
    assert chunk_count((16 << 20) + 1, chunk_bytes_of([(16 << 20) + 1])) == 128


# ---- donors that are slow, silent or gone

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


def test_who_promised_and_left_before_anything_was_chosen_leaves_no_timer_that_is_over() -> None:
    """A node woke up a thousand times a second, for as long as the others took to answer."""
    world = World(donors=2)
    world.tamper = lambda sender, message: None if sender == D2 else message
    world.want()
    world.run(seconds=0.5)
    late = world.machines[LATE]
    late.fetcher.forget_donor(D1, "left", world.now)
    late.handle_timer(world.now + 1.1)
    assert (late.get_timer() or 0.0) > world.now + 1.1


def test_a_chunk_of_the_only_donor_that_is_lost_is_asked_for_again() -> None:
    world = World(donors=1)
    lost = count()
    world.tamper = lambda sender, message: None if isinstance(message, Chunk) and next(lost) == 0 else message
    world.want(fragment=0)
    world.run()
    assert world.fetched().donors == (D1,)


def test_a_chunk_of_one_of_several_donors_that_is_lost_is_given_by_another() -> None:
    """Those that had given nothing yet were no idle donors: the only chunk of a round took a minute."""
    world = World(donors=3, shape=Shape((100,), (1000,), chunk_bytes=64 << 10))
    lost = count()
    world.tamper = lambda sender, message: None if isinstance(message, Chunk) and next(lost) == 0 else message
    world.want(0)
    world.run()
    assert world.fetched().version == 7
    assert world.now < 20.0


def test_doubled_messages_are_no_offence() -> None:
    world = World(donors=2)
    world.want()
    original = world.send

    def twice(sender: PeerId, receiver: PeerId, message: CatchUpMessage) -> None:
        original(sender, receiver, message)
        original(sender, receiver, message)

    world.send = twice  # type: ignore[method-assign]
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


def test_how_far_a_slow_load_is_gets_told_every_two_seconds() -> None:
    """A newcomer said nothing for minutes."""
    world = World(donors=2, rate=200e3)
    began_at = world.now
    world.want(1)
    world.want(2)
    world.run(enough=2)
    times, told = zip(*((at - began_at, event) for at, event in world.told), strict=True)
    assert times == pytest.approx([2.0 * (beat + 1) for beat in range(len(told))])
    assert len(told) == int((world.now - began_at) / 2.0)
    first = [event for event in told if event.fragments == (1, 2)]  # large: one after the other
    last = [event for event in told if event.fragments == (2,)]
    assert len(first) + len(last) == len(told)
    assert {event.donors for event in told[1:]} <= {0, 1, 2}
    for events, total_bytes in ((first, 2 * LARGE), (last, LARGE)):
        assert {event.total_bytes for event in events} == {total_bytes}
        received = [event.received_bytes for event in events]
        assert received == sorted(received)  # a chunk may take longer than two seconds
        assert received[-1] - received[0] == pytest.approx((len(received) - 1) * 2.0 * 400e3, rel=0.3)


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


# ---- donors that lie in bytes


def shorten(chunk: Chunk) -> None:
    chunk.data = chunk.data[:-1]


@pytest.mark.parametrize("wrong", [zero, shorten])
def test_a_donor_that_sends_wrong_bytes_costs_two_chunks(wrong: Callable[[Chunk], None]) -> None:
    world = World(donors=4, rate=2e6)
    world.tamper = lying(D2, wrong)
    world.want()
    world.run()
    refused = [event for event in world.events if isinstance(event, DonorRefused)]
    assert [event.peer for event in refused] == [D2]
    event = world.fetched()
    assert D2 not in event.donors or event.donors[-1] == D2
    assert len(world.chunks_from(D2)) == 2
    assert sum(world.chunks_sent().values()) <= CHUNKS + 2 + 3


def test_a_liar_is_not_asked_for_the_next_fragment_either() -> None:
    world = World(donors=2)
    world.tamper = lying(D1, zero)
    world.want(fragment=1)
    world.want(fragment=2)
    world.run(enough=2)
    assert len(world.chunks_from(D1)) == 2
    assert [type(event) for event in world.events] == [DonorRefused, Fetched, Fetched]


def test_a_donor_that_begins_to_lie_later_keeps_what_it_gave_right() -> None:
    world = World(donors=2, rate=2e6)
    given = count()
    world.tamper = lying(D1, lambda chunk: zero(chunk) if next(given) >= 10 else None)
    world.want()
    world.run()
    repeated = [chunk for chunk, times in world.chunks_sent().items() if times > 1]
    assert len(repeated) <= 1 + 6 + 2  # the wrong one, what was under way, the end


@pytest.mark.parametrize(
    "change",
    [
        {"total_bytes": 1 << 40},
        {"chunk_bytes": 1},
        {"version": 2},
        {"fragment": 0},
        {"digest": bytes(32)},
        {"signature": bytes(64)},
        {"chunk_digests": [bytes(32)] * CHUNKS},
    ],
)
def test_a_manifest_that_was_changed_is_refused_before_anything_is_allocated(
    change: dict[str, object],
) -> None:
    world = World(donors=1)

    def lie(sender: PeerId, message: CatchUpMessage) -> CatchUpMessage:
        if not isinstance(message, Manifest):
            return message
        return Manifest(**{f.name: v for f, v in message.ListFields()} | change)  # type: ignore[arg-type]

    world.tamper = lie
    world.want()
    world.run()
    assert [type(event) for event in world.events] == [DonorRefused, FetchFailed]
    assert not world.chunks_sent()


def test_a_lone_false_promise_is_outvoted_and_costs_nothing() -> None:
    world = World(donors=3)
    liar = world.machines[D1]
    data = bytes(LARGE)
    export(liar, 1, 7, data, world.now)
    world.want()
    world.run()
    event = world.fetched()
    assert set(event.donors) == {D2, D3}
    assert not world.chunks_from(D1)


def test_invented_chunk_digests_are_refused_before_a_chunk_is_asked_for() -> None:
    """Well signed, beside the right name of the state, which everybody knows: it cost a whole load."""
    world, data = World(donors=1), bytes(LARGE)
    digests = list(chunk_digests(data, MAX_DATA_BYTES))
    world.machines[D1].donor.exported(1, 7, data, named(state_of(1, 7)), digests, world.now)
    world.want()
    world.run()
    refused, failed = world.events
    assert isinstance(refused, DonorRefused)
    assert isinstance(failed, FetchFailed)
    assert refused.peer == D1
    assert "chunk digests" in refused.detail
    assert not world.chunks_sent()


def promise(world: World, liar: PeerId, version: int) -> None:
    """Have ``liar`` give bytes of its own as the state of ``version``, whole and well signed."""
    data = bytes(LARGE)
    world.move(liar, version)
    export(world.machines[liar], 1, version, data, world.now)


@pytest.mark.parametrize("ahead", [0, 3])
@pytest.mark.parametrize("says", [True, False, None])
def test_a_state_that_others_do_not_know_is_not_loaded(ahead: int, says: bool | None) -> None:
    """One honest donor, one that lies by a few versions. ``says``: of the honest state (True), of the false
    one (False), or nothing."""
    world = World(donors=2)
    promise(world, D1, 7 + ahead)
    honest = named(state_of(1, 7))

    def vouch(donor: PeerId, fragment: int, version: int, digest: bytes) -> bool | None:
        assert fragment == 1
        if (version, digest) == (7, honest):
            assert donor == D2
            return True if says else None
        return False if says is False else None

    world.machines[LATE].fetcher.ask_swarm(vouch)
    world.want(version=5, oldest=5)
    world.run()
    refused = [event.peer for event in world.events if isinstance(event, DonorRefused)]
    assert refused == ([D1] if says is False else [])

    if ahead or says is not None:
        assert not world.chunks_from(D1)
        assert world.fetched().donors == (D2,)
    else:  # it is one word against another: which is right nobody can say
        loaded = next(event for event in world.events if isinstance(event, Fetched))
        assert loaded.donors in ((D1,), (D2,))


def test_a_chunk_that_was_not_asked_for_puts_its_donor_out() -> None:
    world = World(donors=2, rate=2e6)
    world.want()
    world.run(seconds=2.0)
    request = next(message.request for sender, message in world.sent if isinstance(message, Chunk))
    world.machines[LATE].receive(
        Chunk(request=request, fragment=1, version=7, chunk=CHUNKS + 1), D1, world.now
    )
    assert isinstance(world.machines[LATE].next_event(), DonorRefused)
    world.run()
    assert world.fetched().donors[0] == D2


# ---- lies about themselves


def test_asking_for_one_state_after_the_other_does_not_keep_the_tensor_side_busy() -> None:
    donor = CatchUp(IDENTITIES[1], RUN, SHAPE)
    for fragment in range(3):
        donor.donor.moved(fragment, 7)
    data = state_of(1, 7)
    busy_s, done_at, exporting = 0.0, 0.0, -1
    for tick in range(2000):  # ten questions a second; an export takes half of one
        now = 10.0 + tick / 10
        donor.receive(Fetch(what=STATE, fragment=1 + tick % 2, version=1, request=tick), LATE, now)
        donor.handle_timer(now)
        donor.messages_to_send()
        if exporting < 0 and isinstance(event := donor.next_event(), ExportWanted):
            exporting, done_at = event.fragment, now + 0.5
        if exporting >= 0 and now >= done_at:
            export(donor, exporting, 7, data, now)
            busy_s, exporting = busy_s + 0.5, -1
    assert 10.0 < busy_s <= 200.0 / 4 + 1.0


def test_a_version_that_nobody_has_is_given_up_soon() -> None:
    world = World(donors=3)
    goal = Goal(STATE, 1, 10_000, tuple(DONORS[:3]))
    world.machines[LATE].fetcher.want(goal, world.now)
    began_at = world.now
    world.run(300.0)
    assert isinstance(world.events[-1], FetchFailed)
    assert world.now - began_at < 15.0


@pytest.mark.parametrize("donors", [1, 3])
def test_who_takes_its_promise_back_and_is_asked_all_the_same_stops_nobody(donors: int) -> None:
    """It was asked for a chunk, then for its manifest again: what it owed could not be found, and raised."""
    world = World(donors=donors, rate=2e6)
    world.rates[D3] = 1e6
    told, send = count(), world.send

    def with_a_refusal(sender: PeerId, receiver: PeerId, message: CatchUpMessage) -> None:
        send(sender, receiver, message)
        if sender == D1 and isinstance(message, Manifest) and next(told) == 0:
            send(sender, receiver, Refusal(request=message.request, reason="no room", again=True))

    world.send = with_a_refusal  # type: ignore[method-assign]
    if donors > 1:
        world.tamper = lambda sender, message: (
            None if sender == D1 and isinstance(message, Chunk) else message
        )
    world.want()
    world.run()
    world.fetched()


def test_who_says_a_thousand_times_that_it_wants_to_be_asked_again_ends_nobody() -> None:
    """Each time it was to be asked after twice as long, until that was more than a double holds: an exception
    that ended the newcomer's process."""
    world = World(donors=2, rate=2e6)
    send = world.send

    def again_and_again(sender: PeerId, receiver: PeerId, message: CatchUpMessage) -> None:
        if sender == D1 and isinstance(message, Manifest):
            for _ in range(1100):
                send(sender, receiver, Refusal(request=message.request, reason="no room", again=True))
        else:
            send(sender, receiver, message)

    world.send = again_and_again  # type: ignore[method-assign]
    world.want()
    world.run()
    assert world.fetched().donors == (D2,)
