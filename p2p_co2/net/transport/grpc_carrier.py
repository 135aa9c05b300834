"""The direct carrier: gRPC over TLS (``grpc.aio``), for peers that can be dialled.

One streaming call is one link. The request stream carries the messages, the initial metadata of the answer
says "welcome", the final status says why it ended. No generated stubs: messages are the bytes of the call.
HTTP/2 flow control is the backpressure.

A certificate authenticates nobody by itself: it is self-signed, made anew at every start, and its private key
never leaves memory. What counts is its digest, in the owner's signed ``PeerRecord``. The dialler trusts
exactly this certificate and no authority (pinning, RFC 7858 section 4.2 in spirit). The signed hello is bound
to it (``admission``). Price: one extra handshake per link.

Law of death: a killed process resets its connection and both ends know at once. A host that falls silent is
given up after 20 s. Price: 1.5 to 4 CPU seconds per GB, much of it TLS. Each link is a TCP connection of its
own, so that one slow peer never stands in another's way.
"""

from __future__ import annotations

import asyncio
import datetime
import hashlib
import os
import ssl
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import grpc
import grpc.aio
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from p2p_co2.errors import EnvironmentFault, RemoteProtocolError, TransportError
from p2p_co2.net.transport.addresses import Resolver, is_near
from p2p_co2.net.transport.admission import MAX_INBOUND_LINKS, MAX_STRANGERS, RELAYED, network_at
from p2p_co2.net.transport.base import (
    CLOSE_TIMEOUT_S,
    CONNECT_TIMEOUT_S,
    Carrier,
    Link,
    check_incoming,
    in_time,
)
from p2p_co2.net.transport.flow import Seen, SendBuffer
from p2p_co2.system.clock import within
from p2p_co2.system.process import left_to_others, shut_in_forks_at
from p2p_co2.wire.identity import Identity, PeerId
from p2p_co2.wire.limits import MAX_MESSAGE_BYTES, PROTOCOL_VERSION
from p2p_co2.wire.messages_pb2 import PeerRecord

