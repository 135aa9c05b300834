"""The carrier for peers that cannot be dialled directly: raw libp2p streams through the daemon (relays, hole
punching).

A link is one stream. The dialler writes frames: 4 bytes of length (big-endian), then the message; length 0
says goodbye, because a half-closed stream does not survive the daemon. The other end answers with frames of
one code byte and a text: welcome, alive (every ``HEARTBEAT_S``), refused and why, goodbye. "Alive" also says
how many bytes of messages it has read, if its welcome said that it would (``acknowledged``). The first
message is the same signed hello as over gRPC (``admission``); libp2p has proved the peer as well, and both
must name the same.

Law of death: a killed process is noticed at once, silence after ``SILENCE_S``. Raw streams rather than
hivemind's protobuf handlers: about a third less CPU for large messages. Price against gRPC: three to five
times its CPU, as all bytes also pass a local socket and the Go daemon.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from p2p_co2.errors import PeerLost, RemoteProtocolError, TransportError
from p2p_co2.net.transport.acknowledged import SAY_EVERY_S, Acknowledged
from p2p_co2.net.transport.admission import MAX_HELLO_BYTES, MAX_INBOUND_LINKS, RELAYED, Admission, network_at
from p2p_co2.net.transport.base import (
    CLOSE_TIMEOUT_S,
    CONNECT_TIMEOUT_S,
    HELLO_TIMEOUT_S,
    MESSAGE_TIMEOUT_S,
    OnMessage,
    OnRefused,
    Seen,
    check_incoming,
    check_outgoing,
)
from p2p_co2.net.transport.hivemind_quiet import P2P, P2PDaemonError, StreamInfo
from p2p_co2.net.transport.libp2p_control import Stream, hang_up, is_relayed, open_stream_by, reach
from p2p_co2.net.transport.libp2p_ways import DIRECT, Ways, way_in_words
from p2p_co2.net.transport.probe_limits import address_of
from p2p_co2.protocol.wire.identity import Identity, PeerId, public_key_of
from p2p_co2.protocol.wire.limits import MAX_STRING, PROTOCOL_VERSION
from p2p_co2.protocol.wire.messages_pb2 import PeerRecord

PROTOCOL = f"/p2p-co2/{PROTOCOL_VERSION}/link"
HEADER_BYTES = 4
WELCOME, REFUSED, GOODBYE, ALIVE = b"\0", b"\1", b"\2", b"\3"
SAYS_WHAT_CAME = "says what came"
"""Text of a welcome: each "alive" will say how many bytes of messages have come. Without it none does."""
HEARTBEAT_S = 5.0
SILENCE_S = 20.0
"""A link whose other end has not even said that it is alive for this long is dead."""
MAX_STREAMS = MAX_INBOUND_LINKS + 64
"""Inbound streams with a task of ours: the links, and those that read why they were refused."""
_GOODBYE_FRAME = bytes(HEADER_BYTES)
_MAX_ANSWER_BYTES = 1 + MAX_STRING
_MOST_UNREAD_BYTES = 64 << 10
_NO_CERTIFICATE = b""
_DAEMON_TIMEOUT_S = 5.0


class Libp2pCarrier:
    """Over a started ``P2P``, which stays the caller's; ``run`` is the digest of the run, ``newest`` as
    ``Ways`` has it."""

    name = "libp2p"

    def __init__(
        self,
        p2p: P2P,
        identity: Identity,
        run: bytes,
        clock: Callable[[], float] = time.time,
        newest: Callable[[PeerId], Sequence[str]] = lambda peer: (),
    ) -> None:
        self._p2p = p2p
        self._admission = Admission(identity, run, clock)
        self._links: set[Libp2pLink] = set()
        self._ways = Ways(p2p, identity.peer_id, lambda: tuple(self._links), newest)
        self._inbound: set[asyncio.Task[None]] = set()
        self._listening = False
        self._on_message: OnMessage | None = None
        self._on_refused: OnRefused | None = None

    async def start(self, on_message: OnMessage, on_refused: OnRefused) -> None:
        """See ``Carrier``."""
        self._on_message, self._on_refused = on_message, on_refused
        await self._p2p.add_binary_stream_handler(PROTOCOL, self._serve)
        self._listening = True
        self._ways.start()

    def keep_places(self, is_known: Callable[[PeerId], bool]) -> None:
        """See ``Carrier``."""
        self._admission.is_known = is_known

    async def connect(self, record: PeerRecord) -> Libp2pLink:
        """See ``Carrier``; without usable ``maddrs`` the daemon asks its routing table for the peer."""
        try:
            public_key_of(record.peer)
        except RemoteProtocolError as error:
            raise TransportError(str(error)) from None
        peer = PeerId(record.peer)
        await reach(self._p2p, peer, record.maddrs, CONNECT_TIMEOUT_S)
        stream, way = await open_stream_by(self._p2p, peer, PROTOCOL, CONNECT_TIMEOUT_S)
        link = Libp2pLink(peer, stream, self._links.discard)
        link.maddrs, link.is_relayed = tuple(record.maddrs), is_relayed(way)
        link.way = way_in_words(way, self._ways.was_relayed(peer))
        self._ways.opened(link)
        self._links.add(link)
        try:
            await link.open(self._admission.hello(peer, _NO_CERTIFICATE))
        except BaseException:
            await link.drop("never opened")
            raise
        link.on_end(self._ways.ended)
        return link

    async def close(self) -> None:
        """See ``Carrier``."""
        listening, self._listening = self._listening, False
        await self._ways.stop()
        await asyncio.gather(*(link.close() for link in list(self._links)))
        if listening:
            try:
                async with asyncio.timeout(_DAEMON_TIMEOUT_S):
                    await self._p2p.remove_binary_stream_handler(PROTOCOL)
            except (TimeoutError, OSError, asyncio.IncompleteReadError, P2PDaemonError):
                pass  # the daemon is gone, and its handlers with it
        tasks = list(self._inbound)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(
        self, info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._inbound) >= MAX_STREAMS:
            await self._turn_away(PeerId(info.peer_id.to_base58()), writer)
            return
        self._inbound.add(task)
        try:
            place = address_of(str(info.addr))
            network = network_at(place[0]) if place is not None else RELAYED
            await self._receive(PeerId(info.peer_id.to_base58()), network, reader, writer)
        except OSError:
            pass  # the peer is gone; its link ends here
        except asyncio.CancelledError:
            if self._listening:
                raise
            # `close` did it: just end, because asyncio's streams complain about a cancelled handler
        finally:
            self._inbound.discard(task)
            await hang_up(writer)

    async def _turn_away(self, dialler: PeerId, writer: asyncio.StreamWriter) -> None:
        """No answer: whoever opens streams without end does not wait for one."""
        assert self._on_refused is not None
        self._on_refused(dialler, RemoteProtocolError("too many links", f"{MAX_STREAMS} streams are open"))
        await hang_up(writer)

    async def _receive(
        self, dialler: PeerId, network: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        assert self._on_refused is not None
        peer: PeerId | None = None
        try:
            peer = await self._admit(dialler, network, reader)
            _answer(writer, WELCOME, SAYS_WHAT_CAME)
            await self._take_messages(peer, reader, writer)
            _answer(writer, GOODBYE)
            await _until_gone(reader)
        except RemoteProtocolError as error:
            self._on_refused(dialler, error)
            _answer(writer, REFUSED, str(error))
            await _until_gone(reader)
        except asyncio.IncompleteReadError:
            return  # died in the middle: its node will tell, or not
        finally:
            if peer is not None:
                self._admission.leave(peer, network)

    async def _take_messages(
        self, peer: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        assert self._on_message is not None
        receipt = _Receipt(writer)
        beating = asyncio.create_task(receipt.beat(), name=f"heartbeat to {peer}")
        try:
            while (data := await _read_frame(reader)) is not None:
                receipt.came(len(data))
                await self._on_message(peer, data)
        finally:
            receipt.stop()
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)

    async def _admit(self, dialler: PeerId, network: str, reader: asyncio.StreamReader) -> PeerId:
        self._admission.knock(network)
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                length = int.from_bytes(await reader.readexactly(HEADER_BYTES))
                if not 0 < length <= MAX_HELLO_BYTES:
                    raise RemoteProtocolError("wrong hello", f"{length} bytes")
                sealed = await reader.readexactly(length)
        except TimeoutError:
            raise RemoteProtocolError("no hello", f"silent for {HELLO_TIMEOUT_S:.0f} s") from None
        finally:
            self._admission.forget(network)
        peer = self._admission.admit(sealed, _NO_CERTIFICATE, network)
        if peer != dialler:
            self._admission.leave(peer, network)
            raise RemoteProtocolError("wrong hello", f"signed by {peer}, sent by {dialler}")
        return peer


class _Receipt:
    """Says to a dialler that we are alive and how much has come, also while a message is being worked on. One
    that does not read what we say is told nothing more until it does."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._bytes = 0
        self._due: asyncio.TimerHandle | None = None

    def came(self, size_bytes: int) -> None:
        """A message has been read."""
        self._bytes += size_bytes
        if self._due is None:
            self._due = asyncio.get_running_loop().call_later(SAY_EVERY_S, self._say)

    async def beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            self._say()

    def stop(self) -> None:
        if self._due is not None:
            self._due.cancel()

    def _say(self) -> None:
        self.stop()
        self._due = None
        if self._writer.transport.get_write_buffer_size() < _MOST_UNREAD_BYTES:
            _answer(self._writer, ALIVE, str(self._bytes))


