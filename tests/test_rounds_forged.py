"""Forged messages: refused with their reason, bounded in what they cost, and never an exception."""

from __future__ import annotations

import pytest

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.protocol.rounds import Aborted, ReduceWanted
from p2p_co2.protocol.rounds.assembly import ReorderBuffer
from p2p_co2.protocol.rounds.attempt import seal_begin
from p2p_co2.wire import messages_pb2 as wire
from tests.certificates import signed_mean
from tests.round_machine import begun_member, drain, part_of, refusal
from tests.round_network import RUN, make_identity


def test_pieces_that_overtake_begin_are_held_up_to_a_bound() -> None:
    machine, begin, first, other = begun_member()
    machine.receive(part_of(), other, 0.2)
    machine.receive(begin, first, 0.5)
    machine.receive(part_of(), first, 0.6)
    (wanted,) = [event for event in drain(machine) if isinstance(event, ReduceWanted)]
    assert [piece.peer for piece in wanted.job.slices] == sorted(piece.peer for piece in wanted.job.slices)
    assert len(wanted.job.slices) == 3
    early = ReorderBuffer(0)
    flood = wire.Part(data=bytes(1 << 19))
    for _ in range(7):
        early.hold(flood, first)
    with pytest.raises(RemoteProtocolError, match="too much held"):
        early.hold(flood, first)
    assert sum(len(piece.data) for _, piece in early.release() if isinstance(piece, wire.Part)) <= 4 << 20


def test_forged_means() -> None:
    machine, begin, first, other = begun_member()
    machine.receive(begin, first, 0.5)
    good = wire.Contributor(peer=other, weight=2.0)

    owner = next(identity for identity in map(make_identity, range(3)) if identity.peer_id == other)

    def mean(*contributors: wire.Contributor) -> wire.Mean:
        whole = wire.Mean(
            key=begin.key, part=1, total=64, data=bytes(64), contributors=contributors,
            missed=[wire.LATE] * (3 - len(contributors)),
        )  # fmt: skip
        whole.signature = signed_mean(whole, (8, 16), owner, RUN).signature
        return whole

    assert not machine.receive(mean(good), first, 0.6)  # nobody passes on what its owner can send
    assert refusal(machine, mean(), other) == "wrong contributors"
    assert refusal(machine, mean(wire.Contributor(peer=other, weight=99.0)), other) == "wrong contributors"
    assert refusal(machine, mean(good, good), other) == "wrong contributors"
    assert refusal(machine, mean(wire.Contributor(peer="x", weight=2.0)), other) == "wrong contributors"
    whole = mean(good)
    for reasons in ([wire.LATE], [wire.LATE] * 3, [0, 1], [1, 6]):
        whole.missed[:] = reasons  # type: ignore[assignment]
        assert refusal(machine, whole, other) == "wrong reasons"
    machine.receive(mean(good), other, 1.0)


# ---- floods and noise


def test_a_coordinator_that_allows_half_an_hour_keeps_nobody_for_longer_than_lines_explain() -> None:
    """Its members wait a few times as long as they would have allowed themselves: else 80 minutes here."""
    machine, begin, first, _ = begun_member()
    begin.parts_within_s, begin.result_within_s = 299.0, 1799.0
    machine.receive(begin, first, 0.5)
    now, events = 0.5, drain(machine)
    while not any(isinstance(event, Aborted) for event in events):
        due_at = machine.get_timer()
        assert due_at is not None
        now = due_at
        machine.handle_timer(now)
        events += drain(machine)
    assert now < 360.0


def test_what_a_round_may_take_is_reckoned_for_nobody_who_was_not_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It costs twice what reading a BEGIN does, and whoever likes may send one."""
    machine, begin, _, other = begun_member()
    reckoned: list[object] = []
    monkeypatch.setattr(machine._coordination, "clamped", lambda attempt: reckoned.append(attempt) or attempt)
    seal_begin(begin, other)
    with pytest.raises(RemoteProtocolError, match="not asked"):
        machine.receive(begin, other, 0.5)
    del begin.members[:], begin.parts[:]
    begin.members.add(peer=other, weight=1.0, offer_id=bytes(8))
    begin.parts.add(owner=other, start_block=0, stop_block=16)
    begin.live = 1
    seal_begin(begin, other)
    machine.receive(begin, other, 0.5)
    assert not reckoned
