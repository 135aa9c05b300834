"""This process on the network before and beside its model: daemon, DHT, run manifest, carriers, records.

``open`` needs only a ticket: it ends with the verified ``RunConfig``, before anything large is downloaded.
The node then starts the carriers and keeps this peer's record alive: where it can be reached.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import time
import zlib
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from p2p_co2.config import PeerConfig, RunConfig
from p2p_co2.errors import ConfigError, EnvironmentFault, TicketError, TransportError
from p2p_co2.net.discovery import Discovery
from p2p_co2.net.discovery.records import run_position
from p2p_co2.net.transport.addresses import (
    address_of,
    is_loopback,
    is_near,
    is_own,
    is_relayed,
    seed_addresses_of,
)  # fmt: skip
from p2p_co2.net.transport.base import CONNECT_TIMEOUT_S, MESSAGE_TIMEOUT_S, Carrier, OnMessage, OnRefused
from p2p_co2.net.transport.grpc_carrier import GrpcCarrier, shows
from p2p_co2.net.transport.libp2p.carrier import Libp2pCarrier
from p2p_co2.net.transport.libp2p.control import own_maddrs, reach, ways_to_peers
from p2p_co2.net.transport.libp2p.daemon import keep_alive, start_p2p, stop_p2p
from p2p_co2.net.transport.libp2p.hivemind import P2P
from p2p_co2.net.transport.libp2p.relay import Places
from p2p_co2.net.transport.probe import ProbeServer, clock_offsets_s, judge_clock
from p2p_co2.net.transport.slow import SharedLine, SlowLine
from p2p_co2.node.doorkeeper import Doorkeeper
from p2p_co2.node.environment import RunGroup
from p2p_co2.peer_options import listening
from p2p_co2.system.process import FolderLock
from p2p_co2.ticket import Ticket, by_peer, kept_seeds
from p2p_co2.version import __version__
from p2p_co2.wire.heartbeat import HEARTBEAT_S
from p2p_co2.wire.identity import Identity, PeerId
from p2p_co2.wire.limits import MAX_ADDRESSES, MAX_DIALLED, MAX_PEERS, MAX_STRING
from p2p_co2.wire.messages_pb2 import PeerRecord, RunPosition

ELSEWHERE = (
    "this identity is at work elsewhere, too, as from a copied folder; give one of the two another --folder: "
    "it makes an identity of its own"
)
MAX_INVITERS = 5
"""Peers that a later ticket names beside the seeds: it has to be short enough to be pasted."""
MAX_REACHED_AGAIN = 16
"""Peers that a daemon that was started again is led to: with a seed that is down, nobody else knows them."""


class Reach:
    """This peer's addresses: those that libp2p has found, its places at relays, and its gRPC port."""

    def __init__(self, p2p: P2P, me: PeerId, config: PeerConfig, ticket: Ticket) -> None:
        self._p2p = p2p
        self._me = me
        self._config = config
        self._ticket = ticket
        # Who can be dialled, or runs on the seeds' own machine, needs no places.
        needs_none = config.announce_host or ticket.is_local
        self._places = None if needs_none else Places(p2p, me, ticket.seeds)
        self.grpc: GrpcCarrier | None = None
        self.own_maddrs: tuple[str, ...] = ()
        """As libp2p named them last."""
        self.advice = ""
        """What keeps others from reaching this peer and what helps; empty if nothing is known to."""
        self.seeds = list(ticket.seeds)
        """Their multiaddrs, and those by which they were reached, where names of private networks lead."""
        self._elsewhere: PeerRecord | None = None
        """This peer's record as another process has written it last."""

    async def is_elsewhere(self, own: PeerRecord) -> bool:
        """Whether another process, which lives, has put ``own``, this peer's record, into the DHT. Each has a
        certificate of its own; that of this peer's last process nobody shows or renews."""
        known = self._elsewhere
        digest = own.certificate_digest
        if not digest or (self.grpc is not None and digest == self.grpc.certificate_digest):
            return False
        self._elsewhere = own
        if known is not None and known.certificate_digest == digest:
            return own.expires_at > known.expires_at
        return any([await shows(address, digest) for address in own.grpc_addresses[:MAX_DIALLED]])

    async def record(self) -> PeerRecord:
        """This peer's record, without what discovery adds. Raises ``TransportError``."""
        maddrs = await own_maddrs(self._p2p, CONNECT_TIMEOUT_S)
        self.own_maddrs = tuple(maddrs)
        if self._places is not None:
            await self._places.renew()
            # Others dial so many, and one place is enough.
            maddrs = [*maddrs[: MAX_DIALLED - bool(self._places.held)], *self._places.held]
            cause = "" if lead_nowhere_else(self._ticket.seeds) else self._places.trouble
            self.advice = unreachable_advice(cause) if cause else ""
        record = PeerRecord(peer=self._me, run=self._ticket.run, maddrs=publishable(maddrs))
        if self.grpc is not None and (addresses := self._grpc_addresses(maddrs, self.grpc.port)):
            record.grpc_addresses.extend(addresses)
            record.certificate_digest = self.grpc.certificate_digest
        return record

    def forget_places(self) -> None:
        """The daemon is a new one: what it held is lost."""
        if self._places is not None:
            self._places.forget()

    def _grpc_addresses(self, maddrs: Sequence[str], port: int) -> list[str]:
        """Where others may dial our gRPC; a peer that listens everywhere names this machine's own
        addresses."""
        hosts = [self._config.announce_host or self._config.host]
        if hosts[0] in ("0.0.0.0", "::"):
            places = [place[0] for maddr in maddrs if (place := address_of(maddr)) is not None]
            hosts = [host for host in dict.fromkeys(places) if is_own(host) and not is_loopback(host)]
        hosts = hosts[:MAX_DIALLED]
        return [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts]


