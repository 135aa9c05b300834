"""A member from BEGIN to the certificate: it exchanges bytes, signs what came of them, and counts votes.

    Exchanging --all means here--> Signed --quorum--> committed
         |                           |
         +---- no quorum can come ---+--> Leaving --all live members gave up, too--> failed

There is no leader: each member sends its vote to all, and whoever has a quorum of equal ones has the commit.
Laws: a member signs one outcome of an attempt. One that gives up makes no certificate of the attempt any
more, though it takes one that it is given. It is in no other attempt of that round before each live member of
this one has given up, too. So two contents of one round are never both committed
(``docs/design/offers-and-certificates.md``). Price: a member that hangs keeps the others from this round's
next attempt, at most for as long as a round may take.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from p2p_co2.digest import digest
from p2p_co2.errors import LocalProtocolError
from p2p_co2.protocol.rounds import bounds
from p2p_co2.protocol.rounds.attempt import Attempt
from p2p_co2.protocol.rounds.ballot import Ballot
from p2p_co2.protocol.rounds.certificate import TELLERS, Signer, outcome_of, signers_of, tellers_of
from p2p_co2.protocol.rounds.deadline import SAFETY
from p2p_co2.protocol.rounds.events import Committed, MissedSlices, OutcomeWithoutBytes, Refused
from p2p_co2.protocol.rounds.exchange import Exchange
from p2p_co2.protocol.rounds.history import missed_in
from p2p_co2.protocol.rounds.swarm import Outlet, RoundSwarm
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.limits import MAX_STRING
from p2p_co2.wire.messages_pb2 import AskOutcome, Decision, LostPart, Missed, Outcome, Result

SPEAK_S = bounds.GRACE_S / 4
"""Once somebody lacks the mean of a lost owner, all that lack or hold it say so within this."""


@dataclass(frozen=True)
class Exchanging:
    """Slices and means are on their way."""


@dataclass(frozen=True)
class Signed:
    """All means are here: what was voted for, or has votes enough."""

    outcome: bytes
    means_at: float


@dataclass(frozen=True)
class Leaving:
    """It makes no certificate of this attempt any more, but takes one that it is given."""

    reason: str


MemberState = Exchanging | Signed | Leaving
NEXT: Mapping[type[MemberState], tuple[type[MemberState], ...]] = {
    Exchanging: (Signed, Leaving), Signed: (Leaving,), Leaving: (),
}  # fmt: skip
"""What may follow; in each a certificate may come."""


class Utterance:
    """What a member said last, and when it says it again: after a grace, then after twice as long each time.
    ``message``: None if it has said nothing yet."""

    def __init__(self, now: float) -> None:
        self.message: Result | None = None
        self.again_at = now + bounds.GRACE_S
        self._pause_s = bounds.GRACE_S

    def said(self, message: Result, now: float) -> None:
        self.message = message
        self._pause_s = bounds.GRACE_S
        self.again_at = now + bounds.GRACE_S

    def hurry(self, now: float) -> None:
        """Others know more: ask soon."""
        if self._pause_s > SPEAK_S:
            self._pause_s = SPEAK_S
            self.again_at = now + SPEAK_S

    def repeated(self, now: float) -> None:
        self._pause_s *= 2
        self.again_at = now + self._pause_s


class Member:
    """This peer's part in one attempt. ``failure``: why it is over without a commit; ``certificate``: the
    commit, once votes have made it."""

    def __init__(
        self,
        attempt: Attempt,
        exchange: Exchange,
        signer: Signer,
        swarm: RoundSwarm,
        outlet: Outlet,
        now: float,
    ) -> None:
        self.attempt = attempt
        self.exchange = exchange
        self.state: MemberState = Exchanging()
        self.failure = ""
        self.certificate: Decision | None = None
        self.begun_at = now
        self._signer = signer
        self._swarm = swarm
        self._outlet = outlet
        self._ballot = Ballot(
            attempt, exchange.seals, lambda peer, why: outlet.emit(Refused(peer, "bad signature", why)),
            lambda signers: swarm.believes(signers, attempt.fragment),
        )  # fmt: skip
        self._trusted = [peer for peer in attempt.shares if not swarm.repute.has_lied(peer)]
        self._last = Utterance(now)
        self._ends_at = now + attempt.result_within_s + bounds.GRACE_S
        self._settles_at: float | None = None
        """When lost parts are given away, after the first was told of; in the past once they may be."""

    def _become(self, state: MemberState) -> None:
        if type(state) not in NEXT[type(self.state)]:
            raise LocalProtocolError(f"no {type(state).__name__} follows {type(self.state).__name__}")
        self.state = state

    @property
    def is_leaving(self) -> bool:
        return isinstance(self.state, Leaving)

    @property
    def means_at(self) -> float:
        """When all means were here."""
        return self.state.means_at if isinstance(self.state, Signed) else self.begun_at

    # ---- what comes

    def result(self, message: Result, sender: PeerId, now: float) -> bool:
        """Another member's vote, or what it lacks; whether anything follows from it. Raises
        ``RemoteProtocolError``."""
        self._hear(message, sender)
        if self._ballot.is_quiet:
            return False
        self.check(now)
        return True

    def _hear(self, message: Result, sender: PeerId) -> None:
        self._ballot.hear(message, sender)
        for owner, times in self._ballot.caught(self._swarm.voters.all()).items():
            if owner != self._swarm.me and self._swarm.repute.lied(owner):
                found = f"{times} of {len(self.attempt.shares)} members do not find their work in its mean"
                self._outlet.emit(Refused(owner, "bad mean", f"{found}; it averages no more in this run"))
        for owner in self._ballot.two_faced - {self._swarm.me}:
            self._swarm.repute.lied(owner, "it signed two different means of one part")

    @property
    def had_a_liar(self) -> bool:
        """Whether a member was found to lie that was trusted as the attempt began: no fault of who formed
        it. Who takes a known liar in again has no such excuse."""
        return any(map(self._swarm.repute.has_lied, self._trusted))

    def mean_came(self, now: float) -> None:
        """A piece of a mean is in its place."""
        if self.exchange.is_whole or not self._ballot.is_quiet:
            self.check(now)

    def check(self, now: float) -> None:
        """Do what has become possible: vote, commit, hand on lost parts, or give up."""
        if isinstance(self.state, Leaving):
            waiting = [
                peer
                for peer in self.attempt.shares
                if peer != self._swarm.me and self._swarm.is_live(peer) and peer not in self._ballot.gave_up
            ]
            if not waiting or now >= self._ends_at:
                self.failure = self.state.reason
            return
        if isinstance(self.state, Exchanging):
            if not self.exchange.is_whole:
                self._tell_lost(now)
            elif self.exchange.findings.is_done:
                self._sign(now)
        if self._settle_lost(now):
            self._tell_lost(now)
        if self._ballot.leading() and self.certificate is None:
            if isinstance(self.state, Signed):
                self.certificate = self._ballot.certificate(self.state.outcome)
            if self.certificate is None:  # others have it
                self._last.hurry(now)
        may_vote = filter(self._swarm.is_live, self.attempt.shares)
        if self.certificate is None and not self._ballot.leading() and not self._ballot.may_commit(may_vote):
            self.leave(self._ballot.why(), now)

    def _sign(self, now: float) -> None:
        """Vote, unless the votes that were heard are enough: whoever heard fewer asks. Where our slice is not
        in a mean that should hold it, say so instead: others may outvote us."""
        outcome = outcome_of(self.attempt, self._signer.run, [part.outcome for part in self.exchange.parts])
        self._become(Signed(outcome, now))
        self.certificate = self._ballot.certificate(outcome)
        if self.certificate is None and self.exchange.findings.refused:
            self._tell(self._result(now), now)
        elif self.certificate is None:
            self._tell(self._result(now, digest(outcome), self._signer.vote(outcome)), now)

    def _tell_lost(self, now: float) -> None:
        if self.exchange.lost(now) != self._ballot.lost.get(self._swarm.me, frozenset()):
            self._tell(self._result(now), now)

    def _result(self, now: float, digest: bytes = b"", signature: bytes = b"") -> Result:
        lost = [LostPart(part=part, generation=number) for part, number in sorted(self.exchange.lost(now))]
        refused = [
            LostPart(part=part, generation=number) for part, number in sorted(self.exchange.findings.refused)
        ]
        return Result(
            key=self.attempt.key(), lost=lost, digest=digest, signature=signature, refused=refused
        )  # fmt: skip

    def _tell(self, message: Result, now: float) -> None:
        self._last.said(message, now)
        self._hear(message, self._swarm.me)
        for peer in self.attempt.shares:
            if peer != self._swarm.me:
                self._outlet.send(peer, message)

    def _settle_lost(self, now: float) -> bool:
        if self._settles_at is not None and now >= self._settles_at:
            self._settles_at = -math.inf
        if not any(self._ballot.lost.values()):
            return False
        if self._last.message is None and self.exchange.holds_any(self._ballot.lost):
            self._tell(self._result(now), now)
        if self._settles_at is None:
            self._settles_at = now + SPEAK_S
        if self._settles_at != -math.inf:
            return False
        handed_on = self.exchange.settle_lost(self._ballot.lost, self._ballot.gave_up, now)
        within_s = self.attempt.result_within_s
        if handed_on:
            self._ends_at = max(self._ends_at, now + within_s)
        else:  # somebody holds what is late: it comes over a slower line than was thought
            late_s = SAFETY * self.attempt.parts_within_s + bounds.GRACE_S
            self._ends_at = max(self._ends_at, self.begun_at + within_s + late_s)
        return handed_on

    def leave(self, reason: str, now: float) -> None:
        """Give the attempt up: it is over once all live members have. Where votes differ, each says which
        signed means it holds: so all have them before they begin again."""
        if self.is_leaving:
            return
        self._become(Leaving(reason[:MAX_STRING]))
        self._ends_at = now + self.attempt.result_within_s + 2 * bounds.GRACE_S
        held = [state.seal for state in self.exchange.parts if state.is_held]
        means = held if self._ballot.is_split else []
        self._tell(Result(key=self.attempt.key(), gave_up=True, means=means), now)
        self.check(now)

    # ---- the outcome

    def tell(self, decision: Decision, outcome: Outcome) -> None:
        """Pass on the certificate that we made to all live peers that were not in the attempt, if we are the
        first of its tellers. A member hears the votes, and asks for what it lacks."""
        if self._swarm.me == tellers_of(decision, outcome)[0]:
            for peer in sorted(self._swarm.live.keys() - self.attempt.shares.keys()):
                self._outlet.send(peer, decision)

    def may_complete(self, outcome: Outcome) -> bool:
        """Whether all that was committed can still come: what we hold is part of it. The owners of the rest
        live, and are not known to lie."""
        owners = self.exchange.owners_of_missing()
        is_open = all(self._swarm.is_live(o) and not self._swarm.repute.has_lied(o) for o in owners)
        return is_open and self._fits(outcome)

    def agreed_mean(self, outcome: Outcome) -> memoryview | None:
        """The whole fragment's mean if ours is what was committed, else None."""
        return self.exchange.mean if self.exchange.is_whole and self._fits(outcome) else None

    def _fits(self, outcome: Outcome) -> bool:
        """Whether all means that we hold are in it."""
        held = zip(self.exchange.parts, outcome.parts, strict=True)
        return all(not state.is_held or state.outcome.digest == part.digest for state, part in held)

    # ---- time and the swarm

    def peers_changed(self, now: float) -> None:
        self.exchange.check(now)
        self.check(now)

    def get_timer(self) -> float:
        told = self._ballot.lost.get(self._swarm.me, frozenset())
        times = [self._ends_at, self._last.again_at if self._has_to_ask() else None]
        if isinstance(self.state, Exchanging):
            times.append(self.exchange.get_timer(told))
        if not self.is_leaving and self._settles_at != -math.inf:
            times.append(self._settles_at)
        return min(at for at in times if at is not None)

    def handle_timer(self, now: float) -> None:
        self.exchange.check(now)
        if now >= self._ends_at:
            self.leave(f"{self._ballot.why()} in time", now)
        self.check(now)
        is_open = self.certificate is None and not self.failure
        if is_open and self._has_to_ask() and now >= self._last.again_at:
            self._repeat(now)

    def _has_to_ask(self) -> bool:
        return self._last.message is not None or bool(self._ballot.leading())

    def _repeat(self, now: float) -> None:
        """Say again what we said; ask those that must know how it ended."""
        leading = self._ballot.leading()
        for peer in self.attempt.shares:
            if peer == self._swarm.me or not self._swarm.is_live(peer):
                continue
            if self.is_leaving:
                if peer not in self._ballot.gave_up:
                    self._outlet.send(peer, AskOutcome(key=self.attempt.key()))
            elif self._last.message is not None and not (self._ballot.has_voted(peer) and leading):
                self._last.message.again = True
                self._outlet.send(peer, self._last.message)
        if leading and not self.is_leaving:  # others have committed what we do not hold
            for peer in self._ballot.voters()[:TELLERS]:
                self._outlet.send(peer, AskOutcome(key=self.attempt.key()))
        self._last.repeated(now)


