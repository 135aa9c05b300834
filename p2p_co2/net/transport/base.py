"""What every carrier is: bytes between authenticated peers, in order, one direction per link.

Laws. A link carries messages of 1 to ``MAX_MESSAGE_BYTES`` bytes from the peer that dialled, in the order of
``send``, each at most once and unchanged. ``on_message`` of one link is awaited before its next message is
read, so a slow receiver slows its senders and nobody's memory grows. A link that brings no whole message
within ``MESSAGE_TIMEOUT_S`` is dropped. Every link begins with the same signed hello (``admission``), on a
channel that cannot be changed under way. Both ends notice at once when the other process dies.

Price: two links for a conversation. In return there is no question of who closes what, and each direction
may use another carrier.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from typing import Any, Protocol, TypeVar

from p2p_co2.errors import LocalProtocolError, Offence, PeerLost, RemoteProtocolError, TransportError
from p2p_co2.net.transport.admission import Admission
from p2p_co2.net.transport.flow import Acknowledged, Seen
from p2p_co2.system.clock import within
from p2p_co2.wire.identity import Identity, PeerId
from p2p_co2.wire.limits import MAX_DIALLED, MAX_MESSAGE_BYTES, MAX_PEERS
from p2p_co2.wire.messages_pb2 import PeerRecord

T = TypeVar("T")
CONNECT_TIMEOUT_S = 10.0
"""Bound on one attempt to reach one address."""
MESSAGE_TIMEOUT_S = 60.0
"""A link must bring a whole message within this: peers that live say so every second. Who trickles byte by
byte holds a link and its buffer no longer."""
CLOSE_TIMEOUT_S = 2.0
"""How long ``Link.close`` waits for the other end to have taken everything, and a daemon's answer then."""

DIALS_AT_ONCE = 8
"""Peers that a carrier dials at the same time, but for those that have dialled it."""

DIRECT = "direct"
"""The way of a link with nothing between."""

OnMessage = Callable[[PeerId, bytes], Coroutine[Any, Any, None]]
"""(sender, message). It may raise ``RemoteProtocolError``: the link is dropped and the error reported. It is
cancelled when the sender's link dies or the carrier closes while it waits."""
OnRefused = Callable[[PeerId | None, RemoteProtocolError], None]
"""(sender if it was proved, what it did): for counting and for the log."""


