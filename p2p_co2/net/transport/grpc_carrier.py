"""The direct carrier: gRPC over TLS (``grpc.aio``), for peers that can be dialled.

One streaming call is one link: the request stream carries the messages, the initial metadata of the answer
says "welcome", the final status says why it ended. No generated stubs: messages are the bytes of the call.
The certificate's digest is in the signed peer record (``tls``), and the signed hello is bound to it
(``admission``). HTTP/2 flow control is the backpressure.

Law of death: a killed process resets its connection and both ends know at once; a host that falls silent is
given up after ``KEEPALIVE_S`` + ``KEEPALIVE_TIMEOUT_S``. Price: 1.5 to 4 CPU seconds per GB, much of it TLS;
each link is a TCP connection of its own, so that one slow peer never stands in another's way.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from itertools import chain
from typing import Any, TypeVar
from urllib.parse import unquote

import grpc
import grpc.aio

from p2p_co2.errors import (
    EnvironmentFault,
    LocalProtocolError,
    PeerLost,
    RemoteProtocolError,
    TransportError,
)
from p2p_co2.net.transport.addresses import Resolver, is_near
from p2p_co2.net.transport.admission import MAX_INBOUND_LINKS, RELAYED, Admission, network_at
from p2p_co2.net.transport.base import (
    CLOSE_TIMEOUT_S,
    CONNECT_TIMEOUT_S,
    HELLO_TIMEOUT_S,
    MESSAGE_TIMEOUT_S,
    OnMessage,
    OnRefused,
    check_incoming,
    check_outgoing,
)
from p2p_co2.net.transport.flow import Acknowledged, Seen, SendBuffer
from p2p_co2.net.transport.tls import TARGET_NAME, fetch_certificate, make_certificate
from p2p_co2.protocol.wire.identity import Identity, PeerId
from p2p_co2.protocol.wire.limits import MAX_ADDRESSES, MAX_MESSAGE_BYTES, PROTOCOL_VERSION
from p2p_co2.protocol.wire.messages_pb2 import PeerRecord
from p2p_co2.system.process import left_to_others, shut_in_forks_at

_T = TypeVar("_T")
METHOD = f"/p2p_co2.v{PROTOCOL_VERSION}/Link"
WELCOME = ("p2p-co2", "welcome")
NEAR_TIMEOUT_S = 2.0
"""Bound on one attempt at an address of somebody's home network: it is ours too, or nobody answers."""
KEEPALIVE_S = 8.0
KEEPALIVE_TIMEOUT_S = 12.0
MAX_NUMBERS = 4
"""Addresses of one host name that are tried."""
MAX_CONNECTIONS = MAX_INBOUND_LINKS + 64
"""TCP connections to us: the links, and those that are shaking hands or only read our certificate."""
_HARD_LIMIT_BYTES = 2 * MAX_MESSAGE_BYTES
"""gRPC drops larger messages unread, and does not say so; between this and the limit we can name the
offence."""

