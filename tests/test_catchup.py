"""Catching up: a late peer and its donors on virtual time.

Lying donors are in test_catchup_liars, slow and lost ones in test_catchup_donors.
"""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from p2p_co2.digest import digest
from p2p_co2.errors import RemoteProtocolError
from p2p_co2.protocol.catchup.goals import (
    EXPORTS_FREE_BYTES,
    PATIENCE_S,
    ROUND,
    STATE,
    ExportWanted,
    Fetched,
    FetchFailed,
    Goal,
    Shape,
    chunk_bytes_of,
    split_donors,
)
from p2p_co2.protocol.catchup.history import HISTORY_BYTES_SHARE, HISTORY_ROUNDS_KEPT
from p2p_co2.protocol.catchup.machine import CatchUp
from p2p_co2.protocol.catchup.manifest import chunk_count
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.limits import MAX_DATA_BYTES
from p2p_co2.protocol.wire.messages_pb2 import Chunk, Decision, Fetch, Manifest, Refusal, Vote
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
    SMALL,
    World,
    named,
    state_of,
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


def test_a_donor_that_is_not_there_yet_is_asked_again() -> None:
    world = World(donors=1)
    world.move(D1, 6)
    world.want()
    world.run(seconds=1.0)
    world.move(D1, 7)
    world.run(seconds=3.0)
    assert world.fetched().version == 7


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


def test_rounds_after_a_state_that_is_being_given_are_held_and_then_let_go() -> None:
    world = World(donors=1)
    machine = world.machines[D1]
    shape = Shape((1000, 10), (2000, 2000))
    machine = CatchUp(IDENTITIES[1], RUN, shape)
    machine.donor.moved(0, 5)
    machine.receive(Fetch(what=STATE, fragment=0, version=5, request=1), LATE, 0.0)
    assert isinstance(machine.next_event(), ExportWanted)
    machine.donor.exported(0, 5, bytes(2000), bytes(32), [digest(bytes(2000))], 0.0)
    for version in range(4, 20):
        machine.donor.history.remember(0, version, Decision(), bytes(1000))
    kept = [version for version in range(30) if machine.donor.history.find(0, version)]
    assert kept == list(range(12, 20))  # HISTORY_ROUNDS_KEPT bounds even these
    machine.handle_timer(PATIENCE_S)
    kept = [version for version in range(30) if machine.donor.history.find(0, version)]
    assert kept == [19]


def test_who_has_loaded_a_state_has_time_to_replay_the_rounds_since() -> None:
    """As soon as it asks for the state of another fragment, the one that it has loaded makes room; the rounds
    after that went with it, a moment before it asked for the first of them (run 802396 of
    ``benchmarks/ends.py drawn``)."""
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


def test_rounds_are_held_for_who_has_loaded_a_state_whose_time_was_up() -> None:
    """It is checked and taken over, and over a slow line the first round since takes its time."""
    machine = CatchUp(IDENTITIES[1], RUN, Shape((1000,), (2000,)))
    machine.donor.moved(0, 5)
    machine.receive(Fetch(what=STATE, fragment=0, version=5, request=1), LATE, 1.0)
    machine.donor.exported(0, 5, bytes(2000), bytes(32), [bytes(32)], 1.0)
    machine.receive(Fetch(what=STATE, fragment=0, version=5, want_chunk=True), LATE, 1.0)
    for version in (6, 7):
        machine.donor.history.remember(0, version, Decision(), bytes(1000))
    ended_at = machine.get_timer()
    assert ended_at is not None
    for at, kept in ((ended_at, True), (ended_at + PATIENCE_S, False)):
        machine.handle_timer(at)
        assert machine.donor.exported_bytes() == 0
        assert (machine.donor.history.find(0, 6) is not None) == kept
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