class Link:
    """One way to one peer. ``way``: how the bytes travel, in words. ``gone`` is called once it has ended.

    A carrier's own link says how a message is put on its way (``_put``, which raises ``ConnectionError``),
    how a goodbye is said, and how the link is cut off. ``_watch`` returns, in words, why it ended.
    """

    carrier = ""
    is_far = False
    """Whether it is a connection of its own over a far way, whose bulk takes turns on our line."""
    acknowledged: Acknowledged | None = None
    """What the peer says that it has of what was sent. None where it does not say: there ``send`` returns
    when the line takes a message."""

    def __init__(self, peer: PeerId, gone: Callable[[Link], None]) -> None:
        self.peer = peer
        self.way = DIRECT
        self._gone = gone
        self._sent_bytes = 0
        self._writing = asyncio.Lock()
        self._closing = ""
        """Why we end it; empty while we do not."""
        self._watcher = asyncio.create_task(self._watch(), name=f"{self.carrier} link to {peer}")

    def look(self) -> Seen:
        """What is known of the way, and of what has come there: what was handed over, if nobody says more."""
        return Seen(there_bytes=self._sent_bytes)

    async def open(self, hello: bytes, where: str) -> None:
        """Say hello and wait for the welcome. Raises ``TransportError``, which names ``where``."""
        try:
            async with within(CONNECT_TIMEOUT_S):
                await self._write(hello)
                if not await self._is_welcome():
                    raise TransportError(f"{where}: {await self.wait_closed()}")
        except TimeoutError:
            raise TransportError(f"{where} did not welcome us within {CONNECT_TIMEOUT_S:.0f} s") from None

    async def send(self, data: bytes) -> None:
        """Hand over one message; returns when there is room for the next.

        Calls from several tasks go out in the order of the calls. Cancelling it gives up the link. Raises
        ``PeerLost`` when the link is gone; what was sent before may be lost with it. Raises
        ``LocalProtocolError`` for a message that is empty or over ``MAX_MESSAGE_BYTES``.
        """
        if not 0 < len(data) <= MAX_MESSAGE_BYTES:
            raise LocalProtocolError(
                f"a message of {len(data)} bytes; carriers take 1 to {MAX_MESSAGE_BYTES}"
            )
        async with self._writing:
            await self._write(data)
        self._sent_bytes += len(data)

    async def close(self, why: str = "closed by us") -> None:
        """Say goodbye, wait up to ``CLOSE_TIMEOUT_S`` until the peer has taken all messages, give everything
        back."""
        if not self._watcher.done():
            self._closing = why
            with suppress(TimeoutError, ConnectionError):  # slow or gone: it is dropped
                async with asyncio.timeout(CLOSE_TIMEOUT_S), self._writing:
                    await self._say_goodbye()
                    await asyncio.shield(self._watcher)
        await self.drop(why)

    async def wait_closed(self) -> str:
        """Wait until the link is gone; returns the cause in words. Safe to cancel."""
        return await asyncio.shield(self._watcher)

    def on_end(self, ended: Callable[[], None]) -> None:
        """Call ``ended`` when the link has ended and we did not close it."""
        self._watcher.add_done_callback(lambda _: None if self._closing else ended())

    async def drop(self, cause: str) -> None:
        """End the link without a goodbye."""
        self._closing = self._closing or cause
        await self._cut_off()
        self._gone(self)

    async def _write(self, data: bytes) -> None:
        if self._watcher.done() or self._closing:
            raise PeerLost(self._closing or self._watcher.result())
        try:
            await self._put(data)
        except asyncio.CancelledError:
            self._closing = "a send was cancelled"
            raise
        except ConnectionError:
            raise PeerLost(await self.wait_closed()) from None

    async def _put(self, data: bytes) -> None:
        raise NotImplementedError

    async def _is_welcome(self) -> bool:
        raise NotImplementedError

    async def _say_goodbye(self) -> None:
        raise NotImplementedError

    async def _cut_off(self) -> None:
        raise NotImplementedError

    async def _watch(self) -> str:
        raise NotImplementedError


class Dials:
    """Which addresses of others' records are dialled, since those may name anybody: where no peer of ours has
    answered yet once a minute. ``places``: for those that are dialled at once."""

    def __init__(self) -> None:
        self.places = asyncio.Semaphore(DIALS_AT_ONCE)
        self._free_at: dict[str, float] = {}
        """By address; below 0 where a peer has answered."""

    def due(self, addresses: Sequence[str], now: float) -> Iterator[str]:
        """Those of a record that are to be dialled, one after the other. Raises ``TransportError`` if it
        names some and none is due."""
        has_due = not addresses
        for one in list(dict.fromkeys(addresses))[:MAX_DIALLED]:
            place = one.partition("/p2p/")[0]  # whoever is said to be there, or behind it
            free_at = self._free_at.get(place, 0.0)
            if free_at <= now:
                has_due = True
                self._free_at[place] = free_at if free_at < 0 else now + MESSAGE_TIMEOUT_S
                if len(self._free_at) > MAX_DIALLED * MAX_PEERS:
                    del self._free_at[next(iter(self._free_at))]
                yield one
        if not has_due:
            raise TransportError("nobody answered at its addresses within the last minute")

    def answered(self, address: str) -> None:
        """A peer of ours is there."""
        self._free_at[address.partition("/p2p/")[0]] = -1.0


class Brake(Protocol):
    """What slows a carrier down; see ``slow``."""

    def taking(self, on_message: OnMessage) -> OnMessage: ...
    async def carrying(self, link: Link) -> Link: ...


