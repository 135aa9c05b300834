"""Carriers and links made for tests: what is sent over them stays here, and a line is as it is set."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from p2p_co2.errors import PeerLost, TransportError
from p2p_co2.net.transport.base import OnMessage, OnRefused
from p2p_co2.net.transport.flow import Acknowledged, Seen
from p2p_co2.node.links import LinkObserver, LinkPool, Uplink
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.messages_pb2 import PeerRecord

B, C = PeerId("b"), PeerId("c")


class FakeLink:
    def __init__(self, carrier: FakeCarrier, peer: PeerId) -> None:
        self._carrier, self.peer, self.carrier, self.way = carrier, peer, carrier.name, carrier.way
        self.acknowledged = Acknowledged() if carrier.acknowledges else None
        self.is_far, self.gate = carrier.is_far, carrier.gate
        self.queued_s: float | None = 0.0
        self.there_bytes = 0
        self.closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def send(self, data: bytes) -> None:
        await self.gate.wait()
        if self.closed.done():
            raise PeerLost(self.closed.result())
        self._carrier.sent.append(data)
        if self.acknowledged is not None:
            self.acknowledged.sent(len(data), time.monotonic())

    def look(self) -> Seen:
        return Seen(self.queued_s, self.there_bytes)

    async def close(self) -> None:
        if not self.closed.done():
            self.closed.set_result("closed by us")

    async def wait_closed(self) -> str:
        return await asyncio.shield(self.closed)


class FakeCarrier:
    def __init__(
        self, name: str, reachable: bool = True, way: str = "direct", acknowledges: bool = False
    ) -> None:
        self.name, self.reachable, self.way, self.acknowledges = name, reachable, way, acknowledges
        self.is_far = False
        self.sent: list[bytes] = []
        self.links: list[FakeLink] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def start(self, on_message: OnMessage, on_refused: OnRefused) -> None:
        return None

    async def connect(self, record: PeerRecord) -> FakeLink:
        if not self.reachable:
            raise TransportError("connection refused")
        self.links.append(FakeLink(self, PeerId(record.peer)))
        return self.links[-1]

    async def close(self) -> None:
        return None


@dataclass
class Heard:
    opened: list[tuple[str, str, str]] = field(default_factory=list)
    lost: list[tuple[str, str, str]] = field(default_factory=list)
    unreachable: list[tuple[str, str]] = field(default_factory=list)
    uplink: Uplink = field(default_factory=Uplink)


@asynccontextmanager
async def links_over(
    *carriers: FakeCarrier, cap: float = 0.0, known: tuple[PeerId, ...] = (B,)
) -> AsyncIterator[tuple[LinkPool, Heard]]:
    heard = Heard(uplink=Uplink(cap))
    observer = LinkObserver(
        lambda *event: heard.opened.append(event),
        lambda *event: heard.lost.append(event),
        lambda *event: heard.unreachable.append(event),
    )

    async def find(peer: PeerId, fresh: bool) -> PeerRecord | None:
        return PeerRecord(peer=peer) if peer in known else None

    async with asyncio.TaskGroup() as tasks:
        links = LinkPool(carriers, find, observer, tasks, heard.uplink)
        yield links, heard
        await links.close()


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


class Hands:
    """A clock that stands where it is put."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now
