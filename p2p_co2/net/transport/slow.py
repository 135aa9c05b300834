"""A carrier slowed down to an internet line, for rehearsals without root: real carriers on loopback, late.

Messages leave one after the other at the line's upload rate, all links of this process together. They arrive
a latency later, and are taken in at its download rate. A message with a lost packet, and all behind it on the
link, come a round trip later, as over TCP. Laws: order and content of a link stay; a full line is felt as one
by ``send``. Price: whole messages instead of packets; no routers, no slow start, no congestion.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from p2p_co2.errors import ConfigError, PeerLost
from p2p_co2.net.transport.base import Link, OnMessage
from p2p_co2.wire.identity import PeerId

MAX_UNDER_WAY = 64


@dataclass(frozen=True)
class SlowLine:
    """Rates in bits/s, latency (one way) and jitter in seconds, ``loss`` a share of packets."""

    up_bits_per_s: float
    down_bits_per_s: float
    latency_s: float
    jitter_s: float
    loss: float

    @classmethod
    def parse(cls, text: str) -> SlowLine:
        """Read "up,down,latency,jitter,loss" (bits/s, bits/s, seconds, seconds, share). Raises
        ``ConfigError``."""
        try:
            line = cls(*(float(word) for word in text.split(",")))
        except (TypeError, ValueError):
            raise ConfigError("slow_line", "", f"five numbers with commas (got {text[:80]!r})") from None
        if not (min(line.up_bits_per_s, line.down_bits_per_s) > 0 and 0 <= line.loss < 1):
            raise ConfigError("slow_line", "", f"rates above 0, loss from 0 to 1 (got {text[:80]!r})")
        if not (0 <= line.latency_s < 60 and 0 <= line.jitter_s < 60):
            raise ConfigError("slow_line", "", f"latency and jitter below a minute (got {text[:80]!r})")
        return line


class SharedLine:
    """One process's line, which all of its carriers share: in each direction one message after the other. See
    ``Carrier.line``."""

    def __init__(self, line: SlowLine, seed: int) -> None:
        self.line = line
        self._chance = random.Random(seed)
        self._up_free_at = 0.0
        self._down_free_at = 0.0

    def taking(self, on_message: OnMessage) -> OnMessage:
        """``on_message`` when a message has been taken in."""

        async def slowly(sender: PeerId, data: bytes) -> None:
            now = time.monotonic()
            self._down_free_at = max(now, self._down_free_at) + 8 * len(data) / self.line.down_bits_per_s
            await asyncio.sleep(self._down_free_at - now)
            await on_message(sender, data)

        return slowly

    async def carrying(self, link: Link) -> Link:
        """``link`` over this line, after TCP's handshake and TLS's, a round trip each."""
        await asyncio.sleep(4 * self.line.latency_s)
        return SlowLink(link, self.pass_up, self.latency_s)

    async def pass_up(self, size_bytes: int) -> None:
        """Return when a message of this size has left."""
        now = time.monotonic()
        self._up_free_at = max(now, self._up_free_at) + 8 * size_bytes / self.line.up_bits_per_s
        await asyncio.sleep(self._up_free_at - now)

    def latency_s(self, size_bytes: int) -> float:
        """Of one message: what jitter and lost packets make of the line's."""
        late_s = max(0.0, self.line.latency_s + self._chance.gauss(0.0, self.line.jitter_s))
        packets = -(-size_bytes // 1448)
        is_hit = self._chance.random() < 1 - (1 - self.line.loss) ** packets
        return late_s + 2 * self.line.latency_s * is_hit


class SlowLink(Link):
    """See ``Link``. ``send`` returns at the speed of the line that all links share, whatever lies under it.
    What is under way is lost as it closes.
    ``pass_up`` and ``latency_s``: of the ``SharedLine``."""

    def __init__(
        self, link: Link, pass_up: Callable[[int], Awaitable[None]], latency_s: Callable[[int], float]
    ) -> None:
        self._link = link
        self.carrier = link.carrier
        self._pass_up = pass_up
        self._latency_s = latency_s
        self._under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(MAX_UNDER_WAY)
        super().__init__(link.peer, lambda _: None)
        self.way = link.way
        self.wait_closed = link.wait_closed  # type: ignore[method-assign]

    async def close(self, why: str = "closed by us") -> None:
        """See ``Link``."""
        self._closing = why
        self._watcher.cancel()
        await asyncio.gather(self._watcher, return_exceptions=True)
        await self._link.close()

    async def _put(self, data: bytes) -> None:
        await self._pass_up(len(data))
        await self._under_way.put((time.monotonic() + self._latency_s(len(data)), data))
        if self._watcher.done():
            raise ConnectionError

    async def _watch(self) -> str:
        try:
            while True:
                arrives_at, data = await self._under_way.get()
                await asyncio.sleep(arrives_at - time.monotonic())
                await self._link.send(data)
        except PeerLost as error:
            if not self._under_way.empty():
                self._under_way.get_nowait()  # room for a send that waits, which looks at the watcher then
            return str(error)
