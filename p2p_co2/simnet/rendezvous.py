"""Finding peers in a simulation: the run's DHT as its users see it, with seeds that can die.

A record stands from its publication until it expires, also when its writer is long dead. A newcomer needs a
seed; who is inside already finds records as long as anybody else who is inside can be reached. While the net
is cut, what is published on one side is not seen on the other. Price: no Kademlia here; which nodes hold a
record, and lookups that fail half-way, are not played.
"""

from __future__ import annotations

import asyncio
import math
import random
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from p2p_co2.config import PeerConfig, RunConfig
from p2p_co2.errors import TransportError
from p2p_co2.net.transport.base import Carrier, OnMessage, OnRefused
from p2p_co2.protocol.wire.identity import Identity, PeerId
from p2p_co2.protocol.wire.messages_pb2 import PeerRecord
from p2p_co2.simnet.internet import Endpoint, Internet

RECORD_LIFETIME_S, RECORD_RENEWED_S = 60.0, 20.0
"""As ``node.network`` has them."""
TRIED_AGAIN_S, REFUSED_S = (1.0, 2.0, 4.0, 8.0), 1.0
"""A call that nobody answers is sent again after each of these, as TCP does, and ends with the last one
(``discovery.dht``: 15 s); one that is refused ends at once."""
SLOWEST_LOOKUP_S = 0.6


@dataclass
class _Entry:
    record: PeerRecord
    expires_at: float
    side: int
    published_at: float


@dataclass
class Seed:
    """A seed: finds peers, relays, never trains. ``side``: where it is when the net is cut."""

    is_up: bool = True
    side: int = 0


@dataclass
class Rendezvous:
    """What is in the DHT, and who could answer."""

    internet: Internet
    rng: random.Random
    seeds: list[Seed] = field(default_factory=lambda: [Seed()])
    _entries: dict[PeerId, _Entry] = field(default_factory=dict)
    _inside: dict[PeerId, Endpoint] = field(default_factory=dict)
    _listed: list[PeerRecord] | None = None
    _listed_until: float = 0.0
    _cut_since: float | None = None

    def net_changed(self) -> None:
        """The net was cut or healed."""
        self._listed = None
        self._cut_since = None if self.internet.is_whole else self._cut_since or self.internet.world.now

    def seed_answers(self, peer: PeerId) -> bool:
        """Whether ``peer`` reaches a seed."""
        side = self.internet.side_of(peer)
        whole = self.internet.is_whole
        return any(seed.is_up and (whole or seed.side == side) for seed in self.seeds)

    def answers(self, peer: PeerId) -> bool:
        """Whether somebody who holds records can be reached."""
        if self.seed_answers(peer):
            return True
        return any(
            other.is_up and other.peer != peer and not self.internet.is_cut(peer, other.peer)
            for other in self._inside.values()
        )

    def enter(self, endpoint: Endpoint) -> None:
        self._inside[endpoint.peer] = endpoint

    def publish(self, record: PeerRecord, lifetime_s: float) -> None:
        peer, now = PeerId(record.peer), self.internet.world.now
        known = self._entries.get(peer)
        if known is None and self._listed is not None and self.internet.is_whole:
            insort(self._listed, record, key=lambda one: one.peer)  # who come in one second are sorted once
        elif known is None or known.expires_at <= now or not self.internet.is_whole:
            self._listed = None
        side = self.internet.side_of(peer)
        self._entries[peer] = _Entry(record, now + lifetime_s, side, now)
        self._listed_until = min(self._listed_until, now + lifetime_s)

    def records(self, peer: PeerId) -> list[PeerRecord]:
        """The records that ``peer`` finds now, of all peers, sorted by peer."""
        now = self.internet.world.now
        if self._cut_since is not None:
            side = self.internet.side_of(peer)
            entries = [e for e in self._entries.values() if e.expires_at > now]
            seen = [e for e in entries if e.published_at < self._cut_since or e.side == side]
            return sorted((e.record for e in seen), key=lambda record: record.peer)
        if self._listed is None or now >= self._listed_until:
            alive = {peer: e for peer, e in self._entries.items() if e.expires_at > now}
            self._entries = alive
            self._listed = [alive[peer].record for peer in sorted(alive)]
            # Entries are only ever renewed: none expires before the first of them would.
            self._listed_until = min((e.expires_at for e in alive.values()), default=math.inf)
        return self._listed


class Doorway:
    """One process on the simulated net: implements ``node.environment.PeerNetwork``."""

    def __init__(
        self,
        identity: Identity,
        config: PeerConfig,
        run: RunConfig,
        software: str,
        endpoint: Endpoint,
        rendezvous: Rendezvous,
    ) -> None:
        self.identity, self.config, self.run, self.software = identity, config, run, software
        self.carriers: Sequence[Carrier] = ()
        self._endpoint, self._rendezvous = endpoint, rendezvous
        self._world = endpoint.loop
        self._run_digest = run.digest()
        self._published_at = -1e9

    async def join(self) -> None:
        """What ``Network.open`` does; raises ``TransportError`` when no seed answers."""
        await self._lookup(self._rendezvous.seed_answers, "no seed can be reached")
        self._rendezvous.enter(self._endpoint)

    async def start_carriers(self, on_message: OnMessage, on_refused: OnRefused) -> None:
        self._endpoint.on_message = on_message

    async def publish_self(self, somebody_unmet: bool = False) -> None:
        if self._world.time() - self._published_at < RECORD_RENEWED_S:
            return
        await self._lookup(self._rendezvous.answers, "the DHT did not take a record")
        record = PeerRecord(peer=self.identity.peer_id, run=self._run_digest, software=self.software)
        self._rendezvous.publish(record, RECORD_LIFETIME_S)
        self._published_at = self._world.time()

    async def find_peers(self) -> list[PeerRecord]:
        await self._lookup(self._rendezvous.answers, "the DHT did not answer")
        me = self.identity.peer_id
        return [record for record in self._rendezvous.records(me) if record.peer != me]

    async def find_record(self, peer: PeerId, fresh: bool = False) -> PeerRecord | None:
        records = self._rendezvous.records(self.identity.peer_id)
        return next((record for record in records if record.peer == peer), None)

    async def daemon_ended(self) -> str:
        forever: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        return await forever

    async def greet_seeds(self) -> None:
        await self.rebootstrap()

    async def rebootstrap(self) -> None:
        self._published_at = -1e9
        await self._lookup(self._rendezvous.seed_answers, "no seed can be reached")

    async def _lookup(self, answers: Callable[[PeerId], bool], trouble: str) -> None:
        # A seed that is down on a live machine refuses at once; behind a cut nothing comes back.
        waits_s = list(TRIED_AGAIN_S)
        while not answers(self.identity.peer_id):
            is_refused = self._rendezvous.internet.is_whole
            await asyncio.sleep(REFUSED_S if is_refused else waits_s.pop(0))
            if is_refused or not waits_s:
                raise TransportError(trouble)
        await asyncio.sleep(self._rendezvous.rng.uniform(0.05, SLOWEST_LOOKUP_S))
