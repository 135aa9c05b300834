"""What a peer slept while it waited is put down to nobody else, whatever it hears first: by hand."""

from __future__ import annotations

import pytest

from p2p_co2.protocol.rounds import Aborted, Distrusted
from p2p_co2.protocol.rounds.bounds import GRACE_S, READY_CAP_S
from p2p_co2.protocol.rounds.repute import COSTS, NOT_BEGUN, SPOILT_IN_A_ROW
from p2p_co2.protocol.rounds.swarm import coordination_order
from p2p_co2.protocol.wire import messages_pb2 as wire
from tests.round_machine import DIGEST, begun_member, drain, offer_of, refusal
from tests.round_offer import SLEPT_S, asked_first, begin_without_us, nowhere, promise, sends_on, spoilt
from tests.test_rounds_leaving import FOURTH, ME, NAMES, OTHER, THIRD, TRAINS, readies


@pytest.mark.parametrize("hears_first", [False, True])
@pytest.mark.parametrize("woke_at", [100.0, 1000.0])
def test_the_time_that_this_peer_slept_is_nobodys(woke_at: float, hears_first: bool) -> None:
    """Whatever it does first when it is awake: its timers, or what lies in its sockets."""
    machine, round_, asked = asked_first(OTHER, THIRD, FOURTH)
    promise(machine, round_, asked, 10.0, 0.1)
    if hears_first:
        promise(machine, round_, asked, 10.0, woke_at)
        machine.set_peers(dict.fromkeys(NAMES, TRAINS), woke_at + 0.1)
    machine.handle_timer(woke_at + 0.2)
    promise(machine, round_, asked, 30.0, woke_at + 0.3)
    if woke_at < READY_CAP_S:
        machine.handle_timer(woke_at + 0.4)
        promise(machine, round_, asked, READY_CAP_S, woke_at + 0.5)
    machine.handle_timer(max(READY_CAP_S, woke_at + 2 * GRACE_S) + 0.3)
    assert Aborted in map(type, drain(machine))
    assert not machine._swarm.repute.is_passed_over(asked, woke_at + READY_CAP_S)
    assert spoilt(machine, asked) == 0.0


def test_a_sleep_after_a_round_that_it_was_in_is_no_hold() -> None:
    machine, round_, asked = asked_first(OTHER, THIRD, FOURTH)
    machine.receive(begin_without_us(round_, asked, 20.0), asked, 0.1)
    promise(machine, round_, asked, 20.0, 0.2)
    promise(machine, round_, asked, 25.0, 20.2)
    promise(machine, round_, asked, 5.0, 100.0)  # it slept, and hears what lies there
    sends_on(machine, round_, asked, 100.0)
    assert (asked, True) in readies(machine)
    assert spoilt(machine, asked) == 0.0


def test_a_moment_of_sleep_excuses_no_hold() -> None:
    machine, round_, _ = asked_first(OTHER, THIRD, FOURTH)
    promise(machine, round_, OTHER, 43.0, 0.1)
    machine.set_peers(dict.fromkeys((ME, THIRD, FOURTH), TRAINS), 50.0)  # three seconds late
    promise(machine, round_, THIRD, 60.0, 50.1)
    machine.set_peers(dict.fromkeys((ME, FOURTH), TRAINS), 99.0)
    promise(machine, round_, FOURTH, 60.0, 99.1)
    machine.handle_timer(READY_CAP_S + 0.1)
    assert Aborted in map(type, drain(machine))
    assert spoilt(machine, FOURTH) == NOT_BEGUN


def test_what_most_told_us_is_old_for_the_next_offer_too() -> None:
    machine, round_, _ = asked_first(OTHER, THIRD, FOURTH)
    machine.handle_timer(100.0)  # it slept
    machine.withdraw(0, "for another one", 100.1)
    at = next(n for n in range(round_ + 1, 9999) if coordination_order(NAMES, 0, n)[0] == FOURTH)
    machine.set_state(0, at - 1, DIGEST)
    machine.offer(offer_of(at), 100.2)
    assert refusal(machine, nowhere(at), FOURTH, 101.0) == "impossible version"
    assert spoilt(machine, FOURTH) == 0.0


