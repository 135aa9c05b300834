"""A hole punched with real packets: two peers behind routers of their own that nobody can dial, whose link
begins at a relay and becomes a direct one; and a third behind a router with which that cannot be.

The peers are carriers with their daemons, each daemon in a network namespace behind its router; nobody
trains. What libp2p needs for it is there: four others who see each peer's address, and a quarter of a minute,
after which it believes that it cannot be dialled. The routers let pass what does not fit the sequence numbers
that they saw, so that each try is as good as the other; with those that do not, a hole needs both ends to
dial at once (``LinkUpgrades``), and a try that failed spoils the next for two minutes.

Skipped where network namespaces are not allowed.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from monitoring.words import describe
from p2p_co2.net.transport.addresses import is_relayed
from p2p_co2.net.transport.libp2p import carrier as carrier_room
from p2p_co2.net.transport.libp2p.carrier import Libp2pCarrier
from p2p_co2.net.transport.libp2p.control import own_maddrs, reach, ways_to_peers
from p2p_co2.net.transport.libp2p.daemon import start_p2p, stop_p2p
from p2p_co2.net.transport.libp2p.hivemind import P2P
from p2p_co2.net.transport.libp2p.relay import Places
from p2p_co2.node.links import LinkObserver, LinkPool, Uplink
from p2p_co2.telemetry.events import LinkOpened
from p2p_co2.wire.identity import Identity, PeerId
from p2p_co2.wire.messages_pb2 import PeerRecord
from tests.routers import Machine, Nat, Routers, set_kernel_options
from tests.transport_peers import until

LIBERAL = "netfilter/nf_conntrack_tcp_be_liberal"
pytestmark = pytest.mark.swarm
NATS: tuple[Nat, ...] = ("symmetric", "cone", "cone")
RUN = bytes(32)
PATIENCE_S = 180.0
PIECES, PIECE_BYTES = 16, 1 << 18
_NEW_NETWORK = 0x40000000


@contextlib.contextmanager
def inside(machine: Machine) -> Iterator[None]:
    """Let this thread, and what it starts, be on a machine's network."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/thread-self/ns/net") as here, (Path("/run/netns") / machine.namespace).open() as there:
        assert libc.setns(there.fileno(), _NEW_NETWORK) == 0, os.strerror(ctypes.get_errno())
        try:
            yield
        finally:
            assert libc.setns(here.fileno(), _NEW_NETWORK) == 0, os.strerror(ctypes.get_errno())


@dataclass
class Hidden:
    """A peer that nobody can dial. ``known``: where others are, ``opened``: its links as its log has them."""

    identity: Identity
    p2p: P2P
    machine: Machine
    place: str
    carrier: Libp2pCarrier
    known: dict[PeerId, list[str]]
    opened: list[LinkOpened] = field(default_factory=list)
    received: list[bytes] = field(default_factory=list)

    @property
    def me(self) -> PeerId:
        return self.identity.peer_id

    @property
    def log(self) -> list[str]:
        return [describe(event, {})[1] for event in self.opened]

    async def on_message(self, sender: PeerId, data: bytes) -> None:
        self.received.append(data)

    @asynccontextmanager
    async def links_to(self, other: Hidden) -> AsyncIterator[LinkPool]:
        async def find(peer: PeerId, fresh: bool) -> PeerRecord:
            # The other has just started: where the world sees it, its later records say.
            return PeerRecord(peer=other.me, run=RUN, maddrs=[other.place])

        def opened(peer: PeerId, carrier: str, reason: str) -> None:
            self.opened.append(LinkOpened(at=0.0, peer=self.me, other=peer, carrier=carrier, reason=reason))

        observer = LinkObserver(opened, lambda *_: None, lambda *_: None)
        async with asyncio.TaskGroup() as tasks:
            links = LinkPool([self.carrier], find, observer, tasks, Uplink())
            yield links
            await links.close()