_COMMON_OPTIONS: list[tuple[str, int | str]] = [
    ("grpc.keepalive_time_ms", int(KEEPALIVE_S * 1000)),
    ("grpc.keepalive_timeout_ms", int(KEEPALIVE_TIMEOUT_S * 1000)),
    ("grpc.http2.ping_timeout_ms", int(KEEPALIVE_TIMEOUT_S * 1000)),  # else a minute, in spite of the above
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.max_frame_size", 1 << 20),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", _HARD_LIMIT_BYTES),
]
_SERVER_OPTIONS: list[tuple[str, int | str]] = [
    *_COMMON_OPTIONS,
    ("grpc.so_reuseport", 0),  # two peers on one port must be an error, not a lottery
    ("grpc.server_handshake_timeout_ms", int(HELLO_TIMEOUT_S * 1000)),
    ("grpc.http2.min_ping_interval_without_data_ms", int(KEEPALIVE_S * 500)),
    ("grpc.max_concurrent_streams", 1),
    ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
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


class GrpcCarrier:
    """Listens on ``host:port`` (0 picks a free one, see ``port`` after ``start``); ``run`` is the digest of
    the run."""

    name = "grpc"

    def __init__(
        self, identity: Identity, run: bytes, host: str, port: int, clock: Callable[[], float] = time.time
    ) -> None:
        self._admission = Admission(identity, run, clock)
        self._certificate = make_certificate(clock())
        self._host, self.port = host, port
        self._server: grpc.aio.Server | None = None
        self._links: set[GrpcLink] = set()
        self._resolver = Resolver()
        self._on_message: OnMessage | None = None
        self._on_refused: OnRefused | None = None

    @property
    def certificate_digest(self) -> bytes:
        """sha256 of our certificate, for our peer record."""
        return self._certificate.digest

    async def start(self, on_message: OnMessage, on_refused: OnRefused) -> None:
        """See ``Carrier``."""
        self._on_message, self._on_refused = on_message, on_refused
        server = grpc.aio.server(options=_SERVER_OPTIONS)
        server.add_generic_rpc_handlers((_Handler(self._serve),))
        credentials = grpc.ssl_server_credentials(
            ((self._certificate.key_pem, self._certificate.certificate_pem),)
        )
        host = f"[{self._host}]" if ":" in self._host else self._host
        try:
            bound = server.add_secure_port(f"{host}:{self.port}", credentials)
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
        self._server, self.port = server, bound
        shut_in_forks_at(bound)

    def keep_places(self, is_known: Callable[[PeerId], bool]) -> None:
        """See ``Carrier``."""
        self._admission.is_known = is_known

    async def connect(self, record: PeerRecord) -> GrpcLink:
        """See ``Carrier``; tries the record's addresses one after the other."""
        if not record.grpc_addresses:
            raise TransportError("it offers no address for gRPC")
        causes = []
        for address in record.grpc_addresses[:MAX_ADDRESSES]:
            try:
                return await self._connect_to(address, record)
            except TransportError as error:
                causes.append(str(error))
        raise TransportError("; ".join(causes))

    async def close(self) -> None:
        """See ``Carrier``."""
        server, self._server = self._server, None
        await asyncio.gather(*(link.close() for link in list(self._links)))
        if server is not None:
            await server.stop(None)
            left_to_others(self.port)

    async def _connect_to(self, address: str, record: PeerRecord) -> GrpcLink:
        host, port = _split_address(address)
        timeout_s = NEAR_TIMEOUT_S if is_near(host) else CONNECT_TIMEOUT_S
        numbers = (await self._resolver.addresses_of(host, timeout_s))[:MAX_NUMBERS]
        pem, number = await self._certificate_at(numbers, port, record.certificate_digest, timeout_s)
        channel = grpc.aio.secure_channel(
            f"[{number}]:{port}" if ":" in number else f"{number}:{port}",
            grpc.ssl_channel_credentials(root_certificates=pem),
            options=_CLIENT_OPTIONS,
        )
        link = GrpcLink(PeerId(record.peer), channel, self._links.discard)
        self._links.add(link)
        try:
            await link.open(self._admission.hello(link.peer, record.certificate_digest), address)
        except BaseException:
            await link.drop("never opened")
            raise
        known = [one.send_buffer.files for one in self._links if one.send_buffer is not None]
        link.send_buffer = SendBuffer(number, port, set(chain.from_iterable(known)))
        return link

    async def _certificate_at(
        self, numbers: Sequence[str], port: int, digest: bytes, timeout_s: float
    ) -> tuple[bytes, str]:
        """The certificate, and which of one host's addresses shows it."""
        for number in numbers[:-1]:
            with contextlib.suppress(TransportError):
                return await fetch_certificate(number, port, digest, timeout_s), number
        return await fetch_certificate(numbers[-1], port, digest, timeout_s), numbers[-1]

    async def _serve(self, _: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> bytes:
        assert self._on_message is not None
        assert self._on_refused is not None
        peer: PeerId | None = None
        network = _network_of(context.peer())
        try:
            peer = await self._admit(context, network)
            await context.send_initial_metadata((WELCOME,))
            while (data := await _next_message(context)) is not grpc.aio.EOF:
                check_incoming(len(data))
                await self._on_message(peer, data)
        except RemoteProtocolError as error:
            self._on_refused(peer, error)
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))
        finally:
            if peer is not None:
                self._admission.leave(peer, network)
        return b""

    async def _admit(self, context: grpc.aio.ServicerContext, network: str) -> PeerId:
        self._admission.knock(network)
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                sealed = await context.read()
        except TimeoutError:
            raise RemoteProtocolError("no hello", f"silent for {HELLO_TIMEOUT_S:.0f} s") from None
        finally:
            self._admission.forget(network)
        if sealed is grpc.aio.EOF:
            raise RemoteProtocolError("no hello", "left without a word")
        return self._admission.admit(sealed, self._certificate.digest, network)


