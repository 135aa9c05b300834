"""The carrier for peers that cannot be dialled directly: raw libp2p streams through the daemon.

A link is one stream. The dialler writes frames (``streams``); an empty one says goodbye, because a
half-closed stream does not survive the daemon. The other end answers with frames of one code byte and a text:
welcome, refused and why, goodbye. Now and then it says "alive", and how many bytes of messages it has read.
libp2p has proved the peer as well as its hello does, and both must name the same.

A stream stays on the connection that it was opened on. So ``LinkUpgrades`` moves relayed links to a direct
connection where there is one, or a hole can be punched. Law of death: a killed process is noticed at once,
silence after 20 s. Price against gRPC: three to five times its CPU, as all bytes also pass a local socket and
the Go daemon.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from p2p_co2.errors import RemoteProtocolError, TransportError
from p2p_co2.net.transport.addresses import address_of, is_public_maddr, is_relayed
from p2p_co2.net.transport.admission import (
    MAX_HELLO_BYTES,
    MAX_INBOUND_LINKS,
    MAX_STRANGERS,
    RELAYED,
    network_at,
)
from p2p_co2.net.transport.base import (
    CLOSE_TIMEOUT_S,
    CONNECT_TIMEOUT_S,
    DIRECT,
    Carrier,
    Link,
    check_incoming,
    in_time,
)
from p2p_co2.net.transport.flow import Acknowledged, Seen
from p2p_co2.net.transport.libp2p.control import (
    Stream,
    hang_up,
    hang_up_on,
    open_stream,
    own_maddrs,
    reach,
    ways_to_peers,
)
from p2p_co2.net.transport.libp2p.hivemind import P2P
from p2p_co2.net.transport.libp2p.streams import HEADER_BYTES, Asker, ServedStreams, framed, read_frame
from p2p_co2.system.clock import within
from p2p_co2.wire.identity import Identity, PeerId, public_key_of
from p2p_co2.wire.limits import MAX_PEERS, MAX_STRING, PROTOCOL_VERSION
from p2p_co2.wire.messages_pb2 import PeerRecord

PROTOCOL = f"/p2p-co2/{PROTOCOL_VERSION}/link"
WELCOME = b"\0"
REFUSED = b"\1"
GOODBYE = b"\2"
ALIVE = b"\3"
SAY_EVERY_S = 0.01
"""A receiver says what it has at most this often."""
LOOKS_BEFORE = 2
"""A connection that is still relayed after so many looks is made anew: libp2p needs 15 s to find out that
nobody can dial it."""
_NO_CERTIFICATE = b""


class Libp2pCarrier(Carrier):
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
        # The links, and those that read why they were refused.
        most_streams = MAX_INBOUND_LINKS + MAX_STRANGERS
        self.inbound = ServedStreams(p2p, PROTOCOL, self._serve, most_streams, most_streams)

    async def _listen(self) -> None:
        await self.inbound.start()
        self._upgrades.start()

    async def _dial(self, record: PeerRecord) -> Libp2pLink:
        """Without usable ``maddrs`` the daemon asks its routing table for the peer."""
        try:
            public_key_of(record.peer)
        except RemoteProtocolError as error:
            raise TransportError(str(error)) from None
        peer = PeerId(record.peer)
        # One that holds a link to us is connected already.
        named = () if self.admission.is_inside(peer) else record.maddrs
        due = list(self.dials.due(named, time.monotonic()))
        await reach(self.p2p, peer, due, CONNECT_TIMEOUT_S)
        stream = await open_stream(self.p2p, peer, PROTOCOL, CONNECT_TIMEOUT_S)
        link = Libp2pLink(peer, stream, tuple(record.maddrs), self.links.discard)
        await self._open(link, _NO_CERTIFICATE, f"{peer} by libp2p")
        for one in due:
            if stream.way and one.startswith(stream.way):
                self.dials.answered(one)
        self._upgrades.opened(link)
        link.on_end(lambda: self._upgrades.ended(link))
        return link

    async def close(self) -> None:
        """See ``Carrier``; first of all nobody dials any more."""
        await self._upgrades.stop()
        await super().close()

    async def _stop(self) -> None:
        await self.inbound.close()

    async def _serve(self, asker: Asker, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        dialler = asker.peer
        place = address_of(asker.maddr)
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
        saying = asyncio.create_task(receipt.say(), name=f"receipts to {peer}")
        try:
            while data := await _read_message(reader):
                receipt.came(len(data))
                await self.on_message(peer, data)
        finally:
            saying.cancel()
            await asyncio.gather(saying, return_exceptions=True)


class Receipt:
    """Says to a dialler that we are alive and how much has come, also while a message is being worked on. One
    that does not read what we say is told nothing more until it does."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self.came_bytes = 0
        self._news = asyncio.Event()

    def came(self, size_bytes: int) -> None:
        """A message has been read."""
        self.came_bytes += size_bytes
        self._news.set()

    async def say(self) -> None:
        """Say it when there is news, and now and then, until cancelled."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(CONNECT_TIMEOUT_S / 2):
                    await self._news.wait()
            self._news.clear()
            if self._writer.transport.get_write_buffer_size() < MAX_STRING:
                _answer(self._writer, ALIVE, str(self.came_bytes))
            await asyncio.sleep(SAY_EVERY_S)


class Libp2pLink(Link):
    """See ``Link``. The connection is the daemon's, which puts all streams to a peer into one: nothing is
    known of it, and nothing can be changed. ``maddrs``: where the peer said that it can be reached."""

    carrier = "libp2p"

    def __init__(
        self, peer: PeerId, stream: Stream, maddrs: tuple[str, ...], gone: Callable[[Link], None]
    ) -> None:
        self._reader, self._writer, way = stream
        self._welcome = asyncio.Event()
        self.maddrs = maddrs
        self.is_relayed = is_relayed(way)
        super().__init__(peer, gone)
        if self.is_relayed:
            self.way = " by ".join(("relayed", *way.split("/")[2:3]))

    def look(self) -> Seen:
        """See ``Link``: the other end says what it has."""
        if self.acknowledged is None:
            return super().look()
        return Seen(there_bytes=self.acknowledged.arrived_bytes, is_word=True)

    async def _put(self, data: bytes) -> None:
        if self.acknowledged is not None:
            self.acknowledged.sent(len(data), time.monotonic())
        self._put_frame(data)
        await self._writer.drain()

    def _put_frame(self, data: bytes) -> None:
        """Raises ``ConnectionError`` where the stream has ended a moment ago, which the watcher has yet to
        see."""
        if self._writer.is_closing():
            raise ConnectionResetError("the stream has ended")
        self._writer.write(framed(data))

    async def _is_welcome(self) -> bool:
        await self._welcome.wait()
        return not self._watcher.done()

    async def _say_goodbye(self) -> None:
        self._put_frame(b"")

    async def _cut_off(self) -> None:
        await hang_up(self._writer)
        await self._watcher

    async def _watch(self) -> str:
        """Read the peer's answers until the link ends; the cause in words."""
        cause = "the peer is gone"
        try:
            while True:
                async with within(2 * CONNECT_TIMEOUT_S):
                    answer = await read_frame(self._reader, 1 + MAX_STRING)
                code = answer[:1]
                text = answer[1:]
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
            cause = f"the peer has been silent for {2 * CONNECT_TIMEOUT_S:.0f} s"
        except RemoteProtocolError as error:
            cause = f"the peer answers nonsense: {error}"
        except (asyncio.IncompleteReadError, OSError):
            cause = "the peer is gone"
        self._welcome.set()
        self._writer.transport.abort()  # wakes a sender that waits for room
        return self._closing or cause


