"""Diallers that speak the wire by hand: wrong hellos, trickles and streams without end are bounded, named and
dropped, over real sockets and both carriers."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import struct
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from p2p_co2.config import SLOWEST_CAP_BYTES_PER_S
from p2p_co2.errors import TransportError
from p2p_co2.net.transport import base, grpc_carrier
from p2p_co2.net.transport.admission import Admission
from p2p_co2.net.transport.grpc_carrier import METHOD, GrpcCarrier
from p2p_co2.net.transport.libp2p import carrier as libp2p_carrier
from p2p_co2.net.transport.libp2p.carrier import PROTOCOL, Libp2pCarrier
from p2p_co2.net.transport.libp2p.control import hang_up, open_stream, reach
from p2p_co2.net.transport.libp2p.streams import framed
from p2p_co2.protocol.rounds.assembly import piece_bytes
from p2p_co2.wire.identity import Identity, PeerId
from p2p_co2.wire.limits import HELLO_WINDOW_S, MAX_MESSAGE_BYTES
from tests.transport_peers import BOTH, PATIENCE_S, RUN, Peer, open_pair, open_peer, until

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


@dataclass
class Dialler:
    """Speaks a carrier's wire by hand."""

    kind: str
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def write(self, data: bytes) -> None:
        """Bytes of messages, be they whole or not."""
        self.writer.write(http2_frame(DATA, 0, 1, data) if self.kind == "grpc" else data)

    def framed(self, message: bytes) -> bytes:
        return grpc_message(message) if self.kind == "grpc" else framed(message)

    async def hear(self, words: str) -> None:
        """Until the other end says them, after frames of other kinds."""
        said = b""
        while words.encode() not in said:
            more = await self.reader.read(10_000)
            assert more, said
            said += more


@asynccontextmanager
async def dial(kind: str, a: Peer, b: Peer) -> AsyncIterator[Dialler]:
    """A stream, or an open call of our method, to ``b``; nothing is said yet."""
    if kind == "libp2p":
        assert isinstance(a.carrier, Libp2pCarrier)
        await reach(a.carrier.p2p, b.identity.peer_id, b.record.maddrs, PATIENCE_S)
        stream = await open_stream(a.carrier.p2p, b.identity.peer_id, PROTOCOL, PATIENCE_S)
        yield Dialler(kind, stream.reader, stream.writer)
        await hang_up(stream.writer)
        return
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
    yield Dialler(kind, reader, writer)
    writer.transport.abort()


def hello(
    a: Peer, b: Peer, *, signer: Identity | None = None, to: PeerId | None = None,
    digest: bytes | None = None, late_s: float = 0.0,
) -> bytes:  # fmt: skip
    admission = Admission(signer or a.identity, RUN, lambda: time.time() - late_s)
    seen = b.record.certificate_digest if digest is None else digest
    return admission.hello(to or b.identity.peer_id, seen)


@BOTH
async def test_hostile_hellos_and_sizes_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    async with open_pair(kind, tmp_path) as (a, b):
        good, forged = hello(a, b), bytearray(hello(a, b))
        forged[-1] ^= 1
        too_long = MAX_MESSAGE_BYTES + 1
        cases = [
            ([good, bytes(too_long)], "wrong message size"),
            ([good], "replayed hello"),
            ([bytes(forged)], "wrong signature"),
            ([hello(a, b, to=Identity.generate().peer_id)], "wrong addressee"),
            ([hello(a, b, digest=b"another")], "other certificate"),
            ([hello(a, b, late_s=1.1 * HELLO_WINDOW_S)], "stale hello"),
            ([b"GET / HTTP/1.1"], "unreadable"),
            ([bytes(2000)], "wrong hello"),
            ([hello(a, b), b""], "wrong message size") if kind == "grpc" else ([b""], "wrong hello"),
        ]
        if kind == "libp2p":  # which proves who dials
            cases.append(([hello(a, b, signer=Identity.generate())], "wrong hello"))
        for messages, reason in cases:
            async with dial(kind, a, b) as dialler:
                dialler.write(b"".join(map(dialler.framed, messages)))
                await dialler.hear(reason)
            assert b.reasons[-1] == reason
        proved = a.identity.peer_id
        assert {sender for sender, _ in b.refused} <= ({proved} if kind == "libp2p" else {proved, None})
        assert not b.received
        await until(lambda: not b.carrier.admission.links)


@BOTH
async def test_a_peer_that_trickles_is_dropped(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "MESSAGE_TIMEOUT_S", 1.5)
    async with open_pair(kind, tmp_path) as (a, b), dial(kind, a, b) as dialler:
        dialler.write(dialler.framed(hello(a, b)) + dialler.framed(b"whole"))
        await until(lambda: len(b.received) == 1)
        dialler.write(dialler.framed(bytes(1000))[:10])
        async with asyncio.timeout(PATIENCE_S):
            while not b.refused:
                dialler.write(b"x")
                await asyncio.sleep(0.02)
        assert [(sender, error.reason) for sender, error in b.refused] == [(a.identity.peer_id, "too slow")]
        await dialler.hear("too slow")
        assert [data for _, data in b.received] == [b"whole"]


def is_closed(connection: socket.socket) -> bool:
    """Whether the other end has hung up."""
    try:
        return connection.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


async def test_connections_without_end_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = [option for option in grpc_carrier.SERVER_OPTIONS if "incoming_connections" not in option[0]]
    limit = ("grpc.max_allowed_incoming_connections", 16)
    assert len(options) == len(grpc_carrier.SERVER_OPTIONS) - 1
    monkeypatch.setattr(grpc_carrier, "SERVER_OPTIONS", [*options, limit])
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
    monkeypatch.setattr(libp2p_carrier, "MAX_INBOUND_LINKS", 5)
    monkeypatch.setattr(libp2p_carrier, "MAX_STRANGERS", 3)
    async with open_pair("libp2p", tmp_path) as (a, b):
        assert isinstance(a.carrier, Libp2pCarrier)
        assert isinstance(b.carrier, Libp2pCarrier)
        p2p = a.carrier.p2p
        await reach(p2p, b.identity.peer_id, b.record.maddrs, PATIENCE_S)
        inbound = b.carrier.inbound
        streams = []
        for _ in range(40):
            try:
                streams.append(await open_stream(p2p, b.identity.peer_id, PROTOCOL, PATIENCE_S))
            except TransportError:
                continue  # turned away before the two had agreed on a protocol
            assert len(inbound) <= 8
        for stream in streams:
            await hang_up(stream.writer)
        await until(lambda: not len(inbound))
        link = await a.carrier.connect(b.record)  # and it is open to others as before
        await link.send(b"hello")
        await until(lambda: [data for _, data in b.received] == [b"hello"])


def test_a_piece_for_the_slowest_cap_is_in_time() -> None:
    assert piece_bytes([SLOWEST_CAP_BYTES_PER_S]) / SLOWEST_CAP_BYTES_PER_S < base.MESSAGE_TIMEOUT_S / 10
