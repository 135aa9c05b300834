"""This peer's offers, between the tensor side that makes them and the rounds machine that carries them.

Law: the tensor side hears of the end of each offer, by the commit or the state that ends it or by an abort
with the offer's id, which it takes in silence where that offer is not in flight.
"""

from __future__ import annotations

from p2p_co2.node.ledger import AgreedVersion, Ledger
from p2p_co2.node.state import Effects, PeerState
from p2p_co2.protocol.rounds import Offer, Rounds


class Offers:
    """One open offer for each fragment."""

    def __init__(self, rounds: Rounds, ledger: Ledger, state: PeerState, effects: Effects) -> None:
        self._rounds, self._ledger, self._state, self._do = rounds, ledger, state, effects
        self._opened: dict[int, bytes] = {}
        """By fragment, the id of the last offer that the rounds machine was given."""
        self._early: dict[int, Offer] = {}
        """By fragment: an offer upon a state that this thread has yet to hear of."""
        for fragment, version in enumerate(state.agreed):
            rounds.set_state(fragment, version.version, version.digest)
        state.when_moved(self._moved)

    def open(self, offer: Offer) -> None:
        """Start a round with it. Raises ``LocalProtocolError`` as ``Rounds.offer``."""
        fragment, agreed = offer.fragment, self._state.agreed[offer.fragment]
        if agreed.version < offer.round - 1:  # or the tensor side went back since
            self._early[fragment] = offer
        elif (agreed.version, agreed.digest) != (offer.round - 1, offer.state_digest):
            self._do.spawn(self._ledger.abort(fragment, offer.offer_id))
        else:
            self._rounds.offer(offer, self._do.now())
            self._opened[fragment] = offer.offer_id

    def _moved(self, fragment: int, version: AgreedVersion) -> None:
        """The machine hears of the new state, then of the offer that waited for it."""
        self._rounds.set_state(fragment, version.version, version.digest)
        if (offer := self._early.pop(fragment, None)) is not None:
            self.open(offer)

    def settle(self, fragment: int) -> None:
        """What was to be fetched is here, or wanted no more: an offer that ended for it has come to nothing,
        should the tensor side still hold it in flight."""
        if not any(offer.fragment == fragment for offer in self._rounds.open_offers()):
            self._end(fragment)

    def give_up(self, fragment: int) -> None:
        """The last offer comes to nothing. The next one may be on its way to be opened: that one goes on."""
        if not self._rounds.withdraw(fragment, "given up to catch up", self._do.now()):
            self._end(fragment)

    def _end(self, fragment: int) -> None:
        if fragment in self._opened:
            self._do.spawn(self._ledger.abort(fragment, self._opened.pop(fragment)))
