"""The pipeline machine by hand: what it takes and refuses, and who sends whom how much."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.protocol.pipeline.machine import (
    Do,
    DroppedMicrobatch,
    Key,
    Pipeline,
    Place,
    Sizes,
    UselessPayload,
    Work,
)
from p2p_co2.protocol.pipeline.neighbours import MAX_NEIGHBOURS
from p2p_co2.protocol.pipeline.routes import shares
from p2p_co2.protocol.rounds.assembly import PIECE_UNIT_BYTES
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.messages_pb2 import Backward, Declined, Dropped, Forward, MicrobatchKey, Neighbour

SIZES = Sizes(8, 4, 8, 1000, (1000, 500), b"b", 60.0)


def machine(stage: int, sizes: Sizes = SIZES) -> Pipeline:
    made = Pipeline(Place(PeerId("me"), 77, stage, 3), sizes)
    made.join(PeerId("before"), stage - 1)
    made.join(PeerId("behind"), stage + 1)
    for peer, number in (("before", stage - 1), ("behind", stage + 1)):
        said = Neighbour(stage=number, meeting=5, boundaries=b"b", tokens_per_s=1.0, granted=3)
        made.receive(said, PeerId(peer), 0.0)
    return made


def forward(number: int, data: bytes = bytes(1000), total: int = 1000) -> Forward:
    return Forward(key=MicrobatchKey(owner=1, number=number), offset=0, total=total, data=data)


def backward(number: int, tokens: int = 100, loss: float = 1.0, codec: int = 0, size: int = 1000) -> Backward:
    key = MicrobatchKey(owner=1, number=number)
    said = Backward(key=key, tokens=tokens, loss=loss, offset=0, total=size, data=bytes(size))
    said.codec = codec
    return said


def test_hostile_messages_are_refused() -> None:
    one = machine(1)
    before, behind = PeerId("before"), PeerId("behind")
    with pytest.raises(RemoteProtocolError, match="not the one before"):
        one.receive(forward(1), behind, 1.0)
    with pytest.raises(RemoteProtocolError, match="wrong size"):
        one.receive(forward(1, total=2000), before, 1.0)
    assert not one.receive(backward(9), behind, 1.0)  # it may be an earlier process's
    nan = Neighbour(stage=2, meeting=5, boundaries=b"b", tokens_per_s=float("nan"))
    with pytest.raises(RemoteProtocolError, match="out of range"):
        one.receive(nan, behind, 1.0)
    assert one.receive(forward(1), before, 1.0)
    work = one.next_work(1.0)
    assert work is not None
    assert work.key is not None
    one.forwarded(work.key, bytes(1000), 100, 2.0)
    for wrong in (backward(1, tokens=101), backward(1, loss=float("inf"))):
        with pytest.raises(RemoteProtocolError, match="wrong count"):
            one.receive(wrong, behind, 3.0)
    with pytest.raises(RemoteProtocolError, match="did not go there"):
        one.receive(backward(1), before, 3.0)
    assert one.receive(backward(1), behind, 3.0)
    assert not one.receive(forward(1), PeerId("stranger"), 3.0)


def test_nothing_is_taken_from_one_for_whom_something_else_crosses() -> None:
    one, before = machine(1), PeerId("before")
    with pytest.raises(RemoteProtocolError, match="other boundaries"):
        one.receive(Neighbour(stage=0, meeting=5, boundaries=b"x", granted=3), before, 1.0)
    assert not one.receive(forward(1), before, 1.0)
    one.receive(Neighbour(stage=0, meeting=6, boundaries=b"b"), before, 1.0)
    assert one.receive(forward(1), before, 1.0)
    stranger = PeerId("who has said nothing")
    one.join(stranger, 0)
    assert not one.receive(forward(2), stranger, 1.0)


def test_one_that_has_moved_is_not_blamed() -> None:
    one, behind = machine(1), PeerId("behind")
    moved = Neighbour(stage=0, meeting=9, boundaries=b"b", granted=50)
    assert one.receive(moved, behind, 1.0)
    one.receive(forward(1), PeerId("before"), 1.0)
    work = one.next_work(1.0)
    assert work is not None
    assert work.key is not None
    one.forwarded(work.key, bytes(1000), 100, 1.0)
    assert Dropped not in {type(message) for _, message in one.messages_to_send()}


def test_one_that_has_moved_to_the_other_side_is_met_there() -> None:
    """As its record says: else the only replica of the stage before, started anew with that behind, is none
    for as long as its link holds."""
    one, mover = machine(1), PeerId("before")
    one.join(mover, 2)
    assert one.receive(Neighbour(stage=2, meeting=9, boundaries=b"b", granted=50), mover, 1.0)
    with pytest.raises(RemoteProtocolError, match="wrong stage"):
        one.receive(forward(1), mover, 1.0)
    one.join(mover, 1)
    assert not one.receive(forward(1), mover, 1.0)


def test_pieces_that_come_again_are_no_use() -> None:
    """Else they would cost their sender nothing."""
    unit = PIECE_UNIT_BYTES
    one = machine(1, replace(SIZES, forward_bytes=3 * unit, backward_bytes=[3 * unit]))
    before, behind, key = PeerId("before"), PeerId("behind"), MicrobatchKey(owner=1, number=1)

    def piece(kind: type[Any], at: int, **fields: Any) -> Any:
        return kind(key=key, offset=at * unit, total=3 * unit, data=bytes(unit), **fields)

    for at, is_new in ((0, True), (0, False), (2, True), (2, False), (1, True), (1, False)):
        assert one.receive(piece(Forward, at), before, 1.0) == is_new
    other = MicrobatchKey(owner=1, number=2)
    with pytest.raises(RemoteProtocolError, match="wrong size"):
        one.receive(Forward(key=other, total=1 << 60, data=bytes(unit)), before, 1.0)
    work = one.next_work(1.0)
    assert work is not None
    assert work.key is not None
    one.forwarded(work.key, bytes(3 * unit), 100, 2.0)
    for at, is_new in ((1, True), (1, False), (0, True), (0, False), (2, True), (2, False)):
        assert one.receive(piece(Backward, at, tokens=100, loss=1.0), behind, 3.0) == is_new


def test_what_is_no_use_is_held_against_who_sent_it() -> None:
    one, before, behind = machine(1), PeerId("before"), PeerId("behind")
    error = RemoteProtocolError("not finite")

    def blamed() -> list[tuple[str, type]]:
        happened = iter(one.next_event, None)
        return [(event.sender, event.kind) for event in happened if isinstance(event, UselessPayload)]

    for number in (1, 2):
        one.receive(forward(number), before, 1.0)
    work = one.next_work(1.0)
    assert work is not None
    assert work.sender == before
    one.failed(Key(1, 1), error)
    assert blamed() == [(before, Forward)]
    work = one.next_work(1.0)
    one.forwarded(Key(1, 2), bytes(1000), 100, 2.0)
    assert one.receive(backward(2), behind, 3.0)
    work = one.next_work(3.0)
    assert work is not None
    assert work.sender == behind
    one.failed(Key(1, 2), error)
    assert blamed() == [(behind, Backward)]
    assert not one.in_flight


def test_no_more_neighbours_than_the_bound() -> None:
    one = machine(1)
    for number in range(3 * MAX_NEIGHBOURS):
        one.join(PeerId(f"more {number}"), 2 * (number % 2))
    now, most = one.held()["MAX_NEIGHBOURS"]
    assert now == most == 2 * MAX_NEIGHBOURS


def sent_on(one: Pipeline) -> Pipeline:
    """A microbatch comes, is computed and goes to the next stage."""
    one.receive(forward(1), PeerId("before"), 1.0)
    work = one.next_work(1.0)
    assert work is not None
    assert work.key is not None
    one.forwarded(work.key, bytes(1000), 100, 2.0)
    return one


def test_a_gradient_is_of_a_codec_that_the_run_has() -> None:
    """Its size is that codec's, and all its pieces are of one."""
    behind = PeerId("behind")
    wrong = [(2, 1000, "none of this run"), (2**32 - 1, 500, "none of this run")]
    wrong += [(0, 500, "wrong size"), (1, 1000, "wrong size"), (1, 2**31, "wrong size")]
    for codec, total, why in wrong:
        one, message = sent_on(machine(1)), backward(1, codec=codec, size=8)
        message.total = total
        with pytest.raises(RemoteProtocolError, match=why):
            one.receive(message, behind, 3.0)
    one = sent_on(machine(1))
    assert one.receive(backward(1, codec=1, size=500), behind, 3.0)
    work = one.next_work(4.0)
    assert work is not None
    assert (work.codec, len(work.payload or b"")) == (1, 500)