class GrpcLink:
    """See ``Link``."""

    carrier = "grpc"
    way = "direct"
    acknowledged: Acknowledged | None = None
    """The kernel holds little that is unsent (``unsent``), so ``send`` returns at the line's speed."""

    def __init__(self, peer: PeerId, channel: grpc.aio.Channel, gone: Callable[[GrpcLink], None]) -> None:
        self.peer = peer
        self._channel, self._gone = channel, gone
        self._call: grpc.aio.StreamUnaryCall = channel.stream_unary(METHOD)()
        self._status: tuple[grpc.StatusCode, str] | None = None
        self._call.add_done_callback(self._keep_status)
        self._writing = asyncio.Lock()
        self._watcher = asyncio.create_task(self._watch(), name=f"grpc link to {peer}")
        self._closing = ""
        self.send_buffer: SendBuffer | None = None
        """Set once the connection is known."""

    @property
    def is_far(self) -> bool:
        return self.send_buffer is not None and self.send_buffer.is_far

    def look(self) -> Seen:
        return self.send_buffer.look() if self.send_buffer is not None else Seen()

    async def open(self, hello: bytes, address: str) -> None:
        """Say hello and wait for the welcome. Raises ``TransportError``."""
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await self._write(hello)
                if WELCOME not in tuple(await self._call.initial_metadata()):
                    raise TransportError(f"{address}: {await self.wait_closed()}")
        except TimeoutError:
            raise TransportError(f"{address} did not welcome us within {CONNECT_TIMEOUT_S:.0f} s") from None

    async def send(self, data: bytes) -> None:
        """See ``Link``."""
        check_outgoing(data)
        async with self._writing:
            if self.send_buffer is None:
                await self._write(data)
                return
            started_at = time.monotonic()
            await self._write(data)
            self.send_buffer.took(len(data), started_at, time.monotonic())

    async def close(self) -> None:
        """See ``Link``."""
        if not self._watcher.done():
            self._closing = "closed by us"
            try:
                async with asyncio.timeout(CLOSE_TIMEOUT_S), self._writing:
                    await self._call.done_writing()
                    await asyncio.shield(self._watcher)
            except (TimeoutError, grpc.RpcError, asyncio.InvalidStateError):
                pass  # the peer is slow or gone: it is dropped below, which is what closing means then
        await self.drop("closed by us")

    async def wait_closed(self) -> str:
        """See ``Link``."""
        return await asyncio.shield(self._watcher)

    async def drop(self, cause: str) -> None:
        """End the call without a goodbye."""
        self._closing = self._closing or cause
        self._call.cancel()
        await self._watcher
        await self._channel.close()
        self._gone(self)

    async def _write(self, data: bytes) -> None:
        if self._watcher.done() or self._closing:
            raise PeerLost(self._closing or self._watcher.result())
        try:
            await self._call.write(data)
        except asyncio.CancelledError:
            self._closing = "a send was cancelled"
            raise
        except (grpc.RpcError, asyncio.InvalidStateError):
            raise PeerLost(await self.wait_closed()) from None

    def _keep_status(self, call: grpc.aio.Call) -> None:
        """A write that fails as the call ends puts a status of its own in the place of the peer's, which says
        why (grpc issue 36066): the first one is the peer's."""
        self._status = self._status or (_at_once(call.code()), _at_once(call.details()))

    async def _watch(self) -> str:
        code, details = await self._call.code(), await self._call.details()
        code, details = self._status or (code, details)
        if self._closing:
            return self._closing
        return how_it_ended(code, details)


def how_it_ended(code: grpc.StatusCode, details: str | None) -> str:
    """gRPC's status of a link that is gone, in words."""
    if code is grpc.StatusCode.PERMISSION_DENIED:
        return f"the peer refused us: {details}"
    if code in (grpc.StatusCode.OK, grpc.StatusCode.CANCELLED) or details == _SERVER_STOPS:
        return "the peer closed the link"
    return f"the link broke ({code.name.lower()}: {details})"


def _at_once(answer: Coroutine[Any, Any, _T]) -> _T:
    """The result of a coroutine that has nothing to wait for."""
    try:
        answer.send(None)
    except StopIteration as ended:
        result: _T = ended.value
        return result
    raise LocalProtocolError("a call that has ended has no status")


class _Handler(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no annotations
    """Routes our one method; everything else is answered with "unimplemented" by gRPC."""

    def __init__(self, serve: Callable[[AsyncIterator[bytes], grpc.aio.ServicerContext], object]) -> None:
        self._method = grpc.stream_unary_rpc_method_handler(serve)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        return self._method if handler_call_details.method == METHOD else None


async def _next_message(context: grpc.aio.ServicerContext) -> bytes:
    """The next message or ``EOF``. Raises ``RemoteProtocolError`` when it takes too long."""
    try:
        async with asyncio.timeout(MESSAGE_TIMEOUT_S):
            data: bytes = await context.read()
            return data
    except TimeoutError:
        raise RemoteProtocolError("too slow", f"no whole message in {MESSAGE_TIMEOUT_S:.0f} s") from None


def _network_of(seen: str) -> str:
    """The network of gRPC's "ipv4:127.0.0.1:50051" or "ipv6:%5B::1%5D:50051"."""
    host = unquote(seen.partition(":")[2]).rpartition(":")[0].strip("[]")
    try:
        return network_at(host)
    except ValueError:
        return RELAYED


def _split_address(address: str) -> tuple[str, int]:
    """("host", port) of "host:port" or "[v6]:port"; raises ``TransportError``."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise TransportError(f"{address[:64]!r} is no host:port")
    return host.strip("[]"), int(port)
