"""How rounds end: the last ones of a run, when some peers have finished and only wait, and those whose means
come after the decision. Found by simulations and real runs: rounds held up, two states, means thrown away."""

from __future__ import annotations

import pytest
from google.protobuf.message import Message

from p2p_co2.protocol.rounds import Aborted, Began, Committed, Doubted, PeerView, Rounds
from p2p_co2.protocol.rounds import bounds as limits
from p2p_co2.protocol.rounds.rank import coordination_order
from p2p_co2.wire import messages_pb2 as wire
from p2p_co2.wire.identity import PeerId
from tests.round_machine import DIGEST, SHAPE, begun_member, coordinator_of, drain, offer_of, one_machine
from tests.round_network import RUN, Network, make_identity
from tests.test_rounds_certificates import signed

ME, OTHER, THIRD = (make_identity(index).peer_id for index in range(3))
TRAINS, FINISHES = PeerView(1e6), PeerView(1e6, training=False)


def machine_with(views: dict[PeerId, PeerView]) -> Rounds:
    machine = Rounds(make_identity(0), RUN, SHAPE)
    machine.set_state(0, 0, DIGEST)
    machine.set_peers(views, 0.0)
    return machine


def ready(weight: float = 2.0, last: bool = False) -> wire.Ready:
    return wire.Ready(fragment=0, round=1, base_version=0, state_digest=DIGEST, weight=weight, last=last)


def groups(machine: Rounds) -> list[tuple[PeerId, ...]]:
    return [tuple(event.group) for event in drain(machine) if isinstance(event, Began)]


def readies_of(machine: Rounds) -> list[tuple[PeerId, bool]]:
    """Whom it has asked, and whom it has told that it does not any more."""
    sent = machine.messages_to_send()
    return [(to, message.withdrawn) for to, message in sent if isinstance(message, wire.Ready)]


def test_another_coordinator_is_asked_when_this_one_has_stopped_to_train() -> None:
    machine = machine_with(dict.fromkeys((ME, OTHER, THIRD), TRAINS))
    round_ = next(n for n in range(1, 99) if coordination_order((ME, OTHER, THIRD), 0, n)[0] == OTHER)
    machine.set_state(0, round_ - 1, DIGEST)
    machine.offer(offer_of(round_), 0.0)
    assert readies_of(machine) == [(OTHER, False)]
    machine.set_peers({ME: TRAINS, OTHER: FINISHES, THIRD: TRAINS}, 0.1)
    first = coordination_order((ME, THIRD), 0, round_)[0]
    assert readies_of(machine) == [(OTHER, True), *((to, False) for to in (first,) if to != ME)]
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


def seasoned() -> Rounds:
    """A coordinator whose rounds came two seconds apart, all READYs at once: it does not wait long."""
    machine = machine_with(dict.fromkeys((ME, OTHER, THIRD), TRAINS))
    cadence = machine._coordination.cadences[0]
    for round_ in range(1, 5):
        cadence.committed(round_, 2.0 * round_)
        machine._coordination._readies[0].arrived(round_ + 10, 2.0 * round_)
        machine._coordination._readies[0].arrived(round_ + 10, 2.0 * round_ + 0.01)
    return machine


def test_in_the_last_round_who_still_trains_is_waited_for_as_long_as_a_round_of_training() -> None:
    for last, waits in ((False, False), (True, True)):
        machine = seasoned()
        for peer in (ME, OTHER):
            machine.receive(ready(last=last), peer, 100.0)
        machine.handle_timer(100.0 + limits.GATHER_FLOOR_S + 0.3)
        assert bool(groups(machine)) is not waits
        if waits:
            machine.receive(ready(last=True), THIRD, 101.5)  # it has written a checkpoint meanwhile
            assert groups(machine) == [tuple(sorted((ME, OTHER, THIRD)))]


def test_nobody_is_waited_for_beyond_the_last_rounds_deadline() -> None:
    machine = seasoned()
    for peer in (ME, OTHER):
        machine.receive(ready(last=True), peer, 100.0)
    timer_at = machine.get_timer()
    assert timer_at is not None
    assert timer_at <= 100.0 + limits.GATHER_DEFAULT_S
    machine.handle_timer(timer_at)
    assert groups(machine) == [tuple(sorted((ME, OTHER)))]


