"""The emulated internet between the machines of a rehearsal: which packet arrives where, and when.

A machine without I/O or clock: packets go in with ``now`` (seconds of any monotonic clock) and come out when
they are due. Each packet is delayed by half the latency of the sender's link and half of the receiver's, and
is lost with half of each link's loss; so two peers of one profile see just that profile. Where the kernel
cannot limit rates, each link has a queue here too, of ``QUEUE_S`` seconds, beyond which packets are dropped.

Laws: packets between two addresses never overtake each other (routes of the internet rarely reorder, and a
jitter that did would teach TCP another lesson); a lost packet is one segment of at most one MTU, also where
the kernel hands over many segments as one (segmentation offload, ``segments``); the same seed and the same
arrivals give the same losses. Price: a jitter value holds for ``JITTER_HOLDS_S``, so the delay wanders in
steps.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Mapping
from dataclasses import dataclass

from bootstrap.segments import HEADER_BYTES, segment_count, without_segments

QUEUE_S = 0.2
"""What a router's queue holds, in seconds of its link's rate; beyond it packets are dropped."""
JITTER_HOLDS_S = 0.02
_ADDRESSES = slice(HEADER_BYTES + 12, HEADER_BYTES + 20)
"""Source and destination of an IPv4 packet (RFC 791)."""
_LEFT, _ARRIVED = 0, 1
_MAX_PATHS = 4096


@dataclass(frozen=True)
class WanLink:
    """One address's link. Rates in bits/s, 0 where the kernel limits them; latency and jitter in seconds one
    way between two such links; ``loss`` a share of packets on that way."""

    latency_s: float
    jitter_s: float
    loss: float
    up_bits_per_s: float = 0.0
    down_bits_per_s: float = 0.0


@dataclass
class WanCount:
    """Packets (segments) by what became of them. ``refused``: by the
    kernel. ``foreign``: to or from an address that is not ours."""

    packets: int = 0
    bytes: int = 0
    lost: int = 0
    queue_full: int = 0
    refused: int = 0
    foreign: int = 0


class _Queue:
    """A link's transmitter: one packet after the other at its rate, at most ``QUEUE_S`` of them waiting."""

    def __init__(self, bits_per_s: float) -> None:
        self._s_per_byte = 8.0 / bits_per_s if bits_per_s else 0.0
        self._free_at = 0.0

    def leaves_at(self, size_bytes: int, now: float) -> float | None:
        """When the packet has left; None if the queue is full."""
        if not self._s_per_byte:
            return now
        begins_at = max(now, self._free_at)
        if begins_at - now > QUEUE_S:
            return None
        self._free_at = begins_at + size_bytes * self._s_per_byte
        return self._free_at


class _Path:
    """The way from one address to another."""

    def __init__(self, source: WanLink, target: WanLink, up: _Queue, down: _Queue) -> None:
        self.latency_s = (source.latency_s + target.latency_s) / 2
        self.jitter_s = (source.jitter_s + target.jitter_s) / 2
        self.loss = (source.loss + target.loss) / 2
        self.up, self.down = up, down
        self._latest_at = 0.0
        self._extra_s, self._extra_until = 0.0, 0.0

    def arrives_at(self, left_at: float, chance: random.Random) -> float:
        """When a packet that left at ``left_at`` reaches the receiver's link: never before an earlier one."""
        if self.jitter_s and left_at >= self._extra_until:
            # Delay has a floor, the way itself: what is drawn below it counts as none.
            self._extra_s = max(-self.latency_s, chance.gauss(0.0, self.jitter_s))
            self._extra_until = left_at + JITTER_HOLDS_S
        self._latest_at = max(self._latest_at, left_at + self.latency_s + self._extra_s)
        return self._latest_at


class Wan:
    """The emulated internet. ``links`` by IPv4 address (4 bytes)."""

    def __init__(self, links: Mapping[bytes, WanLink], seed: int) -> None:
        self._links = dict(links)
        self._up = {address: _Queue(link.up_bits_per_s) for address, link in links.items()}
        self._down = {address: _Queue(link.down_bits_per_s) for address, link in links.items()}
        self._paths: dict[bytes, _Path | None] = {}
        self._chance = random.Random(seed)
        self._events: list[tuple[float, int, int, _Path, bytes]] = []
        self._order = 0
        self.count = WanCount()

    def receive(self, packet: bytes, now: float) -> None:
        """Take in one packet: a virtio-net header, then IPv4."""
        addresses = packet[_ADDRESSES]
        path = self._paths.get(addresses)
        if path is None:
            path = self._find(addresses)
            if path is None:
                self.count.foreign += 1
                return
        for survivor in self._survivors(packet, path.loss) if path.loss else (packet,):
            left_at = path.up.leaves_at(len(survivor), now)
            if left_at is None:
                self.count.queue_full += 1
            else:
                self._push(path.arrives_at(left_at, self._chance), _LEFT, path, survivor)

    def next_at(self) -> float | None:
        """When ``due`` has something to do next."""
        return self._events[0][0] if self._events else None

    def due(self, now: float) -> list[bytes]:
        """The packets that have arrived by ``now``, in their order."""
        arrived = []
        while self._events and self._events[0][0] <= now:
            at, _, stage, path, packet = heapq.heappop(self._events)
            if stage == _LEFT:
                through_at = path.down.leaves_at(len(packet), at)
                if through_at is None:
                    self.count.queue_full += 1
                    continue
                if through_at > now:
                    self._push(through_at, _ARRIVED, path, packet)
                    continue
            self.count.packets += 1
            self.count.bytes += len(packet) - HEADER_BYTES
            arrived.append(packet)
        return arrived

    def _push(self, at: float, stage: int, path: _Path, packet: bytes) -> None:
        self._order += 1
        heapq.heappush(self._events, (at, self._order, stage, path, packet))

    def _find(self, addresses: bytes) -> _Path | None:
        source, target = addresses[:4], addresses[4:]
        if source not in self._links or target not in self._links or len(self._paths) >= _MAX_PATHS:
            return None
        ends = self._links[source], self._links[target]
        path = self._paths[addresses] = _Path(*ends, self._up[source], self._down[target])
        return path

    def _survivors(self, packet: bytes, loss: float) -> list[bytes]:
        """What is left of a packet when each of its segments is lost with probability ``loss``."""
        lost = {index for index in range(segment_count(packet)) if self._chance.random() < loss}
        self.count.lost += len(lost)
        return without_segments(packet, lost)
