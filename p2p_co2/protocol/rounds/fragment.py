"""One fragment's rounds as a participant: the open offer from READY to its ending, and what others decided
meanwhile.

Laws: at most one offer is open and it ends once; a commit is believed only if it makes the version after the
newest one that we know, from the state that we hold; a commit of another attempt than the one we are in waits
until ours has failed, because ours may still be decided; what was held for an offer is forgotten with it.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from p2p_co2.errors import LocalProtocolError, RemoteProtocolError
from p2p_co2.protocol.rounds.ahead import Ahead, farthest_version
from p2p_co2.protocol.rounds.asking import Asking
from p2p_co2.protocol.rounds.attempt import Attempt, check_behind, check_duration, read_begin
from p2p_co2.protocol.rounds.completing import Completing, without_bytes
from p2p_co2.protocol.rounds.coordination import Coordination
from p2p_co2.protocol.rounds.deadline import Durations
from p2p_co2.protocol.rounds.decision import Verdicts, content_of
from p2p_co2.protocol.rounds.events import Aborted, Doubted, FellBehind, Offer, Overheard, Refused
from p2p_co2.protocol.rounds.judging import Judging
from p2p_co2.protocol.rounds.listening import Ear
from p2p_co2.protocol.rounds.member import Member
from p2p_co2.protocol.rounds.reorder_buffer import Piece, ReorderBuffer
from p2p_co2.protocol.rounds.swarm import Outlet, Swarm
from p2p_co2.protocol.wire import messages_pb2 as wire
from p2p_co2.protocol.wire.identity import PeerId


class FragmentRounds:
    """What this peer knows and does about one fragment."""

    def __init__(self, fragment: int, swarm: Swarm, outlet: Outlet, coordination: Coordination) -> None:
        self.version: int | None = None
        """The agreed state that we hold; None while joining."""
        self.digest = b""
        self.verdicts = Verdicts()
        self.offer: Offer | None = None
        self.asking: Asking | None = None
        self.member: Member | None = None
        self._swarm, self._outlet, self._coordination = swarm, outlet, coordination
        self.offered_at = 0.0
        self._payload_bytes = swarm.shape.payload_bytes(fragment)
        self._early = ReorderBuffer(2 * self._payload_bytes)
        self._rival: tuple[wire.Decision, wire.Outcome] | None = None
        self._aborted_round = -1
        self._ahead = Ahead(swarm, outlet)
        self.judging = Judging(fragment, swarm, self.verdicts, self._ahead)
        self._withdrawn: Offer | None = None
        """The last offer that we ended ourselves: what still answers its READY is nobody's fault."""
        self._leading = False
        """Whether the attempt's lost coordinator is replaced by us."""
        self._completing: Completing | None = None
        """Set once our attempt has committed and some of its means are still on their way to us."""
        self.ear = Ear(fragment, swarm, outlet, self.verdicts)
        self.on_begun: Callable[[], None] = _nothing
        """See ``Rounds.when_begun``."""
        self._receipts, self._observed = Durations(), coordination.observed[fragment]
        self._cadence = coordination.cadences[fragment]

    def is_completing(self) -> bool:
        """Whether the bytes of a commit are coming in: nobody else need be asked for them."""
        return self._completing is not None

    def joined_until(self, round_: int) -> float | None:
        """When the open attempt of ``round_`` that we are in does something next; None if there is none."""
        member = self.member if self._completing is None else None
        return member.get_timer() if member is not None and member.offer.round == round_ else None

    def reached(self) -> int:
        """The newest version that we hold or have seen committed; -1 while joining."""
        newest = self.verdicts.newest_commit()
        return max(-1 if self.version is None else self.version, newest[1].key.round if newest else -1)

    def set_state(self, version: int, digest: bytes, now: float) -> None:
        """Our state now. A commit that follows it and that we know already is told (again), so that replays
        follow one another; one of another history is forgotten. An offer that starts elsewhere ends."""
        self.judging.moved((self.version, self.digest), version, digest, now)
        self.version, self.digest = version, digest
        self.ear.moved(version, digest)
        if self.member is None and self.ear.listening is None:
            self._completing = None
        if self.offer is not None and (self.offer.round, self.offer.state_digest) != (version + 1, digest):
            healed = self.offer.round == version + 1
            how = "was replaced by another state" if healed else "is the agreed state now"
            self.withdraw(f"version {version} {how}", now)
        self.verdicts.outrun(version, self._outlet.emit)
        known = self.verdicts.commit(version + 1)
        if known is not None and known[1].state_digest == digest:
            self._end_without_bytes(*known)
        elif known is not None:
            self.verdicts.forget(version + 1)
        elif self.offer is None:
            self.ear.ask(version, digest, now)

    def start(self, offer: Offer, now: float) -> None:
        """Open an offer. Raises ``LocalProtocolError`` if one is open, or it does not fit our state."""
        if (mine := self.offer) is not None:
            raise LocalProtocolError(f"fragment {offer.fragment} has an open offer for round {mine.round}")
        if self.version != offer.round - 1 or self.digest != offer.state_digest:
            raise LocalProtocolError(f"an offer for round {offer.round} at version {self.version}")
        if len(offer.payload) != self._payload_bytes:
            raise LocalProtocolError(f"a payload of {len(offer.payload)} bytes for fragment {offer.fragment}")
        self.offer, self.offered_at = offer, now
        known = self.verdicts.commit(offer.round)
        if self._completing is not None:
            return  # the round that we hear ends this offer
        if known is not None:
            self._end_without_bytes(*known)
        else:
            self.asking = Asking(
                offer, self._swarm, self._outlet, self._receipts,
                is_retry=offer.round == self._aborted_round, now=now,
            )  # fmt: skip

    def withdraw(self, reason: str, now: float) -> bool:
        """End the open offer, whatever it waits for; False if there is none."""
        if self.offer is None:
            return False
        self._withdrawn, self._rival, self._ahead.waiting = self.offer, None, None
        self._abort(reason, now)
        return True

    def waiting(self) -> tuple[float, float] | None:
        """Since when our offer waits and when its next timer is (never: inf); None if there is no offer."""
        timer_at = self.get_timer() if self.offer is not None else None
        return None if self.offer is None else (self.offered_at, inf if timer_at is None else timer_at)

    def held(self) -> dict[str, tuple[int, int]]:
        return self.verdicts.held() | self._early.held()

    # ---- time and the swarm

    def _role(self) -> Asking | Member | Completing | None:
        return self.asking or self._completing or self.member

    def peers_changed(self, now: float) -> None:
        role = self._role()
        if role is not None:
            role.peers_changed(now)
        self._check_ahead()

    def get_timer(self) -> float | None:
        role = self._role()
        return role.get_timer() if role is not None else None

    def handle_timer(self, now: float) -> None:
        role = self._role()
        if role is not None and now >= role.get_timer():
            role.handle_timer(now)

    def settle(self, now: float) -> bool:
        """Give up an offer that can go nowhere, take over a round that fell to us; True if there was one."""
        if self._completing is not None:
            if self._completing.has_stalled:
                self._end_without_bytes(self._completing.decision, self._completing.outcome)
            return self._completing is None
        role = self.asking or self.member
        if role is not None and role.failure:
            self._abort(role.failure, now)
            return True
        if self.member is not None and self.member.leads() and not self._leading:
            self._leading = True
            self._coordination.take_over(self.member, now)
            return True
        return False

    # ---- the road into a round

    def on_waiting(self, message: wire.Waiting, sender: PeerId, now: float) -> None:
        check_duration(message.begins_within_s, self._swarm.shape.round_cap_s)
        if self.asking is not None and self.asking.offer.round == message.round:
            self.asking.waiting(message, sender, now)

    def on_begin(self, message: wire.Begin, sender: PeerId, now: float) -> None:
        attempt = read_begin(message, sender, self._swarm.shape)
        if self.verdicts.has_ended(attempt.id) or self.attempt(attempt.id) is not None:
            return  # doubled
        if self._swarm.me not in attempt.shares:
            self._hear_of(attempt, now)
            return
        asking = self.asking
        if asking is None or asking.offer.round != attempt.round:
            if attempt.round > self.reached() + 1:
                raise RemoteProtocolError("unknown round", f"BEGIN of round {attempt.round}")
            # Our READY was overtaken: the offer has ended or is in another attempt (we are in one at a time).
            self.verdicts.end(attempt.id)
            return
        if not asking.is_taken_in(attempt, self._withdrawn):
            self.verdicts.end(attempt.id)
            return
        if attempt.coordinator != asking.asked[-1]:
            asking.leave()  # an earlier one was quicker
        offer, self.asking = asking.offer, None
        if not attempt.is_alone:
            self.verdicts.join(attempt.round, attempt.id, offer.weight)
        self.member = Member(offer, attempt, self._swarm, self._outlet, observed=self._observed, now=now)
        self.on_begun()
        self.member.start(now)
        self._replay(now)

    def _hear_of(self, attempt: Attempt, now: float) -> None:
        """Listen to an attempt that began without us, if we are in none and do not have its outcome."""
        asking = self.asking
        if self._role() is asking and self.verdicts.commit(attempt.round) is None:
            asked = asking.asked if asking is not None else ()
            if self.ear.begins(attempt, asked, self.version, self.digest, now) and asking is not None:
                asking.round_began(attempt, now)

    def on_behind(self, message: wire.Behind, sender: PeerId, now: float) -> None:
        check_behind(message)
        asking = self.asking
        if asking is None or asking.offer.round != message.round or sender not in asking.asked:
            return
        if (message.version, message.state_digest) == (self.version, self.digest):
            raise RemoteProtocolError("impossible version", f"{message.version}, which is where we are")
        asking.check_behind(message, farthest_version(self._swarm, message.fragment), sender, now)
        donors = tuple(PeerId(donor) for donor in message.donors)
        self._end()
        self._ahead.told(message, sender)
        self._outlet.emit(FellBehind(message.fragment, message.version, message.state_digest, donors, True))

    # ---- pieces of payloads and means

    def attempt(self, attempt: bytes) -> Attempt | None:
        """The attempt of this id if we are in it now."""
        return self.member.attempt if self.member is not None and self.member.attempt.id == attempt else None

    def on_piece(self, message: Piece, sender: PeerId, now: float) -> bool:
        """PART, MEAN or REASSIGN: for the attempt we are in, or held until its BEGIN or REASSIGN comes. False
        if it came for nothing."""
        round_, member = message.key.round, self.member
        if self.ear.hears(message.key.attempt):
            return isinstance(message, wire.Mean) and self._came(self.ear.mean(message, sender), now)
        ends = self._completing is not None and isinstance(message, wire.Mean)  # what was on its way to us
        if self.verdicts.has_ended(message.key.attempt) and not (ends and self.attempt(message.key.attempt)):
            return False
        if member is not None and member.attempt.id == message.key.attempt:
            if sender not in member.attempt.shares and sender not in member.coordinators:
                raise RemoteProtocolError("not a member", message.__class__.__name__)
            if isinstance(message, wire.Reassign) or not member.is_early(message.part, message.generation):
                return self._take(member, message, sender, now)
        elif self.asking is not None and self.asking.offer.round == round_:
            if not self._swarm.is_live(sender):
                raise RemoteProtocolError("unknown peer", "a piece of a round that has not begun here")
            self.asking.poke(now)
        elif self._withdrawn is not None and self._withdrawn.round == round_:
            return False  # the others count on the READY that we withdrew
        else:
            known = round_ <= self.reached()
            raise RemoteProtocolError("replayed round" if known else "unknown round", str(round_))
        self._early.hold(message, sender)
        return True

    def _take(self, member: Member, message: Piece, sender: PeerId, now: float) -> bool:
        match message:
            case wire.Part():
                return member.part(message, sender, now)
            case wire.Mean():
                return self._came(member.mean(message, sender, now), now)
            case wire.Reassign():
                member.reassign(message, sender, now)
                self._replay(now)
                return True

    def _came(self, is_new: bool, now: float) -> bool:
        """A piece of a mean is in its place, if it ``is_new``."""
        if is_new and self._completing is not None:
            self._completing.came(now)
            self._complete(now)
        return is_new

    def _replay(self, now: float) -> None:
        """Take the pieces that came before the BEGIN or REASSIGN that explains them."""
        for sender, message in self._early.release():
            try:
                if self.attempt(message.key.attempt) is not None:
                    self.on_piece(message, sender, now)
            except RemoteProtocolError as error:
                self._outlet.emit(Refused(sender, error.reason, error.detail))

    # ---- outcomes

    def on_decision(self, decision: wire.Decision, outcome: wire.Outcome, now: float) -> None:
        """An opened decision. Raises ``RemoteProtocolError`` for one that its signer had no right to, or a
        second one."""
        known = self.verdicts.commit(outcome.key.round)
        self.judging.heard(outcome, now)
        if known is not None:
            if outcome.committed and content_of(known[1]) != content_of(outcome):
                raise RemoteProtocolError("conflicting decision", f"round {outcome.key.round}")
        elif outcome.committed:
            self._on_commit(decision, outcome, now)
        else:
            self._on_abort(decision, outcome, now)

    def _on_abort(self, decision: wire.Decision, outcome: wire.Outcome, now: float) -> None:
        attempt, signer = outcome.key.attempt, PeerId(outcome.decided_by)
        ended = self.verdicts.has_ended(attempt)
        if ended or self.offer is None or self.offer.round != outcome.key.round:
            return
        if self.member is not None:
            # A coordinator that we do not follow (yet) cannot end our attempt.
            entitled = self.member.attempt.id == attempt and signer in self.member.coordinators
            cost_s = self.member.cost_s(now)
        else:
            entitled = self.asking is not None and signer in self.asking.asked
            cost_s = self.asking.held_s(signer, now) if self.asking is not None else 0.0
        if entitled:
            self.verdicts.keep(decision, outcome)
            if self.member is not None:
                self.member.note_duration(now)
            if self._rival is None:
                why = f"it ended round {outcome.key.round} with: {outcome.reason}"
                begun = self.member.attempt if self.member is not None else None
                rounds = self.judging.rounds_spoilt(begun, signer)
                self._swarm.spoilt(signer, why, now, rounds=rounds, cost_s=cost_s)
            self._abort(outcome.reason, now)

    def _on_commit(self, decision: wire.Decision, outcome: wire.Outcome, now: float) -> None:
        round_, signer = outcome.key.round, PeerId(outcome.decided_by)
        member = self.member if self.member is not None and self.member.offer.round == round_ else None
        coordinator = member.attempt.coordinator if member is not None else None
        group = {peer.peer for peer in outcome.members}
        if signer not in group and signer != coordinator and not self._swarm.is_live(signer):
            raise RemoteProtocolError("wrong signer", "a decision by a peer outside the round")
        is_ours = member is not None and member.attempt.id == outcome.key.attempt
        is_believed = is_ours or self._swarm.is_believed(signer, now)  # else heartbeats tell where most are
        if self.version is None or round_ <= self.version or not is_believed:
            return
        if self._completing is not None:
            if round_ == self.reached() + 1:  # one beyond would hide from us all that come before it
                self.verdicts.keep(decision, outcome)  # told once we have the bytes of the one before
                self._completing.overtaken(now)
            return
        foreign = round_ == self.version + 1 and outcome.state_digest != self.digest
        if foreign or round_ != self.reached() + 1:
            self._ahead.hear(outcome, self.offer)
            self._check_ahead()
        elif member is None:
            self._cadence.committed(round_, now)
            self.verdicts.keep(decision, outcome)
            listening = self.ear.listening
            if listening is None or not self.ear.hears(outcome.key.attempt):
                self._end_without_bytes(decision, outcome)
                return
            self.asking = None
            self._completing = Completing(listening, decision, outcome, self._swarm, now)
            self._complete(now)
        elif outcome.key.attempt != member.attempt.id:
            self._rival = self._rival or (decision, outcome)
        else:
            self._finish(member, decision, outcome, now)

    def _check_ahead(self) -> None:
        outcome = self._ahead.most_are_past(self.asking.offer) if self.asking is not None else None
        if outcome is not None:
            self._end()
            self._ahead.tell(outcome, ends_offer=True)

    def _finish(self, member: Member, decision: wire.Decision, outcome: wire.Outcome, now: float) -> None:
        """A commit of the attempt that we are in."""
        member.check_outcome(outcome)
        member.note_duration(now)
        self._cadence.committed(outcome.key.round, now)
        self.verdicts.keep(decision, outcome)
        self._completing = Completing(member, decision, outcome, self._swarm, now)
        self._complete(now)

    def _complete(self, now: float) -> None:
        """Our attempt has committed: end the offer if we hold all means."""
        assert self._completing is not None
        outcome, rival = self._completing.outcome, self._rival
        event = self._completing.committed(self.offered_at, self.offer is not None, now)
        if event is None:
            return
        self._end()
        self._outlet.emit(event)
        self.ear.is_behind = isinstance(event, Overheard)
        if isinstance(event, Overheard) or not all(event.contributed):
            self.doubt(outcome)
        if rival is not None:
            signer = PeerId(rival[1].decided_by)
            self._outlet.emit(Refused(signer, "conflicting decision", f"round {event.round}"))
            self._swarm.repute.lied(signer, f"its round {event.round} is not the one that we were in", now)

    def _end_without_bytes(self, decision: wire.Decision, outcome: wire.Outcome) -> None:
        key = outcome.key
        self.doubt(outcome)
        self.ear.is_behind, self._completing = True, None
        self.ear.stop()
        ended = self.offer is not None and self.offer.round == key.round
        if ended:
            self._end()
        self._outlet.emit(without_bytes(decision, outcome, self._swarm, ended))

    def doubt(self, outcome: wire.Outcome) -> None:
        """What we offered in other attempts at the same round may have been counted there."""
        if self.verdicts.was_elsewhere(outcome):
            self._outlet.emit(Doubted(outcome.key.fragment))

    def _abort(self, reason: str, now: float) -> None:
        offer, rival = self.offer, self._rival
        assert offer is not None
        if rival is not None:
            self.verdicts.keep(*rival)
            self._end_without_bytes(*rival)
            return
        ahead = self._ahead.waiting
        self._aborted_round = offer.round
        self._end()
        self._outlet.emit(Aborted(offer.fragment, offer.round, offer.weight, reason, now - self.offered_at))
        if ahead is not None:
            self._ahead.tell(ahead, ends_offer=False)

    def _end(self) -> None:
        """Forget the open offer and all that was held for it."""
        if self.member is not None:
            self.verdicts.leave(self.member.attempt.round, self.member.attempt.id, self._outlet.emit)
            self._coordination.member_left(self.member.attempt)
        if self.asking is not None:
            self.asking.leave()
        if self.offer is not None:
            self._coordination.withdraw((self.offer.fragment, self.offer.round), self._swarm.me)
        self.offer = self.asking = self.member = self._rival = self._ahead.waiting = self._completing = None
        self.ear.stop()
        self._leading = False
        self._early.clear()


def _nothing() -> None:
    """Nobody is told."""
