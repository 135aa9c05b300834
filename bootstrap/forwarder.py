"""The packet forwarder of a rehearsal: a process between a TUN device and ``wan``'s emulation.

    python -m bootstrap.forwarder WAN.json PARENT

The router in the middle sends every packet into the device, and takes it out again when this process says
that it has arrived. It makes the device in its own network namespace, and ends on SIGTERM, on SIGINT and with
its parent. Source: ``linux/if_tun.h``. Price: some 24 us of processor time for each packet that the kernel
hands over, however large: 3 CPU seconds per GB of large packets, 20 where they are small.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import socket
import struct
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from bootstrap.wan import Wan, WanLink

DEVICE = "wan"
SLICE_S = 0.002
"""Packets are handled together once in so long: waking up costs ten times what a packet does."""
_READS_AT_ONCE = 1024
_PACKET_BYTES = 1 << 17
_NICE = -10
"""The training on this machine must not make the emulated internet late."""
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_OFFLOAD_CHECKSUM_AND_TCP4 = 0x01 | 0x02


def open_device(name: str) -> int:
    """A file of a new TUN device, non-blocking, with virtio-net headers. Raises ``OSError``."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(
        device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR)
    )
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


def read_links(path: Path) -> tuple[dict[bytes, WanLink], int]:
    """(links by address, seed) from the file that ``write_links`` made."""
    table = json.loads(path.read_text(encoding="ascii"))
    links = {socket.inet_aton(address): WanLink(**link) for address, link in table["links"].items()}
    return links, int(table["seed"])


def write_links(path: Path, links: dict[str, WanLink], seed: int) -> None:
    """For the process: links by IPv4 address in text."""
    table = {"seed": seed, "links": {address: asdict(link) for address, link in links.items()}}
    path.write_text(json.dumps(table, indent=1) + "\n", encoding="ascii")


def main(arguments: list[str]) -> int:
    """Forward until a signal comes; the last line of output is what was done, as JSON."""
    from p2p_co2.system.process import end_with_parent

    links, seed = read_links(Path(arguments[0]))
    end_with_parent(int(arguments[1]))
    wan, wanted = Wan(links, seed), [True]
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: wanted.clear())
    device = open_device(DEVICE)
    try:
        os.setpriority(os.PRIO_PROCESS, 0, _NICE)
    except PermissionError:
        print("running at ordinary priority")
    print("ready: yes", flush=True)
    started_at = time.monotonic()
    forward(device, wan, wanted)
    elapsed_s = time.monotonic() - started_at
    done = {**asdict(wan.count), "cpu_s": round(time.process_time(), 3), "wall_s": round(elapsed_s, 3)}
    print(json.dumps(done), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
