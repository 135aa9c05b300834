"""This process on the network before and beside its model: libp2p daemon, DHT, run manifest, carriers, peer
records.

``open`` needs only a ticket: it ends with the verified ``RunConfig``, before anything large is downloaded.
The node then starts the carriers and keeps this peer's record alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
import zlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from contextlib import AsyncExitStack

from p2p_co2 import __version__
from p2p_co2.config import PeerConfig, RunConfig
from p2p_co2.errors import (
    ConfigError,
    EnvironmentFault,
    RemoteProtocolError,
    TicketError,
    TransportError,
)
from p2p_co2.net.discovery import Discovery
from p2p_co2.net.discovery.records import POSITION_RENEWED_S, run_position
from p2p_co2.net.transport.addresses import (
    address_of,
    is_loopback,
    is_near,
    is_own,
    is_relayed,
)
from p2p_co2.net.transport.base import CONNECT_TIMEOUT_S, Carrier, OnMessage, OnRefused
from p2p_co2.net.transport.grpc_carrier import GrpcCarrier
from p2p_co2.net.transport.libp2p.carrier import Libp2pCarrier
from p2p_co2.net.transport.libp2p.control import own_maddrs, reach
from p2p_co2.net.transport.libp2p.daemon import keep_alive, start_p2p, stop_p2p
from p2p_co2.net.transport.libp2p.relay import Places
from p2p_co2.net.transport.probe import ProbeServer, clock_offsets_s, judge_clock
from p2p_co2.net.transport.slow import Line, SlowCarrier, SlowLine
from p2p_co2.node.acquaintances import MAX_ACQUAINTANCES, Acquaintances
from p2p_co2.peer_options import listening
from p2p_co2.protocol.wire.identity import Identity, PeerId, cell_of
from p2p_co2.protocol.wire.limits import MAX_ADDRESSES, MAX_PEERS, MAX_RECORD_BYTES, MAX_STRING
from p2p_co2.protocol.wire.messages_pb2 import PeerRecord, RunManifest, RunPosition
from p2p_co2.system.process import FolderLock
from p2p_co2.ticket import Ticket, by_peer, is_seed_address

RECORD_LIFETIME_S = 60.0
RECORD_RENEWED_S = 20.0
RECORD_KEPT_S = 300.0
"""A record that was used is kept this long, though the DHT lists it no more."""
CLOCK_QUESTIONS = 2
JUST_FOUND_S = 1.0
"""A search that began within this time is as good as another: of many dead peers that the DHT lists still,
each would ask all of it for a newer record, once for each carrier."""
DAEMON_TIMEOUT_S = 15.0
MAX_GRPC_ADDRESSES = 4
MANIFEST_RENEWED_S = 600.0
"""With the seeds away a peer stores the run's settings so often: as often as a seed does."""
MAX_INVITERS = 5
"""Peers that a later ticket names beside the seeds: it has to be short enough to be pasted."""
MAX_REACHED_AGAIN = 16
"""Peers that a daemon that was started again is led to: with a seed that is down, nobody else knows them."""


