"""node.router: by hand, what honest peers may do, what floods come to, and what is held.

Of a flood of any kind of message, well formed and for rounds that do not exist, the sender is counted by
name, read ever more slowly and shut out, and nobody else waits for that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from google.protobuf.message import Message

from p2p_co2.errors import Offence, RemoteProtocolError
from p2p_co2.node import router as room
from p2p_co2.node.router import (
    ALLOWANCE,
    ASKED_UNITS,
    DOUBLED_AT_MOST,
    LINK_UNITS,
    PATIENCE_S,
    REFILL_PER_S,
    SHUT_OUT_S,
    Quotas,
    control_units,
    refused_units,
    useless_units,
)
from p2p_co2.protocol.rounds.assembly import PIECE_UNIT_BYTES
from p2p_co2.telemetry.events import MessageRefused
from p2p_co2.wire import messages_pb2 as wire
from p2p_co2.wire.envelope import head_of
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.limits import MAX_DATA_BYTES
from tests.envelopes import enveloped
from tests.fuzz.play import KINDS_BETWEEN, examples
from tests.fuzz.stages import StageWorld
from tests.fuzz.world import RUN, Trainer, World, make_identity, run_virtual

A, B = PeerId("a"), PeerId("b")
SMALL = PIECE_UNIT_BYTES


def test_an_allowance_is_spent_and_comes_back() -> None:
    quotas = Quotas(0.0)
    assert quotas.charge(A, ALLOWANCE, 10.0) == 0.0
    assert quotas.charge(A, REFILL_PER_S, 10.0) == 1.0
    assert quotas.charge(B, 1.0, 10.0) == 0.0  # another sender's own
    assert quotas.charge(A, REFILL_PER_S, 12.0) == 0.0
    assert quotas.charge(A, ALLOWANCE, 1000.0) == 0.0


def test_two_groups_clocks_give_no_allowance_twice() -> None:
    quotas = Quotas(0.0)
    assert quotas.charge(A, ALLOWANCE, 10.0) == 0.0
    assert quotas.charge(A, 0.0, 13.0) == 0.0
    for _ in range(100):
        quotas.charge(A, 6.0, 10.0)
        wait_s = quotas.charge(A, 0.0, 13.0)
    assert wait_s == 0.0
    assert quotas.charge(A, 1.0, 10.0) > 0.0


def test_padding_is_no_accident() -> None:
    assert refused_units("padded", 1 << 20, True) == refused_units("unreadable", 1 << 20, True)


def test_who_presses_on_is_shut_out_for_longer_each_time_and_nobody_else_is() -> None:
    quotas, now = Quotas(0.0), 100.0
    for times in range(9):
        began_at, is_read = now, True
        while is_read:  # as fast as it is
            try:
                now += quotas.charge(A, refused_units("wrong signature", 300, False), now) + 1e-4
                assert now - began_at <= 3 * PATIENCE_S + ALLOWANCE / REFILL_PER_S
            except RemoteProtocolError:
                is_read = False
        quotas.check(B, now)
        until = now + SHUT_OUT_S * 2 ** min(times, DOUBLED_AT_MOST)
        with pytest.raises(RemoteProtocolError, match="shut out"):
            quotas.check(A, until - 1)
        quotas.check(A, now := until + 1)


def test_who_is_shut_out_ever_again_stays_a_fault_of_its_own() -> None:
    """For twice as long each time, until that was more than a double holds."""
    quotas = Quotas(0.0)
    for times in range(1100):
        with pytest.raises(RemoteProtocolError, match="shut out"):
            quotas.charge_link(A, Offence.TOO_SLOW, 100.0 + times)
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
    monkeypatch.setattr(room, "MAX_PEERS", 8)
    quotas = Quotas(0.0)
    for number in range(100):
        quotas.charge(PeerId(str(number)), 1.0, float(number))
        assert quotas.held() == {"MAX_PEERS": (min(number + 1, 8), 8)}


# ---- any kind of message

KINDS = sorted(field.name for field in wire.Envelope.DESCRIPTOR.oneofs_by_name["body"].fields)
MALLORY, FRIEND = make_identity("mallory").peer_id, make_identity("friend").peer_id
PING = enveloped(wire.Ping(nonce=1, sent_at=1.0), head_of(RUN.digest()))
FAR = 10**6
"""A round that nobody is near."""


def far_away(kind: str) -> bytes:
    """A right message of this kind, as small as they come, of a round that does not exist."""
    message = wire.Envelope.FromString(min(examples()[kind], key=len))
    message.run = RUN.digest()
    body: Message = getattr(message, kind)
    body.SetInParent()  # type: ignore[attr-defined]
    for holder in (body, getattr(body, "key", body)):
        if "round" in holder.DESCRIPTOR.fields_by_name:
            holder.round = FAR  # type: ignore[attr-defined]
    if kind in ("part", "mean"):
        body.data, body.total, body.offset = b"x", 1, 0  # type: ignore[attr-defined]
    return message.SerializeToString()


def attack(work: Callable[[Any], Awaitable[None]], between_stages: bool = False) -> None:
    """A peer that knows both, and has nothing else to do."""

    async def play() -> None:
        world = StageWorld(0, 1, 0) if between_stages else World("a")
        victim = world.volunteers[0] if isinstance(world, StageWorld) else world.trainers[0]
        world.start()
        await asyncio.sleep(0)
        for peer in (MALLORY, FRIEND):
            victim.node.router.take(peer, PING)
        await work(victim)
        await world.close()

    run_virtual(play())


@pytest.mark.parametrize("kind", KINDS)
def test_a_flood_is_counted_named_and_shut_out_and_nobody_else_waits(kind: str) -> None:
    flood = far_away(kind)

    async def work(victim: Any) -> None:
        node, router = victim.node, victim.node.router
        began_at, read, beat_at = node.now(), 0, node.now()
        while True:
            try:
                wait_s = router.take(MALLORY, flood)
            except RemoteProtocolError as error:
                router.on_link_refused(MALLORY, error)
                break
            read += 1
            assert read <= 20_000
            if node.now() >= beat_at:
                assert router.take(FRIEND, PING) == 0.0
                beat_at += 1.0
            await asyncio.sleep(wait_s + 1e-4)  # what reading one takes
        assert node.now() - began_at <= 3 * PATIENCE_S + 2 * ALLOWANCE / REFILL_PER_S
        assert router.refusals[MALLORY, "", "too many messages"] == 1
        assert {sender for sender, _, _ in router.refusals} == {MALLORY}
        assert any(isinstance(event, MessageRefused) for event in victim.events)
        assert MALLORY not in node.membership.live
        assert FRIEND in node.membership.live
        with pytest.raises(RemoteProtocolError, match="shut out"):
            router.take(MALLORY, PING)
        assert router.take(FRIEND, PING) == 0.0

    attack(work, kind in KINDS_BETWEEN)


def test_who_opens_links_without_end_is_shut_out_and_who_is_turned_away_now_and_then_is_not() -> None:
    async def work(victim: Trainer) -> None:
        router, turned_away = victim.node.router, RemoteProtocolError("too many links", "all are taken")
        for _ in range(600):  # ten minutes of trying again where others hold all places
            await asyncio.sleep(1.0)
            router.on_link_refused(FRIEND, turned_away)
        assert router.take(FRIEND, PING) == 0.0
        dials = 0
        while not router.refusals[MALLORY, "", "shut out"]:
            await asyncio.sleep(0.01)
            dials += 1
            router.on_link_refused(MALLORY, turned_away)
        assert dials <= 2 * (ALLOWANCE + PATIENCE_S * REFILL_PER_S) / LINK_UNITS
        assert MALLORY not in victim.node.membership.live
        with pytest.raises(RemoteProtocolError, match="shut out"):
            router.take(MALLORY, PING)

    attack(work)


def test_who_trickles_is_shut_out_and_who_fell_silent_is_not() -> None:
    async def work(victim: Trainer) -> None:
        router = victim.node.router
        router.on_link_refused(FRIEND, RemoteProtocolError("silent", "not a byte in 60 s"))
        assert router.take(FRIEND, PING) == 0.0
        router.on_link_refused(MALLORY, RemoteProtocolError("too slow", "no whole message in 60 s"))
        assert router.refusals[MALLORY, "", "too slow"] == 1
        assert router.refusals[MALLORY, "", "shut out"] == 1
        with pytest.raises(RemoteProtocolError, match="shut out"):
            router.take(MALLORY, PING)
        await asyncio.sleep(SHUT_OUT_S + 1)
        router.take(MALLORY, PING)
        router.on_link_refused(MALLORY, RemoteProtocolError("too slow", "no whole message in 60 s"))
        await asyncio.sleep(SHUT_OUT_S + 1)
        with pytest.raises(RemoteProtocolError, match="shut out"):  # for longer each time
            router.take(MALLORY, PING)

    attack(work)
