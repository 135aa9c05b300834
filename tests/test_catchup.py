"""Catching up: a late peer and its donors on virtual time, then lying, slow, silent and vanishing donors.

Every donor sends one message after the other at a rate of its own; ``World.tamper`` may change or drop a
message under way. What is counted are chunks that travelled and virtual seconds.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from itertools import count

import pytest

from p2p_co2.catchup import (
    ROUND,
    STATE,
    CatchUp,
    CatchUpEvent,
    CatchUpMessage,
    DonorRefused,
    ExportWanted,
    Fetched,
    FetchFailed,
    Goal,
    Shape,
    chunk_at,
    chunk_count,
    chunk_digest,
    split_donors,
)
from p2p_co2.catchup.donor import EXPORT_IN_USE_S, EXPORT_KEPT_S, EXPORT_LONGEST_S
from p2p_co2.catchup.goals import EXPORTS_FREE_BYTES
from p2p_co2.catchup.history import HISTORY_BYTES_SHARE, HISTORY_ROUNDS_KEPT
from p2p_co2.catchup.source import SLOW_CAP_S
from p2p_co2.errors import RemoteProtocolError
from p2p_co2.wire.identity import Identity, PeerId
from p2p_co2.wire.limits import MAX_DATA_BYTES
from p2p_co2.wire.messages_pb2 import Chunk, Decision, Fetch, Manifest, Refusal

RUN = bytes(range(32))
CHUNKS = 40
SMALL, LARGE = 3 * MAX_DATA_BYTES + 17, CHUNKS * MAX_DATA_BYTES - 5
SHAPE = Shape(mean_bytes=(MAX_DATA_BYTES + 5, 10, 10), state_bytes=(SMALL, LARGE, LARGE))
IDENTITIES = [Identity.generate() for _ in range(6)]
LATE, *DONORS = (identity.peer_id for identity in IDENTITIES)
D1, D2, D3, D4, D5 = DONORS
CONTENT = [random.Random(fragment).randbytes(size) for fragment, size in enumerate(SHAPE.state_bytes)]
MEAN = random.Random(9).randbytes(SHAPE.mean_bytes[0])
LATENCY_S = 0.02


@lru_cache(32)
def state_of(fragment: int, version: int) -> bytes:
    """Each version has other bytes everywhere."""
    return bytes([version]) + CONTENT[fragment][1:-1] + bytes([version])


class World:
    """A late peer and donors. ``rates``: bytes per second that each donor sends."""

    def __init__(self, donors: int = 2, rate: float = 50e6, shape: Shape = SHAPE) -> None:
        self.shape = shape
        self.machines = {i.peer_id: CatchUp(i, RUN, shape) for i in IDENTITIES[: donors + 1]}
        self.rates = dict.fromkeys(self.machines, rate)
        self.versions = dict.fromkeys(self.machines, 7)
        self.free_at = dict.fromkeys(self.machines, 0.0)
        self.events: list[CatchUpEvent] = []
        self.tamper: Callable[[PeerId, CatchUpMessage], CatchUpMessage | None] = lambda sender, message: (
            message
        )
        self.sent: list[tuple[PeerId, CatchUpMessage]] = []
        self.now = 10.0
        self._under_way: list[tuple[float, int, PeerId, PeerId, CatchUpMessage]] = []
        self._order = count()
        for peer in self.machines:
            self.move(peer, 7)

    def move(self, peer: PeerId, version: int) -> None:
        self.versions[peer] = version
        for fragment in range(len(self.shape.state_bytes)):
            self.machines[peer].moved(fragment, version)

    def want(self, fragment: int = 1, version: int = 7, **more: object) -> None:
        donors = tuple(peer for peer in self.machines if peer != LATE)
        goal = Goal(STATE, fragment, version, donors, **more)  # type: ignore[arg-type]
        self.machines[LATE].want(goal, self.now)

    def run(self, seconds: float = 300.0, enough: int = 1) -> None:
        """Until the late peer has told ``enough`` endings, or nothing moves, or time is up."""
        ends_at = self.now + seconds
        self._take_all()
        while sum(isinstance(event, Fetched | FetchFailed) for event in self.events) < enough:
            times = [at for machine in self.machines.values() if (at := machine.get_timer()) is not None]
            times += [self._under_way[0][0]] if self._under_way else []
            if not times or min(times) > ends_at:
                self.now = ends_at if times else self.now
                return
            self.now = max(self.now, min(times))
            while self._under_way and self._under_way[0][0] <= self.now:
                _, _, sender, receiver, message = heapq.heappop(self._under_way)
                self.machines[receiver].receive(message, sender, self.now)
            for machine in self.machines.values():
                machine.handle_timer(self.now)
            self._take_all()

    def _take_all(self) -> None:
        for peer, machine in self.machines.items():
            while (event := machine.next_event()) is not None:
                if isinstance(event, ExportWanted):
                    self._export(machine, event.fragment, self.versions[peer])
                elif peer == LATE:
                    self.events.append(event)
            for receiver, message in machine.messages_to_send():
                self.sent.append((peer, message))
                changed = self.tamper(peer, message)
                if changed is not None and receiver in self.machines:
                    self._send(peer, receiver, changed)
        if any(machine.donor._waiting for machine in self.machines.values()):
            self._take_all()

    def _export(self, machine: CatchUp, fragment: int, version: int) -> None:
        data = state_of(fragment, version)[-self.shape.state_bytes[fragment] :]
        digests = [chunk_digest(data[chunk_at(i, len(data))]) for i in range(chunk_count(len(data)))]
        machine.exported(fragment, version, data, hashlib.sha256(data).digest(), digests, self.now)

    def _send(self, sender: PeerId, receiver: PeerId, message: CatchUpMessage) -> None:
        arrives_at = self.now + LATENCY_S
        if isinstance(message, Chunk):  # small messages overtake them, as in the node's lanes
            self.free_at[sender] = (
                max(self.now, self.free_at[sender]) + len(message.data) / self.rates[sender]
            )
            arrives_at += self.free_at[sender] - self.now
        heapq.heappush(self._under_way, (arrives_at, next(self._order), sender, receiver, message))

    def fetched(self) -> Fetched:
        (event,) = [event for event in self.events if not isinstance(event, DonorRefused)]
        assert isinstance(event, Fetched), event
        self.check(event)
        return event

    def check(self, event: Fetched) -> None:
        fragment = event.goal.fragment
        assert bytes(event.data) == state_of(fragment, event.version)[-self.shape.state_bytes[fragment] :]

    def chunks_from(self, donor: PeerId) -> list[int]:
        return [m.chunk for sender, m in self.sent if sender == donor and isinstance(m, Chunk)]

    def chunks_sent(self) -> Counter[int]:
        return Counter(m.chunk for _, m in self.sent if isinstance(m, Chunk))


# ---- what it is for


def test_a_state_travels_in_checked_chunks_from_one_donor() -> None:
    world = World(donors=1)
    world.want()
    world.run()
    event = world.fetched()
    assert (event.version, event.donors, event.chunks_wasted) == (7, (D1,), 0)
    assert world.chunks_sent() == Counter(range(CHUNKS))
    assert not world.machines[LATE].fetching(1)


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
    assert world.fetched().donor == D1
    assert all(1.5 * given < fast < 3 * given for given in slow)


def test_donors_that_become_known_later_take_part() -> None:
    world = World(donors=4, rate=2e6)
    world.machines[LATE].want(Goal(STATE, 1, 7, (D1,)), world.now)
    world.machines[LATE].want(Goal(STATE, 2, 7, (D1,)), world.now)
    world.run(seconds=1.0)
    for fragment in (1, 2):
        world.machines[LATE].add_donors(fragment, DONORS[:4], world.now)
        world.machines[LATE].add_donors(fragment, DONORS[:4], world.now)
    world.run(enough=2)
    assert [len(event.donors) for event in world.events if isinstance(event, Fetched)] == [4, 4]
    assert world.now - 10.0 < 2 * LARGE / 8e6 + 2.0


def test_a_small_state_is_asked_of_as_many_donors_as_it_has_chunks() -> None:
    world = World(donors=5)
    world.want(fragment=0)
    world.run()
    world.fetched()
    assert len({sender for sender, message in world.sent if isinstance(message, Manifest)}) == 4


def test_a_round_is_replayed_from_the_history_with_its_decision() -> None:
    world = World()
    decision = Decision(outcome=b"outcome", signature=b"signature")
    world.machines[D1].remember(0, 3, decision, MEAN)
    world.machines[LATE].want(Goal(ROUND, 0, 3, (D1, D2)), world.now)
    world.run()
    (event,) = world.events
    assert isinstance(event, Fetched)
    assert (event.data, event.decision, event.donors) == (MEAN, decision, (D1,))


def test_a_round_that_nobody_kept_fails_and_names_the_newest() -> None:
    world = World()
    world.machines[D1].remember(0, 9, Decision(), MEAN)
    world.machines[LATE].want(Goal(ROUND, 0, 3, (D1, D2)), world.now)
    world.run()
    (event,) = world.events
    assert isinstance(event, FetchFailed)
    assert event.newest_version == 9


def test_a_round_that_a_donor_has_not_applied_yet_is_waited_for() -> None:
    world = World(donors=1)
    world.move(D1, 2)
    world.machines[LATE].want(Goal(ROUND, 0, 3, (D1,)), world.now)
    world.run(seconds=0.5)
    assert not world.events
    world.move(D1, 3)
    world.machines[D1].remember(0, 3, Decision(), MEAN)
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
            world.machines[donor].remember(1, version, Decision(), bytes(10))
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
    world.want(digest=hashlib.sha256(state_of(1, 7)).digest())
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


def test_a_second_newcomer_loads_what_the_donors_are_giving() -> None:
    world = World(donors=3, rate=2e6)
    second = D3
    world.want(fragment=1)
    world.run(seconds=1.0)
    machine = world.machines[second]
    for fragment in (2, 1):
        machine.want(Goal(STATE, fragment, 7, (D1, D2), oldest=5), world.now)
    for donor in (D1, D2):
        world.move(donor, 8)
    world.run(seconds=1.0)
    assert machine._fetcher._downloads.keys() == {1}
    loading = machine._fetcher._downloads[1]
    assert loading._chosen is not None
    assert loading._chosen.version == 7


# ---- lies


def lying(liar: PeerId, wrong: Callable[[Chunk], None]) -> Callable[[PeerId, CatchUpMessage], CatchUpMessage]:
    def tamper(sender: PeerId, message: CatchUpMessage) -> CatchUpMessage:
        if sender == liar and isinstance(message, Chunk):
            changed = Chunk()
            changed.CopyFrom(message)
            wrong(changed)
            return changed
        return message

    return tamper


def zero(chunk: Chunk) -> None:
    chunk.data = bytes(len(chunk.data))


def shorten(chunk: Chunk) -> None:
    chunk.data = chunk.data[:-1]


@pytest.mark.parametrize("wrong", [zero, shorten])
def test_a_donor_that_sends_wrong_bytes_costs_one_chunk(wrong: Callable[[Chunk], None]) -> None:
    world = World(donors=4, rate=2e6)
    world.tamper = lying(D2, wrong)
    world.want()
    world.run()
    refused = [event for event in world.events if isinstance(event, DonorRefused)]
    assert [event.peer for event in refused] == [D2]
    event = world.fetched()
    assert event.chunks_wasted == 1
    assert D2 not in event.donors or event.donors[-1] == D2
    assert len(world.chunks_from(D2)) == 1
    assert sum(world.chunks_sent().values()) <= CHUNKS + 1 + 3


def test_a_liar_is_not_asked_for_the_next_fragment_either() -> None:
    world = World(donors=2)
    world.tamper = lying(D1, zero)
    world.want(fragment=1)
    world.want(fragment=2)
    world.run(enough=2)
    assert len(world.chunks_from(D1)) == 1
    assert [type(event) for event in world.events] == [DonorRefused, Fetched, Fetched]


def test_a_donor_that_begins_to_lie_later_keeps_what_it_gave_right() -> None:
    world = World(donors=2, rate=2e6)
    given = count()
    world.tamper = lying(D1, lambda chunk: zero(chunk) if next(given) >= 10 else None)
    world.want()
    world.run()
    assert world.fetched().chunks_wasted == 1
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
    digests = [chunk_digest(data[chunk_at(i, LARGE)]) for i in range(CHUNKS)]
    liar.exported(1, 7, data, hashlib.sha256(data).digest(), digests, world.now)
    world.want()
    world.run()
    event = world.fetched()
    assert set(event.donors) == {D2, D3}
    assert not world.chunks_from(D1)
    assert event.chunks_wasted <= 1


def test_a_chunk_that_was_not_asked_for_puts_its_donor_out() -> None:
    world = World(donors=2, rate=2e6)
    world.want()
    world.run(seconds=2.0)
    loading = world.machines[LATE]._fetcher._downloads[1]
    request = loading.sources[D1].request
    world.machines[LATE].receive(Chunk(request=request, fragment=1, chunk=CHUNKS + 1), D1, world.now)
    assert D1 not in loading.sources
    world.run()
    assert world.fetched().donor == D2


# ---- slow, silent and vanishing donors


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


# ---- what a donor holds


def test_the_history_is_bounded_and_keeps_the_newest_of_each_fragment() -> None:
    machine = CatchUp(IDENTITIES[0], RUN, Shape((1000, 10), (2000, 2000)))
    for version in range(1, 100):
        machine.remember(0, version, Decision(), bytes(1000))
        machine.remember(1, version, Decision(), bytes(10))
    history = machine.donor.history
    assert len(history) <= 2 * HISTORY_ROUNDS_KEPT
    assert history.find(0, 99) is not None
    assert history.find(1, 99) is not None
    assert history.held_bytes <= max(1010, HISTORY_BYTES_SHARE * 2000 + 1000)


def test_rounds_after_a_state_that_is_being_given_are_held_and_then_let_go() -> None:
    world = World(donors=1)
    machine = world.machines[D1]
    shape = Shape((1000, 10), (2000, 2000))
    machine = CatchUp(IDENTITIES[1], RUN, shape)
    machine.moved(0, 5)
    machine.receive(Fetch(what=STATE, fragment=0, version=5, request=1), LATE, 0.0)
    assert isinstance(machine.next_event(), ExportWanted)
    machine.exported(0, 5, bytes(2000), bytes(32), [chunk_digest(bytes(2000))], 0.0)
    for version in range(4, 20):
        machine.remember(0, version, Decision(), bytes(1000))
    kept = [version for version in range(30) if machine.donor.history.find(0, version)]
    assert kept == list(range(12, 20))  # HISTORY_ROUNDS_KEPT bounds even these
    machine.handle_timer(EXPORT_KEPT_S)
    kept = [version for version in range(30) if machine.donor.history.find(0, version)]
    assert kept == [19]


def test_an_export_ends_when_nobody_asks_and_in_any_case() -> None:
    world = World(donors=1)
    world.want()
    world.run()
    donor = world.machines[D1].donor
    assert donor.exported_bytes() == LARGE
    world.machines[D1].handle_timer(world.now + EXPORT_KEPT_S)
    assert donor.exported_bytes() == 0
    assert donor.get_timer() is None

    world.want()
    world.run(enough=2)
    began_at = world.now
    while donor.exported_bytes():
        assert world.now - began_at < 2 * EXPORT_LONGEST_S + LARGE / 250e3
        world.now += EXPORT_IN_USE_S / 2  # somebody who trickles
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
    machine.remember(1, 1, Decision(), bytes(10))
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
