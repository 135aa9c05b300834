"""What the carriers share: who is let in at the door of a link, and how a link that we opened is used and
ends.

A carrier adds how a hello and messages travel: it derives from ``SignedCarrier`` and its links from
``SignedLink``. Every link begins with the same signed hello (``admission``).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

from p2p_co2.errors import PeerLost, RemoteProtocolError, TransportError
from p2p_co2.net.transport.admission import Admission
from p2p_co2.net.transport.base import (
    CLOSE_TIMEOUT_S,
    CONNECT_TIMEOUT_S,
    DIRECT,
    OnMessage,
    OnRefused,
    check_outgoing,
)
from p2p_co2.net.transport.flow import Acknowledged, Seen
from p2p_co2.protocol.wire.identity import Identity, PeerId


class SignedLink:
    """A ``Link`` that begins with our hello. ``gone`` is called once it has ended.

    A subclass says how a message is put on its way (``_put``, which raises ``ConnectionError``), how a
    goodbye is said, how the link is cut off, and when and why it ended (``_watch``, in words).
    """

    carrier = ""
    acknowledged: Acknowledged | None = None

    def __init__(self, peer: PeerId, gone: Callable[[SignedLink], None]) -> None:
        self.peer, self.way = peer, DIRECT
        self._gone = gone
        self._writing = asyncio.Lock()
        self._closing = ""
        """Why we end it; empty while we do not."""
        self._watcher = asyncio.create_task(self._watch(), name=f"{self.carrier} link to {peer}")

    @property
    def is_far(self) -> bool:
        """See ``Link``."""
        return False

    def look(self) -> Seen:
        """See ``Link``."""
        return Seen()

    async def open(self, hello: bytes, where: str) -> None:
        """Say hello and wait for the welcome. Raises ``TransportError``, which names ``where``."""
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await self._write(hello)
                if not await self._is_welcome():
                    raise TransportError(f"{where}: {await self.wait_closed()}")
        except TimeoutError:
            raise TransportError(f"{where} did not welcome us within {CONNECT_TIMEOUT_S:.0f} s") from None

    async def send(self, data: bytes) -> None:
        """See ``Link``."""
        check_outgoing(data)
        async with self._writing:
            await self._write(data)

    async def close(self, why: str = "closed by us") -> None:
        """See ``Link``."""
        if not self._watcher.done():
            self._closing = why
            with suppress(
                TimeoutError, ConnectionError
            ):  # slow or gone: dropped, which is what closing means
                async with asyncio.timeout(CLOSE_TIMEOUT_S), self._writing:
                    await self._say_goodbye()
                    await asyncio.shield(self._watcher)
        await self.drop(why)

    async def wait_closed(self) -> str:
        """See ``Link``."""
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


_Link = TypeVar("_Link", bound=SignedLink)


class SignedCarrier:
    """The half of a ``Carrier`` that is the same for all. ``run`` is the digest of the run; ``clock`` gives
    unix seconds."""

    def __init__(self, identity: Identity, run: bytes, clock: Callable[[], float]) -> None:
        self.admission = Admission(identity, run, clock)
        self.links: set[SignedLink] = set()
        """Those that we opened."""
        self.on_message: OnMessage = _drop
        self.on_refused: OnRefused = lambda peer, error: None

    def keep_places(self, is_known: Callable[[PeerId], bool]) -> None:
        """See ``Carrier``."""
        self.admission.is_known = is_known

    async def _opened(self, link: _Link, certificate_digest: bytes, where: str) -> _Link:
        """The link once it is welcome. Raises ``TransportError``; nothing is left then."""
        self.links.add(link)
        try:
            await link.open(self.admission.hello(link.peer, certificate_digest), where)
        except BaseException:
            await link.drop("never opened")
            raise
        return link

    @asynccontextmanager
    async def _admitted(
        self, read_hello: Callable[[], Awaitable[bytes]], certificate_digest: bytes, network: str
    ) -> AsyncIterator[PeerId]:
        """The peer that dialled from ``network``, while its link lasts. Raises ``RemoteProtocolError``."""
        self.admission.knock(network)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
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

    async def _close_links(self) -> None:
        await asyncio.gather(*(link.close() for link in list(self.links)))


async def _drop(sender: PeerId, data: bytes) -> None:
    """Before ``start`` nobody takes messages."""
