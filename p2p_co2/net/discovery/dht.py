"""One node of a hivemind DHT (Kademlia, Maymounkov and Mazieres 2002) in the caller's loop.

Its caches are off: with a few thousand small records they would save little and give old answers. Joining is
ours rather than hivemind's, because a single dead seed, or a clock that is three seconds off, must not keep a
peer out. Laws: nothing is returned that the validator has not checked; every call ends in bounded time.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

from p2p_co2.errors import LocalProtocolError, RemoteProtocolError, TransportError
from p2p_co2.net.discovery.records import Records
from p2p_co2.net.transport.base import CLOSE_TIMEOUT_S, CONNECT_TIMEOUT_S
from p2p_co2.net.transport.libp2p.control import daemon_errors, reach
from p2p_co2.net.transport.libp2p.daemon import require_daemon
from p2p_co2.net.transport.libp2p.hivemind import (
    DHTID,
    P2P,
    DHTNode,
    DictionaryDHTValue,
    MSGPackSerializer,
    PeerID,
    ValueWithExpiration,
)
from p2p_co2.protocol.wire.identity import PeerId, public_key_of
from p2p_co2.protocol.wire.limits import MAX_RECORD_BYTES

BUCKET_SIZE = 8
"""Kademlia's k, as BitTorrent has it: with hivemind's 20 a search for peers among 24 cost 270 kB. A record is
on five nodes."""
MAX_STORED_KEYS = 16384
"""Keys that this node keeps for the swarm; beyond it those that expire first are dropped."""

Entries = dict[str, bytes]
"""Sealed values under one key, by the peer that wrote them."""


class Entry(NamedTuple):
    """One record: who wrote it under which key, and until when it stands (unix seconds)."""

    key: str
    writer: PeerId
    sealed: bytes
    expires_at: float


class Dht:
    """Over a started ``P2P``, which stays the caller's; ``me`` is its peer, ``records`` the validator."""

    def __init__(self, p2p: P2P, me: PeerId, records: Records) -> None:
        self._p2p, self._me, self._records = p2p, me, records
        self._seeds = frozenset[PeerId]()
        """Those that this node joined through: they outlast the peers."""
        self._node: DHTNode | None = None
        self._seed_nodes: dict[PeerId, DHTID] = {}
        """The DHT's own id of each seed that answered: another one is another process."""

    async def start(self, seeds: Sequence[str]) -> None:
        """Join through any of ``seeds`` (multiaddrs that end in /p2p/ID); without seeds begin a new DHT.
        Raises ``TransportError`` with each address and its cause when none can be reached."""
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
        await self._join(seeds)

    async def rejoin(self, seeds: Sequence[str]) -> None:
        """``start`` without a new node, after all known peers were lost. Same errors."""
        self._running().blacklist.clear()
        await self._join(seeds)

    async def greet(self, seeds: Sequence[str]) -> bool:
        """Be known to the seeds, at the price of a message to each. Whether one of them was started anew: it
        has forgotten what it kept, and this node has joined again. Raises ``TransportError``."""
        known = dict(self._seed_nodes)
        await self._greet_all([seed for seed in seeds if not seed.endswith(f"/p2p/{self._me}")])
        if known == self._seed_nodes:
            return False
        await self._look_around()
        return True

    async def store(self, entry: Entry) -> None:
        """Store a record. Raises ``TransportError``."""
        if len(entry.sealed) > MAX_RECORD_BYTES:
            raise LocalProtocolError(f"a record of {len(entry.sealed)} bytes")
        node = self._running()
        async with self._calling(f"the DHT did not take a record within {CONNECT_TIMEOUT_S:.0f} s"):
            stored = await node.store(entry.key, entry.sealed, entry.expires_at, subkey=entry.writer)
        # hivemind says no as well when a node had this very record from another node just before, so look
        if not stored and (await self.find([entry.key]))[0].get(entry.writer) != entry.sealed:
            trouble = "it holds one that expires later, or nobody answers"
            raise TransportError(f"the DHT did not take a record: {trouble}")

    async def find(self, keys: Sequence[str]) -> list[Entries]:
        """The entries under each key; those of nodes whose answer holds anything forged are left out by
        hivemind. Raises ``TransportError``."""
        node = self._running()
        async with self._calling(f"the DHT did not answer within {CONNECT_TIMEOUT_S:.0f} s"):
            found = await node.get_many(list(keys), sufficient_expiration_time=math.inf)
        return [_entries(found[key]) for key in keys]

    async def tell_seeds(self, entry: Entry) -> None:
        """Have the seeds themselves hold a record: they are there when all peers have left."""
        key, value = DHTID.generate(source=entry.key), MSGPackSerializer.dumps(entry.sealed)
        call = self._running().protocol.call_store  # gives None where nobody answers
        async with self._calling(f"no seed took a record within {CONNECT_TIMEOUT_S:.0f} s"):
            told = (PeerID.from_base58(seed) for seed in self._seeds)
            args = [key], [value], [entry.expires_at], [entry.writer]
            await asyncio.gather(*(call(seed, *args) for seed in told))

    async def ask_seeds(self, keys: Sequence[str]) -> list[tuple[str, bytes]]:
        """What the seeds themselves hold under ``keys``: (writer, sealed). Raises ``TransportError`` if there
        are some and none of them answers."""
        ids = [DHTID.generate(source=key) for key in keys]
        call = self._running().protocol.call_find  # gives None where nobody answers
        async with self._calling(f"no seed answered within {CONNECT_TIMEOUT_S:.0f} s"):
            answers = await asyncio.gather(*(call(PeerID.from_base58(seed), ids) for seed in self._seeds))
        if self._seeds and not any(answers):
            raise TransportError("no seed says where the run is; is the organiser's seed still up?")
        found = [held for answer in answers if answer for held, _ in answer.values() if held is not None]
        values = [held.value for held in found if isinstance(held.value, DictionaryDHTValue)]
        return [(w, MSGPackSerializer.loads(e.value)) for value in values for w, e in value.items()]

    def hold(self, entry: Entry) -> None:
        """Answer for a record from now on."""
        value = MSGPackSerializer.dumps(entry.sealed)
        storage, key = self._running().protocol.storage, DHTID.generate(source=entry.key)
        storage.store(key, value, entry.expires_at, subkey=entry.writer)

    async def close(self) -> None:
        """Leave the DHT. May be called twice."""
        node, self._node = self._node, None
        if node is None:
            return
        try:
            with daemon_errors("the daemon hangs"):
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await node.shutdown()
        except TransportError:
            self._node = None  # the daemon is gone, and the node's handlers with it
        strays = [task for task in asyncio.all_tasks() if _owner(task) in (node, node.protocol)]
        for task in strays:
            task.cancel()
        await asyncio.gather(*strays, return_exceptions=True)

    # ---- joining

    async def _join(self, seeds: Sequence[str]) -> None:
        others = [seed for seed in seeds if not seed.endswith(f"/p2p/{self._me}")]
        self._seeds = frozenset(_peer_of(seed) for seed in others)
        if others:
            await self._greet_all(others)
            await self._look_around()

    async def _greet_all(self, others: Sequence[str]) -> None:
        """Greet seeds; raises ``TransportError`` if there are some and none answers."""
        causes = await asyncio.gather(*(self._greet(seed) for seed in others))
        if others and all(causes):
            told = "; ".join(
                f"{seed.partition('/p2p/')[0]}: {cause}" for seed, cause in zip(others, causes, strict=True)
            )
            raise TransportError(
                "no seed can be reached; is this machine online, and the organiser's seed up? A ticket of "
                f"another seed works too ({told})"
            )

    async def _look_around(self) -> None:
        """Fill the table with those who are near. The seed that answered is known, which is enough: the table
        fills with use."""
        node = self._running()
        await asyncio.sleep(0)  # hivemind enters those who answered into its table in tasks of their own
        with daemon_errors(""):
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    await node.find_nearest_nodes([node.node_id])
            except TimeoutError:
                return

    async def _greet(self, seed: str) -> str:
        """Reach a seed and become known to it; the cause of failure in words, "" if there is none."""
        peer = _peer_of(seed)
        try:
            public_key_of(peer)
            await reach(self._p2p, peer, [seed], CONNECT_TIMEOUT_S)
            async with self._calling(f"it did not answer within {CONNECT_TIMEOUT_S:.0f} s"):
                known = await self._running().protocol.call_ping(PeerID.from_base58(peer))
        except (TransportError, RemoteProtocolError) as error:
            return str(error)
        if known is None:
            return "it is there, but does not serve a DHT"
        self._seed_nodes[peer] = known
        return ""

    @asynccontextmanager
    async def _calling(self, timed_out: str) -> AsyncIterator[None]:
        """Bound a call of hivemind's and give its failures their name. An answer that came without a daemon
        is none: hivemind means its own storage then."""
        require_daemon(self._p2p)
        with daemon_errors(timed_out):
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
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


def _entries(found: ValueWithExpiration | None) -> Entries:
    """hivemind's answer for one key, if it has the form that our records have."""
    if found is None or not isinstance(found.value, dict):
        return {}
    entries = {writer: entry.value for writer, entry in found.value.items()}
    return {w: sealed for w, sealed in entries.items() if isinstance(w, str) and isinstance(sealed, bytes)}


def _owner(task: asyncio.Task[object]) -> object:
    """The object whose coroutine method a task runs, if it is one."""
    frame = getattr(task.get_coro(), "cr_frame", None)
    return frame.f_locals.get("self") if frame is not None else None
