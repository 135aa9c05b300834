"""Places at relays, ways of links, the addresses they tell apart. Routers in between: ``test_rehearsal``."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from p2p_co2.errors import TransportError
from p2p_co2.net.transport import libp2p_relay as room
from p2p_co2.net.transport import libp2p_ways
from p2p_co2.net.transport.addresses import is_loopback, is_near, is_own, is_public_maddr
from p2p_co2.net.transport.hivemind_quiet import P2P
from p2p_co2.net.transport.libp2p_carrier import Libp2pCarrier
from p2p_co2.net.transport.libp2p_control import (
    Stream,
    hang_up,
    hang_up_on,
    open_stream,
    reach,
    ways_to_peers,
)
from p2p_co2.net.transport.libp2p_daemon import start_p2p, stop_p2p
from p2p_co2.net.transport.libp2p_relay import ENOUGH_BYTES, Places, ask_for_place, start_relay
from p2p_co2.net.transport.libp2p_ways import ANEW_AFTER_S, LOOK_EVERY_S, Ways, way_in_words
from p2p_co2.protocol.wire.identity import Identity, PeerId
from p2p_co2.protocol.wire.messages_pb2 import CircuitHop, CircuitLimit, PeerRecord
from tests.transport_peers import PATIENCE_S, free_port

A, B = PeerId("a"), PeerId("b")
DIRECT, PUBLIC = "/ip4/203.0.113.7/tcp/4001", "/ip4/203.0.113.8/tcp/4001/p2p/b"
BY_SEED = "/ip4/203.0.113.9/tcp/31337/p2p/seed/p2p-circuit/p2p/b"


@asynccontextmanager
async def daemon(folder: Path) -> AsyncIterator[tuple[P2P, PeerId]]:
    os.makedirs(folder)
    peer = Identity.load_or_create(folder / "identity").peer_id
    p2p = await start_p2p(folder / "identity")
    try:
        yield p2p, peer
    finally:
        await stop_p2p(p2p)


@asynccontextmanager
async def seed(folder: Path, relay: bool) -> AsyncIterator[tuple[PeerId, str]]:
    """(its id, its multiaddr)"""
    os.makedirs(folder)
    peer, port = Identity.load_or_create(folder / "identity").peer_id, free_port()
    p2p = await start_relay(
        folder / "identity", "127.0.0.1", port, announce_host="127.0.0.1", public=True, relay=relay
    )
    try:
        yield peer, f"/ip4/127.0.0.1/tcp/{port}/p2p/{peer}"
    finally:
        await stop_p2p(p2p)


# ---- places


async def test_two_that_nobody_dials_meet_at_a_seed(tmp_path: Path) -> None:
    """And the relay is the one without libp2p's limit of 128 KiB per circuit."""
    async with (
        asyncio.timeout(2 * PATIENCE_S),
        seed(tmp_path / "seed", relay=True) as (relay, maddr),
        daemon(tmp_path / "a") as (a, _),
        daemon(tmp_path / "b") as (b, b_id),
    ):
        places = Places(b, b_id, [maddr])
        await places.renew()
        (place,) = places.held
        assert places.trouble == ""
        assert (place.relay, place.maddr) == (relay, f"{maddr}/p2p-circuit/p2p/{b_id}")
        assert place.circuit_bytes >= ENOUGH_BYTES

        async def echo(_: object, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(await reader.readexactly(1 << 20))
            await writer.drain()
            await reader.read()  # until the other end hangs up
            await hang_up(writer)

        await b.add_binary_stream_handler("/echo", echo)
        await reach(a, b_id, [place.maddr], PATIENCE_S)
        reader, writer = await open_stream(a, b_id, "/echo", PATIENCE_S)
        writer.write(bytes(range(256)) * 4096)
        assert await reader.readexactly(1 << 20) == bytes(range(256)) * 4096
        await hang_up(writer)


async def test_a_seed_may_decline_to_relay(tmp_path: Path) -> None:
    async with (
        asyncio.timeout(2 * PATIENCE_S),
        seed(tmp_path / "seed", relay=False) as (_, maddr),
        daemon(tmp_path / "a") as (a, a_id),
    ):
        seeds = [maddr, f"/ip4/127.0.0.1/tcp/9/p2p/{Identity.generate().peer_id}"]
        places = Places(a, a_id, seeds)
        await places.renew()
        assert places.held == ()
        relay, dead = (f"{address.rpartition('/p2p/')[0]}: " for address in seeds)
        assert relay in places.trouble
        assert dead in places.trouble


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (CircuitHop(type=2, status=200), "does not relay for us .status 200"),
        (CircuitHop(type=1, status=100), "does not relay for us"),
        (b"\x05\xff\xff\xff\xff\xff", "nonsense"),
        (b"\xff\xff\x7f", "too large"),
        (b"\x7f", "hung up"),
    ],
)
async def test_a_relay_is_not_believed(
    monkeypatch: pytest.MonkeyPatch, answer: CircuitHop | bytes, problem: str
) -> None:
    raw = answer
    if isinstance(answer, CircuitHop):
        raw = bytes((len(answer.SerializeToString()),)) + answer.SerializeToString()
    ours, liar = socket.socketpair()

    async def stream(*_: object) -> Stream:
        return await asyncio.open_connection(sock=ours)

    async def reached(*_: object) -> None:
        return None

    monkeypatch.setattr(room, "reach", reached)
    monkeypatch.setattr(room, "open_stream", stream)
    with liar:
        liar.sendall(raw)
        liar.shutdown(socket.SHUT_WR)
        with pytest.raises(TransportError, match=problem):
            await ask_for_place(None, B, "/ip4/203.0.113.9/tcp/31337/p2p/b", A)  # type: ignore[arg-type]
        assert liar.recv(100) == b"\x02\x08\x00"


