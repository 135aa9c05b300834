"""What a cell holds against who sent it after the others."""

from __future__ import annotations

import pytest

from p2p_co2.protocol.rounds import Distrusted, PayloadShape
from p2p_co2.protocol.rounds.cells import council_order
from p2p_co2.protocol.rounds.delegate import SEEN_WITHIN_S, Delegate
from p2p_co2.protocol.rounds.swarm import Outlet, Swarm, coordination_order
from p2p_co2.protocol.wire import messages_pb2 as wire
from p2p_co2.protocol.wire.identity import PeerId, cell_of, peer_id_of
from tests.round_network import make_identity

SHAPE = PayloadShape(8, (24, 24), 8)
CELLS = 3
OTHER_STATE = 32 * b"1"
ME = make_identity(0)
HERE = cell_of(ME.peer_id, CELLS)


def of_cell(cell: int, number: int = 0) -> PeerId:
    ids = (peer_id_of(i.to_bytes(32, "big")) for i in range(1000))
    return [peer for peer in ids if cell_of(peer, CELLS) == cell][number]


def ready(speaker: PeerId, fragment: int, round_: int) -> wire.CellReady:
    return wire.CellReady(
        key=wire.RoundKey(fragment=fragment, round=round_, attempt=bytes(16)), cell=cell_of(speaker, CELLS),
        state_digest=bytes([fragment]) * 32, members=8, parts_within_s=1.0, owners=24 * [speaker],
    )  # fmt: skip


def told_of(
    version_beyond: int, *fragments: int
) -> tuple[int, list[PeerId], wire.CellWaiting, Swarm, list[Distrusted]]:
    """A round, two peers of another cell and what they say of it: that the others are so much beyond what
    came before it, in another state than ours; our swarm, and whom it blames. The same cell gathers for the
    round of the other ``fragments``."""
    cells = {r: {council_order(range(CELLS), f, r)[0] for f in (0, *fragments)} for r in range(2, 50)}
    round_, (cell,) = next((r, of) for r, of in cells.items() if len(of) == 1 and HERE not in of)
    swarm, blamed = Swarm(ME.peer_id, SHAPE, 64, CELLS), list[Distrusted]()
    swarm.repute.emit = blamed.append
    tellers = coordination_order([of_cell(cell, 0), of_cell(cell, 1)], 0, round_)
    swarm.others[cell] = tellers
    told = wire.CellWaiting(
        fragment=0, round=round_, version=round_ - 1 + version_beyond, state_digest=OTHER_STATE,
        donors=tellers,
    )  # fmt: skip
    return round_, tellers, told, swarm, blamed


def gather(round_: int, swarm: Swarm, now: float, fragment: int = 0) -> Delegate:
    place, outlet = (fragment, round_), Outlet(ME.peer_id)
    return Delegate(place, lambda now: ready(ME.peer_id, *place), swarm, outlet, now)


@pytest.mark.parametrize("again_s", [3.0, SEEN_WITHIN_S + 1.0])
def test_who_says_that_the_others_are_past_a_round_is_given_the_time_to_bear_out(again_s: float) -> None:
    """In short rounds the next schedule point came before the cell saw what it had been told of: it asked for
    the same round again, and who had told the truth was asked last for a minute, in rounds that needed it."""
    round_, tellers, told, swarm, blamed = told_of(1)
    first = gather(round_, swarm, 0.0)
    for teller in tellers:
        first.waiting(told, teller, 0.1)
    assert first.elsewhere == told
    gather(round_, swarm, again_s)
    assert {news.peer for news in blamed} == (set(tellers) if again_s > SEEN_WITHIN_S else set())


def test_who_says_that_the_others_hold_another_state_of_our_version_is_judged_at_once() -> None:
    round_, tellers, told, swarm, blamed = told_of(0)
    first = gather(round_, swarm, 0.0)
    for teller in tellers:
        first.waiting(told, teller, 0.1)
    assert first.elsewhere == told
    gather(round_, swarm, 1.0)
    assert {news.peer for news in blamed} == set(tellers)


def test_who_says_it_again_gains_no_time_by_that() -> None:
    round_, tellers, told, swarm, blamed = told_of(1)
    for at in (0.0, 6.0):
        delegate = gather(round_, swarm, at)
        for teller in tellers:
            delegate.waiting(told, teller, at + 0.1)
        assert delegate.elsewhere == told
    assert not blamed
    gather(round_, swarm, SEEN_WITHIN_S + 1.0)
    assert {news.peer for news in blamed} == set(tellers)


def test_what_somebody_says_of_another_fragment_takes_nothing_back() -> None:
    """A liar that spoke of the next fragment before it was asked again was never held to what it had said."""
    round_, tellers, told, swarm, blamed = told_of(1, 1)
    of_next = wire.CellWaiting()
    of_next.CopyFrom(told)
    of_next.fragment = 1
    for fragment, message in enumerate((told, of_next)):
        delegate = gather(round_, swarm, 0.0, fragment)
        for teller in 2 * tellers:  # in whichever order they are asked
            delegate.waiting(message, teller, 0.1)
        assert delegate.elsewhere == message
    gather(round_, swarm, SEEN_WITHIN_S + 1.0)
    assert {news.peer for news in blamed} == set(tellers)
