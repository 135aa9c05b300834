"""Finding peers, the run's settings and the outcomes of rounds in a hivemind DHT.

``DHTNode`` runs in the caller's loop over the caller's ``P2P`` (no fork, no process of its own). Its caches
are off: with a few thousand small records they would save little and give old answers. Joining is ours rather
than hivemind's, because a single dead seed, or a clock that is three seconds off, must not keep a peer out.

Laws: nothing is returned that ``records`` has not checked; every call ends in bounded time. Price: the DHT
(Kademlia, Maymounkov and Mazieres 2002) keeps a record on five nodes until it expires, so records have to be
published again before they do, and for that long a dead peer is still listed.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from contextlib import asynccontextmanager

from p2p_co2 import __version__
from p2p_co2.errors import ConfigError, LocalProtocolError, RemoteProtocolError, TicketError, TransportError
from p2p_co2.net.discovery.records import (
    DECISION_CONTEXT,
    MANIFEST_CONTEXT,
    MAX_LIFETIME_S,
    NOBODY,
    PEER_CONTEXT,
    PEER_SHARDS,
    POSITION_CONTEXT,
    POSITION_LIFETIME_S,
    OnForged,
    Records,
    decision_key,
    manifest_key,
    peers_key,
    position_key,
    run_digest,
    shard_of,
)
from p2p_co2.net.transport.base import CLOSE_TIMEOUT_S
from p2p_co2.net.transport.libp2p.control import daemon_errors, reach
from p2p_co2.net.transport.libp2p.daemon import require_daemon
from p2p_co2.net.transport.libp2p.hivemind import (
    DHTID,
    P2P,
    DHTNode,
    DictionaryDHTValue,
    MSGPackSerializer,
    P2PDaemonError,
    PeerID,
    ValueWithExpiration,
    get_dht_time,
)
from p2p_co2.protocol.wire.identity import Identity, PeerId, public_key_of
from p2p_co2.protocol.wire.limits import MAX_CELLS, MAX_PEERS, MAX_RECORD_BYTES, PROTOCOL_VERSION
from p2p_co2.protocol.wire.messages_pb2 import PeerRecord, RunManifest, RunPosition

REACH_TIMEOUT_S = 10.0
"""Bound on reaching the seeds, all at once."""
BACKOFF_STEP_S = 0.5
"""Between two tries while libp2p does not dial: it waits 5 s after a first failure, longer after more."""
CALL_TIMEOUT_S = 15.0
"""Bound on one store or search."""
BUCKET_SIZE = 8
"""Kademlia's k, as BitTorrent has it: a search asks at least so many nodes, and each names so many others. Of
hivemind's 20 a search for peers among 24 cost 270 kB. A record is on five nodes."""
MAX_STORED_KEYS = 16384
"""Keys that this node keeps for the swarm; beyond it those that expire first are dropped."""

Entries = dict[str, bytes]
"""Sealed values under one key, by the peer that wrote them."""


