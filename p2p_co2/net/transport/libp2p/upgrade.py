"""Relayed libp2p links move to direct connections where there is one, or a hole can be punched.

A stream stays on the connection that it was opened on. So a relayed link is closed, to be opened anew, when a
direct connection is there. And libp2p tries to punch a hole only when a relayed connection comes in, when it
may not know its own public address yet. So the peer with the smaller id makes the connection anew, at growing
intervals, as long as both ends say that they have such an address.

The other end must dial at the same moment: a router that follows sequence numbers drops what only one side
opened, and takes the port for a minute. With such routers 12 of 13 holes were punched where both dialled
within 0.7 s, and none of six otherwise. Law: what a link was sent before it moves arrives; only a message
that is just being handed over may be lost, as with any link that ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

from p2p_co2.errors import TransportError
from p2p_co2.net.transport.addresses import is_public_maddr, is_relayed
from p2p_co2.net.transport.base import CONNECT_TIMEOUT_S
from p2p_co2.net.transport.libp2p.control import hang_up_on, own_maddrs, reach, ways_to_peers
from p2p_co2.net.transport.libp2p.hivemind import P2P
from p2p_co2.protocol.wire.identity import PeerId

DIRECT = "direct"
LOOK_EVERY_S = 15.0
ANEW_AFTER_S = (45.0, 180.0, 180.0, 600.0, 3600.0)
"""Seconds after a link was first relayed at which the connection is made anew to punch a hole; then as often
as the last of them. What is left of a try that failed is gone after two minutes, in Linux."""
MAX_REMEMBERED = 4096


class RelayedLink(Protocol):
    """What is needed of a link. ``maddrs``: where its peer said that it can be reached."""

    @property
    def peer(self) -> PeerId: ...
    @property
    def is_relayed(self) -> bool: ...
    @property
    def maddrs(self) -> Collection[str]: ...

    async def close(self, why: str = ...) -> None: ...


def way_in_words(maddr: str, was_relayed: bool) -> str:
    """How bytes travel to this address. ``was_relayed``: an earlier link to the peer was."""
    if is_relayed(maddr):
        fields = maddr.split("/")
        return f"relayed by {fields[2]}" if len(fields) > 2 else "relayed"
    return f"{DIRECT}, through a punched hole" if was_relayed else DIRECT


class LinkUpgrades:
    """``links`` gives the links that are open now, ``newest`` the addresses in a peer's last record, none if
    it is not known. ``start`` and ``stop`` in the loop of ``p2p``."""

    def __init__(
        self,
        p2p: P2P,
        me: PeerId,
        links: Callable[[], Iterable[RelayedLink]],
        newest: Callable[[PeerId], Sequence[str]] = lambda peer: (),
    ) -> None:
        self._p2p, self._me, self._links, self._newest = p2p, me, links, newest
        self._relayed_since: dict[PeerId, float] = {}
        self._tries: dict[PeerId, int] = {}
        self._task: asyncio.Task[None] | None = None
        self._dialling: dict[PeerId, asyncio.Task[None]] = {}

    def start(self) -> None:
        self._task = asyncio.create_task(self._look_after(), name="upgrades of libp2p links")

    async def stop(self) -> None:
        """May be called twice."""
        looking, self._task = self._task, None  # first: links may end while we wait, and nobody dials now
        if looking is not None:
            tasks = [looking, *self._dialling.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def was_relayed(self, peer: PeerId) -> bool:
        return peer in self._relayed_since

    def opened(self, link: RelayedLink) -> None:
        """Remember a new link's way."""
        if link.is_relayed and len(self._relayed_since) < MAX_REMEMBERED:
            self._relayed_since.setdefault(link.peer, time.monotonic())

    def ended(self, link: RelayedLink) -> None:
        """A link has ended that we did not close. If the other end is making the connection anew, this one
        has to dial now; once at a time, however often a liar hangs up."""
        peer = link.peer
        if link.is_relayed and self._me > peer and self._task is not None and peer not in self._dialling:
            task = self._dialling[peer] = asyncio.create_task(self._dial(link), name=f"dial {peer}")
            task.add_done_callback(lambda _: self._dialling.pop(peer))

    async def _dial(self, link: RelayedLink) -> None:
        try:
            await reach(self._p2p, link.peer, self._maddrs(link), CONNECT_TIMEOUT_S)
        except TransportError:
            return  # it is gone: who has something to send to it will say so

    async def _look_after(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            relayed = [link for link in self._links() if link.is_relayed]
            try:
                await self._improve(relayed)
            except TransportError:
                continue  # the daemon is busy or gone; the links themselves tell of it

    async def _improve(self, relayed: list[RelayedLink]) -> None:
        ways = await ways_to_peers(self._p2p, CONNECT_TIMEOUT_S) if relayed else {}
        for link in relayed:
            if any(not is_relayed(way) for way in ways.get(link.peer, ())):
                await link.close("moving to a direct connection")
            elif self._is_due(link.peer) and await self._may_punch(link):
                self._tries[link.peer] = self._tries.get(link.peer, 0) + 1
                await hang_up_on(self._p2p, link.peer, CONNECT_TIMEOUT_S)
                await reach(self._p2p, link.peer, self._maddrs(link), CONNECT_TIMEOUT_S)

    def _is_due(self, peer: PeerId) -> bool:
        if self._me > peer:
            return False  # the other end does it
        tries = self._tries.get(peer, 0)
        wait_s = sum(ANEW_AFTER_S[: tries + 1]) + max(0, tries + 1 - len(ANEW_AFTER_S)) * ANEW_AFTER_S[-1]
        return time.monotonic() - self._relayed_since.get(peer, time.monotonic()) > wait_s

    async def _may_punch(self, link: RelayedLink) -> bool:
        """Whether both ends know an address of theirs that the world sees."""
        own = await own_maddrs(self._p2p, CONNECT_TIMEOUT_S)
        return all(any(map(is_public_maddr, maddrs)) for maddrs in (own, self._maddrs(link)))

    def _maddrs(self, link: RelayedLink) -> tuple[str, ...]:
        """Where the other end is. A link lives for long, and who has just started does not know its own
        public address when its first links are opened."""
        return tuple(self._newest(link.peer) or link.maddrs)
