"""The carrier for peers that cannot be dialled directly: raw libp2p streams through the daemon.

A link is one stream. The dialler writes frames (``streams``); an empty one says goodbye, because a
half-closed stream does not survive the daemon. The other end answers with frames of one code byte and a text:
welcome, refused and why, goodbye, and now and then "alive", with how many bytes of messages it has read.
libp2p has proved the peer as well as its hello does, and both must name the same.

Law of death: a killed process is noticed at once, silence after ``SILENCE_S``. Price against gRPC: three to
five times its CPU, as all bytes also pass a local socket and the Go daemon.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from p2p_co2.errors import RemoteProtocolError, TransportError
from p2p_co2.net.transport.addresses import address_of, is_relayed
from p2p_co2.net.transport.admission import MAX_HELLO_BYTES, MAX_INBOUND_LINKS, RELAYED, network_at
from p2p_co2.net.transport.base import (
    CLOSE_TIMEOUT_S,
    CONNECT_TIMEOUT_S,
    MESSAGE_TIMEOUT_S,
    OnMessage,
    OnRefused,
    check_incoming,
)
from p2p_co2.net.transport.flow import Acknowledged
from p2p_co2.net.transport.libp2p.control import Stream, hang_up, open_stream_by, reach
from p2p_co2.net.transport.libp2p.hivemind import P2P, StreamInfo
from p2p_co2.net.transport.libp2p.streams import HEADER_BYTES, ServedStreams, framed, read_frame
from p2p_co2.net.transport.libp2p.upgrade import LinkUpgrades, way_in_words
from p2p_co2.net.transport.signed import SignedCarrier, SignedLink
from p2p_co2.protocol.wire.identity import Identity, PeerId, public_key_of
from p2p_co2.protocol.wire.limits import MAX_STRING, PROTOCOL_VERSION
from p2p_co2.protocol.wire.messages_pb2 import PeerRecord

PROTOCOL = f"/p2p-co2/{PROTOCOL_VERSION}/link"
WELCOME, REFUSED, GOODBYE, ALIVE = b"\0", b"\1", b"\2", b"\3"
SILENCE_S = 2 * CONNECT_TIMEOUT_S
"""A link whose other end has not even said that it is alive for this long is dead."""
SAY_EVERY_S = 0.01
"""A receiver says what it has at most this often."""
MAX_STREAMS = MAX_INBOUND_LINKS + 64
"""Inbound streams: the links, and those that read why they were refused."""
_MOST_UNREAD_BYTES = 64 << 10
_NO_CERTIFICATE = b""


class Libp2pCarrier(SignedCarrier):
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
        super().__init__(identity, run, clock)
        self.p2p = p2p
        self._upgrades = LinkUpgrades(
            p2p, identity.peer_id, lambda: [one for one in self.links if isinstance(one, Libp2pLink)], newest
        )
        self.inbound = ServedStreams(p2p, PROTOCOL, self._serve, MAX_STREAMS, MAX_STREAMS)

    async def start(self, on_message: OnMessage, on_refused: OnRefused) -> None:
        """See ``Carrier``."""
        self.on_message, self.on_refused = on_message, on_refused
        await self.inbound.start()
        self._upgrades.start()

    async def connect(self, record: PeerRecord) -> Libp2pLink:
        """See ``Carrier``; without usable ``maddrs`` the daemon asks its routing table for the peer."""
        try:
            public_key_of(record.peer)
        except RemoteProtocolError as error:
            raise TransportError(str(error)) from None
        peer = PeerId(record.peer)
        await reach(self.p2p, peer, record.maddrs, CONNECT_TIMEOUT_S)
        stream, way = await open_stream_by(self.p2p, peer, PROTOCOL, CONNECT_TIMEOUT_S)
        link = Libp2pLink(peer, stream, self.links.discard)
        link.maddrs, link.is_relayed = tuple(record.maddrs), is_relayed(way)
        link.way = way_in_words(way, self._upgrades.was_relayed(peer))
        await self._opened(link, _NO_CERTIFICATE, f"{peer} by libp2p")
        self._upgrades.opened(link)
        link.on_end(lambda: self._upgrades.ended(link))
        return link

    async def close(self) -> None:
        """See ``Carrier``."""
        await self._upgrades.stop()
        await self._close_links()
        await self.inbound.close()

    async def _serve(
        self, info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        dialler, place = PeerId(info.peer_id.to_base58()), address_of(str(info.addr))
        network = network_at(place[0]) if place is not None else RELAYED
        try:
            async with self._admitted(lambda: _hello(reader), _NO_CERTIFICATE, network) as peer:
                if peer != dialler:
                    raise RemoteProtocolError("wrong hello", f"signed by {peer}, sent by {dialler}")
                _answer(writer, WELCOME)
                await self._take_messages(peer, reader, writer)
                _answer(writer, GOODBYE)
                await _until_gone(reader)
        except RemoteProtocolError as error:
            self.on_refused(dialler, error)
            _answer(writer, REFUSED, str(error))
            await _until_gone(reader)

    async def _take_messages(
        self, peer: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        receipt = Receipt(writer)
        beating = asyncio.create_task(receipt.beat(), name=f"heartbeat to {peer}")
        try:
            while data := await _read_message(reader):
                receipt.came(len(data))
                await self.on_message(peer, data)
        finally:
            receipt.stop()
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)


class Receipt:
    """Says to a dialler that we are alive and how much has come, also while a message is being worked on. One
    that does not read what we say is told nothing more until it does."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self.came_bytes = 0
        self._due: asyncio.TimerHandle | None = None

    def came(self, size_bytes: int) -> None:
        """A message has been read."""
        self.came_bytes += size_bytes
        if self._due is None:
            self._due = asyncio.get_running_loop().call_later(SAY_EVERY_S, self._say)

    async def beat(self) -> None:
        """Say it now and then, for ever."""
        while True:
            await asyncio.sleep(SILENCE_S / 4)
            self._say()

    def stop(self) -> None:
        """Say nothing more of what came."""
        if self._due is not None:
            self._due.cancel()

    def _say(self) -> None:
        self.stop()
        self._due = None
        if self._writer.transport.get_write_buffer_size() < _MOST_UNREAD_BYTES:
            _answer(self._writer, ALIVE, str(self.came_bytes))


