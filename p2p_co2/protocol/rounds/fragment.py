"""One fragment's rounds as a participant: the open offer from READY to its ending, and what others committed.

Laws: at most one offer is open and it ends once. A commit is believed only if it makes the version after the
newest one that we know, from the state that we hold, and if half of the voters signed it.
No other attempt of a round is joined before the one that we left is over. What was held for an offer is
forgotten with it.
"""

from __future__ import annotations

from p2p_co2.errors import LocalProtocolError, Offence, RemoteProtocolError
from p2p_co2.protocol.rounds.asking import Asking
from p2p_co2.protocol.rounds.assembly import Piece, ReorderBuffer
from p2p_co2.protocol.rounds.attempt import check_behind, check_duration, read_begin
from p2p_co2.protocol.rounds.certificate import Seals, Signer, open_decision, signers_of
from p2p_co2.protocol.rounds.coordination import Coordination
from p2p_co2.protocol.rounds.deadline import Durations
from p2p_co2.protocol.rounds.events import Aborted, FellBehind, Offer, Refused
from p2p_co2.protocol.rounds.exchange import Exchange
from p2p_co2.protocol.rounds.history import History, is_in_all
from p2p_co2.protocol.rounds.member import Completion, Member, missed_slices, without_bytes
from p2p_co2.protocol.rounds.own_offer import OwnOffer, Waiting
from p2p_co2.protocol.rounds.swarm import Outlet, RoundSwarm
from p2p_co2.wire import messages_pb2 as wire
from p2p_co2.wire.identity import PeerId