class Network:
    """Make it with ``open``, end it with ``close``; both on the network thread."""

    def __init__(self, identity: Identity, config: PeerConfig, ticket: Ticket) -> None:
        self.identity, self.config, self.ticket = identity, listening(config, ticket), ticket
        self.software = f"p2p-co2 {__version__}"
        self.run = RunConfig()
        self.carriers: tuple[Carrier, ...] = ()
        self._stack = AsyncExitStack()
        self._grpc: GrpcCarrier | None = None
        self._places: Places | None = None
        """Who can be dialled, or runs on the seeds' own machine, needs none."""
        self.clock_doubt = ""
        """Why this machine's clock may keep others from hearing it, and what to do; empty if all is well."""
        self.reach_advice = self._news = ""
        """What keeps others from reaching this peer and what helps; news to tell once. Empty: nothing."""
        self._records = KnownRecords()
        self._searched_at: dict[int, float] = {}
        self._found_at: dict[int, float] = {}
        """When the last search of each cell began that has ended, and the last that found what is known."""
        self._revived_at = -math.inf
        self._searching = defaultdict[int, asyncio.Lock](asyncio.Lock)
        self._published_at = self._placed_at = self._manifest_kept_at = -1e9
        self._acquaintances = Acquaintances(config.folder / "acquaintances.json", ticket.run)
        self._own_maddrs: tuple[str, ...] = ()
        self._is_on_one_machine = is_on_this_machine(ticket)

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

    async def _open(self, on_refused: OnRefused) -> None:
        config = self.config
        require_others_can_dial(config, self.ticket)
        self.p2p = await start_p2p(
            config.folder / "identity",
            config.host,
            config.libp2p_port,
            announce_host=config.announce_host,
        )
        self._stack.push_async_callback(stop_p2p, self.p2p)
        if not config.announce_host and not self.ticket.is_local:
            self._places = Places(self.p2p, self.identity.peer_id, self.ticket.seeds)
        self.discovery = Discovery(self.p2p, self.identity, self.ticket.run, on_refused)
        self._stack.push_async_callback(self.discovery.close)
        await self._compare_clocks(await self._meet_somebody())
        manifest = await self._settings()
        self.run = RunConfig.from_canonical_bytes(manifest.config)
        if self.run.digest() != self.ticket.run:
            raise TicketError(
                "the run's settings are not the ones this ticket was made for; ask for a new ticket"
            )

    async def _meet_somebody(self) -> Sequence[str]:
        """Join the DHT through a seed of the ticket, or else through somebody whom this peer knew; returns
        whom it asked."""
        try:
            await self.discovery.start(self.ticket.seeds)
        except TransportError:
            known = self._acquaintances.maddrs
            if not known or not await self._ask_acquaintances():
                raise
            return known
        return self.ticket.seeds

    async def _ask_acquaintances(self) -> bool:
        """Whether somebody whom this peer knew leads into the DHT."""
        try:
            await self.discovery.rebootstrap(self._acquaintances.maddrs)
        except TransportError:
            return False
        return True

    async def _compare_clocks(self, asked: Sequence[str]) -> None:
        """Raise ``EnvironmentFault`` if this machine's clock is so far off that others do not hear it. Lesser
        trouble is ``clock_doubt``. Nobody's answer is asked for once more."""
        offsets_s = list[float]()
        for _ in range(CLOCK_QUESTIONS):
            offsets_s = offsets_s or await clock_offsets_s(self.p2p, self.ticket.run, by_peer(asked))
        judged = judge_clock(offsets_s)
        words = f"clock: {judged.measured}; {judged.advice}"
        if judged.state == "cannot":
            raise EnvironmentFault(words)
        self.clock_doubt = "" if judged.state == "ok" else words

    async def _settings(self) -> RunManifest:
        """The run's, from the DHT, or as this peer kept them. Errors as ``fetch_manifest``."""
        try:
            return await self.discovery.fetch_manifest(self.ticket.run_key)
        except TransportError as error:
            try:
                return self.discovery.take_manifest(self.ticket.run_key, self._acquaintances.manifest)
            except RemoteProtocolError:
                raise error from None  # none was kept, or not the run's

    async def start_carriers(self, on_message: OnMessage, on_refused: OnRefused) -> None:
        """Listen, and answer probes. Raises ``EnvironmentFault`` when a port is taken."""
        carriers: list[Carrier] = []
        if self.config.carrier in ("auto", "grpc"):
            self._grpc = GrpcCarrier(self.identity, self.ticket.run, self.config.host, self.config.grpc_port)
            carriers.append(self._grpc)
        if self.config.carrier in ("auto", "libp2p"):
            newest = self._records.maddrs_of
            carriers.append(Libp2pCarrier(self.p2p, self.identity, self.ticket.run, newest=newest))
        if self.config.slow_line:
            seed = zlib.crc32(self.identity.peer_id.encode())
            line = Line(SlowLine.parse(self.config.slow_line), seed)
            carriers = [SlowCarrier(carrier, line) for carrier in carriers]
        for carrier in carriers:
            self._stack.push_async_callback(carrier.close)
            await carrier.start(on_message, on_refused)
        self.carriers = tuple(carriers)
        probes = ProbeServer(self.p2p, self.ticket.run, self.config.limits.upload_bytes_per_s)
        self._stack.push_async_callback(probes.close)
        await probes.start()

    async def publish_self(self, somebody_unmet: bool = False) -> str:
        """Put this peer's signed record into the DHT if the last one grows old, with its places at relays.

        Returns what to do so that others reach this peer, and why, if there is ``somebody_unmet`` and nobody
        relays for it; on a network of its own all may be well without a relay. Raises ``TransportError``.
        """
        if time.monotonic() - self._published_at < RECORD_RENEWED_S:
            return self._told(somebody_unmet)
        maddrs = await own_maddrs(self.p2p, DAEMON_TIMEOUT_S)
        self._own_maddrs = tuple(maddrs)
        if self._places is not None:
            await self._places.renew()
            maddrs = [*(place.maddr for place in self._places.held), *maddrs]
            cause = "" if lead_nowhere_else(self.ticket.seeds) else self._places.trouble
            self.reach_advice = unreachable_advice(cause) if cause else ""
        record = PeerRecord(
            peer=self.identity.peer_id,
            run=self.ticket.run,
            maddrs=publishable(maddrs),
            software=self.software,
        )
        if self._grpc is not None:
            record.grpc_addresses.extend(self._grpc_addresses(maddrs, self._grpc.port))
        if self._grpc is not None and record.grpc_addresses:
            record.certificate_digest = self._grpc.certificate_digest
        await self.discovery.publish_self(record, RECORD_LIFETIME_S)
        self._published_at = time.monotonic()
        return self._told(somebody_unmet)

    async def publish_position(self, position: float, versions: Sequence[int], is_last: bool = False) -> None:
        """Leave word of where the run is for those that come when everybody has left, if the last one grows
        old. Raises ``TransportError``."""
        if not is_last and time.monotonic() - self._placed_at < POSITION_RENEWED_S:
            return
        said = RunPosition(position=position, versions=versions, software=self.software)
        await self.discovery.publish_position(said)
        self._placed_at = time.monotonic()

    async def run_position(self) -> RunPosition | None:
        """Where the run was when its peers last said so; None if nobody ever did. Raises
        ``TransportError``."""
        return run_position(await self.discovery.find_positions(), time.time())

    def _told(self, somebody_unmet: bool) -> str:
        """What is to be said: news once, trouble as long as it lasts and somebody is out of reach."""
        news, self._news = self._news, ""
        return news or (self.reach_advice if somebody_unmet else "")

    def _grpc_addresses(self, maddrs: Sequence[str], port: int) -> list[str]:
        """Where others may dial our gRPC; a peer that listens everywhere names this machine's own
        addresses."""
        hosts = [self.config.announce_host or self.config.host]
        if hosts[0] in ("0.0.0.0", "::"):
            places = [place[0] for maddr in maddrs if (place := address_of(maddr)) is not None]
            hosts = [host for host in dict.fromkeys(places) if is_own(host) and not is_loopback(host)]
        return [
            f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts[:MAX_GRPC_ADDRESSES]
        ]

    async def find_peers(self, cell: int | None = None) -> list[PeerRecord]:
        """Records of the other peers of the run, as the DHT has them now; of one cell only if it is named.
        Raises ``TransportError``."""
        cells, began_at = range(self.run.cells) if cell is None else (cell,), time.monotonic()
        try:
            found = await self.discovery.find_peers(cell)
        except TransportError:
            self._note_search(cells, began_at)
            raise
        self._note_search(cells, began_at)
        me, is_here = self.identity.peer_id, self._is_on_one_machine
        records = [one for one in found if one.peer != me and (is_here or leads_elsewhere(one))]
        # One that began later may have ended before this one: what that found stays.
        new = {one for one in cells if self._found_at.get(one, -math.inf) <= began_at}
        self._found_at.update(dict.fromkeys(new, began_at))
        self._records.found([*records, *self._records.outside(new, self.run.cells)], time.monotonic())
        self._remember(records)
        return records

    def _remember(self, records: Sequence[PeerRecord]) -> None:
        """Keep in the folder whom this peer knows, those that it has used first, and a ticket that names
        some."""
        used = {record.peer for record in self._records.used(MAX_ACQUAINTANCES)}
        known = sorted(records, key=lambda record: (record.peer not in used, record.peer))
        if self._acquaintances.keep(known, self.discovery.sealed_manifest):
            with contextlib.suppress(OSError):  # whoever needs it can ask this peer's owner
                (self.config.folder / "ticket").write_text(f"{self.invitation}\n", encoding="ascii")

    @property
    def invitation(self) -> Ticket:
        """The ticket, with this peer and some that it knows as further seeds, as far as a newcomer may be
        able to dial them: it works when the first seeds are gone. Any thread may ask."""
        known = {self.identity.peer_id: list(self._own_maddrs)}
        known |= by_peer(self._acquaintances.maddrs)
        seeds = list(self.ticket.seeds)
        for maddrs in list(known.values())[:MAX_INVITERS]:
            direct = [maddr for maddr in maddrs if not is_relayed(maddr) and is_seed_address(maddr)]
            seeds += [maddr for maddr in direct if leads_as_far(maddr, self.ticket.seeds)][:1]
        return Ticket(self.ticket.run, self.ticket.run_key, tuple(dict.fromkeys(seeds))[:MAX_ADDRESSES])

    def _note_search(self, cells: Iterable[int], began_at: float) -> None:
        for cell in cells if began_at >= self._revived_at else ():
            self._searched_at[cell] = max(began_at, self._searched_at.get(cell, began_at))

    async def find_record(self, peer: PeerId, fresh: bool = False) -> PeerRecord | None:
        """The record of ``peer``. The DHT is asked for one that is not known yet, and, unless a search began
        within ``JUST_FOUND_S``, for one that has expired or if a ``fresh`` one is wanted. None or the old one
        if the DHT does not answer."""
        now = time.monotonic()
        record = self._records.use(peer, now)
        if fresh or record is None or record.expires_at < time.time():
            since = now if record is None else now - JUST_FOUND_S
            await self._search(cell_of(peer, self.run.cells), since)
            record = self._records.use(peer, time.monotonic())
        return record

    async def _search(self, cell: int, since: float) -> None:
        """Return when a search of ``cell`` has ended that began no earlier than ``since``: the next one
        serves all who wait for it, in what it finds and where it fails. That takes two bounds on a search at
        most, as the one under way may have begun too early, and one more for each searcher cancelled."""
        async with self._searching[cell]:
            if self._searched_at.get(cell, -math.inf) < since:
                with contextlib.suppress(TransportError):
                    await self.find_peers(cell)

    async def daemon_ended(self) -> str:
        """Wait until the libp2p daemon has ended by itself and does not come back, however often it is
        started again; returns its last words."""
        return await keep_alive(self.p2p, self._revived)

    async def _revived(self, words: str) -> None:
        """The daemon is a new one, which knows nobody: be known again."""
        self._news = f"the libp2p daemon had ended ({words}); it was started again"
        self._published_at = -1e9
        if self._places is not None:
            self._places.forget()
        known = self._records.used(MAX_REACHED_AGAIN)
        reached = [reach(self.p2p, PeerId(one.peer), one.maddrs, CONNECT_TIMEOUT_S) for one in known]
        again = self.discovery.rebootstrap(self.ticket.seeds)
        troubles = await asyncio.gather(again, *reached, return_exceptions=True)
        self._revived_at = time.monotonic()  # what failed so far may succeed now
        self._searched_at.clear()
        for trouble in troubles:
            if isinstance(trouble, BaseException) and not isinstance(trouble, TransportError):
                raise trouble

    async def greet_seeds(self) -> None:
        """Be known to the seeds; to one that was started anew, and with it the others, as ``rebootstrap``
        does. Raises ``TransportError`` when none answers."""
        if await self.discovery.greet(self.ticket.seeds):
            self._published_at = -1e9

    async def rebootstrap(self) -> None:
        """Look for the seeds again; raises ``TransportError`` when none answers."""
        self._published_at = -1e9
        try:
            await self.discovery.rebootstrap(self.ticket.seeds)
        except TransportError:
            await self._do_without_seeds()
            raise

    async def _do_without_seeds(self) -> None:
        """Do what a seed would: keep the run's settings in the DHT. And find the way back, if nobody is
        known."""
        if not len(self._records):
            await self._ask_acquaintances()
        elif time.monotonic() - self._manifest_kept_at > MANIFEST_RENEWED_S:
            await self.discovery.keep_manifest()
            self._manifest_kept_at = time.monotonic()

    async def close(self) -> None:
        """Give everything back. May be called twice."""
        await self._stack.aclose()


