"""Peers that train another model than ours: never live, and told once by how ours differs.

A peer names its model in every heartbeat. One that names another is sent our table (``model_table``), as it
sends us its own. One that says another thing each time is sent it once in ``STRANGER_TOLD_S``. Law: whoever
is live has our model, or does not say. Price: a liar can pass for either.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.wire.heartbeat import HEARTBEAT_S, SILENCE_CAP_S
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.limits import MAX_PEERS
from p2p_co2.wire.messages_pb2 import ModelTable, Status
from p2p_co2.wire.model_table import Difference, ModelSummary
from p2p_co2.wire.status import PeerStatus

STRANGER_TOLD_S = 15.0
"""A table is large, and a warning is read by people: between two to or of the same stranger."""


@dataclass(frozen=True)
class OtherModel:
    """A peer that trains another model; ``difference``: from its table, None if it sent none."""

    peer: PeerId
    difference: Difference | None


@dataclass
class Stranger:
    """A peer with another model. ``difference``: None until its table came; ``is_told``: whether ours was
    sent."""

    status: PeerStatus
    since: float
    heard_at: float
    difference: Difference | None = None
    is_told: bool = False


class Strangers:
    """``model``: of this peer; None compares none. ``known``: those that were heard; others may read it."""

    def __init__(self, model: ModelSummary | None) -> None:
        self.model = model
        self.known: dict[PeerId, Stranger] = {}
        self._untold: set[PeerId] = set()
        """Those of which no ``OtherModel`` has told yet."""
        self._told_at: dict[PeerId, float] = {}
        """When our table went to a stranger last; the oldest first."""

    def is_strange(self, status: PeerStatus) -> bool:
        return self.model is not None and status.model not in (0, self.model.digest)

    def hear(self, peer: PeerId, status: PeerStatus, now: float) -> tuple[bool, bool]:
        """Note what one says of itself: (whether it is new or says something new, whether to send it our
        table now)."""
        known = self.known.get(peer)
        is_new = known is None or (known.status.model, known.status.process) != (status.model, status.process)
        if known is None and len(self.known) >= MAX_PEERS:
            return False, False
        if known is None or is_new:
            known = self.known[peer] = Stranger(status, now, now)
        known.status = status
        known.heard_at = now
        if known.is_told or not self._may_tell(peer, now):
            return is_new, False
        known.is_told = True
        known.since = now
        self._untold.add(peer)
        return is_new, True

    def take_table(self, table: ModelTable, peer: PeerId) -> OtherModel | None:
        """How the model of ``peer`` differs, if that is not told yet. Raises ``RemoteProtocolError``."""
        stranger = self.known.get(peer)
        if self.model is None or stranger is None or stranger.difference is not None:
            raise RemoteProtocolError("unasked model table", "it said nothing of another, or sent it")
        stranger.difference = self.model.difference(table)
        is_news = peer in self._untold
        self._untold.discard(peer)
        return OtherModel(peer, stranger.difference) if is_news else None

    def overdue(self, now: float) -> list[OtherModel]:
        """Those whose table did not come in time."""
        known = self.known
        due = [p for p in sorted(self._untold) if p not in known or now - known[p].since > 2 * HEARTBEAT_S]
        self._untold.difference_update(due)
        return [OtherModel(peer, known[peer].difference) for peer in due if peer in known]

    def forget(self, listed: Collection[PeerId], now: float) -> None:
        """Forget those that are silent and not listed any more."""
        for peer in self.known.keys() - set(listed):
            if now - self.known[peer].heard_at > SILENCE_CAP_S:
                del self.known[peer]

    def outnumber(self, alike: Collection[PeerStatus]) -> Stranger | None:
        """One of the strangers, if there are more of them than others with our model (``alike``). Those that
        train count, if anybody does, else those that join. So a lone liar keeps nobody out of a run with two
        honest peers. Other threads may ask."""
        strange = list(self.known.values())
        if any(one.phase != Status.JOINING for one in (*alike, *(one.status for one in strange))):
            strange = [one for one in strange if one.status.phase != Status.JOINING]
            alike = [status for status in alike if status.phase != Status.JOINING]
        if len(strange) <= len(alike):
            return None
        return min(strange, key=lambda one: (one.difference is None, one.since))

    def held(self) -> dict[str, tuple[int, int]]:
        """What strangers can make grow: (now, at most) by the name of the bound."""
        return {
            "MAX_PEERS strangers": (len(self.known), MAX_PEERS),
            "MAX_PEERS strangers told": (len(self._told_at), MAX_PEERS),
        }

    def _may_tell(self, peer: PeerId, now: float) -> bool:
        """Whether it was told long ago, or never and there is room; if so it is told now."""
        told_at = self._told_at
        while told_at and now - next(iter(told_at.values())) >= STRANGER_TOLD_S:
            del told_at[next(iter(told_at))]
        if peer in told_at or len(told_at) >= MAX_PEERS:
            return False
        told_at[peer] = now
        return True
