"""One fragment's rounds as a participant: the open offer from READY to its ending, and what others committed.

Laws: at most one offer is open and it ends once. A commit is believed only if it makes the version after the
newest one that we know, from the state that we hold. We must have been in it, or enough live peers signed it.
No other attempt of a round is joined before the one that we left is over. What was held for an offer is
forgotten with it.
"""

from __future__ import annotations

from collections.abc import Callable

from p2p_co2.errors import LocalProtocolError, Offence, RemoteProtocolError
from p2p_co2.protocol.rounds.asking import Asking
from p2p_co2.protocol.rounds.assembly import Piece, ReorderBuffer
from p2p_co2.protocol.rounds.attempt import check_behind, check_duration, read_begin
from p2p_co2.protocol.rounds.certificate import Seals, Signer, open_decision, signers_of
from p2p_co2.protocol.rounds.coordination import Coordination
from p2p_co2.protocol.rounds.deadline import Durations
from p2p_co2.protocol.rounds.events import Aborted, Doubted, FellBehind, Offer, Refused
from p2p_co2.protocol.rounds.exchange import Exchange
from p2p_co2.protocol.rounds.history import History, is_in_all
from p2p_co2.protocol.rounds.member import Completion, Member, missed_slices, without_bytes
from p2p_co2.protocol.rounds.offer_state import OfferState
from p2p_co2.protocol.rounds.swarm import Outlet, Swarm
from p2p_co2.wire import messages_pb2 as wire
from p2p_co2.wire.identity import PeerId


