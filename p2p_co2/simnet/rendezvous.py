"""Finding peers in a simulation: the run's DHT as its users see it, with seeds that can die.

A record stands from its publication until it expires, also when its writer is long dead. A newcomer needs a
seed; who is inside already finds records as long as anybody else who is inside can be reached. While the net
is cut, records from the other side are not found. Price: no Kademlia here; which nodes hold a record, and
lookups that fail half-way, are not played.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from p2p_co2.config import PeerConfig, RunConfig
from p2p_co2.errors import TransportError
from p2p_co2.net.transport.base import Carrier, OnMessage, OnRefused
from p2p_co2.node.network import RECORD_LIFETIME_S, RECORD_RENEWED_S
from p2p_co2.protocol.wire.identity import Identity, PeerId
from p2p_co2.protocol.wire.messages_pb2 import PeerRecord
from p2p_co2.simnet.internet import LOOK_UP_S, Endpoint, Internet

CALLED_FOR_S, REFUSED_S = 15.0, 1.0
"""A call that nobody answers ends after so long (``discovery.dht``); one that is refused ends sooner."""
SLOWEST_LOOKUP_S, LISTED_S = 2 * LOOK_UP_S, 0.5
"""Who lists all records finds those of up to ``LISTED_S`` ago."""


@dataclass
class Seed:
    """A seed: finds peers, never trains. ``side``: where it is when the net is cut."""

    is_up: bool = True
    side: int = 0


@dataclass
class Rendezvous:
    """What is in the DHT, and who could answer."""

    internet: Internet
    rng: random.Random
    seeds: list[Seed] = field(default_factory=lambda: [Seed(), Seed(side=1)])
    _records: dict[PeerId, tuple[float, PeerRecord]] = field(default_factory=dict)
    """With when it expires."""
    _listed: list[PeerRecord] = field(default_factory=list)
    _listed_at: float = -math.inf

    def set_seed(self, seed: Seed, is_up: bool) -> None:
        seed.is_up = is_up
        self.internet.faults["seed down"] += not is_up

    def seed_answers(self, peer: PeerId) -> bool:
        """Whether ``peer`` reaches a seed."""
        side, whole = self.internet.side_of(peer), self.internet.is_whole
        return any(seed.is_up and (whole or seed.side == side) for seed in self.seeds)

    def answers(self, peer: PeerId) -> bool:
        """Whether somebody who holds records can be reached."""
        return self.seed_answers(peer) or any(
            self.internet.endpoints[other].is_up and other != peer and not self.internet.is_cut(peer, other)
            for other in self._records
        )

    def publish(self, record: PeerRecord, lifetime_s: float) -> None:
        self._records[PeerId(record.peer)] = self.internet.world.now + lifetime_s, record

    def record(self, peer: PeerId, asker: PeerId) -> PeerRecord | None:
        """The record of ``peer`` that ``asker`` finds now."""
        expires_at, record = self._records.get(peer, (-math.inf, None))
        is_seen = expires_at > self.internet.world.now and not self.internet.is_cut(asker, peer)
        return record if is_seen else None

    def records(self, asker: PeerId) -> list[PeerRecord]:
        """The records that ``asker`` finds, of all peers, sorted by peer."""
        now, net = self.internet.world.now, self.internet
        if now >= self._listed_at + LISTED_S:
            self._listed_at = now
            self._listed = [one for _, (until, one) in sorted(self._records.items()) if until > now]
        if net.is_whole:
            return self._listed
        return [one for one in self._listed if not net.is_cut(asker, PeerId(one.peer))]


class Doorway:
    """One process on the simulated net: implements ``node.environment.PeerNetwork``."""

    def __init__(
        self, identity: Identity, config: PeerConfig, run: RunConfig, software: str,
        endpoint: Endpoint, rendezvous: Rendezvous,
    ) -> None:  # fmt: skip
        self.identity, self.config, self.run, self.software = identity, config, run, software
        self.carriers: Sequence[Carrier] = ()
        self._endpoint, self._rendezvous = endpoint, rendezvous
        self._run_digest = run.digest()
        self._published_at = -math.inf

    async def start_carriers(self, on_message: OnMessage, on_refused: OnRefused) -> None:
        self._endpoint.on_message = on_message

    async def publish_self(self, somebody_unmet: bool = False) -> None:
        if self._endpoint.loop.time() - self._published_at < RECORD_RENEWED_S:
            return
        await self._lookup(self._rendezvous.answers, "the DHT did not take a record")
        record = PeerRecord(peer=self.identity.peer_id, run=self._run_digest, software=self.software)
        self._rendezvous.publish(record, RECORD_LIFETIME_S)
        self._published_at = self._endpoint.loop.time()

    async def find_peers(self) -> list[PeerRecord]:
        await self._lookup(self._rendezvous.answers, "the DHT did not answer")
        me = self.identity.peer_id
        return [record for record in self._rendezvous.records(me) if record.peer != me]

    async def find_record(self, peer: PeerId, fresh: bool = False) -> PeerRecord | None:
        return self._rendezvous.record(peer, self.identity.peer_id)

    async def daemon_ended(self) -> str:
        never: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        return await never

    async def greet_seeds(self) -> None:
        await self.rebootstrap()

    async def rebootstrap(self) -> None:
        """Also how a process joins; raises ``TransportError`` when no seed answers."""
        self._published_at = -math.inf
        await self._lookup(self._rendezvous.seed_answers, "no seed can be reached")

    async def _lookup(self, answers: Callable[[PeerId], bool], trouble: str) -> None:
        # A seed that is down on a live machine refuses at once; behind a cut nothing comes back.
        left_s = REFUSED_S if self._rendezvous.internet.is_whole else CALLED_FOR_S
        while not answers(self.identity.peer_id):
            await asyncio.sleep(REFUSED_S)
            if (left_s := left_s - REFUSED_S) <= 0:
                raise TransportError(trouble)
        await asyncio.sleep(self._rendezvous.rng.uniform(0.05, SLOWEST_LOOKUP_S))