SERVICE = f"p2p_co2.v{PROTOCOL_VERSION}"
METHOD = f"/{SERVICE}/Link"
WELCOME = ("p2p-co2", "welcome")
TARGET_NAME = "peer.p2p-co2.invalid"
"""The name inside every certificate (RFC 2606 top-level domain): TLS wants one, and ours means nothing."""
_TIMEOUT_MS = int(CONNECT_TIMEOUT_S * 1000)
_COMMON_OPTIONS: list[tuple[str, int | str]] = [
    ("grpc.keepalive_time_ms", _TIMEOUT_MS),
    ("grpc.keepalive_timeout_ms", _TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", _TIMEOUT_MS),  # else a minute, in spite of the above
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.max_frame_size", 1 << 20),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Larger ones gRPC drops unread, and does not say so; between this and the limit we can name the offence.
    ("grpc.max_receive_message_length", 2 * MAX_MESSAGE_BYTES),
]
SERVER_OPTIONS: list[tuple[str, int | str]] = [
    *_COMMON_OPTIONS,
    ("grpc.so_reuseport", 0),  # two peers on one port must be an error, not a lottery
    ("grpc.server_handshake_timeout_ms", _TIMEOUT_MS),
    ("grpc.http2.min_ping_interval_without_data_ms", _TIMEOUT_MS // 2),
    ("grpc.max_concurrent_streams", 1),
    # The links, and those that are shaking hands or only read our certificate.
    ("grpc.max_allowed_incoming_connections", MAX_INBOUND_LINKS + MAX_STRANGERS),
]
_CLIENT_OPTIONS: list[tuple[str, int | str]] = [
    *_COMMON_OPTIONS,
    ("grpc.use_local_subchannel_pool", 1),  # a connection per link
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.ssl_target_name_override", TARGET_NAME),
]
_SERVER_STOPS = "Cancelling all calls"
"""What gRPC says to the links of a server that is being stopped: a peer that leaves, and no fault."""


class GrpcCarrier(Carrier):
    """Listens on ``host:port`` (0 picks a free one, see ``port`` after ``start``); ``run`` is the digest of
    the run."""

    name = "grpc"

    def __init__(
        self, identity: Identity, run: bytes, host: str, port: int, clock: Callable[[], float] = time.time
    ) -> None:
        super().__init__(identity, run, clock)
        self._certificate = make_certificate(clock())
        self._host = host
        self.port = port
        self._server: grpc.aio.Server | None = None
        self._resolver = Resolver()

    @property
    def certificate_digest(self) -> bytes:
        """sha256 of our certificate, for our peer record."""
        return self._certificate.digest

    async def _listen(self) -> None:
        server = grpc.aio.server(options=SERVER_OPTIONS)
        method = grpc.stream_unary_rpc_method_handler(self._serve)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Link": method}),))
        credentials = grpc.ssl_server_credentials(
            ((self._certificate.key_pem, self._certificate.certificate_pem),)
        )
        try:
            bound = server.add_secure_port(_joined(self._host, self.port), credentials)
        except RuntimeError:
            bound = 0
        if not bound:
            await server.stop(None)
            raise EnvironmentFault(
                f"cannot listen on {self._host}:{self.port} for gRPC: the port is in use, or the "
                "address is not this machine's; choose another port (grpc_port, 0 for any free one) or "
                "address (host)"
            )
        await server.start()
        self._server = server
        self.port = bound
        shut_in_forks_at(bound)

    async def _dial(self, record: PeerRecord) -> GrpcLink:
        """Tries the record's addresses one after the other."""
        if not record.grpc_addresses:
            raise TransportError("it offers no address for gRPC")
        causes = []
        for address in self.dials.due(record.grpc_addresses, time.monotonic()):
            try:
                link = await self._connect_to(address, record)
                self.dials.answered(address)
                return link
            except TransportError as error:
                causes.append(str(error))
        raise TransportError("; ".join(causes))

    async def _stop(self) -> None:
        server = self._server
        self._server = None
        if server is not None:
            await server.stop(None)
            left_to_others(self.port)

    async def _connect_to(self, address: str, record: PeerRecord) -> GrpcLink:
        host, port = _split_address(address)
        # An address of somebody's home network is ours too, or nobody answers.
        timeout_s = CLOSE_TIMEOUT_S if is_near(host) else CONNECT_TIMEOUT_S
        numbers = (await self._resolver.addresses_of(host, timeout_s))[:4]
        for number in numbers:  # of one host: the first that shows its certificate
            try:
                pem = await fetch_certificate(number, port, record.certificate_digest, timeout_s)
                break
            except TransportError:
                if number is numbers[-1]:
                    raise
        channel = grpc.aio.secure_channel(
            _joined(number, port),
            grpc.ssl_channel_credentials(root_certificates=pem),
            options=_CLIENT_OPTIONS,
        )
        link = GrpcLink(PeerId(record.peer), channel, self.links.discard)
        await self._open(link, record.certificate_digest, address)
        link.send_buffer = SendBuffer(number, port)
        link.is_far = link.send_buffer.is_far
        return link

    async def _serve(self, _: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> bytes:
        peer: PeerId | None = None
        try:
            async with self._admitted(
                lambda: _hello(context), self._certificate.digest, _network_of(context.peer())
            ) as peer:
                await context.send_initial_metadata((WELCOME,))
                while (data := await in_time(context.read())) is not grpc.aio.EOF:
                    check_incoming(len(data))
                    await self.on_message(peer, data)
        except RemoteProtocolError as error:
            self.on_refused(peer, error)
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))
        return b""


class GrpcLink(Link):
    """See ``Link``. The kernel holds little that is unsent, so ``send`` returns at the line's speed."""

    carrier = "grpc"

    def __init__(self, peer: PeerId, channel: grpc.aio.Channel, gone: Callable[[Link], None]) -> None:
        self._channel = channel
        self._call: grpc.aio.StreamUnaryCall = channel.stream_unary(METHOD)()
        self._end = ""
        self._call.add_done_callback(self._note_end)
        self.send_buffer: SendBuffer | None = None
        super().__init__(peer, gone)

    def look(self) -> Seen:
        """See ``Link``: the kernel says what was acknowledged."""
        seen = self.send_buffer.look() if self.send_buffer is not None else Seen()
        return seen if seen.there_bytes else super().look()

    async def _put(self, data: bytes) -> None:
        try:
            await self._call.write(data)
        except (grpc.RpcError, asyncio.InvalidStateError) as error:
            raise ConnectionError from error

    async def _is_welcome(self) -> bool:
        return WELCOME in tuple(await self._call.initial_metadata())

    async def _say_goodbye(self) -> None:
        try:
            await self._call.done_writing()
        except (grpc.RpcError, asyncio.InvalidStateError) as error:
            raise ConnectionError from error

    async def _cut_off(self) -> None:
        self._call.cancel()
        await self._watcher
        await self._channel.close()

    async def _watch(self) -> str:
        await self._call.code()
        return self._closing or self._end

    def _note_end(self, call: grpc.aio.StreamUnaryCall) -> None:
        """Called as a status comes. The first is the peer's: gRPC sets another when a write fails for it."""
        self._end = self._end or how_it_ended(_known(call.code()), _known(call.details()))


def _known(status: Coroutine[None, None, Any]) -> Any:
    """What a call that has ended returns without waiting."""
    try:
        return status.send(None)
    except StopIteration as end:
        return end.value


def how_it_ended(code: grpc.StatusCode, details: str | None) -> str:
    """gRPC's status of a link that is gone, in words."""
    if code is grpc.StatusCode.PERMISSION_DENIED:
        return f"the peer refused us: {details}"
    if code in (grpc.StatusCode.OK, grpc.StatusCode.CANCELLED) or details == _SERVER_STOPS:
        return "the peer closed the link"
    return f"the link broke ({code.name.lower()}: {details})"


async def _hello(context: grpc.aio.ServicerContext) -> bytes:
    sealed = await context.read()
    if sealed is grpc.aio.EOF:
        raise RemoteProtocolError("no hello", "left without a word")
    return bytes(sealed)


def _network_of(seen: str) -> str:
    """The network of gRPC's "ipv4:127.0.0.1:50051" or "ipv6:%5B::1%5D:50051"."""
    host = unquote(seen.partition(":")[2]).rpartition(":")[0].strip("[]")
    try:
        return network_at(host)
    except ValueError:
        return RELAYED


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _split_address(address: str) -> tuple[str, int]:
    """("host", port) of "host:port" or "[v6]:port"; raises ``TransportError``."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise TransportError(f"{address[:64]!r} is no host:port")
    return host.strip("[]"), int(port)


# ---- certificates


@dataclass(frozen=True)
class ServerCertificate:
    """``key_pem`` is secret. ``digest`` is sha256 of the DER certificate, 32 bytes."""

    key_pem: bytes = field(repr=False)
    certificate_pem: bytes
    digest: bytes


def make_certificate(now: float) -> ServerCertificate:
    """A new key and its self-signed certificate; ``now`` in unix seconds."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, TARGET_NAME)])
    at = datetime.datetime.fromtimestamp(now, datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # Volunteers' clocks are wrong; the signed record's expiry bounds the use of a certificate, not this.
        .not_valid_before(at - datetime.timedelta(days=30))
        .not_valid_after(at + datetime.timedelta(days=3650))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(TARGET_NAME)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    return ServerCertificate(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ),
        certificate.public_bytes(serialization.Encoding.PEM),
        hashlib.sha256(certificate.public_bytes(serialization.Encoding.DER)).digest(),
    )


async def fetch_certificate(host: str, port: int, digest: bytes, timeout_s: float) -> bytes:
    """The certificate (PEM) shown at ``host:port`` if it has this digest.

    Raises ``TransportError``: nobody there, no TLS there, or another certificate (the peer restarted and its
    record is old, or somebody else answers). Safe to cancel.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # the digest below is the verification
    context.set_alpn_protocols(["h2"])
    try:
        async with within(timeout_s):
            _, writer = await asyncio.open_connection(host, port, ssl=context, server_hostname=TARGET_NAME)
    except TimeoutError:
        raise TransportError(f"{host}:{port} did not answer within {timeout_s:.0f} s") from None
    except ssl.SSLError as error:
        raise TransportError(f"{host}:{port} does not speak TLS as we do: {error.reason}") from None
    except OSError as error:
        number = error.errno or 0  # asyncio and the resolver put other words into strerror
        raise TransportError(f"{host}:{port}: {os.strerror(number) if number > 0 else error}") from None
    shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.transport.abort()  # nothing was said, so nothing needs an orderly end
    if hashlib.sha256(shown).digest() != digest:
        raise TransportError(
            f"{host}:{port} shows another certificate than the peer's record names; the peer restarted, or "
            "somebody else answers there"
        )
    return ssl.DER_cert_to_PEM_cert(shown).encode()


async def shows(address: str, digest: bytes) -> bool:
    """Whether the process that has the certificate of this digest lives, at "host:port"."""
    try:
        await fetch_certificate(*_split_address(address), digest, CLOSE_TIMEOUT_S)
    except TransportError:
        return False
    return True