class FragmentRounds:
    """What this peer knows and does about one fragment. ``open``: its offer; ``leaving``: an attempt whose
    offer we withdrew: no other of its round is joined before it is over."""

    def __init__(
        self, fragment: int, signer: Signer, swarm: Swarm, outlet: Outlet, history: History,
        coordination: Coordination,
    ) -> None:  # fmt: skip
        self.history = history
        self.open: OfferState | None = None
        self.leaving: Member | None = None
        self._signer = signer
        self._swarm = swarm
        self._outlet = outlet
        self._coordination = coordination
        self.early = ReorderBuffer(2 * swarm.shape.payload_bytes(fragment))
        self._aborted_round = -1
        self._sent_behind: tuple[PeerId, int] | None = None
        """Which coordinator of our fragment sent us after another state, until that is here or came to
        nothing."""
        self._withdrawn: Offer | None = None
        """The last offer that we ended ourselves: what still answers its READY is nobody's fault."""
        self.on_begun: Callable[[], None] = lambda: None
        """See ``Rounds.when_begun``."""
        self._receipts = Durations()

    @property
    def offer(self) -> Offer | None:
        return None if self.open is None else self.open.offer

    @property
    def asking(self) -> Asking | None:
        return None if self.open is None else self.open.asking

    @property
    def member(self) -> Member | None:
        """Our part in the attempt of our offer, also once that has committed."""
        return None if self.open is None else self.open.member

    @property
    def completion(self) -> Completion | None:
        """Set while some means of our committed attempt are still on their way to us."""
        return None if self.open is None else self.open.completion

    def joined_until(self, round_: int) -> float | None:
        """When the open attempt of ``round_`` that we are in does something next; None if there is none."""
        member = (self.member if self.completion is None else None) or self.leaving
        return member.get_timer() if member is not None and member.attempt.round == round_ else None

    def set_state(self, version: int, digest: bytes, now: float) -> None:
        """Our state now. A commit that follows it and that we know already is told (again). An offer that
        starts elsewhere ends."""
        history = self.history
        made = history.commit(version)
        if made is not None and history.version == version - 1:
            self._swarm.repute.committed(PeerId(made[1].coordinator), made[1].key.fragment)
        if (version, digest) != (history.version, history.digest):
            self._sent_behind = None
        following = history.go_to(version, digest)
        offer = self.offer
        if offer is not None and (offer.round, offer.state_digest) != (version + 1, digest):
            healed = offer.round == version + 1
            how = "was replaced by another state" if healed else "is the agreed state now"
            self.withdraw(f"version {version} {how}", now)
        history.outrun(version, self._outlet.emit)
        if following is not None:
            self._end_without_bytes(*following)

    def forget(self, round_: int, now: float) -> None:
        """Nobody holds the bytes of a commit, or the state that a coordinator sent us after."""
        self.history.forget(max(round_, (self.history.version or 0) + 1))
        if self._sent_behind is not None:
            self._swarm.failed(*self._sent_behind, "it sent us where nobody is", now)
            self._sent_behind = None

    def start(self, offer: Offer, now: float) -> None:
        """Open an offer. Raises ``LocalProtocolError`` if one is open, or it does not fit our state."""
        history = self.history
        if self.offer is not None:
            raise LocalProtocolError(f"fragment {offer.fragment} has an open offer for {self.offer.round}")
        if (history.version, history.digest) != (offer.round - 1, offer.state_digest):
            raise LocalProtocolError(f"an offer for round {offer.round} at version {history.version}")
        if len(offer.payload) != self._swarm.shape.payload_bytes(offer.fragment):
            raise LocalProtocolError(f"a payload of {len(offer.payload)} bytes for fragment {offer.fragment}")
        self.open = OfferState(offer, now)
        known = history.commit(offer.round)
        if known is not None:
            self._end_without_bytes(*known)
        self._ask(now)

    def _ask(self, now: float) -> None:
        """Ask to be taken in, once nothing keeps our offer from it."""
        if self.open is None or self.asking or self.member:
            return
        offer = self.open.offer
        if self.leaving is None or self.leaving.attempt.round != offer.round:
            is_retry = offer.round == self._aborted_round
            asking = Asking(offer, self._swarm, self._outlet, self._receipts, is_retry=is_retry, now=now)
            self.open.become(asking)

    def withdraw(self, reason: str, now: float) -> bool:
        """End the open offer, whatever it waits for; False if there is none."""
        if self.open is None:
            return False
        self._withdrawn = self.open.offer
        if self.member is not None and self.completion is None and not self.member.attempt.is_alone:
            self.leaving = self.member
            self.leaving.leave(reason, now)
        self._abort(reason, is_over=False)
        return True

    # ---- time and the swarm

    def _roles(self) -> list[Asking | Member | Completion]:
        mine = self.asking or self.completion or self.member
        return [role for role in (mine, self.leaving) if role is not None]

    def peers_changed(self, now: float) -> None:
        for role in self._roles():
            role.peers_changed(now)

    def get_timer(self) -> float | None:
        return min((role.get_timer() for role in self._roles()), default=None)

    def handle_timer(self, now: float) -> None:
        for role in self._roles():
            if now >= role.get_timer():
                role.handle_timer(now)

    def settle(self, now: float) -> bool:
        """End what can go nowhere, take a commit that our votes made; True if there was something."""
        if self.leaving is not None and self.leaving.failure:
            self.leaving = None
            self._ask(now)
            return True
        completion = self.completion
        if completion is not None:
            if completion.has_stalled:
                self._end_without_bytes(completion.decision, completion.outcome)
            return completion.has_stalled
        member = self.member
        if member is not None and member.certificate is not None:
            decision = member.certificate
            outcome = open_decision(decision, self._signer.run, self._swarm.shape)
            member.tell(decision, outcome)
            self._finish(member, decision, outcome, now)
            return True
        role = self.asking or member
        if role is not None and role.failure:
            if member is not None:
                member.exchange.note_duration(member.begun_at, now)
                coordinator = member.attempt.coordinator
                fragment = member.attempt.fragment
                if not member.had_a_liar:
                    self._swarm.failed(coordinator, fragment, "its rounds came to nothing", now)
            self._abort(role.failure, is_over=True)
            return True
        return False

    # ---- the road into a round

    def on_waiting(self, message: wire.Waiting, sender: PeerId, now: float) -> None:
        check_duration(message.begins_within_s, self._swarm.shape.round_cap_s)
        if self.asking is not None and self.asking.offer.round == message.round:
            self.asking.waiting(message, sender, now)

    def on_begin(self, message: wire.Begin, sender: PeerId, now: float) -> None:
        attempt = read_begin(message, sender, self._swarm.shape)
        if self.history.has_ended(attempt.id) or self._is_in(attempt.id):
            return  # doubled
        asking = self.asking
        if self._swarm.me not in attempt.shares:
            if asking is not None and attempt.coordinator in asking.asked:
                asking.began_without_us(self._coordination.clamped(attempt), now)
            return
        if self.open is None or asking is None or asking.offer.round != attempt.round:
            if attempt.round > self.history.reached() + 1:
                raise RemoteProtocolError(Offence.UNKNOWN_ROUND, f"BEGIN of round {attempt.round}")
            # Our READY was overtaken: the offer has ended or is in another attempt (we are in one at a time).
            is_taken_in = False
        else:
            is_taken_in = asking.is_taken_in(attempt, self._withdrawn)
        are_known = attempt.is_quorum(self._swarm.known(attempt.shares))  # names are free
        if self.open is None or asking is None or not is_taken_in or not are_known:
            self.history.end(attempt.id)
            gone = wire.Result(key=attempt.key(), gave_up=True)
            for peer in attempt.shares:
                if peer != self._swarm.me and self._swarm.is_live(peer):
                    self._outlet.send(peer, gone)
            if asking is not None and is_taken_in:
                asking.mistrust(sender, "most of its group never worked here", now)
            return
        attempt = self._coordination.clamped(attempt)  # not before: it costs more than all else
        if attempt.coordinator != asking.asked[-1]:
            asking.leave()  # an earlier one was quicker
        offer = asking.offer
        if not attempt.is_alone:
            self.history.join(attempt.round, attempt.id, offer.offer_id)
        self.on_begun()
        exchange = Exchange(
            offer, attempt, self._swarm, self._outlet, seals=Seals(self._signer, attempt),
            observed=self._coordination.observed[attempt.fragment], now=now,
        )  # fmt: skip
        member = Member(attempt, exchange, self._signer, self._swarm, self._outlet, now)
        self.open.become(member)
        exchange.start(now)
        member.check(now)
        self._replay(now)

    def on_behind(self, message: wire.Behind, sender: PeerId, now: float) -> None:
        check_behind(message)
        asking = self.asking
        if asking is None or asking.offer.round != message.round or sender not in asking.asked:
            return
        if (message.version, message.state_digest) == (self.history.version, self.history.digest):
            raise RemoteProtocolError("impossible version", f"{message.version}, which is where we are")
        most = self._swarm.farthest_version(message.fragment)
        if message.version > most and sender != self._swarm.me:
            asking.mistrust(sender, "it sent us where nobody is", now)
            raise RemoteProtocolError("impossible version", f"{message.version}; most are not beyond {most}")
        donors = tuple(PeerId(donor) for donor in message.donors)
        self._sent_behind = sender, message.fragment
        self._end()
        self._outlet.emit(FellBehind(message.fragment, message.version, message.state_digest, donors, True))

    # ---- pieces of payloads and means

    def _is_in(self, attempt: bytes) -> bool:
        """Whether we are in the attempt of this id now."""
        return self.member is not None and self.member.attempt.id == attempt

    def on_piece(self, message: Piece, sender: PeerId, now: float) -> bool:
        """PART or MEAN: for the attempt we are in, or held until we follow what it is of. False if it came
        for nothing."""
        round_ = message.key.round
        member = self.member
        ends = self.completion is not None and isinstance(message, wire.Mean)  # what was on its way to us
        if self.history.has_ended(message.key.attempt) and not (ends and self._is_in(message.key.attempt)):
            return False
        if member is not None and self._is_in(message.key.attempt):
            if sender not in member.attempt.shares:
                raise RemoteProtocolError(Offence.NOT_A_MEMBER, message.__class__.__name__)
            if not member.exchange.is_early(message.part, message.generation):
                return self._take(member, message, sender, now)
        elif self.asking is not None and self.asking.offer.round == round_:
            if not self._swarm.is_live(sender):
                raise RemoteProtocolError(Offence.UNKNOWN_PEER, "a piece of a round that has not begun here")
            self.asking.poke(now)
        elif self._withdrawn is not None and self._withdrawn.round == round_:
            return False  # the others count on the READY that we withdrew
        else:
            known = round_ <= self.history.reached()
            raise RemoteProtocolError(Offence.REPLAYED_ROUND if known else Offence.UNKNOWN_ROUND, str(round_))
        self.early.hold(message, sender)
        return True

    def _take(self, member: Member, message: Piece, sender: PeerId, now: float) -> bool:
        if isinstance(message, wire.Part):
            return member.exchange.part(message, sender, now)
        is_new = member.exchange.mean_came(message, sender, now)
        if is_new and self.completion is not None:
            self.completion.came(now)
            self._complete(self.completion, now)
        elif is_new:
            member.mean_came(now)
        return is_new

    def _replay(self, now: float) -> None:
        """Take the pieces that came before what explains them."""
        for sender, message in self.early.release():
            try:
                if self._is_in(message.key.attempt):
                    self.on_piece(message, sender, now)
            except RemoteProtocolError as error:
                self._outlet.emit(Refused(sender, error.reason, error.detail))

    # ---- votes

    def on_result(self, message: wire.Result, sender: PeerId, now: float) -> bool:
        """A member's vote; whether anything follows from it. One in an attempt that is over here is told how
        it ended."""
        attempt = message.key.attempt
        for member in (self.member, self.leaving):
            if member is not None and member.attempt.id == attempt and self.completion is None:
                before = [part.generation for part in member.exchange.parts]
                has_moved = member.result(message, sender, now)
                if before != [part.generation for part in member.exchange.parts]:
                    self._replay(now)
                return has_moved
        if self.history.commit(message.key.round) is not None or self.history.has_ended(attempt):
            return self._answer(message, sender)
        if self.asking is not None and self.asking.offer.round == message.key.round:
            self.asking.poke(now)  # our BEGIN may be lost
        return True

    def on_ask(self, message: wire.AskOutcome, sender: PeerId) -> None:
        """How did an attempt end? One that we never heard of we shall not join."""
        attempt = message.key.attempt
        is_open = any(
            member is not None and member.attempt.id == attempt and not member.is_leaving
            for member in (self.member, self.leaving)
        )
        if is_open and self.completion is None:
            return  # it will be told
        if self._swarm.is_live(sender):
            self.history.end(attempt)
            self._answer(message, sender)

    def _answer(self, message: wire.Result | wire.AskOutcome, sender: PeerId) -> bool:
        """Tell ``sender`` how an attempt ended, if it has to ask; whether it was told."""
        result = message if isinstance(message, wire.Result) else wire.Result(key=message.key)
        answer = self.history.verdict(result, self._swarm.me)
        if answer is not None:
            self._outlet.send(sender, answer)
        return answer is not None

    # ---- outcomes

    def on_decision(self, decision: wire.Decision, outcome: wire.Outcome, sender: PeerId, now: float) -> None:
        """A commit, its certificate checked."""
        round_ = outcome.key.round
        known = self.history.commit(round_)
        member = self.member if self.member is not None and self.member.attempt.round == round_ else None
        is_ours = member is not None and member.attempt.id == outcome.key.attempt
        signers = signers_of(decision, outcome)
        members = [one.peer for one in outcome.members]
        if not is_ours and not self._swarm.believes(signers, members, outcome.key.fragment):
            return  # heartbeats tell where most are
        history = self.history
        if known is not None or history.version is None or round_ <= history.version:
            return
        follows = round_ == history.reached() + 1
        if self.completion is not None:
            if follows:  # one beyond would hide from us all that come before it
                history.keep(decision, outcome)  # told once we have the bytes of the one before
                self.completion.overtaken(now)
            return
        if not follows or (round_ == history.version + 1 and outcome.state_digest != history.digest):
            history.hear_beyond(decision, outcome)
            ended = self.open is not None
            self._end()  # most others have made a round that does not follow our state
            donors = tuple(peer for peer in signers if peer != self._swarm.me)
            place = outcome.key.fragment, round_ - 1
            self._outlet.emit(FellBehind(*place, outcome.state_digest, donors, ended))
        elif member is not None and is_ours:
            self._finish(member, decision, outcome, now)
        else:
            self._coordination.cadences[outcome.key.fragment].committed(round_, now)
            history.keep(decision, outcome)
            self._end_without_bytes(decision, outcome)

    def _finish(self, member: Member, decision: wire.Decision, outcome: wire.Outcome, now: float) -> None:
        """A commit of the attempt that we are in."""
        member.attempt.check_outcome(outcome)
        member.exchange.note_duration(member.begun_at, now)
        self._coordination.cadences[outcome.key.fragment].committed(outcome.key.round, now)
        self.history.keep(decision, outcome)
        for missed in missed_slices(member, outcome, self._swarm.me):
            self._outlet.emit(missed)
        completion = Completion(member, decision, outcome, self._swarm, now)
        assert self.open is not None
        self.open.become(completion)
        self._complete(completion, now)

    def _complete(self, completion: Completion, now: float) -> None:
        """Our attempt has committed: end the offer if we hold all means."""
        assert self.open is not None
        outcome = completion.outcome
        event = completion.committed(self.open.offered_at, now)
        if event is not None:
            self._end()
            self._outlet.emit(event)
            if not is_in_all(outcome, self._swarm.me):
                self.doubt(outcome)

    def _end_without_bytes(self, decision: wire.Decision, outcome: wire.Outcome) -> None:
        self.doubt(outcome)
        ended = self.offer is not None and self.offer.round == outcome.key.round
        if ended:
            self._end()
        self._outlet.emit(without_bytes(decision, outcome, self._swarm, ended))

    def doubt(self, outcome: wire.Outcome) -> None:
        """What we offered in other attempts at the same round may have been counted there."""
        if self.history.was_elsewhere(outcome):
            self._outlet.emit(Doubted(outcome.key.fragment))

    def _abort(self, reason: str, *, is_over: bool) -> None:
        offer = self.offer
        assert offer is not None
        self._aborted_round = offer.round
        self._end(is_over=is_over)
        self._outlet.emit(Aborted(offer.fragment, offer.round, reason, offer.offer_id))

    def _end(self, *, is_over: bool = True) -> None:
        """Forget the open offer and all that was held for it."""
        if self.member is not None:
            attempt = self.member.attempt
            self.history.leave(attempt.round, attempt.id, self._outlet.emit, is_over=is_over)
        if self.asking is not None:
            self.asking.leave()
        if self.offer is not None:
            self._coordination.withdraw((self.offer.fragment, self.offer.round), self._swarm.me)
        self.open = None
        self.early.clear()
