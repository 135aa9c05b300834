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
from p2p_co2.net.transport.base import MESSAGE_TIMEOUT_S, Carrier, OnMessage, OnRefused
from p2p_co2.simnet.internet import KNOCK_EVERY_S, LOOK_UP_S, Endpoint, Internet
from p2p_co2.wire.identity import Identity, PeerId
from p2p_co2.wire.messages_pb2 import PeerRecord

CALLED_FOR = 15
"""A call that nobody answers ends after so many knocks (``discovery.dht``); one that is refused at once."""


@dataclass
class VirtualSeed:
    """A seed: finds peers, never trains. ``side``: where it is when the net is cut."""

    is_up: bool = True
    side: int = 0


@dataclass
class Rendezvous:
    """What is in the DHT, and who could answer. ``entries``: when each record expires, and it."""

    internet: Internet
    rng: random.Random
    seeds: list[VirtualSeed] = field(default_factory=lambda: [VirtualSeed(), VirtualSeed(side=1)])
    entries: dict[PeerId, tuple[float, PeerRecord]] = field(default_factory=dict)

    def set_seed(self, seed: VirtualSeed, is_up: bool) -> None:
        seed.is_up = is_up
        self.internet.faults["seed down"] += not is_up

    def seed_answers(self, peer: PeerId) -> bool:
        """Whether ``peer`` reaches a seed."""
        side = self.internet.side_of(peer)
        whole = self.internet.is_whole
        return any(seed.is_up and (whole or seed.side == side) for seed in self.seeds)

    def answers(self, peer: PeerId) -> bool:
        """Whether somebody who holds records can be reached."""
        ends = self.internet.endpoints
        is_cut = self.internet.is_cut
        others = (other for other in self.entries if other != peer and ends[other].is_up)
        return self.seed_answers(peer) or any(not is_cut(peer, other) for other in others)

    def publish(self, record: PeerRecord, lifetime_s: float) -> None:
        self.entries[PeerId(record.peer)] = self.internet.world.now + lifetime_s, record

    def records(self, asker: PeerId) -> list[PeerRecord]:
        """The records that ``asker`` finds, of all peers, sorted by peer."""
        now = self.internet.world.now
        is_cut = self.internet.is_cut
        known = sorted(self.entries.items())
        return [record for peer, (until, record) in known if until > now and not is_cut(asker, peer)]


class Doorway:
    """One process on the simulated net: implements ``node.environment.PeerNetwork``."""

    visits = False

    def __init__(
        self, identity: Identity, config: PeerConfig, run: RunConfig, software: str,
        endpoint: Endpoint, rendezvous: Rendezvous,
    ) -> None:  # fmt: skip
        self.identity = identity
        self.config = config
        self.run = run
        self.software = software
        self.carriers: Sequence[Carrier] = ()
        self._endpoint = endpoint
        self._rendezvous = rendezvous
        self._published_at = -math.inf

    async def start_carriers(self, on_message: OnMessage, on_refused: OnRefused) -> None:
        self._endpoint.on_message = on_message

    async def publish_self(self, somebody_unmet: bool = False) -> None:
        if self._endpoint.loop.time() - self._published_at < MESSAGE_TIMEOUT_S / 3:
            return
        await self._lookup(self._rendezvous.answers, "the DHT did not take a record")
        record = PeerRecord(peer=self.identity.peer_id, run=self.run.digest(), software=self.software)
        self._rendezvous.publish(record, MESSAGE_TIMEOUT_S)
        self._published_at = self._endpoint.loop.time()

    async def find_peers(self) -> list[PeerRecord]:
        await self._lookup(self._rendezvous.answers, "the DHT did not answer")
        me = self.identity.peer_id
        return [record for record in self._rendezvous.records(me) if record.peer != me]

    async def find_record(self, peer: PeerId, fresh: bool = False) -> PeerRecord | None:
        """Nobody asks: ``VirtualLinks`` needs no addresses."""
        return None

    async def daemon_ended(self) -> str:
        never: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        return await never

    async def rebootstrap(self) -> None:
        """Also how a process joins; raises ``TransportError`` when no seed answers."""
        self._published_at = -math.inf
        await self._lookup(self._rendezvous.seed_answers, "no seed can be reached")

    greet_seeds = rebootstrap

    async def _lookup(self, answers: Callable[[PeerId], bool], trouble: str) -> None:
        # A seed that is down on a live machine refuses at once; behind a cut nothing comes back.
        left = 1 if self._rendezvous.internet.is_whole else CALLED_FOR
        while not answers(self.identity.peer_id):
            await asyncio.sleep(KNOCK_EVERY_S)
            if (left := left - 1) <= 0:
                raise TransportError(trouble)
        await asyncio.sleep(self._rendezvous.rng.uniform(0.05, 2 * LOOK_UP_S))
