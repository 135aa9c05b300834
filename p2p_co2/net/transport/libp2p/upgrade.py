"""Relayed libp2p links move to direct connections where there is one, or a hole can be punched.

A stream stays on the connection that it was opened on. So a relayed link is closed, to be opened anew, when a
direct connection is there. And libp2p tries to punch a hole only when a relayed connection comes in, when it
may not know its own public address yet. So the peer with the smaller id makes the connection anew, once, when
both ends have had time to find such an address and say that they have one.

The other end must dial at the same moment: a router that follows sequence numbers drops what only one side
opened, and takes the port for a minute. With such routers 12 of 13 holes were punched where both dialled
within 0.7 s, and none of six otherwise. Law: what a link was sent before it moves arrives; only a message
that is just being handed over may be lost, as with any link that ends. Price: where the one try fails, the
two stay on their relay.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

from p2p_co2.errors import TransportError
from p2p_co2.net.transport.addresses import is_public_maddr, is_relayed
from p2p_co2.net.transport.base import CONNECT_TIMEOUT_S, DIRECT
from p2p_co2.net.transport.libp2p.control import hang_up_on, own_maddrs, reach, ways_to_peers
from p2p_co2.net.transport.libp2p.hivemind import P2P
from p2p_co2.protocol.wire.identity import PeerId

LOOK_EVERY_S = 1.5 * CONNECT_TIMEOUT_S
LOOKS_BEFORE = 2
"""A connection that is still relayed after so many looks is made anew: libp2p needs 15 s to find out that
nobody can dial it."""
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
        newest: Callable[[PeerId], Sequence[str]],
    ) -> None:
        self._p2p, self._me, self._links, self._newest = p2p, me, links, newest
        self._looks: dict[PeerId, int] = {}
        """How often each peer that was ever met through a relay was seen there; more than ``LOOKS_BEFORE``:
        its try has been made."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._dialling: set[PeerId] = set()

    def start(self) -> None:
        """Look after links from now on."""
        self._tasks.add(asyncio.create_task(self._look_after(), name="upgrades of libp2p links"))

    async def stop(self) -> None:
        """Leave links as they are. May be called twice."""
        tasks, self._tasks = self._tasks, set()  # first: links may end while we wait, and nobody dials now
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def was_relayed(self, peer: PeerId) -> bool:
        """Whether an earlier link to the peer was."""
        return peer in self._looks

    def opened(self, link: RelayedLink) -> None:
        """Remember a new link's way."""
        if link.is_relayed and len(self._looks) < MAX_REMEMBERED:
            self._looks.setdefault(link.peer, 0)

    def ended(self, link: RelayedLink) -> None:
        """A link has ended that we did not close. If the other end is making the connection anew, this one
        has to dial now; once at a time, however often a liar hangs up."""
        if link.is_relayed and self._me > link.peer and self._tasks and link.peer not in self._dialling:
            self._dialling.add(link.peer)
            self._tasks.add(asyncio.create_task(self._dial(link), name=f"dial {link.peer}"))

    async def _dial(self, link: RelayedLink) -> None:
        try:
            await reach(self._p2p, link.peer, self._maddrs(link), CONNECT_TIMEOUT_S)
        except TransportError:
            return  # it is gone: who has something to send to it will say so
        finally:
            self._dialling.discard(link.peer)
            if (task := asyncio.current_task()) is not None:
                self._tasks.discard(task)

    async def _look_after(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            try:
                await self.look()
            except TransportError:
                continue  # the daemon is busy or gone; the links themselves tell of it

    async def look(self) -> None:
        """Close links whose peer has a direct connection, and make those anew whose turn it is. Raises
        ``TransportError``."""
        relayed = [link for link in self._links() if link.is_relayed]
        ways = await ways_to_peers(self._p2p, CONNECT_TIMEOUT_S) if relayed else {}
        for link in relayed:
            peer, looks = link.peer, self._looks.get(link.peer, 0)
            if any(not is_relayed(way) for way in ways.get(peer, ())):
                await link.close("moving to a direct connection")
            elif looks < LOOKS_BEFORE:
                self._looks[peer] = looks + 1
            # The other end does it where its id is the smaller one.
            elif looks == LOOKS_BEFORE and self._me < peer and await self._may_punch(link):
                self._looks[peer] = looks + 1
                await hang_up_on(self._p2p, peer, CONNECT_TIMEOUT_S)
                await reach(self._p2p, peer, self._maddrs(link), CONNECT_TIMEOUT_S)

    async def _may_punch(self, link: RelayedLink) -> bool:
        """Whether both ends know an address of theirs that the world sees."""
        own = await own_maddrs(self._p2p, CONNECT_TIMEOUT_S)
        return all(any(map(is_public_maddr, maddrs)) for maddrs in (own, self._maddrs(link)))

    def _maddrs(self, link: RelayedLink) -> tuple[str, ...]:
        """Where the other end is. A link lives for long, and who has just started does not know its own
        public address when its first links are opened."""
        return tuple(self._newest(link.peer) or link.maddrs)
