"""What gRPC has of its own: a hostile client that speaks it by hand, TLS, ports."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest

from p2p_co2.errors import EnvironmentFault, TransportError
from p2p_co2.net.transport.admission import Admission
from p2p_co2.net.transport.grpc_carrier import METHOD, GrpcCarrier
from p2p_co2.net.transport.tls import TARGET_NAME, fetch_certificate, make_certificate
from p2p_co2.protocol.wire.identity import Identity, PeerId
from p2p_co2.protocol.wire.limits import HELLO_WINDOW_S, MAX_MESSAGE_BYTES
from tests.transport_peers import PATIENCE_S, RUN, Peer, open_pair, open_peer


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