def test_pieces_of_two_codecs_are_no_gradient() -> None:
    sizes = Sizes(8, 4, 8, 1000, (1 << 15, (1 << 15) + 512), b"b", 60.0)
    one = sent_on(machine(1, sizes))
    first = backward(1, size=1 << 14)
    first.total = 1 << 15
    assert one.receive(first, PeerId("behind"), 3.0)
    first.codec, first.offset = 1, 1 << 14
    with pytest.raises(RemoteProtocolError, match="in two codecs"):
        one.receive(first, PeerId("behind"), 3.0)


def test_no_more_is_taken_than_was_granted() -> None:
    one = machine(1)
    list(one.messages_to_send())
    taken = [one.receive(forward(number), PeerId("before"), 1.0) for number in range(1, 30)]
    assert sum(taken) == SIZES.room
    declined = [message for _, message in one.messages_to_send() if hasattr(message, "reason")]
    assert len(declined) == 29 - SIZES.room


def test_what_was_declined_is_not_taken_when_it_comes_again() -> None:
    """It may be elsewhere by then."""
    one, before = machine(1), PeerId("before")
    for number in range(1, SIZES.room + 1):
        assert one.receive(forward(number), before, 1.0)
    assert not one.receive(forward(99), before, 1.0)
    for message in (Dropped(key=forward(number).key) for number in range(1, 5)):
        assert one.receive(message, before, 2.0)
    assert not one.receive(forward(99), before, 3.0)
    assert one.receive(forward(100), before, 3.0)


