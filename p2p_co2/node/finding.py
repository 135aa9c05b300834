"""Keeps this peer listed in the DHT, and finds who else is.

Law: nothing here ends a peer. What the DHT refuses is told and tried again; a peer that cannot be listed
still looks, since others may be found that could never find it. A search costs as much as there are peers
listed, so among many that are all heard it is rare: who is new looks by itself, and greets all it finds.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from p2p_co2.errors import TransportError
from p2p_co2.node.unreachable import Unreachable
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.messages_pb2 import PeerRecord
from p2p_co2.telemetry import events as ev

if TYPE_CHECKING:
    from p2p_co2.node.node import Node
    from p2p_co2.node.surroundings import Surroundings

FIND_PEERS_QUICKLY_S, FIND_PEERS_S = 1.0, 10.0
QUICK_FINDS = 10
ALONE_BEFORE_REBOOTSTRAP_S = 20.0
FEW_PEERS, RARELY_TIMES = 4, 6.0
"""Among so many peers, all heard, it is looked for others every ``FIND_PEERS_S``; among more as many times
less often, down to the second of these. Who comes or goes makes it look again as among few."""
GREET_SEEDS_S = 20.0
"""How often the ticket's seeds are looked for again, whether we miss them or not."""


def find_every_s(live: int) -> float:
    """Seconds between two searches of one that hears ``live`` peers, all that are listed, and none less than
    the last time."""
    return FIND_PEERS_S * min(RARELY_TIMES, max(1.0, live / FEW_PEERS))


class Finding:
    """``unreached``: who is listed and cannot be reached, or does not reach us."""

    def __init__(self, node: Node, network: Surroundings) -> None:
        self._node, self._network = node, network
        self.unreached = Unreachable()
        self._trouble = ""
        self._found_at, self._found_among = -1e9, frozenset[PeerId]()
        """When it was looked for others last, and who was heard then."""
        self._alone_since = self._seeds_greeted_at = node.now()

    async def run(self) -> None:
        finds = 0
        self._seeds_greeted_at = self._node.now()
        while True:
            await self._look()
            self._node.pump()
            finds += 1
            node = self._node
            greet_s = max(GREET_SEEDS_S, node.membership.quiet_s if node.progress.rests else 0.0)
            if node.now() - self._seeds_greeted_at > greet_s:
                await self._greet_seeds()
            await asyncio.sleep(FIND_PEERS_QUICKLY_S if finds < QUICK_FINDS else self._again_s())

    async def _look(self) -> None:
        trouble, errors = self._trouble, list[str]()
        try:
            trouble = await self._network.publish_self(self.unreached.is_somebody_unmet) or ""
        except TransportError as error:
            errors.append(str(error))
        try:
            if self._is_due():
                records = await self._network.find_peers()
                self._tell_of_ways(trouble, records)
                await self._take(records)
                self._found_at, self._found_among = self._node.now(), frozenset(self._node.membership.live)
        except TransportError as error:
            errors.append(str(error))
        if errors:
            self._node.report(ev.Warned, text=f"peer discovery: {'; '.join(dict.fromkeys(errors))}")

    def _is_due(self) -> bool:
        """Whether to look for others."""
        membership = self._node.membership
        live = frozenset(membership.live)
        is_calm = bool(live) and live == self._found_among and not membership.unheard
        return not is_calm or self._node.now() - self._found_at >= find_every_s(len(live))

    async def _take(self, records: Sequence[PeerRecord]) -> None:
        """Greet those who are listed; among nobody, ask the seeds again whom else they know."""
        membership = self._node.membership
        if records or membership.live:
            self._alone_since = self._node.now()
        elif self._node.now() - self._alone_since > ALONE_BEFORE_REBOOTSTRAP_S:
            self._alone_since = self._node.now()
            await self._network.rebootstrap()
        peers = [PeerId(record.peer) for record in records]
        membership.forget(peers)
        membership.status = self._node.progress.status()  # who is found learns where we are, not were
        membership.found(peers, self._node.now())

    def _tell_of_ways(self, trouble: str, records: Sequence[PeerRecord]) -> None:
        """Warn of what keeps others from reaching this peer, and of those that it cannot reach."""
        if trouble and trouble != self._trouble:
            self._node.report(ev.Warned, text=trouble)
        self._trouble = trouble
        for peer, reason in self.unreached.listed(records, self._node.membership.live):
            self._node.report(ev.Warned, text=f"peer {peer} is there but cannot be reached: {reason}")

    async def _greet_seeds(self) -> None:
        """Become known again to a seed that was started anew: it has forgotten everybody, and who comes by
        it would find nobody. Seeds that are away are no trouble."""
        self._seeds_greeted_at = self._node.now()
        with contextlib.suppress(TransportError):
            await self._network.greet_seeds()

    def _again_s(self) -> float:
        """In the quiet of a long round newcomers find us; a record must be renewed all the same."""
        rests = self._node.progress.rests and self._node.membership.quiet_s
        return 2 * FIND_PEERS_S if rests else FIND_PEERS_S
