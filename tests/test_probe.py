"""The prober: what it may be asked by hand, then over the real daemon and sockets of this machine."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from p2p_co2.errors import RemoteProtocolError, TransportError
from p2p_co2.net.transport.base import MESSAGE_TIMEOUT_S
from p2p_co2.net.transport.libp2p.control import hang_up, open_stream, reach
from p2p_co2.net.transport.libp2p.hivemind import P2P
from p2p_co2.net.transport.probe import (
    DIAL_BYTES,
    GREETING,
    MAX_BULK_BYTES,
    MAX_FRAME_BYTES,
    MOST_BYTES,
    MOST_BYTES_IN_ALL,
    PROTOCOL,
    Allowances,
    Prober,
    ProbeServer,
    check_dial_back,
    open_prober,
)
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.messages_pb2 import Probe, ProbeAnswer
from tests.transport_peers import PATIENCE_S, open_daemon

RUN = hashlib.sha256(b"a run").digest()


SEEN = "/ip4/203.0.113.7/tcp/40000"


def test_a_connection_back_goes_where_the_asker_is_seen_and_nowhere_else() -> None:
    assert check_dial_back(31337, b"x" * 32, SEEN) == "203.0.113.7"
    for port, expect, observed in (
        (0, b"x", SEEN),
        (65536, b"x", SEEN),
        (1, b"", SEEN),
        (1, b"x" * 33, SEEN),
        (1, b"x", "/ip4/203.0.113.7/tcp/4001/p2p/QmRelay/p2p-circuit"),
    ):
        with pytest.raises(RemoteProtocolError):
            check_dial_back(port, expect, observed)


def test_what_a_network_and_all_together_may_use_in_a_minute() -> None:
    allowances, minute_s = Allowances(), MESSAGE_TIMEOUT_S
    allowances.take("203.0.113.7", MOST_BYTES, 1.0)
    with pytest.raises(RemoteProtocolError, match="too often"):
        allowances.take("203.0.113.7", 1, minute_s)
    allowances.take("203.0.113.8", DIAL_BYTES, minute_s)  # another network is another asker
    later = 1.0 + minute_s
    for number in range(MOST_BYTES_IN_ALL // MOST_BYTES - 1):
        allowances.take(f"198.51.100.{number}", MOST_BYTES, later)
    with pytest.raises(RemoteProtocolError, match="too often"):
        allowances.take("192.0.2.1", MOST_BYTES, later)


@dataclass
class World:
    asker_p2p: P2P
    server_id: PeerId
    maddrs: list[str]

    def prober(self, run: bytes = RUN) -> AbstractAsyncContextManager[Prober]:
        return open_prober(self.asker_p2p, self.server_id, self.maddrs, run, PATIENCE_S)


@asynccontextmanager
async def world(folder: Path, *, cap: float = 0.0, ahead_s: float = 0.0) -> AsyncIterator[World]:
    async with (
        open_daemon(folder / "server") as (server_p2p, identity),
        open_daemon(folder / "asker") as (asker_p2p, _),
    ):
        server = ProbeServer(server_p2p, RUN, cap, lambda: time.time() + ahead_s)
        await server.start()
        maddrs = [str(maddr) for maddr in await server_p2p.get_visible_maddrs()]
        yield World(asker_p2p, identity.peer_id, maddrs)
        await server.close()


@asynccontextmanager
async def greeter(words: bytes) -> AsyncIterator[int]:
    """A listener of this machine that says ``words`` to whoever connects; its port."""

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(words)
        await writer.drain()
        writer.close()

    listener = await asyncio.start_server(greet, "127.0.0.1", 0)
    async with listener:
        yield listener.sockets[0].getsockname()[1]


async def test_how_we_look_and_what_the_clock_is_there(tmp_path: Path) -> None:
    async with world(tmp_path, ahead_s=40.0) as it, it.prober() as prober:
        looks = [await prober.look() for _ in range(4)][1:]
        assert {look.observed[0] for look in looks} == {"127.0.0.1"}
        for look in looks:  # the answer was made between the question and its arrival here
            assert look.round_trip_s > 0
            assert look.offset_s == pytest.approx(40.0, abs=look.round_trip_s / 2 + 0.1)


async def test_a_connection_back_proves_who_answers_there(tmp_path: Path) -> None:
    async with world(tmp_path) as it, it.prober() as prober:
        async with greeter(b"it is I") as port:
            assert await prober.dial_back(port, b"it is I")
            assert not await prober.dial_back(port, b"it is U")
        assert not await prober.dial_back(port, b"it is I")  # nobody listens any more
        daemon = int((await it.asker_p2p.get_visible_maddrs())[0].value_for_protocol("tcp"))
        assert await prober.dial_back(daemon, GREETING)
        with pytest.raises(TransportError, match="out of bounds"):
            await prober.dial_back(port, b"x" * 33)


async def test_rates_are_measured_both_ways_and_keep_to_a_cap_that_all_share(tmp_path: Path) -> None:
    async with world(tmp_path, cap=1e6) as it, it.prober() as prober, it.prober() as other:
        # the best counts: a machine under load may stand still meanwhile
        assert max([(await prober.upload(MAX_BULK_BYTES)).bytes_per_s for _ in range(3)]) > 2e6
        began_at = time.monotonic()
        half = MAX_BULK_BYTES // 2
        await asyncio.gather(prober.download(half), other.download(half))
        assert time.monotonic() - began_at > 1.0
        assert 0 < (await prober.download(MAX_BULK_BYTES)).bytes_per_s < 1.1e6


async def test_what_a_cap_lets_through_too_late_is_refused(tmp_path: Path) -> None:
    async with world(tmp_path, cap=MAX_BULK_BYTES / 20) as it, it.prober() as prober:
        assert "its upload is taken" in await trouble_of(prober)


async def test_what_is_refused_says_why_and_the_stream_goes_on(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        async with it.prober(bytes(32)) as prober:
            with pytest.raises(TransportError, match="another run"):
                await prober.look()
        async with it.prober() as prober:
            with pytest.raises(TransportError, match="at most 1048576"):
                await prober.download(MAX_BULK_BYTES + 1)
            with pytest.raises(TransportError, match="does not know the question"):
                await prober.ask(Probe())
            troubles = [await trouble_of(prober) for _ in range(2 * MOST_BYTES // MAX_BULK_BYTES)]
            assert "refused: asked too often; try again in a minute" in troubles
            assert (await prober.look()).observed


async def trouble_of(prober: Prober) -> str:
    try:
        await prober.download(MAX_BULK_BYTES)
    except TransportError as error:
        return str(error)
    return ""


async def said(it: World, data: bytes) -> bytes:
    """What the server answers to raw bytes until it hangs up; empty if it says nothing."""
    await reach(it.asker_p2p, it.server_id, it.maddrs, PATIENCE_S)
    reader, writer, _ = await open_stream(it.asker_p2p, it.server_id, PROTOCOL, PATIENCE_S)
    try:
        writer.write(data)
        await writer.drain()
        async with asyncio.timeout(PATIENCE_S):
            return await reader.read()
    finally:
        await hang_up(writer)


async def test_nonsense_ends_the_stream_and_nothing_else(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        assert await said(it, (1 << 31).to_bytes(4)) == b""
        assert await said(it, (3).to_bytes(4) + b"\xff\xff\xff") == b""
        assert await said(it, (MAX_FRAME_BYTES + MAX_BULK_BYTES + 1).to_bytes(4) + bytes(513)) == b""
        async with it.prober() as prober:
            await prober.look()


@dataclass
class Liar:
    """A client to whom every question is answered alike."""

    said: bytes

    async def ask(self, *question: object) -> bytes:
        if not self.said:
            raise RemoteProtocolError("wrong message size", "far too many")
        return self.said


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (ProbeAnswer(clock=float("nan")).SerializeToString(), "its clock is no number"),
        (b"\xff\xff\xff", "not a ProbeAnswer"),
        (b"", "answers nonsense"),
        (ProbeAnswer(refusal="\x1b[2Jno").SerializeToString(), r"refused: \?\[2Jno"),
    ],
)
async def test_a_prober_that_answers_nonsense_is_one_failed_question(said: bytes, words: str) -> None:
    with pytest.raises(TransportError, match=words):
        await Prober(Liar(said), PeerId("b"), (), RUN).look()  # type: ignore[arg-type]