async def test_a_relay_that_cuts_off_at_once_is_no_help(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(*_: object) -> room.Place:
        limit = CircuitHop(limit=CircuitLimit(data_bytes=128 << 10)).limit.data_bytes
        return room.Place(B, BY_SEED, limit)

    monkeypatch.setattr(room, "ask_for_place", ask)
    places = Places(None, A, ["/ip4/203.0.113.9/tcp/31337/p2p/seed"])  # type: ignore[arg-type]
    await places.renew()
    assert places.held == ()
    assert places.trouble == "/ip4/203.0.113.9/tcp/31337: passes on only 128 KiB at a time"


# ---- ways


@dataclass
class Link:
    peer: PeerId = B
    is_relayed: bool = True
    maddrs: tuple[str, ...] = (BY_SEED, PUBLIC)
    closed: list[str] = field(default_factory=list)

    async def close(self, why: str = "") -> None:
        self.closed.append(why)


def test_ways_in_words() -> None:
    assert way_in_words(DIRECT, was_relayed=False) == "direct"
    assert way_in_words(DIRECT, was_relayed=True) == "direct, through a punched hole"
    assert way_in_words(BY_SEED, was_relayed=True) == "relayed by 203.0.113.9"


async def improve(
    monkeypatch: pytest.MonkeyPatch,
    link: Link,
    ways: list[str],
    me: PeerId = A,
    own: str = PUBLIC,
    newest: tuple[str, ...] = (),
) -> list[str]:
    """What one look after the links does, once the link has been relayed for long enough."""
    done: list[str] = []

    async def known(*_: object) -> dict[str, list[str]]:
        return {str(B): ways}

    async def addresses(*_: object) -> list[str]:
        return [own]

    async def hang_up_on(*_: object) -> None:
        done.append("hang up")

    async def again(p2p: object, peer: PeerId, maddrs: tuple[str, ...], timeout_s: float) -> None:
        done.append("reach")
        assert maddrs == (newest or link.maddrs)

    for name, stand_in in (
        ("ways_to_peers", known), ("own_maddrs", addresses), ("hang_up_on", hang_up_on), ("reach", again),
    ):  # fmt: skip
        monkeypatch.setattr(libp2p_ways, name, stand_in)
    looking = Ways(None, me, lambda: (link,), lambda peer: newest)  # type: ignore[arg-type]
    looking.opened(link)
    looking._relayed_since[B] -= ANEW_AFTER_S[0] + 1
    await looking._improve([link])
    before = list(done)
    await looking._improve([link])
    assert done == before, "not twice in a row"
    return done


async def test_a_relayed_link_moves_to_a_direct_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    link = Link()
    assert await improve(monkeypatch, link, [BY_SEED, DIRECT]) == []
    assert link.closed[0] == "moving to a direct connection"


async def test_holes_are_tried_by_one_end_where_both_have_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await improve(monkeypatch, Link(), [BY_SEED]) == ["hang up", "reach"]
    assert await improve(monkeypatch, Link(), [BY_SEED], me=PeerId("c")) == []
    assert await improve(monkeypatch, Link(maddrs=(BY_SEED,)), [BY_SEED]) == []
    assert await improve(monkeypatch, Link(), [BY_SEED], own="/ip4/192.168.1.2/tcp/4001") == []
    known, later = Link(maddrs=(BY_SEED,)), (BY_SEED, PUBLIC)  # it had no address when the link was opened
    assert await improve(monkeypatch, known, [BY_SEED], newest=later) == [
        "hang up",
        "reach",
    ]


async def test_the_end_that_does_not_make_it_anew_dials_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its packets find a router that has heard of an attempt that is over."""
    dialled: list[tuple[PeerId, object]] = []

    async def dial(p2p: object, peer: PeerId, maddrs: object, timeout_s: float) -> None:
        dialled.append((peer, maddrs))
        raise TransportError("nobody is there any more")

    monkeypatch.setattr(libp2p_ways, "reach", dial)
    for me, relayed, wanted in (("c", True, [(B, (DIRECT,))]), ("c", False, []), ("a", True, [])):
        dialled.clear()
        ways = Ways(None, PeerId(me), tuple, lambda peer: [DIRECT])  # type: ignore[arg-type]
        ways.start()
        ways.ended(Link(is_relayed=relayed))
        await asyncio.sleep(0)
        assert dialled == wanted
        await ways.stop()
        ways.ended(Link())
        await asyncio.sleep(0)
        assert dialled == wanted, "nobody dials after the end"


async def test_who_hangs_up_again_and_again_is_dialled_once_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dialled, go_on = list[str](), asyncio.Event()

    async def dial(p2p: object, peer: PeerId, maddrs: object, timeout_s: float) -> None:
        dialled.append(peer)
        await go_on.wait()

    monkeypatch.setattr(libp2p_ways, "reach", dial)
    ways = Ways(None, PeerId("c"), tuple)  # type: ignore[arg-type]
    ways.start()
    for _ in range(10):
        ways.ended(Link())
        ways.ended(Link(A))
        await asyncio.sleep(0)
    assert dialled == [B, A]
    go_on.set()
    await asyncio.gather(*ways._dialling.values())
    await asyncio.sleep(0)
    ways.ended(Link())
    await asyncio.sleep(0)
    assert dialled == [B, A, B]
    await ways.stop()


async def test_a_link_that_ends_while_the_ways_stop_leaves_no_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopping waits for tasks to end; links end meanwhile, and what they start nobody would cancel."""

    async def dial(p2p: object, peer: PeerId, maddrs: object, timeout_s: float) -> None:
        try:
            await asyncio.sleep(timeout_s)
        finally:
            ways.ended(Link(A))

    monkeypatch.setattr(libp2p_ways, "reach", dial)
    ways = Ways(None, PeerId("c"), tuple)  # type: ignore[arg-type]
    before = asyncio.all_tasks()
    ways.start()
    ways.ended(Link())
    await asyncio.sleep(0)
    await ways.stop()
    assert asyncio.all_tasks() == before


async def test_a_relayed_link_that_the_other_end_hangs_up_is_dialled_again(tmp_path: Path) -> None:
    """By the carrier, though nobody has anything to send; one that we close is not."""
    async with (
        asyncio.timeout(2 * PATIENCE_S),
        seed(tmp_path / "seed", relay=True) as (_, maddr),
        daemon(tmp_path / "a") as a,
        daemon(tmp_path / "b") as b,
    ):
        (first, first_id), (last, last_id) = sorted((a, b), key=lambda pair: pair[1])
        places = Places(first, first_id, [maddr])
        await places.renew()
        carriers, asked = [], list[PeerId]()

        def newest(peer: PeerId) -> list[str]:
            asked.append(peer)
            return []

        owned = [Identity.load_or_create(tmp_path / name / "identity") for name in "ab"]
        for p2p, identity in zip((first, last), sorted(owned, key=lambda one: one.peer_id), strict=True):
            carriers.append(Libp2pCarrier(p2p, identity, bytes(32), newest=newest))
            await carriers[-1].start(nothing, lambda peer, error: None)
        record = PeerRecord(peer=first_id, run=bytes(32), maddrs=[places.held[0].maddr])
        link = await carriers[1].connect(record)
        link.is_relayed = True  # as it would be if they were not on one machine
        await hang_up_on(first, last_id, PATIENCE_S)
        await link.wait_closed()
        while first_id not in await ways_to_peers(last, PATIENCE_S):  # noqa: ASYNC110 (the daemon tells nobody)
            await asyncio.sleep(0.05)
        assert asked == [first_id], "it may have another address by now"
        for carrier in carriers:
            await carrier.close()


async def nothing(sender: PeerId, data: bytes) -> None:
    return None


def test_a_try_to_punch_comes_when_routers_have_forgotten_the_last() -> None:
    """Linux keeps half of a handshake for two minutes."""
    assert min(ANEW_AFTER_S[1:]) - LOOK_EVERY_S > 120.0


# ---- addresses


def test_addresses() -> None:
    for near in ("127.0.0.1", "10.1.2.3", "172.31.0.1", "192.168.1.2", "100.64.0.1", "::1", "fd00::1"):
        assert is_near(near), near
    for far in ("203.0.113.5", "192.0.0.67", "172.32.0.1", "2001:db8::1", "peer.example.org"):
        assert not is_near(far), far
    assert is_public_maddr(DIRECT)
    assert not any(map(is_public_maddr, (BY_SEED, "/ip4/192.168.1.2/tcp/1", "/dns/x/tcp/1", "", "/ip4")))
    assert is_own("127.0.0.1")
    assert not is_own("203.0.113.5")
    assert is_loopback("127.0.0.1")
    assert not is_loopback("203.0.113.5")