class Discovery:
    """One node of the run's DHT.

    ``run`` is the run's digest (32 bytes). ``on_refused`` hears of records that are forged or malformed.
    """

    def __init__(self, p2p: P2P, identity: Identity, run: bytes, on_refused: OnForged) -> None:
        self._p2p, self._identity, self._run = p2p, identity, run
        self._on_refused = on_refused
        self._records = Records(run, on_refused, get_dht_time)
        self._sealed_manifest = b""
        self._seeds = frozenset[PeerId]()
        """Whom this node joined through: they outlast the peers."""
        self._node: DHTNode | None = None
        self._seed_nodes: dict[PeerId, DHTID] = {}
        """The DHT's own id of each seed that answered: another one is another process."""

    async def start(self, initial_peers: Sequence[str]) -> None:
        """Join the DHT through any of the seeds (multiaddrs that end in /p2p/ID); without seeds begin a new
        one.

        Raises ``TransportError`` with each address and its cause when none can be reached.
        """
        with daemon_errors("the libp2p daemon did not answer"):
            node = await DHTNode.create(
                p2p=self._p2p,
                record_validator=self._records,
                bucket_size=BUCKET_SIZE,
                cache_locally=False,
                cache_nearest=0,
                cache_on_store=False,
                cache_refresh_before_expiry=0,
                reuse_get_requests=False,
            )
        node.protocol.storage.maxsize = MAX_STORED_KEYS
        node.protocol.cache.maxsize = MAX_STORED_KEYS
        self._records.stored_under = self._stored_under
        self._node = node
        await self._join(initial_peers)

    async def rebootstrap(self, initial_peers: Sequence[str]) -> None:
        """Join again after all known peers were lost: ``start`` without a new node; publish afterwards. Same
        errors."""
        self._running().blacklist.clear()
        await self._join(initial_peers)

    async def greet(self, seeds: Sequence[str]) -> bool:
        """Be known to the seeds, at the price of a message to each. Whether one of them was started anew: it
        has forgotten what it kept, and this node has joined again. Raises ``TransportError``."""
        known = dict(self._seed_nodes)
        await self._greet_all(self._others(seeds))
        is_anew = known != self._seed_nodes
        if is_anew:
            await self._look_around()
        return is_anew

    async def publish_self(self, record: PeerRecord, lifetime_s: float) -> None:
        """Publish where we can be reached; again before ``lifetime_s`` is over. Raises ``TransportError``."""
        own = PeerRecord()
        own.CopyFrom(record)
        own.peer, own.run, own.expires_at = self._identity.peer_id, self._run, get_dht_time() + lifetime_s
        sealed = self._identity.seal(PEER_CONTEXT, own.SerializeToString())
        key = peers_key(self._run, self._records.shard_of(self._identity.peer_id))
        await self._store(key, self._identity.peer_id, sealed, own.expires_at)

    async def find_peers(self, cell: int | None = None) -> list[PeerRecord]:
        """The checked, unexpired records of all other peers, sorted by peer; those of one cell if it is named
        and the run has several. Raises ``TransportError``."""
        found = []
        everywhere = range(self._records.shards)
        shards = everywhere if cell is None or self._records.cells == 1 else (cell,)
        for entries in await self._find([peers_key(self._run, shard) for shard in shards]):
            for writer, sealed in entries.items():
                try:
                    record = self._records.peer_record(writer, sealed)
                except RemoteProtocolError as error:
                    self._on_refused(NOBODY, error)
                    continue
                if record.expires_at > get_dht_time() and writer != self._identity.peer_id:
                    found.append(record)
        return sorted(found, key=lambda record: record.peer)[:MAX_PEERS]

    async def publish_manifest(
        self, config: bytes, recipe_digest: bytes, lifetime_s: float = MAX_LIFETIME_S
    ) -> None:
        """Publish the run's settings (canonical bytes of ``RunConfig``) and the recipe's digest (32 bytes).

        Our identity becomes the run's key: tickets must name it. Raises ``ConfigError`` for settings that do
        not fit, ``TransportError``.
        """
        if run_digest(config) != self._run or len(recipe_digest) != 32:
            raise LocalProtocolError("the manifest of another run, or a recipe digest that is not 32 bytes")
        manifest = RunManifest(
            run=self._run,
            config=config,
            recipe_digest=recipe_digest,
            software=__version__,
            published_at=get_dht_time(),
            protocol=PROTOCOL_VERSION,
        )
        sealed = self._identity.seal(MANIFEST_CONTEXT, manifest.SerializeToString())
        if len(sealed) > MAX_RECORD_BYTES:
            raise ConfigError(
                "the run file",
                "",
                f"{len(sealed)} bytes when published, at most {MAX_RECORD_BYTES}; shorten recipe_options",
            )
        self._records.run_key, self._sealed_manifest = self._identity.peer_id, sealed
        self._records.spread(_cells_in(config))
        await self.keep_manifest(lifetime_s)

    async def fetch_manifest(self, run_key: PeerId) -> RunManifest:
        """The run's manifest, if ``run_key`` (from the ticket) signed it and its settings have the run's
        digest.

        From now on this node stores no other. Raises ``TransportError`` when it is not there, ``TicketError``
        when the run's peers speak another version of the protocol: nobody would answer, and a peer that hears
        nobody trains alone.
        """
        self._records.run_key = run_key
        (entries,) = await self._find([manifest_key(self._run)])
        for writer, sealed in entries.items():
            try:
                if writer == run_key:
                    return self.take_manifest(run_key, sealed)
                self._records.manifest(writer, sealed)
            except RemoteProtocolError as error:
                self._on_refused(NOBODY, error)
        raise TransportError(
            f"the settings of run {self._run[:8].hex()} are not in the DHT; ask the organiser to start "
            "a seed of this run"
        )

    @property
    def sealed_manifest(self) -> bytes:
        """The run's signed settings, as they were published, fetched or taken; empty before that."""
        return self._sealed_manifest

    def take_manifest(self, run_key: PeerId, sealed: bytes) -> RunManifest:
        """The manifest inside ``sealed``, which was kept elsewhere, as if it had been fetched. Raises
        ``RemoteProtocolError`` if it is not the run's, ``TicketError`` as ``fetch_manifest``."""
        self._records.run_key = run_key
        manifest = self._records.manifest(run_key, sealed)
        _require_our_protocol(manifest)
        self._sealed_manifest = sealed
        self._records.spread(_cells_in(manifest.config))
        return manifest

    async def keep_manifest(self, lifetime_s: float = MAX_LIFETIME_S) -> None:
        """Store the manifest that we published or fetched once more, so that it outlives its author.

        It carries its signature with it, so anybody may. Raises ``TransportError``.
        """
        run_key = self._records.run_key
        if run_key is None or not self._sealed_manifest:
            raise LocalProtocolError("no manifest to keep: publish or fetch it first")
        await self._store(
            manifest_key(self._run), run_key, self._sealed_manifest, get_dht_time() + lifetime_s
        )

    async def publish_position(self, said: RunPosition) -> None:
        """Tell those that come later where the run is. The seeds are told themselves: they are there when all
        peers have left. Raises ``TransportError``."""
        own, me = RunPosition(), self._identity.peer_id
        own.CopyFrom(said)
        own.peer, own.run, own.written_at = me, self._run, get_dht_time()
        sealed = self._identity.seal(POSITION_CONTEXT, own.SerializeToString())
        key, ends_at = position_key(self._run, shard_of(me)), own.written_at + POSITION_LIFETIME_S
        entry = [DHTID.generate(source=key)], [MSGPackSerializer.dumps(sealed)], [ends_at], [me]
        call = self._running().protocol.call_store  # gives None where nobody answers
        async with self._calling(f"no seed took a record within {CALL_TIMEOUT_S:.0f} s"):
            await asyncio.gather(*(call(PeerID.from_base58(seed), *entry) for seed in self._seeds))
        await self._store(key, me, sealed, ends_at, POSITION_LIFETIME_S)

    async def find_positions(self) -> list[RunPosition]:
        """Where each peer was that ever said so, checked, as the seeds have it. Raises ``TransportError`` if
        none of them answers."""
        keys = [DHTID.generate(source=position_key(self._run, shard)) for shard in range(PEER_SHARDS)]
        call = self._running().protocol.call_find  # gives None where nobody answers
        async with self._calling(f"no seed answered within {CALL_TIMEOUT_S:.0f} s"):
            answers = await asyncio.gather(*(call(PeerID.from_base58(seed), keys) for seed in self._seeds))
        if self._seeds and not any(answers):
            raise TransportError("no seed says where the run is; is the organiser's seed still up?")
        found = [held for answer in answers if answer for held, _ in answer.values() if held is not None]
        packed = [
            entry
            for held in found
            if isinstance(held.value, DictionaryDHTValue)
            for entry in held.value.items()
        ]
        newest = self._positions((w, MSGPackSerializer.loads(e.value)) for w, e in packed)
        return [said for said, _ in newest.values()]

    async def gather_positions(self) -> list[tuple[str, bytes]]:
        """For a seed: hold what all of the DHT knows of positions, and return it sealed, by writer;
        ``hold_positions`` takes it back after a restart. Raises ``TransportError``."""
        found = await self._find([position_key(self._run, shard) for shard in range(PEER_SHARDS)])
        sealed = [entry for entries in found for entry in entries.items()]
        self.hold_positions(sealed)
        return sealed

    def hold_positions(self, sealed: Iterable[tuple[str, bytes]]) -> None:
        """Answer for these from now on; what is no position of this run is reported and dropped."""
        storage = self._running().protocol.storage
        for writer, (said, value) in self._positions(sealed).items():
            key = DHTID.generate(source=position_key(self._run, shard_of(writer)))
            ends_at = said.written_at + POSITION_LIFETIME_S
            storage.store(key, MSGPackSerializer.dumps(value), ends_at, subkey=writer)

    def _positions(self, sealed: Iterable[tuple[str, bytes]]) -> dict[PeerId, tuple[RunPosition, bytes]]:
        """The newest position of this run by each writer, as it says and sealed; anything else is
        reported."""
        newest = dict[PeerId, tuple[RunPosition, bytes]]()
        for writer, value in sealed:
            try:
                said = self._records.position(writer, value)
            except RemoteProtocolError as error:
                self._on_refused(NOBODY, error)
                continue
            known = newest.get(PeerId(writer))
            if known is None or said.written_at > known[0].written_at:
                newest[PeerId(writer)] = said, value
        return newest

    async def publish_decision(self, fragment: int, round_: int, decision: bytes, lifetime_s: float) -> None:
        """Publish what ``rounds.announcement`` made of a decision under our name; a whole ``Decision`` of a
        large group does not fit. Raises ``TransportError``."""
        sealed = self._identity.seal(DECISION_CONTEXT, decision)
        key = decision_key(self._run, fragment, round_)
        await self._store(key, self._identity.peer_id, sealed, get_dht_time() + lifetime_s)

    async def fetch_decision(self, fragment: int, round_: int) -> dict[PeerId, bytes]:
        """What peers published as the decision of a round, by publisher; empty if nothing is known.

        The caller checks each announcement's own signature and whether its author was the coordinator. Raises
        ``TransportError``.
        """
        (entries,) = await self._find([decision_key(self._run, fragment, round_)])
        found: dict[PeerId, bytes] = {}
        for writer, sealed in entries.items():
            try:
                found[PeerId(writer)] = self._records.decision(writer, sealed)
            except RemoteProtocolError as error:
                self._on_refused(NOBODY, error)
        return found

    async def close(self) -> None:
        """Leave the DHT; the ``P2P`` stays the caller's. May be called twice."""
        node, self._node = self._node, None
        if node is None:
            return
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await node.shutdown()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, P2PDaemonError):
            pass  # the daemon is gone, and the node's handlers with it
        strays = [task for task in asyncio.all_tasks() if _owner(task) in (node, node.protocol)]
        for task in strays:
            task.cancel()
        await asyncio.gather(*strays, return_exceptions=True)

    async def _join(self, seeds: Sequence[str]) -> None:
        others = self._others(seeds)
        self._seeds = frozenset(PeerId(seed.rpartition("/p2p/")[2]) for seed in others)
        if others:
            await self._greet_all(others)
            await self._look_around()

    def _others(self, seeds: Sequence[str]) -> list[str]:
        """All but this node itself."""
        return [seed for seed in seeds if not seed.endswith(f"/p2p/{self._identity.peer_id}")]

    async def _greet_all(self, others: Sequence[str]) -> None:
        """Greet seeds; raises ``TransportError`` if there are some and none answers."""
        causes = await asyncio.gather(*(self._greet(seed) for seed in others))
        if others and all(causes):
            raise TransportError(
                "no seed can be reached; is this machine online, and the organiser's seed up? A ticket of "
                "another seed works too ("
                + "; ".join(f"{_place(seed)}: {cause}" for seed, cause in zip(others, causes, strict=True))
                + ")"
            )

    async def _look_around(self) -> None:
        """Fill the table with those who are near."""
        node = self._running()
        await asyncio.sleep(0)  # hivemind enters those who answered into its table in tasks of their own
        with daemon_errors(""):
            try:
                async with asyncio.timeout(CALL_TIMEOUT_S):
                    await node.find_nearest_nodes([node.node_id])
            except TimeoutError:
                return  # the seed that answered is known, which is enough; the table fills with use

    async def _greet(self, seed: str) -> str:
        """Reach a seed and become known to it; the cause of failure in words, "" if there is none."""
        peer = PeerId(seed.rpartition("/p2p/")[2])
        try:
            public_key_of(peer)
            await self._reach(peer, seed)
            async with self._calling(f"it did not answer within {CALL_TIMEOUT_S:.0f} s"):
                known = await self._running().protocol.call_ping(PeerID.from_base58(peer))
        except (TransportError, RemoteProtocolError) as error:
            return str(error)
        if known is None:
            return "it is there, but does not serve a DHT"
        self._seed_nodes[peer] = known
        return ""

    async def _reach(self, peer: PeerId, seed: str) -> None:
        """Reach a seed. One that was away is tried until libp2p may dial again: after a failure the daemon
        refuses for some seconds without a look, and the seed may be back. Raises ``TransportError``."""
        clock = asyncio.get_running_loop()
        give_up_at = clock.time() + REACH_TIMEOUT_S
        while True:
            try:
                return await reach(self._p2p, peer, [seed], REACH_TIMEOUT_S)
            except TransportError as error:
                if "dial backoff" not in str(error) or clock.time() + BACKOFF_STEP_S > give_up_at:
                    raise
            await asyncio.sleep(BACKOFF_STEP_S)

    async def _store(
        self, key: str, writer: PeerId, sealed: bytes, expires_at: float, most_s: float = MAX_LIFETIME_S
    ) -> None:
        lifetime_s = expires_at - get_dht_time()
        if len(sealed) > MAX_RECORD_BYTES or not 0 < lifetime_s <= most_s:
            raise LocalProtocolError(
                f"a record of {len(sealed)} bytes for {lifetime_s:.0f} s is out of bounds"
            )
        node = self._running()
        async with self._calling(f"the DHT did not take a record within {CALL_TIMEOUT_S:.0f} s"):
            stored = await node.store(key, sealed, expires_at, subkey=writer)
        # hivemind says no as well when a node had this very record from another node just before, so look
        if not stored and (await self._find([key]))[0].get(writer) != sealed:
            raise TransportError(
                "the DHT did not take a record: it holds one that expires later, or nobody answers"
            )

    async def _find(self, keys: list[str]) -> list[Entries]:
        """The entries under each key; those of nodes whose answer holds anything forged are left out by
        hivemind."""
        node = self._running()
        async with self._calling(f"the DHT did not answer within {CALL_TIMEOUT_S:.0f} s"):
            found = await node.get_many(keys, sufficient_expiration_time=math.inf)
        return [_entries(found[key]) for key in keys]

    @asynccontextmanager
    async def _calling(self, timed_out: str) -> AsyncIterator[None]:
        """Bound a call of hivemind's and give its failures their name. An answer that came without a daemon
        is none: hivemind means its own storage then."""
        require_daemon(self._p2p)
        with daemon_errors(timed_out):
            async with asyncio.timeout(CALL_TIMEOUT_S):
                yield
        require_daemon(self._p2p)

    def _running(self) -> DHTNode:
        if self._node is None:
            raise LocalProtocolError("discovery is not started")
        return self._node

    def _stored_under(self, key_id: bytes) -> Collection[str]:
        stored = self._running().protocol.storage.get(DHTID.from_bytes(key_id))
        return (
            stored.value.data if stored is not None and isinstance(stored.value, DictionaryDHTValue) else ()
        )


