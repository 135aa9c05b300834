"""A run's DHT: finding peers, the run's settings, and where the run is, as signed records.

One node of hivemind's DHT (Kademlia, Maymounkov and Mazieres 2002). Its caches are off: with a few thousand
small records they would save little and give old answers. Joining is ours rather than hivemind's: a single
dead seed, or a clock that is three seconds off, must not keep a peer out.

Laws: nothing is returned that ``records`` has not checked; every call ends in bounded time. Price: a record
stands on five nodes until it expires. It has to be published again before, and so long a dead peer is still
listed.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import math
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

from p2p_co2.config import run_digest
from p2p_co2.errors import ConfigError, LocalProtocolError, RemoteProtocolError, TicketError, TransportError
from p2p_co2.net.discovery.records import (
    MANIFEST_CONTEXT,
    MAX_LIFETIME_S,
    PEER_CONTEXT,
    POSITION_CONTEXT,
    Records,
    manifest_key,
    peers_keys,
    position_keys,
    shard_of,
)
from p2p_co2.net.transport.base import CLOSE_TIMEOUT_S, CONNECT_TIMEOUT_S, MESSAGE_TIMEOUT_S, OnRefused
from p2p_co2.net.transport.libp2p.control import daemon_call, reach
from p2p_co2.net.transport.libp2p.daemon import require_daemon
from p2p_co2.net.transport.libp2p.hivemind import (
    DHTID,
    P2P,
    AuthorizerBase,
    DHTNode,
    DictionaryDHTValue,
    MSGPackSerializer,
    PeerID,
    ValueWithExpiration,
    get_dht_time,
)
from p2p_co2.version import __version__
from p2p_co2.wire.identity import Identity, PeerId, public_key_of
from p2p_co2.wire.limits import MAX_PEERS, MAX_RECORD_BYTES, PROTOCOL_VERSION
from p2p_co2.wire.messages_pb2 import PeerRecord, RunManifest, RunPosition

_Content = TypeVar("_Content", PeerRecord, RunManifest, RunPosition)
BUCKET_SIZE = 8
"""Kademlia's k, as BitTorrent has it: with hivemind's 20 a search for peers among 24 cost 270 kB. A record is
on five nodes."""

Written = tuple[str, bytes]
"""(the peer that wrote it, the sealed value)"""


class TicketHolders(AuthorizerBase):  # type: ignore[misc]  # hivemind has no annotations
    """Has the DHT answer those alone that know the run's digest, by a word that is made of it. Records name
    the run, so a stranger that only found the port would learn of them what a ticket holds.

    libp2p encrypts, and proves to whom: nobody else hears the word."""

    def __init__(self, run: bytes) -> None:
        self._word = hashlib.sha256(b"p2p-co2 dht\0" + run).digest()

    async def sign_request(self, request: Any, service_public_key: object) -> None:
        request.auth.nonce = self._word

    async def validate_request(self, request: Any) -> bool:
        return hmac.compare_digest(request.auth.nonce, self._word)

    async def sign_response(self, response: Any, request: Any) -> None: ...

    async def validate_response(self, response: Any, request: Any) -> bool:
        return True


class Discovery:
    """One node of the run's DHT over a started ``P2P``, which stays the caller's.

    ``run`` is the run's digest (32 bytes). ``on_refused`` hears of records that are forged or malformed,
    without a peer: the DHT does not say who handed one over.
    """

    def __init__(self, p2p: P2P, identity: Identity, run: bytes, on_refused: OnRefused) -> None:
        self._p2p = p2p
        self._identity = identity
        self._run = run
        self._on_refused = on_refused
        self._records = Records(run, on_refused, get_dht_time)
        self._node: DHTNode | None = None
        self._seeds = frozenset[PeerId]()
        """Those that this node joined through: they outlast the peers."""
        self._seed_nodes: dict[PeerId, DHTID] = {}
        """The DHT's own id of each seed that answered: another one is another process."""
        self._sealed_manifest = b""
        """The run's signed settings, as they were published or fetched; empty before that."""

    async def start(self, seeds: Sequence[str]) -> None:
        """Join through any of ``seeds`` (multiaddrs that end in /p2p/ID); without seeds begin a new DHT.
        Raises ``TransportError`` with each address and its cause when none can be reached."""
        async with daemon_call(CONNECT_TIMEOUT_S):
            node = await DHTNode.create(
                p2p=self._p2p,
                record_validator=self._records,
                authorizer=TicketHolders(self._run),
                bucket_size=BUCKET_SIZE,
                cache_locally=False,
                cache_nearest=0,
                cache_on_store=False,
                cache_refresh_before_expiry=0,
                reuse_get_requests=False,
            )
        for kept in (node.protocol.storage, node.protocol.cache):
            kept.maxsize = 4 * MAX_PEERS  # beyond it keys that expire first are dropped
        self._records.stored_under = self._stored_under
        self._node = node
        await self.rebootstrap(seeds)

    async def rebootstrap(self, seeds: Sequence[str]) -> None:
        """``start`` without a new node, after all known peers were lost. Same errors."""
        self._running().blacklist.clear()
        await self._greet_all(seeds)
        if self._seeds:
            await self._look_around()

    async def greet(self, seeds: Sequence[str]) -> bool:
        """Be known to the seeds, at the price of a message to each. Whether one of them was started anew: it
        has forgotten what it kept, and this node has joined again. Raises ``TransportError``."""
        known = dict(self._seed_nodes)
        await self._greet_all(seeds)
        if known == self._seed_nodes:
            return False
        await self._look_around()
        return True

    async def close(self) -> None:
        """Leave the DHT. May be called twice."""
        node = self._node
        self._node = None
        if node is None:
            return
        with suppress(TransportError):  # the daemon is gone, and the node's handlers with it
            async with daemon_call(CLOSE_TIMEOUT_S):
                await node.shutdown()
        strays = [task for task in asyncio.all_tasks() if _owner(task) in (node, node.protocol)]
        for task in strays:
            task.cancel()
        await asyncio.gather(*strays, return_exceptions=True)

    # ---- peers

    async def publish_self(self, record: PeerRecord) -> None:
        """Publish where we can be reached; again within ``MESSAGE_TIMEOUT_S``. Fills in whose ``record`` it
        is, of which run, and its end. Raises ``TransportError``."""
        me = self._identity.peer_id
        record.peer = me
        record.run = self._run
        record.expires_at = get_dht_time() + MESSAGE_TIMEOUT_S
        sealed = self._identity.seal(PEER_CONTEXT, record.SerializeToString())
        await self._store(peers_keys(self._run)[shard_of(me)], me, sealed, record.expires_at)

    async def find_peers(self, own: bool = False) -> list[PeerRecord]:
        """The checked, unexpired records of all other peers, and this one's ``own``, sorted by peer. Raises
        ``TransportError``."""
        found = await self._find(peers_keys(self._run))
        now = get_dht_time()
        me = self._identity.peer_id
        records = [record for record, _ in self._checked(found, self._records.peer_record)]
        others = [record for record in records if record.expires_at > now and (own or record.peer != me)]
        return sorted(others, key=lambda record: record.peer)[:MAX_PEERS]

    # ---- the run's settings

    async def publish_manifest(self, config: bytes, recipe_digest: bytes) -> None:
        """Publish the run's settings (canonical bytes of ``RunConfig``) and the recipe's digest (32 bytes).

        Our identity becomes the run's key: tickets must name it. Raises ``ConfigError`` for settings that do
        not fit, ``TransportError``.
        """
        if run_digest(config) != self._run or len(recipe_digest) != 32:
            raise LocalProtocolError("the manifest of another run, or a recipe digest that is not 32 bytes")
        manifest = RunManifest(
            run=self._run, config=config, recipe_digest=recipe_digest, software=__version__,
            protocol=PROTOCOL_VERSION,
        )  # fmt: skip
        sealed = self._identity.seal(MANIFEST_CONTEXT, manifest.SerializeToString())
        if len(sealed) > MAX_RECORD_BYTES:
            size = f"{len(sealed)} bytes when published, at most {MAX_RECORD_BYTES}"
            raise ConfigError("the run file", "", f"{size}; shorten recipe_options")
        self._records.run_key = self._identity.peer_id
        self._sealed_manifest = sealed
        await self.keep_manifest()

    async def fetch_manifest(self, run_key: PeerId) -> RunManifest:
        """The run's manifest, if ``run_key`` (from the ticket) signed it and its settings have the run's
        digest. From now on this node stores no other, and answers with it when all seeds are gone.

        Raises ``TransportError`` when it is not there, ``TicketError`` when the run's peers speak another
        version of the protocol. A peer that hears nobody would train alone.
        """
        self._records.run_key = run_key
        found = await self._find([manifest_key(self._run)])
        for manifest, sealed in self._checked(found, self._records.manifest):
            _require_our_protocol(manifest)
            self._sealed_manifest = sealed
            self._hold(manifest_key(self._run), run_key, sealed, get_dht_time() + MAX_LIFETIME_S)
            return manifest
        raise TransportError(
            f"the settings of run {self._run[:8].hex()} are not in the DHT; ask the organiser to start "
            "a seed of this run"
        )

    async def keep_manifest(self) -> None:
        """Store the manifest that we published or fetched once more, so that it outlives its author. It
        carries its signature with it, so anybody may. Raises ``TransportError``."""
        run_key = self._records.run_key
        sealed = self._sealed_manifest
        if run_key is None or not sealed:
            raise LocalProtocolError("no manifest to keep: publish or fetch it first")
        await self._store(manifest_key(self._run), run_key, sealed, get_dht_time() + MAX_LIFETIME_S)

    # ---- where the run is

    async def publish_position(self, said: RunPosition) -> None:
        """Tell those that come later where the run is. The seeds themselves are told: they are there when all
        peers have left. Fills in whose word it is, of which run, and when. Raises ``TransportError``."""
        me = self._identity.peer_id
        said.peer = me
        said.run = self._run
        said.written_at = get_dht_time()
        sealed = self._identity.seal(POSITION_CONTEXT, said.SerializeToString())
        key = position_keys(self._run)[shard_of(me)]
        ends_at = said.written_at + MAX_LIFETIME_S
        call = self._running().protocol.call_store  # gives None where nobody answers
        entry = [DHTID.generate(source=key)], [MSGPackSerializer.dumps(sealed)], [ends_at], [me]
        async with self._calling("no seed took a record"):
            await asyncio.gather(*(call(PeerID.from_base58(seed), *entry) for seed in self._seeds))
        await self._store(key, me, sealed, ends_at)

    async def find_positions(self) -> list[RunPosition]:
        """Where each peer was that ever said so, checked, as the seeds themselves have it. Raises
        ``TransportError`` if there are some and none of them answers."""
        ids = [DHTID.generate(source=key) for key in position_keys(self._run)]
        call = self._running().protocol.call_find  # gives None where nobody answers
        async with self._calling("no seed answered"):
            answers = await asyncio.gather(*(call(PeerID.from_base58(seed), ids) for seed in self._seeds))
        if self._seeds and not any(answers):
            raise TransportError("no seed says where the run is; is the organiser's seed still up?")
        found = [held for answer in answers if answer for held, _ in answer.values() if held is not None]
        values = [held.value for held in found if isinstance(held.value, DictionaryDHTValue)]
        written = [(w, MSGPackSerializer.loads(e.value)) for value in values for w, e in value.items()]
        return [said for said, _ in self._newest(written)]

    async def gather_positions(self) -> list[Written]:
        """For a seed: hold what all of the DHT knows of positions, and return it sealed, by writer;
        ``hold_positions`` takes it back after a restart. Raises ``TransportError``."""
        written = await self._find(position_keys(self._run))
        self.hold_positions(written)
        return written

    def hold_positions(self, written: Iterable[Written]) -> None:
        """Answer for these from now on; what is no position of this run is reported and dropped."""
        keys = position_keys(self._run)
        for said, sealed in self._newest(written):
            writer = PeerId(said.peer)
            self._hold(keys[shard_of(writer)], writer, sealed, said.written_at + MAX_LIFETIME_S)

    def _newest(self, written: Iterable[Written]) -> Iterable[tuple[RunPosition, bytes]]:
        """The newest position of this run by each writer, as it says and sealed; others are reported."""
        said = sorted(self._checked(written, self._records.position), key=lambda one: one[0].written_at)
        return {one[0].peer: one for one in said}.values()

    # ---- records

    async def _store(self, key: str, writer: PeerId, sealed: bytes, expires_at: float) -> None:
        if len(sealed) > MAX_RECORD_BYTES:
            raise LocalProtocolError(f"a record of {len(sealed)} bytes")
        node = self._running()
        async with self._calling("the DHT did not take a record"):
            stored = await node.store(key, sealed, expires_at, subkey=writer)
        # hivemind says no as well when a node had this very record from another node just before, so look
        if not stored and (writer, sealed) not in await self._find([key]):
            trouble = "it holds one that expires later, or nobody answers"
            raise TransportError(f"the DHT did not take a record: {trouble}")

    def _hold(self, key: str, writer: PeerId, sealed: bytes, expires_at: float) -> None:
        """Answer with it from now on, whoever else does."""
        storage = self._running().protocol.storage
        storage.store(DHTID.generate(source=key), MSGPackSerializer.dumps(sealed), expires_at, subkey=writer)

    async def _find(self, keys: Sequence[str]) -> list[Written]:
        """What is written under ``keys``; hivemind leaves out all that comes from a node whose answer holds
        anything forged. Raises ``TransportError``."""
        node = self._running()
        async with self._calling("the DHT did not answer"):
            found = await node.get_many(list(keys), sufficient_expiration_time=math.inf)
        return [one for key in keys for one in _written(found[key])]

    def _checked(
        self, written: Iterable[Written], read: Callable[[str, bytes], _Content]
    ) -> Iterator[tuple[_Content, bytes]]:
        """What right records say, and the sealed records themselves; others are reported."""
        for writer, sealed in written:
            try:
                yield read(writer, sealed), sealed
            except RemoteProtocolError as error:
                self._on_refused(None, error)

    # ---- joining

    async def _greet_all(self, seeds: Sequence[str]) -> None:
        """Greet those of ``seeds`` that are not this node; raises ``TransportError`` if there are some and
        none answers."""
        others = [seed for seed in seeds if _peer_of(seed) != self._identity.peer_id]
        self._seeds = frozenset(map(_peer_of, others))
        causes = await asyncio.gather(*map(self._greet, others))
        if others and all(causes):
            places = [seed.partition("/p2p/")[0] for seed in others]
            told = "; ".join(f"{place}: {cause}" for place, cause in zip(places, causes, strict=True))
            raise TransportError(
                "no seed can be reached; is this machine online, and the organiser's seed up? A ticket of "
                f"another seed works too ({told})"
            )

    async def _look_around(self) -> None:
        """Fill the table with those who are near. The seed that answered is known, which is enough: the table
        fills with use."""
        node = self._running()
        await asyncio.sleep(0)  # hivemind enters those who answered into its table in tasks of their own
        with suppress(TransportError):
            async with daemon_call(CONNECT_TIMEOUT_S):
                await node.find_nearest_nodes([node.node_id])
        require_daemon(self._p2p)

    async def _greet(self, seed: str) -> str:
        """Reach a seed and become known to it; the cause of failure in words, "" if there is none."""
        peer = _peer_of(seed)
        try:
            public_key_of(peer)
            await reach(self._p2p, peer, [seed], CONNECT_TIMEOUT_S)
            async with self._calling("it did not answer"):
                known = await self._running().protocol.call_ping(PeerID.from_base58(peer))
        except (TransportError, RemoteProtocolError) as error:
            return str(error)
        if known is None:
            return "it is there, but is no seed of this run, or of another version of p2p-co2"
        self._seed_nodes[peer] = known
        return ""

    @asynccontextmanager
    async def _calling(self, trouble: str) -> AsyncIterator[None]:
        """Bound a call of hivemind's and give its failures their name. An answer that came without a daemon
        is none: hivemind means its own storage then."""
        require_daemon(self._p2p)
        async with daemon_call(CONNECT_TIMEOUT_S, trouble):
            yield
        require_daemon(self._p2p)

    def _running(self) -> DHTNode:
        if self._node is None:
            raise LocalProtocolError("discovery is not started")
        return self._node

    def _stored_under(self, key_id: bytes) -> Collection[str]:
        stored = self._running().protocol.storage.get(DHTID.from_bytes(key_id))
        is_ours = stored is not None and isinstance(stored.value, DictionaryDHTValue)
        return stored.value.data if is_ours else ()


def _peer_of(seed: str) -> PeerId:
    return PeerId(seed.rpartition("/p2p/")[2])


def _written(found: ValueWithExpiration | None) -> Iterator[Written]:
    """hivemind's answer for one key, as far as it has the form that our records have."""
    if found is not None and isinstance(found.value, dict):
        for writer, entry in found.value.items():
            if isinstance(writer, str) and isinstance(entry.value, bytes):
                yield writer, entry.value


def _owner(task: asyncio.Task[object]) -> object:
    """The object whose coroutine method a task runs, if it is one."""
    frame = getattr(task.get_coro(), "cr_frame", None)
    return frame.f_locals.get("self") if frame is not None else None


def _require_our_protocol(manifest: RunManifest) -> None:
    if manifest.protocol != PROTOCOL_VERSION:
        theirs = "".join(character if character.isprintable() else "?" for character in manifest.software)
        raise TicketError(
            f"this run speaks version {manifest.protocol} of the protocol (p2p-co2 {theirs}), and this "
            f"p2p-co2 {__version__} speaks {PROTOCOL_VERSION}; install the organiser's version"
        )
