"""What the tensor side is given and asked: offers, means to apply, donors' states to adopt, ours to export.

Laws: what was agreed is published (``PeerState.move``) only after the tensor side has it. That side hears of
the end of each offer: by the commit or the state that ends it, or by an abort with its id. It takes an abort
in silence where that offer is not in flight.
"""

from __future__ import annotations

from collections.abc import Callable

from p2p_co2.node.state import Effects, PeerState
from p2p_co2.protocol.catchup.donor import Donor
from p2p_co2.protocol.ledger import AgreedMean, AgreedVersion, Ledger, weights_of
from p2p_co2.protocol.rounds import Offer, Rounds
from p2p_co2.system.memory import Buffer
from p2p_co2.telemetry import events as ev
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.messages_pb2 import Decision, Outcome


class Offers:
    """One open offer for each fragment."""

    def __init__(self, rounds: Rounds, ledger: Ledger, state: PeerState, effects: Effects) -> None:
        self._rounds = rounds
        self._ledger = ledger
        self._state = state
        self._do = effects
        self._opened: dict[int, bytes] = {}
        """By fragment, the id of the last offer that the rounds machine was given."""
        self._early: dict[int, Offer] = {}
        """By fragment: an offer upon a state that this thread has yet to hear of."""
        for fragment, version in enumerate(state.agreed):
            self._moved(fragment, version)
        state.when_moved(self._moved)

    def open(self, offer: Offer) -> None:
        """Start a round with it. Raises ``LocalProtocolError`` as ``Rounds.offer``."""
        fragment = offer.fragment
        agreed = self._state.agreed[offer.fragment]
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
        """What was to be fetched is here, or wanted no more. An offer that ended for it has come to nothing,
        if the tensor side still holds it in flight."""
        if not any(offer.fragment == fragment for offer in self._rounds.open_offers()):
            self._end(fragment)

    def give_up(self, fragment: int) -> None:
        """The last offer comes to nothing. The next one may be on its way to be opened: that one goes on."""
        if not self._rounds.withdraw(fragment, "given up to catch up", self._do.now()):
            self._end(fragment)

    def _end(self, fragment: int) -> None:
        if fragment in self._opened:
            self._do.spawn(self._ledger.abort(fragment, self._opened.pop(fragment)))


class LedgerCalls:
    """Carries to the ``ledger`` what ``rounds`` and catching up brought; calls for one fragment are answered
    in their order. ``on_taken`` hears of each committed round that is applied here, replayed or not."""

    def __init__(
        self, ledger: Ledger, state: PeerState, rounds: Rounds, donor: Donor, effects: Effects
    ) -> None:
        self._ledger = ledger
        self._state = state
        self._rounds = rounds
        self._donor = donor
        self._do = effects
        self.on_taken: Callable[[Decision], object] = lambda decision: None

    async def take(self, mean: AgreedMean, decision: Decision) -> bool:
        """Apply an agreed mean; False if it does not follow this peer's version."""
        version = await self._ledger.commit(mean)
        if version.version == mean.round - 1 and version.digest != mean.state_digest:
            text = f"round {mean.round} of fragment {mean.fragment} is not applied here: it came upon a state"
            self._do.report(ev.Warned, text=f"{text} that this peer has exchanged for another meanwhile")
        is_here = version.version == mean.round
        if is_here and version.version == self._state.agreed[mean.fragment].version + 1:
            self._rounds.replayed(decision)
        group = [PeerId(member.peer) for member in Outcome.FromString(decision.outcome).members]
        if moved := self._state.move(mean.fragment, version, group) and is_here:
            self._donor.history.remember(mean.fragment, mean.round, decision, mean.mean)
            self.on_taken(decision)
        self._do.pump()
        return moved

    async def adopt(
        self, fragment: int, data: Buffer, agreed: AgreedVersion, goes_back: bool = False
    ) -> None:
        """Take over a donor's state; errors and ``goes_back`` as ``Ledger.adopt``. Our own state changes
        nothing: an offer that is open goes on, and the tensor side must not take it for ended."""
        if agreed == self._state.agreed[fragment]:
            return
        parts = weights_of(known) if (known := self._rounds.next_commit(fragment)) is not None else None
        version = await self._ledger.adopt(fragment, data, agreed, parts, goes_back)
        if goes_back and version != self._state.agreed[fragment]:  # else a round made that state meanwhile
            self._donor.turned_back(fragment)
        self._state.move(fragment, version, None)
        self._do.pump()

    async def export(self, fragment: int) -> None:
        """Serialise our state for those that ask for it."""
        held, data, digests = await self._ledger.export(fragment)
        self._donor.exported(fragment, held.version, data, held.digest, digests, self._do.now())
        self._do.pump()
