"""Membership: by hand, then the law that only peers heard directly are live, then silence, lies and broken
links."""

from __future__ import annotations

import math

import pytest

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.protocol import membership
from p2p_co2.protocol.membership import (
    CUT_OFF_S,
    NEWS_GATHERED_S,
    Joined,
    Left,
    Membership,
    positions,
)
from p2p_co2.wire.heartbeat import (
    HEARTBEAT_S,
    MEASURE_EVERY_S,
    SILENCE_FLOOR_S,
    SLOWEST_HEARTBEAT_S,
    TOLD_PER_S,
)
from p2p_co2.wire.identity import Identity, PeerId
from p2p_co2.wire.messages_pb2 import Leave, Ping, Pong, Status

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


def test_a_peer_that_the_dht_lists_is_pinged_and_both_become_live() -> None:
    machines = pair()
    assert set(machines[A].live) == {B}
    assert set(machines[B].live) == {A}
    assert drain(machines[A]) == [Joined(B)]
    assert drain(machines[B]) == [Joined(A)]


def test_a_peer_that_only_the_dht_knows_is_not_live() -> None:
    machine = Membership(A)
    machine.found([B, C], 100.0)
    assert not machine.live
    assert {to for to, _ in machine.messages_to_send()} == {B, C}


def test_an_unanswered_candidate_is_tried_again_only_after_a_while() -> None:
    machine = Membership(A)
    machine.found([B], 100.0)
    assert len(machine.messages_to_send()) == 1
    machine.handle_timer(100.0 + HEARTBEAT_S)
    assert machine.messages_to_send() == []
    machine.handle_timer(100.0 + SLOWEST_HEARTBEAT_S + HEARTBEAT_S)
    assert len(machine.messages_to_send()) == 1


def test_heartbeats_keep_a_peer_live_and_silence_ends_it_with_a_reason() -> None:
    machines = pair(100.0)
    now = 100.0
    for _ in range(20):
        now += HEARTBEAT_S
        for machine in machines.values():
            machine.handle_timer(now)
        deliver(machines, now)
    assert set(machines[A].live) == {B}
    drain(machines[A])
    silent_at = now
    while machines[A].live:
        now += HEARTBEAT_S
        machines[A].handle_timer(now)
        machines[A].messages_to_send()
        assert now < silent_at + 60
    assert now - silent_at > SILENCE_FLOOR_S
    (left,) = drain(machines[A])
    assert isinstance(left, Left)
    assert left.peer == B
    assert "silent" in left.reason


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


def test_who_heard_our_status_of_late_is_not_told_again() -> None:
    machine = Membership(A)
    machine.receive(Ping(nonce=1, status=Status()), B, 100.0)
    machine.handle_timer(100.0)
    machine.receive(Pong(nonce=1, ping_sent_at=100.0, status=Status()), B, 100.1)
    machine.messages_to_send()
    machine.announce(100.8)
    machine.handle_timer(100.8 + NEWS_GATHERED_S)
    (_, announced), *more = machine.messages_to_send()
    assert isinstance(announced, Ping)
    assert not announced.nonce
    assert not more
    machine.handle_timer(101.0)
    assert machine.messages_to_send() == []
    machine.handle_timer(102.0)
    assert [to for to, _ in machine.messages_to_send()] == [B]


def test_who_is_cut_off_is_tried_again_in_time_however_slowly_the_heart_beats() -> None:
    """With the beat, it came to ten seconds among many, and a peer ended its run without another (seed 18 of
    the storms)."""
    machine = Membership(A)
    for index in range(64):
        machine.receive(Ping(status=Status()), PeerId(f"peer {index}"), 100.0)
    machine.handle_timer(100.0)
    machine.unreachable(PeerId("peer 3"), "no relay answers", 100.5)
    machine.messages_to_send()
    now = 100.5
    while now < 100.5 + SLOWEST_HEARTBEAT_S:
        at = machine.get_timer()
        assert at is not None
        now = at
        machine.handle_timer(now)
    assert now == 100.5 + SLOWEST_HEARTBEAT_S
    assert PeerId("peer 3") in {to for to, _ in machine.messages_to_send()}