def test_a_member_that_slept_asks_before_it_blames() -> None:
    """The decision may lie in its socket."""
    machine, begin, first, _ = begun_member()
    machine.receive(begin, first, 0.1)
    machine.messages_to_send()
    machine.handle_timer(SLEPT_S)
    assert spoilt(machine, first) == 0.0
    asked = [to for to, message in machine.messages_to_send() if isinstance(message, wire.AskOutcome)]
    assert first in asked
    machine._swarm.spoilt(first, "before", SLEPT_S)
    machine.handle_timer(SLEPT_S + 2 * GRACE_S)  # it had its time, awake
    assert spoilt(machine, first) == SPOILT_IN_A_ROW
    (news,) = [event for event in drain(machine) if isinstance(event, Distrusted)]
    assert news.lasts_s == COSTS * (begin.result_within_s + 2 * GRACE_S)


def test_a_member_that_comes_late_again_and_again_moves_on_and_blames_nobody() -> None:
    machine, begin, first, _ = begun_member()
    machine.receive(begin, first, 0.1)
    for now in (100.0, 200.0):
        machine.handle_timer(now)
    member = machine._fragments[0].member
    assert member is not None
    assert len(member.coordinators) == 2
    assert spoilt(machine, first) == 0.0


@pytest.mark.parametrize("hears_first", [False, True])
def test_whose_answer_may_lie_in_our_socket_is_asked_once_more(hears_first: bool) -> None:
    machine, _, asked = asked_first(OTHER, THIRD, FOURTH)
    for _ in range(2):
        due_at = machine.get_timer()
        assert due_at is not None
        machine.handle_timer(due_at)
    assert readies(machine) == [(asked, False)] * 2
    if hears_first:
        machine.set_peers(dict.fromkeys(NAMES, TRAINS), 100.0)
    machine.handle_timer(100.0)  # it slept
    assert readies(machine) == [(asked, False)]
    assert spoilt(machine, asked) == 0.0
    due_at = machine.get_timer()
    assert due_at is not None
    machine.handle_timer(due_at)
    assert readies(machine) == [(asked, True), (THIRD, False)]
    assert spoilt(machine, asked) == 1.0


@pytest.mark.parametrize("hears_first", [False, True])
def test_who_always_comes_late_leaves_a_silent_one_and_blames_nobody(hears_first: bool) -> None:
    machine, _, asked = asked_first(OTHER, THIRD, FOURTH)
    sent, now = [], 0.0
    while (THIRD, False) not in sent and now < READY_CAP_S:
        due_at = machine.get_timer()
        assert due_at is not None
        now = due_at + GRACE_S + 0.1
        if hears_first:
            machine.set_peers(dict.fromkeys(NAMES, TRAINS), now)
        machine.handle_timer(now)
        sent += readies(machine)
    assert sent == [(asked, False)] * 3 + [(asked, True), (THIRD, False)]
    assert spoilt(machine, asked) == 0.0
    while (FOURTH, False) not in readies(machine):  # in time from now on
        due_at = machine.get_timer()
        assert due_at is not None
        machine.handle_timer(due_at)
    assert (spoilt(machine, asked), spoilt(machine, THIRD)) == (0.0, 1.0)


def test_a_sleep_before_the_last_chance_is_not_taken_for_one_through_it() -> None:
    machine, _, asked = asked_first(OTHER, THIRD, FOURTH)
    sent = []
    for late_s in (10.0, 0.0, 10.0, 0.0):
        due_at = machine.get_timer()
        assert due_at is not None
        machine.handle_timer(due_at + late_s)
        sent += readies(machine)
    assert sent == [(asked, False)] * 3 + [(asked, True), (THIRD, False)]
    assert spoilt(machine, asked) == 1.0