class FragmentRounds:
    """What this peer knows and does about one fragment. ``mine``: its part in the next round; ``leaving``: an
    attempt whose offer we withdrew: no other of its round is joined before it is over."""

    def __init__(
        self, fragment: int, signer: Signer, swarm: RoundSwarm, outlet: Outlet, history: History,
        coordination: Coordination,
    ) -> None:  # fmt: skip
        self.history = history
        self.mine = OwnOffer()
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
        self._receipts = Durations()

    def joined_until(self, round_: int) -> float | None:
        """When the open attempt of ``round_`` that we are in does something next; None if there is none."""
        role = self.mine.role
        member = role if isinstance(role, Member) else self.leaving
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
        offer = self.mine.offer
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
        if (known := self.mine.offer) is not None:
            raise LocalProtocolError(f"fragment {offer.fragment} has an open offer for {known.round}")
        if (history.version, history.digest) != (offer.round - 1, offer.state_digest):
            raise LocalProtocolError(f"an offer for round {offer.round} at version {history.version}")
        if len(offer.payload) != self._swarm.shape.payload_bytes(offer.fragment):
            raise LocalProtocolError(f"a payload of {len(offer.payload)} bytes for fragment {offer.fragment}")
        self.mine = OwnOffer(offer, now)
        if (made := history.commit(offer.round)) is not None:
            self._end_without_bytes(*made)
        self._ask(now)

    def _ask(self, now: float) -> None:
        """Ask to be taken in, once nothing keeps our offer from it."""
        offer = self.mine.offer
        if offer is None or not isinstance(self.mine.role, Waiting):
            return
        if self.leaving is None or self.leaving.attempt.round != offer.round:
            is_retry = offer.round == self._aborted_round
            asking = Asking(offer, self._swarm, self._outlet, self._receipts, is_retry=is_retry, now=now)
            self.mine.become(asking)

    def withdraw(self, reason: str, now: float) -> bool:
        """End the open offer, whatever it waits for; False if there is none."""
        if self.mine.offer is None:
            return False
        self._withdrawn = self.mine.offer
        role = self.mine.role
        if isinstance(role, Member) and not role.attempt.is_alone:
            self.leaving = role
            self.leaving.leave(reason, now)
        self._abort(reason, is_over=False)
        return True

    # ---- time and the swarm

    def roles(self) -> list[Asking | Member | Completion]:
        """What hears of time and of the swarm."""
        roles = (self.mine.role, self.leaving)
        return [role for role in roles if role is not None and not isinstance(role, Waiting)]

    def settle(self, now: float) -> bool:
        """End what can go nowhere, take a commit that our votes made; True if there was something."""
        if self.leaving is not None and self.leaving.failure:
            self.leaving = None
            self._ask(now)
            return True
        role = self.mine.role
        completion = self.mine.completion
        if completion is not None:
            if completion.has_stalled:
                self._end_without_bytes(completion.decision, completion.outcome)
            return completion.has_stalled
        if isinstance(role, Member) and role.certificate is not None:
            decision = role.certificate
            outcome = open_decision(decision, self._signer.run, self._swarm.shape)
            role.tell(decision, outcome)
            self._finish(role, decision, outcome, now)
            return True
        if not isinstance(role, Asking | Member) or not role.failure:
            return False
        if isinstance(role, Member):
            attempt = role.attempt
            role.exchange.note_duration(role.begun_at, now)
            if not role.had_a_liar:
                self._swarm.failed(attempt.coordinator, attempt.fragment, "its rounds came to nothing", now)
        self._abort(role.failure, is_over=True)
        return True

    # ---- the road into a round

    def on_waiting(self, message: wire.Waiting, sender: PeerId, now: float) -> None:
        check_duration(message.begins_within_s, self._swarm.shape.round_cap_s)
        asking = self.mine.asking
        if asking is not None and asking.offer.round == message.round:
            asking.waiting(message, sender, now)

    def on_begin(self, message: wire.Begin, sender: PeerId, now: float) -> None:
        attempt = read_begin(message, sender, self._swarm.shape)
        if self.history.has_ended(attempt.id) or self.mine.is_in(attempt.id):
            return  # doubled
        asking = self.mine.asking
        if self._swarm.me not in attempt.shares:
            if asking is not None and attempt.coordinator in asking.asked:
                asking.began_without_us(self._coordination.clamped(attempt), now)
            return
        if asking is None or asking.offer.round != attempt.round:
            if attempt.round > self.history.reached() + 1:
                raise RemoteProtocolError(Offence.UNKNOWN_ROUND, f"BEGIN of round {attempt.round}")
            # Our READY was overtaken: the offer has ended or is in another attempt (we are in one at a time).
            is_taken_in = False
        else:
            is_taken_in = asking.is_taken_in(attempt, self._withdrawn)
        members = attempt.shares.keys()  # names are free
        are_known = attempt.is_quorum(self._swarm.known(members))
        are_known = are_known and self._swarm.believes(members, attempt.fragment)
        if asking is None or not is_taken_in or not are_known:
            self.history.end(attempt.id)
            gone = wire.Result(key=attempt.key(), gave_up=True)
            for peer in attempt.shares:
                if peer != self._swarm.me and self._swarm.is_live(peer):
                    self._outlet.send(peer, gone)
            if asking is not None and is_taken_in:
                asking.mistrust(sender, "its group is not half of those that work here", now)
            return
        attempt = self._coordination.clamped(attempt)  # not before: it costs more than all else
        if attempt.coordinator != asking.asked[-1]:
            asking.leave()  # an earlier one was quicker
        offer = asking.offer
        if not attempt.is_alone:
            self.history.join(attempt.round, attempt.id, offer.offer_id)
        self._outlet.on_begun()
        exchange = Exchange(
            offer, attempt, self._swarm, self._outlet, seals=Seals(self._signer, attempt),
            observed=self._coordination.cadences[attempt.fragment].slices, now=now,
        )  # fmt: skip
        member = Member(attempt, exchange, self._signer, self._swarm, self._outlet, now)
        self.mine.become(member)
        exchange.start(now)
        member.check(now)
        self._replay(now)

    def on_behind(self, message: wire.Behind, sender: PeerId, now: float) -> None:
        check_behind(message)
        asking = self.mine.asking
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

    def on_piece(self, message: Piece, sender: PeerId, now: float) -> bool:
        """PART or MEAN: for the attempt we are in, or held until we follow what it is of. False if it came
        for nothing."""
        round_ = message.key.round
        member = self.mine.member
        asking = self.mine.asking
        is_ours = self.mine.is_in(message.key.attempt)
        ends = self.mine.completion is not None and isinstance(message, wire.Mean)  # was on its way to us
        if self.history.has_ended(message.key.attempt) and not (ends and is_ours):
            return False
        if member is not None and is_ours:
            if sender not in member.attempt.shares:
                raise RemoteProtocolError(Offence.NOT_A_MEMBER, message.__class__.__name__)
            if not member.exchange.is_early(message.part, message.generation):
                return self._take(member, message, sender, now)
        elif asking is not None and asking.offer.round == round_:
            if not self._swarm.is_live(sender):
                raise RemoteProtocolError(Offence.UNKNOWN_PEER, "a piece of a round that has not begun here")
            asking.poke(now)
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
        completion = self.mine.completion
        if is_new and completion is not None:
            completion.came(now)
            self._complete(completion, now)
        elif is_new:
            member.mean_came(now)
        return is_new

    def _replay(self, now: float) -> None:
        """Take the pieces that came before what explains them."""
        for sender, message in self.early.release():
            try:
                if self.mine.is_in(message.key.attempt):
                    self.on_piece(message, sender, now)
            except RemoteProtocolError as error:
                self._outlet.emit(Refused(sender, error.reason, error.detail))

    # ---- votes

    def on_result(self, message: wire.Result, sender: PeerId, now: float) -> bool:
        """A member's vote; whether anything follows from it. One in an attempt that is over here is told how
        it ended."""
        attempt = message.key.attempt
        for member in (self.mine.role, self.leaving):
            if isinstance(member, Member) and member.attempt.id == attempt:
                before = [part.generation for part in member.exchange.parts]
                has_moved = member.result(message, sender, now)
                if before != [part.generation for part in member.exchange.parts]:
                    self._replay(now)
                return has_moved
        if self.history.commit(message.key.round) is not None or self.history.has_ended(attempt):
            return self._answer(message, sender)
        asking = self.mine.asking
        if asking is not None and asking.offer.round == message.key.round:
            asking.poke(now)  # our BEGIN may be lost
        return True

    def on_ask(self, message: wire.AskOutcome, sender: PeerId) -> None:
        """How did an attempt end? One that we never heard of we shall not join."""
        attempt = message.key.attempt
        role = self.mine.role
        if isinstance(role, Member) and role.attempt.id == attempt and not role.is_leaving:
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
        member = self.mine.member
        attempt = outcome.key.attempt
        is_ours = member is not None and member.attempt.round == round_ and self.mine.is_in(attempt)
        signers = signers_of(decision, outcome)
        if not self._swarm.believes(signers, outcome.key.fragment, 1 if is_ours else 2):
            return  # heartbeats tell where most are
        history = self.history
        if known is not None or history.version is None or round_ <= history.version:
            return
        follows = round_ == history.reached() + 1
        role = self.mine.role
        if isinstance(role, Completion):
            if follows:  # one beyond would hide from us all that come before it
                history.keep(decision, outcome)  # told once we have the bytes of the one before
                role.overtaken(now)
            return
        if not follows or (round_ == history.version + 1 and outcome.state_digest != history.digest):
            history.hear_beyond(decision, outcome)
            ended = self.mine.offer is not None
            self._end()  # most others have made a round that does not follow our state
            donors = tuple(peer for peer in signers if peer != self._swarm.me)
            place = outcome.key.fragment, round_ - 1
            self._outlet.emit(FellBehind(*place, outcome.state_digest, donors, ended))
        elif isinstance(role, Member) and is_ours:
            self._finish(role, decision, outcome, now)
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
        self.mine.become(completion)
        self._complete(completion, now)

    def _complete(self, completion: Completion, now: float) -> None:
        """Our attempt has committed: end the offer if we hold all means."""
        outcome = completion.outcome
        event = completion.committed(self.mine.offered_at, now)
        if event is not None:
            self._end()
            self._outlet.emit(event)
            if not is_in_all(outcome, self._swarm.me):
                self.history.doubt(outcome, self._outlet.emit)

    def _end_without_bytes(self, decision: wire.Decision, outcome: wire.Outcome) -> None:
        self.history.doubt(outcome, self._outlet.emit)
        ended = self.mine.offer is not None and self.mine.offer.round == outcome.key.round
        if ended:
            self._end()
        self._outlet.emit(without_bytes(decision, outcome, self._swarm, ended))

    def _abort(self, reason: str, *, is_over: bool) -> None:
        offer = self.mine.offer
        assert offer is not None
        self._aborted_round = offer.round
        self._end(is_over=is_over)
        self._outlet.emit(Aborted(offer.fragment, offer.round, reason, offer.offer_id))

    def _end(self, *, is_over: bool = True) -> None:
        """Forget the open offer and all that was held for it."""
        mine = self.mine
        if mine.member is not None:
            attempt = mine.member.attempt
            self.history.leave(attempt.round, attempt.id, self._outlet.emit, is_over=is_over)
        if mine.asking is not None:
            mine.asking.leave()
        if mine.offer is not None:
            self._coordination.withdraw((mine.offer.fragment, mine.offer.round), self._swarm.me)
        self.mine = OwnOffer()
        self.early.clear()