class Libp2pLink:
    """See ``Link``."""

    carrier = "libp2p"
    is_far = False
    """The daemon puts all streams to a peer into one connection."""

    def __init__(self, peer: PeerId, stream: Stream, gone: Callable[[Libp2pLink], None]) -> None:
        self.peer = peer
        self._reader, self._writer = stream
        self._gone = gone
        self._writing = asyncio.Lock()
        self._welcome = asyncio.Event()
        self._closing = ""
        self.way, self.is_relayed = DIRECT, False
        self.maddrs: tuple[str, ...] = ()
        """Where the peer said that it can be reached."""
        self.acknowledged: Acknowledged | None = None
        self._watcher = asyncio.create_task(self._watch(), name=f"libp2p link to {peer}")

    def look(self) -> Seen:
        """See ``Link``: nothing is known, the connection is the daemon's."""
        return Seen()

    def begin_anew(self, now: float) -> None:
        """See ``Link``: the connection is not ours to change."""

    def there_in_s(self, size_bytes: int) -> float:
        """See ``Link``: unknown too."""
        return 0.0

    async def open(self, hello: bytes) -> None:
        """Say hello and wait for the welcome. Raises ``TransportError``."""
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await self._write(hello)
                await self._welcome.wait()
        except TimeoutError:
            raise TransportError(f"{self.peer} did not welcome us within {CONNECT_TIMEOUT_S:.0f} s") from None
        if self._watcher.done():
            raise TransportError(f"cannot link to {self.peer} by libp2p: {self._watcher.result()}")

    async def send(self, data: bytes) -> None:
        """See ``Link``."""
        check_outgoing(data)
        async with self._writing:
            await self._write(data)

    async def close(self, why: str = "closed by us") -> None:
        """See ``Link``."""
        if not self._watcher.done():
            self._closing = why
            try:
                async with asyncio.timeout(CLOSE_TIMEOUT_S), self._writing:
                    self._writer.write(_GOODBYE_FRAME)
                    await asyncio.shield(self._watcher)
            except TimeoutError:
                pass  # the peer is slow or gone: it is dropped below, which is what closing means then
        await self.drop(why)

    async def wait_closed(self) -> str:
        """See ``Link``."""
        return await asyncio.shield(self._watcher)

    def on_end(self, ended: Callable[[Libp2pLink], None]) -> None:
        """Call ``ended`` when the link has ended and we did not close it."""
        self._watcher.add_done_callback(lambda _: None if self._closing else ended(self))

    async def drop(self, cause: str) -> None:
        """End the stream without a goodbye."""
        self._closing = self._closing or cause
        await hang_up(self._writer)
        await self._watcher
        self._gone(self)

    async def _write(self, data: bytes) -> None:
        if self._watcher.done() or self._closing:
            raise PeerLost(self._closing or self._watcher.result())
        try:
            if self.acknowledged is not None:
                self.acknowledged.sent(len(data), time.monotonic())
            # One write: a lone header would travel through the daemon as a packet of its own.
            self._writer.write(len(data).to_bytes(HEADER_BYTES) + data)
            await self._writer.drain()
        except OSError:
            raise PeerLost(await self.wait_closed()) from None

    async def _watch(self) -> str:
        """Read the peer's answers until the link ends; the cause in words."""
        cause = "the peer is gone"
        try:
            while True:
                async with asyncio.timeout(SILENCE_S):
                    length = int.from_bytes(await self._reader.readexactly(HEADER_BYTES))
                if not 0 < length <= _MAX_ANSWER_BYTES:
                    cause = "the peer answers nonsense"
                    break
                answer = await self._reader.readexactly(length)
                if answer[:1] == WELCOME:
                    if answer[1:] == SAYS_WHAT_CAME.encode() and not self._welcome.is_set():
                        self.acknowledged = Acknowledged()
                    self._welcome.set()
                    continue
                if answer[:1] == ALIVE:
                    if self.acknowledged is not None:
                        self.acknowledged.hear(answer[1:], time.monotonic())
                    continue
                cause = "the peer closed the link"
                if answer[:1] == REFUSED:
                    cause = f"the peer refused us: {answer[1:].decode(errors='replace')}"
                break
        except TimeoutError:
            cause = f"the peer has been silent for {SILENCE_S:.0f} s"
        except RemoteProtocolError as error:
            cause = f"the peer answers nonsense: {error}"
        except (asyncio.IncompleteReadError, OSError):
            pass  # the stream ended; the cause is already in words
        self._welcome.set()
        self._writer.transport.abort()  # wakes a sender that waits for room
        return self._closing or cause