def test_a_silence_after_an_answer_counts_though_we_slept_before_that() -> None:
    machine, round_, asked = asked_first(OTHER, THIRD, FOURTH)
    for late_s in (0.0, 0.0, 10.0, None, 0.0, 0.0, 0.0, 10.0, 0.0):
        due_at = machine.get_timer()
        assert due_at is not None
        if late_s is None:
            promise(machine, round_, asked, 1.0, due_at - 0.1)
            continue
        assert (THIRD, False) not in readies(machine)
        machine.handle_timer(due_at + late_s)
    assert readies(machine)[-2:] == [(asked, True), (THIRD, False)]
    assert spoilt(machine, asked) == 1.0


def test_what_most_told_us_is_old_for_an_offer_after_a_sleep() -> None:
    machine, round_, _ = asked_first(OTHER, THIRD, FOURTH)
    machine.withdraw(0, "for another one", 0.1)
    machine.woke(100.0)
    at = next(n for n in range(round_ + 1, 9999) if coordination_order(NAMES, 0, n)[0] == FOURTH)
    machine.set_state(0, at - 1, DIGEST)
    machine.offer(offer_of(at), 100.2)
    assert refusal(machine, nowhere(at), FOURTH, 101.0) == "impossible version"
    assert spoilt(machine, FOURTH) == 0.0


def test_a_moment_of_sleep_excuses_nobody() -> None:
    machine, round_, asked = asked_first(OTHER, THIRD, FOURTH)
    due_at = machine.get_timer()
    assert due_at is not None
    machine.handle_timer(due_at + 2 * GRACE_S)
    assert refusal(machine, nowhere(round_), asked, due_at + 2 * GRACE_S) == "impossible version"
    assert spoilt(machine, asked) == 1.0


def test_who_held_us_for_most_of_the_cap_pays_though_we_slept_a_little() -> None:
    machine, round_, asked = asked_first(OTHER, THIRD, FOURTH)
    promise(machine, round_, asked, 10.0, 0.1)
    promise(machine, round_, asked, READY_CAP_S, 20.0)
    machine.handle_timer(READY_CAP_S + 0.1)
    assert Aborted in map(type, drain(machine))
    assert spoilt(machine, asked) == SPOILT_IN_A_ROW


@pytest.mark.parametrize("hears_first", [False, True])
@pytest.mark.parametrize("woke_at", [100.0, SLEPT_S])
def test_who_sends_us_far_ahead_as_we_wake_may_be_right(woke_at: float, hears_first: bool) -> None:
    """What most peers told us is from before we slept. A while later it is not."""
    machine, round_, asked = asked_first(OTHER, THIRD, FOURTH)
    promise(machine, round_, asked, 10.0, 0.1)
    if not hears_first:
        machine.handle_timer(woke_at)
        readies(machine)
    assert refusal(machine, nowhere(round_), asked, woke_at) == "impossible version"
    assert readies(machine) == [(asked, True), (THIRD, False)]
    asking = machine._fragments[0].asking
    assert asking is not None
    assert asking.held_s(asked, woke_at) == pytest.approx(10.1 + 2 * GRACE_S)
    assert spoilt(machine, asked) == 0.0
    for now in (woke_at + 0.5, woke_at + 1.0):
        machine.handle_timer(now)
    if woke_at == SLEPT_S:
        return
    promise(machine, round_, THIRD, 20.0, woke_at + 1.0)
    assert refusal(machine, nowhere(round_), THIRD, woke_at + 8.0) == "impossible version"
    assert spoilt(machine, THIRD) == 1.0


@pytest.mark.parametrize("hears_first", [False, True])
def test_who_wakes_about_the_end_of_all_patience_looks_first_too(hears_first: bool) -> None:
    for woke_at in (READY_CAP_S - 0.1, READY_CAP_S + 0.1):
        machine, round_, asked = asked_first(OTHER, THIRD, FOURTH)
        promise(machine, round_, asked, 10.0, 0.1)
        if hears_first:
            machine.receive(begin_without_us(round_, asked, 5.0), asked, woke_at)
        machine.handle_timer(woke_at)
        machine.handle_timer(READY_CAP_S + 0.1)
        assert drain(machine) == []
        assert (asked, False) in readies(machine)
        asking = machine._fragments[0].asking
        assert asking is not None
        assert asking.held_s(asked, READY_CAP_S + 0.1) < 15.0


