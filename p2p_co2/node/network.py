"""This process on the network before and beside its model: daemon, DHT, run manifest, carriers, records.

``open`` needs only a ticket: it ends with the verified ``RunConfig``, before anything large is downloaded.
The node then starts the carriers and keeps this peer's record alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import zlib
from collections.abc import Sequence
from contextlib import AsyncExitStack

from p2p_co2 import __version__
from p2p_co2.config import PeerConfig, RunConfig
from p2p_co2.errors import EnvironmentFault, TicketError, TransportError
from p2p_co2.net.discovery import Discovery
from p2p_co2.net.discovery.records import run_position
from p2p_co2.net.transport.addresses import is_relayed
from p2p_co2.net.transport.base import CONNECT_TIMEOUT_S, MESSAGE_TIMEOUT_S, Carrier, OnMessage, OnRefused
from p2p_co2.net.transport.grpc_carrier import GrpcCarrier
from p2p_co2.net.transport.libp2p.carrier import Libp2pCarrier
from p2p_co2.net.transport.libp2p.control import reach
from p2p_co2.net.transport.libp2p.daemon import keep_alive, start_p2p, stop_p2p
from p2p_co2.net.transport.libp2p.hivemind import P2P
from p2p_co2.net.transport.probe import ProbeServer, clock_offsets_s, judge_clock
from p2p_co2.net.transport.slow import Line, SlowLine
from p2p_co2.node.reach import (
    Reach,
    is_on_this_machine,
    leads_as_far,
    leads_elsewhere,
    require_others_can_dial,
)
from p2p_co2.node.record_book import RecordBook
from p2p_co2.peer_options import listening
from p2p_co2.protocol.wire.identity import Identity, PeerId
from p2p_co2.protocol.wire.limits import MAX_ADDRESSES
from p2p_co2.protocol.wire.messages_pb2 import PeerRecord, RunPosition
from p2p_co2.system.process import FolderLock
from p2p_co2.ticket import Ticket, by_peer, is_seed_address

RECORD_LIFETIME_S = 60.0
RECORD_RENEWED_S = RECORD_LIFETIME_S / 3
MANIFEST_RENEWED_S = 10 * RECORD_LIFETIME_S
"""With the seeds away a peer stores the run's settings so often: as often as a seed does."""
CLOCK_QUESTIONS = 2
MAX_INVITERS = 5
"""Peers that a later ticket names beside the seeds: it has to be short enough to be pasted."""
MAX_REACHED_AGAIN = 16
"""Peers that a daemon that was started again is led to: with a seed that is down, nobody else knows them."""


class _Due:
    """Things that are done again when the last time grows old."""

    def __init__(self) -> None:
        self._done_at: dict[str, float] = {}

    def is_due(self, name: str, every_s: float) -> bool:
        return time.monotonic() - self._done_at.get(name, -1e9) >= every_s

    def done(self, name: str) -> None:
        self._done_at[name] = time.monotonic()

    def forget(self, name: str) -> None:
        self._done_at.pop(name, None)