def without_bytes(
    decision: Decision, outcome: Outcome, swarm: RoundSwarm, ended: bool
) -> OutcomeWithoutBytes:
    """A commit that we lack the mean of. ``ended``: whether it ends our offer. Those who signed it
    hold the bytes."""
    donors = tuple(peer for peer in signers_of(decision, outcome) if peer != swarm.me)
    key = outcome.key
    return OutcomeWithoutBytes(key.fragment, key.round, decision.SerializeToString(), donors, ended)


def missed_slices(member: Member, outcome: Outcome, me: PeerId) -> list[MissedSlices]:
    """In which parts of a commit our slices are not, and why: as its certificate says, whatever we hold."""
    owners: dict[Missed, list[PeerId | None]] = {}
    for state, part in zip(member.exchange.parts, outcome.parts, strict=True):
        reason = missed_in(part, outcome, me)
        if reason is not None:
            is_by_owner = not state.is_held or state.outcome.digest == part.digest
            owners.setdefault(reason, []).append(state.owner if is_by_owner else None)
    place = outcome.key.fragment, outcome.key.round
    return [
        MissedSlices(*place, reason, tuple(sorted({one for one in of_parts if one})), len(of_parts))
        for reason, of_parts in owners.items()
    ]


class Completion:
    """A member whose round has committed before all means had come. A slow link is not waited for, but what
    is on its way to it is not thrown away either.

    Law: it waits as long as pieces keep coming and their owners live, at most ``SAFETY`` times as long as
    owners waited for slices. Then it says so, and the bytes are fetched from donors.
    """

    def __init__(
        self, member: Member, decision: Decision, outcome: Outcome, swarm: RoundSwarm, now: float
    ) -> None:
        self.decision = decision
        self.outcome = outcome
        self.has_stalled = not member.may_complete(outcome)
        self.member = member
        self._swarm = swarm
        within_s = member.attempt.parts_within_s
        self._patience_s = max(bounds.GRACE_S, within_s)
        most_s = max(bounds.GATHER_CAP_S, SAFETY * within_s)
        self._give_up_at = now + min(most_s, swarm.shape.round_cap_s)
        self.came(now)

    def committed(self, offered_at: float, now: float) -> Committed | None:
        """How the round ended, once all means are here and are what was committed."""
        member = self.member
        attempt = member.attempt
        mean = member.agreed_mean(self.outcome)
        if mean is None:
            return None
        return Committed(
            fragment=attempt.fragment, round=attempt.round, decision=self.decision.SerializeToString(),
            mean=mean, group=tuple(attempt.shares), coordinator=attempt.coordinator,
            duration_s=now - offered_at, begun_s=member.begun_at - offered_at,
            parts_s=member.exchange.parts_at - offered_at, means_s=member.means_at - offered_at,
        )  # fmt: skip

    def came(self, now: float) -> None:
        """A piece of a mean has come."""
        self._stalls_at = now + self._patience_s

    def overtaken(self, now: float) -> None:
        """The next round has committed: its members send no more of this one's means than is on its way."""
        self._patience_s = bounds.GRACE_S
        self.came(now)

    def peers_changed(self, now: float) -> None:
        if any(not self._swarm.is_live(owner) for owner in self.member.exchange.owners_of_missing()):
            self._stalls_at = min(self._stalls_at, now + bounds.GRACE_S)

    def get_timer(self) -> float:
        return min(self._stalls_at, self._give_up_at)

    def handle_timer(self, now: float) -> None:
        self.has_stalled = self.has_stalled or now >= self.get_timer()
