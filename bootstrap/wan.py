"""The emulated internet between the machines of a rehearsal: which packet arrives where, and when.

A machine without I/O or clock: packets go in with ``now`` (seconds of any monotonic clock) and come out when
they are due. A packet waits for the sender's upload, travels half of either link's latency, may be lost with
half of either link's loss, and waits for the receiver's download. So two peers of one profile see just that
profile. A queue holds ``QUEUE_S`` seconds of its link; what comes beyond it is dropped.

Packets between two addresses never overtake each other. The same seed and arrivals give the same losses. The
kernel hands over many TCP segments as one packet (segmentation offload); a loss still takes single segments,
and the packet is cut around them, as a network card would have cut it. Sources: virtio 1.2 section 5.1.6 (the
header before each packet), RFC 791, RFC 9293.
"""

from __future__ import annotations

import heapq
import itertools
import random
import struct
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

QUEUE_S = 0.2
"""What a router's queue holds, in seconds of its link's rate."""
JITTER_HOLDS_S = 0.02
"""The delay wanders in steps of this length."""
HEADER_BYTES = 10
"""Of the virtio-net header before each packet."""
_ADDRESSES = slice(HEADER_BYTES + 12, HEADER_BYTES + 20)
"""Source and destination of an IPv4 packet."""
_LEFT, _ARRIVED = 0, 1
_VIRTIO = struct.Struct("<BBHHHH")
"""flags, gso_type, hdr_len, gso_size, csum_start, csum_offset."""
_FIN, _PSH, _CWR = 0x01, 0x08, 0x80


@dataclass(frozen=True)
class WanLink:
    """One address's link. Rates in bits/s; latency and jitter in seconds one way between two such links;
    ``loss`` a share of packets on that way."""

    latency_s: float
    jitter_s: float
    loss: float
    up_bits_per_s: float
    down_bits_per_s: float


@dataclass
class WanCount:
    """Packets (lost: segments) by what became of them. ``refused``: by the kernel. ``foreign``: to or from an
    address that is not ours."""

    packets: int = 0
    bytes: int = 0
    lost: int = 0
    queue_full: int = 0
    refused: int = 0
    foreign: int = 0


class _Queue:
    """A link's transmitter: one packet after the other at its rate, at most ``QUEUE_S`` of them waiting."""

    def __init__(self, bits_per_s: float) -> None:
        self._s_per_byte = 8.0 / bits_per_s
        self._free_at = 0.0

    def leaves_at(self, size_bytes: int, now: float) -> float | None:
        """When the packet has left; None if the queue is full."""
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
        self._paths: dict[bytes, _Path] = {}
        self._chance = random.Random(seed)
        self._events: list[tuple[float, int, int, _Path, bytes]] = []
        self._order = 0
        self.count = WanCount()

    def receive(self, packet: bytes, now: float) -> None:
        """Take in one packet: a virtio-net header, then IPv4."""
        addresses = packet[_ADDRESSES]
        path = self._paths.get(addresses) or self._find(addresses)
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
        if source not in self._links or target not in self._links:
            return None
        ends = self._links[source], self._links[target]
        path = self._paths[addresses] = _Path(*ends, self._up[source], self._down[target])
        return path

    def _survivors(self, packet: bytes, loss: float) -> list[bytes]:
        """What is left of a packet when each of its segments is lost with probability ``loss``."""
        lost = {index for index in range(segment_count(packet)) if self._chance.random() < loss}
        self.count.lost += len(lost)
        return without_segments(packet, lost)


def segment_count(packet: bytes) -> int:
    """How many TCP segments the packet stands for."""
    kind, size = packet[1], packet[4] | packet[5] << 8
    if not kind or not size:
        return 1
    return max(1, -(-(len(packet) - HEADER_BYTES - _headers_bytes(packet)) // size))


def without_segments(packet: bytes, lost: AbstractSet[int]) -> list[bytes]:
    """The packet without its ``lost`` segments (by number): one packet for each run of survivors."""
    if not lost:
        return [packet]
    count = segment_count(packet)
    ends = [-1, *sorted(lost), count]
    runs = [(before + 1, stop) for before, stop in itertools.pairwise(ends) if stop > before + 1]
    return [_run(packet, first, stop, count) for first, stop in runs]


def _headers_bytes(packet: bytes) -> int:
    """Of IPv4 and TCP together."""
    ip_bytes = (packet[HEADER_BYTES] & 0x0F) * 4
    return ip_bytes + (packet[HEADER_BYTES + ip_bytes + 12] >> 4) * 4


def _run(packet: bytes, first: int, stop: int, count: int) -> bytes:
    """Segments ``first`` to ``stop`` (exclusive) of ``count`` as one packet."""
    flags, kind, header_bytes, size, checksum_start, checksum_offset = _VIRTIO.unpack_from(packet)
    ip_bytes = (packet[HEADER_BYTES] & 0x0F) * 4
    headers_bytes = _headers_bytes(packet)
    payload = memoryview(packet)[HEADER_BYTES + headers_bytes :]
    payload = payload[first * size : stop * size]
    headers = bytearray(packet[HEADER_BYTES : HEADER_BYTES + headers_bytes])
    struct.pack_into("!H", headers, 2, headers_bytes + len(payload))
    identification = (struct.unpack_from("!H", headers, 4)[0] + first) & 0xFFFF
    struct.pack_into("!H", headers, 4, identification)
    struct.pack_into("!H", headers, 10, 0)
    struct.pack_into("!H", headers, 10, ~_sum16(headers[:ip_bytes]) & 0xFFFF)
    sequence = struct.unpack_from("!I", headers, ip_bytes + 4)[0]
    struct.pack_into("!I", headers, ip_bytes + 4, (sequence + first * size) & 0xFFFFFFFF)
    if stop < count:
        headers[ip_bytes + 13] &= ~(_FIN | _PSH) & 0xFF
    if first > 0:
        headers[ip_bytes + 13] &= ~_CWR & 0xFF
    tcp_bytes = headers_bytes - ip_bytes + len(payload)
    # The kernel completes the checksum; it wants the pseudo header's part of it there.
    pseudo = bytes(headers[12:20]) + struct.pack("!HH", 6, tcp_bytes)
    struct.pack_into("!H", headers, ip_bytes + 16, _sum16(pseudo))
    if stop - first == 1:
        kind = size = 0
    virtio = _VIRTIO.pack(flags, kind, header_bytes, size, checksum_start, checksum_offset)
    return b"".join((virtio, headers, payload))


def _sum16(data: bytes | bytearray) -> int:
    """One's complement sum of 16-bit words (RFC 1071)."""
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total > 0xFFFF:
        total = (total & 0xFFFF) + (total >> 16)
    return total