class Network:
    """Make it with ``open``, end it with ``close``; both on the network thread."""

    p2p: P2P
    discovery: Discovery
    _reach: Reach

    def __init__(self, identity: Identity, config: PeerConfig, ticket: Ticket) -> None:
        self.identity, self.config, self.ticket = identity, listening(config, ticket), ticket
        self.software = f"p2p-co2 {__version__}"
        self.run = RunConfig()
        self.carriers: tuple[Carrier, ...] = ()
        self.clock_doubt = ""
        """Why this machine's clock may keep others from hearing it, and what to do; empty if all is well."""
        self.records = RecordBook(self._find)
        self._stack = AsyncExitStack()
        self._news = ""
        """To be told once."""
        self._due = _Due()
        self._invited = ""
        """The ticket that was written into the folder last."""

    @classmethod
    async def open(cls, ticket: Ticket, config: PeerConfig, on_refused: OnRefused) -> Network:
        """Join the run's DHT and read its manifest.

        Raises ``TransportError`` when no seed answers, ``TicketError`` when the run's manifest is not there
        or not the ticket's, ``EnvironmentFault`` when this machine cannot take part, ``ConfigError`` for a
        config of another version. Cancelling it leaves nothing behind.
        """
        lock = FolderLock(config.folder)
        identity_path = config.folder / "identity"
        try:
            network = cls(Identity.load_or_create(identity_path), config, ticket)
        except BaseException:
            lock.release()
            raise
        network._stack.callback(lock.release)
        try:
            await network._open(on_refused)
        except BaseException:
            await network.close()
            raise
        return network

    async def close(self) -> None:
        """Give everything back. May be called twice."""
        await self._stack.aclose()

    async def _open(self, on_refused: OnRefused) -> None:
        config = self.config
        require_others_can_dial(config, self.ticket)
        identity_path = config.folder / "identity"
        p2p = await start_p2p(
            identity_path, config.host, config.libp2p_port, announce_host=config.announce_host
        )
        self._stack.push_async_callback(stop_p2p, p2p)
        self.use(p2p, Discovery(p2p, self.identity, self.ticket.run, on_refused))
        self._stack.push_async_callback(self.discovery.close)
        await self.discovery.start(self.ticket.seeds)
        await self._compare_clocks()
        manifest = await self.discovery.fetch_manifest(self.ticket.run_key)
        self.run = RunConfig.from_canonical_bytes(manifest.config)
        if self.run.digest() != self.ticket.run:
            fix = "ask for a new ticket"
            raise TicketError(f"the run's settings are not the ones this ticket was made for; {fix}")

    def use(self, p2p: P2P, discovery: Discovery) -> None:
        """The daemon and the DHT that this process stands on."""
        self.p2p, self.discovery = p2p, discovery
        self._reach = Reach(p2p, self.identity.peer_id, self.config, self.ticket)

    async def _compare_clocks(self) -> None:
        """Raise ``EnvironmentFault`` if this machine's clock is so far off that others do not hear it. Lesser
        trouble is ``clock_doubt``. Nobody's answer is asked for once more."""
        offsets_s, seeds = list[float](), by_peer(self.ticket.seeds)
        for _ in range(CLOCK_QUESTIONS):
            offsets_s = offsets_s or await clock_offsets_s(self.p2p, self.ticket.run, seeds)
        judged = judge_clock(offsets_s)
        words = f"clock: {judged.measured}; {judged.advice}"
        if judged.state == "cannot":
            raise EnvironmentFault(words)
        self.clock_doubt = "" if judged.state == "ok" else words

    async def start_carriers(self, on_message: OnMessage, on_refused: OnRefused) -> None:
        """Listen, and answer probes. Raises ``EnvironmentFault`` when a port is taken."""
        config, run, me = self.config, self.ticket.run, self.identity
        carriers: list[Carrier] = []
        if config.carrier in ("auto", "grpc"):
            self._reach.grpc = GrpcCarrier(me, run, config.host, config.grpc_port)
            carriers.append(self._reach.grpc)
        if config.carrier in ("auto", "libp2p"):
            carriers.append(Libp2pCarrier(self.p2p, me, run, newest=self.records.maddrs_of))
        if config.slow_line:
            line = Line(SlowLine.parse(config.slow_line), zlib.crc32(me.peer_id.encode()))
            for carrier in carriers:
                carrier.line = line
        for carrier in carriers:
            self._stack.push_async_callback(carrier.close)
            await carrier.start(on_message, on_refused)
        self.carriers = tuple(carriers)
        probes = ProbeServer(self.p2p, run, config.limits.upload_bytes_per_s)
        self._stack.push_async_callback(probes.close)
        await probes.start()

    # ---- what others find

    async def publish_self(self, somebody_unmet: bool = False) -> str:
        """Put this peer's signed record into the DHT if the last one grows old, with its places at relays.

        Returns what is to be said: news once, and what to do so that others reach this peer, if there is
        ``somebody_unmet`` and nobody relays for it; on a network of its own all may be well without a relay.
        Raises ``TransportError``.
        """
        if self._due.is_due("record", RECORD_RENEWED_S):
            record = await self._reach.record()
            record.software = self.software
            await self.discovery.publish_self(record, RECORD_LIFETIME_S)
            self._due.done("record")
        news, self._news = self._news, ""
        return news or (self._reach.advice if somebody_unmet else "")

    async def publish_position(self, position: float, versions: Sequence[int], is_last: bool = False) -> None:
        """Leave word of where the run is for those that come when everybody has left, if the last one grows
        old. Raises ``TransportError``."""
        if is_last or self._due.is_due("position", MESSAGE_TIMEOUT_S):
            said = RunPosition(position=position, versions=versions, software=self.software)
            await self.discovery.publish_position(said)
            self._due.done("position")

    async def run_position(self) -> RunPosition | None:
        """Where the run was when its peers last said so; None if nobody ever did. Raises
        ``TransportError``."""
        return run_position(await self.discovery.find_positions(), time.time())

    @property
    def reach_advice(self) -> str:
        """What keeps others from reaching this peer and what helps; empty if nothing is known to."""
        return self._reach.advice

    @property
    def invitation(self) -> Ticket:
        """The ticket, with this peer and some that it knows as further seeds, as far as newcomers may be able
        to dial them: it works when the first seeds are gone. Any thread may ask."""
        known = [self._reach.own_maddrs, *(record.maddrs for record in self.records.known(MAX_INVITERS - 1))]
        seeds = list(self.ticket.seeds)
        for maddrs in known:
            direct = [maddr for maddr in maddrs if not is_relayed(maddr) and is_seed_address(maddr)]
            seeds += [maddr for maddr in direct if leads_as_far(maddr, self.ticket.seeds)][:1]
        return Ticket(self.ticket.run, self.ticket.run_key, tuple(dict.fromkeys(seeds))[:MAX_ADDRESSES])

    # ---- finding others

    async def find_peers(self) -> list[PeerRecord]:
        """Records of the other peers of the run, as the DHT has them now. Raises ``TransportError``."""
        records = await self.records.search()
        if (ticket := str(self.invitation)) != self._invited:
            with contextlib.suppress(OSError):  # whoever needs it can ask this peer's owner
                (self.config.folder / "ticket").write_text(f"{ticket}\n", encoding="ascii")
                self._invited = ticket
        return records

    async def find_record(self, peer: PeerId, fresh: bool = False) -> PeerRecord | None:
        """See ``RecordBook.record_of``."""
        return await self.records.record_of(peer, fresh)

    async def _find(self) -> list[PeerRecord]:
        found, is_here = await self.discovery.find_peers(), is_on_this_machine(self.ticket)
        return [
            one for one in found if one.peer != self.identity.peer_id and (is_here or leads_elsewhere(one))
        ]

    # ---- what goes wrong

    async def daemon_ended(self) -> str:
        """Wait until the libp2p daemon has ended by itself and does not come back, however often it is
        started again; returns its last words."""
        return await keep_alive(self.p2p, self._revived)

    async def _revived(self, words: str) -> None:
        """The daemon is a new one, which knows nobody: be known again."""
        self._news = f"the libp2p daemon had ended ({words}); it was started again"
        self._due.forget("record")
        self._reach.forget_places()
        known = self.records.known(MAX_REACHED_AGAIN)
        reached = [reach(self.p2p, PeerId(one.peer), one.maddrs, CONNECT_TIMEOUT_S) for one in known]
        again = self.discovery.rebootstrap(self.ticket.seeds)
        troubles = await asyncio.gather(again, *reached, return_exceptions=True)
        self.records.forget_searches()
        for trouble in troubles:
            if isinstance(trouble, BaseException) and not isinstance(trouble, TransportError):
                raise trouble

    async def greet_seeds(self) -> None:
        """Be known to the seeds; to one that was started anew, and with it the others, as ``rebootstrap``
        does. Raises ``TransportError`` when none answers."""
        if await self.discovery.greet(self.ticket.seeds):
            self._due.forget("record")

    async def rebootstrap(self) -> None:
        """Look for the seeds again; raises ``TransportError`` when none answers. Then this peer does what a
        seed would, and keeps the run's settings in the DHT."""
        self._due.forget("record")
        try:
            await self.discovery.rebootstrap(self.ticket.seeds)
        except TransportError:
            if len(self.records) and self._due.is_due("manifest", MANIFEST_RENEWED_S):
                await self.discovery.keep_manifest()
                self._due.done("manifest")
            raise
