"""Peers that hear of one another while their offers wait: half of them ask one coordinator, half another, and
each of these would wait for a majority as long as it promised."""

from __future__ import annotations

from dataclasses import replace

import pytest

from p2p_co2.protocol.rounds import Began, Rounds
from p2p_co2.protocol.rounds.bounds import GATHER_DEFAULT_S, GRACE_S
from p2p_co2.protocol.rounds.gathering import SENT_ON_AFTER_S
from p2p_co2.protocol.rounds.rank import coordination_order
from p2p_co2.protocol.wire import messages_pb2 as wire
from p2p_co2.protocol.wire.identity import PeerId
from tests.round_machine import DIGEST, offer_of, refusal
from tests.round_network import Network, make_identity
from tests.round_offer import asked_first, spoilt
from tests.test_rounds_leaving import FOURTH, ME, NAMES, OTHER, THIRD, TRAINS, groups, machine_among, readies
from tests.test_rounds_leaving import ready as ready_for

FIFTH = make_identity(4).peer_id


def second_of_five() -> tuple[Rounds, int]:
    machine, round_ = machine_among(OTHER, THIRD, FOURTH, first=OTHER)
    five = [*NAMES, FIFTH]
    at = next(n for n in range(round_, 9999) if coordination_order(five, 0, n)[:2] == [OTHER, ME])
    machine.set_state(0, at - 1, DIGEST)
    machine.set_peers(dict.fromkeys(five, TRAINS), 0.0)
    return machine, at


def promises(machine: Rounds) -> list[tuple[PeerId, float]]:
    sent = machine.messages_to_send()
    return [(to, message.begins_within_s) for to, message in sent if isinstance(message, wire.Waiting)]


@pytest.mark.parametrize("seed", range(4))
def test_two_halves_that_meet_begin_together_soon(seed: int) -> None:
    """It took ten seconds more, in half of the storms."""
    net = Network(8, seed=seed)
    order = coordination_order(net.names, 0, 1)
    for half in (order[:4], order[4:]):
        views = {name: net._view(name) for name in half}
        for name in half:
            net.peers[name].machine.set_peers(views, net.now)
    for name in (order[0], order[1], order[4], order[5]):  # of each half, half
        net.offer(name)
    net.run(1.0)
    net.tell_everybody()
    began_at = net.now
    for name in (order[2], order[3], order[6], order[7]):
        net.offer(name)
    net.run_until_settled()
    assert set(net.committed()) == set(net.names)
    assert [set(event.group) for _, event in net.events if isinstance(event, Began)] == [set(net.names)]
    assert net.now - began_at < SENT_ON_AFTER_S + 2 * GRACE_S < GATHER_DEFAULT_S


def test_who_does_not_come_first_sends_each_that_is_ready_on_once() -> None:
    machine, round_ = machine_among(OTHER, THIRD, FOURTH, first=OTHER)
    machine.receive(ready_for(round_), THIRD, 0.0)
    ((peer, within_s),) = promises(machine)
    assert (peer, within_s) == (THIRD, pytest.approx(GATHER_DEFAULT_S))  # not the time of its own look
    machine.handle_timer(SENT_ON_AFTER_S - 0.1)
    assert promises(machine) == []
    assert machine.get_timer() == pytest.approx(SENT_ON_AFTER_S)
    machine.handle_timer(SENT_ON_AFTER_S)
    assert promises(machine) == [(THIRD, 0.0)]
    machine.receive(ready_for(round_), FOURTH, SENT_ON_AFTER_S + 0.1)
    assert promises(machine) == [(FOURTH, 0.0)]
    machine.receive(ready_for(round_), THIRD, SENT_ON_AFTER_S + GRACE_S)  # it hears of no other
    ((peer, within_s),) = promises(machine)
    assert peer == THIRD
    assert within_s > 1.0
    machine.handle_timer(SENT_ON_AFTER_S + GRACE_S + 0.1)
    assert promises(machine) == []


def test_who_comes_first_sends_nobody_on() -> None:
    machine, round_ = machine_among(OTHER, THIRD, FOURTH, first=ME)
    machine.receive(ready_for(round_), THIRD, 0.0)
    promises(machine)
    machine.handle_timer(SENT_ON_AFTER_S)
    assert promises(machine) == []
    machine.set_peers(dict.fromkeys(NAMES, replace(TRAINS, training=False)) | {ME: TRAINS}, 3.0)
    assert promises(machine) == []


