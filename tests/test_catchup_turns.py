"""Whose turn it is at a donor: who asks and loads nothing keeps no newcomer from a state for long."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from p2p_co2.protocol.catchup import STATE, CatchUp, ExportWanted, Fetched, FetchFailed, Shape
from p2p_co2.protocol.catchup.donor import EXPORT_LONGEST_S, EXPORT_SLOWEST_BYTES_PER_S
from p2p_co2.protocol.catchup.turns import (
    CHOOSING_S,
    MAX_CHOOSING,
    MAX_WAITING,
    PLACE_KEPT_S,
    WASTED_S,
    Loaders,
    Turns,
)
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.limits import MAX_DATA_BYTES
from p2p_co2.protocol.wire.messages_pb2 import Chunk, Fetch, Manifest, Refusal
from tests.catchup_world import CHUNKS, D1, D2, D3, IDENTITIES, LARGE, LATE, RUN, SMALL, World
from tests.fuzz.bench import Bench

DONORS = (D1, D2, D3)
HOST = PeerId("host")
FOUR = Shape((10,) * 4, (SMALL, LARGE, LARGE, LARGE))


def of_crowd(number: int) -> PeerId:
    return PeerId(f"one of a crowd {number}")


def manifest_of(fragment: int, version: int = 7) -> Fetch:
    return Fetch(what=STATE, fragment=fragment, version=version, request=1)


def chunk_of(fragment: int, chunk: int, version: int = 7) -> Fetch:
    return Fetch(what=STATE, fragment=fragment, version=version, request=1, want_chunk=True, chunk=chunk)


def beside(
    world: World, ask: Callable[[int], list[tuple[PeerId, Fetch]]], seconds: float, enough: int
) -> None:
    """Run ``world`` while every half second others ask all donors for what ``ask`` says."""
    ends_at, step = world.now + seconds, 0
    while world.now < ends_at and endings(world) < enough:
        for sender, fetch in ask(step):
            for donor in DONORS:
                world.machines[donor].receive(fetch, sender, world.now)
        at = world.now + 0.5
        world.run(seconds=0.5, enough=enough)
        world.now, step = max(world.now, at) if endings(world) < enough else world.now, step + 1


def endings(world: World) -> int:
    return sum(isinstance(event, Fetched | FetchFailed) for event in world.events)


@pytest.mark.parametrize("way", ["manifest", "same chunk", "manifests of all"])
def test_who_asks_for_a_state_and_does_not_load_it_keeps_nobody_from_another(way: str) -> None:
    """Of 13 downloads beside it 13 had failed."""

    def ask(step: int) -> list[tuple[PeerId, Fetch]]:
        if way == "same chunk" and step:
            return [(HOST, chunk_of(2, 0))]
        return (
            [(HOST, manifest_of(2 + step % 2 if way == "manifests of all" else 2))] if step % 4 == 0 else []
        )

    world = World(donors=3, shape=FOUR)
    for time in range(3):
        beside(world, ask, 10.0, endings(world) + 1)  # it is there first
        began_at = world.now
        world.want(fragment=1)
        beside(world, ask, 60.0, time + 1)
        assert world.now - began_at < 3 * CHOOSING_S
    assert [type(event) for event in world.events] == [Fetched] * 3


def test_a_crowd_that_came_before_costs_a_turn_each_and_one_that_comes_later_nothing() -> None:
    before = 6

    def ask(step: int) -> list[tuple[PeerId, Fetch]]:
        """One more of them every half second, each goes on asking, now for this and now for that."""
        return [(of_crowd(one), manifest_of(2 + (one + step // 3) % 2)) for one in range(step + before)]

    world = World(donors=3, shape=FOUR)
    for step in range(4):
        for sender, fetch in ask(-step):
            for donor in DONORS:
                world.machines[donor].receive(fetch, sender, world.now)
        world.run(seconds=0.1, enough=10)
    world.want(fragment=1)
    began_at = world.now
    beside(world, ask, 300.0, 1)
    world.fetched()
    assert world.now - began_at < (before + 1) * CHOOSING_S + 2.0


def test_ever_others_who_ask_for_the_manifest_do_not_keep_a_state_in_use() -> None:
    world = World(donors=3, shape=FOUR)
    ask = lambda step: [(of_crowd(step), manifest_of(2))]  # noqa: E731
    beside(world, ask, 10.0, 1)
    world.want(fragment=1)
    began_at = world.now
    beside(world, ask, 300.0, 1)
    world.fetched()
    assert world.now - began_at < 2 * CHOOSING_S + 2.0


def test_who_loads_is_not_driven_out_by_those_who_ask() -> None:
    """At 150 kB/s a chunk takes 3.5 s; a hundred ask for this state and for another meanwhile."""
    world = World(donors=3, rate=150e3, shape=FOUR)
    world.want(fragment=1)
    world.run(seconds=2.5)

    def ask(step: int) -> list[tuple[PeerId, Fetch]]:
        return [(of_crowd(step % 100 * 2 + of), manifest_of(1 + of)) for of in range(2)]

    beside(world, ask, 120.0, 1)
    assert world.fetched().duration_s < LARGE / (3 * 150e3) + 8.0


def test_a_slow_newcomer_has_its_turn_for_no_longer_than_an_export_lasts() -> None:
    world = World(donors=3, shape=FOUR)

    asked = [0]

    def ask(step: int) -> list[tuple[PeerId, Fetch]]:
        """A new chunk every 5 s: as slow as a loader may be."""
        asked[0] += 1
        fetch = chunk_of(2, asked[0] // 10 % CHUNKS) if asked[0] % 10 == 5 else manifest_of(2)
        return [(HOST, fetch)] if asked[0] % 5 == 0 or asked[0] == 1 else []

    beside(world, ask, 4.0, 1)
    began_at = world.now
    while not any(isinstance(event, Fetched) for event in world.events):
        assert world.now - began_at < EXPORT_LONGEST_S + LARGE / EXPORT_SLOWEST_BYTES_PER_S + 10.0
        world.want(fragment=1)
        beside(world, ask, 5.0, endings(world) + 1)
    assert world.now - began_at > 60.0  # it was in use as long as new chunks went


def donor_with_all() -> CatchUp:
    donor = CatchUp(IDENTITIES[1], RUN, FOUR)
    for fragment in range(4):
        donor.moved(fragment, 7)
    return donor


def answer(donor: CatchUp, fetch: Fetch, sender: PeerId, now: float) -> Manifest | Chunk | Refusal | None:
    """What ``sender`` is told at once; exports are made as soon as they are wanted."""
    donor.receive(fetch, sender, now)
    while isinstance(event := donor.next_event(), ExportWanted):
        data = bytes(donor.shape.state_bytes[event.fragment])
        donor.exported(event.fragment, 7, data, bytes(32), [bytes(32)] * CHUNKS, now)
    answers = [message for to, message in donor.messages_to_send() if to == sender]
    assert len(answers) <= 1
    (told,) = answers or [None]
    assert not isinstance(told, Fetch)
    return told


def test_who_takes_nothing_off_our_hands_does_not_load() -> None:
    donor = donor_with_all()
    answer(donor, manifest_of(2), HOST, 0.0)
    for chunk in range(4):
        answer(donor, chunk_of(2, chunk), HOST, 1.0)
    assert isinstance(answer(donor, manifest_of(1), LATE, 6.0), Refusal)
    donor.donor.takes_nothing(HOST)
    assert isinstance(answer(donor, manifest_of(1), LATE, 6.5), Manifest)


def test_a_queue_that_is_full_says_that_its_peer_takes_nothing() -> None:
    bench = Bench("donor")
    bench.catchup.receive(manifest_of(0, 0), HOST, bench.now())
    bench.pump()
    bench.catchup.receive(chunk_of(0, 0, 0), HOST, bench.now())
    (export,) = bench.catchup.donor._exports.values()
    assert export.loaders.is_in_use(bench.now() + 1.0)
    bench.router.overasked(HOST)
    bench.catchup.donor.takes_nothing(HOST)
    assert not export.loaders.is_in_use(bench.now())


def test_room_is_made_by_what_the_asker_itself_asked_for_longest_ago() -> None:
    """And not by what it says that it still loads, whoever asks for what else."""
    size = 15 * MAX_DATA_BYTES
    donor = CatchUp(IDENTITIES[1], RUN, Shape((10,) * 4, (size,) * 4))
    for fragment in range(4):
        donor.moved(fragment, 7)
    answer(donor, manifest_of(1), LATE, 0.0)
    answer(donor, chunk_of(1, 0), LATE, 0.0)
    answer(donor, manifest_of(2), LATE, 0.0)
    answer(donor, chunk_of(2, 0), LATE, 5.0)
    answer(donor, manifest_of(1), LATE, 8.0)  # another donor is late with its last chunks
    answer(donor, manifest_of(2), HOST, 8.0)
    assert isinstance(answer(donor, manifest_of(3), LATE, 14.0), Manifest)
    assert isinstance(answer(donor, chunk_of(1, 1), LATE, 14.0), Chunk)
    assert isinstance(answer(donor, chunk_of(2, 1), LATE, 14.0), Refusal)


def test_who_was_turned_away_first_goes_first_if_it_still_asks() -> None:
    donor = donor_with_all()
    answer(donor, manifest_of(2), HOST, 0.0)
    for number, at in ((0, 1.0), (1, 2.0), (0, 3.0), (1, 3.9)):
        assert isinstance(answer(donor, manifest_of(number), of_crowd(number), at), Refusal)
    assert isinstance(
        answer(donor, manifest_of(3), LATE, CHOOSING_S), Refusal
    )  # there is room, and not for it
    assert isinstance(answer(donor, manifest_of(1), of_crowd(1), 4.1), Refusal)
    assert isinstance(answer(donor, manifest_of(0), LATE, 4.2), Manifest)  # the first wants the same
    assert isinstance(answer(donor, manifest_of(0), of_crowd(0), 4.3), Manifest)
    assert isinstance(answer(donor, manifest_of(3), LATE, 9.0), Manifest)  # the other has given up


def test_the_queue_is_bounded_and_only_who_wasted_a_turn_loses_its_place() -> None:
    turns = Turns()
    turns.promised(of_crowd(5), 1, 0.0, is_its_turn=True)
    for number in range(2 * MAX_WAITING):
        turns.turned_away(of_crowd(number), 1, 5.0)
    assert len(turns) == MAX_WAITING
    turns.turned_away(LATE, 2, 6.0)
    turns.turned_away(HOST, 3, 6.0)
    assert len(turns) == MAX_WAITING
    assert turns.may_have_room(of_crowd(0), 1, 6.0)
    assert not turns.may_have_room(HOST, 3, 6.0)
    assert not turns.may_have_room(of_crowd(1), 2, 6.0)
    assert turns.may_have_room(LATE, 2, 9.0)  # of the others none asked for so long
    turns.turned_away(HOST, 3, 5.0 + PLACE_KEPT_S)
    assert len(turns) == 3  # the first two of the crowd asked last
    for number in range(2 * MAX_CHOOSING):
        turns.promised(of_crowd(number), 1, 30.0, is_its_turn=True)
    assert len(turns._choosing) == MAX_CHOOSING


def test_one_that_wasted_its_turn_is_let_choose_again_once_it_loads_or_after_a_while() -> None:
    turns = Turns()
    assert turns.promised(HOST, 1, 0.0, is_its_turn=True) == CHOOSING_S
    assert turns.promised(HOST, 2, 3.0, is_its_turn=True) == CHOOSING_S  # one time to choose for all
    assert turns.promised(HOST, 1, 30.0, is_its_turn=True) == CHOOSING_S
    turns.took(HOST, 2)
    assert turns.promised(HOST, 1, 31.0, is_its_turn=True) == 31.0 + CHOOSING_S
    assert turns.promised(HOST, 1, 31.0 + WASTED_S, is_its_turn=True) == 31.0 + WASTED_S + CHOOSING_S


def test_a_chunk_counts_once_and_for_as_long_as_a_slow_line_needs() -> None:
    loaders = Loaders(0.0)
    assert loaders.gave(LATE, 3, MAX_DATA_BYTES, 0.0)
    assert loaders.is_in_use(6.0)
    assert not loaders.is_in_use(6.0, but_for=LATE)
    assert not loaders.gave(LATE, 3, MAX_DATA_BYTES, 6.0)
    assert not loaders.is_in_use(6.2)
    for chunk in range(4, 30):  # as many as it likes at once
        loaders.gave(LATE, chunk, MAX_DATA_BYTES, 7.0)
    assert loaders.is_in_use(23.0)
    assert not loaders.is_in_use(24.0)


def test_who_loads_is_remembered_however_many_ask() -> None:
    loaders = Loaders(0.0)
    loaders.gave(LATE, 3, MAX_DATA_BYTES, 0.0)
    for number in range(4 * MAX_WAITING):
        loaders.keep_for(of_crowd(number), CHOOSING_S)
    assert loaders.is_in_use(5.0)
    assert loaders.has_taken(LATE)
    assert len(loaders._peers) == MAX_WAITING
