"""How rounds end: the last ones of a run, when some peers have finished and only wait, and those whose means
come after the decision. Found by simulations and real runs: rounds held up, two states, means thrown away."""

from __future__ import annotations

from google.protobuf.message import Message

from p2p_co2.rounds import Began, Committed, PeerView, Rounds
from p2p_co2.rounds.swarm import coordination_order
from p2p_co2.wire import messages_pb2 as wire
from p2p_co2.wire.identity import PeerId
from tests.round_machine import DIGEST, SHAPE, coordinator_of, drain, offer_of
from tests.round_network import RUN, Network, make_identity

ME, OTHER, THIRD = (make_identity(index).peer_id for index in range(3))
TRAINS, FINISHES = PeerView(1e6), PeerView(1e6, training=False)


def machine_with(views: dict[PeerId, PeerView]) -> Rounds:
    machine = Rounds(make_identity(0), RUN, SHAPE, 32)
    machine.set_state(0, 0, DIGEST)
    machine.set_peers(views, 0.0)
    return machine


def ready(weight: float = 2.0) -> wire.Ready:
    return wire.Ready(fragment=0, round=1, base_version=0, state_digest=DIGEST, weight=weight)


def test_a_coordinator_that_only_finishes_does_not_wait_for_itself() -> None:
    machine = machine_with({ME: FINISHES, OTHER: TRAINS, THIRD: FINISHES})
    machine.receive(ready(), OTHER, 1.0)
    assert [event.group for event in drain(machine) if isinstance(event, Began)] == [(OTHER,)]


def test_another_coordinator_is_asked_when_this_one_has_stopped_to_train() -> None:
    machine = machine_with(dict.fromkeys((ME, OTHER, THIRD), TRAINS))
    round_ = next(n for n in range(1, 99) if coordination_order((ME, OTHER, THIRD), 0, n)[0] == OTHER)
    machine.set_state(0, round_ - 1, DIGEST)
    machine.offer(offer_of(round_), 0.0)
    assert [to for to, message in machine.messages_to_send() if isinstance(message, wire.Ready)] == [OTHER]
    machine.set_peers({ME: TRAINS, OTHER: FINISHES, THIRD: TRAINS}, 0.1)
    first = coordination_order((ME, THIRD), 0, round_)[0]
    asked = [to for to, message in machine.messages_to_send() if isinstance(message, wire.Ready)]
    assert asked == [to for to in (first,) if to != ME]
    machine.set_peers({ME: TRAINS, OTHER: FINISHES, THIRD: FINISHES}, 0.2)
    began = [event.group for event in drain(machine) if isinstance(event, Began)]
    assert began == [(ME,)]


def test_means_that_a_slow_link_brings_after_the_decision_complete_its_round() -> None:
    net = Network(4)
    slow = next(name for name in net.names if name != coordinator_of(net))

    def later(source: PeerId, to: PeerId, message: Message) -> bool:
        if to == slow and isinstance(message, wire.Mean):
            net.at(net.now + 1.5, lambda: net.deliver(source, to, message))
            return False
        return True

    net.on_send = later
    net.offer_all()
    net.run(20.0)
    assert [name for name, event in net.events if isinstance(event, Committed)][-1] == slow
    assert set(net.committed()) == set(net.names)
    net.check_agreement()