def test_a_round_that_is_heard_first_after_a_sleep_does_not_hide_the_sleep() -> None:
    machine, round_, asked = asked_first(OTHER, THIRD, FOURTH)
    for now in (0.1, 100.0):
        promise(machine, round_, asked, 100.0, now)
    machine.receive(begin_without_us(round_, asked, 60.0), asked, 203.0)
    asking = machine._fragments[0].asking
    assert asking is not None
    assert asking.held_s(asked, 203.0) == READY_CAP_S + GRACE_S


@pytest.mark.parametrize("hears_first", [False, True])
def test_a_receipt_that_we_slept_over_is_no_measure(hears_first: bool) -> None:
    machine, round_, asked = asked_first(OTHER, THIRD, FOURTH)
    due_at = machine.get_timer()
    if hears_first:
        machine.set_peers(dict.fromkeys(NAMES, TRAINS), 99.9)
    promise(machine, round_, asked, 0.0, 100.0)
    machine.handle_timer(100.0 + GRACE_S)
    assert due_at is not None
    assert machine.get_timer() == pytest.approx(100.0 + GRACE_S + due_at)


def test_who_sends_us_where_nobody_is_does_not_pass_for_our_sleep() -> None:
    machine, round_, asked = asked_first(OTHER, THIRD, FOURTH)
    held_s = 0.9 * READY_CAP_S
    promise(machine, round_, asked, READY_CAP_S, 0.1)
    behind = wire.Behind(fragment=0, round=round_, version=round_ + 900, state_digest=DIGEST, donors=[THIRD])
    assert refusal(machine, behind, asked, held_s) == "impossible version"
    machine.handle_timer(held_s)
    assert (THIRD, False) in readies(machine)
    assert machine._fragments[0].asking is not None
    assert machine._fragments[0].asking.held_s(asked, held_s) == pytest.approx(held_s)


def test_who_slept_through_all_patience_asks_once_more_before_it_gives_up() -> None:
    """The decision may lie in its socket."""
    machine, round_, asked = asked_first(OTHER, THIRD, FOURTH)
    promise(machine, round_, asked, READY_CAP_S, 0.1)
    machine.handle_timer(SLEPT_S)
    assert drain(machine) == []
    assert readies(machine) == [(asked, False)]
    machine.handle_timer(SLEPT_S + 2 * GRACE_S)
    assert Aborted in map(type, drain(machine))


def test_a_sleep_through_a_last_chance_that_the_cap_gave_counts_too() -> None:
    """Its READY at the cap was the fourth, and only three were looked for."""
    machine, round_, asked = asked_first(OTHER, THIRD, FOURTH)
    promise(machine, round_, asked, READY_CAP_S - 20.0, 0.1)
    for _ in range(3):  # three READYs without an answer
        due_at = machine.get_timer()
        assert due_at is not None
        machine.handle_timer(due_at)
    machine.handle_timer(READY_CAP_S - 1.0)  # it slept
    machine.handle_timer(READY_CAP_S)  # and looks once more
    machine.receive(begin_without_us(round_, asked, 300.0), asked, READY_CAP_S + 0.1)
    asking = machine._fragments[0].asking
    assert asking is not None
    assert asking._tries > 3
    machine.handle_timer(READY_CAP_S + 200.0)
    assert spoilt(machine, asked) == 0.0


def test_a_receipt_that_lay_there_as_we_woke_is_no_measure_of_what_we_sent_then() -> None:
    machine, round_, asked = asked_first(OTHER, THIRD, FOURTH)
    promise(machine, round_, asked, 10.0, 0.2)
    machine.handle_timer(100.0)
    promise(machine, round_, asked, 10.0, 100.0)
    asking = machine._fragments[0].asking
    assert asking is not None
    assert list(asking._receipts._samples) == [0.2]
