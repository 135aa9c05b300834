"""What a node stands on: its group, a clock, the network beside it, and links out.

In a real process these are the system's clock, ``network.Network`` and ``links.LinkPool``; in a simulation
they are virtual. Law: the node knows the world through these alone, so the same node runs in both.

A group is the peers that agree on one state: its digest is in every envelope. The run itself is a group. A
process may be in several over one set of carriers and one line: ``environment.beside(group)``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Protocol

from p2p_co2.config import PeerConfig, RunConfig
from p2p_co2.errors import Offence, RemoteProtocolError
from p2p_co2.net.transport.base import Carrier, OnMessage, OnRefused
from p2p_co2.node.links import FindRecord, LinkObserver, LinkPool, LinkTraffic, Piece, Uplink
from p2p_co2.node.router import Quotas
from p2p_co2.wire.envelope import Opened, Unsent, group_of, opened
from p2p_co2.wire.identity import Identity, PeerId
from p2p_co2.wire.members import Members
from p2p_co2.wire.messages_pb2 import PeerRecord


@dataclass(frozen=True)
class Clock:
    """``monotonic``: seconds that never go back; ``unix``: the date, which others may have set otherwise."""

    monotonic: Callable[[], float] = time.monotonic
    unix: Callable[[], float] = time.time


class PeerNetwork(Protocol):
    """The network beside the model; methods and their errors as ``network.Network`` says."""

    @property
    def identity(self) -> Identity: ...
    @property
    def config(self) -> PeerConfig: ...
    @property
    def run(self) -> RunConfig: ...
    @property
    def carriers(self) -> Sequence[Carrier]: ...
    @property
    def visits(self) -> bool: ...

    async def start_carriers(self, on_message: OnMessage, on_refused: OnRefused) -> None: ...
    async def publish_self(self, somebody_unmet: bool = False) -> str | None: ...
    async def find_peers(self) -> list[PeerRecord]: ...
    async def find_record(self, peer: PeerId, fresh: bool = False) -> PeerRecord | None: ...
    async def daemon_ended(self) -> str: ...
    async def rebootstrap(self) -> None: ...
    async def greet_seeds(self) -> None: ...


class Links(Protocol):
    """Links to other peers; see ``links.LinkPool``."""

    up_bytes: int
    is_urgent: bool
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


MakeLinks = Callable[[Sequence[Carrier], FindRecord, LinkObserver, asyncio.TaskGroup, Uplink], Links]
"""How ``links.LinkPool`` is made."""


@dataclass(frozen=True)
class RunGroup:
    """One of a run's groups. ``digest`` names it. ``stages``: a peer is looked for in it whose record says
    one of these; None for any peer of the run. ``number``: the stage that its checkpoints are of; None for
    the whole model. ``name``: in what is told of it; empty for a process's first group."""

    digest: bytes
    stages: frozenset[int] | None = None
    number: int | None = None
    name: str = ""

    @classmethod
    def whole(cls, run: RunConfig) -> RunGroup:
        """All peers of the run."""
        return cls(run.digest())

    @classmethod
    def of_stage(cls, run: RunConfig, stage: int) -> RunGroup:
        """The replicas of ``stage``."""
        return cls(run.stage_digest(stage), frozenset({stage}), stage)

    @classmethod
    def of_table(cls, run: RunConfig) -> RunGroup:
        """Those that hold the table that the first stage and the last share."""
        count = run.pipeline.stages
        return cls(run.stage_digest(count), frozenset({0, count - 1}), count, "the tied table")

    def has(self, stage: int) -> bool:
        """Whether a peer is looked for in it whose record says ``stage``."""
        return self.stages is None or stage in self.stages


class GroupSwitch:
    """One process's carriers, shared by its groups: what comes in is sorted by ``Envelope.run``. What is for
    no group of ours goes to the first one, which does not read it and counts its bytes."""

    def __init__(self, network: PeerNetwork, members: Members) -> None:
        self._network = network
        self._members = members
        self._doors: dict[bytes, tuple[OnMessage, OnRefused, Callable[[PeerId], bool]]] = {}
        self.elsewhere: Callable[[float, float], list[float]] = lambda now, rounds_per_s: []
        """Positions of peers of no averaging group here that share the run's clock, in rounds; may be set."""

    def leads(self, group: bytes) -> bool:
        """Whether ``group`` is the first: it keeps the process listed, known to the seeds, and warned."""
        return next(iter(self._doors), group) == group

    async def join(
        self, group: bytes, on_message: OnMessage, on_refused: OnRefused, is_known: Callable[[PeerId], bool]
    ) -> Sequence[Carrier]:
        """Hear what is for ``group``; the first group starts the carriers. ``is_known``: whether a peer has
        worked with us of late. Raises ``EnvironmentFault`` if a carrier cannot listen."""
        is_first = not self._doors
        self._doors[group] = on_message, on_refused, is_known
        if is_first:
            await self._network.start_carriers(self._on_message, self._on_refused)
            for carrier in self._network.carriers:
                carrier.admission.is_known = lambda peer: any(door[2](peer) for door in self._doors.values())
        return self._network.carriers

    def leave(self, group: bytes) -> None:
        """``group`` is heard no more, unless it is the last."""
        if len(self._doors) > 1:
            self._doors.pop(group, None)

    async def _on_message(self, sender: PeerId, data: bytes) -> None:
        if trouble := self._members.trouble_with(sender):
            raise RemoteProtocolError(Offence.NO_MEMBER, trouble)
        doors = self._doors
        door = doors.get(group_of(data)) if len(doors) > 1 else None
        await (door or next(iter(doors.values())))[0](sender, data)

    def _on_refused(self, peer: PeerId | None, error: RemoteProtocolError) -> None:
        next(iter(self._doors.values()))[1](peer, error)


class Environment:
    """What one group's shell stands on. ``group``: the process's first, the run itself unless it is another;
    ``beside`` makes that of a further one. ``quotas``: how fast each sender is read, whatever group it is
    for."""

    def __init__(
        self, network: PeerNetwork, clock: Clock | None = None, make_links: MakeLinks = LinkPool,
        open_message: Callable[[bytes, bytes], Opened] = opened, group: RunGroup | None = None,
        members: Members | None = None,
    ) -> None:  # fmt: skip
        self.members = members or Members(network.run.digest(), settings=network.run)
        self.network = network
        self._group = group or RunGroup.whole(network.run)
        self.clock = clock or Clock()
        self.make_links = make_links
        self.open_message = open_message
        self.quotas = Quotas(network.config.limits.download_bytes_per_s)
        self.switch = GroupSwitch(network, self.members)
        self.uplink = Uplink(network.config.limits.upload_bytes_per_s)

    @property
    def group(self) -> bytes:
        """The digest of the group."""
        return self._group.digest

    @property
    def is_first(self) -> bool:
        """Whether this group keeps the process's place: one does it for all."""
        return self.switch.leads(self.group)

    async def find_peers(self) -> list[PeerRecord]:
        """Records of the other peers of the group, as the DHT has them now. Raises ``TransportError``."""
        return [one for one in await self.network.find_peers() if self._group.has(one.stage)]

    def beside(self, group: RunGroup) -> Environment:
        """The same process in another group: its carriers, its line and its clock."""
        other = copy(self)
        other._group = group
        return other
