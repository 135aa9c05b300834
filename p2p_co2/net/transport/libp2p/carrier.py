"""The carrier for peers that cannot be dialled directly: raw libp2p streams through the daemon.

A link is one stream. The dialler writes frames (``streams``); an empty one says goodbye, because a
half-closed stream does not survive the daemon. The other end answers with frames of one code byte and a text:
welcome, alive (every ``HEARTBEAT_S``), refused and why, goodbye. "Alive" also says how many bytes of messages
it has read, if its welcome said that it would (``Acknowledged``). The first message is the same signed hello
as over gRPC (``admission``); libp2p has proved the peer as well, and both must name the same.

Law of death: a killed process is noticed at once, silence after ``SILENCE_S``. Price against gRPC: three to
five times its CPU, as all bytes also pass a local socket and the Go daemon.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from p2p_co2.errors import PeerLost, RemoteProtocolError, TransportError
from p2p_co2.net.transport.addresses import address_of, is_relayed
from p2p_co2.net.transport.admission import MAX_HELLO_BYTES, MAX_INBOUND_LINKS, RELAYED, Admission, network_at
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
from p2p_co2.net.transport.flow import SAY_EVERY_S, Acknowledged, Seen
from p2p_co2.net.transport.libp2p.control import Stream, hang_up, open_stream_by, reach
from p2p_co2.net.transport.libp2p.hivemind import P2P, StreamInfo
from p2p_co2.net.transport.libp2p.streams import HEADER_BYTES, ServedStreams, framed, read_frame
from p2p_co2.net.transport.libp2p.upgrade import DIRECT, LinkUpgrades, way_in_words
from p2p_co2.protocol.wire.identity import Identity, PeerId, public_key_of
from p2p_co2.protocol.wire.limits import MAX_STRING, PROTOCOL_VERSION
from p2p_co2.protocol.wire.messages_pb2 import PeerRecord

PROTOCOL = f"/p2p-co2/{PROTOCOL_VERSION}/link"
WELCOME, REFUSED, GOODBYE, ALIVE = b"\0", b"\1", b"\2", b"\3"
SAYS_WHAT_CAME = "says what came"
"""Text of a welcome: each "alive" will say how many bytes of messages have come. Without it none does."""
HEARTBEAT_S = 5.0
SILENCE_S = 4 * HEARTBEAT_S
"""A link whose other end has not even said that it is alive for this long is dead."""
MAX_STREAMS = MAX_INBOUND_LINKS + 64
"""Inbound streams: the links, and those that read why they were refused."""
_MOST_UNREAD_BYTES = 64 << 10
_NO_CERTIFICATE = b""


class Libp2pCarrier:
    """Over a started ``P2P``, which stays the caller's; ``run`` is the digest of the run, ``newest`` as
    ``LinkUpgrades`` has it."""

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
        self._upgrades = LinkUpgrades(p2p, identity.peer_id, lambda: tuple(self._links), newest)
        self._inbound = ServedStreams(p2p, PROTOCOL, self._serve, MAX_STREAMS, MAX_STREAMS)
        self._on_message: OnMessage | None = None
        self._on_refused: OnRefused | None = None

    async def start(self, on_message: OnMessage, on_refused: OnRefused) -> None:
        """See ``Carrier``."""
        self._on_message, self._on_refused = on_message, on_refused
        await self._inbound.start()
        self._upgrades.start()

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
        link.way = way_in_words(way, self._upgrades.was_relayed(peer))
        self._upgrades.opened(link)
        self._links.add(link)
        try:
            await link.open(self._admission.hello(peer, _NO_CERTIFICATE))
        except BaseException:
            await link.drop("never opened")
            raise
        link.on_end(self._upgrades.ended)
        return link

    async def close(self) -> None:
        """See ``Carrier``."""
        await self._upgrades.stop()
        await asyncio.gather(*(link.close() for link in list(self._links)))
        await self._inbound.close()

    async def _serve(
        self, info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        assert self._on_refused is not None
        dialler, place = PeerId(info.peer_id.to_base58()), address_of(str(info.addr))
        network = network_at(place[0]) if place is not None else RELAYED
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
            while data := await _read_message(reader):
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
                sealed = await read_frame(reader, MAX_HELLO_BYTES)
        except TimeoutError:
            raise RemoteProtocolError("no hello", f"silent for {HELLO_TIMEOUT_S:.0f} s") from None
        except RemoteProtocolError as error:
            raise RemoteProtocolError("wrong hello", error.detail) from None
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
    """See ``Link``. The connection is the daemon's: nothing is known of it, and nothing can be changed."""

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
        return Seen()

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
                    self._writer.write(framed(b""))
                    await asyncio.shield(self._watcher)
            except TimeoutError:
                why = self._closing  # it is slow or gone: it is dropped, which is what closing means then
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
            self._writer.write(framed(data))
            await self._writer.drain()
        except OSError:
            raise PeerLost(await self.wait_closed()) from None

    async def _watch(self) -> str:
        """Read the peer's answers until the link ends; the cause in words."""
        cause = "the peer is gone"
        try:
            while True:
                async with asyncio.timeout(SILENCE_S):
                    answer = await read_frame(self._reader, 1 + MAX_STRING)
                if answer[:1] == WELCOME:
                    if answer[1:] == SAYS_WHAT_CAME.encode() and not self._welcome.is_set():
                        self.acknowledged = Acknowledged()
                    self._welcome.set()
                elif answer[:1] == ALIVE:
                    if self.acknowledged is not None:
                        self.acknowledged.hear(answer[1:], time.monotonic())
                else:
                    cause = "the peer closed the link"
                    if answer[:1] == REFUSED:
                        cause = f"the peer refused us: {answer[1:].decode(errors='replace')}"
                    break
        except TimeoutError:
            cause = f"the peer has been silent for {SILENCE_S:.0f} s"
        except RemoteProtocolError as error:
            cause = f"the peer answers nonsense: {error}"
        except (asyncio.IncompleteReadError, OSError):
            cause = "the peer is gone"
        self._welcome.set()
        self._writer.transport.abort()  # wakes a sender that waits for room
        return self._closing or cause


async def _read_message(reader: asyncio.StreamReader) -> bytes:
    """One message, empty at a goodbye. Raises ``RemoteProtocolError`` before it allocates too much, and for
    one that takes too long. Who says nothing at all may be asleep; who says a byte now and then is not."""
    reason, detail = "silent", "not a byte"
    try:
        async with asyncio.timeout(MESSAGE_TIMEOUT_S):
            head = await reader.readexactly(1)
        reason, detail = "too slow", "no whole message"
        async with asyncio.timeout(MESSAGE_TIMEOUT_S):
            length = int.from_bytes(head + await reader.readexactly(HEADER_BYTES - 1))
            if length:
                check_incoming(length)
            return await reader.readexactly(length)
    except TimeoutError:
        raise RemoteProtocolError(reason, f"{detail} in {MESSAGE_TIMEOUT_S:.0f} s") from None


def _answer(writer: asyncio.StreamWriter, code: bytes, text: str = "") -> None:
    writer.write(framed(code + text.encode()[:MAX_STRING]))


async def _until_gone(reader: asyncio.StreamReader) -> None:
    """Let the peer read our last answer: it hangs up then. What it still sends is thrown away, for a bounded
    time."""
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            while await reader.read(1 << 16):
                continue
    except TimeoutError:
        return
