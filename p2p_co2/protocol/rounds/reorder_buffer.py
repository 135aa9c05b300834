"""Pieces that overtook the message that explains them.

Different peers' links have different delays: a quick member's PART often arrives before the coordinator's
BEGIN, and an heir's MEAN before its receiver knows that it is one. They are held, up to a bound in bytes and
number, with at most half for one sender, so that one peer cannot crowd the others out.
"""

from __future__ import annotations

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.protocol.rounds import bounds
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.messages_pb2 import Mean, Part

Piece = Part | Mean


class ReorderBuffer:
    """Held pieces of one fragment, in order of arrival."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = max(bounds.EARLY_FLOOR_BYTES, limit_bytes)
        self._held: list[tuple[PeerId, Piece]] = []
        self._bytes: dict[PeerId, int] = {}

    def hold(self, piece: Piece, sender: PeerId) -> None:
        """Keep a piece, or raise ``RemoteProtocolError("too much held")``."""
        size = piece.ByteSize()
        mine = self._bytes.get(sender, 0) + size
        full = (
            sum(self._bytes.values()) + size > self._limit_bytes or len(self._held) >= bounds.EARLY_MESSAGES
        )
        if full or 2 * mine > self._limit_bytes:
            raise RemoteProtocolError("too much held", "pieces of a round that has not begun here")
        self._bytes[sender] = mine
        self._held.append((sender, piece))

    def release(self) -> list[tuple[PeerId, Piece]]:
        """All pieces, and forget them."""
        held = self._held
        self.clear()
        return held

    def held(self) -> dict[str, tuple[int, int]]:
        """As ``Rounds.held``."""
        return {
            "EARLY_MESSAGES": (len(self._held), bounds.EARLY_MESSAGES),
            "EARLY_BYTES": (sum(self._bytes.values()), self._limit_bytes),
        }

    def clear(self) -> None:
        self._held, self._bytes = [], {}
