"""Catching up: two machines wired together by hand, then lying, silent and vanishing donors."""

from __future__ import annotations

import hashlib
import random

import pytest

from p2p_co2.catchup import (
    ROUND,
    STATE,
    CatchUp,
    CatchUpEvent,
    DonorRefused,
    ExportWanted,
    Fetched,
    FetchFailed,
    Goal,
    Shape,
    split_donors,
)
from p2p_co2.catchup.donor import HISTORY_ROUNDS_KEPT
from p2p_co2.catchup.fetcher import ANSWER_CAP_S
from p2p_co2.errors import RemoteProtocolError
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.limits import MAX_DATA_BYTES
from p2p_co2.wire.messages_pb2 import Chunk, Decision, Fetch, Manifest

STATE_BYTES = 3 * MAX_DATA_BYTES + 17
MEAN_BYTES = MAX_DATA_BYTES + 5
SHAPE = Shape(mean_bytes=(MEAN_BYTES, 10), state_bytes=(STATE_BYTES, 20))
LATE, D1, D2 = PeerId("late"), PeerId("donor1"), PeerId("donor2")
CONTENT = random.Random(1).randbytes(STATE_BYTES)
MEAN = random.Random(2).randbytes(MEAN_BYTES)


class World:
    """A late peer and two donors. ``tamper`` may change or drop a message under way."""

    def __init__(self) -> None:
        self.machines = {peer: CatchUp(SHAPE) for peer in (LATE, D1, D2)}
        self.events: list[CatchUpEvent] = []
        self.tamper = lambda sender, message: message
        self.sent: list[tuple[PeerId, object]] = []
        self.now = 10.0

    def run(self) -> None:
        moved = True
        while moved:
            moved = False
            for sender, machine in self.machines.items():
                for to, message in machine.messages_to_send():
                    moved = True
                    self.sent.append((sender, message))
                    changed = self.tamper(sender, message)
                    if changed is not None:
                        self.machines[to].receive(changed, sender, self.now)
                while (event := machine.next_event()) is not None:
                    moved = True
                    if isinstance(event, ExportWanted):
                        machine.exported(
                            event.fragment, 7, CONTENT, hashlib.sha256(CONTENT).digest(), self.now
                        )
                    elif sender == LATE:
                        self.events.append(event)

    def pass_time(self) -> None:
        while (at := self.machines[LATE].get_timer()) is not None and not self.events:
            self.now = max(self.now, at)
            self.machines[LATE].handle_timer(self.now)
            self.run()


def want_state(world: World, *donors: PeerId) -> None:
    world.machines[LATE].want(Goal(STATE, 0, 5, donors), world.now)
    world.run()


def test_a_state_travels_in_checked_chunks() -> None:
    world = World()
    want_state(world, D1)
    (event,) = world.events
    assert isinstance(event, Fetched)
    assert (event.data, event.version, event.donor) == (CONTENT, 7, D1)
    assert not world.machines[LATE].fetching(0)


def test_a_round_is_replayed_from_the_history_with_its_decision() -> None:
    world = World()
    decision = Decision(outcome=b"outcome", signature=b"signature")
    world.machines[D1].remember(0, 3, decision, MEAN)
    world.machines[LATE].want(Goal(ROUND, 0, 3, (D1,)), world.now)
    world.run()
    (event,) = world.events
    assert isinstance(event, Fetched)
    assert (event.data, event.decision) == (MEAN, decision)


def test_a_round_that_nobody_kept_fails_and_names_the_newest() -> None:
    world = World()
    world.machines[D1].remember(0, 9, Decision(), MEAN)
    world.machines[LATE].want(Goal(ROUND, 0, 3, (D1, D2)), world.now)
    world.run()
    (event,) = world.events
    assert isinstance(event, FetchFailed)
    assert event.newest_version == 9


