"""One offer of one peer among four, by hand: whom it asks, and what they answer."""

from __future__ import annotations

from p2p_co2.protocol.rounds import Rounds
from p2p_co2.protocol.rounds.attempt import seal_begin
from p2p_co2.protocol.rounds.bounds import GRACE_S
from p2p_co2.protocol.rounds.rank import coordination_order
from p2p_co2.protocol.wire import messages_pb2 as wire
from p2p_co2.protocol.wire.identity import PeerId
from tests.round_machine import DIGEST, SHAPE, offer_of
from tests.round_network import RUN, make_identity
from tests.test_rounds_leaving import FOURTH, ME, NAMES, OTHER, THIRD, TRAINS, readies


def asked_first(*others: PeerId) -> tuple[Rounds, int, PeerId]:
    """A machine that has asked the second of four; the third comes after that one, then the fourth."""
    round_ = next(n for n in range(1, 9999) if coordination_order(NAMES, 0, n) == [OTHER, THIRD, FOURTH, ME])
    machine = Rounds(make_identity(0), RUN, SHAPE)
    machine.set_state(0, round_ - 1, DIGEST)
    machine.set_peers(dict.fromkeys((ME, *others), TRAINS), 0.0)
    machine.offer(offer_of(round_), 0.0)
    assert readies(machine) == [(OTHER, False)]
    return machine, round_, OTHER


def spoilt(machine: Rounds, peer: PeerId) -> float:
    return float(machine._swarm.repute._failed.get((peer, 0), (0, 0.0))[0])


def promise(machine: Rounds, round_: int, peer: PeerId, within_s: float, now: float) -> None:
    machine.receive(wire.Waiting(fragment=0, round=round_, begins_within_s=within_s), peer, now)


def sends_on(machine: Rounds, round_: int, peer: PeerId, now: float) -> None:
    """``peer`` promises nothing, three times, each as late after our READY as it may be."""
    for times in range(3):
        promise(machine, round_, peer, 0.0, now)
        if times < 2:
            now += 1.9 * GRACE_S
            machine.handle_timer(now)


def nowhere(round_: int) -> wire.Behind:
    return wire.Behind(
        fragment=0, round=round_, version=round_ + 900, state_digest=DIGEST, donors=[THIRD]
    )  # fmt: skip


def begin_without_us(round_: int, coordinator: PeerId, within_s: float) -> wire.Begin:
    members = sorted({OTHER, THIRD})
    begin = wire.Begin(
        key=wire.RoundKey(fragment=0, round=round_),
        members=[wire.Member(peer=name, weight=2.0, base_version=round_ - 1) for name in members],
        parts=[wire.PartSpec(owner=members[0], start_block=0, stop_block=SHAPE.blocks[0])],
        state_digest=DIGEST, parts_within_s=within_s / 2, result_within_s=within_s, nonce=bytes(16),
        live=len(members),
    )  # fmt: skip
    seal_begin(begin, coordinator)
    return begin
