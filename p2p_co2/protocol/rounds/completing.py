"""A member whose round has committed before all means had come: a slow link is not waited for, but what is on
its way to it is not thrown away either.

Law: it waits as long as pieces keep coming and their owners live, at most ``bounds.COMPLETE_DEADLINES`` times
as long as owners waited for slices, and then says so: the bytes are fetched from donors instead. So an owner
that sends its mean a drop at a time keeps nobody from the swarm's next versions. Who only listened is less
patient.
"""

from __future__ import annotations

from p2p_co2.protocol.rounds import bounds
from p2p_co2.protocol.rounds.certificate import Derived, signers_of
from p2p_co2.protocol.rounds.events import AgreedPart, Committed, OutcomeWithoutBytes, Overheard
from p2p_co2.protocol.rounds.listening import Listening
from p2p_co2.protocol.rounds.member import Member
from p2p_co2.protocol.rounds.swarm import Swarm
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.messages_pb2 import Decision, Outcome


@Derived
def _agreed_parts(outcome: Outcome) -> tuple[AgreedPart, ...]:
    return tuple(
        AgreedPart(p.start_block, p.stop_block, tuple((PeerId(c.peer), c.weight) for c in p.contributors))
        for p in outcome.parts
    )


def without_bytes(decision: Decision, outcome: Outcome, swarm: Swarm, ended: bool) -> OutcomeWithoutBytes:
    """A commit that we lack the mean of. ``ended``: whether it ends our offer. Those who signed it
    hold the bytes."""
    donors = tuple(peer for peer in signers_of(decision, outcome) if peer != swarm.me)
    key = outcome.key
    return OutcomeWithoutBytes(key.fragment, key.round, decision.SerializeToString(), donors, ended)


class Completing:
    """One member, or one that listens, after the decision."""

    def __init__(
        self, member: Member | Listening, decision: Decision, outcome: Outcome, swarm: Swarm, now: float
    ) -> None:
        self.decision, self.outcome = decision, outcome
        self.has_stalled = not member.may_complete(outcome)
        self._member, self._swarm = member, swarm
        self._patience_s = max(bounds.GRACE_S, member.attempt.parts_within_s)
        patience_s = max(bounds.COMPLETE_FLOOR_S, bounds.COMPLETE_DEADLINES * member.attempt.parts_within_s)
        if isinstance(member, Listening):
            self._patience_s, patience_s = bounds.GRACE_S, member.patience_s(now)
        self._give_up_at = now + min(patience_s, swarm.shape.round_cap_s)
        self._came_at, self._widest_gap_s = now, 0.0
        self._is_overtaken = False
        self.came(now)

    def committed(self, offered_at: float, has_offer: bool, now: float) -> Committed | Overheard | None:
        """How the round ended, and with it our offer if we have one, once all means are here and are what was
        committed."""
        if isinstance(self._member, Listening):
            return self._member.overheard(self.decision, self.outcome, has_offer, now)
        mean = self._member.agreed_mean(self.outcome)
        if mean is None:
            return None
        member, attempt, outcome = self._member, self._member.attempt, self.outcome
        parts = _agreed_parts(outcome)
        return Committed(
            fragment=attempt.fragment, round=attempt.round, decision=self.decision.SerializeToString(),
            mean=mean, parts=parts, base_version=member.offer.base_version, group=tuple(attempt.shares),
            coordinator=attempt.coordinator,
            duration_s=now - offered_at,
            contributed=tuple(any(peer == self._swarm.me for peer, _ in p.contributors) for p in parts),
            begun_s=member.begun_at - offered_at,
            parts_s=member.exchange.parts_at - offered_at,
            means_s=member.means_at - offered_at,
        )  # fmt: skip

    def _owners_of_missing(self) -> set[PeerId]:
        member = self._member
        return (member if isinstance(member, Listening) else member.exchange).owners_of_missing()

    def came(self, now: float) -> None:
        """A piece of a mean has come."""
        self._widest_gap_s, self._came_at = max(self._widest_gap_s, now - self._came_at), now
        self._stalls_at = now + self._patience_s

    def overtaken(self, now: float) -> None:
        """The next round has committed, somebody says: its members send no more of this one's means than is
        on its way. Whether it has, those who owe us means say themselves: one liar may sign any commit."""
        self._is_overtaken = True
        self._look_where_owners_are(now)

    def _look_where_owners_are(self, now: float) -> None:
        fragment, next_ = self.outcome.key.fragment, self.outcome.key.round + 1
        versions = [self._swarm.version_of(peer, fragment) for peer in self._owners_of_missing()]
        if self._is_overtaken and all((version or 0) >= next_ for version in versions):
            self._is_overtaken = False  # told once
            self._patience_s = min(self._patience_s, max(bounds.GRACE_S, 3 * self._widest_gap_s))
            self._stalls_at = min(self._stalls_at, now + self._patience_s)

    def peers_changed(self, now: float) -> None:
        self._look_where_owners_are(now)
        if any(not self._swarm.is_live(owner) for owner in self._owners_of_missing()):
            self._stalls_at = min(self._stalls_at, now + bounds.GRACE_S)

    def get_timer(self) -> float:
        return min(self._stalls_at, self._give_up_at)

    def handle_timer(self, now: float) -> None:
        self.has_stalled = self.has_stalled or now >= self.get_timer()