def publishable(maddrs: Sequence[str]) -> list[str]:
    """The addresses that others take and dial, in the order in which libp2p names them."""
    return [maddr for maddr in maddrs if len(maddr) <= MAX_STRING][:MAX_DIALLED]


def leads_as_far(maddr: str, seeds: Sequence[str]) -> bool:
    """Whether a peer that can dial the seeds of a ticket should dial ``maddr``. A private address is of
    somebody's own network where no seed is of one."""
    if all(is_loopback(_host_of(seed)) for seed in seeds):
        return is_loopback(_host_of(maddr))
    return not (is_loopback if any(map(is_near, map(_host_of, seeds))) else is_near)(_host_of(maddr))


def _host_of(address: str) -> str:
    """Of a multiaddr or "host:port"; "" of what is neither."""
    if address.startswith("/"):
        return "".join(address.split("/")[2:3])
    return address.rpartition(":")[0].strip("[]")


def require_others_can_dial(config: PeerConfig, ticket: Ticket) -> None:
    """Raise ``ConfigError`` if a peer would tell others on other machines to dial their own: it would hear
    nobody, or live on relays."""
    host = config.announce_host or config.host
    if is_loopback(host) and not is_on_this_machine(ticket):
        raise ConfigError(
            "this peer's settings",
            "announce_host" if config.announce_host else "host",
            f"{host} leads nowhere from another machine, and the seeds are on others; listen on all "
            'addresses (host "0.0.0.0") and leave announce_host out, or name there what others can dial',
        )


def is_on_this_machine(ticket: Ticket) -> bool:
    """Whether all seeds are, as far as their addresses tell."""
    places = [seed.split("/")[1:3] for seed in ticket.seeds]
    return all(kind in {"ip4", "ip6"} and (is_loopback(host) or is_own(host)) for kind, host in places)


def leads_elsewhere(record: PeerRecord) -> bool:
    """Whether a record has an address that leads to another machine than the one that dials it, or none."""
    named = (*record.grpc_addresses, *record.maddrs)
    hosts = ["a relay" if is_relayed(one) else _host_of(one) for one in named]
    return not hosts or not all(map(is_loopback, hosts))


def lead_nowhere_else(seeds: Sequence[str]) -> bool:
    """Whether all these multiaddrs are of private networks: whoever gets to such a seed gets to its
    neighbours too, so nobody needs a relay."""
    return all(is_near(_host_of(seed)) for seed in seeds)


def unreachable_advice(cause: str) -> str:
    """What to tell somebody whose peer has no place at a relay. ``cause``: why there is none."""
    return (
        "forward two TCP ports of the router to this machine and join with --announce-host NAME "
        "--host 0.0.0.0 --libp2p-port PORT --grpc-port PORT, or ask the organiser for a seed that relays "
        f"(--announce-host): peers are out of reach, and no seed passes on traffic for this peer ({cause})"
    )


