"""Speed and cost of both carriers, one way over loopback between two processes. Prints JSON.

    python benchmarks/carrier_speed.py [--megabytes 256] [--message-kib 512]

CPU seconds are those of both processes, the libp2p daemons included (children count once they have ended).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.net.transport.base import Carrier
from p2p_co2.net.transport.grpc_carrier import GrpcCarrier
from p2p_co2.net.transport.libp2p.carrier import Libp2pCarrier
from p2p_co2.net.transport.libp2p.daemon import start_p2p, stop_p2p
from p2p_co2.wire.identity import Identity, PeerId
from p2p_co2.wire.messages_pb2 import PeerRecord

RUN = bytes(32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--message-kib", type=int, default=512)
    parser.add_argument("--receive", choices=("grpc", "libp2p"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.receive:
        asyncio.run(_receive(options.receive, options.megabytes * 10**6))
        return
    measured = {kind: _measure(kind, options) for kind in ("grpc", "libp2p")}
    print(json.dumps({"machine": platform.platform(), "cpus": os.cpu_count(), **measured}, indent=2))


def _measure(kind: str, options: argparse.Namespace) -> dict[str, float]:
    arguments = [sys.executable, __file__, "--receive", kind, "--megabytes", str(options.megabytes)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as receiver:
        assert receiver.stdout is not None
        record = PeerRecord.FromString(bytes.fromhex(receiver.stdout.readline()))
        idle = _cpu_s(resource.RUSAGE_CHILDREN)
        began = _cpu_s(resource.RUSAGE_SELF)
        wall_s = asyncio.run(_send(kind, record, options.megabytes * 10**6, options.message_kib << 10))
        ours_s = _cpu_s(resource.RUSAGE_SELF) - began + _cpu_s(resource.RUSAGE_CHILDREN) - idle
        theirs_s = float(receiver.stdout.readline())
    megabytes = options.megabytes
    return {
        "message_kib": options.message_kib,
        "megabytes": megabytes,
        "megabytes_per_s": round(megabytes / wall_s, 1),
        "cpu_s_per_gb": round((ours_s + theirs_s) * 1000 / megabytes, 2),
        "sender_cpu_s_per_gb": round(ours_s * 1000 / megabytes, 2),
    }


async def _send(kind: str, record: PeerRecord, total_bytes: int, message_bytes: int) -> float:
    message = os.urandom(message_bytes)
    with tempfile.TemporaryDirectory() as folder:
        carrier, _, stop = await _open(kind, Path(folder))
        await carrier.start(_ignore, _complain)
        link = await carrier.connect(record)
        await link.send(message)  # windows open, allocators warm
        began = time.perf_counter()
        sent = 0
        while sent < total_bytes:
            await link.send(message)
            sent += len(message)
        await link.close()
        wall_s = time.perf_counter() - began
        await carrier.close()
        await stop()
    return wall_s


async def _receive(kind: str, total_bytes: int) -> None:
    received = 0
    done = asyncio.Event()

    async def on_message(_: PeerId, data: bytes) -> None:
        nonlocal received
        received += len(data)
        if received >= total_bytes:
            done.set()

    with tempfile.TemporaryDirectory() as folder:
        carrier, record, stop = await _open(kind, Path(folder))
        await carrier.start(on_message, _complain)
        if isinstance(carrier, GrpcCarrier):
            record.grpc_addresses.append(f"127.0.0.1:{carrier.port}")
        began = _cpu_s(resource.RUSAGE_SELF)
        print(record.SerializeToString().hex(), flush=True)
        await done.wait()
        await asyncio.sleep(0.5)  # the sender says goodbye
        await carrier.close()
        await stop()
    print(_cpu_s(resource.RUSAGE_SELF) - began + _cpu_s(resource.RUSAGE_CHILDREN), flush=True)


async def _open(kind: str, folder: Path) -> tuple[Carrier, PeerRecord, Callable[[], Awaitable[None]]]:
    identity = Identity.load_or_create(folder / "identity")
    record = PeerRecord(peer=identity.peer_id, run=RUN)
    if kind == "grpc":
        grpc_carrier = GrpcCarrier(identity, RUN, "127.0.0.1", 0)
        record.certificate_digest = grpc_carrier.certificate_digest
        return grpc_carrier, record, _nothing
    p2p = await start_p2p(folder / "identity")
    record.maddrs.extend(str(maddr) for maddr in await p2p.get_visible_maddrs())
    return Libp2pCarrier(p2p, identity, RUN), record, lambda: stop_p2p(p2p)


async def _nothing() -> None:
    """gRPC has no daemon to stop."""


async def _ignore(sender: PeerId, data: bytes) -> None:
    """Nobody sends to the sender."""


def _complain(sender: PeerId | None, error: RemoteProtocolError) -> None:
    print(f"refused {sender}: {error}", file=sys.stderr)


def _cpu_s(who: int) -> float:
    usage = resource.getrusage(who)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
