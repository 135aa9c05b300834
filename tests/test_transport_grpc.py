"""What gRPC has of its own: a hostile client that speaks it by hand, TLS, ports."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest

from p2p_co2.errors import EnvironmentFault, PeerLost, RemoteProtocolError, TransportError
from p2p_co2.net.transport import send_buffer
from p2p_co2.net.transport.admission import Admission
from p2p_co2.net.transport.base import Link, Seen
from p2p_co2.net.transport.grpc_carrier import METHOD, GrpcCarrier, GrpcLink, how_it_ended
from p2p_co2.net.transport.send_buffer import MOST_UNSENT_BYTES, UNSENT_BYTES, SendBuffer
from p2p_co2.net.transport.tls import TARGET_NAME, fetch_certificate, make_certificate
from p2p_co2.node.links import BESIDE_BYTES, LinkObserver, Links
from p2p_co2.protocol.wire.identity import Identity, PeerId
from p2p_co2.protocol.wire.limits import HELLO_WINDOW_S, MAX_MESSAGE_BYTES
from p2p_co2.protocol.wire.messages_pb2 import PeerRecord
from tests.transport_peers import PATIENCE_S, RUN, Peer, open_pair, open_peer, until


@asynccontextmanager
async def raw_grpc(b: Peer) -> AsyncIterator[grpc.aio.StreamUnaryCall]:
    """A call to ``b`` that sends what it likes."""
    carrier = b.carrier
    assert isinstance(carrier, GrpcCarrier)
    pem = await fetch_certificate("127.0.0.1", carrier.port, carrier.certificate_digest, PATIENCE_S)
    options = [("grpc.ssl_target_name_override", TARGET_NAME)]
    credentials = grpc.ssl_channel_credentials(root_certificates=pem)
    async with grpc.aio.secure_channel(f"127.0.0.1:{carrier.port}", credentials, options=options) as channel:
        call = channel.stream_unary(METHOD)()
        yield call
        call.cancel()


def hello_for(
    b: Peer, *, to: PeerId | None = None, digest: bytes | None = None, at: float | None = None
) -> bytes:
    admission = Admission(Identity.generate(), RUN, lambda: time.time() if at is None else at)
    return admission.hello(
        to or b.identity.peer_id, b.record.certificate_digest if digest is None else digest
    )


async def test_who_is_cut_off_while_it_writes_is_told_why(tmp_path: Path) -> None:
    async with open_pair("grpc", tmp_path) as (a, b):

        async def refuse(sender: PeerId, data: bytes) -> None:
            raise RemoteProtocolError("nonsense", "said by us")

        async def pour(link: Link) -> None:
            while True:
                await link.send(bytes(500))

        b.carrier._on_message = refuse  # type: ignore[attr-defined]
        for _ in range(20):  # gRPC itself loses the reason in one of ten
            with pytest.raises(PeerLost, match="said by us"):
                await pour(await a.carrier.connect(b.record))


async def test_grpc_refuses_hostile_hellos(tmp_path: Path) -> None:
    async with open_peer("grpc", tmp_path / "b") as b:
        forged = bytearray(hello_for(b))
        forged[-1] ^= 1
        for hello, reason in (
            (bytes(forged), "wrong signature"),
            (hello_for(b, to=Identity.generate().peer_id), "wrong addressee"),
            (hello_for(b, digest=bytes(32)), "other certificate"),
            (hello_for(b, at=time.time() - 1.1 * HELLO_WINDOW_S), "stale hello"),
            (b"GET / HTTP/1.1", "unreadable"),
            (bytes(2000), "wrong hello"),
        ):
            async with raw_grpc(b) as call:
                await call.write(hello)
                assert await call.code() is grpc.StatusCode.PERMISSION_DENIED
                assert (await call.details()).startswith(reason)
            assert b.reasons[-1] == reason
        assert all(sender is None for sender, _ in b.refused)
        assert not b.received


async def test_grpc_refuses_a_replayed_hello(tmp_path: Path) -> None:
    async with open_peer("grpc", tmp_path / "b") as b:
        hello = hello_for(b)
        async with raw_grpc(b) as call:
            await call.write(hello)
            await call.initial_metadata()
            async with raw_grpc(b) as again:
                await again.write(hello)
                assert await again.code() is grpc.StatusCode.PERMISSION_DENIED
        assert b.reasons == ["replayed hello"]


@pytest.mark.parametrize("size", [0, MAX_MESSAGE_BYTES + 1])
async def test_grpc_refuses_a_message_of_wrong_size(size: int, tmp_path: Path) -> None:
    async with open_peer("grpc", tmp_path / "b") as b, raw_grpc(b) as call:
        await call.write(hello_for(b))
        await call.write(bytes(size))
        assert await call.code() is grpc.StatusCode.PERMISSION_DENIED
        ((sender, error),) = b.refused
        assert sender is not None
        assert error.reason == "wrong message size"
        assert not b.received


async def test_grpc_drops_a_huge_message_unread(tmp_path: Path) -> None:
    async with open_peer("grpc", tmp_path / "b") as b, raw_grpc(b) as call:
        await call.write(hello_for(b))
        await call.write(bytes(3 * MAX_MESSAGE_BYTES))
        assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert not b.received


async def test_grpc_talks_only_to_the_certificate_in_the_record(tmp_path: Path) -> None:
    async with open_pair("grpc", tmp_path) as (a, b):
        b.record.certificate_digest = bytes(32)
        with pytest.raises(TransportError, match="another certificate"):
            await a.carrier.connect(b.record)


async def test_grpc_port_in_use(tmp_path: Path) -> None:
    async with open_peer("grpc", tmp_path / "a") as a:
        assert isinstance(a.carrier, GrpcCarrier)
        second = GrpcCarrier(Identity.generate(), RUN, "127.0.0.1", a.carrier.port)
        with pytest.raises(EnvironmentFault, match="grpc_port"):
            await second.start(a.on_message, a.on_refused)


async def test_no_tls_there() -> None:
    async def talk(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.example.org ready\r\n")
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(TransportError, match="TLS"):
            await fetch_certificate("127.0.0.1", port, bytes(32), PATIENCE_S)


def test_the_private_key_is_not_shown() -> None:
    certificate = make_certificate(time.time())
    assert "PRIVATE" not in f"{certificate!r} {certificate}"


async def test_a_link_leaves_little_unsent_in_the_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_pair("grpc", tmp_path) as (a, b):
        assert isinstance(b.carrier, GrpcCarrier)
        for near_s, is_bounded in ((60.0, False), (0.0, True)):
            monkeypatch.setattr(send_buffer, "NEAR_S", near_s)
            link = await a.carrier.connect(b.record)
            bounds = [unsent_bound(int(name), b.carrier.port) for name in os.listdir("/proc/self/fd")]
            assert (UNSENT_BYTES in bounds, link.is_far) == (is_bounded, is_bounded)
            await link.close()
    assert send_buffer.keep_little_unsent("127.0.0.1", 9) == 0  # nobody is connected there


async def test_a_slow_connection_holds_little_beside_a_fast_one_to_the_same_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(send_buffer, "NEAR_S", 0.0)
    async with open_pair("grpc", tmp_path) as (a, b):
        assert isinstance(b.carrier, GrpcCarrier)
        first, second = await a.carrier.connect(b.record), await a.carrier.connect(b.record)
        assert isinstance(first, GrpcLink)
        assert isinstance(second, GrpcLink)
        assert first.send_buffer is not None
        assert second.send_buffer is not None
        carry(second.send_buffer, 10.0, 1e9)
        assert bounds_of(second.send_buffer, b.carrier.port) == {MOST_UNSENT_BYTES}
        assert bounds_of(first.send_buffer, b.carrier.port) == {UNSENT_BYTES}
        third = await a.carrier.connect(b.record)  # which bounds what is not bounded yet
        assert bounds_of(second.send_buffer, b.carrier.port) == {MOST_UNSENT_BYTES}
        carry(second.send_buffer, 20.0, 0.1e6)
        assert bounds_of(second.send_buffer, b.carrier.port) == {UNSENT_BYTES}
        for link in (first, second, third):
            await link.close()


async def test_a_connection_that_is_handed_a_message_counts_it_as_on_its_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(send_buffer, "NEAR_S", 0.0)
    monkeypatch.setattr(send_buffer, "_there_in_s", lambda info, more_bytes: float(more_bytes))
    async with open_pair("grpc", tmp_path) as (a, b):
        b.gate.clear()
        link = await a.carrier.connect(b.record)
        size_bytes = 1 << 20
        sending = [asyncio.create_task(link.send(bytes(size_bytes))) for _ in range(64)]  # more than fits
        await until(lambda: link.there_in_s(5) == size_bytes + 5)
        b.gate.set()
        await asyncio.gather(*sending)
        assert link.there_in_s(5) == 5.0
        await link.close()


async def test_what_waits_before_a_link_is_what_the_kernel_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(send_buffer, "NEAR_S", 0.0)
    async with open_pair("grpc", tmp_path) as (a, b):
        link = await a.carrier.connect(b.record)
        assert isinstance(link, GrpcLink)
        assert link.send_buffer is not None
        files = link.send_buffer.files  # its own, and perhaps one that fetched the certificate before
        assert files
        told = struct.Struct("B147xI")
        monkeypatch.setattr(
            send_buffer, "_seen", lambda info: Seen(0.03, 5) if told.unpack(info) > (1, 0) else Seen()
        )
        assert link.look() == (0.03, 5 * len(files), 0.0)  # established, and has a shortest round trip
        open_files = set(os.listdir("/proc/self/fd"))
        assert len({link.look() for _ in range(20)}) == 1
        assert len(set(os.listdir("/proc/self/fd")) - open_files) < 10  # looking leaves nothing open
        link.send_buffer.files = [(name, inode + 1) for name, inode in files]  # other files, by now
        assert link.look() == (None, 0, 0.0)
        await link.close()


async def test_looking_at_our_links_changes_no_socket_of_the_users(tmp_path: Path) -> None:
    """With a default timeout a socket that is made of a copied descriptor makes the original non-blocking."""
    async with open_pair("grpc", tmp_path) as (a, b):
        link = await a.carrier.connect(b.record)
        left, right = socket.socketpair()  # blocking, as those of ``multiprocessing.Pipe``
        socket.setdefaulttimeout(30.0)
        try:
            send_buffer.keep_little_unsent("127.0.0.1", b.carrier.port)
        finally:
            socket.setdefaulttimeout(None)
        assert os.get_blocking(left.fileno())
        assert os.get_blocking(right.fileno())
        left.close()
        right.close()
        await link.close()


async def test_looking_at_our_links_undoes_nothing_that_another_thread_sets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who looks, sees a new socket block, and sets what it saw, makes the one block that became non-blocking
    in between: an event loop would stand still in it."""
    set_again: list[int] = []
    async with open_pair("grpc", tmp_path) as (a, b):
        link = await a.carrier.connect(b.record)
        monkeypatch.setattr(os, "set_blocking", lambda file, blocks: set_again.append(file))
        send_buffer.keep_little_unsent("127.0.0.1", b.carrier.port)
        monkeypatch.undo()
        await link.close()
    assert not set_again


