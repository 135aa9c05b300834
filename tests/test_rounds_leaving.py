"""Who is not there any more though its READY is: asked elsewhere, started anew, or missed. Found by storms: a
third of them waited 3 to 30 s for such peers."""

from __future__ import annotations

from dataclasses import replace

from p2p_co2.rounds import Began, PeerView, Rounds
from p2p_co2.rounds.bounds import GRACE_S
from p2p_co2.rounds.swarm import coordination_order
from p2p_co2.wire import messages_pb2 as wire
from p2p_co2.wire.identity import PeerId
from tests.round_machine import DIGEST, SHAPE, drain, offer_of
from tests.round_network import RUN, make_identity

ME, OTHER, THIRD, FOURTH = NAMES = [make_identity(index).peer_id for index in range(4)]
TRAINS = PeerView(1e6)


def machine_among(*others: PeerId, first: PeerId) -> tuple[Rounds, int]:
    """This peer among ``others``, and the round in which ``first`` of all four comes first."""
    round_ = next(n for n in range(1, 999) if coordination_order(NAMES, 0, n)[0] == first)
    machine = Rounds(make_identity(0), RUN, SHAPE, 32)
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


def test_who_comes_first_by_now_is_asked_when_a_coordinator_begins_nothing_in_time() -> None:
    """Two coordinators with half of the READYs each waited 30 s for a majority."""
    machine, round_ = machine_among(OTHER, THIRD, first=FOURTH)
    machine.offer(offer_of(round_), 0.0)
    ((asked, _),) = readies(machine) or [(ME, False)]
    machine.receive(wire.Waiting(fragment=0, round=round_, begins_within_s=5.0), asked, 0.1)
    machine.set_peers(dict.fromkeys(NAMES, TRAINS), 1.0)
    assert readies(machine) == []  # it may be about to begin
    machine.handle_timer(5.2 + GRACE_S)
    told = [] if asked == ME else [(asked, True)]
    assert readies(machine) == [*told, (FOURTH, False)]


def test_a_coordinator_that_was_lost_and_is_back_is_asked_again() -> None:
    machine, round_ = machine_among(OTHER, THIRD, FOURTH, first=FOURTH)
    machine.offer(offer_of(round_), 0.0)
    assert readies(machine) == [(FOURTH, False)]
    machine.set_peers(dict.fromkeys((ME, OTHER, THIRD), TRAINS), 1.0)
    second = coordination_order(NAMES[:3], 0, round_)[0]
    assert readies(machine) == [(to, False) for to in (second,) if to != ME]
    machine.set_peers(dict.fromkeys(NAMES, TRAINS), 2.0)
    for _ in range(9):
        now = machine.get_timer()
        assert now is not None
        machine.receive(wire.Waiting(fragment=0, round=round_), second, now - 0.1)
        machine.handle_timer(now + GRACE_S)
        if (FOURTH, False) in readies(machine):
            return
    raise AssertionError("it waits where only some ask")


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
    machine, round_ = machine_among(OTHER, first=ME)
    machine.receive(ready(round_), OTHER, 0.1)
    machine.set_peers({ME: replace(TRAINS, training=False), OTHER: replace(TRAINS, is_missed=True)}, 0.2)
    machine.set_peers({ME: TRAINS, OTHER: replace(TRAINS, is_missed=True)}, 0.3)
    machine.receive(ready(round_), OTHER, 0.4)
    machine.handle_timer(99.0)
    assert groups(machine) == []
