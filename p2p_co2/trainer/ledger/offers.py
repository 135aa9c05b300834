"""Which of this peer's offers for one fragment a mean may hold. No tensor is read here.

    open -> counted (wholly, or in part)
         -> withdrawn -> counted all the same
                      -> forgotten, when the state moves on

One offer is open at most. A withdrawn one may be in a commit that is yet to be heard of. A later offer for
the same round holds its work, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from p2p_co2.errors import LocalProtocolError
from p2p_co2.protocol.ledger import PartWeights
from p2p_co2.trainer.ledger.kept import Compact, Encoded, Kept
from p2p_co2.wire.schedule import OfferState


@dataclass(frozen=True)
class KeptOffer:
    """What is held of an offer until its round has ended. ``sent``: what a mean can hold of it.
    ``gradient``: the work behind it, what the codec lost of it included where that is known. ``residual``: of
    error feedback, if this one is counted. ``is_live``: whether live parameters hold its work."""

    state: OfferState
    sent: Encoded
    gradient: Kept
    residual: Compact | None = None
    is_live: bool = True


class Count(NamedTuple):
    """What a mean holds of this peer's work. ``offer``: the one that it is about; None for none that is
    known. ``missed``: the ranges of the fragment in which that does not count. ``is_forgotten``: one of this
    peer's is in it that this peer no longer knows."""

    offer: KeptOffer | None
    missed: Sequence[slice] = ()
    is_forgotten: bool = False


class FragmentOffers:
    """The offers of ``peer`` for one fragment of ``numel`` values, in blocks of so many.

    ``in_doubt``: whether live parameters may hold work that is counted where this peer cannot see it: in
    another history, or offered by an earlier process. A later offer that is counted whole ends it.
    """

    def __init__(self, peer: str, numel: int, block_values: int) -> None:
        self._peer = peer
        self._numel = numel
        self._block_values = block_values
        self.open: KeptOffer | None = None
        self.withdrawn: KeptOffer | None = None
        self.in_doubt = False

    def must_be_free(self) -> None:
        """Raise ``LocalProtocolError`` while an offer is open."""
        if self.open is not None:
            raise LocalProtocolError(f"offer {self.open.state.offer_id.hex()} is still in flight")

    def open_as(self, offer_id: bytes) -> KeptOffer | None:
        """The open offer, if that is its id."""
        return self.open if self.open is not None and self.open.state.offer_id == offer_id else None

    def withdraw(self) -> None:
        """The open offer came to nothing."""
        self.withdrawn = self.open
        self.open = None

    def count(self, parts: Sequence[PartWeights] | None) -> Count:
        """What the mean of the next round holds, of which ``parts`` says who is in it. Where nobody knows
        (None) the last offer is taken for counted: that costs its work, and the other guess would count it
        twice."""
        if parts is None:
            return Count(self.open or self.withdrawn)
        ids = {part.offer_of(self._peer) for part in parts} - {None}
        if not ids:
            return Count(self.open, [slice(0, self._numel)])
        known = (one for one in (self.open, self.withdrawn) if one and ids == {one.state.offer_id})
        offer = next(known, None)
        return Count(offer, self._missed(parts), is_forgotten=offer is None)

    def _missed(self, parts: Sequence[PartWeights]) -> list[slice]:
        values = self._block_values
        return [
            slice(part.start_block * values, min(self._numel, part.stop_block * values))
            for part in parts
            if part.offer_of(self._peer) is None and part.start_block * values < self._numel
        ]

    def end(self) -> OfferState | None:
        """The state has moved on, and no offer is for it any more: the one that was open."""
        ended = None if self.open is None else self.open.state
        self.open = None
        self.withdrawn = None
        return ended
