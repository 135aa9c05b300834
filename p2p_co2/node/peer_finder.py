"""What a node asks the DHT: it keeps this peer listed, finds others, and leaves word of where the run is.

Law: nothing here ends a peer or holds it up. What the DHT refuses is told and tried again; a peer that cannot
be listed still looks. A search costs as much as there are peers listed. So among many that are all heard it
is rare: a newcomer looks by itself, and greets all it finds.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Container, Sequence

from p2p_co2.errors import TransportError
from p2p_co2.net.transport.base import CLOSE_TIMEOUT_S
from p2p_co2.node.environment import Environment
from p2p_co2.node.state import Effects
from p2p_co2.node.status import StatusWriter
from p2p_co2.protocol.membership import Membership
from p2p_co2.telemetry import events as ev
from p2p_co2.wire.heartbeat import HEARTBEAT_S
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.limits import MAX_PEERS
from p2p_co2.wire.messages_pb2 import PeerRecord, Status

FIND_PEERS_S = 10.0
"""Between two searches of others."""
QUICK_FINDS = 10
"""So many searches makes one that has just come, one in each heartbeat."""
FEW_PEERS = 4
"""Among at most so many peers, all heard, none is rarer; a coming or going counts as among few again."""
RARELY_TIMES = 6.0
"""Searches among many are at most so many times rarer."""
ALONE = (
    "nobody else is here: rounds are made alone, and nothing is exchanged; invite others with p2p-co2 join "
    "TICKET (the word that the seed printed)"
)
"""Said once, by a peer that has trained alone for three searches."""


def find_every_s(live: int) -> float:
    """Seconds between two searches of one that hears ``live`` peers, all that are listed, and none less than
    the last time."""
    return FIND_PEERS_S * min(RARELY_TIMES, max(1.0, live / FEW_PEERS))


class Unreachable:
    """Peers that are there and cannot be reached, told from those that are merely gone.

    A record that is renewed while its peer is not heard is of one that is alive behind something. Each is
    told of once, and again only after it was met; at most ``MAX_PEERS`` are remembered."""

    def __init__(self) -> None:
        self._reasons: dict[PeerId, str] = {}
        self._told: set[PeerId] = set()
        self._unheard: dict[PeerId, float] = {}
        """When the records of those that are listed and not heard ended, as they were first seen so."""
        self.is_somebody_unmet = False
        """Whether a peer was listed last that has renewed its record while we did not hear it."""

    def failed(self, peer: PeerId, reason: str) -> None:
        """No carrier gets through to ``peer``."""
        if peer in self._reasons or len(self._reasons) < MAX_PEERS:
            self._reasons[peer] = reason

    def met(self, peer: PeerId) -> None:
        """We hear from ``peer``."""
        self._reasons.pop(peer, None)
        self._unheard.pop(peer, None)
        self._told.discard(peer)

    def listed(self, records: Sequence[PeerRecord], live: Container[PeerId] = ()) -> list[tuple[PeerId, str]]:
        """What the DHT lists now, and whom we hear: (peer, reason) of those to tell of."""
        ends = {PeerId(one.peer): one.expires_at for one in records[:MAX_PEERS] if one.peer not in live}
        self._unheard = {peer: self._unheard.get(peer, at) for peer, at in ends.items()}
        renewed = [peer for peer, at in self._unheard.items() if ends[peer] > at]
        self.is_somebody_unmet = bool(renewed)
        news = [peer for peer in renewed if peer in self._reasons and peer not in self._told]
        self._told.update(news)
        return [(peer, self._reasons[peer]) for peer in news]


class PeerFinder:
    """Finds the others for ``membership``. ``unreached``: who is listed and cannot be reached, or
    does not reach us."""

    def __init__(
        self, environment: Environment, membership: Membership, writer: StatusWriter, effects: Effects
    ) -> None:
        self._environment = environment
        self._network = environment.network
        self._membership = membership
        self._writer = writer
        self._do = effects
        self.unreached = Unreachable()
        self._trouble = ""
        self._found_at = -math.inf
        """When it was looked for others last."""
        self._found_among = frozenset[PeerId]()
        """Peers that were heard then."""
        self._alone_since = self._seeds_greeted_at = effects.now()

    async def run(self) -> None:
        finds = 0
        self._seeds_greeted_at = self._do.now()
        while True:
            await self._look()
            self._do.pump()
            finds += 1
            quiet_s = self._membership.quiet_s if self._writer.rests else 0.0
            is_due = self._do.now() - self._seeds_greeted_at > max(2 * FIND_PEERS_S, quiet_s)
            if is_due and self._environment.is_first:
                await self._greet_seeds()
            calm_s = 2 * FIND_PEERS_S if quiet_s else FIND_PEERS_S  # in the quiet newcomers find us
            await asyncio.sleep(HEARTBEAT_S if finds < QUICK_FINDS else calm_s)

    async def _look(self) -> None:
        errors = list[str]()
        try:
            if self._environment.is_first:
                await self._publish()
        except TransportError as error:
            errors.append(str(error))
        try:
            if self._is_due():
                await self._take(await self._environment.find_peers())
                self._found_at = self._do.now()
                self._found_among = frozenset(self._membership.live)
        except TransportError as error:
            errors.append(str(error))
        if errors:
            self._do.report(ev.Warned, text=f"peer discovery: {'; '.join(dict.fromkeys(errors))}")

    async def _publish(self) -> None:
        trouble = await self._network.publish_self(self.unreached.is_somebody_unmet) or ""
        if trouble and trouble != self._trouble:  # what keeps others from reaching this peer, and news
            self._do.report(ev.Warned, text=trouble)
        self._trouble = trouble

    def _is_due(self) -> bool:
        """Whether to look for others."""
        live = frozenset(self._membership.live)
        is_calm = bool(live) and live == self._found_among and not self._membership.candidates.next_at
        return not is_calm or self._do.now() - self._found_at >= find_every_s(len(live))

    async def _take(self, records: Sequence[PeerRecord]) -> None:
        """Warn of those that this peer cannot reach. Greet those that are listed; among nobody, ask the seeds
        again whom else they know."""
        membership = self._membership
        now = self._do.now()
        records = [record for record in records if not record.visits]  # those come by themselves
        for peer, reason in self.unreached.listed(records, membership.live):
            self._do.report(ev.Warned, text=f"peer {peer} is there but cannot be reached: {reason}")
        if records or membership.live:
            self._alone_since = now
        elif now - self._alone_since > 2 * FIND_PEERS_S and self._environment.is_first:
            self._alone_since = now
            await self._network.rebootstrap()
        membership.status = self._writer.status()  # who is found learns where we are, not were
        membership.found([PeerId(record.peer) for record in records], self._do.now())

    async def _greet_seeds(self) -> None:
        """Become known again to a seed that was started anew: it has forgotten everybody, and who comes by
        it would find nobody. Seeds that are away are no trouble."""
        self._seeds_greeted_at = self._do.now()
        with contextlib.suppress(TransportError):
            await self._network.greet_seeds()


class PositionWriter:
    """Leaves word of where the run is, for those that come when everybody has left.

    Without it a peer that hears nobody cannot tell a run that never began from one that is over. And it tells
    a peer that trains alone so: from inside all looks well. ``publish``: as ``Network.publish_position``;
    ``where``: this peer's phase, position and versions; ``live_peers``: others that are heard. All calls on
    the network's loop. Price: a record of some 300 bytes a minute, for each node that keeps it.
    """

    def __init__(
        self, publish: Callable[[float, Sequence[int], bool], Awaitable[None]],
        where: Callable[[], tuple[Status.Phase, float, Sequence[int]]], live_peers: Callable[[], int],
        now: Callable[[], float], warn: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._publish = publish
        self._where = where
        self._live_peers = live_peers
        self._now = now
        self._warn = warn
        self._alone_since = math.inf
        self._has_told_of_alone = False

    async def run(self) -> None:
        while True:
            self.look_whether_alone()
            await self._say(is_last=False)
            await asyncio.sleep(HEARTBEAT_S)

    def look_whether_alone(self) -> None:
        """Warn once who has trained for long without anybody else."""
        phase, _, _ = self._where()
        if phase != Status.TRAINING or self._live_peers():
            self._alone_since = math.inf
            return
        self._alone_since = min(self._alone_since, self._now())
        if self._now() - self._alone_since >= 3 * FIND_PEERS_S and not self._has_told_of_alone:
            self._has_told_of_alone = True
            self._warn(ALONE)

    async def say_last(self) -> None:
        """Bounded."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._say(is_last=True)

    async def _say(self, is_last: bool) -> None:
        phase, position, versions = self._where()
        if phase == Status.JOINING or not any(versions):
            return  # as long as nothing was agreed on, who begins anew loses nothing
        with contextlib.suppress(TransportError):
            await self._publish(position, versions, is_last)
