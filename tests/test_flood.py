"""Those who flood, trickle, and open without end, over real sockets and both carriers: bounded, named,
dropped.

The first half is about one carrier and a client that speaks its wire by hand; the second about a real swarm
of processes that goes on training meanwhile.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import struct
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from p2p_co2.config import SLOWEST_CAP_BYTES_PER_S
from p2p_co2.errors import TransportError
from p2p_co2.rounds.assembly import piece_bytes
from p2p_co2.transport import base, grpc_carrier, libp2p_carrier
from p2p_co2.transport.door import Door
from p2p_co2.transport.grpc_carrier import METHOD, GrpcCarrier
from p2p_co2.transport.libp2p_carrier import HEADER_BYTES, PROTOCOL
from p2p_co2.transport.libp2p_control import hang_up, open_stream, reach
from tests.test_transport_grpc import hello_for
from tests.transport_peers import RUN, Peer, open_pair, open_peer, until

# ---- HTTP/2 by hand: gRPC's own client never sends half a message

DATA, HEADERS, SETTINGS = 0, 1, 4
END_HEADERS, ACK = 4, 1


def http2_frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def literal(name: str, value: str) -> bytes:
    """A header field without indexing and without Huffman coding (RFC 7541, 6.2.2)."""
    return b"\0" + bytes((len(name),)) + name.encode() + bytes((len(value),)) + value.encode()


def grpc_message(data: bytes) -> bytes:
    return b"\0" + struct.pack(">I", len(data)) + data


@asynccontextmanager
async def http2_call(b: Peer) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """An open call of our method to ``b``, over TLS, after the headers."""
    assert isinstance(b.carrier, GrpcCarrier)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    reader, writer = await asyncio.open_connection("127.0.0.1", b.carrier.port, ssl=context)
    fields = {
        ":method": "POST", ":scheme": "https", ":path": METHOD, ":authority": "localhost",
        "content-type": "application/grpc", "te": "trailers",
    }  # fmt: skip
    headers = b"".join(literal(name, value) for name, value in fields.items())
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + http2_frame(SETTINGS, 0, 0))
    writer.write(http2_frame(SETTINGS, ACK, 0) + http2_frame(HEADERS, END_HEADERS, 1, headers))
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def trickle(writer: asyncio.StreamWriter, b: Peer, wrap: bool) -> None:
    """A byte at a time, until somebody does something about it."""
    async with asyncio.timeout(10):
        while not b.refused:
            writer.write(http2_frame(DATA, 0, 1, b"x") if wrap else b"x")
            await asyncio.sleep(0.02)


async def test_grpc_drops_a_peer_that_trickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_carrier, "MESSAGE_TIMEOUT_S", 0.5)
    async with open_peer("grpc", tmp_path / "b") as b, http2_call(b) as (reader, writer):
        writer.write(http2_frame(DATA, 0, 1, grpc_message(hello_for(b)) + grpc_message(b"whole")))
        await until(lambda: len(b.received) == 1)
        writer.write(http2_frame(DATA, 0, 1, grpc_message(bytes(1000))[:10]))
        await trickle(writer, b, wrap=True)
        assert b.reasons == ["too slow"]
        assert b"too slow" in await reader.read(10_000)
        assert [data for _, data in b.received] == [b"whole"]


async def test_libp2p_drops_a_peer_that_trickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libp2p_carrier, "MESSAGE_TIMEOUT_S", 0.5)
    async with open_pair("libp2p", tmp_path) as (a, b):
        p2p = a.carrier._p2p  # type: ignore[attr-defined]
        hello = Door(a.identity, RUN, time.time).hello(b.identity.peer_id, b"")
        await reach(p2p, b.identity.peer_id, b.record.maddrs, 2)
        _, writer = await open_stream(p2p, b.identity.peer_id, PROTOCOL, 2)
        for message in (hello, b"whole"):
            writer.write(len(message).to_bytes(HEADER_BYTES) + message)
        await until(lambda: len(b.received) == 1)
        writer.write((1000).to_bytes(HEADER_BYTES))
        await trickle(writer, b, wrap=False)
        assert b.refused[0][0] == a.identity.peer_id
        assert b.reasons == ["too slow"]
        await hang_up(writer)


def is_closed(connection: socket.socket) -> bool:
    """Whether the other end has hung up."""
    try:
        return connection.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


async def test_connections_without_end_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = [option for option in grpc_carrier._SERVER_OPTIONS if "incoming_connections" not in option[0]]
    limit = ("grpc.max_allowed_incoming_connections", 16)
    assert len(options) == len(grpc_carrier._SERVER_OPTIONS) - 1
    monkeypatch.setattr(grpc_carrier, "_SERVER_OPTIONS", [*options, limit])
    async with open_peer("grpc", tmp_path / "b") as b:
        assert isinstance(b.carrier, GrpcCarrier)
        before = len(os.listdir("/proc/self/fd"))
        ours = [socket.create_connection(("127.0.0.1", b.carrier.port)) for _ in range(64)]
        try:
            for connection in ours:
                connection.setblocking(False)
            await until(lambda: sum(map(is_closed, ours)) == 64 - 16)
            assert len(os.listdir("/proc/self/fd")) - before <= 64 + 16
        finally:
            for connection in ours:
                connection.close()


async def test_streams_without_end_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libp2p_carrier, "MAX_STREAMS", 8)
    async with open_pair("libp2p", tmp_path) as (a, b):
        p2p = a.carrier._p2p  # type: ignore[attr-defined]
        await reach(p2p, b.identity.peer_id, b.record.maddrs, 2)
        inbound = b.carrier._inbound  # type: ignore[attr-defined]
        streams = []
        for _ in range(40):
            try:
                streams.append(await open_stream(p2p, b.identity.peer_id, PROTOCOL, 2))
            except TransportError:
                continue  # turned away before the two had agreed on a protocol
            assert len(inbound) <= 8
        await until(lambda: "too many links" in b.reasons)
        for _, writer in streams:
            await hang_up(writer)
        await until(lambda: not inbound)
        link = await a.carrier.connect(b.record)  # and it is open to others as before
        await link.send(b"hello")
        await until(lambda: [data for _, data in b.received] == [b"hello"])


def test_a_piece_for_the_slowest_cap_is_in_time() -> None:
    assert piece_bytes([SLOWEST_CAP_BYTES_PER_S]) / SLOWEST_CAP_BYTES_PER_S < base.MESSAGE_TIMEOUT_S / 10
