"""Whom an offer that came to nothing is put down to, and for how long: by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from p2p_co2.rounds import Aborted, Distrusted, Rounds
from p2p_co2.rounds.attempt import seal_begin
from p2p_co2.rounds.bounds import GRACE_S, READY_CAP_S
from p2p_co2.rounds.decision import sign_outcome
from p2p_co2.rounds.repute import COSTS, FIRST_S, NOT_BEGUN, SPOILT_IN_A_ROW
from p2p_co2.rounds.swarm import coordination_order
from p2p_co2.wire import messages_pb2 as wire
from p2p_co2.wire.identity import PeerId
from tests.round_machine import DIGEST, SHAPE, begun_member, drain, offer_of, refusal
from tests.round_network import RUN, make_identity
from tests.test_rounds_leaving import FOURTH, ME, NAMES, OTHER, THIRD, TRAINS, readies

SLEPT_S = 1000.0


def asked_first(*others: PeerId) -> tuple[Rounds, int, PeerId]:
    """A machine that has asked the second of four; the third comes after that one, then the fourth."""
    round_ = next(n for n in range(1, 9999) if coordination_order(NAMES, 0, n) == [OTHER, THIRD, FOURTH, ME])
    machine = Rounds(make_identity(0), RUN, SHAPE, 32)
    machine.set_state(0, round_ - 1, DIGEST)
    machine.set_peers(dict.fromkeys((ME, *others), TRAINS), 0.0)
    machine.offer(offer_of(round_), 0.0)
    assert readies(machine) == [(OTHER, False)]
    return machine, round_, OTHER


def spoilt(machine: Rounds, peer: PeerId) -> float:
    record = machine._swarm.repute._records.get(peer)
    return record.spoilt if record is not None else 0.0


def promise(machine: Rounds, round_: int, peer: PeerId, within_s: float, now: float) -> None:
    machine.receive(wire.Waiting(fragment=0, round=round_, begins_within_s=within_s), peer, now)


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


def test_who_was_asked_last_is_not_blamed_for_the_time_of_the_one_before() -> None:
    machine, round_, asked = asked_first(OTHER, THIRD)
    held_s = 0.9 * READY_CAP_S
    promise(machine, round_, asked, held_s, 0.1)
    machine.set_peers(dict.fromkeys(NAMES, TRAINS), 1.0)
    machine.set_peers(dict.fromkeys((ME, THIRD, FOURTH), TRAINS), held_s)
    assert readies(machine) == [(THIRD, False)]
    machine.set_peers(dict.fromkeys(NAMES, TRAINS), held_s + 1.0)
    promise(machine, round_, THIRD, READY_CAP_S, held_s + 1.0)
    machine.handle_timer(READY_CAP_S + 0.1)
    assert Aborted in map(type, drain(machine))
    repute, now = machine._swarm.repute, READY_CAP_S + 0.2
    assert [repute.is_passed_over(peer, now) for peer in (asked, THIRD)] == [True, False]


def test_who_had_an_offer_for_less_than_half_of_the_cap_is_not_held_out_for_it() -> None:
    machine, round_, _ = asked_first(OTHER, THIRD, FOURTH)
    held_s = READY_CAP_S / 3 - 1.0
    for times, asked in enumerate((OTHER, THIRD, FOURTH)):
        promise(machine, round_, asked, READY_CAP_S, times * held_s + 0.1)
        left = [ME, *NAMES[times + 2 :]]
        if times < 2:
            machine.set_peers(dict.fromkeys(left, TRAINS), (times + 1) * held_s)
            assert readies(machine) == [(left[1], False)]
            machine.set_peers(dict.fromkeys(NAMES, TRAINS), (times + 1) * held_s)
    machine.handle_timer(READY_CAP_S + 0.1)
    assert Aborted in map(type, drain(machine))
    assert [spoilt(machine, peer) for peer in (OTHER, THIRD, FOURTH)] == [0.0, 0.0, NOT_BEGUN]


def sends_on(machine: Rounds, round_: int, peer: PeerId, now: float) -> None:
    """``peer`` promises nothing, three times, each as late after our READY as it may be."""
    for times in range(3):
        promise(machine, round_, peer, 0.0, now)
        if times < 2:
            now += 1.9 * GRACE_S
            machine.handle_timer(now)


@pytest.mark.parametrize(
    ("cells", "held_s", "cost"),
    [(1, 30.0, 0.0), (1, 40.0, NOT_BEGUN), (2, 40.0, 0.0), (2, 120.0, 0.0), (2, 140.0, NOT_BEGUN)],
)
def test_who_keeps_an_offer_longer_than_it_has_to_and_sends_us_on_pays_for_it(
    cells: int, held_s: float, cost: float
) -> None:
    machine, round_, asked = asked_first(OTHER, THIRD, FOURTH)
    machine._swarm.cells = cells
    promise(machine, round_, asked, held_s, 0.1)
    sends_on(machine, round_, asked, 0.1 + held_s)
    assert (asked, True) in readies(machine)
    assert spoilt(machine, asked) == cost


@pytest.mark.parametrize(
    "why", ["lost READYs", "a lost answer", "our sleep", "two spells", "a round that it is in"]
)
def test_who_sends_us_on_does_not_pay_for(why: str) -> None:
    machine, round_, asked = asked_first(OTHER, THIRD, FOURTH)
    now = 0.1
    if why == "lost READYs":
        machine.handle_timer(10.0)
        now = 20.0
    promise(machine, round_, asked, 20.0, now)
    now += 20.0
    if why == "our sleep":
        promise(machine, round_, asked, 5.0, now)
        now += 100.0
    elif why == "a lost answer":  # that nothing more will come of it: we ask when its time is over
        promise(machine, round_, asked, 10.0, now)
        now += 10.0 + GRACE_S
        machine.handle_timer(now)
        now += 2.0
    elif why == "two spells":  # it trains no more for a moment
        machine.set_peers({**dict.fromkeys(NAMES, TRAINS), asked: replace(TRAINS, training=False)}, now)
        machine.set_peers({ME: TRAINS, asked: TRAINS}, now + 0.1)
        promise(machine, round_, asked, 25.0, now + 0.2)
        now += 25.0
    elif why == "a round that it is in":
        machine.receive(begin_without_us(round_, asked, 60.0), asked, now)
        promise(machine, round_, asked, 60.0, now)
        now += 60.0
    readies(machine)
    sends_on(machine, round_, asked, now)
    assert (asked, True) in readies(machine)
    assert spoilt(machine, asked) == 0.0


@pytest.mark.parametrize("then", ["its own gathering", "another round"])
def test_who_was_in_a_round_may_gather_or_be_in_another_after_it(then: str) -> None:
    machine, round_, asked = asked_first(OTHER, THIRD, FOURTH)
    machine.receive(begin_without_us(round_, asked, 20.0), asked, 0.1)
    promise(machine, round_, asked, 20.0, 0.2)
    if then == "another round":
        second = begin_without_us(round_, asked, 35.0)
        second.nonce = bytes(15) + b"2"
        seal_begin(second, asked)
        machine.receive(second, asked, 20.2)
    promise(machine, round_, asked, 30.0, 20.2)
    if then == "another round":
        promise(machine, round_, asked, 40.0, 50.2)
    sends_on(machine, round_, asked, 80.0 if then == "another round" else 50.2)
    assert (asked, True) in readies(machine)
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


def test_a_round_that_it_was_in_excuses_no_longer_hold() -> None:
    machine, round_, asked = asked_first(OTHER, THIRD, FOURTH)
    machine.receive(begin_without_us(round_, asked, 20.0), asked, 0.1)
    promise(machine, round_, asked, 60.0, 0.2)
    sends_on(machine, round_, asked, 60.2)
    assert spoilt(machine, asked) == NOT_BEGUN


def test_what_most_told_us_is_old_for_the_next_offer_too() -> None:
    machine, round_, _ = asked_first(OTHER, THIRD, FOURTH)
    machine.handle_timer(100.0)  # it slept
    machine.withdraw(0, "for another one", 100.1)
    at = next(n for n in range(round_ + 1, 9999) if coordination_order(NAMES, 0, n)[0] == FOURTH)
    machine.set_state(0, at - 1, DIGEST)
    machine.offer(offer_of(at), 100.2)
    assert refusal(machine, nowhere(at), FOURTH, 101.0) == "impossible version"
    assert spoilt(machine, FOURTH) == 0.0


@pytest.mark.parametrize("slept_s", [0.0, SLEPT_S])
def test_an_abort_costs_its_signer_the_time_that_it_had_the_offer(slept_s: float) -> None:
    """Not what the one before took, nor what this peer slept: it was passed over for 24 minutes."""
    machine, round_, asked = asked_first(OTHER, THIRD, FOURTH)
    promise(machine, round_, asked, 140.0, 0.1)
    machine.set_peers(dict.fromkeys((ME, THIRD, FOURTH), TRAINS), 140.0)
    assert readies(machine) == [(THIRD, False)]
    machine._swarm.spoilt(THIRD, "before", 140.0, rounds=SPOILT_IN_A_ROW - NOT_BEGUN)
    outcome = wire.Outcome(
        key=wire.RoundKey(fragment=0, round=round_, attempt=bytes(16)), run=RUN, reason="too few",
        state_digest=DIGEST, members=[wire.Member(peer=THIRD, weight=2.0, base_version=round_ - 1)],
    )  # fmt: skip
    machine.receive(sign_outcome(make_identity(2), outcome), THIRD, 145.0 + slept_s)
    (news,) = [event for event in drain(machine) if isinstance(event, Distrusted)]
    assert (news.peer, news.lasts_s) == (THIRD, FIRST_S)
    assert COSTS * 140.0 > FIRST_S


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


def nowhere(round_: int) -> wire.Behind:
    return wire.Behind(
        fragment=0, round=round_, version=round_ + 900, state_digest=DIGEST, donors=[THIRD]
    )  # fmt: skip


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


@pytest.mark.parametrize("then", ["a promise", "a loss", "a sleep"])
def test_who_sends_us_where_nobody_is_pays_at_once_whatever_follows(then: str) -> None:
    machine, round_, asked = asked_first(OTHER, THIRD, FOURTH)
    assert refusal(machine, nowhere(round_), asked, 0.1) == "impossible version"
    if then == "a promise":
        promise(machine, round_, asked, 100.0, 0.1)
    elif then == "a loss":
        machine.set_peers(dict.fromkeys((ME, THIRD, FOURTH), TRAINS), 0.1)
    machine.handle_timer(SLEPT_S if then == "a sleep" else 0.1)
    assert readies(machine)[:2] == [(asked, True), (THIRD, False)]
    assert spoilt(machine, asked) == 1.0


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


def begin_without_us(round_: int, coordinator: PeerId, within_s: float) -> wire.Begin:
    members = sorted({OTHER, THIRD})
    begin = wire.Begin(
        key=wire.RoundKey(fragment=0, round=round_),
        members=[wire.Member(peer=name, weight=2.0, base_version=round_ - 1) for name in members],
        parts=[wire.PartSpec(owner=members[0], start_block=0, stop_block=SHAPE.blocks[0])],
        state_digest=DIGEST, parts_within_s=within_s / 2, result_within_s=within_s, nonce=bytes(16),
    )  # fmt: skip
    seal_begin(begin, coordinator)
    return begin


def test_who_hears_a_round_that_is_longer_than_the_cap_waits_for_it_and_blames_nobody() -> None:
    """It ended its offer, forgot all that it had heard, and held an honest coordinator out; then another."""
    machine, round_, asked = asked_first(OTHER, THIRD, FOURTH)
    within_s = 4 * READY_CAP_S
    machine.receive(begin_without_us(round_, asked, within_s), asked, 1.0)
    promise(machine, round_, asked, within_s, 1.1)
    for now in (READY_CAP_S, READY_CAP_S + 1.0, within_s - 1.0):
        machine.handle_timer(now)
        assert drain(machine) == []
        assert machine._fragments[0].ear.listening is not None
    machine.handle_timer(within_s + 1.0 + GRACE_S + 0.1)  # nobody decided it: all patience ends
    assert Aborted in map(type, drain(machine))
    assert spoilt(machine, asked) == 1.0  # as its members count it


def test_who_slept_through_all_patience_asks_once_more_before_it_gives_up() -> None:
    """The decision may lie in its socket."""
    machine, round_, asked = asked_first(OTHER, THIRD, FOURTH)
    promise(machine, round_, asked, READY_CAP_S, 0.1)
    machine.handle_timer(SLEPT_S)
    assert drain(machine) == []
    assert readies(machine) == [(asked, False)]
    machine.handle_timer(SLEPT_S + 2 * GRACE_S)
    assert Aborted in map(type, drain(machine))


def test_over_cells_who_may_have_waited_for_a_slow_council_is_not_held_out() -> None:
    for is_first, counts in ((False, NOT_BEGUN), (True, 1.0)):
        machine, round_, asked = asked_first(OTHER, THIRD, FOURTH)
        machine._swarm.cells = 2
        promise(machine, round_, asked, READY_CAP_S, 0.1)
        if not is_first:  # the one before is lost after 35 s
            machine.set_peers(dict.fromkeys((ME, THIRD, FOURTH), TRAINS), 35.0)
            asked = THIRD
            promise(machine, round_, asked, READY_CAP_S, 35.1)
        machine.handle_timer(READY_CAP_S + 0.1)
        assert Aborted in map(type, drain(machine))
        assert spoilt(machine, asked) == counts


def test_the_rounds_that_one_hears_put_off_its_end_once() -> None:
    machine, round_, asked = asked_first(OTHER, THIRD, FOURTH)
    first = begin_without_us(round_, asked, READY_CAP_S)
    machine.receive(first, asked, 1.0)
    second = begin_without_us(round_, asked, 3 * READY_CAP_S)
    second.nonce = bytes(15) + b"2"
    seal_begin(second, asked)
    machine.receive(second, asked, 2.0)
    promise(machine, round_, asked, 3 * READY_CAP_S, 2.1)
    machine.handle_timer(READY_CAP_S + 2 * GRACE_S)
    assert Aborted in map(type, drain(machine))
