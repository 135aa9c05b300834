"""What a coordinator does for its cell beyond its own group: from a closed gathering to BEGIN by way of the
council, and from its members' votes to the one decision of all cells.

Laws: no member begins before the council has; who comes while it gathers is in the cell's group, who goes is
not, and what is left of too few gathers again; a cell's commit is told only with the council's signature and
the roster that the council counted; whatever goes wrong on the way is an abort of this cell's attempt, and
the council hears at once of a round that this cell does not begin. Who speaks for a cell in a round asks its
council again and again how it ends: by that each sees that the other is there (``delegate.patience_s``).

Price: where the council's coordinator dies after it committed and before it told this cell, the cell aborts
what stands; the digests of its next CELL_READY show and heal it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.protocol.rounds import bounds
from p2p_co2.protocol.rounds.attempt import Attempt, check_place, seal_begin
from p2p_co2.protocol.rounds.cells import check_council
from p2p_co2.protocol.rounds.council import Councils, result_within_s
from p2p_co2.protocol.rounds.deadline import Cadence
from p2p_co2.protocol.rounds.decision import Verdicts, open_council_decision, roster_digest, sign_roster
from p2p_co2.protocol.rounds.delegate import Delegate, Voice
from p2p_co2.protocol.rounds.events import FellBehind
from p2p_co2.protocol.rounds.gathering import Gathering, behind_message
from p2p_co2.protocol.rounds.repute import SPOILT_IN_A_ROW
from p2p_co2.protocol.rounds.swarm import Outlet, Swarm, coordination_order, named
from p2p_co2.protocol.rounds.witness import COUNCIL_LOST, Witness, witnesses_of
from p2p_co2.protocol.wire.identity import Identity, PeerId
from p2p_co2.protocol.wire.limits import MAX_MEMBERS
from p2p_co2.protocol.wire.messages_pb2 import (
    Begin,
    CellBegin,
    CellDecision,
    CellReady,
    CellResult,
    CellWaiting,
    Decision,
    Outcome,
    Ready,
    Waiting,
)

Place = tuple[int, int]
WAIT_S = 5.0
"""What a member is told to wait for BEGIN, as often as it asks, while the council gathers."""
PROPOSALS_KEPT = 4
"""The council may begin with what a cell was ready with a moment ago."""


@dataclass
class _Proposal:
    """What the council was told: BEGIN as it would be, and the READYs in it."""

    begin: Begin
    readies: dict[PeerId, Ready]
    told: CellReady


@dataclass
class _Pending:
    """A gathering that has closed and waits for the council. ``is_old``: members came or went since the last
    proposal; ``shortage``: why too few are left to begin."""

    gathering: Gathering
    proposals: list[_Proposal]
    delegate: Delegate | None = None
    is_old: bool = False
    shortage: str = ""


@dataclass
class _Vote:
    """A cell's attempt that began. ``outcome``: how its members voted, once they have; ``roots``: those of
    our cell; ``doomed_at``: when it fails without an outcome, because one of them is gone."""

    attempt: Attempt
    until: float
    roots: frozenset[str] = frozenset()
    doomed_at: float | None = None
    outcome: Outcome | None = None
    roster: bytes = b""
    signature: bytes = b""
    voice: Voice | None = None


class Delegation:
    """See the module. ``begin(place, gathering, now)`` makes a gathering's BEGIN; ``start(place, gathering,
    begin, late, now)`` begins a cell's round; ``reopen(place, gathering)`` lets a gathering wait for more;
    ``abort(place, gathering, attempt, reason)`` gives it up; ``end(attempt, reason)`` an attempt;
    ``tell(outcome, decision)`` passes on a commit."""

    def __init__(
        self, identity: Identity, run: bytes, swarm: Swarm, outlet: Outlet, cadences: list[Cadence], *,
        begin: Callable[[Place, Gathering, float], Begin],
        start: Callable[[Place, Gathering, Begin, set[PeerId], float], None],
        reopen: Callable[[Place, Gathering], object],
        abort: Callable[[Place, Gathering, bytes, str], None],
        end: Callable[[Attempt, str], None],
        tell: Callable[[Outcome, Decision], None],
    ) -> None:  # fmt: skip
        self.councils = Councils(identity, run, swarm, outlet, cadences)
        self.witness = Witness(swarm, outlet)
        self._cadences = cadences
        self._identity, self._run, self._swarm, self._outlet = identity, run, swarm, outlet
        self._make_begin, self._start, self._reopen = begin, start, reopen
        self._abort, self._end, self._tell = abort, end, tell
        self._pending: dict[Place, _Pending] = {}
        self._votes: OrderedDict[bytes, _Vote] = OrderedDict()
        """By the council's attempt."""

    # ---- to BEGIN

    def propose(self, place: Place, gathering: Gathering, now: float) -> None:
        """A gathering has closed: ask the council for a round of all cells."""
        pending = self._pending[place] = _Pending(gathering, [self._proposal(place, gathering, now)])
        # The council may be this peer: what it answers finds the delegate in its place.
        pending.delegate = Delegate(
            place, lambda at: self._ready(place, pending, at), self._swarm, self._outlet, now,
            2 * self._cadences[place[0]].gather_cap_s(place[1]),
        )  # fmt: skip
        self._look(place, pending)

    def _proposal(self, place: Place, gathering: Gathering, now: float) -> _Proposal:
        begin = self._make_begin(place, gathering, now)
        told = CellReady(
            key=begin.key,
            cell=self._swarm.cell,
            state_digest=begin.state_digest,
            members=len(begin.members),
            base_version=min(member.base_version for member in begin.members),
            owners=[part.owner for part in begin.parts],
            parts_within_s=self._parts_within_s(begin, gathering.sums_s),
            before=gathering.cells_before,
        )
        return _Proposal(begin, dict(gathering.readies), told)

    def _parts_within_s(self, begin: Begin, sums_s: float) -> float:
        """What the council should allow for: it gives the exchange of sums twice as long (``sums_s``: what
        our owners need for it), and slow ways between cells show only in how long whole rounds take
        (``result_within_s`` is six times this, and more)."""
        whole_s = self._swarm.over_cells[begin.key.fragment].deadline_s(
            0.0, 0.0, self._swarm.shape.round_cap_s
        )
        return min(self._swarm.shape.parts_cap_s, max(begin.parts_within_s, sums_s / 2, whole_s / 3))

    def _ready(self, place: Place, pending: _Pending, now: float) -> CellReady | None:
        """What our cell is ready with now; None if too few are left."""
        gathering = pending.gathering
        if pending.is_old:
            pending.is_old = False
            pending.shortage = gathering.shortage(gathering.agreeing()[1], now)
            if pending.shortage:
                return None
            pending.proposals.append(self._proposal(place, gathering, now))
            del pending.proposals[:-PROPOSALS_KEPT]
        return pending.proposals[-1].told

    def answers_ready(self, place: Place, message: Ready, sender: PeerId, now: float) -> bool:
        """A READY while the council gathers: it is taken, and BEGIN or the decision will come."""
        pending = self._pending.get(place)
        if pending is None:
            return False
        if pending.gathering.late(message, sender, now):
            self._changed(pending, now)
        self._outlet.send(sender, Waiting(fragment=place[0], round=place[1], begins_within_s=WAIT_S))
        return True

    def withdraw(self, place: Place, peer: PeerId) -> bool:
        """Forget a READY; the council hears of it the next time that it is asked. False if there is none."""
        pending = self._pending.get(place)
        if pending is None or pending.gathering.readies.pop(peer, None) is None:
            return False
        pending.is_old = True
        if not pending.gathering.readies:
            del self._pending[place]
        return True

    def places(self) -> list[Place]:
        """Rounds that wait for the council."""
        return list(self._pending)

    def peers_changed(self, now: float) -> None:
        for place, pending in list(self._pending.items()):
            gone = [peer for peer in pending.gathering.readies if not self._swarm.is_live(peer)]
            for peer in gone:
                self.withdraw(place, peer)
            if gone:
                self._changed(pending, now)
        for vote in self._votes.values():
            lost = not all(map(self._swarm.is_live, map(PeerId, vote.roots)))
            if vote.outcome is None and vote.doomed_at is None and lost:
                vote.doomed_at = now + bounds.GRACE_S  # the others may have all that it owed them

    def _changed(self, pending: _Pending, now: float) -> None:
        pending.is_old = True
        if pending.delegate is not None:
            pending.delegate.cell_changed(now)

    def on_ready(
        self, message: CellReady, sender: PeerId, verdicts: Verdicts, mine: tuple[int | None, bytes],
        now: float,
    ) -> None:  # fmt: skip
        place = message.key.fragment, message.key.round
        order = coordination_order(self._swarm.training(), *place) or [self._swarm.me]
        leads = place in self._pending or order[0] == self._swarm.me
        self.councils.on_ready(message, sender, verdicts, mine, now, leads=leads)

    def on_waiting(self, message: CellWaiting, sender: PeerId, now: float) -> None:
        place = message.fragment, message.round
        pending = self._pending.get(place)
        if pending is not None and pending.delegate is not None:
            pending.delegate.waiting(message, sender, now)
            self._look(place, pending)
            return
        for vote in list(self._votes.values()):
            council = vote.attempt.council
            assert council is not None
            if (council.key.fragment, council.key.round) != place:
                continue
            if council.coordinator != sender:
                if message.refusal == COUNCIL_LOST and vote.voice is not None:
                    vote.voice.told_lost(sender)
                continue
            if message.refusal:
                self._give_up(vote, message.refusal[: bounds.MAX_REASON])
            elif vote.voice is not None:
                vote.voice.answered(now)

    def on_begin(self, message: CellBegin, sender: PeerId, now: float) -> None:
        """The council has begun. Raises ``RemoteProtocolError``."""
        council = message.council
        place = council.key.fragment, council.key.round
        if council.key.attempt in self._votes:
            return  # doubled
        if sender != council.coordinator or self._swarm.cell not in council.cells:
            raise RemoteProtocolError("wrong sender", "CELL_BEGIN")
        check_council(council, self._swarm.cells, self._swarm.shape)
        if len(council.key.attempt) != bounds.ATTEMPT_BYTES:
            raise RemoteProtocolError("wrong attempt length", f"{len(council.key.attempt)} bytes")
        pending = self._pending.get(place)
        begins = pending.proposals if pending is not None else []
        agreed = next((one for one in begins if one.begin.key.attempt == message.attempt), None)
        if pending is None or agreed is None:
            why = "its coordinator is not ready any more"
            self._outlet.send(sender, CellResult(key=council.key, cell=self._swarm.cell, failure=why))
            return
        del self._pending[place]
        if pending.delegate is not None:
            pending.delegate.begun(sender, now)
        late = pending.gathering.readies.keys() - agreed.readies.keys()
        pending.gathering.readies = agreed.readies
        begin = agreed.begin
        begin.council.CopyFrom(council)
        within_s = result_within_s(begin.parts_within_s, council.sums_within_s)
        begin.result_within_s = min(within_s, self._swarm.shape.round_cap_s)
        seal_begin(begin, self._swarm.me)
        self._start(place, pending.gathering, begin, late, now)
        self._lend_voice(council.key.attempt, now)

    def _lend_voice(self, council: bytes, now: float) -> None:
        """From now on we speak for our cell in a round that has begun."""
        vote = self._votes.get(council)
        if vote is not None and vote.voice is None:
            assert vote.attempt.council is not None
            beside = witnesses_of(vote.attempt.council, self._swarm)
            vote.voice = Voice(vote.attempt.council, self._outlet, now, vote.until, beside)

    def _look(self, place: Place, pending: _Pending) -> None:
        """End a gathering whose delegate has failed, or was told that the others are elsewhere, or for which
        too few are left."""
        delegate = pending.delegate
        assert delegate is not None
        if not delegate.failure and delegate.elsewhere is None and not pending.shortage:
            return
        del self._pending[place]
        if pending.shortage:
            self._reopen(place, pending.gathering)
            return
        attempt = pending.proposals[-1].begin.key.attempt
        if delegate.elsewhere is None:
            self._abort(place, pending.gathering, attempt, delegate.failure)
            return
        there = delegate.elsewhere
        donors = [PeerId(donor) for donor in there.donors]
        message = behind_message(*place, there.version, there.state_digest, donors)
        for peer, ready in sorted(pending.gathering.readies.items()):
            if (ready.round - 1, ready.state_digest) != (there.version, there.state_digest):
                self._outlet.send(peer, message)  # else it is there already, and asks again

    # ---- to the decision

    def began(self, attempt: Attempt, now: float) -> None:
        """An attempt over several cells whose votes are counted here."""
        assert attempt.council is not None
        council = attempt.council
        if council.key.attempt not in self._votes:
            whole_s = result_within_s(attempt.parts_within_s, council.sums_within_s)
            until = now + min(2 * whole_s + 2 * bounds.GRACE_S, self._swarm.shape.round_cap_s)
            roots = frozenset(peer for slot in council.roots for peer in slot.peers)
            self._votes[council.key.attempt] = _Vote(attempt, until, roots & attempt.shares.keys())
            while len(self._votes) > bounds.KEEP_ATTEMPTS:
                self._votes.popitem(last=False)

    def voted(self, attempt: Attempt, outcome: Outcome) -> None:
        """How our cell's members voted: told to the council as soon as ``settle`` is called."""
        assert attempt.council is not None
        vote = self._votes.get(attempt.council.key.attempt)
        if vote is not None and vote.outcome is None:
            vote.outcome = outcome

    def took_over(self, attempt: Attempt, now: float) -> None:
        """This cell's coordinator was lost and we count in its place: the council may have decided long
        ago."""
        if attempt.council is not None:
            self._lend_voice(attempt.council.key.attempt, now)

    def _speak(self, vote: _Vote, now: float) -> None:
        assert vote.outcome is not None
        assert vote.attempt.council is not None
        council, outcome = vote.attempt.council, vote.outcome
        result = CellResult(key=council.key, cell=self._swarm.cell, failure=outcome.reason)
        if outcome.committed:
            outcome.run = self._run
            vote.roster, vote.signature = sign_roster(self._identity, outcome)
            result.roster_digest = roster_digest(vote.roster)
            result.digests.extend(part.digest for part in outcome.parts)
        self._lend_voice(council.key.attempt, now)
        assert vote.voice is not None
        vote.voice.vote(result, now)

    def on_decision(self, message: CellDecision, sender: PeerId) -> None:
        """The council has decided. Raises ``RemoteProtocolError``."""
        vote = self._votes.get(message.attempt)
        outcome = open_council_decision(message.decision, self._run)
        if vote is None:
            self._look_behind(outcome, sender)
            return
        assert vote.attempt.council is not None
        if outcome.key != vote.attempt.council.key or not (
            outcome.decided_by == sender == vote.attempt.council.coordinator
        ):
            raise RemoteProtocolError("wrong signer", "CELL_DECISION")
        named = {share.roster_digest for share in outcome.cells}
        if not outcome.committed:
            self._give_up(vote, outcome.reason[: bounds.MAX_REASON] or "the council gave up")
        elif vote.outcome is None or not vote.outcome.committed or roster_digest(vote.roster) not in named:
            # The coordinator that we follow had voted: that commit stands, and is what we need next.
            self._give_up(vote, "it was committed with votes that are not known here")
            self._fall_behind(outcome)
        else:
            del self._votes[message.attempt]
            decision = Decision(
                outcome=message.decision.outcome, signature=message.decision.signature,
                roster=vote.roster, roster_signature=vote.signature, roster_by=self._swarm.me,
            )  # fmt: skip
            self._tell(vote.outcome, decision)

    def _look_behind(self, outcome: Outcome, sender: PeerId) -> None:
        """A commit of the others that our cell had no part in, or that its members know and we do not."""
        place = outcome.key.fragment, outcome.key.round
        check_place(*place, self._swarm.shape)
        if len(outcome.cells) > self._swarm.cells:
            raise RemoteProtocolError("wrong cell", f"{len(outcome.cells)} cells")
        told = all(share.cell != self._swarm.cell for share in outcome.cells) or place in self._pending
        if outcome.committed and outcome.decided_by == sender and told:
            self._fall_behind(outcome)

    def _fall_behind(self, outcome: Outcome) -> None:
        """Send our peer after a commit of other cells."""
        fragment, round_ = outcome.key.fragment, outcome.key.round
        if self._swarm.my_versions.get(fragment, round_) >= round_:
            return
        donors = [PeerId(share.coordinator[: bounds.MAX_PEER_ID]) for share in outcome.cells]
        self._outlet.emit(FellBehind(fragment, round_, b"", tuple(donors[:MAX_MEMBERS]), ends_offer=False))

    def _give_up(self, vote: _Vote, reason: str) -> None:
        assert vote.attempt.council is not None
        del self._votes[vote.attempt.council.key.attempt]
        self._end(vote.attempt, reason)

    def forget(self, attempt: Attempt) -> None:
        """Our own member knows how it ended, or the cell has aborted."""
        if attempt.council is not None:
            self._votes.pop(attempt.council.key.attempt, None)

    # ---- time

    def settle(self, now: float) -> bool:
        """Tell the council of new votes, begin its rounds; True if something moved."""
        for vote in list(self._votes.values()):
            if vote.outcome is not None and (vote.voice is None or vote.voice.result is None):
                self._speak(vote, now)
                return True
        return self.councils.close_complete(now)

    def cell_found(self, cell: int, now: float) -> None:
        for place, pending in list(self._pending.items()):
            if pending.delegate is not None:
                pending.delegate.cell_found(cell, now)
                self._look(place, pending)

    def get_timer(self) -> float | None:
        delegates = [pending.delegate for pending in self._pending.values()]
        times = [delegate.get_timer() for delegate in delegates if delegate is not None]
        times += [vote.voice.get_timer() for vote in self._votes.values() if vote.voice is not None]
        times += [
            vote.doomed_at
            for vote in self._votes.values()
            if vote.outcome is None and vote.doomed_at is not None
        ]
        council_at = self.councils.get_timer()
        return min([*times, *([] if council_at is None else [council_at])], default=None)

    def handle_timer(self, now: float) -> None:
        self.councils.handle_timer(now)
        for place, pending in list(self._pending.items()):
            if pending.delegate is not None and now >= pending.delegate.get_timer():
                pending.delegate.handle_timer(now)
                self._look(place, pending)
        for vote in list(self._votes.values()):
            if vote.voice is not None and now >= vote.voice.get_timer():
                vote.voice.handle_timer(now)
                if vote.voice.failure:
                    self._not_heard(vote.voice, now)
                    self._give_up(vote, vote.voice.failure)
                    continue
            if vote.outcome is None and vote.doomed_at is not None and now >= vote.doomed_at:
                self._give_up_for_all(vote)

    def _not_heard(self, voice: Voice, now: float) -> None:
        """Of a lost council another peer is asked for the next round."""
        if voice.is_lost:
            why = "it was silent in a round over all cells"
            self._swarm.spoilt(PeerId(voice.council.coordinator), why, now, rounds=SPOILT_IN_A_ROW)

    def _give_up_for_all(self, vote: _Vote) -> None:
        """Who sums for all cells is lost: nobody can end the round or need wait. What it owed is gone."""
        council = vote.attempt.council
        assert council is not None
        gone = [peer for peer in vote.roots if not self._swarm.is_live(PeerId(peer))]
        why = f"lost {named(sorted(gone)) or 'one for a moment'}, who sums for all cells"
        self._outlet.send(
            PeerId(council.coordinator), CellResult(key=council.key, cell=self._swarm.cell, failure=why)
        )
        self._give_up(vote, why)
