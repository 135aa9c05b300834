"""Catching up, a late peer and its donors on virtual time: what it is for, donors that are slow, silent or
gone, and donors that lie. It ends in the right bytes or a failure, whatever they do."""

from __future__ import annotations

import itertools
import random
from itertools import count

import pytest

from p2p_co2.digest import chunk_digests
from p2p_co2.errors import RemoteProtocolError
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
    TransferSizes,
    chunk_bytes_of,
    split_donors,
)
from p2p_co2.protocol.catchup.history import HISTORY_BYTES_SHARE, HISTORY_ROUNDS_KEPT
from p2p_co2.protocol.catchup.machine import CatchUp
from p2p_co2.protocol.catchup.manifest import chunk_count
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.limits import MAX_DATA_BYTES
from p2p_co2.wire.messages_pb2 import Chunk, Decision, Fetch, Manifest, Refusal, Vote
from tests.catchup_world import (
    CHUNKS,
    D1,
    D2,
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


def test_a_round_is_replayed_from_the_history_with_its_decision() -> None:
    world = World()
    decision = Decision(outcome=b"outcome", votes=[Vote(member=0, signature=b"signature")])
    world.machines[D1].donor.history.remember(0, 3, decision, MEAN)
    world.machines[LATE].fetcher.want(Goal(ROUND, 0, 3, (D1, D2)), world.now)
    world.run()
    (event,) = world.events
    assert isinstance(event, Fetched)
    assert (event.data, event.decision, event.donors) == (MEAN, decision, (D1,))


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


# ---- what a donor holds


def test_the_history_is_bounded_and_keeps_the_newest_of_each_fragment() -> None:
    machine = CatchUp(IDENTITIES[0], RUN, TransferSizes((1000, 10), (2000, 2000)))
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
    shape = TransferSizes((mean_bytes,) * 4, (2000,) * 4)  # of small ones 1000 bytes may stay
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
    after it stay."""
    large = 3 * EXPORTS_FREE_BYTES // 4  # no room for two
    machine = CatchUp(IDENTITIES[1], RUN, TransferSizes((1000, 10), (large, large)))
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


@pytest.mark.parametrize("which", [0, 2])
def test_what_a_slow_donor_owes_of_one_state_is_still_to_be_had_when_the_next_is_asked_for(
    which: int,
) -> None:
    """The others had dropped that state to make room for the next: it ended in a failure, its chunks lost."""
    slow, shape = DONORS[which], TransferSizes((10,) * 4, (SMALL, HALF, HALF, HALF))
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


def many(states: int, size: int) -> TransferSizes:
    """A small one, and ``states`` of ``size``."""
    return TransferSizes((10,) * (states + 1), (SMALL, *(size,) * states))


@pytest.mark.parametrize("mb", [0.8, 4.0])
@pytest.mark.parametrize("donors", [1, 3])
def test_a_small_state_comes_over_ways_of_10_kb_s(donors: int, mb: float) -> None:
    """As between satellites behind relays. In chunks of half a megabyte no donor gave one in time, and a
    state that took longer than a minute was no longer kept."""
    size = int(mb * 1e6)
    world = World(donors, 10e3, TransferSizes((10, 10), (1000, size), chunk_bytes_of([size])))
    world.want(fragment=1)
    world.run(seconds=600.0)
    event = world.fetched()
    assert event.duration_s < 1.1 * size / (donors * 10e3) + 5.0


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


def test_a_chunk_of_one_of_several_donors_that_is_lost_is_given_by_another() -> None:
    """Those that had given nothing yet were no idle donors: the only chunk of a round took a minute."""
    world = World(donors=3, shape=TransferSizes((100,), (1000,), chunk_bytes=64 << 10))
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


def test_random_faults_end_in_the_right_bytes_or_a_failure_and_no_timer_is_left() -> None:
    for seed in range(25):
        random_ = random.Random(seed)
        world = World(donors=5, shape=TransferSizes((10, 10, 10), (SMALL, SMALL, 3 * SMALL)))
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
    shape = TransferSizes((mean_bytes,) * fragments, (4 * mean_bytes,) * fragments, 64 << 10)
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


# ---- donors that lie in bytes


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


@pytest.mark.parametrize(("donors", "times"), [(1, 1), (3, 1), (2, 1100)])
def test_who_takes_its_promise_back_stops_nobody(donors: int, times: int) -> None:
    """Once, though it owes a chunk, or a thousand times, each with the wish to be asked again."""
    world = World(donors=donors, rate=2e6)
    send = world.send
    promises = count()

    def with_refusals(sender: PeerId, receiver: PeerId, message: CatchUpMessage) -> None:
        is_first = sender == D1 and isinstance(message, Manifest) and next(promises) == 0
        if not is_first or times == 1:
            send(sender, receiver, message)
        for _ in range(times if is_first else 0):
            send(sender, receiver, Refusal(request=message.request, reason="no room", again=True))

    world.send = with_refusals  # type: ignore[method-assign]
    if donors == 3:
        world.tamper = lambda sender, message: (
            None if sender == D1 and isinstance(message, Chunk) else message
        )
    world.want()
    world.run()
    world.fetched()
