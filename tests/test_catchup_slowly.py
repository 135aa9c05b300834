"""Catching up over lines that carry a state more slowly than the swarm makes the next."""

from __future__ import annotations

import heapq
import itertools
import random

import pytest

from p2p_co2.protocol.catchup import (
    ROUND,
    STATE,
    CatchUpMessage,
    DonorRefused,
    Fetched,
    FetchFailed,
    Goal,
    Shape,
)
from p2p_co2.protocol.catchup.donor import TAKERS_KEPT
from p2p_co2.protocol.catchup.line import OUTRUN_S
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.limits import MAX_DATA_BYTES
from p2p_co2.protocol.wire.messages_pb2 import Chunk, Decision, Fetch, Manifest, Refusal
from tests.catchup_world import D1, D2, D3, LARGE, LATE, MEAN, World, named, state_of


def look_around(world: World) -> None:
    """Run to the end of it; a node names the donors again with each look around."""
    for _ in range(600):
        if not world.events:
            world.run(1.0)
            world.machines[LATE].add_donors(1, [D1, D2], world.now)


def test_a_donor_that_no_longer_keeps_a_state_gives_the_next_one_with_the_others() -> None:
    """Both said so at the same moment; the first was never asked again, and half of the line lay idle."""
    world = World(donors=2, rate=2e6)
    refused: list[PeerId] = []

    def forget_once(sender: PeerId, message: CatchUpMessage) -> CatchUpMessage:
        if isinstance(message, Chunk) and message.version == 7:
            for peer in (D1, D2):
                world.move(peer, 8)
            refused.append(sender)
            return Refusal(request=message.request, reason="that state is no longer kept")
        return message

    world.tamper = forget_once
    world.want(version=7)
    world.run()
    event = world.fetched()
    assert {D1, D2} == set(refused)
    assert event.version == 8
    given = [len(set(world.chunks_from(donor))) for donor in (D1, D2)]
    assert min(given) > 10  # of 40, each about its half


@pytest.mark.parametrize(("other_s", "gives", "loaded"), [(4.0, True, 7), (16.0, False, 6)])
def test_the_first_chunk_is_waited_for_where_others_show_that_our_own_line_is_slow(
    other_s: float, gives: bool, loaded: int
) -> None:
    """They promise something else, and give a round's chunks. One that takes 12 s had been given up; one that
    gives nothing was waited for until the whole load failed, after a minute."""
    shape = Shape((10, 8 * MAX_DATA_BYTES), (2 * MAX_DATA_BYTES, 10))
    world = World(donors=3, rate=MAX_DATA_BYTES / other_s, shape=shape)
    world.move(D2, 6)
    mean = random.Random(1).randbytes(shape.mean_bytes[1])
    world.machines[D2].remember(1, 6, Decision(outcome=b"x"), mean)
    world.machines[LATE].want(Goal(ROUND, 1, 6, (D2,)), world.now)
    world.run(4.1 * other_s)
    world.rates[D1] = MAX_DATA_BYTES / 12.0
    world.tamper = lambda sender, message: (
        None if sender == D3 or (sender == D1 and isinstance(message, Chunk) and not gives) else message
    )
    digest = named(state_of(0, 7)[-shape.state_bytes[0] :])
    world.machines[LATE].want(Goal(STATE, 0, 7, (D1, D2, D3), digest=digest, oldest=6), world.now)
    world.run(400.0, enough=2)
    assert {(event.goal.what, event.version) for event in world.events if isinstance(event, Fetched)} == {
        (ROUND, 6), (STATE, loaded),
    }  # fmt: skip


def test_a_slow_giver_is_not_measured_by_those_who_promise_something_else() -> None:
    """What they had given of another fragment came 16 times as fast."""
    world = World(donors=2, rate=8e6)
    world.machines[LATE].want(Goal(STATE, 2, 7, (D2,)), world.now)
    world.run()
    world.events.clear()
    world.rates[D1] = 125e3
    world.move(D2, 6)
    digest = named(state_of(1, 7))
    world.machines[LATE].want(Goal(STATE, 1, 7, (D1, D2), digest=digest, oldest=6), world.now)
    world.run()
    assert world.fetched().version == 7
    asked = [m for sender, m in world.sent if sender == LATE and isinstance(m, Fetch) and m.want_chunk]
    assert {m.version for m in asked if m.fragment == 1} == {7}


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


