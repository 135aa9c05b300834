"""How rounds end: the last ones of a run, when some peers have finished and only wait, and those whose means
come after the decision. Found by simulations and real runs: rounds held up, two states, means thrown away."""

from __future__ import annotations

import pytest

from p2p_co2.protocol.rounds import Aborted, Began, Doubted, PeerView, Rounds
from p2p_co2.protocol.rounds import bounds as limits
from p2p_co2.wire import messages_pb2 as wire
from p2p_co2.wire.identity import PeerId
from tests.round_machine import DIGEST, SHAPE, begun_member, drain, offer_of, one_machine
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
    return wire.Ready(
        fragment=0, round=1, state_digest=DIGEST, weight=weight, last=last, offer_id=bytes(8)
    )  # fmt: skip


def groups(machine: Rounds) -> list[tuple[PeerId, ...]]:
    return [tuple(event.group) for event in drain(machine) if isinstance(event, Began)]


def readies_of(machine: Rounds) -> list[tuple[PeerId, bool]]:
    """Whom it has asked, and whom it has told that it does not any more."""
    sent = machine.messages_to_send()
    return [(to, message.withdrawn) for to, message in sent if isinstance(message, wire.Ready)]


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
            machine.swarm.repute.failed(peer, 0, "it was too late", at)
        assert machine.swarm.repute.is_passed_over(peer, 0, 1.0)
    machine.offer(offer_of(), 1.0)
    if not refusal:
        assert groups(machine) == [(ME,)]
        return
    assert groups(machine) == []
    machine.handle_timer(1.0 + limits.GATHER_CAP_S)
    assert [event.reason for event in drain(machine) if isinstance(event, Aborted)] == [refusal]


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
    """The attempt that it was in had counted its slices, and the state that most held came of that: half a
    minute of its work counted twice (run 800012 of ``benchmarks/offline.py ends``)."""
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
