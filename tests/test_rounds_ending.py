"""How rounds end: beside peers that are done, and by commits of other attempts than one was in."""

from __future__ import annotations

import pytest

from p2p_co2.protocol.rounds import Began, Doubted, PeerView
from p2p_co2.wire import messages_pb2 as wire
from tests.round_machine import DIGEST, begun_member, drain, offer_of, one_machine
from tests.round_network import Network, make_identity
from tests.test_rounds_certificates import signed

ME, OTHER, THIRD = (make_identity(index).peer_id for index in range(3))


@pytest.mark.parametrize("is_passed_over", [False, True])
def test_the_word_of_one_that_is_passed_over_keeps_nobody_from_a_last_round(
    is_passed_over: bool,
) -> None:
    machine = one_machine()
    done = PeerView(1e6, training=False, versions=(1,), finished=frozenset({0}))
    machine.set_peers({ME: PeerView(1e6, versions=(0,)), OTHER: done}, 0.0)
    for at in (0.4, 0.5) if is_passed_over else ():
        machine.swarm.repute.failed(OTHER, 0, "it was too late", at)
    machine.offer(offer_of(), 1.0)
    assert [event.group for event in drain(machine) if isinstance(event, Began)] == [(ME,)] * is_passed_over


# ---- two attempts of one round


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
    """The attempt that it was in may have counted its slices, and the state that most hold may come of it."""
    machine, begin, first, _ = begun_member()
    machine.receive(begin, first, 0.5)
    drain(machine)
    parts, everybody = [], sorted((ME, OTHER, THIRD))
    for start, workers in ((0, (ME, OTHER, THIRD)), (8, (OTHER, THIRD))):
        counted = [wire.Contributor(peer=name, weight=2.0) for name in sorted(workers)]
        part = wire.PartOutcome(
            start_block=start, stop_block=start + 8, digest=bytes(32), contributors=counted,
            missed=[wire.LATE] * (3 - len(counted)),
        )  # fmt: skip
        parts.append(part)
    machine.replayed(signed(1))  # all of its work is in this one
    assert not drain(machine)
    machine.replayed(signed(1, parts=parts))
    assert drain(machine) == [Doubted(0)]
    for part in parts:
        del part.contributors[:], part.missed[:]
        part.contributors.extend(wire.Contributor(peer=name, weight=1.5) for name in everybody)
    members = [wire.Member(peer=name, weight=1.5, offer_id=b"another ") for name in everybody]
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
    part = wire.PartOutcome(
        start_block=0, stop_block=blocks, digest=bytes(32), contributors=counted, missed=[wire.LATE]
    )
    machine.replayed(signed(1, parts=[part]))
    assert not drain(machine)
