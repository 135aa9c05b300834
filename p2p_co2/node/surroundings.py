"""What a node stands on: a clock, the network beside it, and links out.

In a real process these are the system's clock, ``network.Network`` and ``links.Links``; in a simulation they
are virtual. Law: the node knows the world through these alone, so the same node runs in both.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from p2p_co2.config import PeerConfig, RunConfig
from p2p_co2.net.transport.base import Carrier, OnMessage, OnRefused
from p2p_co2.node.envelope import Unsent
from p2p_co2.node.lanes import Piece
from p2p_co2.node.links import LinkObserver, LinkTraffic
from p2p_co2.protocol.wire.identity import Identity, PeerId
from p2p_co2.protocol.wire.messages_pb2 import PeerRecord


@dataclass(frozen=True)
class Clock:
    """``monotonic``: seconds that never go back; ``unix``: the date, which others may have set otherwise."""

    monotonic: Callable[[], float] = time.monotonic
    unix: Callable[[], float] = time.time


SYSTEM_CLOCK = Clock()


class Announcer(Protocol):
    """Where commits are announced."""

    async def publish_decision(
        self, fragment: int, round_: int, decision: bytes, lifetime_s: float
    ) -> None: ...


class Surroundings(Protocol):
    """The network beside the model; methods and their errors as ``network.Network`` says."""

    @property
    def identity(self) -> Identity: ...
    @property
    def config(self) -> PeerConfig: ...
    @property
    def run(self) -> RunConfig: ...
    @property
    def software(self) -> str: ...
    @property
    def discovery(self) -> Announcer: ...
    @property
    def carriers(self) -> Sequence[Carrier]: ...

    async def start_carriers(self, on_message: OnMessage, on_refused: OnRefused) -> None: ...
    async def publish_self(self, somebody_unmet: bool = False) -> str | None: ...
    async def find_peers(self) -> list[PeerRecord]: ...
    async def find_record(self, peer: PeerId, fresh: bool = False) -> PeerRecord | None: ...
    async def daemon_ended(self) -> str: ...
    async def rebootstrap(self) -> None: ...
    async def greet_seeds(self) -> None: ...


class Outgoing(Protocol):
    """Links to other peers; see ``links.Links``."""

    up_bytes: int
    traffic: dict[PeerId, LinkTraffic]

    @property
    def upload_bytes_per_s(self) -> float: ...
    @property
    def is_full(self) -> bool: ...

    def set_paces(self, bytes_per_s: Mapping[PeerId, float]) -> None: ...
    def post(
        self, peer: PeerId, data: Unsent, bulk: bool, served: bool = False, piece: Piece | None = None
    ) -> bool: ...
    def forget(self, attempt: bytes, means: bool) -> None: ...
    def carriers_used(self) -> dict[str, str]: ...
    async def drain(self, timeout_s: float) -> None: ...
    async def close(self) -> None: ...


MakeLinks = Callable[
    [
        Sequence[Carrier],
        Callable[[PeerId, bool], Awaitable[PeerRecord | None]],
        LinkObserver,
        asyncio.TaskGroup,
        float,
    ],
    Outgoing,
]
"""(carriers, find_record, observer, tasks, upload cap in bytes/s): how ``links.Links`` is made."""