def test_who_loses_most_others_without_a_word_is_cut_off_until_they_are_back_or_time_has_passed() -> None:
    """It took itself for alone, finished with a history of its own, and the others went on (seed 30 of the
    storms)."""
    machine = Membership(A)
    others = [PeerId(f"peer {index}") for index in range(5)]
    for peer in others:
        machine.receive(Ping(status=Status()), peer, 100.0)
    for peer in others[:2]:
        machine.unreachable(peer, "no answer", 101.0)
    assert not machine.departed.is_cut_off(len(machine.live), 102.0)  # more are left
    machine.unreachable(others[2], "no answer", 103.0)
    assert machine.departed.is_cut_off(len(machine.live), 104.0)
    machine.receive(Ping(status=Status()), others[1], 110.0)
    assert not machine.departed.is_cut_off(len(machine.live), 110.0)
    for peer in others[1:4]:
        machine.unreachable(peer, "no answer", 111.0)
    assert machine.departed.is_cut_off(len(machine.live), 111.0)
    assert not machine.departed.is_cut_off(len(machine.live), 111.0 + CUT_OFF_S + 1.0)


def test_who_fell_silent_counts_as_gone_of_late_while_the_dht_lists_it() -> None:
    """Its process may be suspended: who is alone goes on alone, and must not end before it wakes."""
    machine = Membership(A)
    machine.receive(Ping(status=Status()), PeerId("asleep"), 100.0)
    now = 100.0
    while machine.live:
        now += 1.0
        machine.handle_timer(now)
    for later_s in (1.0, CUT_OFF_S + 1.0, 3 * CUT_OFF_S):
        machine.found([PeerId("asleep")], now + later_s)
        assert machine.departed.is_cut_off(len(machine.live), now + later_s)
    machine.found([], now)
    assert not machine.departed.is_cut_off(len(machine.live), now + 3 * CUT_OFF_S)


def test_who_fell_silent_and_then_says_goodbye_is_not_waited_for() -> None:
    machine, now = Membership(A), 100.0
    machine.receive(Ping(status=Status()), PeerId("asleep"), now)
    while machine.live:
        now += 1.0
        machine.handle_timer(now)
    machine.receive(Leave(reason="stopped"), PeerId("asleep"), now)
    machine.found([PeerId("asleep")], now + CUT_OFF_S + 1.0)  # its record is still in the DHT
    assert not machine.departed.is_cut_off(len(machine.live), now + CUT_OFF_S + 1.0)


def test_what_is_announced_in_a_moment_is_told_once_and_what_comes_soon_after_it_in_a_while() -> None:
    machine = Membership(A)
    for index in range(32):
        machine.receive(Ping(status=Status()), PeerId(f"peer {index}"), 100.0)
    machine.handle_timer(100.0)
    machine.messages_to_send()
    told_at = 101.0
    for first, soonest_s, latest_s in ((0, 0.0, NEWS_GATHERED_S), (10, 0.2, SLOWEST_HEARTBEAT_S / 4)):
        for moment in range(first, first + 10):
            machine.status = Status(position=moment)
            machine.announce(told_at + 0.004 * (moment - first))
        assert machine.messages_to_send() == []
        at = machine.get_timer()
        assert at is not None
        assert soonest_s < at - told_at <= latest_s + 1e-6
        machine.handle_timer(at)
        told, told_at = machine.messages_to_send(), at
        assert len(told) == 32
        assert {message.status.position for _, message in told if isinstance(message, Ping)} == {first + 9}
    machine.handle_timer(told_at + 0.1)
    assert machine.messages_to_send() == []


def test_a_ping_that_asks_for_no_answer_gets_none_and_makes_a_peer_live() -> None:
    machine = Membership(A)
    machine.receive(Ping(status=Status()), B, 100.0)
    assert set(machine.live) == {B}
    assert machine.messages_to_send() == []


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


def test_goodbye_and_unreachable_end_a_peer_at_once() -> None:
    machines = pair()
    machines[B].say_goodbye("shutting down for the night")
    deliver(machines, 101.0)
    assert drain(machines[A])[-1] == Left(B, "left: shutting down for the night")
    machines = pair()
    machines[A].unreachable(B, "grpc: connection refused", 101.0)
    assert drain(machines[A])[-1] == Left(B, "grpc: connection refused")


def test_a_process_that_said_goodbye_does_not_join_again_by_a_late_answer() -> None:
    """It was listed still and answered while it closed: then it counted as crashed."""
    machine = Membership(A)
    machine.receive(Ping(status=Status(process=7)), B, 100.0)
    machine.receive(Leave(reason="stopped"), B, 101.0)
    machine.found([B], 101.1)
    machine.receive(Pong(nonce=1, ping_sent_at=101.1, status=Status(process=7)), B, 101.2)
    assert drain(machine) == [Joined(B), Left(B, "left: stopped")]
    assert not machine.live
    machine.receive(Ping(status=Status(process=8)), B, 102.0)
    assert drain(machine) == [Joined(B)]


