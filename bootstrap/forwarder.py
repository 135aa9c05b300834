"""The packet forwarder of a rehearsal: the emulated internet in the middle, as a process behind a TUN device.

    python -m bootstrap.forwarder WAN.json PARENT

``Wan`` says which packet arrives and when, without I/O or clock. A packet waits for the sender's upload,
travels half of either link's latency, may be lost with half of either link's loss, and waits for the
receiver's download, so two peers of one profile see just that profile. Packets between two addresses never
overtake each other. The kernel hands over many TCP segments as one packet, which is lost as a whole, as with
netem: the share of bytes that is lost is the line's.

Sources: ``linux/if_tun.h``, virtio 1.2 section 5.1.6 (the header before each packet). Price: some 24 us of
processor time for each packet that the kernel hands over, however large."""

from __future__ import annotations

import fcntl
import heapq
import json
import os
import random
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from p2p_co2.planning.profiles import LinkProfile

DEVICE = "wan"
SLICE_S = 0.002
"""Packets are handled together once in so long: waking up costs ten times what a packet does."""
QUEUE_S = 0.2
"""What a router's queue holds, in seconds of its link's rate."""
HEADER_BYTES = 10
"""Of the virtio-net header before each packet."""
_ADDRESSES = slice(HEADER_BYTES + 12, HEADER_BYTES + 20)
"""Source and destination of an IPv4 packet."""
_READS_AT_ONCE = 1024
_PACKET_BYTES = 1 << 17
_TUNSETIFF = 0x400454CA
_TUNSETOFFLOAD = 0x400454D0
_TUN_WITHOUT_INFO_WITH_VIRTIO = 0x0001 | 0x1000 | 0x4000
_OFFLOAD_CHECKSUM_AND_TCP4 = 0x01 | 0x02


@dataclass
class WanCount:
    """Packets by what became of them. ``refused``: by the kernel. ``foreign``: to or from an address that is
    not ours."""

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
    """The way from one address to another. Its delay wanders in steps of ten slices."""

    def __init__(self, source: LinkProfile, target: LinkProfile, up: _Queue, down: _Queue) -> None:
        self.latency_s = (source.latency_ms + target.latency_ms) / 2e3
        self.jitter_s = (source.jitter_ms + target.jitter_ms) / 2e3
        self.loss = (source.loss + target.loss) / 2
        self.up = up
        self.down = down
        self._latest_at = 0.0
        self._extra_s = 0.0
        self._extra_until = 0.0

    def arrives_at(self, left_at: float, chance: random.Random) -> float:
        """When a packet that left at ``left_at`` reaches the receiver's link: never before an earlier one."""
        if self.jitter_s and left_at >= self._extra_until:
            # Delay has a floor, the way itself: what is drawn below it counts as none.
            self._extra_s = max(-self.latency_s, chance.gauss(0.0, self.jitter_s))
            self._extra_until = left_at + 10 * SLICE_S
        self._latest_at = max(self._latest_at, left_at + self.latency_s + self._extra_s)
        return self._latest_at


class Wan:
    """The emulated internet. ``links`` by IPv4 address (4 bytes). Packets go in with ``now`` (seconds of any
    monotonic clock) and come out when they are due."""

    def __init__(self, links: Mapping[bytes, LinkProfile], seed: int) -> None:
        up = {address: _Queue(link.up_bits_per_s) for address, link in links.items()}
        down = {address: _Queue(link.down_bits_per_s) for address, link in links.items()}
        self._paths = {
            source + target: _Path(links[source], links[target], up[source], down[target])
            for source in links
            for target in links
        }
        self._chance = random.Random(seed)
        self._events: list[tuple[float, int, bool, _Path, bytes]] = []
        """(when, order, whether it has passed the receiver's link, path, packet)"""
        self._order = 0
        self.count = WanCount()

    def receive(self, packet: bytes, now: float) -> None:
        """Take in one packet: a virtio-net header, then IPv4."""
        path = self._paths.get(packet[_ADDRESSES])
        if path is None:
            self.count.foreign += 1
        elif path.loss and self._chance.random() < path.loss:
            self.count.lost += 1
        elif (left_at := path.up.leaves_at(len(packet), now)) is None:
            self.count.queue_full += 1
        else:
            self._push(path.arrives_at(left_at, self._chance), False, path, packet)

    def next_at(self) -> float | None:
        """When ``due`` has something to do next."""
        return self._events[0][0] if self._events else None

    def due(self, now: float) -> list[bytes]:
        """The packets that have arrived by ``now``, in their order."""
        arrived = []
        while self._events and self._events[0][0] <= now:
            at, _, is_through, path, packet = heapq.heappop(self._events)
            if not is_through:
                through_at = path.down.leaves_at(len(packet), at)
                if through_at is None:
                    self.count.queue_full += 1
                    continue
                if through_at > now:
                    self._push(through_at, True, path, packet)
                    continue
            self.count.packets += 1
            self.count.bytes += len(packet) - HEADER_BYTES
            arrived.append(packet)
        return arrived

    def _push(self, at: float, is_through: bool, path: _Path, packet: bytes) -> None:
        self._order += 1
        heapq.heappush(self._events, (at, self._order, is_through, path, packet))


def open_device(name: str) -> int:
    """A file of a new TUN device, non-blocking, with virtio-net headers. Raises ``OSError``."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TUN_WITHOUT_INFO_WITH_VIRTIO))
    fcntl.ioctl(device, _TUNSETOFFLOAD, _OFFLOAD_CHECKSUM_AND_TCP4)
    return device


def forward(device: int, wan: Wan, wanted: list[bool]) -> None:
    """Pass packets on until ``wanted`` is empty."""
    clock = time.monotonic
    while wanted:
        if wan.next_at() is None:
            select.select((device,), (), (), 0.5)
        now = clock()
        with suppress(BlockingIOError):  # all are read
            for _ in range(_READS_AT_ONCE):
                wan.receive(os.read(device, _PACKET_BYTES), now)
        for packet in wan.due(clock() + SLICE_S / 2):
            try:
                os.write(device, packet)
            except OSError:
                wan.count.refused += 1  # the kernel finds fault with it, or has no room: to TCP a loss
        time.sleep(SLICE_S)


def write_links(path: Path, links: Mapping[str, LinkProfile], seed: int) -> None:
    """For the process: links by IPv4 address in text."""
    table = {"seed": seed, "links": {address: asdict(link) for address, link in links.items()}}
    path.write_text(json.dumps(table, indent=1) + "\n", encoding="ascii")


def main(arguments: list[str]) -> int:
    """Forward until a signal comes; the last line of output is what was done, as JSON."""
    from p2p_co2.system.process import end_with_parent

    table = json.loads(Path(arguments[0]).read_text(encoding="ascii"))
    links = {socket.inet_aton(address): LinkProfile(**link) for address, link in table["links"].items()}
    end_with_parent(int(arguments[1]))
    wan = Wan(links, table["seed"])
    wanted = [True]
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: wanted.clear())
    device = open_device(DEVICE)
    with suppress(PermissionError):  # then at ordinary priority
        os.setpriority(os.PRIO_PROCESS, 0, -10)  # the training here must not make the internet late
    print("ready: yes", flush=True)
    began_at = time.monotonic()
    forward(device, wan, wanted)
    wall_s = round(time.monotonic() - began_at, 3)
    print(json.dumps({**asdict(wan.count), "cpu_s": round(time.process_time(), 3), "wall_s": wall_s}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