async def test_what_is_sent_to_a_far_peer_arrives_over_two_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(send_buffer, "NEAR_S", 0.0)
    async with open_pair("grpc", tmp_path) as (a, b), asyncio.TaskGroup() as tasks:
        carrier, there = a.carrier, b.identity.peer_id
        assert isinstance(carrier, GrpcCarrier)

        async def find(peer: PeerId, fresh: bool) -> PeerRecord | None:
            return b.record

        links = Links([carrier], find, LinkObserver(*[lambda *_: None] * 3), tasks, 0.0)
        links.post(there, b"hello", bulk=False)
        await until(lambda: len(b.received) == 1)
        b.gate.clear()
        bulk = [number.to_bytes(4) * (BESIDE_BYTES // 16) for number in range(50)]
        for data in bulk:
            links.post(there, data, bulk=True)
        await until(lambda: len(carrier._links) == 2)
        b.gate.set()
        await until(lambda: len(b.received) == 1 + len(bulk))
        assert sorted(data for _, data in b.received[1:]) == bulk
        await links.close()
        await until(lambda: not carrier._links)


def test_a_connection_may_hold_what_it_carries_in_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    bounds: list[tuple[send_buffer.OpenFile, int]] = []
    monkeypatch.setattr(send_buffer, "keep_little_unsent", lambda host, port: 2)
    monkeypatch.setattr(send_buffer, "_files_to", lambda host, port: [("7", 70), ("8", 80)])
    monkeypatch.setattr(send_buffer, "_let_hold", lambda file, size_bytes: bounds.append((file, size_bytes)))
    line = SendBuffer("192.0.2.1", 1, others={("7", 70)})
    for since, bytes_per_s, bound_bytes in (
        (10.0, 0.8e6, None),
        (20.0, 4e6, 680_000),
        (30.0, 3.5e6, None),
        (40.0, 1e9, MOST_UNSENT_BYTES),
        (50.0, 0.6e6, UNSENT_BYTES),  # it is as slow as others now
        (60.0, 0.1e6, None),
    ):
        carry(line, since, bytes_per_s)
        assert bounds == ([] if bound_bytes is None else [(("8", 80), bound_bytes)])
        bounds.clear()


def carry(line: SendBuffer, since: float, bytes_per_s: float) -> None:
    """As if ``line`` took messages for a second, after what fills an empty buffer."""
    line.took(1 << 20, since, since)
    for number in range(8):
        line.took(int(bytes_per_s / 8), since + number / 8, since + (number + 1) / 8)


def bounds_of(line: SendBuffer, port: int) -> set[int]:
    """Of its connections that are open."""
    bounds = set()
    for name, inode in line.files:
        with contextlib.suppress(OSError):  # what fetched the certificate is closed
            if os.fstat(int(name)).st_ino == inode:
                bounds.add(unsent_bound(int(name), port))
    return {bound for bound in bounds if bound is not None}


def unsent_bound(descriptor: int, port: int) -> int | None:
    """``TCP_NOTSENT_LOWAT`` of our connection to ``port`` if ``descriptor`` is one."""
    try:
        connection = socket.socket(fileno=os.dup(descriptor))
    except OSError:
        return None
    with connection:
        try:
            is_internet = connection.family in (socket.AF_INET, socket.AF_INET6)
            if not is_internet or connection.getpeername()[1] != port:
                return None
        except OSError:
            return None
        return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT)


@pytest.mark.parametrize(
    ("code", "details", "words"),
    [
        (grpc.StatusCode.OK, "", "the peer closed the link"),
        (grpc.StatusCode.UNAVAILABLE, "Cancelling all calls", "the peer closed the link"),
        (grpc.StatusCode.UNAVAILABLE, "Socket closed", "the link broke (unavailable: Socket closed)"),
        (grpc.StatusCode.PERMISSION_DENIED, "said by us", "the peer refused us: said by us"),
    ],
)
def test_how_a_link_ended_is_said_in_words(code: grpc.StatusCode, details: str, words: str) -> None:
    assert how_it_ended(code, details) == words
