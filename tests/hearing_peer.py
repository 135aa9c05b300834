"""A peer that only holds what is read, for tests of what it concludes from heartbeats."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from p2p_co2.node.catchup import Agreement
from p2p_co2.node.progress import SwarmProgress, Where
from p2p_co2.node.state import LocalProgress, PeerState
from p2p_co2.node.status import StatusWriter, Times
from p2p_co2.protocol.ledger import AgreedVersion
from p2p_co2.protocol.membership import Membership
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.messages_pb2 import Leave, Ping, Status

ME, OTHER, NEWCOMER = PeerId("me"), PeerId("other"), PeerId("newcomer")
DONE = LocalProgress(Status.DRAINING, finished=frozenset({0, 1}))
ALL_FINISHED = bytes([3])


def at(version: int) -> AgreedVersion:
    return AgreedVersion(version, bytes([version]) * 32)


class Place:
    """A peer that joins, with two fragments, and what it hears. ``moves``: whether chunks come or go;
    ``busy``: whether anything is fetched."""

    def __init__(self, *versions: int, rounds: int = 0, listed: tuple[PeerId, ...] = ()) -> None:
        self.now, self.moves, self.busy = 0.0, False, False
        self.membership = Membership(ME)
        self.state = PeerState(ME, [at(version) for version in versions])
        self.agreement = Agreement(self.membership, self.state)
        times = Times(lambda: self.now, lambda: self.now, 0.25, lambda at: rounds)
        self.writer = StatusWriter(self.state, self.membership, times, Status(process=1), lambda: 0.0)
        fetches: Any = SimpleNamespace(busy=lambda: self.busy, moves=lambda now, within_s: self.moves)
        self.progress = SwarmProgress(
            self.state, self.membership, self.agreement, self.writer, times, fetches, most_peers=64
        )
        self.membership.found(listed, self.now)

    @property
    def where(self) -> Where:
        return self.progress.joining.where

    def say(self, peer: PeerId, status: Status) -> None:
        self.membership.receive(Ping(nonce=1, sent_at=self.now, status=status), peer, self.now)
        self.conclude()

    def hear(
        self, peer: PeerId, phase: Status.Phase, *versions: int, settled: bool = False,
        finished: bytes | None = None,
    ) -> None:  # fmt: skip
        if finished is None:
            finished = ALL_FINISHED if phase == Status.DRAINING else b""
        digests = [at(version).digest for version in versions]
        self.say(
            peer,
            Status(phase=phase, versions=versions, digests=digests, settled=settled, finished=finished),
        )

    def lose(self, peer: PeerId) -> None:
        self.membership.receive(Leave(reason="the run is over"), peer, self.now)
        self.conclude()

    def move(self, *versions: int) -> None:
        for fragment, version in enumerate(versions):
            self.state.move(fragment, at(version), None)
        self.conclude()

    def conclude(self) -> None:
        self.now += 1.0
        self.progress.conclude(self.now)
