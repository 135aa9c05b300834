"""How senders are held back: by hand, what honest peers may do, what floods come to, and what is held."""

from __future__ import annotations

import pytest

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.node import gate as room
from p2p_co2.node.gate import (
    ALLOWANCE,
    PATIENCE_S,
    REFILL_PER_S,
    SHUT_OUT_CAP_S,
    SHUT_OUT_S,
    Gate,
    control_units,
    refused_units,
    useless_units,
)
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.limits import MAX_DATA_BYTES

A, B = PeerId("a"), PeerId("b")


def flood(gate: Gate, units: float, seconds: float, started_at: float = 100.0) -> tuple[int, float]:
    """A sends as fast as it is read: (messages read, when it was shut out)."""
    now, count = started_at, 0
    while now < started_at + seconds:
        try:
            gate.check(A, now)
            count += 1
            now += gate.charge(A, units, now) + 1e-4  # what reading one takes
        except RemoteProtocolError:
            return count, now
    return count, float("inf")


def test_an_allowance_is_spent_and_comes_back() -> None:
    gate = Gate(0.0)
    assert gate.charge(A, ALLOWANCE, 10.0) == 0.0
    assert gate.charge(A, REFILL_PER_S, 10.0) == 1.0
    assert gate.charge(B, 1.0, 10.0) == 0.0  # another sender's own
    assert gate.charge(A, REFILL_PER_S, 12.0) == 0.0
    assert gate.charge(A, ALLOWANCE, 1000.0) == 0.0


@pytest.mark.parametrize(
    ("units", "most"),
    [
        (control_units(300), 5000),
        (useless_units(MAX_DATA_BYTES), 1700),
        (refused_units("unknown round", MAX_DATA_BYTES), 700),
        (refused_units("wrong signature", 300), 250),
    ],
)
def test_a_flood_is_read_slowly_and_then_shut_out(units: float, most: int) -> None:
    gate = Gate(0.0)
    count, out_at = flood(gate, units, 60.0)
    assert count <= most
    assert out_at - 100.0 <= 3 * PATIENCE_S + ALLOWANCE / REFILL_PER_S
    gate.charge(B, 1.0, out_at)
    gate.check(B, out_at)
    with pytest.raises(RemoteProtocolError, match="shut out"):
        gate.check(A, out_at + SHUT_OUT_S - 1)
    gate.check(A, out_at + SHUT_OUT_S + 1)


def test_who_comes_back_to_flood_is_shut_out_for_longer() -> None:
    gate, now = Gate(0.0), 100.0
    for times in range(9):
        _, out_at = flood(gate, 50.0, 60.0, now)
        until = min(SHUT_OUT_CAP_S, SHUT_OUT_S * 2**times)
        with pytest.raises(RemoteProtocolError):
            gate.check(A, out_at + until - 1)
        gate.check(A, now := out_at + until + 1)


@pytest.mark.parametrize(
    ("per_s", "units", "seconds"),
    [
        (100, control_units(300), 3600),  # short rounds of many fragments
        (3, control_units(300 << 10), 3600),  # votes of a large group
        (5, useless_units(MAX_DATA_BYTES), 3600),  # 20 Mbit/s of payload that is always late
    ],
)
def test_an_honest_peer_is_never_held_back(per_s: int, units: float, seconds: int) -> None:
    gate = Gate(0.0)
    assert {gate.charge(A, units, n / per_s) for n in range(per_s * seconds)} == {0.0}


def test_a_peer_that_wakes_up_with_a_payload_that_nobody_wants_stays() -> None:
    gate = Gate(0.0)
    for _ in range(512):  # 256 MiB at once
        gate.charge(A, useless_units(MAX_DATA_BYTES), 50.0)
    for _ in range(60):  # and pieces for a member that was restarted
        gate.charge(A, refused_units("unknown round", MAX_DATA_BYTES), 60.0)
    gate.check(A, 61.0)


def test_the_download_cap_is_one_for_all_senders() -> None:
    gate = Gate(1000.0)
    assert [gate.read(500, 10.0) for _ in range(3)] == [0.5, 1.0, 1.5]
    assert gate.read(500, 20.0) == 0.5
    assert Gate(0.0).read(1 << 20, 5.0) == 0.0


def test_no_more_senders_than_the_bound_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "MAX_SENDERS", 8)
    gate = Gate(0.0)
    for number in range(100):
        gate.charge(PeerId(str(number)), 1.0, float(number))
        assert len(gate._senders) <= 8