def test_who_is_sent_on_looks_again_in_a_moment_and_asks_one_that_gave_no_answer_before() -> None:
    machine, round_, first = asked_first(OTHER, THIRD, FOURTH)
    now = 0.0
    while THIRD not in dict(asked := readies(machine)):
        assert set(asked) <= {(first, False)}
        at = machine.get_timer()
        assert at is not None
        now = at
        machine.handle_timer(now)
    machine.receive(wire.Waiting(fragment=0, round=round_, begins_within_s=0.0), THIRD, now + 0.1)
    machine.handle_timer(now + 0.1 + GRACE_S)
    assert readies(machine) == [(THIRD, True), (first, False)]
    spoilt_before = spoilt(machine, first)
    asked = []
    while (THIRD, False) not in asked:
        due_at = machine.get_timer()
        assert due_at is not None
        machine.handle_timer(due_at)
        asked += readies(machine)
    assert (spoilt_before, spoilt(machine, first)) == (1.0, 2.0)  # each time that it was asked in vain


def test_a_majority_is_not_sent_to_one_that_may_be_silent() -> None:
    """It left its coordinator as it was about to begin, and came back after eleven seconds."""
    machine, round_ = machine_among(OTHER, THIRD, FOURTH, first=OTHER)
    for peer in (THIRD, FOURTH):
        machine.receive(ready_for(round_), peer, 0.0)
    machine.offer(offer_of(round_), 0.1)
    machine.receive(ready_for(round_), ME, 0.2)
    promises(machine)
    machine.handle_timer(SENT_ON_AFTER_S)
    assert promises(machine) == []
    machine.handle_timer(GATHER_DEFAULT_S + 0.1)
    assert groups(machine) == [{ME, THIRD, FOURTH}]


def test_a_majority_that_comes_as_some_are_about_to_leave_stays() -> None:
    machine, round_ = machine_among(OTHER, THIRD, FOURTH, first=OTHER)
    machine.receive(ready_for(round_), THIRD, 0.0)
    machine.handle_timer(SENT_ON_AFTER_S)
    machine.receive(ready_for(round_), FOURTH, SENT_ON_AFTER_S + 0.1)
    promises(machine)
    machine.receive(ready_for(round_), ME, SENT_ON_AFTER_S + 0.2)
    promised = promises(machine)  # to others; itself it told as well
    assert {peer for peer, _ in promised} == {THIRD, FOURTH}
    assert all(within_s > 5.0 for _, within_s in promised)


def test_a_majority_that_comes_again_stays_again() -> None:
    """Who was sent on in between went as it was complete."""
    machine, round_ = second_of_five()
    machine.receive(ready_for(round_), THIRD, 0.0)
    machine.handle_timer(SENT_ON_AFTER_S)
    for peer in (ME, FOURTH):
        machine.receive(ready_for(round_), peer, SENT_ON_AFTER_S + 0.1)
    for peer in (ME, FOURTH):
        machine.receive(ready_for(round_, withdrawn=True), peer, SENT_ON_AFTER_S + 0.2)
    promises(machine)
    machine.receive(ready_for(round_), FIFTH, SENT_ON_AFTER_S + 0.3)
    assert promises(machine) == [(FIFTH, 0.0)]
    machine.receive(ready_for(round_), FOURTH, SENT_ON_AFTER_S + 0.4)
    promised = dict(promises(machine))
    assert set(promised) == {THIRD, FOURTH, FIFTH}
    assert min(promised.values()) > 5.0


def test_a_majority_that_is_there_because_a_link_is_back_stays() -> None:
    machine, round_ = second_of_five()
    views = machine._swarm.live
    for peer in (ME, THIRD, FOURTH):
        machine.receive(ready_for(round_), peer, 0.0)
    machine.set_peers({**views, FOURTH: replace(TRAINS, is_missed=True)}, 0.1)
    promises(machine)
    machine.handle_timer(SENT_ON_AFTER_S)
    assert set(promises(machine)) == {(THIRD, 0.0), (FOURTH, 0.0)}
    machine.set_peers(views, SENT_ON_AFTER_S + 0.1)
    promised = dict(promises(machine))
    assert set(promised) == {THIRD, FOURTH}
    assert min(promised.values()) > 5.0


def test_who_is_missed_makes_no_majority_to_stay_with() -> None:
    machine, round_ = machine_among(OTHER, THIRD, FOURTH, first=OTHER)
    for peer in (ME, THIRD, FOURTH):
        machine.receive(ready_for(round_), peer, 0.0)
    machine.set_peers(dict.fromkeys(NAMES, TRAINS) | {FOURTH: replace(TRAINS, is_missed=True)}, 0.1)
    promises(machine)
    machine.handle_timer(SENT_ON_AFTER_S)
    assert set(promises(machine)) == {(THIRD, 0.0), (FOURTH, 0.0)}