def test_in_the_last_round_who_is_behind_is_waited_for() -> None:
    """It fetches the round before, and then has work for this one: alone it would make one more."""
    behind, abreast = PeerView(1e6, versions=(1,)), PeerView(1e6, versions=(2,))
    for last, waits in ((False, False), (True, True)):
        machine = machine_with({ME: abreast, OTHER: abreast, THIRD: behind})
        machine.set_state(0, 2, DIGEST)
        third = wire.Ready(
            fragment=0, round=3, base_version=2, state_digest=DIGEST, weight=2.0, last=last
        )  # fmt: skip
        for peer in (ME, OTHER):
            machine.receive(third, peer, 100.0)
        assert bool(groups(machine)) is not waits
        if waits:
            machine.receive(third, THIRD, 101.0)
            assert groups(machine) == [tuple(sorted((ME, OTHER, THIRD)))]


def test_one_peers_word_that_it_is_the_last_round_makes_nobody_wait() -> None:
    machine = seasoned()
    machine.receive(ready(last=True), OTHER, 100.0)
    machine.receive(ready(), ME, 100.0)
    machine.handle_timer(100.0 + limits.GATHER_FLOOR_S + 0.3)
    assert groups(machine) == [tuple(sorted((ME, OTHER)))]


def test_who_has_nothing_more_to_offer_for_a_fragment_is_neither_waited_for_nor_needed() -> None:
    done = PeerView(1e6, finished=frozenset({0}))
    machine = machine_with({ME: done, OTHER: TRAINS})
    machine.receive(ready(last=True), OTHER, 1.0)
    assert groups(machine) == [(OTHER,)]
    elsewhere = PeerView(1e6, finished=frozenset({1}))
    machine = machine_with({ME: done, OTHER: TRAINS, THIRD: elsewhere})
    machine.receive(ready(last=True), OTHER, 1.0)
    assert groups(machine) == []


@pytest.mark.parametrize(
    ("others", "passed_over", "resting", "refusal"),
    [
        ((0,), 0, 0, ""),
        ((1,), 0, 0, "as many others have made this round already"),
        ((1,), 1, 0, ""),  # one word against one
        ((1, 0), 0, 1, ""),  # who rests has nothing to do with it
    ],
)
def test_who_trains_last_makes_a_round_alone_only_beside_one_other_that_has_not_made_it(
    others: tuple[int, ...], passed_over: int, resting: int, refusal: str
) -> None:
    """It loaded the state before from others who were done by then, and made their last round once more.
    ``others``: their versions."""
    views = {ME: PeerView(1e6, versions=(0,))}
    for number, (peer, version) in enumerate(zip((OTHER, THIRD), others, strict=False)):
        finished = frozenset[int]() if number < resting else frozenset({0})
        views[peer] = PeerView(1e6, training=False, versions=(version,), finished=finished)
    machine = machine_with(views)
    for peer in (OTHER, THIRD)[:passed_over]:
        for at in (0.4, 0.5):
            machine._swarm.repute.failed(peer, 0, "it was too late", at)
        assert machine._swarm.repute.is_passed_over(peer, 0, 1.0)
    machine.offer(offer_of(), 1.0)
    if not refusal:
        assert groups(machine) == [(ME,)]
        return
    assert groups(machine) == []
    machine.handle_timer(1.0 + limits.GATHER_CAP_S)
    assert [event.reason for event in drain(machine) if isinstance(event, Aborted)] == [refusal]


def test_where_several_are_done_the_last_one_makes_no_round_alone() -> None:
    """A mean of one is whatever that one likes, and all would end with it."""
    done = PeerView(1e6, training=False, versions=(0,), finished=frozenset({0}))
    machine = machine_with({ME: PeerView(1e6, versions=(0,)), OTHER: done, THIRD: done})
    machine.offer(offer_of(), 1.0)
    reasons = [event.reason for event in drain(machine) if isinstance(event, Aborted)]
    assert reasons == ["most peers have nothing more to offer"]


def test_two_that_are_slower_go_on_beside_others_that_are_done() -> None:
    """Where rounds count steps each has a clock of its own: the others' end says nothing of theirs."""
    done = PeerView(1e6, training=False, versions=(0,), finished=frozenset({0}))
    others = {make_identity(number).peer_id: done for number in (5, 6)}
    machine = machine_with({ME: PeerView(1e6, versions=(0,)), OTHER: PeerView(1e6, versions=(0,)), **others})
    machine.receive(ready(), OTHER, 1.0)
    machine.receive(ready(), ME, 1.0)
    assert [sorted(group) for group in groups(machine)] == [sorted((ME, OTHER))]