class Carrier:
    """A way to reach peers and to be reached. ``run``: the digest of the run; ``clock``: unix seconds.

    A carrier's own half says how it listens and ends (``_listen``, ``_stop``), and how it reaches an address
    (``_dial``).
    """

    name = ""
    """ "grpc" or "libp2p"."""
    line: Brake | None = None
    """Set before ``start``, for rehearsals."""

    def __init__(self, identity: Identity, run: bytes, clock: Callable[[], float]) -> None:
        self.admission = Admission(identity, run, clock)
        self.dials = Dials()
        self.links: set[Link] = set()
        """Those that we opened."""
        self.on_message: OnMessage
        self.on_refused: OnRefused

    async def start(self, on_message: OnMessage, on_refused: OnRefused) -> None:
        """Begin to listen. Raises ``EnvironmentFault`` with the fix when this machine does not let us."""
        self.on_message = on_message if self.line is None else self.line.taking(on_message)
        self.on_refused = on_refused
        await self._listen()

    async def connect(self, record: PeerRecord) -> Link:
        """Open a link to the peer of ``record``, in bounded time.

        Raises ``TransportError`` with the cause in words: nobody there, somebody else there, or refused. Safe
        to cancel.
        """
        is_inside = self.admission.is_inside(PeerId(record.peer))
        try:
            async with nullcontext() if is_inside else self.dials.places, within(2 * CONNECT_TIMEOUT_S):
                link = await self._dial(record)
        except TimeoutError:
            raise TransportError("no way to it was open in time") from None
        return link if self.line is None else await self.line.carrying(link)

    async def close(self) -> None:
        """Drop all links, stop listening; no task, thread or socket of this carrier is left. May be called
        twice."""
        await asyncio.gather(*(link.close() for link in list(self.links)))
        await self._stop()

    async def _listen(self) -> None:
        raise NotImplementedError

    async def _dial(self, record: PeerRecord) -> Link:
        raise NotImplementedError

    async def _stop(self) -> None:
        raise NotImplementedError

    async def _open(self, link: Link, certificate_digest: bytes, where: str) -> None:
        """Return once a link is welcome. Raises ``TransportError``; nothing is left then."""
        self.links.add(link)
        try:
            await link.open(self.admission.hello(link.peer, certificate_digest), where)
        except BaseException:
            await link.drop("never opened")
            raise

    @asynccontextmanager
    async def _admitted(
        self, read_hello: Callable[[], Awaitable[bytes]], certificate_digest: bytes, network: str
    ) -> AsyncIterator[PeerId]:
        """The peer that dialled from ``network``, while its link lasts. Raises ``RemoteProtocolError``."""
        self.admission.knock(network)
        try:
            async with within(CONNECT_TIMEOUT_S):
                sealed = await read_hello()
        except TimeoutError:
            raise RemoteProtocolError("no hello", f"silent for {CONNECT_TIMEOUT_S:.0f} s") from None
        finally:
            self.admission.forget(network)
        peer = self.admission.admit(sealed, certificate_digest, network)
        try:
            yield peer
        finally:
            self.admission.leave(peer, network)


async def in_time(read: Awaitable[T], reason: str = Offence.TOO_SLOW, what: str = "no whole message") -> T:
    """What is read of a message. Raises ``RemoteProtocolError`` when it takes too long."""
    try:
        async with within(MESSAGE_TIMEOUT_S):
            return await read
    except TimeoutError:
        raise RemoteProtocolError(reason, f"{what} in {MESSAGE_TIMEOUT_S:.0f} s") from None


def check_incoming(length_bytes: int) -> None:
    """Raise ``RemoteProtocolError`` for the length of a message that no peer may send."""
    if not 0 < length_bytes <= MAX_MESSAGE_BYTES:
        detail = f"{length_bytes} bytes; at most {MAX_MESSAGE_BYTES}"
        raise RemoteProtocolError(Offence.WRONG_MESSAGE_SIZE, detail)


def refused_for_s(cause: str) -> float:
    """For how long a peer that ended or refused a link says that it hears us no more; 0 if it does not
    say."""
    named = re.search(r"refused us: .*for (\d{1,4}) s more", cause)
    return float(named[1]) if named is not None else 0.0