async def _read_frame(reader: asyncio.StreamReader) -> bytes | None:
    """One message, or None at a goodbye. Raises ``RemoteProtocolError`` before it allocates too much, and for
    one that takes too long. Who says nothing at all may be asleep; who says a byte now and then is not."""
    try:
        async with asyncio.timeout(MESSAGE_TIMEOUT_S):
            head = await reader.readexactly(1)
    except TimeoutError:
        raise RemoteProtocolError("silent", f"not a byte in {MESSAGE_TIMEOUT_S:.0f} s") from None
    try:
        async with asyncio.timeout(MESSAGE_TIMEOUT_S):
            length = int.from_bytes(head + await reader.readexactly(HEADER_BYTES - 1))
            if not length:
                return None
            check_incoming(length)
            return await reader.readexactly(length)
    except TimeoutError:
        raise RemoteProtocolError("too slow", f"no whole message in {MESSAGE_TIMEOUT_S:.0f} s") from None


def _answer(writer: asyncio.StreamWriter, code: bytes, text: str = "") -> None:
    answer = code + text.encode()[:MAX_STRING]
    writer.write(len(answer).to_bytes(HEADER_BYTES) + answer)


async def _until_gone(reader: asyncio.StreamReader) -> None:
    """Let the peer read our last answer: it hangs up then. What it still sends is thrown away, for a bounded
    time."""
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            while await reader.read(1 << 16):
                pass
    except TimeoutError:
        return
