"""Leaves word of where the run is, for those that come when everybody has left.

Without it a peer that hears nobody cannot tell a run that never began from one that is over, and would train
it once more, alone. Law: nothing here ends a peer or holds it up; what the DHT refuses is tried again, and
told by ``finding``, which meets the same refusal. And it tells a peer that trains alone so: from inside all
looks well. Price: a record of some 300 bytes a minute, for each node
that keeps it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from typing import TYPE_CHECKING

from p2p_co2.errors import TransportError
from p2p_co2.protocol.wire.messages_pb2 import Status
from p2p_co2.telemetry.events import Warned

if TYPE_CHECKING:
    from p2p_co2.node.network import Network
    from p2p_co2.node.node import Node

LOOK_S = 1.0
ALONE_S = 30.0
ALONE = (
    "nobody else is here: rounds are made alone, and nothing is exchanged; invite others with p2p-co2 join "
    "TICKET (the word that the seed printed)"
)
"""Said once, by a peer that has trained alone for ``ALONE_S``."""
LAST_WORD_S = 1.5
"""How long a peer that leaves waits for its last word to be taken."""


class Placing:
    """All calls on the network's loop."""

    def __init__(self, network: Network, node: Node) -> None:
        self._network, self._node = network, node
        self._alone_since, self._has_told_of_alone = math.inf, False

    async def run(self) -> None:
        while True:
            self.look_whether_alone()
            await self._say(is_last=False)
            await asyncio.sleep(LOOK_S)

    def look_whether_alone(self) -> None:
        """Warn once who has trained for long without anybody else."""
        node, now = self._node, self._node.now()
        if node.progress.local.phase != Status.TRAINING or node.live_peers():
            self._alone_since = math.inf
            return
        self._alone_since = min(self._alone_since, now)
        if now - self._alone_since >= ALONE_S and not self._has_told_of_alone:
            self._has_told_of_alone = True
            node.report(Warned, text=ALONE)

    async def say_last(self) -> None:
        """Bounded."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORD_S):
                await self._say(is_last=True)

    async def _say(self, is_last: bool) -> None:
        progress, versions = self._node.progress, [agreed.version for agreed in self._node.agreed]
        if progress.local.phase == Status.JOINING or not any(versions):
            return  # as long as nothing was agreed on, who begins anew loses nothing
        with contextlib.suppress(TransportError):
            await self._network.publish_position(progress.position(), versions, is_last)
