"""Commits beyond a peer's next round: the swarm seems to be elsewhere.

Laws: it is said once for each version; one signature is not enough to end an open offer, so then it waits
until the offer has failed, or until a majority of the live peers say that they are past its round; nobody is
sent further than a little beyond what most peers say of themselves, since whoever signs may name any round.
"""

from __future__ import annotations

from p2p_co2.protocol.rounds import bounds
from p2p_co2.protocol.rounds.events import FellBehind, Offer
from p2p_co2.protocol.rounds.swarm import Outlet, Swarm
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.messages_pb2 import Behind, Outcome


class Ahead:
    """What one fragment was told of rounds that it cannot be in."""

    def __init__(self, swarm: Swarm, outlet: Outlet) -> None:
        self._swarm, self._outlet = swarm, outlet
        self._told_version = -1
        self._told_by: PeerId | None = None
        self._sent_by: PeerId | None = None
        """The coordinator that said so instead of making a round; the other has signed a commit."""
        self.waiting: Outcome | None = None
        """Seen while our offer was open."""

    def told(self, message: Behind, coordinator: PeerId) -> None:
        """A coordinator sent us after a version."""
        self._told_version, self._told_by, self._sent_by = message.version, None, coordinator

    def hear(self, outcome: Outcome, offer: Offer | None) -> None:
        """A commit of a round that does not follow our state. ``offer``: the one that is open."""
        if outcome.key.round > farthest_version(self._swarm, outcome.key.fragment) + 1:
            return  # if it is so, heartbeats will tell
        if offer is not None:
            self.waiting = outcome
        elif self._told_version != outcome.key.round - 1:
            self.tell(outcome, ends_offer=False)

    def most_are_past(self, offer: Offer) -> Outcome | None:
        """What waits, if most of those who train say that they have made the round of ``offer``."""
        if self.waiting is None:
            return None
        training = self._swarm.training()
        past = [p for p in training if (self._swarm.version_of(p, offer.fragment) or 0) >= offer.round]
        return self.waiting if 2 * len(past) > len(training) else None

    def tell(self, outcome: Outcome, ends_offer: bool) -> None:
        """Have the node go after the state before ``outcome``."""
        self._told_version, self._told_by = outcome.key.round - 1, PeerId(outcome.decided_by)
        self._sent_by = None
        donors = tuple(PeerId(member.peer) for member in outcome.members if member.peer != self._swarm.me)
        fragment, version, digest = outcome.key.fragment, outcome.key.round - 1, outcome.state_digest
        self._outlet.emit(FellBehind(fragment, version, digest, donors, ends_offer))

    def came_to_nothing(self, version: int) -> PeerId | None:
        """Nobody has a state of ``version`` or later: who sent us after it by a commit of its own."""
        return self._told_by if self._told_version == version else None

    def sent_to_nothing(self, version: int) -> PeerId | None:
        """The same: which coordinator sent us after it."""
        return self._sent_by if self._told_version == version else None


def farthest_version(swarm: Swarm, fragment: int) -> int:
    """The highest version that one peer's word can send us after: a little more than at least half of those
    who train have reached as far as we hear, this peer included."""
    versions = [swarm.version_of(peer, fragment) or 0 for peer in swarm.training()]
    versions.sort(reverse=True)
    return (versions[(len(versions) - 1) // 2] if versions else 0) + bounds.AHEAD_AT_MOST