class RecordBook:
    """Records of at most ``MAX_PEERS`` other peers: those that the DHT listed last, and those in use.

    One search at a time, and it serves all that wait for it, in what it finds and where it fails. Else each
    of a dozen dead peers would have all of the DHT searched, for each carrier. ``find``: records of the other
    peers from the DHT; raises ``TransportError``."""

    def __init__(self, find: Callable[[], Awaitable[list[PeerRecord]]]) -> None:
        self._find = find
        self._records: dict[PeerId, PeerRecord] = {}
        self._used_at: dict[PeerId, float] = {}
        self._began_at = -math.inf
        """When the last search began that has ended."""
        self._searching = asyncio.Lock()

    def __len__(self) -> int:
        return len(self._records)

    async def search(self) -> list[PeerRecord]:
        """The records of other peers, as the DHT has them now. Raises ``TransportError``."""
        async with self._searching:
            return await self._search()

    async def record_of(self, peer: PeerId, fresh: bool = False) -> PeerRecord | None:
        """The record of ``peer``. The DHT is asked for one that is not known yet. Unless a search began
        within a heartbeat, so it is for one that has expired, or where a ``fresh`` one is wanted. None or
        the old one if the DHT does not answer."""
        now = time.monotonic()
        record = self._use(peer)
        if fresh or record is None or record.expires_at < time.time():
            since = now if record is None else now - HEARTBEAT_S
            async with self._searching:
                if self._began_at < since:
                    with contextlib.suppress(TransportError):
                        await self._search()
            record = self._use(peer)
        return record

    def forget_searches(self) -> None:
        """What failed so far may succeed now."""
        self._began_at = -math.inf

    def known(self, most: int) -> list[PeerRecord]:
        """Records of others, those that were used last first. Any thread may ask."""
        records = self._records
        peers = sorted(records, key=lambda peer: (-self._used_at.get(peer, 0.0), peer))
        return [records[peer] for peer in peers[:most]]

    def maddrs_of(self, peer: PeerId) -> Sequence[str]:
        """Where its last record says that ``peer`` is; empty if it is not known."""
        record = self._records.get(peer)
        return () if record is None else tuple(record.maddrs)

    async def _search(self) -> list[PeerRecord]:
        began_at = time.monotonic()
        try:
            found = await self._find()
        except TransportError:
            self._began_at = began_at
            raise
        self._began_at = began_at
        self._take(found, time.monotonic())
        return found

    def _take(self, found: Sequence[PeerRecord], now: float) -> None:
        """Take what a search found in the place of the last one's, and what was used. Of two records of a
        peer the one that lasts longer is the newer: a node of the DHT may answer with an old copy."""
        listed = dict[PeerId, PeerRecord]()
        for record in found[:MAX_PEERS]:
            peer = PeerId(record.peer)
            held = listed.get(peer) or self._records.get(peer)
            listed[peer] = record if held is None or record.expires_at >= held.expires_at else held
        for peer, at in sorted(self._used_at.items(), key=lambda item: item[1], reverse=True):
            if now - at < 5 * MESSAGE_TIMEOUT_S and len(listed) < MAX_PEERS:
                listed.setdefault(peer, self._records[peer])
        self._records = listed
        self._used_at = {peer: at for peer, at in self._used_at.items() if peer in listed}

    def _use(self, peer: PeerId) -> PeerRecord | None:
        """The record of ``peer``, kept for longer from now on."""
        if peer in self._records:
            self._used_at[peer] = time.monotonic()
        return self._records.get(peer)


@dataclass
class ModelShare:
    """What this peer holds of the model, as its record says. ``stage``: in a run with stages.
    ``tokens_per_s``: how fast it computes; 0 if not known. ``visits``: it computes nothing, and only takes
    what the stage's peers agree on."""

    stage: int | None = None
    tokens_per_s: float = 0.0
    visits: bool = False


