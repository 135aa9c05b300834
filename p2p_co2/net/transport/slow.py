"""A carrier slowed down to an internet line, for rehearsals without root: real carriers on loopback, late.

Messages leave one after the other at the line's upload rate, all links of this process together; they
arrive a latency later, and are taken in at its download rate. A lost packet is what TCP makes of it: its
message, and all behind it on the link, come a round trip later. So nothing is lost that a carrier would keep.

Laws: order and content of a link stay; ``send`` returns when the line has taken the message, so a full line
is felt as one; at most ``MAX_UNDER_WAY`` messages of a link are under way. Price: whole messages instead of
packets, so the line is coarse below a second; the sender's latency counts whole, whatever the receiver's is;
no routers, no slow start, no congestion.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from p2p_co2.errors import ConfigError, PeerLost
from p2p_co2.net.transport.acknowledged import Acknowledged
from p2p_co2.net.transport.base import Carrier, Link, OnMessage, OnRefused, Seen, check_outgoing
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.messages_pb2 import PeerRecord

MAX_UNDER_WAY = 64
PACKET_BYTES = 1448


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


class _Transmitter:
    """One direction of the line: one message after the other at its rate."""

    def __init__(self, bits_per_s: float) -> None:
        self._bits_per_s, self._free_at = bits_per_s, 0.0

    async def pass_on(self, size_bytes: int) -> None:
        """Return when a message of this size has passed."""
        now = time.monotonic()
        self._free_at = max(now, self._free_at) + 8 * size_bytes / self._bits_per_s
        await asyncio.sleep(self._free_at - now)


class SlowCarriers:
    """The carriers of one process, on one line."""

    def __init__(self, line: SlowLine, seed: int) -> None:
        self.line, self.chance = line, random.Random(seed)
        self.up, self.down = _Transmitter(line.up_bits_per_s), _Transmitter(line.down_bits_per_s)

    def slowed(self, carrier: Carrier) -> Carrier:
        return SlowCarrier(carrier, self)

    def latency_s(self, size_bytes: int) -> float:
        """Of one message: what jitter and lost packets make of the line's."""
        line = self.line
        late_s = max(0.0, line.latency_s + self.chance.gauss(0.0, line.jitter_s))
        packets = -(-size_bytes // PACKET_BYTES)
        if self.chance.random() < 1 - (1 - line.loss) ** packets:
            late_s += 2 * line.latency_s
        return late_s


class SlowCarrier:
    """See ``Carrier``."""

    def __init__(self, carrier: Carrier, together: SlowCarriers) -> None:
        self._carrier, self._together = carrier, together

    @property
    def name(self) -> str:
        return self._carrier.name

    async def start(self, on_message: OnMessage, on_refused: OnRefused) -> None:
        async def slowly(sender: PeerId, data: bytes) -> None:
            await self._together.down.pass_on(len(data))
            await on_message(sender, data)

        await self._carrier.start(slowly, on_refused)

    def keep_places(self, is_known: Callable[[PeerId], bool]) -> None:
        self._carrier.keep_places(is_known)

    async def connect(self, record: PeerRecord) -> Link:
        link = await self._carrier.connect(record)
        await asyncio.sleep(4 * self._together.line.latency_s)  # TCP's handshake and TLS's, a round trip each
        return SlowLink(link, self._together)

    async def close(self) -> None:
        await self._carrier.close()


class SlowLink:
    """See ``Link``."""

    def __init__(
        self, link: Link, together: SlowCarriers, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._link, self._together, self._clock = link, together, clock
        self._under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(MAX_UNDER_WAY)
        self._writing, self._latest_at = asyncio.Lock(), 0.0
        self._carrying = asyncio.create_task(self._carry(), name=f"slow line to {link.peer}")

    @property
    def peer(self) -> PeerId:
        return self._link.peer

    @property
    def carrier(self) -> str:
        return self._link.carrier

    @property
    def way(self) -> str:
        return self._link.way

    @property
    def is_far(self) -> bool:
        return False  # all links of this process share one line here

    def look(self) -> Seen:
        return Seen()

    def begin_anew(self, now: float) -> None:
        """See ``Link``: it is as fast as the line."""

    def there_in_s(self, size_bytes: int) -> float:
        return 0.0

    @property
    def acknowledged(self) -> Acknowledged | None:
        return None  # ``send`` returns at this line's speed, whatever lies under it

    async def send(self, data: bytes) -> None:
        check_outgoing(data)
        async with self._writing:
            if self._carrying.done():
                raise PeerLost(await self._link.wait_closed())
            await self._together.up.pass_on(len(data))
            self._latest_at = max(self._latest_at, self._clock() + self._together.latency_s(len(data)))
            await self._under_way.put((self._latest_at, data))

    async def close(self) -> None:
        """What is under way is lost with the line."""
        self._carrying.cancel()
        await asyncio.gather(self._carrying, return_exceptions=True)
        await self._link.close()

    async def wait_closed(self) -> str:
        return await self._link.wait_closed()

    async def _carry(self) -> None:
        try:
            while True:
                arrives_at, data = await self._under_way.get()
                await asyncio.sleep(arrives_at - self._clock())
                await self._link.send(data)
        except PeerLost:
            return  # `send` and `wait_closed` tell of it