class LinkUpgrades:
    """Closes a relayed link, to be opened anew, when a direct connection to its peer is there.

    libp2p tries to punch a hole only when a relayed connection comes in, when it may not know its own public
    address yet. So the peer with the smaller id makes the connection anew, once, when both ends say that they
    have such an address. The other end dials at the same moment: some routers drop what only one side opened.

    ``links`` gives the links that are open now, ``newest`` the addresses in a peer's last record, none if it
    is not known. ``start`` and ``stop`` in the loop of ``p2p``. Law: what a link was sent before it moves
    arrives. Price: where the one try fails, the two stay on their relay.
    """

    def __init__(
        self,
        p2p: P2P,
        me: PeerId,
        links: Callable[[], Iterable[Libp2pLink]],
        newest: Callable[[PeerId], Sequence[str]],
    ) -> None:
        self._p2p = p2p
        self._me = me
        self._links = links
        self._newest = newest
        self._looks: dict[PeerId, int] = {}
        """How often each peer that was ever met through a relay was seen there; more than ``LOOKS_BEFORE``:
        its try has been made."""
        self._tasks: dict[PeerId, asyncio.Task[None]] = {}
        """What looks after links, under our own id, and dials."""

    def start(self) -> None:
        """Look after links from now on."""
        self._tasks[self._me] = asyncio.create_task(self._look_after(), name="upgrades of libp2p links")

    async def stop(self) -> None:
        """Leave links as they are. May be called twice."""
        tasks = self._tasks
        self._tasks = {}  # first: links may end while we wait, and nobody dials now
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)

    def opened(self, link: Libp2pLink) -> None:
        """Remember a new link's way, and name the one that is better than before."""
        if not link.is_relayed and link.peer in self._looks:
            link.way = f"{DIRECT}, through a punched hole"
        elif link.is_relayed and len(self._looks) < MAX_PEERS:
            self._looks.setdefault(link.peer, 0)

    def ended(self, link: Libp2pLink) -> None:
        """A link has ended that we did not close. If the other end is making the connection anew, this one
        has to dial now; once at a time, however often a liar hangs up."""
        if link.is_relayed and self._me > link.peer and self._tasks and link.peer not in self._tasks:
            self._tasks[link.peer] = asyncio.create_task(self._dial(link), name=f"dial {link.peer}")

    async def _dial(self, link: Libp2pLink) -> None:
        # If it is gone, who has something to send to it will say so.
        with suppress(TransportError):
            await reach(self._p2p, link.peer, self._maddrs(link), CONNECT_TIMEOUT_S)
        self._tasks.pop(link.peer, None)

    async def _look_after(self) -> None:
        while True:
            await asyncio.sleep(1.5 * CONNECT_TIMEOUT_S)
            with suppress(TransportError):  # the daemon is busy or gone; the links themselves tell of it
                await self.look()

    async def look(self) -> None:
        """Close links whose peer has a direct connection, and make those anew whose turn it is. Raises
        ``TransportError``."""
        relayed = [link for link in self._links() if link.is_relayed]
        ways = await ways_to_peers(self._p2p, CONNECT_TIMEOUT_S) if relayed else {}
        for link in relayed:
            peer = link.peer
            looks = self._looks.get(link.peer, 0)
            if any(not is_relayed(way) for way in ways.get(peer, ())):
                await link.close("moving to a direct connection")
            elif looks < LOOKS_BEFORE:
                self._looks[peer] = looks + 1
            # The other end does it where its id is the smaller one.
            elif looks == LOOKS_BEFORE and self._me < peer and await self._may_punch(link):
                self._looks[peer] = looks + 1
                await hang_up_on(self._p2p, peer, CONNECT_TIMEOUT_S)
                await reach(self._p2p, peer, self._maddrs(link), CONNECT_TIMEOUT_S)

    async def _may_punch(self, link: Libp2pLink) -> bool:
        """Whether both ends know an address of theirs that the world sees."""
        own = await own_maddrs(self._p2p, CONNECT_TIMEOUT_S)
        return all(any(map(is_public_maddr, maddrs)) for maddrs in (own, self._maddrs(link)))

    def _maddrs(self, link: Libp2pLink) -> tuple[str, ...]:
        """Where the other end is. A link lives for long, and who has just started does not know its own
        public address when its first links are opened."""
        return tuple(self._newest(link.peer) or link.maddrs)


async def _hello(reader: asyncio.StreamReader) -> bytes:
    try:
        return await read_frame(reader, MAX_HELLO_BYTES)
    except RemoteProtocolError as error:
        raise RemoteProtocolError("wrong hello", error.detail) from None


async def _read_message(reader: asyncio.StreamReader) -> bytes:
    """One message, empty at a goodbye. Raises ``RemoteProtocolError`` before it allocates too much, and for
    one that takes too long. Who says nothing at all may be asleep; who says a byte now and then is not."""
    head = await in_time(reader.readexactly(1), "silent", "not a byte")

    async def rest() -> bytes:
        length = int.from_bytes(head + await reader.readexactly(HEADER_BYTES - 1))
        if length:
            check_incoming(length)
        return await reader.readexactly(length)

    return await in_time(rest())


def _answer(writer: asyncio.StreamWriter, code: bytes, text: str = "") -> None:
    writer.write(framed(code + text.encode()[:MAX_STRING]))


async def _until_gone(reader: asyncio.StreamReader) -> None:
    """Let the peer read our last answer: it hangs up then. What it still sends is thrown away, for a bounded
    time."""
    with suppress(TimeoutError):
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            while await reader.read(1 << 16):
                continue
