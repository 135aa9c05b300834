"""Leaves word of where the run is, for those that come when everybody has left.

Without it a peer that hears nobody cannot tell a run that never began from one that is over, and would train
it once more, alone. Law: nothing here ends a peer or holds it up; what the DHT refuses is tried again, and
told by ``finding``, which meets the same refusal. Price: a record of some 300 bytes a minute, for each node
that keeps it.
"""

from __future__ import annotations

import asyncio
import contextlib

from p2p_co2.errors import TransportError
from p2p_co2.node.network import Network
from p2p_co2.node.node import Node
from p2p_co2.wire.messages_pb2 import Status

LOOK_S = 1.0
LAST_WORD_S = 1.5
"""How long a peer that leaves waits for its last word to be taken."""


class Placing:
    """All calls on the network's loop."""

    def __init__(self, network: Network, node: Node) -> None:
        self._network, self._node = network, node

    async def run(self) -> None:
        while True:
            await self._say(is_last=False)
            await asyncio.sleep(LOOK_S)

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