def test_a_gradient_that_comes_late_counts_nowhere_and_gives_more_time() -> None:
    one = machine(1)
    one.receive(forward(1), PeerId("before"), 1.0)
    work = one.next_work(1.0)
    assert work is not None
    assert work.key is not None
    one.forwarded(work.key, bytes(1000), 100, 2.0)
    timer = one.get_timer()
    assert timer is not None
    one.handle_timer(timer)
    assert not one.receive(backward(1), PeerId("behind"), timer + 1)
    assert one.next_work(timer + 1) is None
    assert one.in_flight == 0


@pytest.mark.parametrize("closes_first", [True, False])
def test_what_is_declined_at_the_end_is_dropped_in_time(closes_first: bool) -> None:
    """The stage behind leaves with this one, and nobody else is there to take it."""
    one, behind = machine(1), PeerId("behind")
    one.receive(forward(1), PeerId("before"), 1.0)
    work = one.next_work(1.0)
    assert work is not None
    assert work.key is not None
    one.forwarded(work.key, bytes(1000), 100, 2.0)
    if closes_first:
        one.close(2.0)
    assert one.receive(Declined(key=forward(1).key, reason="leaving"), behind, 3.0)
    one.lose(behind)
    if not closes_first:
        assert one.get_timer() == 2.0 + 2 * SIZES.cap_s
        one.close(3.0)
    assert not one.is_over
    assert one.get_timer() == 3.0 + SIZES.cap_s
    one.handle_timer(3.0 + SIZES.cap_s)
    assert one.is_over


