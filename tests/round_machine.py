"""One rounds machine by itself: peer 0, the offers it makes, and messages made by hand for it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cache

import pytest
from google.protobuf.message import Message

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.protocol.rounds import Offer, PayloadShape, PeerView, Rounds, Stale
from p2p_co2.protocol.rounds.attempt import seal_begin
from p2p_co2.protocol.rounds.history import History
from p2p_co2.protocol.rounds.rank import coordination_order
from p2p_co2.wire import messages_pb2 as wire
from p2p_co2.wire.identity import PeerId
from tests.round_network import RUN, Network, make_identity

DIGEST = hashlib.sha256(b"start").digest()
SHAPE = PayloadShape(8, (16,))


def coordinator_of(net: Network, round_: int = 1) -> PeerId:
    return coordination_order(net.names, 0, round_)[0]


def one_machine(*others: int) -> Rounds:
    """Peer 0 with the given live others, at version 0."""
    machine = Rounds(make_identity(0), RUN, SHAPE)
    machine.set_state(0, 0, DIGEST)
    machine.set_peers({make_identity(i).peer_id: PeerView(1e6) for i in others}, 0.0)
    return machine


def offer_of(round_: int = 1, weight: float = 2.0, payload: bytes = bytes(range(128))) -> Offer:
    return Offer(0, round_, round_ - 1, DIGEST, payload, weight, offer_id=bytes(8))


def remembers(
    *groups: Iterable[PeerId], beside: Iterable[PeerId] = (), seen: Iterable[PeerId] = ()
) -> History:
    """What one knows that saw all commits, round by round of the slices of ``groups``, others ``beside`` at
    work; ``seen``: not at work any more."""
    here, seen = set[PeerId](), {*seen}
    history = History(here.__contains__, at_work=lambda: here - seen)
    for round_, group in enumerate(groups, 1):
        here.clear()
        here.update(group, beside, seen)
        part = wire.PartOutcome(contributors=[wire.Contributor(peer=peer) for peer in group])
        history.keep(wire.Decision(), wire.Outcome(key=wire.RoundKey(round=round_), parts=[part]))
    return history


def drain(machine: Rounds) -> list[object]:
    """The events, but for those of what need not be sent any more."""
    events: list[object] = []
    while (event := machine.next_event()) is not None:
        if not isinstance(event, Stale):
            events.append(event)
    return events


def begun_member() -> tuple[Rounds, wire.Begin, PeerId, PeerId]:
    """Machine of peer 0 in a round that peer ``coordinator`` of three began; part 0 is ours, part 1 the
    other's."""
    me = make_identity(0).peer_id
    names = sorted(make_identity(i).peer_id for i in range(3))
    machine = one_machine(1, 2)
    first = coordination_order(names, 0, 1)[0]
    if first == me:  # ask somebody else: we are not to coordinate here
        machine.set_peers({name: PeerView(1e6) for name in names}, 0.0)
    machine.offer(offer_of(), 0.0)
    machine.messages_to_send()
    begin = wire.Begin(
        key=wire.RoundKey(fragment=0, round=1),
        members=[wire.Member(peer=name, weight=2.0, offer_id=bytes(8)) for name in names],
        parts=[
            wire.PartSpec(owner=me, start_block=0, stop_block=8),
            wire.PartSpec(owner=next(n for n in names if n not in (me, first)), start_block=8, stop_block=16),
        ],
        state_digest=DIGEST,
        parts_within_s=5.0,
        result_within_s=12.0,
        nonce=bytes(16),
        live=3,
    )
    seal_begin(begin, first)
    other = next(name for name in names if name not in (me, first))
    return machine, begin, first, other


@cache
def begun_key() -> wire.RoundKey:
    """The key of the round of ``begun_member``."""
    return begun_member()[1].key


def part_of(**change: object) -> wire.Part:
    key = begun_key()
    fields = {"key": key, "part": 0, "offset": 0, "total": 64, "data": bytes(64)} | change
    return wire.Part(**fields)  # type: ignore[arg-type]


def refusal(machine: Rounds, message: Message, sender: PeerId, now: float = 1.0) -> str:
    with pytest.raises(RemoteProtocolError) as caught:
        machine.receive(message, sender, now)
    return caught.value.reason
