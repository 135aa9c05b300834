"""A late peer and its donors on virtual time, for tests of catching up.

Every donor sends one message after the other at a rate of its own; ``World.tamper`` may change or drop a
message under way. What is counted are chunks that travelled and virtual seconds.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from itertools import count

from p2p_co2.digest import chunk_digests, digest_of_chunks
from p2p_co2.protocol.catchup.goals import (
    STATE,
    CatchUpEvent,
    CatchUpMessage,
    DonorRefused,
    ExportWanted,
    Fetched,
    FetchFailed,
    Goal,
    Loading,
    TransferSizes,
)
from p2p_co2.protocol.catchup.machine import CatchUp
from p2p_co2.wire.identity import Identity, PeerId
from p2p_co2.wire.limits import MAX_DATA_BYTES
from p2p_co2.wire.messages_pb2 import Chunk

RUN = bytes(range(32))
CHUNKS = 40
SMALL, LARGE = 3 * MAX_DATA_BYTES + 17, CHUNKS * MAX_DATA_BYTES - 5
SHAPE = TransferSizes(mean_bytes=(MAX_DATA_BYTES + 5, 10, 10), state_bytes=(SMALL, LARGE, LARGE))
IDENTITIES = [Identity.generate() for _ in range(6)]
LATE, *DONORS = (identity.peer_id for identity in IDENTITIES)
D1, D2, D3, D4, D5 = DONORS
CONTENT = [
    random.Random(fragment).randbytes(size)
    for fragment, size in enumerate((*SHAPE.state_bytes, LARGE, 16 * MAX_DATA_BYTES))
]
"""By fragment; all after the last have the same, of which a state is as much as its shape says."""
MEAN = random.Random(9).randbytes(SHAPE.mean_bytes[0])


@lru_cache(32)
def state_of(fragment: int, version: int) -> bytes:
    """Each version has other bytes everywhere."""
    return bytes([version]) + CONTENT[min(fragment, len(CONTENT) - 1)][1:-1] + bytes([version])


def named(data: bytes, chunk_bytes: int = MAX_DATA_BYTES) -> bytes:
    """The digest of a state that has these bytes."""
    return digest_of_chunks(chunk_digests(data, chunk_bytes))


def export(machine: CatchUp, fragment: int, version: int, data: bytes, now: float) -> None:
    """Answer its ``ExportWanted``."""
    digests = list(chunk_digests(data, machine.donor.shape.chunk_bytes))
    machine.donor.exported(fragment, version, data, digest_of_chunks(digests), digests, now)


class World:
    """A late peer and donors. ``rates``: bytes per second that each donor sends; ``latency_s``: one way."""

    def __init__(
        self, donors: int = 2, rate: float = 50e6, shape: TransferSizes = SHAPE, latency_s: float = 0.02
    ) -> None:
        self.shape, self.latency_s = shape, latency_s
        self.machines = {i.peer_id: CatchUp(i, RUN, shape) for i in IDENTITIES[: donors + 1]}
        self.rates = dict.fromkeys(self.machines, rate)
        self.versions = dict.fromkeys(self.machines, 7)
        self.free_at = dict.fromkeys(self.machines, 0.0)
        self.events: list[CatchUpEvent] = []
        self.told: list[tuple[float, Loading]] = []
        self.tamper: Callable[[PeerId, CatchUpMessage], CatchUpMessage | None] = lambda sender, message: (
            message
        )
        self.sent: list[tuple[PeerId, CatchUpMessage]] = []
        self.now = 10.0
        self.stands = (math.inf, math.inf)
        """From when to when nothing reaches the late peer: all of it is there at the end."""
        self._under_way: list[tuple[float, int, PeerId, PeerId, CatchUpMessage]] = []
        self._order = count()
        for peer in self.machines:
            self.move(peer, 7)

    def move(self, peer: PeerId, version: int) -> None:
        self.versions[peer] = version
        for fragment in range(len(self.shape.state_bytes)):
            self.machines[peer].donor.moved(fragment, version)

    def want(self, fragment: int = 1, version: int = 7, **more: object) -> None:
        donors = tuple(peer for peer in self.machines if peer != LATE)
        goal = Goal(STATE, fragment, version, donors, **more)  # type: ignore[arg-type]
        self.machines[LATE].fetcher.want(goal, self.now)

    def run(self, seconds: float = 300.0, enough: int = 1) -> None:
        """Until the late peer has told ``enough`` endings, or nothing moves, or time is up."""
        ends_at = self.now + seconds
        self._take_all()
        while sum(isinstance(event, Fetched | FetchFailed) for event in self.events) < enough:
            times = [at for machine in self.machines.values() if (at := machine.get_timer()) is not None]
            times += [self._under_way[0][0]] if self._under_way else []
            if not times or min(times) > ends_at:
                self.now = ends_at if times else self.now
                return
            self.now = max(self.now, min(times))
            while self._under_way and self._under_way[0][0] <= self.now:
                _, _, sender, receiver, message = heapq.heappop(self._under_way)
                self.machines[receiver].receive(message, sender, self.now)
            for machine in self.machines.values():
                machine.handle_timer(self.now)
            self._take_all()

    def _take_all(self) -> None:
        has_exported = False
        for peer, machine in self.machines.items():
            while (event := machine.next_event()) is not None:
                if isinstance(event, ExportWanted):
                    self._export(machine, event.fragment, self.versions[peer])
                    has_exported = True
                elif isinstance(event, Loading):
                    self.told.append((self.now, event))
                elif peer == LATE:
                    self.events.append(event)
            for receiver, message in machine.messages_to_send():
                self.sent.append((peer, message))
                changed = self.tamper(peer, message)
                if changed is not None and receiver in self.machines:
                    self.send(peer, receiver, changed)
        if has_exported:
            self._take_all()

    def _export(self, machine: CatchUp, fragment: int, version: int) -> None:
        data = state_of(fragment, version)[-self.shape.state_bytes[fragment] :]
        export(machine, fragment, version, data, self.now)

    def send(self, sender: PeerId, receiver: PeerId, message: CatchUpMessage) -> None:
        arrives_at = self.now + self.latency_s
        if isinstance(message, Chunk):  # small messages overtake them, as in the node's lanes
            self.free_at[sender] = (
                max(self.now, self.free_at[sender]) + len(message.data) / self.rates[sender]
            )
            arrives_at += self.free_at[sender] - self.now
        if receiver == LATE and self.stands[0] <= arrives_at < self.stands[1]:
            arrives_at = self.stands[1]
        heapq.heappush(self._under_way, (arrives_at, next(self._order), sender, receiver, message))

    def fetched(self) -> Fetched:
        (event,) = [event for event in self.events if not isinstance(event, DonorRefused)]
        assert isinstance(event, Fetched), event
        self.check(event)
        return event

    def check(self, event: Fetched) -> None:
        fragment = event.goal.fragment
        assert bytes(event.data) == state_of(fragment, event.version)[-self.shape.state_bytes[fragment] :]

    def chunks_from(self, donor: PeerId) -> list[int]:
        return [m.chunk for sender, m in self.sent if sender == donor and isinstance(m, Chunk)]

    def chunks_sent(self) -> Counter[int]:
        return Counter(m.chunk for _, m in self.sent if isinstance(m, Chunk))


def vouched_and_never_given() -> World:
    """Five seconds under way to version 8, for which all vouch: D2, which promises it, gives no chunk, and
    D1 has version 7."""
    world = World(donors=2, rate=2e6)
    world.move(D2, 8)
    world.machines[LATE].fetcher.ask_swarm(lambda donor, fragment, version, digest: version == 8 or None)
    world.tamper = lambda sender, message: None if sender == D2 and isinstance(message, Chunk) else message
    world.want()
    world.run(5.0)
    return world


def lying(liar: PeerId, wrong: Callable[[Chunk], None]) -> Callable[[PeerId, CatchUpMessage], CatchUpMessage]:
    def tamper(sender: PeerId, message: CatchUpMessage) -> CatchUpMessage:
        if sender == liar and isinstance(message, Chunk):
            changed = Chunk()
            changed.CopyFrom(message)
            wrong(changed)
            return changed
        return message

    return tamper


def zero(chunk: Chunk) -> None:
    chunk.data = bytes(len(chunk.data))
