"""Who is not there any more though its READY is: asked elsewhere, started anew, or missed. Found by storms: a
third of them waited 3 to 30 s for such peers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from p2p_co2.protocol.rounds import Aborted, Began, Distrusted, PeerView, Rounds
from p2p_co2.protocol.rounds.rank import coordination_order
from p2p_co2.wire import messages_pb2 as wire
from p2p_co2.wire.identity import PeerId
from tests.round_machine import DIGEST, SHAPE, begun_member, drain, offer_of
from tests.round_network import RUN, Network, make_identity

ME, OTHER, THIRD, FOURTH = NAMES = [make_identity(index).peer_id for index in range(4)]
TRAINS = PeerView(1e6)


def machine_among(*others: PeerId, first: PeerId) -> tuple[Rounds, int]:
    """This peer among ``others``, and the round in which ``first`` of all four comes first."""
    round_ = next(n for n in range(1, 999) if coordination_order(NAMES, 0, n)[0] == first)
    machine = Rounds(make_identity(0), RUN, SHAPE)
    machine.set_state(0, round_ - 1, DIGEST)
    machine.set_peers(dict.fromkeys((ME, *others), TRAINS), 0.0)
    return machine, round_


def readies(machine: Rounds) -> list[tuple[PeerId, bool]]:
    sent = machine.messages_to_send()
    return [(to, message.withdrawn) for to, message in sent if isinstance(message, wire.Ready)]


def ready(round_: int, **more: bool) -> wire.Ready:
    return wire.Ready(
        fragment=0, round=round_, base_version=round_ - 1, state_digest=DIGEST, weight=2.0, **more
    )


def groups(machine: Rounds) -> list[set[PeerId]]:
    return [set(event.group) for event in drain(machine) if isinstance(event, Began)]


def test_who_appears_and_comes_first_is_asked_at_once_and_the_one_before_when_it_is_gone() -> None:
    """Two coordinators with half of the READYs each would wait for a majority for as long as they may."""
    machine, round_ = machine_among(OTHER, THIRD, first=FOURTH)
    machine.offer(offer_of(round_), 0.0)
    ((asked, _),) = readies(machine) or [(ME, False)]
    machine.receive(wire.Waiting(fragment=0, round=round_, begins_within_s=5.0), asked, 0.1)
    machine.set_peers(dict.fromkeys(NAMES, TRAINS), 1.0)
    assert readies(machine) == [(to, True) for to in (asked,) if to != ME] + [(FOURTH, False)]
    machine.set_peers(dict.fromkeys(NAMES[:3], TRAINS), 8.0)
    assert readies(machine) == [(to, False) for to in (asked,) if to != ME]


def test_who_appears_is_not_asked_over_a_broken_link_nor_if_it_was_there_before() -> None:
    machine, round_ = machine_among(OTHER, THIRD, first=FOURTH)
    machine.offer(offer_of(round_), 0.0)
    readies(machine)
    views = dict.fromkeys(NAMES, TRAINS)
    machine.set_peers(views | {FOURTH: replace(TRAINS, is_missed=True)}, 1.0)
    assert readies(machine) == []


@pytest.mark.parametrize("seed", range(4))
def test_two_halves_that_meet_begin_together_soon(seed: int) -> None:
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
    met_at = net.now
    for name in (order[2], order[3], order[6], order[7]):
        net.offer(name)
    net.run_until_settled()
    assert set(net.committed()) == set(net.names)
    assert [set(event.group) for _, event in net.events if isinstance(event, Began)] == [set(net.names)]
    assert net.now - met_at < 1.0


def test_a_coordinator_that_was_lost_and_is_back_is_asked_again() -> None:
    machine, round_ = machine_among(OTHER, THIRD, FOURTH, first=FOURTH)
    machine.offer(offer_of(round_), 0.0)
    assert readies(machine) == [(FOURTH, False)]
    machine.set_peers(dict.fromkeys((ME, OTHER, THIRD), TRAINS), 1.0)
    second = coordination_order(NAMES[:3], 0, round_)[0]
    assert readies(machine) == [(to, False) for to in (second,) if to != ME]
    machine.set_peers(dict.fromkeys(NAMES, TRAINS), 2.0)
    assert (FOURTH, False) in readies(machine)


def test_a_ready_that_was_withdrawn_is_in_no_round() -> None:
    machine, round_ = machine_among(OTHER, THIRD, FOURTH, first=ME)
    for peer in (OTHER, THIRD):
        machine.receive(ready(round_), peer, 0.1)
    machine.receive(ready(round_, withdrawn=True), OTHER, 0.2)
    machine.receive(ready(round_, withdrawn=True), FOURTH, 0.2)  # of one that never asked: nothing
    for peer in (ME, FOURTH):
        if peer == ME:
            machine.offer(offer_of(round_), 0.3)
        else:
            machine.receive(ready(round_), peer, 0.3)
    machine.handle_timer(99.0)
    assert groups(machine) == [{ME, THIRD, FOURTH}]


def test_who_is_missed_is_in_no_round_until_it_is_heard_again() -> None:
    for is_back in (False, True):
        machine, round_ = machine_among(OTHER, THIRD, FOURTH, first=ME)
        machine.offer(offer_of(round_), 0.0)
        for peer in (OTHER, THIRD):
            machine.receive(ready(round_), peer, 0.1)
        views = dict.fromkeys(NAMES, TRAINS)
        machine.set_peers(views | {OTHER: replace(TRAINS, is_missed=True)}, 0.2)
        machine.receive(ready(round_), FOURTH, 0.3)
        assert groups(machine) == []  # its link may be back in a moment
        if is_back:
            machine.set_peers(views, 0.4)
        machine.handle_timer(99.0)
        assert groups(machine) == [set(NAMES) if is_back else {ME, THIRD, FOURTH}]


def test_where_all_who_are_ready_are_missed_no_round_begins() -> None:
    """They are most of the swarm; it is this peer that has lost its line, and it offers nothing itself."""
    machine, round_ = machine_among(OTHER, THIRD, FOURTH, first=ME)
    for peer in (OTHER, THIRD, FOURTH):
        machine.receive(ready(round_), peer, 0.1)
        assert groups(machine) == []
        machine.set_peers(dict.fromkeys(NAMES, TRAINS) | {peer: replace(TRAINS, is_missed=True)}, 0.2)
    missed = replace(TRAINS, is_missed=True)
    machine.set_peers({ME: TRAINS, OTHER: missed, THIRD: missed, FOURTH: missed}, 0.2)
    machine.handle_timer(20.0)
    assert groups(machine) == []
    machine.messages_to_send()
    machine.handle_timer(99.0)
    assert groups(machine) == []
    told = [message.refusal for _, message in machine.messages_to_send() if isinstance(message, wire.Waiting)]
    assert set(told) == {"the links of all who were ready are broken"}


def test_who_is_missed_is_not_told_that_it_is_behind_and_hears_the_round_that_begins_without_it() -> None:
    """It was sent to where it was, which cost its honest coordinator."""
    machine, round_ = machine_among(OTHER, THIRD, FOURTH, first=ME)
    machine.offer(offer_of(round_), 0.0)
    for peer in (OTHER, THIRD, FOURTH):
        machine.set_peers(dict.fromkeys(NAMES, TRAINS) | {FOURTH: replace(TRAINS, is_missed=True)}, 0.1)
        machine.receive(ready(round_), peer, 0.1)
    machine.handle_timer(99.0)
    assert groups(machine) == [{ME, OTHER, THIRD}]
    assert not any(isinstance(message, wire.Behind) for _, message in machine.messages_to_send())


def test_where_most_links_break_for_a_moment_the_round_waits_for_them() -> None:
    """All links of a host break at once: the round for which all were ready was aborted at its deadline."""
    machine, round_ = machine_among(OTHER, THIRD, FOURTH, first=ME)
    machine.offer(offer_of(round_), 0.0)
    for peer in (OTHER, THIRD):
        machine.receive(ready(round_), peer, 0.1)
    missed = replace(TRAINS, is_missed=True)
    machine.set_peers({ME: TRAINS, OTHER: missed, THIRD: missed, FOURTH: missed}, 0.2)
    machine.handle_timer(12.0)
    assert drain(machine) == []
    machine.set_peers(dict.fromkeys(NAMES, TRAINS), 12.1)
    assert groups(machine) == [{ME, OTHER, THIRD}]


def test_one_that_is_silent_is_asked_three_times_and_charged_once() -> None:
    machine, round_ = machine_among(OTHER, THIRD, FOURTH, first=OTHER)
    machine.offer(offer_of(round_), 0.0)
    asked = readies(machine)
    while (OTHER, True) not in asked:
        due_at = machine.get_timer()
        assert due_at is not None
        machine.handle_timer(due_at)
        asked += readies(machine)
    assert asked[:4] == [(OTHER, False)] * 3 + [(OTHER, True)]
    assert not any(isinstance(event, Distrusted) for event in drain(machine))


def test_who_is_taken_in_by_an_earlier_coordinator_tells_the_later_one() -> None:
    machine, begin, first, other = begun_member()
    asking = machine._fragments[0].asking
    assert asking is not None
    asking.asked.append(other)
    machine.messages_to_send()
    machine.receive(begin, first, 0.2)
    assert (other, True) in readies(machine)


def test_an_offer_of_one_that_pauses_alone_ends_with_nobody_asked() -> None:
    """There was nobody to be told that it is over, and the process ended."""
    machine, round_ = machine_among(first=ME)
    machine.set_peers({ME: replace(TRAINS, training=False)}, 0.1)
    machine.offer(offer_of(round_), 0.2)
    assert [type(event) for event in drain(machine)] == [Aborted]
    machine.offer(offer_of(round_), 0.3)  # and another may follow


def test_a_few_send_no_majority_to_their_state_that_is_only_missed() -> None:
    machine, round_ = machine_among(OTHER, THIRD, FOURTH, first=ME)
    missed = replace(TRAINS, is_missed=True)
    machine.set_peers({ME: TRAINS, OTHER: missed, THIRD: missed, FOURTH: missed}, 0.1)
    machine.offer(offer_of(round_), 0.2)
    for peer in (OTHER, THIRD, FOURTH):
        other = ready(round_)
        other.state_digest = bytes(32)
        machine.receive(other, peer, 0.3)
    for now in (20.0, 40.0, 99.0):
        machine.handle_timer(now)
    assert groups(machine) == []
    assert not any(isinstance(message, wire.Behind) for _, message in machine.messages_to_send())
