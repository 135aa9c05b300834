"""Quotas: by hand, what honest peers may do, what floods come to, and what is held."""

from __future__ import annotations

import pytest

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.node import router as room
from p2p_co2.node.router import (
    ALLOWANCE,
    ASKED_UNITS,
    DOUBLED_AT_MOST,
    OVERASKED_UNITS,
    PATIENCE_S,
    REFILL_PER_S,
    SHUT_OUT_S,
    TOO_SLOW,
    Quotas,
    control_units,
    refused_units,
    useless_units,
)
from p2p_co2.protocol.rounds.assembly import PIECE_UNIT_BYTES
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.limits import MAX_DATA_BYTES

A, B = PeerId("a"), PeerId("b")
SMALL = PIECE_UNIT_BYTES


def flood(quotas: Quotas, units: float, seconds: float, started_at: float = 100.0) -> tuple[int, float]:
    """A sends as fast as it is read: (messages read, when it was shut out)."""
    now, count = started_at, 0
    while now < started_at + seconds:
        try:
            quotas.check(A, now)
            count += 1
            now += quotas.charge(A, units, now) + 1e-4  # what reading one takes
        except RemoteProtocolError:
            return count, now
    return count, float("inf")


def test_an_allowance_is_spent_and_comes_back() -> None:
    quotas = Quotas(0.0)
    assert quotas.charge(A, ALLOWANCE, 10.0) == 0.0
    assert quotas.charge(A, REFILL_PER_S, 10.0) == 1.0
    assert quotas.charge(B, 1.0, 10.0) == 0.0  # another sender's own
    assert quotas.charge(A, REFILL_PER_S, 12.0) == 0.0
    assert quotas.charge(A, ALLOWANCE, 1000.0) == 0.0


def test_padding_is_no_accident() -> None:
    """Nobody writes more than it says by chance: hundreds of a megabyte were read from each that did."""
    assert refused_units("padded", 1 << 20, True) == refused_units("unreadable", 1 << 20, True)


@pytest.mark.parametrize(
    ("units", "most"),
    [
        (control_units(300), 5000),
        (useless_units(MAX_DATA_BYTES), 2000),
        (refused_units("unknown round", MAX_DATA_BYTES, True), 2000),
        (refused_units("unknown round", 300, False), 1000),
        (ASKED_UNITS + OVERASKED_UNITS, 1100),
        (refused_units("wrong signature", 300, False), 250),
    ],
)
def test_a_flood_is_read_slowly_and_then_shut_out(units: float, most: int) -> None:
    quotas = Quotas(0.0)
    count, out_at = flood(quotas, units, 60.0)
    assert count <= most
    assert out_at - 100.0 <= 3 * PATIENCE_S + ALLOWANCE / REFILL_PER_S
    quotas.charge(B, 1.0, out_at)
    quotas.check(B, out_at)
    with pytest.raises(RemoteProtocolError, match="shut out"):
        quotas.check(A, out_at + SHUT_OUT_S - 1)
    quotas.check(A, out_at + SHUT_OUT_S + 1)


def test_who_comes_back_to_flood_is_shut_out_for_longer() -> None:
    quotas, now = Quotas(0.0), 100.0
    for times in range(9):
        _, out_at = flood(quotas, 50.0, 60.0, now)
        until = SHUT_OUT_S * 2 ** min(times, DOUBLED_AT_MOST)
        with pytest.raises(RemoteProtocolError):
            quotas.check(A, out_at + until - 1)
        quotas.check(A, now := out_at + until + 1)


def test_who_is_shut_out_ever_again_stays_a_fault_of_its_own() -> None:
    """For twice as long each time, until that was more than a double holds."""
    quotas = Quotas(0.0)
    for times in range(1100):
        with pytest.raises(RemoteProtocolError, match="shut out"):
            quotas.charge_link(A, TOO_SLOW, 100.0 + times)
    with pytest.raises(RemoteProtocolError):
        quotas.check(A, 1200.0 + SHUT_OUT_S * 2**DOUBLED_AT_MOST - 2)


@pytest.mark.parametrize(
    ("per_s", "units", "seconds"),
    [
        (100, control_units(300), 3600),  # short rounds of many fragments
        (3, control_units(300 << 10), 3600),  # votes of a large group
        (5, useless_units(MAX_DATA_BYTES), 3600),  # 20 Mbit/s of payload that is always late
    ],
)
def test_an_honest_peer_is_never_held_back(per_s: int, units: float, seconds: int) -> None:
    quotas = Quotas(0.0)
    assert {quotas.charge(A, units, n / per_s) for n in range(per_s * seconds)} == {0.0}


@pytest.mark.parametrize(
    ("units", "size_bytes", "total_bytes"),
    [
        (useless_units(SMALL), SMALL, 100e6),  # late, cut for a slow link
        (useless_units(MAX_DATA_BYTES), MAX_DATA_BYTES, 400e6),
        (refused_units("unknown round", SMALL, True), SMALL, 100e6),  # we were restarted
        (refused_units("too much held", SMALL, True), SMALL, 100e6),  # strangers took the room
        (refused_units("wrong size", SMALL, True), SMALL, 100e6),  # a coordinator of two tongues
        (ASKED_UNITS, MAX_DATA_BYTES, 100e9),  # loads a state from the next room
    ],
)
def test_honest_bursts_at_a_gigabyte_a_second_are_not_even_held_back(
    units: float, size_bytes: int, total_bytes: float
) -> None:
    quotas, per_s = Quotas(0.0), 1e9 / size_bytes
    waits_s = {quotas.charge(A, units, 50.0 + n / per_s) for n in range(int(total_bytes / size_bytes))}
    assert waits_s == {0.0}


def test_the_download_cap_is_one_for_all_senders() -> None:
    quotas = Quotas(1000.0)
    assert [quotas.read(500, 10.0) for _ in range(3)] == [0.5, 1.0, 1.5]
    assert quotas.read(500, 20.0) == 0.5
    assert Quotas(0.0).read(1 << 20, 5.0) == 0.0


def test_no_more_senders_than_the_bound_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "MAX_SENDERS", 8)
    quotas = Quotas(0.0)
    for number in range(100):
        quotas.charge(PeerId(str(number)), 1.0, float(number))
        assert quotas.held() == {"MAX_SENDERS": (min(number + 1, 8), 8)}