def test_a_wrong_chunk_costs_the_donor_its_place_and_one_chunk() -> None:
    world = World()

    def lie(sender: PeerId, message: object) -> object:
        if sender == D1 and isinstance(message, Chunk) and message.chunk == 2:
            message.data = bytes(len(message.data))
        return message

    world.tamper = lie  # type: ignore[assignment]
    want_state(world, D1, D2)
    refused, fetched = world.events
    assert isinstance(refused, DonorRefused)
    assert refused.peer == D1
    assert isinstance(fetched, Fetched)
    assert (fetched.data, fetched.donor) == (CONTENT, D2)
    from_second = [m.chunk for s, m in world.sent if s == D2 and isinstance(m, Chunk)]
    assert set(from_second).isdisjoint({0, 1})  # what was verified is not loaded again


@pytest.mark.parametrize(
    "change",
    [
        {"total_bytes": 1 << 40},
        {"chunk_bytes": 1},
        {"version": 2},
        {"fragment": 1},
    ],
)
def test_a_manifest_of_another_size_or_version_is_refused_before_anything_is_allocated(
    change: dict[str, int],
) -> None:
    world = World()

    def lie(sender: PeerId, message: object) -> object:
        if isinstance(message, Manifest):
            for key, value in change.items():
                setattr(message, key, value)
        return message

    world.tamper = lie  # type: ignore[assignment]
    want_state(world, D1)
    assert [type(event) for event in world.events] == [DonorRefused, FetchFailed]


def test_a_silent_donor_is_replaced_and_a_silent_swarm_ends_the_wait() -> None:
    world = World()
    world.tamper = lambda sender, message: None if sender == D1 else message
    want_state(world, D1, D2)
    world.pass_time()
    assert isinstance(world.events[0], Fetched)
    assert world.events[0].donor == D2

    world = World()
    world.tamper = lambda sender, message: None
    want_state(world, D1, D2)
    world.pass_time()
    assert isinstance(world.events[0], FetchFailed)
    assert world.now <= 10.0 + 2 * ANSWER_CAP_S


def test_a_donor_that_leaves_is_replaced_at_once() -> None:
    world = World()
    world.tamper = lambda sender, message: None if sender == D1 else message
    want_state(world, D1, D2)
    world.machines[LATE].forget_donor(D1, world.now)
    world.run()
    assert isinstance(world.events[0], Fetched)


def test_no_donor_known_is_a_failure_not_a_wait() -> None:
    world = World()
    want_state(world)
    assert isinstance(world.events[0], FetchFailed)


def test_the_history_is_bounded() -> None:
    machine = CatchUp(SHAPE)
    for version in range(100):
        machine.remember(0, version, Decision(), MEAN)
        machine.remember(1, version, Decision(), bytes(10))
    assert len(machine.donor._history) <= 2 * HISTORY_ROUNDS_KEPT
    assert machine.donor.history_bytes <= max(MEAN_BYTES + 10, sum(SHAPE.state_bytes))


def test_what_does_not_exist_is_refused() -> None:
    machine = CatchUp(SHAPE)
    with pytest.raises(RemoteProtocolError, match="unknown fragment"):
        machine.receive(Fetch(what=STATE, fragment=9), LATE, 1.0)
    machine.remember(1, 1, Decision(), bytes(10))
    with pytest.raises(RemoteProtocolError, match="unknown chunk"):
        machine.receive(Fetch(what=ROUND, fragment=1, version=1, want_chunk=True, chunk=5), LATE, 1.0)


def test_an_answer_that_was_not_asked_for_is_ignored() -> None:
    machine = CatchUp(SHAPE)
    machine.receive(Chunk(request=5, fragment=0, chunk=1, data=b"x"), D1, 1.0)
    machine.receive(Manifest(request=5, fragment=0), D1, 1.0)
    assert machine.next_event() is None


def test_fragments_start_with_different_donors() -> None:
    peers = [PeerId(name) for name in "abc"]
    assert [split_donors(peers, fragment)[0] for fragment in range(4)] == ["a", "b", "c", "a"]
    assert split_donors([], 1) == ()