class KnownRecords:
    """What the last search found, and those used within ``RECORD_KEPT_S``: at most ``MAX_PEERS``."""

    def __init__(self) -> None:
        self._records: dict[PeerId, PeerRecord] = {}
        self._used_at: dict[PeerId, float] = {}

    def __len__(self) -> int:
        return len(self._records)

    def found(self, records: Sequence[PeerRecord], now: float) -> None:
        """Take what a search found in the place of the last one's. Of two records of a peer the one that
        lasts longer is the newer: a node of the DHT may answer with an old copy."""
        listed = dict[PeerId, PeerRecord]()
        for record in records[:MAX_PEERS]:
            peer = PeerId(record.peer)
            held = listed.get(peer) or self._records.get(peer)
            listed[peer] = record if held is None or record.expires_at >= held.expires_at else held
        used_at = {peer: at for peer, at in self._used_at.items() if now - at < RECORD_KEPT_S}
        for peer in sorted(used_at, key=lambda peer: used_at[peer], reverse=True):
            if len(listed) < MAX_PEERS and peer not in listed:
                listed[peer] = self._records[peer]
        self._records = listed
        self._used_at = {peer: at for peer, at in used_at.items() if peer in listed}

    def outside(self, some: Collection[int], cells: int) -> list[PeerRecord]:
        """Those of other cells than ``some``."""
        return [record for peer, record in self._records.items() if cell_of(peer, cells) not in some]

    def used(self, most: int) -> list[PeerRecord]:
        """Records that were used of late, the newest first."""
        newest = sorted(self._used_at, key=lambda peer: self._used_at[peer], reverse=True)
        return [self._records[peer] for peer in newest[:most] if peer in self._records]

    def maddrs_of(self, peer: PeerId) -> Sequence[str]:
        """Where its last record says that ``peer`` is; empty if it is not known."""
        record = self._records.get(peer)
        return () if record is None else tuple(record.maddrs)

    def use(self, peer: PeerId, now: float) -> PeerRecord | None:
        """The record of ``peer``, kept for longer from now on."""
        if peer in self._records:
            self._used_at[peer] = now
        return self._records.get(peer)