def test_one_to_whom_no_more_comes_steps_with_what_it_has() -> None:
    """Until it does, it takes nothing of what its group agrees on, which piles up, and does not rest."""
    one = sent_on(machine(1))
    assert one.receive(backward(1), PeerId("behind"), 2.0)
    assert one.next_work(2.0) is not None
    one.counted(Key(1, 1), bytes(1000), 100, 1.0, 3.0)
    one.handle_timer(100.0)
    assert one.next_work(100.0) is None
    assert one.get_timer() == 123.0
    one.handle_timer(123.0)
    assert one.next_work(123.0) == Work(Do.STEP)
    one.stepped()
    assert one.get_timer() is None
    assert one.receive(forward(2), PeerId("before"), 124.0)
    assert one.next_work(124.0) is not None


@pytest.mark.parametrize("is_counted", [True, False])
def test_one_that_nobody_is_behind_comes_between_steps(is_counted: bool) -> None:
    """Others of its stage may go on: what they agree on would pile up here, and this peer would not rest."""
    one, behind = sent_on(machine(1)), PeerId("behind")
    if is_counted:
        assert one.receive(backward(1), behind, 2.0)
        assert one.next_work(2.0) is not None
        one.counted(Key(1, 1), bytes(1000), 100, 1.0, 3.0)
        assert one.receive(forward(2), PeerId("before"), 3.0)
        assert one.next_work(3.0) is not None
        one.forwarded(Key(1, 2), bytes(1000), 100, 3.0)
    key = forward(1 + is_counted).key
    assert one.receive(Declined(key=key, reason="leaving"), behind, 4.0)
    one.lose(behind)
    assert one.receive(forward(3), PeerId("before"), 5.0)
    assert one.next_work(5.0) is None  # nobody would take it
    assert (one.in_flight, one.waits_for) == (1, "stage 2 has no replica")
    timer = one.get_timer()
    assert timer is not None
    assert timer <= 4.0 + 2 * SIZES.cap_s
    one.handle_timer(timer)
    assert one.in_flight == 0
    assert one.next_work(timer) == (Work(Do.STEP) if is_counted else None)


def test_nothing_is_told_of_what_is_dropped_before_it_was_begun() -> None:
    """A sender may make and drop any number: each would be a line in this peer's journal."""
    one = machine(1)
    assert one.receive(forward(1), PeerId("before"), 1.0)
    assert one.receive(Dropped(key=MicrobatchKey(owner=1, number=1)), PeerId("before"), 1.0)
    assert one.waiting == 0
    while (event := one.next_event()) is not None:
        assert not isinstance(event, DroppedMicrobatch)


def test_shares_are_a_permutation_for_equals() -> None:
    peers = [PeerId(f"p{i}") for i in range(5)]
    rates, behind = dict.fromkeys(peers, 1.0), {PeerId(f"q{i}"): 2.0 for i in range(5)}
    chosen = []
    for peer in peers:
        mine = shares(peer, rates, behind, b"round 1")
        assert list(mine.values()) == [1.0]
        chosen += mine
    assert len(set(chosen)) == 5
    assert chosen != [next(iter(shares(peer, rates, behind, b"round 2"))) for peer in peers]


def test_shares_follow_speed() -> None:
    rates = {PeerId("a"): 1.0, PeerId("b"): 3.0}
    behind = {PeerId("x"): 0.0, PeerId("y"): 2.0, PeerId("z"): 2.0}
    total = dict.fromkeys(behind, 0.0)
    for peer, rate in rates.items():
        for receiver, share in shares(peer, rates, behind, b"seed").items():
            total[receiver] += share * rate / 4
    assert all(abs(part - 1 / 3) < 0.06 for part in total.values()), total
    assert shares(PeerId("a"), rates, {}, b"") == {}


@pytest.mark.parametrize("rate", [1e308, 5e-324, 0.0])
def test_shares_add_up_whatever_rate_others_claim(rate: float) -> None:
    rates = {PeerId("a"): 1.0, PeerId("b"): rate, PeerId("c"): rate}
    behind = {PeerId("x"): rate, PeerId("y"): 3.0, PeerId("z"): rate}
    for peer in rates:
        assert sum(shares(peer, rates, behind, b"seed").values()) == pytest.approx(1.0)
