"""Whom an offer that came to nothing is put down to, and for how long: by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from p2p_co2.protocol.rounds import Aborted, Distrusted
from p2p_co2.protocol.rounds.attempt import seal_begin
from p2p_co2.protocol.rounds.bounds import GRACE_S, READY_CAP_S
from p2p_co2.protocol.rounds.decision import sign_outcome
from p2p_co2.protocol.rounds.repute import COSTS, FIRST_S, NOT_BEGUN, SPOILT_IN_A_ROW
from p2p_co2.protocol.wire import messages_pb2 as wire
from tests.round_machine import DIGEST, drain, refusal
from tests.round_network import RUN, make_identity
from tests.round_offer import SLEPT_S, asked_first, begin_without_us, nowhere, promise, sends_on, spoilt
from tests.test_rounds_leaving import FOURTH, ME, NAMES, OTHER, THIRD, TRAINS, readies


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


@pytest.mark.parametrize(("held_s", "cost"), [(30.0, 0.0), (40.0, NOT_BEGUN)])
def test_who_keeps_an_offer_longer_than_it_has_to_and_sends_us_on_pays_for_it(
    held_s: float, cost: float
) -> None:
    machine, round_, asked = asked_first(OTHER, THIRD, FOURTH)
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


def test_a_round_that_it_was_in_excuses_no_longer_hold() -> None:
    machine, round_, asked = asked_first(OTHER, THIRD, FOURTH)
    machine.receive(begin_without_us(round_, asked, 20.0), asked, 0.1)
    promise(machine, round_, asked, 60.0, 0.2)
    sends_on(machine, round_, asked, 60.2)
    assert spoilt(machine, asked) == NOT_BEGUN


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
