"""Going back to who gave what was left, and on from there: nothing that came is thrown away."""

from __future__ import annotations

import heapq

import pytest

from p2p_co2.protocol.catchup import STATE, CatchUpMessage, FetchFailed, Goal, Shape
from p2p_co2.protocol.catchup.waiting import COMES_WITHIN_S
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.limits import MAX_DATA_BYTES
from p2p_co2.protocol.wire.messages_pb2 import Chunk, Manifest, Refusal
from tests.catchup_world import CHUNKS, D1, D2, D3, D4, LATE, SMALL, World, vouched_and_never_given
from tests.test_catchup_leaving import left_for, turns_of_fragment_1


def test_who_is_gone_back_to_has_all_the_time_that_a_donor_has() -> None:
    """Those it was left for had said nothing for nearly as long as a load waits for anything: it failed as it
    went back, and began anew, for ever."""
    size = 30 * MAX_DATA_BYTES  # a donor keeps it for those who take long over it
    world = World(donors=4, rate=2e6, shape=Shape((10, 10), (SMALL, size)))
    world.rates[D1] = 40e3
    liars = (D2, D3, D4)
    world.machines[LATE].ask_swarm(lambda donor, fragment, version, digest: version == 8 or None)
    world.tamper = lambda sender, message: None if sender in liars and isinstance(message, Chunk) else message
    world.machines[LATE].want(Goal(STATE, 1, 7, (D1,)), world.now)
    world.run(80.0)
    for peer in liars:
        world.move(peer, 8)
    world.machines[LATE].add_donors(1, liars, world.now)
    world.run(1500.0)
    assert world.fetched().version == 7
    assert turns_of_fragment_1(world) == [7, 8, 7]


def test_who_stands_by_is_gone_back_to_though_another_has_yet_to_answer() -> None:
    """It says by turns that it has nothing yet, and is waited for in the very moment in which the load would
    have failed."""
    size = 120 * MAX_DATA_BYTES // 8  # small chunks: the one that is gone to is looked at late
    world = World(donors=3, rate=2e6, shape=Shape((10, 10, 10), (SMALL, size, SMALL), MAX_DATA_BYTES // 8))
    world.rates[D1] = 50e3
    late, send = world.machines[LATE], world._send
    late.ask_swarm(lambda donor, fragment, version, digest: version == 8 or None)

    def slowly(sender: PeerId, receiver: PeerId, message: CatchUpMessage) -> None:
        if isinstance(message, Refusal) and message.again:
            heapq.heappush(world._under_way, (world.now + 2.9, next(world._order), sender, receiver, message))
        else:
            send(sender, receiver, message)

    def lie(sender: PeerId, message: CatchUpMessage) -> CatchUpMessage | None:
        if sender == D3 and isinstance(message, Manifest | Refusal):
            return Refusal(request=message.request, again=True)
        return None if sender == D2 and isinstance(message, Chunk) else message

    world._send = slowly  # type: ignore[method-assign]
    late.want(Goal(STATE, 1, 7, (D1,)), world.now)
    world.run(20.0)
    assert world.chunks_from(D1)
    line = late._fetcher._lines.of(D2, world.now)
    line._gaps_s.extend([0.24, 0.24, 0.24, 15.0])  # quick, but for once
    line.gave_at = world.now
    world.tamper = lie
    world.move(D2, 8)
    late.add_donors(1, [D2, D3], world.now)
    world.run(600.0)
    assert world.fetched().version == 7
    assert turns_of_fragment_1(world) == [7, 8, 7]


def test_what_was_left_is_put_aside_and_gone_on_with() -> None:
    """All that the first donor had given was lost, in memory and on disk."""
    world = left_for(2, (D2,), 500e3)
    world.tamper = lambda sender, message: None if sender == D2 and isinstance(message, Chunk) else message
    world.run()
    assert world.fetched().version == 7
    assert len(world.chunks_from(D1)) <= CHUNKS + 3  # those that were under way
    assert turns_of_fragment_1(world) == [7, 8, 7]


def test_one_that_is_busy_and_asked_for_nothing_keeps_its_promise() -> None:
    """What it had promised was forgotten, and it was asked for what it does not have until it was dropped."""
    world, busy = left_for(3, (D2,)), [True]
    world.move(D3, 9)
    world.machines[LATE].add_donors(1, [D3], world.now)
    world.run(0.5)
    source = world.machines[LATE]._fetcher._downloads[1].sources[D3]
    assert source.manifest is not None

    def refuse(sender: PeerId, message: CatchUpMessage) -> CatchUpMessage:
        if sender == D3 and isinstance(message, Manifest) and busy:
            busy.clear()
            return Refusal(request=message.request, reason="busy with another newcomer", again=True)
        if sender == D2 and isinstance(message, Chunk):
            world.rates[D2] = MAX_DATA_BYTES / 1.2
        return message

    world.tamper = refuse
    world.run(15.0)
    assert not busy
    assert source.manifest is not None
    assert source.agains == 0


def test_a_load_of_which_nothing_comes_ends_whoever_promises_by_turns() -> None:
    """Each promise, and each loss of it, was another minute: a load went on for ever beside one donor that
    said "again" and two that promised by turns and gave nothing."""
    world = World(donors=3, rate=2e6)
    late, began_at = world.machines[LATE], world.now

    def give_nothing(sender: PeerId, message: CatchUpMessage) -> CatchUpMessage | None:
        if sender == D1 and isinstance(message, Manifest | Chunk):
            return Refusal(request=message.request, reason="busy", again=True)
        return None if isinstance(message, Chunk) else message

    world.tamper = give_nothing
    late.want(Goal(STATE, 1, 7, (D1, D2)), world.now)
    for _ in range(100):
        world.run(5.0)
        if world.events:
            break
        if world.now > began_at + 25.0:
            late.add_donors(1, (D1, D2, D3), world.now)
    (failed,) = world.events
    assert isinstance(failed, FetchFailed)
    assert failed.reason.endswith(f"(for {COMES_WITHIN_S:.0f} s)")
    assert world.now - began_at == pytest.approx(COMES_WITHIN_S)


def test_where_nothing_came_for_long_others_that_promise_anything_are_gone_by_once() -> None:
    """The load ended with an honest donor of what is older at hand, and the next began in the same way."""
    world = vouched_and_never_given()
    late = world.machines[LATE]
    load = late._fetcher._downloads[1]
    assert load._chosen is not None
    assert load._chosen.version == 8
    load._waiting._came_at -= COMES_WITHIN_S  # as if others had promised the same by turns
    world.run(15.0)
    assert world.fetched().version == 7