def test_what_is_loaded_within_ten_seconds_is_told_once_it_is_there() -> None:
    world = World()
    for fragment in (1, 2, 0):
        world.events.clear()
        world.want(fragment)
        world.run()
        world.now += 9.0
        world.run(1.0)
    assert world.told == []


def test_a_donor_that_was_silent_is_asked_again_later() -> None:
    world = World(donors=2, rate=100e3)
    world.tamper = lambda sender, message: (
        None if sender == D2 and world.now < 30.0 and isinstance(message, Manifest) else message
    )
    world.want()
    look_around(world)
    world.fetched()
    first_at = min(
        at for at, (sender, message) in enumerate(world.sent) if sender == D2 and isinstance(message, Chunk)
    )
    asked = sum(isinstance(m, Fetch) and not m.want_chunk and sender == LATE for sender, m in world.sent)
    assert first_at > 0
    assert asked == 3  # both at once, and D2 once more
    assert len(world.chunks_from(D2)) > 5
    assert world.now > OUTRUN_S


def test_a_donor_is_not_asked_anew_while_it_is_being_asked() -> None:
    """Its source was replaced after a minute, and the chunks that it owed were never asked for again."""
    world = World(donors=2, rate=100e3)
    refusals = [0]

    def forget(sender: PeerId, message: CatchUpMessage) -> CatchUpMessage:
        if isinstance(message, Chunk) and sender == D2 and not refusals[0]:
            refusals[0] += 1
            return Refusal(request=message.request, reason="that state is no longer kept")
        return message

    world.tamper = forget
    world.want()
    look_around(world)
    world.fetched()


def test_a_round_is_replayed_while_a_state_is_loaded_from_the_same_donor() -> None:
    """Each chunk that came made room for the next of the same state: the round waited until its download was
    given up after 60 s."""
    shape = Shape((4 * MAX_DATA_BYTES, 4 * MAX_DATA_BYTES), (LARGE, LARGE))
    world = World(donors=1, rate=200e3, shape=shape)
    mean = random.Random(1).randbytes(4 * MAX_DATA_BYTES)
    world.machines[D1].remember(0, 7, Decision(outcome=b"x"), mean)
    world.want(fragment=1)
    world.run(10.0)
    world.machines[LATE].want(Goal(ROUND, 0, 7, (D1,)), world.now)
    began_at = world.now
    world.run(200.0)
    (event,) = world.events
    assert isinstance(event, Fetched)
    assert event.goal.what == ROUND
    assert bytes(event.data) == mean
    assert world.now - began_at < 35.0  # eight chunks of 2.6 s, and what was asked for before; the rest: 95 s


def test_rounds_that_wait_for_their_turn_with_a_slow_donor_are_not_given_up() -> None:
    """Of twelve fragments, each a round behind, one chunk came every 6.5 s: the twelfth's turn came after
    more than a minute, and all twelve were given up for whole states."""
    fragments, mean_bytes = 12, 4 * (64 << 10)
    shape = Shape((mean_bytes,) * fragments, (4 * mean_bytes,) * fragments, 64 << 10)
    world, mean = World(donors=1, rate=10e3, shape=shape), random.Random(1).randbytes(mean_bytes)
    for fragment in range(fragments):
        world.machines[D1].remember(fragment, 7, Decision(outcome=b"x"), mean)
        world.machines[LATE].want(Goal(ROUND, fragment, 7, (D1,)), world.now)
    began_at = world.now
    world.run(400.0, enough=fragments)
    assert [bytes(event.data) for event in world.events if isinstance(event, Fetched)] == 12 * [mean]
    assert world.now - began_at < 1.05 * fragments * mean_bytes / 10e3


def test_who_gives_others_but_not_this_one_is_given_up_with_them() -> None:
    """A donor that says again and again that it is busy gives us nothing of what it promised."""
    world = World(donors=1, rate=500e3)
    world.tamper = lambda sender, message: (
        Refusal(request=message.request, reason="busy", again=True)
        if isinstance(message, Manifest) and message.fragment == 0
        else message
    )
    world.want(fragment=0)
    world.run(1.0)
    mean = random.Random(1).randbytes(10)
    began_at = world.now
    for version in range(1, 120):  # what it gives meanwhile
        world.machines[D1].remember(1, version, Decision(outcome=b"x"), mean)
        world.machines[LATE].want(Goal(ROUND, 1, version, (D1,)), world.now)
        world.run(1.0)
        if any(isinstance(event, FetchFailed) for event in world.events):
            break
        world.events.clear()
        world.now += 1.0
    assert isinstance(world.events[-1], FetchFailed)
    assert 55.0 < world.now - began_at < 65.0


