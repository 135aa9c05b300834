"""Catching up beside donors that lie, in their bytes or in what they say of themselves: it may cost time, by
a bound, and never the state."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import pytest

from p2p_co2.digest import chunk_digests
from p2p_co2.protocol.catchup.goals import (
    STATE,
    CatchUpMessage,
    DonorRefused,
    ExportWanted,
    Fetched,
    FetchFailed,
    Goal,
)
from p2p_co2.protocol.catchup.machine import CatchUp
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.limits import MAX_DATA_BYTES
from p2p_co2.protocol.wire.messages_pb2 import Chunk, Fetch, Manifest, Refusal
from tests.catchup_world import (
    CHUNKS,
    D1,
    D2,
    D3,
    DONORS,
    IDENTITIES,
    LARGE,
    LATE,
    RUN,
    SHAPE,
    World,
    export,
    lying,
    named,
    state_of,
    zero,
)

# ---- lies in bytes


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
    told, send = count(), world._send

    def with_a_refusal(sender: PeerId, receiver: PeerId, message: CatchUpMessage) -> None:
        send(sender, receiver, message)
        if sender == D1 and isinstance(message, Manifest) and next(told) == 0:
            send(sender, receiver, Refusal(request=message.request, reason="no room", again=True))

    world._send = with_a_refusal  # type: ignore[method-assign]
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
    send = world._send

    def again_and_again(sender: PeerId, receiver: PeerId, message: CatchUpMessage) -> None:
        if sender == D1 and isinstance(message, Manifest):
            for _ in range(1100):
                send(sender, receiver, Refusal(request=message.request, reason="no room", again=True))
        else:
            send(sender, receiver, message)

    world._send = again_and_again  # type: ignore[method-assign]
    world.want()
    world.run()
    assert world.fetched().donors == (D2,)
