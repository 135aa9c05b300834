"""A flood of any kind of message, well formed and for rounds that do not exist: its sender is counted by
name, read ever more slowly and shut out, and nobody else waits for that."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from google.protobuf.message import Message

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.node.quotas import ALLOWANCE, LINK_UNITS, PATIENCE_S, REFILL_PER_S, SHUT_OUT_S
from p2p_co2.protocol.wire import messages_pb2 as wire
from p2p_co2.protocol.wire.envelope import head_of
from p2p_co2.telemetry.events import MessageRefused
from tests.envelopes import enveloped
from tests.fuzz.scenes import examples
from tests.fuzz.world import RUN, Trainer, World, make_identity, run_virtual

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


def attack(work: Callable[[Trainer], Awaitable[None]]) -> None:
    """A peer that knows both, and has nothing else to do."""

    async def play() -> None:
        world = World("a")
        world.start()
        await asyncio.sleep(0)
        for peer in (MALLORY, FRIEND):
            world.trainers[0].node.router.take(peer, PING)
        await work(world.trainers[0])
        await world.close()

    run_virtual(play())


@pytest.mark.parametrize("kind", KINDS)
def test_a_flood_is_counted_named_and_shut_out_and_nobody_else_waits(kind: str) -> None:
    flood = far_away(kind)

    async def work(victim: Trainer) -> None:
        node, router = victim.node, victim.node.router
        began_at, read, beat_at = node.now(), 0, node.now()
        while True:
            try:
                wait_s = router.take(MALLORY, flood)
            except RemoteProtocolError as error:
                router.on_link_refused(MALLORY, error)
                break
            read += 1
            if node.now() >= beat_at:
                assert router.take(FRIEND, PING) == 0.0
                beat_at += 1.0
            await asyncio.sleep(wait_s + 1e-4)  # what reading one takes
        assert read <= 20_000
        assert node.now() - began_at <= 3 * PATIENCE_S + 2 * ALLOWANCE / REFILL_PER_S
        assert router.refusals[MALLORY, "", "too many messages"] == 1
        assert {sender for sender, _, _ in router.refusals} == {MALLORY}
        assert any(isinstance(event, MessageRefused) for event in victim.events)
        assert MALLORY not in node.membership.live
        assert FRIEND in node.membership.live
        with pytest.raises(RemoteProtocolError, match="shut out"):
            router.take(MALLORY, PING)
        assert router.take(FRIEND, PING) == 0.0

    attack(work)


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
