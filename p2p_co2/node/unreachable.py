"""Peers that are there and cannot be reached: told from those that are merely gone.

A peer that died is listed until its record expires. One whose record is renewed while we fail to reach it, or
never hear it, is alive behind something. Law: a peer is told of once, and again only after it has been met in
between. No clock, no I/O.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.limits import MAX_PEERS
from p2p_co2.protocol.wire.messages_pb2 import PeerRecord


class Unreachable:
    """Failures by peer; at most ``MAX_PEERS`` are remembered."""

    def __init__(self) -> None:
        self._reasons: dict[PeerId, str] = {}
        self._expiries: dict[PeerId, float] = {}
        self._told: set[PeerId] = set()
        self._unheard: dict[PeerId, float] = {}
        self.is_somebody_unmet = False
        """Whether a peer was listed last that has renewed its record while we did not hear it."""

    def failed(self, peer: PeerId, reason: str) -> None:
        """No carrier gets through to ``peer``."""
        if peer in self._reasons or len(self._reasons) < MAX_PEERS:
            self._reasons[peer] = reason

    def met(self, peer: PeerId) -> None:
        """We hear from ``peer``."""
        self._reasons.pop(peer, None)
        self._expiries.pop(peer, None)
        self._told.discard(peer)

    def listed(self, records: Sequence[PeerRecord], live: Container[PeerId] = ()) -> list[tuple[PeerId, str]]:
        """What the DHT lists now, and whom we hear: (peer, reason) of those to tell of."""
        known, listed = self._unheard, [(PeerId(record.peer), record) for record in records]
        unheard = {peer: record.expires_at for peer, record in listed[:MAX_PEERS] if peer not in live}
        self._unheard = {peer: known.get(peer, at) for peer, at in unheard.items()}
        self.is_somebody_unmet = any(unheard[peer] > at for peer, at in self._unheard.items())
        news = []
        for peer, record in listed:
            if peer not in self._reasons:
                continue
            first = self._expiries.setdefault(peer, record.expires_at)
            if record.expires_at > first and peer not in self._told:
                self._told.add(peer)
                news.append((peer, self._reasons[peer]))
        return news
