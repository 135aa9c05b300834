"""Membership: by hand, then the law that only peers heard directly are live, then silence, lies and broken
links."""

from __future__ import annotations

import math

import pytest

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.protocol import membership
from p2p_co2.protocol.membership import (
    Left,
    Membership,
    NewPeer,
)
from p2p_co2.wire.heartbeat import (
    HEARTBEAT_S,
    MEASURE_EVERY_S,
    SLOWEST_HEARTBEAT_S,
    TOLD_PER_S,
)
from p2p_co2.wire.identity import Identity, PeerId
from p2p_co2.wire.messages_pb2 import Ping, Pong, Status
from p2p_co2.wire.status import read_status

A, B, C = (Identity.generate().peer_id for _ in range(3))


def drain(machine: Membership) -> list[object]:
    events = []
    while (event := machine.next_event()) is not None:
        events.append(event)
    return events


def deliver(machines: dict[PeerId, Membership], now: float) -> None:
    """Hand every message over at once until nobody has one."""
    moved = True
    while moved:
        moved = False
        for sender, machine in machines.items():
            for to, message in machine.messages_to_send():
                if to in machines:
                    machines[to].receive(message, sender, now)
                    moved = True


def pair(now: float = 100.0) -> dict[PeerId, Membership]:
    machines = {A: Membership(A), B: Membership(B)}
    machines[A].found([A, B], now)
    deliver(machines, now)
    return machines


def test_each_tells_the_other_once_a_heartbeat_and_both_measure_the_way() -> None:
    machines = pair(100.0)
    told = dict.fromkeys(machines, 0)
    asked = 0
    for beat in range(1, 401):
        now = 100.0 + beat * HEARTBEAT_S
        for name, machine in machines.items():
            machine.handle_timer(now)
            sent = machine.messages_to_send()
            told[name] += len(sent)
            asked += sum(isinstance(message, Ping) and message.nonce > 0 for _, message in sent)
            other = machines[B if name == A else A]
            for _, message in sent:
                other.receive(message, name, now + 0.03)
            for _, answer in other.messages_to_send():
                told[other.me] += 1
                machine.receive(answer, other.me, now + 0.06)
    assert all(390 <= count <= 401 + asked for count in told.values())
    assert asked <= 2 * (1 + 400 * HEARTBEAT_S / MEASURE_EVERY_S)
    for machine in machines.values():
        (info,) = machine.live.values()
        assert info.round_trip_s == pytest.approx(0.06)


def test_among_many_the_heart_beats_more_slowly_down_to_a_bound() -> None:
    machine = Membership(A)
    status = Status(phase=Status.TRAINING)
    names = [PeerId(f"peer {index}") for index in range(400)]
    for count, expected_s in ((5, HEARTBEAT_S), (20, 20 / TOLD_PER_S), (400, SLOWEST_HEARTBEAT_S)):
        for peer in names[:count]:
            machine.receive(Ping(nonce=1, status=status), peer, 100.0)
        assert machine.heartbeat_s == pytest.approx(expected_s)


def test_nobody_is_taken_for_gone_because_others_beat_more_slowly() -> None:
    """One that hears few beats quickly; one that many hear, slowly: each keeps the other through a lost
    message."""
    crowd, loner = Membership(A), Membership(B)
    now = 100.0
    for index in range(64):
        crowd.receive(Ping(status=Status()), PeerId(f"peer {index}"), now)
    loner.found([A], now)
    for beat in range(600):
        now = 100.0 + 0.1 * beat
        for name, machine, other in ((A, crowd, loner), (B, loner, crowd)):
            for index in range(64 if machine is crowd else 0):
                machine.live[PeerId(f"peer {index}")].heard_at = now
            machine.handle_timer(now)
            sent = [message for to, message in machine.messages_to_send() if to == other.me]
            for message in sent if beat % 150 > 20 else []:  # for 2 s in 15 nothing comes through
                other.receive(message, name, now)
    assert A in loner.live
    assert B in crowd.live
    assert not any(isinstance(event, Left) for machine in (crowd, loner) for event in drain(machine))


@pytest.mark.parametrize(
    "status",
    [
        Status(position=math.nan),
        Status(position=-1.0),
        Status(position=math.inf),
        Status(upload_bytes_per_s=-5.0),
        Status(versions=[1, 2], digests=[bytes(32)]),
        Status(versions=[1], digests=[b"short"]),
        Status(versions=[1] * 300),
        Status(versions=[2**48 + 1]),
    ],
    ids=lambda status: str(status)[:40].replace("\n", " "),
)
def test_an_impossible_status_is_refused_and_changes_nothing(status: Status) -> None:
    machine = Membership(A)
    with pytest.raises(RemoteProtocolError, match="bad status"):
        machine.receive(Ping(nonce=1, status=status), B, 100.0)
    assert not machine.live


@pytest.mark.parametrize("name", ["n" * 33, "an\u202ena", "anna~abcdef", "\U0001fae8"])
def test_a_name_that_is_none_here_is_left_out_and_nobody_blamed(name: str) -> None:
    """The last is one in a newer Python."""
    status = read_status(Status(name=name, position=1.0))
    assert status.name in ("", "\U0001fae8")
    assert status.position == 1.0


def test_a_pong_of_a_peer_that_found_no_room_is_no_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "MAX_PEERS", 1)
    machine = Membership(A)
    machine.receive(Ping(nonce=1, status=Status()), B, 100.0)
    machine.receive(Pong(nonce=1, ping_sent_at=100.0, status=Status()), C, 100.2)
    assert set(machine.live) == {B}
    assert drain(machine) == [NewPeer(B)]


def test_strangers_that_come_and_go_leave_no_more_behind_than_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(membership, "MAX_PEERS", 8)
    machine = Membership(A)
    machine.found([B], 100.0)
    for number in range(100):
        stranger, now = PeerId(f"stranger {number}"), 100.0 + 0.01 * number
        machine.receive(Ping(nonce=1, status=Status()), stranger, now)
        machine.unreachable(stranger, "no record of this peer is known", now)
        assert all(count <= bound for count, bound in machine.held().values()), machine.held()
        assert stranger not in machine.live
        machine.receive(Ping(nonce=2, status=Status()), stranger, now)
        assert stranger not in machine.live  # no peer for a moment, also where there was little room
    machine.messages_to_send()
    machine.found([B], 110.0)
    assert B in {peer for peer, _ in machine.messages_to_send()}
