"""Leaving a slow donor for those that are further, and going back: with liars on either side."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Sequence

import pytest

from p2p_co2.protocol.catchup import STATE, CatchUpMessage, Goal
from p2p_co2.protocol.catchup.line import OUTRUN_S
from p2p_co2.protocol.catchup.source import MOVES_MOST
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.limits import MAX_DATA_BYTES
from p2p_co2.protocol.wire.messages_pb2 import Chunk, Fetch, Manifest, Refusal
from tests.catchup_world import CHUNKS, D1, D2, D3, D4, D5, LARGE, LATE, World, named, state_of


@pytest.mark.parametrize("others_come_late", [False, True])
def test_a_slow_donor_is_left_where_all_others_have_moved_on(others_come_late: bool) -> None:
    """It alone kept the version that had been begun, and 8 MB came at 65 kB/s beside three donors of 2 MB/s
    each: all of theirs is there sooner than the rest of its."""
    world = World(donors=4, rate=2e6)
    others = (D2, D3, D4)
    world.rates[D1] = 65e3

    def keep_only_the_newest(sender: PeerId, message: CatchUpMessage) -> CatchUpMessage:
        if (
            sender != D1
            and isinstance(message, Chunk | Manifest)
            and message.version < world.versions[sender]
        ):
            newest = world.versions[sender]
            return Refusal(request=message.request, reason="no longer kept", newest_version=newest)
        return message

    world.tamper = keep_only_the_newest
    world.machines[LATE].ask_swarm(lambda donor, fragment, version, digest: version == 8 or None)
    if others_come_late:
        world.machines[LATE].want(Goal(STATE, 1, 7, (D1,)), world.now)
        for peer in others:
            world.move(peer, 8)
    else:
        world.want(version=7)
    world.run(10.0 if others_come_late else 0.8)
    assert len(world.chunks_from(D1)) > 0
    for peer in others:
        world.move(peer, 8)
    world.machines[LATE].add_donors(1, others, world.now)
    began_at = world.now
    world.run()
    assert world.fetched().version == 8
    assert world.now - began_at < 20.0  # 10.5 MB at 6 MB/s, and the slow one's rest: 160 s


def test_a_donor_that_is_nearly_done_is_not_left_for_what_is_newer() -> None:
    world = World(donors=2, rate=2e6)
    world.want(version=7)
    world.run(2.0)
    for peer in (D1, D2):
        world.move(peer, 8)
    world.machines[LATE].add_donors(1, [D3], world.now)
    world.run()
    assert world.fetched().version == 7


@pytest.mark.parametrize("vouch_for_each_other", [False, True])
def test_many_that_promise_much_and_give_nothing_end_no_download(vouch_for_each_other: bool) -> None:
    """They cost a honest donor its place, and a newcomer all that it had, time after time."""
    world = World(donors=4, rate=2e6)
    world.rates[D1] = 200e3
    liars = {D2, D3, D4}
    world.tamper = lambda sender, message: None if sender in liars and isinstance(message, Chunk) else message
    if vouch_for_each_other:
        world.machines[LATE].ask_swarm(lambda donor, fragment, version, digest: version == 8 or None)
    world.machines[LATE].want(Goal(STATE, 1, 7, (D1,)), world.now)
    for peer in liars:
        world.move(peer, 8)
    world.run(10.0)
    for _ in range(20):  # a node names the donors again with each look around
        world.machines[LATE].add_donors(1, sorted(liars), world.now)
        world.run(10.0)
    assert world.fetched().version == 7
    assert turns_of_fragment_1(world) == ([7, 8, 7] if vouch_for_each_other else [7])


def turns_of_fragment_1(world: World) -> list[int]:
    """The versions whose chunks the late peer asked for, one after the other."""
    asked = [m for sender, m in world.sent if sender == LATE and isinstance(m, Fetch) and m.want_chunk]
    return [version for version, _ in itertools.groupby(m.version for m in asked if m.fragment == 1)]


def test_a_download_leaves_what_it_has_begun_once() -> None:
    """For the first of two who gave another fragment quickly, vouch for each other, and then give nothing."""
    world = World(donors=3, rate=2e6)
    world.rates[D1] = 200e3
    world.machines[LATE].ask_swarm(lambda donor, fragment, version, digest: version == 8 or None)
    world.machines[LATE].want(Goal(STATE, 2, 7, (D2, D3)), world.now)
    world.run()
    world.events.clear()
    world.tamper = lambda sender, message: None if sender != D1 and isinstance(message, Chunk) else message
    world.machines[LATE].want(Goal(STATE, 1, 7, (D1,)), world.now)
    for liar in (D2, D3):
        world.run(10.0)
        world.move(liar, 8)
        world.machines[LATE].add_donors(1, [liar], world.now)
        world.run(25.0)
    world.run()
    assert world.fetched().version == 7
    assert turns_of_fragment_1(world) == [7, 8, 7]


def test_what_was_left_is_not_gone_back_to_when_who_is_further_moves_on_once_more() -> None:
    """Though most peers had reported it when the load began."""
    world = World(donors=2, rate=2e6)
    world.rates[D1] = 200e3
    world.machines[LATE].ask_swarm(lambda donor, fragment, version, digest: version > 7 or None)
    world.machines[LATE].want(Goal(STATE, 2, 7, (D2,)), world.now)
    world.run()
    world.events.clear()
    digest = named(state_of(1, 7))
    world.machines[LATE].want(Goal(STATE, 1, 7, (D1,), digest=digest), world.now)
    world.move(D2, 8)
    world.run(10.0)
    world.machines[LATE].add_donors(1, [D2], world.now)
    world.run(2.0)

    def keep_only_the_newest(sender: PeerId, message: CatchUpMessage) -> CatchUpMessage:
        if sender == D2 and isinstance(message, Chunk | Manifest) and message.version < 9:
            return Refusal(request=message.request, reason="no longer kept", newest_version=9)
        return message

    world.tamper = keep_only_the_newest
    world.move(D2, 9)
    world.run(60.0)
    assert world.fetched().version == 9
    assert turns_of_fragment_1(world) == [7, 8, 9]


def left_for(donors: int, quick: Sequence[PeerId], slow_bytes_per_s: float = 200e3) -> World:
    """A late peer that has begun version 7 with D1, the slow one, and left it for ``quick``: these gave
    another fragment quickly, promise 8, and others vouch for what is newer than 7."""
    world = World(donors, rate=2e6)
    world.rates[D1] = slow_bytes_per_s
    late = world.machines[LATE]
    late.ask_swarm(lambda donor, fragment, version, digest: version > 7 or None)
    late.want(Goal(STATE, 2, 7, tuple(quick)), world.now)
    world.run()
    world.events.clear()
    late.want(Goal(STATE, 1, 7, (D1,)), world.now)
    for peer in quick:
        world.move(peer, 8)
    world.run(10.0)
    late.add_donors(1, quick, world.now)
    return world


def test_two_that_say_by_turns_that_they_have_nothing_yet_keep_nobody_from_who_stands_by() -> None:
    """One of them had always yet to answer, and the load failed with an honest donor at hand."""
    world = left_for(3, (D2, D3))
    send, manifests, refusals = world._send, itertools.count(), Counter[PeerId]()

    def after_a_while(sender: PeerId, receiver: PeerId, message: CatchUpMessage) -> None:
        if isinstance(message, Refusal) and message.again:
            refusals[sender] += 1
            late_s = 0.5 if refusals[sender] == 1 and sender == D3 else 2.9
            heapq.heappush(
                world._under_way, (world.now + late_s, next(world._order), sender, receiver, message)
            )
        else:
            send(sender, receiver, message)

    def refuse(sender: PeerId, message: CatchUpMessage) -> CatchUpMessage:
        if sender == D1 or not isinstance(message, Chunk | Manifest):
            return message
        if isinstance(message, Manifest) and next(manifests) < 2:
            return message
        is_chunk = isinstance(message, Chunk)
        return Refusal(
            request=message.request, reason="no longer kept" if is_chunk else "", again=not is_chunk
        )

    world._send = after_a_while  # type: ignore[method-assign]
    world.tamper = refuse
    world.run()
    assert world.fetched().version == 7
    assert turns_of_fragment_1(world) == [7, 8, 7]


def test_one_that_promises_another_state_after_each_chunk_is_gone_to_no_more_than_twice() -> None:
    """Each was begun anew, for ever."""
    world = left_for(2, (D2,))
    promised = 8

    def move_on(sender: PeerId, message: CatchUpMessage) -> CatchUpMessage:
        nonlocal promised
        if (
            sender == D2
            and isinstance(message, Chunk)
            and message.version == promised < 40
            and message.chunk > 8
        ):
            promised += 1
            world.move(D2, promised)
        if sender == D2 and isinstance(message, Chunk | Manifest) and message.version < promised:
            return Refusal(request=message.request, reason="no longer kept", newest_version=promised)
        return message

    world.tamper = move_on
    world.run()
    assert world.fetched().version == 7
    assert turns_of_fragment_1(world) == [7, 8, 9, 7]


def test_one_that_becomes_a_trickle_once_it_is_gone_to_is_left_for_who_stands_by() -> None:
    """Each of its chunks came as late as it was waited for: half an hour, beside a donor of a minute."""
    world, pauses_s = left_for(2, (D2,)), iter([1.5, 5.0, 15.0])

    def trickle(sender: PeerId, message: CatchUpMessage) -> CatchUpMessage:
        if sender == D2 and isinstance(message, Chunk):
            world.rates[D2] = MAX_DATA_BYTES / next(pauses_s, 36.0)
        return message

    world.tamper = trickle
    began_at = world.now
    world.run(3000.0)
    assert world.fetched().version == 7
    assert turns_of_fragment_1(world) == [7, 8, 7]
    assert world.now - began_at < 26.0 + 1.05 * LARGE / 200e3  # after 26 s half of 8 is not there


def test_those_that_promise_anew_by_turns_and_give_nothing_are_left_for_who_stands_by() -> None:
    """Each refuses before it counts as silent, three times, and is back after a minute."""
    world = left_for(5, (D2,))
    liars, send = (D2, D3, D4, D5), world._send

    def late(sender: PeerId, receiver: PeerId, message: CatchUpMessage) -> None:
        if isinstance(message, Refusal) and not message.newest_version:
            heapq.heappush(world._under_way, (world.now + 9.0, next(world._order), sender, receiver, message))
        else:
            send(sender, receiver, message)

    world._send = late  # type: ignore[method-assign]
    world.tamper = lambda sender, message: (
        Refusal(request=message.request, reason="no longer kept")
        if sender in liars and isinstance(message, Chunk)
        else message
    )
    began_at = world.now
    for liar in liars:
        world.move(liar, 8)
    for second in range(600):
        world.run(1.0)
        come = liars[: 2 + (second > 4) + (second > 20)]
        world.machines[LATE].add_donors(1, come, world.now)
    assert world.fetched().version == 7
    assert turns_of_fragment_1(world) == [7, 8, 7]
    assert world.now - began_at < 650.0


def test_who_stands_by_keeps_what_it_promised_for_longer_than_what_nobody_asks_for() -> None:
    """It had dropped it when it was gone back to, and that cost what the others had given."""
    world = left_for(2, (D2,), 500e3)
    began_at = world.now

    def slower_and_slower(sender: PeerId, message: CatchUpMessage) -> CatchUpMessage:
        if sender == D2 and isinstance(message, Chunk):
            world.rates[D2] = MAX_DATA_BYTES / (
                1.2 if message.chunk < 21 else 2.4 if message.chunk < 31 else 9.0
            )
        return message

    world.tamper = slower_and_slower
    world.run(600.0)
    assert world.fetched().version == 7
    assert turns_of_fragment_1(world) == [7, 8, 7]
    assert world.now - began_at > 3 * 26.0
    assert not [m for sender, m in world.sent if sender == D1 and isinstance(m, Refusal)]


def test_who_stands_by_and_is_busy_for_a_moment_stands_by_still() -> None:
    """It was asked for what it was left for, which it does not have, and dropped."""
    world, busy = left_for(2, (D2,)), [True]

    def refuse(sender: PeerId, message: CatchUpMessage) -> CatchUpMessage | None:
        if sender == D2 and isinstance(message, Chunk):
            world.rates[D2] = MAX_DATA_BYTES / 1.2
            return None if message.chunk > 20 else message
        if sender == D1 and isinstance(message, Manifest) and busy:
            busy.clear()
            return Refusal(request=message.request, reason="busy with another newcomer", again=True)
        return message

    world.tamper = refuse
    world.run()
    assert not busy
    assert world.fetched().version == 7
    assert turns_of_fragment_1(world) == [7, 8, 7]


def test_one_that_promises_another_state_after_each_chunk_is_asked_for_that_a_few_times() -> None:
    """Beside one that answers all the time: each was of the version that most are said to have, and begun
    anew for ever."""
    world = World(donors=2, rate=2e6)
    promised = itertools.count(9)
    world.move(D2, 8)

    def others(sender: PeerId, message: CatchUpMessage) -> CatchUpMessage:
        if sender == D2 and isinstance(message, Chunk) and message.chunk > 8:
            world.move(D2, next(promised))
            return Refusal(request=message.request, reason="no longer kept")
        return message

    world.tamper = others
    world.machines[LATE].ask_swarm(lambda donor, fragment, version, digest: donor == D2 or None)
    world.want()
    world.run()
    assert world.fetched().version == 7
    assert turns_of_fragment_1(world)[-1] == 7
    assert len(turns_of_fragment_1(world)) <= 2 + MOVES_MOST


def test_one_that_is_busy_for_a_moment_is_waited_for() -> None:
    """It was left at once, with nearly all of what it had given."""
    world = left_for(2, (D2,))
    refused: list[CatchUpMessage] = []

    def refuse(sender: PeerId, message: CatchUpMessage) -> CatchUpMessage:
        if sender == D2 and (
            (isinstance(message, Chunk) and message.chunk == CHUNKS - 4 and not refused)
            or (isinstance(message, Manifest) and len(refused) == 1)
        ):
            refused.append(message)
            return Refusal(request=message.request, reason="busy", again=isinstance(message, Manifest))
        return message

    world.tamper = refuse
    world.run()
    assert len(refused) == 2
    assert world.fetched().version == 8
    assert turns_of_fragment_1(world) == [7, 8]
    assert len(world.chunks_from(D2)) < 2 * CHUNKS + 10  # of fragment 2, and of this


def test_when_all_move_on_at_once_another_is_not_gone_to_before_they_have_answered() -> None:
    """What a bystander promised, for which nobody vouched, was begun within that moment."""
    world = World(donors=4, rate=2e6)
    world.move(D4, 8)
    world.want()
    world.run(1.0)

    def keep_only_the_newest(sender: PeerId, message: CatchUpMessage) -> CatchUpMessage:
        if isinstance(message, Chunk | Manifest) and message.version < world.versions[sender]:
            newest = world.versions[sender]
            return Refusal(request=message.request, reason="no longer kept", newest_version=newest)
        return message

    world.tamper = keep_only_the_newest
    for peer in (D1, D2, D3):
        world.move(peer, 9)
    world.run()
    assert world.fetched().version == 9
    assert turns_of_fragment_1(world) == [7, 9]


def test_those_in_reserve_are_asked_for_what_was_left_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who stood by had their places."""
    monkeypatch.setattr("p2p_co2.protocol.catchup.download.DONORS_AT_ONCE", 2)
    world = left_for(4, (D2,))
    for peer in (D3, D4):
        world.move(peer, 8)
    world.machines[LATE].add_donors(1, [D3, D4], world.now)
    world.run()
    assert world.fetched().version == 8
    assert world.chunks_from(D3)
    assert turns_of_fragment_1(world) == [7, 8]