class Network:
    """Make it with ``open``, end it with ``close``; both on the network thread."""

    p2p: P2P
    discovery: Discovery
    _reach: Reach
    software = f"p2p-co2 {__version__}"

    def __init__(self, identity: Identity, config: PeerConfig, ticket: Ticket) -> None:
        self.identity = identity
        self.config = listening(config, ticket)
        self.ticket = ticket
        self.run = RunConfig()
        self.door = Doorkeeper(identity.peer_id, ticket, config.folder, self.run)
        """Of this run once it is open."""
        self.carriers: tuple[Carrier, ...] = ()
        self.clock_doubt = ""
        """Why this machine's clock may keep others from hearing it, and what to do; empty if all is well."""
        self.records = RecordBook(self._find)
        self._stack = AsyncExitStack()
        self._news = ""
        """To be told once."""
        self._done_at: dict[str, float] = {}
        """Of what is done again when it grows old."""
        self.holds = ModelShare()

    @classmethod
    async def open(cls, ticket: Ticket, config: PeerConfig, on_refused: OnRefused) -> Network:
        """Join the run's DHT and read its manifest.

        Raises ``TransportError`` when no seed answers, and ``TicketError`` when the run's manifest is not
        there or not the ticket's. ``EnvironmentFault``: this machine cannot take part. ``ConfigError``: a
        config of another version, or an identity that is at work elsewhere. Cancelling it leaves nothing
        behind.
        """
        async with AsyncExitStack() as stack:
            stack.callback(FolderLock(config.folder).release)
            network = cls(Identity.load_or_create(config.folder / "identity"), config, ticket)
            await network._open(on_refused, stack)
            network._stack = stack.pop_all()
        return network

    async def close(self) -> None:
        """Give everything back. May be called twice."""
        await self._stack.aclose()

    async def _open(self, on_refused: OnRefused, stack: AsyncExitStack) -> None:
        config = self.config
        path = self.config.folder / "identity"
        require_others_can_dial(config, self.ticket)
        p2p = await start_p2p(
            path, config.host, config.libp2p_port, announce_host=config.announce_host, relay=config.relay,
            upnp=config.upnp,
        )  # fmt: skip
        stack.push_async_callback(stop_p2p, p2p)
        self.use(p2p, Discovery(p2p, self.identity, self.ticket.run, on_refused))
        stack.push_async_callback(self.discovery.close)
        contacts = self.ticket.seeds
        try:
            await self.discovery.start(contacts)
        except TransportError:  # peers that this one met when it was here before may be up
            if not (contacts := kept_seeds(config.folder, self.ticket.run)):
                raise
            await self.discovery.rebootstrap(contacts)
        ways = await ways_to_peers(p2p, CONNECT_TIMEOUT_S)
        self._reach.seeds += [way for peer in by_peer(contacts) for way in ways.get(peer, ())]
        await self._compare_clocks(contacts)
        manifest = await self.discovery.fetch_manifest(self.ticket.run_key)
        self.run = RunConfig.from_canonical_bytes(manifest.config)
        if self.run.digest() != self.ticket.run:
            fix = "ask for a new ticket"
            raise TicketError(f"the run's settings are not the ones this ticket was made for; {fix}")
        self.door = Doorkeeper(self.identity.peer_id, self.ticket, config.folder, self.run)
        self.door.enter()
        await self.records.search()
        if self._news:
            raise ConfigError(str(path), "", self._news)

    def use(self, p2p: P2P, discovery: Discovery) -> None:
        """The daemon and the DHT that this process stands on."""
        self.p2p = p2p
        self.discovery = discovery
        self._reach = Reach(p2p, self.identity.peer_id, self.config, self.ticket)

    async def _compare_clocks(self, contacts: Sequence[str]) -> None:
        """Raise ``EnvironmentFault`` if this machine's clock is so far off that others do not hear it. Lesser
        trouble is ``clock_doubt``. Nobody's answer is asked for once more."""
        asked = self.p2p, self.ticket.run, by_peer(contacts)
        judged = judge_clock(await clock_offsets_s(*asked) or await clock_offsets_s(*asked))
        words = f"clock: {judged.measured}; {judged.advice}"
        if judged.state == "cannot":
            raise EnvironmentFault(words)
        self.clock_doubt = "" if judged.state == "ok" else words

    async def start_carriers(self, on_message: OnMessage, on_refused: OnRefused) -> None:
        """Listen, and answer probes. Raises ``EnvironmentFault`` when a port is taken."""
        config = self.config
        run = self.ticket.run
        me = self.identity
        carriers: list[Carrier] = []
        if config.carrier in ("auto", "grpc"):
            self._reach.grpc = GrpcCarrier(me, run, config.host, config.grpc_port)
            carriers.append(self._reach.grpc)
        if config.carrier in ("auto", "libp2p"):
            carriers.append(Libp2pCarrier(self.p2p, me, run, newest=self.records.maddrs_of))
        if config.slow_line:
            line = SharedLine(SlowLine.parse(config.slow_line), zlib.crc32(me.peer_id.encode()))
            for carrier in carriers:
                carrier.line = line
        for carrier in carriers:
            for seed in self.ticket.seeds:  # many peers are behind one that relays
                carrier.dials.answered(seed)
            carrier.admission.members = self.door.members
            self._stack.push_async_callback(carrier.close)
            await carrier.start(on_message, on_refused)
        self.carriers = tuple(carriers)
        keeping = asyncio.create_task(self.door.keep(self.carriers), name="keep the door")
        self._stack.callback(keeping.cancel)
        probes = ProbeServer(self.p2p, run, config.limits.upload_bytes_per_s)
        self._stack.push_async_callback(probes.close)
        await probes.start()

    def _is_due(self, name: str, every_s: float) -> bool:
        return time.monotonic() - self._done_at.get(name, -math.inf) >= every_s

    # ---- what others find

    async def publish_self(self, somebody_unmet: bool = False) -> str:
        """Put this peer's signed record into the DHT if the last one grows old, with its places at relays.

        Returns what is to be said: news once, and what to do so that others reach this peer. That is only
        said where there is ``somebody_unmet`` and nobody relays: else all may be well. Raises
        ``TransportError``.
        """
        if self._is_due("record", MESSAGE_TIMEOUT_S / 3):
            record = await self._reach.record()
            record.software = self.software
            record.stage = self.holds.stage or 0
            record.tokens_per_s = self.holds.tokens_per_s
            record.visits = self.holds.visits
            record.MergeFrom(PeerRecord(badge=self.door.members.badge))
            await self.discovery.publish_self(record)
            self._done_at["record"] = time.monotonic()
        news = self._news or self.door.news
        self._news = ""
        return news or (self._reach.advice if somebody_unmet else "")

    async def publish_position(self, position: float, versions: Sequence[int], is_last: bool = False) -> None:
        """Leave word of where the run is for those that come when everybody has left, if the last one grows
        old. Raises ``TransportError``."""
        if is_last or self._is_due("position", MESSAGE_TIMEOUT_S):
            said = RunPosition(position=position, versions=versions, software=self.software)
            said.stage = self.holds.stage or 0
            said.rounds = self.door.members.terms.rounds(math.inf)
            said.MergeFrom(RunPosition(badge=self.door.members.badge))
            await self.discovery.publish_position(said)
            self._done_at["position"] = time.monotonic()

    async def run_position(self, group: RunGroup | None = None) -> RunPosition | None:
        """Where the run was when peers of ``group``, or any, last said so; None if nobody ever did. Raises
        ``TransportError``."""
        found = await self.discovery.find_positions()
        said = [one for one in found if self.door.members.admits(one, one.written_at)]
        return run_position([one for one in said if group is None or group.has(one.stage)], time.time())

    @property
    def visits(self) -> bool:
        """Whether this process only takes what others agree on, and is no peer to anybody who looks."""
        return self.holds.visits

    @property
    def reach_advice(self) -> str:
        """What keeps others from reaching this peer and what helps; empty if nothing is known to."""
        return self._reach.advice

    @property
    def invitation(self) -> Ticket:
        """The ticket's open part, with this peer and some that it knows as further seeds: it works when the
        first ones are gone. Only those are named that newcomers may be able to dial. Of a peer's record only
        its own addresses count: it could send newcomers to anybody. Any thread may ask."""
        seeds = list(self.ticket.seeds)
        known = [(one.peer, one.maddrs) for one in self.records.known(MAX_INVITERS - 1)]
        for peer, maddrs in ((self.identity.peer_id, self._reach.own_maddrs), *known):
            direct = seed_addresses_of(peer, maddrs)
            seeds += [maddr for maddr in direct if leads_as_far(maddr, self.ticket.seeds)][:1]
        return Ticket(self.ticket.run, self.ticket.run_key, tuple(dict.fromkeys(seeds))[:MAX_ADDRESSES])

    # ---- finding others

    async def find_peers(self) -> list[PeerRecord]:
        """Records of the other peers of the run, as the DHT has them now. Raises ``TransportError``."""
        records = await self.records.search()
        self.door.keep_ticket(self.invitation)
        return records

    def listed(self, stage: int) -> list[PeerRecord]:
        """Records of the other peers that hold ``stage``, as the DHT listed them last; not of visitors."""
        known = self.records.known(MAX_PEERS)
        return [record for record in known if record.stage == stage and not record.visits]

    async def needed_stage(self, fits: Collection[int]) -> int:
        """The stage of those that ``fits`` in which this peer is needed most: the emptiest of those below
        ``min_replicas``, else the slowest. Raises ``TransportError``.

        This peer is listed in it, and looks again a moment later, since newcomers crowd. All but the first
        of them by id move to where fewer are."""
        await self.records.search()
        stage = self._neediest(fits)
        for _ in fits:
            self.holds.stage = stage
            self._done_at.pop("record", None)
            await self.publish_self()
            await asyncio.sleep(2 * HEARTBEAT_S)
            await self.records.search()
            others = self.listed(stage)
            better = self._neediest(fits)
            is_first = self.identity.peer_id < min((one.peer for one in others), default="~")
            if is_first or len(self.listed(better)) >= len(others):
                break
            stage = better
        self.holds.stage = stage
        self._done_at.pop("record", None)
        return stage

    def _neediest(self, fits: Collection[int]) -> int:
        pipeline = self.run.pipeline
        me = self.identity.peer_id

        def need(stage: int) -> tuple[int, float, bytes]:
            held = self.listed(stage)
            few = min(len(held), pipeline.min_replicas)
            rate = sum(record.tokens_per_s for record in held) if few == pipeline.min_replicas else 0.0
            return few, rate, hashlib.sha256(f"{me} {stage}".encode()).digest()

        return min(fits, key=need)

    async def find_record(self, peer: PeerId, fresh: bool = False) -> PeerRecord | None:
        """See ``RecordBook.record_of``; None of one that may take no part."""
        record = await self.records.record_of(peer, fresh)
        return None if self.door.members.trouble_with(peer) else record

    async def _find(self) -> list[PeerRecord]:
        found = await self.discovery.find_peers(own=True)
        others = [one for one in found if one.peer != self.identity.peer_id]
        others = list(filter(self.door.members.admits, others))
        for own in (one for one in found if one.peer == self.identity.peer_id):
            self._news = ELSEWHERE if await self._reach.is_elsewhere(own) else self._news
        if is_on_this_machine(self.ticket):
            return others
        others = list(filter(leads_elsewhere, others))
        for named in (named for one in others for named in (one.maddrs, one.grpc_addresses)):
            named[:] = [address for address in named if leads_as_far(address, self._reach.seeds)]
        return others

    # ---- what goes wrong

    async def daemon_ended(self) -> str:
        """Wait until the libp2p daemon has ended by itself and does not come back, however often it is
        started again; returns its last words."""
        return await keep_alive(self.p2p, self._revived)

    async def _revived(self, words: str) -> None:
        """The daemon is a new one, which knows nobody: be known again."""
        self._news = f"the libp2p daemon had ended ({words}); it was started again"
        self._done_at.pop("record", None)
        self._reach.forget_places()
        known = self.records.known(MAX_REACHED_AGAIN)
        troubles = await asyncio.gather(
            self.discovery.rebootstrap(self.ticket.seeds),
            *(reach(self.p2p, PeerId(one.peer), one.maddrs, CONNECT_TIMEOUT_S) for one in known),
            return_exceptions=True,
        )
        self.records.forget_searches()
        for trouble in troubles:
            if isinstance(trouble, BaseException) and not isinstance(trouble, TransportError):
                raise trouble

    async def greet_seeds(self) -> None:
        """Be known to the seeds; to one that was started anew, and with it the others, as ``rebootstrap``
        does. Raises ``TransportError`` when none answers."""
        if await self.discovery.greet(self.ticket.seeds):
            self._done_at.pop("record", None)

    async def rebootstrap(self) -> None:
        """Look for the seeds again; raises ``TransportError`` when none answers. Then this peer keeps the
        run's settings in the DHT, as often as a seed would."""
        self._done_at.pop("record", None)
        try:
            await self.discovery.rebootstrap(self.ticket.seeds)
        except TransportError:
            if len(self.records) and self._is_due("manifest", 10 * MESSAGE_TIMEOUT_S):
                await self.discovery.keep_manifest()
                self._done_at["manifest"] = time.monotonic()
            raise
