"""A peer that only holds what is read, for tests of what it concludes from heartbeats."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from p2p_co2.node.agreement import Agreement
from p2p_co2.node.environment import Clock
from p2p_co2.node.ledger import AgreedVersion
from p2p_co2.node.progress import SwarmProgress
from p2p_co2.protocol.membership import Membership
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.messages_pb2 import Leave, Ping, Status

OTHER, NEWCOMER = PeerId("other"), PeerId("newcomer")


NO_ROUND = {"is_over": lambda fragment: False}


class Place:
    """A peer that joins, with two fragments, and what it hears."""

    def __init__(self, *versions: int, rounds: int = 0) -> None:
        self.now = 0.0
        self.node: Any = SimpleNamespace(
            agreed=[AgreedVersion(version, bytes([version]) * 32) for version in versions],
            clock=Clock(lambda: self.now, lambda: self.now),
            now=lambda: self.now,
            membership=Membership(PeerId("me")),
            catching=None,
            me=PeerId("me"),
            rounds=SimpleNamespace(**NO_ROUND),
            catchup=SimpleNamespace(
                ask_swarm=lambda vouch: None, donor=SimpleNamespace(takers=lambda now, within_s: [])
            ),
            refresh=lambda: None,
            pump=lambda: None,
            upload_bytes_per_s=lambda: 0.0,
            download_bytes_per_s=0.0,
            software="",
            process=1,
            most_peers=64,
        )
        self.progress = self.node.progress = SwarmProgress(cast(Any, self.node), 0.25, rounds)
        majority = Agreement(PeerId("me"), self.node.membership, self.node.agreed, self._standing)
        self.node.catching = SimpleNamespace(majority=majority, busy=lambda: False)
        self.node.membership.found([], self.now)

    def _standing(self) -> tuple[Status.Phase, frozenset[int]]:
        return self.progress.local.phase, self.progress.local.finished

    def hear(self, peer: PeerId, phase: Status.Phase, *versions: int, settled: bool = False) -> None:
        digests = [bytes([version]) * 32 for version in versions]
        finished = bytes([(1 << len(versions)) - 1]) if phase == Status.DRAINING else b""
        status = Status(phase=phase, versions=versions, digests=digests, settled=settled, finished=finished)
        self.node.membership.receive(Ping(nonce=1, sent_at=self.now, status=status), peer, self.now)
        self.conclude()

    def lose(self, peer: PeerId) -> None:
        self.node.membership.receive(Leave(reason="the run is over"), peer, self.now)
        self.conclude()

    def move(self, *versions: int) -> None:
        self.node.agreed[:] = [AgreedVersion(version, bytes([version]) * 32) for version in versions]
        self.conclude()

    def conclude(self) -> None:
        self.now += 1.0
        self.progress.conclude(self.now)