def test_most_of_the_swarm_is_not_sent_on_though_its_states_differ() -> None:
    """Whoever has them heals them."""
    machine, round_ = machine_among(OTHER, THIRD, FOURTH, first=OTHER)
    for peer, digest in ((ME, DIGEST), (THIRD, bytes(32)), (FOURTH, bytes(31) + b"1")):
        ready = ready_for(round_)
        ready.state_digest = digest
        machine.receive(ready, peer, 0.1)
    promises(machine)
    machine.handle_timer(SENT_ON_AFTER_S + 0.1)
    assert promises(machine) == []


def test_nobody_is_sent_to_one_whose_link_is_broken() -> None:
    machine, round_ = machine_among(OTHER, THIRD, FOURTH, first=OTHER)
    machine.receive(ready_for(round_), THIRD, 0.0)
    machine.set_peers(dict.fromkeys(NAMES, TRAINS) | {OTHER: replace(TRAINS, is_missed=True)}, 0.1)
    promises(machine)
    machine.handle_timer(SENT_ON_AFTER_S)
    assert promises(machine) == []


def test_who_coordinates_for_itself_alone_is_sent_on_as_soon_as_another_appears() -> None:
    """What it told itself lay there until something else happened."""
    machine, round_ = machine_among(THIRD, first=OTHER)
    at = next(n for n in range(round_, 9999) if coordination_order(NAMES, 0, n)[:2] == [OTHER, ME])
    machine.set_state(0, at - 1, DIGEST)
    machine.offer(offer_of(at), 0.0)
    assert readies(machine) == []  # to itself
    machine.set_peers(dict.fromkeys(NAMES, TRAINS), SENT_ON_AFTER_S + 1.0)
    due_at = machine.get_timer()
    assert due_at == pytest.approx(SENT_ON_AFTER_S + 1.0 + GRACE_S)
    machine.handle_timer(due_at)
    assert readies(machine) == [(OTHER, False)]


def test_one_silence_of_who_comes_first_by_now_counts_once() -> None:
    """It was asked six times, and held out for it."""
    machine, round_, first = asked_first(OTHER, THIRD)
    machine.receive(wire.Waiting(fragment=0, round=round_, begins_within_s=3.0), first, 0.1)
    at = next(n for n in range(1, 9999) if coordination_order(NAMES, 0, n)[:2] == [FOURTH, OTHER])
    machine.withdraw(0, "for another round", 0.2)
    machine.set_state(0, at - 1, DIGEST)
    machine.offer(offer_of(at), 0.3)
    machine.receive(wire.Waiting(fragment=0, round=at, begins_within_s=3.0), OTHER, 0.4)
    machine.set_peers(dict.fromkeys(NAMES, TRAINS), 1.0)
    readies(machine)
    asked = []
    for _ in range(8):
        due_at = machine.get_timer()
        assert due_at is not None
        machine.handle_timer(due_at)
        asked += [to for to, withdrawn in readies(machine) if not withdrawn]
        if asked[-1:] == [OTHER]:
            break
    assert asked == [FOURTH, FOURTH, FOURTH, OTHER]
    assert not machine._swarm.repute.is_passed_over(FOURTH, 0, 30.0)


def test_who_sent_us_on_and_then_gives_no_answer_is_charged_for_that() -> None:
    machine, round_, first = asked_first(OTHER, THIRD, FOURTH)
    for at in (0.1, 0.2, 0.3):
        machine.receive(wire.Waiting(fragment=0, round=round_), first, at)
    assert readies(machine) == [(first, True), (THIRD, False)]
    machine.receive(wire.Waiting(fragment=0, round=round_), THIRD, 0.4)
    asked = []
    while (first, True) not in asked:
        due_at = machine.get_timer()
        assert due_at is not None
        machine.handle_timer(due_at)
        asked += readies(machine)
    assert asked[:2] == [(THIRD, True), (first, False)]
    assert spoilt(machine, first) == 1.0


def test_a_lie_costs_beside_a_silence() -> None:
    machine, round_, first = asked_first(OTHER, THIRD, FOURTH)
    sent: list[tuple[PeerId, bool]] = []
    due_at: float | None = 0.0
    while (THIRD, True) not in sent:
        due_at = machine.get_timer()
        assert due_at is not None
        machine.handle_timer(due_at)
        sent += readies(machine)
        if sent[-1:] == [(THIRD, False)]:
            machine.receive(wire.Waiting(fragment=0, round=round_), THIRD, due_at + 0.1)
    assert sent[-1] == (first, False)
    assert spoilt(machine, first) == 1.0
    behind = wire.Behind(fragment=0, round=round_, version=round_ + 900, state_digest=DIGEST, donors=[THIRD])
    assert due_at is not None
    assert refusal(machine, behind, first, due_at + 0.1) == "impossible version"
    machine.handle_timer(due_at + 0.1)
    assert spoilt(machine, first) == 2.0