class Libp2pLink(SignedLink):
    """See ``Link``. The connection is the daemon's, which puts all streams to a peer into one: nothing is
    known of it, and nothing can be changed."""

    carrier = "libp2p"

    def __init__(self, peer: PeerId, stream: Stream, gone: Callable[[SignedLink], None]) -> None:
        self._reader, self._writer = stream
        self._welcome = asyncio.Event()
        self.is_relayed = False
        self.maddrs: tuple[str, ...] = ()
        """Where the peer said that it can be reached."""
        super().__init__(peer, gone)

    async def _put(self, data: bytes) -> None:
        if self.acknowledged is not None:
            self.acknowledged.sent(len(data), time.monotonic())
        self._writer.write(framed(data))
        await self._writer.drain()

    async def _is_welcome(self) -> bool:
        await self._welcome.wait()
        return not self._watcher.done()

    async def _say_goodbye(self) -> None:
        self._writer.write(framed(b""))

    async def _cut_off(self) -> None:
        await hang_up(self._writer)
        await self._watcher

    async def _watch(self) -> str:
        """Read the peer's answers until the link ends; the cause in words."""
        cause = "the peer is gone"
        try:
            while True:
                async with asyncio.timeout(SILENCE_S):
                    answer = await read_frame(self._reader, 1 + MAX_STRING)
                code, text = answer[:1], answer[1:]
                if code == WELCOME and self.acknowledged is None:
                    self.acknowledged = Acknowledged()
                    self._welcome.set()
                elif code == ALIVE and self.acknowledged is not None:
                    self.acknowledged.hear(text, time.monotonic())
                else:
                    cause = "the peer closed the link"
                    if code == REFUSED:
                        cause = f"the peer refused us: {text.decode(errors='replace')}"
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


async def _hello(reader: asyncio.StreamReader) -> bytes:
    try:
        return await read_frame(reader, MAX_HELLO_BYTES)
    except RemoteProtocolError as error:
        raise RemoteProtocolError("wrong hello", error.detail) from None


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