@pytest.mark.parametrize("donors", [1, 2])
def test_a_chunk_that_is_lost_among_others_is_not_waited_for_as_long_as_they_come(donors: int) -> None:
    """Its donor was not silent, and gave to another download: a liar could do so for ever. Beside it an
    honest one, that was owed nothing, gave to that one, too: it is asked for the chunk."""
    world = World(donors, rate=5e6)
    world.want(1)
    world.run()
    for donor in (D1, D2)[:donors]:
        world.machines[donor].remember(0, 7, Decision(outcome=b"x"), MEAN)
    world.tamper = lambda sender, message: (
        None if isinstance(message, Chunk) and (message.fragment, sender) == (0, D1) else message
    )
    began_at, version, ended = world.now, 7, list[Fetched | FetchFailed]()
    world.machines[LATE].want(Goal(ROUND, 0, 7, (D1, D2)[:donors]), world.now)
    while not ended and version < 100:
        version += 1
        world.events.clear()
        for donor in (D1, D2)[:donors]:
            world.move(donor, version)
        world.want(1, version)
        world.run()
        ended = [e for e in world.events if isinstance(e, Fetched | FetchFailed) and e.goal.fragment == 0]
    waited_s = world.now - began_at
    if donors == 1:
        assert isinstance(ended[0], FetchFailed)
        assert "does not give chunk 0, but later ones" in ended[0].reason
        assert 10.0 < waited_s < 40.0  # asked for it time and again, as a message may be lost
    else:
        assert isinstance(ended[0], Fetched)
        assert waited_s < 10.0


def test_a_chunk_that_each_donor_has_lost_once_is_asked_for_again_while_they_give_others() -> None:
    """It was waited for until the whole download failed, for a minute; two of 600 swarms in storms were in
    two histories all that time (runs 804128 and 804587 of ``benchmarks/ends.py drawn``)."""
    world = World(donors=2, rate=5e6)
    lost = set[PeerId]()

    def tamper(sender: PeerId, message: CatchUpMessage) -> CatchUpMessage | None:
        if isinstance(message, Chunk) and (message.fragment, message.chunk) == (1, 39) and sender not in lost:
            lost.add(sender)
            return None
        return message

    world.tamper = tamper
    world.want(1)
    for version in range(7, 50):
        for donor in (D1, D2):
            world.machines[donor].remember(0, version, Decision(outcome=b"x"), MEAN)
        world.machines[LATE].want(Goal(ROUND, 0, version, (D1, D2)), world.now)
        world.run(seconds=1.0, enough=100)
        if any(isinstance(event, Fetched) and event.goal.fragment == 1 for event in world.events):
            break
    assert lost == {D1, D2}
    assert version < 20  # rounds, one each second
    assert not [event for event in world.events if isinstance(event, DonorRefused | FetchFailed)]


def test_what_is_on_its_way_moves_and_what_is_only_asked_for_or_doubled_does_not() -> None:
    """By this a peer whose run is over knows that it has to stay."""
    world = World(donors=1, rate=1e6)
    late, donor = world.machines[LATE], world.machines[D1]
    began_at = world.now
    chunks: list[Chunk] = []

    def tamper(sender: PeerId, message: CatchUpMessage) -> CatchUpMessage | None:
        if isinstance(message, Chunk):
            chunks.append(message)
            return message if len(chunks) == 1 else None  # all others are lost
        return message

    world.tamper = tamper
    assert not late.moves(began_at, 1e9)
    assert not donor.moves(began_at, 1e9)
    world.want()
    world.run(0.1)  # the manifest is there, and a chunk under way
    assert len(chunks) == 1
    assert not late.moves(world.now, 1e9)
    assert donor.moves(world.now, 1.0)
    world.run(1.0)
    asked_at = world.now
    assert late.moves(asked_at, 1.0)
    late.receive(chunks[0], D1, asked_at + 5.0)  # doubled under way
    (first, *_) = [m for sender, m in world.sent if sender == LATE and isinstance(m, Fetch) and m.want_chunk]
    donor.receive(first, LATE, asked_at + 5.0)  # and once more
    assert not late.moves(asked_at + 5.0, 4.9)
    assert not donor.moves(asked_at + 5.0, 4.9)
    assert late.moves(asked_at + 5.0, 6.0)
    assert donor.donor.takers(asked_at + 5.0, 6.0) == [LATE]
    assert donor.donor.takers(asked_at + 5.0, 4.9) == late.donor.takers(asked_at, 1e9) == []
    late.is_busy(D1, asked_at + 6.0)  # a round's bytes, before which no chunk comes
    assert late.moves(asked_at + 6.0, 0.1)
    donor.is_busy(LATE, asked_at + 6.0)
    assert not donor.moves(asked_at + 6.0, 0.1)
    donor.remember(0, 7, Decision(outcome=b"x"), bytes(10))
    donor.receive(Fetch(what=ROUND, fragment=0, version=7), LATE, asked_at + 5.0)
    assert not donor.moves(asked_at + 5.0, 4.9)
    donor.receive(Fetch(what=ROUND, fragment=0, version=7, want_chunk=True), LATE, asked_at + 5.0)
    assert donor.moves(asked_at + 5.0, 0.0)


