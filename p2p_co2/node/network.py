"""This process on the network before and beside its model: libp2p daemon, DHT, run manifest, carriers, peer
records.

``open`` needs only a ticket: it ends with the verified ``RunConfig``, before anything large is downloaded.
The node then starts the carriers and keeps this peer's record alive.
"""

from __future__ import annotations

import time
from contextlib import AsyncExitStack

from p2p_co2 import __version__
from p2p_co2.config import PeerConfig, RunConfig
from p2p_co2.discovery import Discovery
from p2p_co2.errors import TicketError, TransportError
from p2p_co2.ticket import Ticket
from p2p_co2.transport.base import Carrier, OnMessage, OnRefused
from p2p_co2.transport.grpc_carrier import GrpcCarrier
from p2p_co2.transport.libp2p_carrier import Libp2pCarrier
from p2p_co2.transport.libp2p_daemon import start_p2p, stop_p2p, wait_p2p_exit
from p2p_co2.wire.identity import Identity, PeerId
from p2p_co2.wire.messages_pb2 import PeerRecord

RECORD_LIFETIME_S = 60.0
RECORD_RENEWED_S = 20.0


class Network:
    """Make it with ``open``, end it with ``close``; both on the network thread."""

    def __init__(self, identity: Identity, config: PeerConfig, ticket: Ticket) -> None:
        self.identity, self.config, self.ticket = identity, config, ticket
        self.software = f"p2p-co2 {__version__}"
        self.run = RunConfig()
        self.carriers: tuple[Carrier, ...] = ()
        self._stack = AsyncExitStack()
        self._grpc: GrpcCarrier | None = None
        self._records: dict[PeerId, PeerRecord] = {}
        self._published_at = -1e9

    @classmethod
    async def open(cls, ticket: Ticket, config: PeerConfig, on_refused: OnRefused) -> Network:
        """Join the run's DHT and read its manifest.

        Raises ``TransportError`` when no seed answers, ``TicketError`` when the run's manifest is not there
        or not the ticket's, ``EnvironmentFault`` when this machine cannot take part, ``ConfigError`` for a
        config of another version. Cancelling it leaves nothing behind.
        """
        identity_path = config.folder / "identity"
        network = cls(Identity.load_or_create(identity_path), config, ticket)
        try:
            await network._open(on_refused)
        except BaseException:
            await network.close()
            raise
        return network

    async def _open(self, on_refused: OnRefused) -> None:
        config = self.config
        self.p2p = await start_p2p(
            config.folder / "identity",
            config.host,
            config.libp2p_port,
            announce_host=config.announce_host,
            relays=self.ticket.seeds,
        )
        self._stack.push_async_callback(stop_p2p, self.p2p)
        self.discovery = Discovery(self.p2p, self.identity, self.ticket.run, on_refused)
        self._stack.push_async_callback(self.discovery.close)
        await self.discovery.start(self.ticket.seeds)
        manifest = await self.discovery.fetch_manifest(self.ticket.run_key)
        self.run = RunConfig.from_canonical_bytes(manifest.config)
        if self.run.digest() != self.ticket.run:
            raise TicketError(
                "the run's settings are not the ones this ticket was made for; ask for a new ticket"
            )

    async def start_carriers(self, on_message: OnMessage, on_refused: OnRefused) -> None:
        """Listen. Raises ``EnvironmentFault`` when a port is taken."""
        carriers: list[Carrier] = []
        if self.config.carrier in ("auto", "grpc"):
            self._grpc = GrpcCarrier(self.identity, self.ticket.run, self.config.host, self.config.grpc_port)
            carriers.append(self._grpc)
        if self.config.carrier in ("auto", "libp2p"):
            carriers.append(Libp2pCarrier(self.p2p, self.identity, self.ticket.run))
        for carrier in carriers:
            self._stack.push_async_callback(carrier.close)
            await carrier.start(on_message, on_refused)
        self.carriers = tuple(carriers)

    async def publish_self(self) -> None:
        """Put this peer's signed record into the DHT if the last one grows old."""
        if time.monotonic() - self._published_at < RECORD_RENEWED_S:
            return
        record = PeerRecord(
            peer=self.identity.peer_id,
            run=self.ticket.run,
            maddrs=await self._maddrs(),
            software=self.software,
        )
        if self._grpc is not None:
            host = self.config.announce_host or self.config.host
            host = f"[{host}]" if ":" in host else host
            record.grpc_addresses.append(f"{host}:{self._grpc.port}")
            record.certificate_digest = self._grpc.certificate_digest
        await self.discovery.publish_self(record, RECORD_LIFETIME_S)
        self._published_at = time.monotonic()

    async def _maddrs(self) -> list[str]:
        """Where libp2p thinks it can be reached, as it has learned by now."""
        try:
            return [str(address) for address in await self.p2p.get_visible_maddrs(latest=True)]
        except ValueError:  # hivemind's word for "none yet"
            return []

    async def find_peers(self) -> list[PeerRecord]:
        """Records of the other peers of the run, as the DHT has them now."""
        records = [
            record for record in await self.discovery.find_peers() if record.peer != self.identity.peer_id
        ]
        for record in records:
            self._records[PeerId(record.peer)] = record
        return records

    async def find_record(self, peer: PeerId) -> PeerRecord | None:
        """The record of ``peer``; the DHT is asked for one that is not known yet, or that has expired."""
        record = self._records.get(peer)
        if record is None or record.expires_at < time.time():
            try:
                await self.find_peers()
            except TransportError:
                return record
            record = self._records.get(peer)
        return record

    async def daemon_ended(self) -> str:
        """Wait until the libp2p daemon has ended by itself; returns its last words."""
        return await wait_p2p_exit(self.p2p)

    async def rebootstrap(self) -> None:
        """Look for the seeds again; raises ``TransportError`` when none answers."""
        self._published_at = -1e9
        await self.discovery.rebootstrap(self.ticket.seeds)

    async def close(self) -> None:
        """Give everything back. May be called twice."""
        await self._stack.aclose()
