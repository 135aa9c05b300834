"""Changes of the agreed state: a mean is applied, a donor's state adopted, our own exported.

Law: what was agreed is published (``PeerState.move``) only after the tensor side has it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from p2p_co2.digest import chunk_digests
from p2p_co2.node.ledger import AgreedMean, AgreedVersion, Ledger, weights_of
from p2p_co2.node.state import Effects, PeerState
from p2p_co2.protocol.catchup import CatchUp
from p2p_co2.protocol.rounds import Rounds
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.messages_pb2 import Decision, Outcome
from p2p_co2.system.memory import Buffer
from p2p_co2.telemetry import events as ev


class OuterState:
    """Carries to the ``ledger`` what ``rounds`` and ``catchup`` brought; calls for one fragment are answered
    in their order."""

    def __init__(
        self, ledger: Ledger, state: PeerState, rounds: Rounds, catchup: CatchUp, effects: Effects
    ) -> None:
        self._ledger, self._state, self._rounds = ledger, state, rounds
        self._catchup, self._do = catchup, effects

    async def take(self, mean: AgreedMean, decision: Decision) -> bool:
        """Apply an agreed mean; False if it does not follow this peer's version."""
        version = await self._ledger.commit(mean)
        if version.version == mean.round - 1 and version.digest != mean.state_digest:
            text = f"round {mean.round} of fragment {mean.fragment} is not applied here: it came upon a state"
            self._do.report(ev.Warned, text=f"{text} that this peer has exchanged for another meanwhile")
        is_here = version.version == mean.round
        if is_here and version.version == self._state.agreed[mean.fragment].version + 1:
            self._rounds.replayed(decision)
        moved = self._state.move(mean.fragment, version, _members_of(decision)) and is_here
        if moved:
            self._catchup.remember(mean.fragment, mean.round, decision, mean.mean)
        self._do.pump()
        return moved

    async def adopt(
        self, fragment: int, data: Buffer, agreed: AgreedVersion, goes_back: bool = False
    ) -> None:
        """Take over a donor's state; errors and ``goes_back`` as ``Ledger.adopt``. Our own state changes
        nothing: an offer that is open goes on, and the tensor side must not take it for ended."""
        if agreed == self._state.agreed[fragment]:
            return
        known = self._rounds.next_commit(fragment)
        parts = None if known is None else weights_of(known)
        version = await self._ledger.adopt(fragment, data, agreed, parts, goes_back)
        if goes_back and version != self._state.agreed[fragment]:  # else a round made that state meanwhile
            self._catchup.turned_back(fragment)
        self._state.move(fragment, version, None)
        self._do.pump()

    async def export(self, fragment: int) -> None:
        """Serialise our state for those that ask for it."""
        version, data = await self._ledger.export(fragment)
        digests = []
        for chunk in chunk_digests(data, self._catchup.shape.chunk_bytes):
            digests.append(chunk)
            await asyncio.sleep(0)  # a large state takes long, and the rounds go on
        now = self._do.now()
        self._catchup.exported(fragment, version.version, data, version.digest, digests, now)
        self._do.pump()


def _members_of(decision: Decision) -> Collection[PeerId]:
    return [PeerId(member.peer) for member in Outcome.FromString(decision.outcome).members]