def test_one_that_is_asked_for_nothing_keeps_no_slow_donor() -> None:
    """It promises the same, was slow with another fragment, and is therefore left out for a minute."""
    world = World(donors=5, rate=2e6)
    world.rates[D1] = 65e3
    world.machines[LATE].ask_swarm(lambda donor, fragment, version, digest: version == 8 or None)
    world.machines[LATE].want(Goal(STATE, 1, 7, (D1, D5)), world.now)
    lines = world.machines[LATE]._fetcher._lines
    lines.of(D5, world.now).slow_until = world.now + OUTRUN_S
    for peer in (D2, D3, D4):
        world.move(peer, 8)
    world.run(10.0)
    world.machines[LATE].add_donors(1, [D2, D3, D4], world.now)
    world.run(30.0)
    assert world.fetched().version == 8


@pytest.mark.parametrize("is_known", [False, True])
def test_more_donors_that_have_given_something_are_gone_to_unless_what_was_begun_is_known(
    is_known: bool,
) -> None:
    """Known: most peers report that version with that digest."""
    world = World(donors=4, rate=2e6)
    world.rates[D1] = 200e3
    world.machines[LATE].want(Goal(STATE, 2, 7, (D2, D3, D4)), world.now)
    world.run()
    world.events.clear()
    digest = named(state_of(1, 7)) if is_known else b""
    world.machines[LATE].want(Goal(STATE, 1, 7, (D1,), digest=digest), world.now)
    for peer in (D2, D3, D4):
        world.move(peer, 8)
    world.run(10.0)
    world.machines[LATE].add_donors(1, [D2, D3, D4], world.now)
    world.run()
    assert world.fetched().version == (7 if is_known else 8)


def test_one_donor_that_promises_more_than_anybody_knows_takes_nobody_from_a_slow_one() -> None:
    """Though it has given another fragment quickly."""
    world = World(donors=2, rate=2e6)
    world.rates[D1] = 200e3
    world.machines[LATE].want(Goal(STATE, 2, 7, (D2,)), world.now)
    world.run()
    world.fetched()
    world.events.clear()
    world.machines[LATE].want(Goal(STATE, 1, 7, (D1,)), world.now)
    world.run(10.0)
    world.move(D2, 9)
    world.machines[LATE].add_donors(1, [D2], world.now)
    world.run(400.0)
    assert world.fetched().version == 7