@asynccontextmanager
async def swarm(folder: Path, routers: Routers) -> AsyncIterator[tuple[str, list[Hidden]]]:
    """The seed's address, and the hidden peers: one whose router draws ports, and two behind cones of which
    the first tries to punch."""
    public = [routers.add(name) for name in ("seed", "b", "c", "d")]
    # Of two peers that with the smaller id tries: both others are to try with the last.
    identities = sorted((folder / name for name in "xyz"), key=lambda p: Identity.load_or_create(p).peer_id)
    behind = [routers.add(f"hidden-{nat}-{i}", nat) for i, nat in enumerate(NATS)]
    try:
        for machine in behind:
            set_kernel_options(machine.router, {LIBERAL: "1"})
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this kernel's routers follow sequence numbers: {error}")
    async with AsyncExitStack() as stack:
        known: list[str] = []
        for number, machine in enumerate(public):
            path = folder / machine.name
            peer = Identity.load_or_create(path).peer_id
            with inside(machine):
                if number == 0:
                    p2p = await start_p2p(
                        path, machine.address, 31337, announce_host=machine.address, public=True
                    )
                else:
                    p2p = await start_p2p(path, machine.address, 31337)
            stack.push_async_callback(stop_p2p, p2p)
            known.append(f"/ip4/{machine.address}/tcp/31337/p2p/{peer}")
        hidden = []
        for path, machine in zip(identities, behind, strict=True):
            with inside(machine):
                p2p = await start_p2p(path, "0.0.0.0")
            stack.push_async_callback(stop_p2p, p2p)
            hidden.append(await hide(stack, path, p2p, machine, known))
        yield public[0].address, hidden


async def hide(stack: AsyncExitStack, path: Path, p2p: P2P, machine: Machine, known: list[str]) -> Hidden:
    """Let the public ones see this peer, and the seed keep a place for it."""
    identity = Identity.load_or_create(path)
    for maddr in known:
        await reach(p2p, PeerId(maddr.rpartition("/")[2]), [maddr], PATIENCE_S)
    places = Places(p2p, identity.peer_id, known[:1])
    async with asyncio.timeout(PATIENCE_S):
        while not places.held:
            await places.renew()
    known_places = dict[PeerId, list[str]]()
    carrier = Libp2pCarrier(p2p, identity, RUN, newest=lambda peer: known_places.get(peer, []))
    made = Hidden(identity, p2p, machine, places.held[0], carrier, known_places)
    await carrier.start(made.on_message, lambda peer, error: None)
    stack.push_async_callback(carrier.close)
    return made


async def test_a_relayed_link_becomes_direct_through_a_punched_hole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(carrier_room, "CONNECT_TIMEOUT_S", 4.2)
    with Routers() as routers:
        async with (
            asyncio.timeout(2 * PATIENCE_S),
            swarm(tmp_path, routers) as (seed, (drawn, first, other)),
            first.links_to(other) as links,
            drawn.links_to(other) as links_of_drawn,
        ):
            ends_at = time.monotonic() + PATIENCE_S
            while not (first.opened and "punched" in first.opened[-1].reason and drawn.opened):
                assert time.monotonic() < ends_at, (first.log, drawn.log)
                links.post(other.me, b"heartbeat", bulk=False)
                links_of_drawn.post(other.me, b"heartbeat", bulk=False)
                record = [other.place, *await own_maddrs(other.p2p, PATIENCE_S)]
                first.known[other.me] = drawn.known[other.me] = record
                await asyncio.sleep(0.2)
            ways = (await ways_to_peers(first.p2p, PATIENCE_S))[other.me]
            assert any(other.machine.public_address in way and not is_relayed(way) for way in ways), ways
            passed_on = routers.sent_bytes(routers.machines["seed"])
            for _ in range(PIECES):
                links.post(other.me, bytes(PIECE_BYTES), bulk=True)
            await until(lambda: sum(map(len, other.received)) >= PIECES * PIECE_BYTES, PATIENCE_S)
            assert routers.sent_bytes(routers.machines["seed"]) - passed_on < PIECES * PIECE_BYTES / 8
            assert any("(relayed by " in words for words in first.log)
            assert first.log[-1].endswith("by libp2p (direct, through a punched hole)")
            assert all(words.endswith(f"by libp2p (relayed by {seed})") for words in drawn.log)