def publishable(maddrs: Sequence[str]) -> list[str]:
    """The addresses that others take and that fit into a record, in the order in which libp2p names them."""
    room = MAX_RECORD_BYTES // 2
    taken: list[str] = []
    for maddr in maddrs:
        if len(maddr) <= min(MAX_STRING, room) and len(taken) < MAX_ADDRESSES:
            taken.append(maddr)
            room -= len(maddr)
    return taken


def leads_as_far(maddr: str, seeds: Sequence[str]) -> bool:
    """Whether who can dial the seeds of a ticket may be able to dial ``maddr``."""
    host = maddr.split("/")[2]
    if all(_is_loopback_maddr(seed) for seed in seeds):
        return _is_loopback_maddr(maddr)
    return not _is_loopback_maddr(maddr) if lead_nowhere_else(seeds) else not is_near(host)


def _is_loopback_maddr(maddr: str) -> bool:
    kind, host = maddr.split("/")[1:3]
    return kind in {"ip4", "ip6"} and is_loopback(host)


def require_others_can_dial(config: PeerConfig, ticket: Ticket) -> None:
    """Raise ``ConfigError`` if a peer would tell others on other machines to dial their own: it would hear
    nobody, or live on relays."""
    host = config.announce_host or config.host
    if not is_loopback(host) or is_on_this_machine(ticket):
        return
    key = "announce_host" if config.announce_host else "host"
    raise ConfigError(
        "this peer's settings",
        key,
        f"{host} leads nowhere from another machine, and the seeds are on others; listen on all addresses "
        '(host "0.0.0.0") and leave announce_host out, or name there what others can dial',
    )