def test_who_was_given_something_is_remembered_within_a_bound() -> None:
    donor = World(donors=1).machines[D1].donor
    for number in range(TAKERS_KEPT + 3):
        donor._gave(PeerId(f"taker {number}"), float(number))
    donor._gave(PeerId("taker 5"), 100.0)
    assert donor.held()["TAKERS_KEPT"] == (TAKERS_KEPT, TAKERS_KEPT)
    takers = donor.takers(100.0, 100.0)
    assert set(takers) == {f"taker {number}" for number in range(3, TAKERS_KEPT + 3)}
    assert donor.takers(100.0, 1.0) == ["taker 5"]


@pytest.mark.parametrize("waits", [False, True])
def test_what_is_forgotten_tells_nothing_and_leaves_its_room_to_who_waits(waits: bool) -> None:
    """Two large states, one at a time: the one that is loaded is forgotten, or the one that waits."""
    world = World(donors=1, rate=2e6)
    late = world.machines[LATE]
    for fragment in (1, 2):
        world.want(fragment)
    world.run(0.3)
    assert late.fetching(1)
    assert late.fetching(2)
    late.forget(2 if waits else 1, world.now)
    assert late.fetching(1) is waits
    assert late.fetching(2) is not waits
    look_around(world)
    (ended,) = (event for event in world.events if isinstance(event, Fetched | FetchFailed))
    assert isinstance(ended, Fetched)
    assert ended.goal.fragment == (1 if waits else 2)
    assert late.get_timer() is None


@pytest.mark.parametrize("seed", range(6))
def test_a_chunk_that_was_late_and_not_lost_is_asked_for_no_more(seed: int) -> None:
    """What takes the slower of two connections comes late. It had been given up, came, and was asked for all
    the same, of the donor that had given it: its second answer counted for nothing, and it for a liar."""
    came, asked_again, chunk_bytes = set[tuple[int, int]](), list[Fetch](), 16 << 10
    world = World(2, 5e5, Shape((10, 10), (90 * chunk_bytes,) * 2, chunk_bytes))
    random_, sent, late = random.Random(seed), itertools.count(), world.machines[LATE]
    send, receive = world._send, late.receive

    def on_two_ways(sender: PeerId, receiver: PeerId, message: CatchUpMessage) -> None:
        if isinstance(message, Fetch) and message.want_chunk and (message.request, message.chunk) in came:
            asked_again.append(message)
        if isinstance(message, Chunk):
            world.rates[sender] = 8e3 if next(sent) // 25 % 2 else 5e5
            if random_.random() < 0.06:
                at = world.now + random_.uniform(0.5, 20.0)
                heapq.heappush(world._under_way, (at, next(world._order), sender, receiver, message))
                return
        send(sender, receiver, message)

    def note(message: CatchUpMessage, sender: PeerId, now: float) -> None:
        receive(message, sender, now)
        if isinstance(message, Chunk):
            came.add((message.request, message.chunk))

    world._send, late.receive = on_two_ways, note  # type: ignore[method-assign, assignment]
    world.want(1)
    world.want(0)
    world.run(900.0, enough=2)
    assert [type(event) for event in world.events] == [Fetched, Fetched]
    assert not asked_again
