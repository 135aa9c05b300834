"""A member whose round has committed before all means had come: a slow link is not waited for, but what is on
its way to it is not thrown away either.

Law: it waits as long as pieces keep coming and their owners live, at most ``bounds.COMPLETE_DEADLINES`` times
as long as owners waited for slices, and then says so: the bytes are fetched from donors instead. So an owner
that sends its mean a drop at a time keeps nobody from the swarm's next versions.
"""

from __future__ import annotations

from p2p_co2.protocol.rounds import bounds
from p2p_co2.protocol.rounds.certificate import signers_of
from p2p_co2.protocol.rounds.events import Committed, OutcomeWithoutBytes
from p2p_co2.protocol.rounds.member import Member
from p2p_co2.protocol.rounds.swarm import Swarm
from p2p_co2.protocol.wire.messages_pb2 import Decision, Outcome


def without_bytes(decision: Decision, outcome: Outcome, swarm: Swarm, ended: bool) -> OutcomeWithoutBytes:
    """A commit that we lack the mean of. ``ended``: whether it ends our offer. Those who signed it
    hold the bytes."""
    donors = tuple(peer for peer in signers_of(decision, outcome) if peer != swarm.me)
    key = outcome.key
    return OutcomeWithoutBytes(key.fragment, key.round, decision.SerializeToString(), donors, ended)


class Completing:
    """One member after the decision."""

    def __init__(
        self, member: Member, decision: Decision, outcome: Outcome, swarm: Swarm, now: float
    ) -> None:
        self.decision, self.outcome = decision, outcome
        self.has_stalled = not member.may_complete(outcome)
        self._member, self._swarm = member, swarm
        self._patience_s = max(bounds.GRACE_S, member.attempt.parts_within_s)
        patience_s = max(bounds.COMPLETE_FLOOR_S, bounds.COMPLETE_DEADLINES * member.attempt.parts_within_s)
        self._give_up_at = now + min(patience_s, swarm.shape.round_cap_s)
        self._came_at, self._widest_gap_s = now, 0.0
        self._is_overtaken = False
        self.came(now)

    def committed(self, offered_at: float, now: float) -> Committed | None:
        """How the round ended, once all means are here and are what was committed."""
        mean = self._member.agreed_mean(self.outcome)
        if mean is None:
            return None
        member, attempt = self._member, self._member.attempt
        return Committed(
            fragment=attempt.fragment, round=attempt.round, decision=self.decision.SerializeToString(),
            mean=mean, group=tuple(attempt.shares), coordinator=attempt.coordinator,
            duration_s=now - offered_at, begun_s=member.begun_at - offered_at,
            parts_s=member.exchange.parts_at - offered_at, means_s=member.means_at - offered_at,
        )  # fmt: skip

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
        versions = [
            self._swarm.version_of(peer, fragment) for peer in self._member.exchange.owners_of_missing()
        ]
        if self._is_overtaken and all((version or 0) >= next_ for version in versions):
            self._is_overtaken = False  # told once
            self._patience_s = min(self._patience_s, max(bounds.GRACE_S, 3 * self._widest_gap_s))
            self._stalls_at = min(self._stalls_at, now + self._patience_s)

    def peers_changed(self, now: float) -> None:
        self._look_where_owners_are(now)
        if any(not self._swarm.is_live(owner) for owner in self._member.exchange.owners_of_missing()):
            self._stalls_at = min(self._stalls_at, now + bounds.GRACE_S)

    def get_timer(self) -> float:
        return min(self._stalls_at, self._give_up_at)

    def handle_timer(self, now: float) -> None:
        self.has_stalled = self.has_stalled or now >= self.get_timer()