def _entries(found: ValueWithExpiration | None) -> Entries:
    """hivemind's answer for one key, if it has the form that our records have."""
    if found is None or not isinstance(found.value, dict):
        return {}
    entries = {writer: entry.value for writer, entry in found.value.items()}
    return {
        writer: sealed
        for writer, sealed in entries.items()
        if isinstance(writer, str) and isinstance(sealed, bytes)
    }


def _cells_in(config: bytes) -> int:
    """How many cells a run has, by its canonical settings."""
    try:
        settings = json.loads(config)
    except ValueError:
        return 1  # who reads the settings will refuse them
    cells = settings.get("cells", 1) if isinstance(settings, dict) else 1
    return cells if isinstance(cells, int) and 1 <= cells <= MAX_CELLS else 1


def _require_our_protocol(manifest: RunManifest) -> None:
    spoken = manifest.protocol or 1  # the first version did not write it
    if spoken != PROTOCOL_VERSION:
        theirs = "".join(character if character.isprintable() else "?" for character in manifest.software)
        raise TicketError(
            f"this run speaks version {spoken} of the protocol (p2p-co2 {theirs}), and this p2p-co2 "
            f"{__version__} speaks {PROTOCOL_VERSION}; install the organiser's version"
        )


def _owner(task: asyncio.Task[object]) -> object:
    """The object whose coroutine method a task runs, if it is one."""
    frame = getattr(task.get_coro(), "cr_frame", None)
    return frame.f_locals.get("self") if frame is not None else None


def _place(seed: str) -> str:
    """A seed's address without its id."""
    return seed.partition("/p2p/")[0]