def is_on_this_machine(ticket: Ticket) -> bool:
    """Whether all seeds are, as far as their addresses tell."""
    places = [seed.split("/")[1:3] for seed in ticket.seeds]
    return all(kind in {"ip4", "ip6"} and (is_loopback(host) or is_own(host)) for kind, host in places)


def leads_elsewhere(record: PeerRecord) -> bool:
    """Whether a record has an address that leads to another machine than the one that dials it, or none."""
    hosts = [address.rpartition(":")[0].strip("[]") for address in record.grpc_addresses]
    hosts += [
        "a relay" if is_relayed(maddr) else maddr.split("/")[2]
        for maddr in record.maddrs
        if maddr.count("/") > 2
    ]
    return not hosts or not all(map(is_loopback, hosts))


def lead_nowhere_else(seeds: Sequence[str]) -> bool:
    """Whether all these multiaddrs are of private networks: whoever gets to such a seed gets to its
    neighbours too, so nobody needs a relay."""
    return all(is_near(seed.split("/")[2]) for seed in seeds)


def unreachable_advice(cause: str) -> str:
    """What to tell somebody whose peer has no place at a relay. ``cause``: why there is none."""
    return (
        "forward two TCP ports of the router to this machine and join with --announce-host NAME "
        "--host 0.0.0.0 --libp2p-port PORT --grpc-port PORT, or ask the organiser for a seed that relays "
        f"(--announce-host): peers are out of reach, and no seed passes on traffic for this peer ({cause})"
    )
