"""Carriers over real sockets of this machine, one or two at a time, and what came in through them.

A machine that tests many things at once may stand still for seconds: every wait here is for a condition, and
only bounded by ``PATIENCE_S``; the carriers' own shortest bounds are as patient as that.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import random
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.net.transport import base, grpc_carrier
from p2p_co2.net.transport.grpc_carrier import GrpcCarrier
from p2p_co2.net.transport.libp2p import carrier as libp2p_carrier
from p2p_co2.net.transport.libp2p.carrier import Libp2pCarrier
from p2p_co2.net.transport.libp2p.daemon import start_p2p, stop_p2p
from p2p_co2.net.transport.libp2p.hivemind import P2P
from p2p_co2.wire.identity import Identity, PeerId
from p2p_co2.wire.messages_pb2 import PeerRecord

RUN = hashlib.sha256(b"a run").digest()
BOTH = pytest.mark.parametrize("kind", ["grpc", "libp2p"])
PATIENCE_S = 60.0
"""Bound on what takes milliseconds on a machine that is at rest."""
_IMPATIENT = [
    (room, name)
    for room in (grpc_carrier, libp2p_carrier, base)
    for name in ("CLOSE_TIMEOUT_S", "CONNECT_TIMEOUT_S")
]


@dataclass
class Peer:
    """One carrier and what came in through it."""

    identity: Identity
    carrier: GrpcCarrier | Libp2pCarrier
    record: PeerRecord
    received: list[tuple[PeerId, bytes]] = field(default_factory=list)
    refused: list[tuple[PeerId | None, RemoteProtocolError]] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    """The receiver takes nothing while this is clear."""

    async def on_message(self, sender: PeerId, data: bytes) -> None:
        await self.gate.wait()
        self.received.append((sender, data))

    def on_refused(self, sender: PeerId | None, error: RemoteProtocolError) -> None:
        self.refused.append((sender, error))

    @property
    def reasons(self) -> list[str]:
        return [error.reason for _, error in self.refused]


@asynccontextmanager
async def open_daemon(folder: Path, port: int = 0, **options: Any) -> AsyncIterator[tuple[P2P, Identity]]:
    """A libp2p daemon with an identity of its own; ``options`` as of ``start_p2p``."""
    os.makedirs(folder, exist_ok=True)
    identity = Identity.load_or_create(folder / "identity")
    p2p = await start_p2p(folder / "identity", port=port, **options)
    try:
        yield p2p, identity
    finally:
        await stop_p2p(p2p)


@asynccontextmanager
async def open_peer(kind: str, folder: Path, *, run: bytes = RUN) -> AsyncIterator[Peer]:
    async with contextlib.AsyncExitStack() as stack:
        carrier: GrpcCarrier | Libp2pCarrier
        if kind == "grpc":
            identity = Identity.load_or_create(folder / "identity")
            carrier = GrpcCarrier(identity, run, "127.0.0.1", 0)
        else:
            p2p, identity = await stack.enter_async_context(open_daemon(folder))
            carrier = Libp2pCarrier(p2p, identity, run)
        peer = Peer(identity, carrier, PeerRecord(peer=identity.peer_id, run=run))
        await carrier.start(peer.on_message, peer.on_refused)
        stack.push_async_callback(carrier.close)
        if isinstance(carrier, GrpcCarrier):
            peer.record.grpc_addresses.append(f"127.0.0.1:{carrier.port}")
            peer.record.certificate_digest = carrier.certificate_digest
        else:
            peer.record.maddrs.extend(str(maddr) for maddr in await carrier.p2p.get_visible_maddrs())
        peer.gate.set()
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for room, name in _IMPATIENT:
            patch.setattr(room, name, PATIENCE_S)
        yield peer


@asynccontextmanager
async def open_pair(kind: str, folder: Path) -> AsyncIterator[tuple[Peer, Peer]]:
    async with open_peer(kind, folder / "a") as a, open_peer(kind, folder / "b") as b:
        yield a, b


PORTS = iter(random.sample(range(20_000, 30_000), 10_000))
"""Below those that the kernel hands out to whoever asks for any."""


def free_port() -> int:
    """A port that nobody listens on, and that nobody here was given before."""
    while True:
        port = next(PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


async def until(condition: Callable[[], bool], within_s: float = PATIENCE_S) -> None:
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 (sockets and processes set no event)
            await asyncio.sleep(0.005)