def test_a_peer_that_we_hear_but_cannot_reach_does_not_join_and_leave_all_the_time() -> None:
    machine = Membership(A)
    machine.unreachable(B, "no carrier gets through", 100.0)
    machine.receive(Ping(nonce=1, status=Status()), B, 100.5)
    assert not machine.live
    assert machine.messages_to_send() == []
    machine.receive(Ping(nonce=2, status=Status()), B, 100.0 + 2 * HEARTBEAT_S)
    assert set(machine.live) == {B}


def test_positions_are_extrapolated_and_only_of_training_peers() -> None:
    machine = Membership(A)
    machine.receive(Ping(nonce=1, status=Status(phase=Status.TRAINING, position=4.0)), B, 100.0)
    machine.receive(Ping(nonce=1, status=Status(phase=Status.DRAINING, position=9.0)), C, 100.0)
    (position,) = positions(machine.live.values(), now=110.0, rounds_per_s=0.1)
    assert position == pytest.approx(5.0, abs=0.02)


def test_when_nobody_trains_any_more_the_position_is_where_the_others_stopped() -> None:
    """Who joined then began at the start, and the others waited for a whole run (seed 8 of the storms)."""
    machine = Membership(PeerId("me"))
    machine.receive(Ping(status=Status(phase=Status.DRAINING, position=6.0)), PeerId("done"), 100.0)
    machine.receive(Ping(status=Status(phase=Status.JOINING, position=0.0)), PeerId("new"), 100.0)
    assert positions(machine.live.values(), now=110.0, rounds_per_s=0.1) == [6.0]
    machine.receive(Ping(status=Status(phase=Status.TRAINING, position=5.0)), PeerId("late"), 110.0)
    assert len(positions(machine.live.values(), now=110.0, rounds_per_s=0.1)) == 1


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


def test_leave_of_a_stranger_is_no_event() -> None:
    machine = Membership(A)
    machine.receive(Leave(reason="who am I?"), B, 100.0)
    assert drain(machine) == []


def test_a_pong_of_a_peer_that_found_no_room_is_no_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "MAX_PEERS", 1)
    machine = Membership(A)
    machine.receive(Ping(nonce=1, status=Status()), B, 100.0)
    machine.receive(Pong(nonce=1, ping_sent_at=100.0, status=Status()), C, 100.2)
    assert set(machine.live) == {B}
    assert drain(machine) == [Joined(B)]


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


def test_one_whose_link_broke_is_missed_until_it_is_heard_again_and_asked_when_the_link_is_back() -> None:
    machine = pair()[A]
    machine.link_opened(B, 101.0)
    assert machine.messages_to_send() == []  # it was never missed
    revision = machine.revision
    machine.link_broke(B)
    machine.link_broke(B)
    machine.link_broke(C)  # of a stranger: nothing
    assert machine.live[B].is_missed
    assert machine.revision == revision + 1
    machine.link_opened(B, 102.0)
    ((to, ping),) = machine.messages_to_send()
    assert to == B
    assert isinstance(ping, Ping)
    assert ping.nonce
    machine.receive(Pong(nonce=ping.nonce, ping_sent_at=102.0), B, 102.1)
    assert not machine.live[B].is_missed
    assert machine.revision == revision + 2


def test_one_that_was_started_anew_before_it_was_missed_is_known_by_its_number() -> None:
    """It was known by the phase of who joins, which nobody saw who stood still meanwhile."""
    machine = Membership(A)
    for process, at in ((7, 100.0), (7, 101.0)):
        machine.receive(Ping(status=Status(phase=Status.TRAINING, process=process)), B, at)
    assert machine.take_restarted() == set()
    revision = machine.revision
    machine.receive(Ping(status=Status(phase=Status.TRAINING, process=8)), B, 102.0)
    assert machine.revision > revision
    assert machine.take_restarted() == {B}
    assert machine.take_restarted() == set()


def test_who_said_goodbye_is_not_awaited_though_the_dht_lists_it_still() -> None:
    """Who came late to the end of a run waited up to twelve seconds for those who had left it."""
    machine = pair()[A]
    machine.receive(Leave(reason="the run is over"), B, 101.0)
    machine.found([A, B, C], 102.0)
    assert (len(machine.candidates), machine.awaited) == (2, 1)