def test_who_trains_and_who_is_done_count_alike_where_they_have_made_a_round() -> None:
    """Two of three that train, against the third and one that is done."""
    for done_at, begins in ((0, True), (1, False)):
        machine = machine_with({
            ME: PeerView(1e6, versions=(0,)),
            OTHER: PeerView(1e6, versions=(0,)),
            THIRD: PeerView(1e6, versions=(1,)),
            make_identity(3).peer_id: PeerView(
                1e6, training=False, versions=(done_at,), finished=frozenset({0})
            ),
        })  # fmt: skip
        machine.receive(ready(1.0), OTHER, 1.0)
        machine.receive(ready(1.0), ME, 1.0)
        machine.handle_timer(1.0 + limits.GATHER_CAP_S - 0.1)
        assert bool(groups(machine)) == begins


# ---- two attempts of one round


def test_who_is_in_a_round_that_is_not_decided_begins_no_second_attempt_of_it() -> None:
    machine, begin, first, _ = begun_member()
    machine.receive(begin, first, 0.5)
    machine.messages_to_send()
    late = make_identity(3).peer_id
    views = {first: FINISHES, ME: FINISHES, late: TRAINS}  # as where the others only finish
    machine.set_peers(views, 1.0)
    machine.receive(ready(), late, 1.0)
    answers = [message for to, message in machine.messages_to_send() if to == late]
    assert [type(answer) for answer in answers] == [wire.Waiting]
    assert groups(machine) == []


def test_a_commit_of_another_attempt_than_the_one_we_were_in_leaves_a_doubt() -> None:
    machine, begin, first, _ = begun_member()
    machine.receive(begin, first, 0.5)
    machine.withdraw(0, "no time left", 1.0)
    machine.receive(signed(1), make_identity(2).peer_id, 1.5)
    assert Doubted(0) in drain(machine)
    alone = one_machine(1, 2)
    alone.receive(signed(1), make_identity(2).peer_id, 1.5)  # it was in none
    assert Doubted(0) not in drain(alone)


def test_so_does_one_that_is_only_known_from_the_donor_that_gave_its_mean() -> None:
    """The attempt that it was in had counted its slices, and the state that most held came of that: half a
    minute of its work counted twice (run 800012 of ``benchmarks/offline.py ends``)."""
    machine, begin, first, _ = begun_member()
    machine.receive(begin, first, 0.5)
    drain(machine)
    parts, everybody = [], sorted((ME, OTHER, THIRD))
    for start, workers in ((0, (ME, OTHER, THIRD)), (8, (OTHER, THIRD))):
        counted = [wire.Contributor(peer=name, weight=2.0) for name in sorted(workers)]
        part = wire.PartOutcome(
            start_block=start, stop_block=start + 8, digest=bytes(32), contributors=counted
        )
        parts.append(part)
    machine.replayed(signed(1))  # all of its work is in this one
    assert not drain(machine)
    machine.replayed(signed(1, parts=parts))
    assert drain(machine) == [Doubted(0)]
    for part in parts:
        del part.contributors[:]
        part.contributors.extend(wire.Contributor(peer=name, weight=1.5) for name in everybody)
    members = [wire.Member(peer=name, weight=1.5, offer_id=bytes(8)) for name in everybody]
    machine.replayed(signed(1, members=members, parts=parts))  # what it had offered before, and less
    assert drain(machine) == [Doubted(0)]
    alone = one_machine(1, 2)
    alone.replayed(signed(1, members=members, parts=parts))
    assert Doubted(0) not in drain(alone)


def test_what_a_peer_was_in_alone_nobody_else_has_counted() -> None:
    """Who went over to the others' rounds after it had made the same ones alone keeps the work of these."""
    net = Network(1)
    net.offer_all()
    net.run_until_settled()
    machine = net.peers[net.names[0]].machine
    assert net.committed()
    machine.set_state(0, 0, DIGEST)
    drain(machine)
    counted = [wire.Contributor(peer=name, weight=2.0) for name in sorted((OTHER, THIRD))]
    blocks = machine._shape.blocks[0]
    part = wire.PartOutcome(start_block=0, stop_block=blocks, digest=bytes(32), contributors=counted)
    machine.replayed(signed(1, parts=[part]))
    assert not drain(machine)
