"""All rounds that this peer coordinates: from the first READY to the signed outcome.

Laws: a peer acts as coordinator for whoever asks it, whatever its own state, because a split view is healed
by digests and not by silence; but it begins no second attempt of a round while it is itself in one that is
not decided, and signs no commit of a round of which it knows another: where views differ, at the end of a run
above all, two attempts of one round could both commit. One sender occupies one gathering per fragment, so
what is held is bounded by the live peers; a decided round is answered from the kept decision.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.protocol.rounds import bounds
from p2p_co2.protocol.rounds.ahead import farthest_version
from p2p_co2.protocol.rounds.attempt import Attempt, check_ready, read_begin, read_key
from p2p_co2.protocol.rounds.begun import PASSED, Begun, passed
from p2p_co2.protocol.rounds.deadline import Cadence, Durations, ReadyHistory
from p2p_co2.protocol.rounds.decision import Verdicts, content_of, sign_outcome
from p2p_co2.protocol.rounds.events import Began
from p2p_co2.protocol.rounds.gathering import Gathering, attempt_nonce, behind_message
from p2p_co2.protocol.rounds.member import Member
from p2p_co2.protocol.rounds.swarm import Outlet, Swarm
from p2p_co2.protocol.rounds.tally import Tally
from p2p_co2.protocol.wire.identity import Identity, PeerId
from p2p_co2.protocol.wire.messages_pb2 import (
    Decision,
    Listen,
    Outcome,
    Ready,
    Result,
    RoundKey,
    Waiting,
)

Place = tuple[int, int]
"""(fragment, round)"""
WAIT_S = 5.0
"""What a peer that is too late is told to wait, where it is not known how long the round lasts."""
NEVER_TOLD = "the coordinator was lost before it had told its successor"


class Coordination:
    """The coordinator's side of all fragments."""

    def __init__(self, identity: Identity, run: bytes, swarm: Swarm, outlet: Outlet, fragments: int) -> None:
        self._identity, self._run, self._swarm, self._outlet = identity, run, swarm, outlet
        self._gatherings: dict[Place, Gathering] = {}
        self._begun: dict[Place, Begun] = {}
        self._tallies: dict[bytes, Tally] = {}
        self._history = [ReadyHistory() for _ in range(fragments)]
        self.observed = [Durations() for _ in range(fragments)]
        """Per fragment, from BEGIN to the last slice, as the parts that we own have seen it."""
        share = bounds.GATHER_SHARE_BY_STEPS if swarm.shape.counts_steps else bounds.GATHER_SHARE
        self.cadences = [Cadence(swarm.shape.round_s, share) for _ in range(fragments)]
        self._votes = [Durations() for _ in range(fragments)]
        """Per fragment, from a quorum to the last vote."""
        self._votes_until: OrderedDict[bytes, float] = OrderedDict()
        """Until when a vote for an attempt that has committed would have been in time."""
        self._moved: list[tuple[int, frozenset[PeerId]]] = [(0, frozenset())] * fragments
        self._askers: list[set[PeerId]] = [set() for _ in range(fragments)]
        """Per fragment, who asks us for the round that we are in: live peers."""
        self._counter = 0
        self.known: Callable[[Place], tuple[Decision, Outcome] | None] = lambda place: None
        """The commit of a round that we have heard of."""
        self.joined_until: Callable[[Place], float | None] = lambda place: None
        """When to look again at an attempt of a round that we are in; None if we are in none that is open."""

    # ---- gathering

    def on_ready(
        self, message: Ready, sender: PeerId, verdicts: Verdicts, mine: tuple[int | None, bytes], now: float
    ) -> None:
        """A peer wants to be in a round. ``mine`` is our own version and digest. Raises
        ``RemoteProtocolError``."""
        check_ready(message, self._swarm.shape)
        if not self._swarm.is_live(sender):
            raise RemoteProtocolError("unknown peer", "READY")
        place = (message.fragment, message.round)
        if message.withdrawn:
            self.withdraw(place, sender)
            return
        if self._answer_decided(message, sender, verdicts, mine):
            return
        if place in self._begun:
            self._answer_begun(self._begun[place], message, sender, now)
            return
        if self._is_elsewhere(place, [sender], now):
            self._note_asker(place, sender, now)
            return
        if self._leaves_it_to_others():
            self._outlet.send(sender, Waiting(fragment=place[0], round=place[1]))
            return
        for other in [key for key in self._gatherings if key[0] == message.fragment and key != place]:
            self.withdraw(other, sender)
        gathering = self._gatherings.get(place)
        if gathering is None:
            history, cadence = self._history[message.fragment], self.cadences[message.fragment]
            history.forget(message.round)
            gathering = Gathering(
                *place, self._swarm, self._outlet, history=history, cadence=cadence, now=now
            )
            self._gatherings[place] = gathering
        before = verdicts.commit(message.round - 1)
        if before is not None:
            self._moved[message.fragment] = (
                message.round - 1, frozenset(PeerId(member.peer) for member in before[1].members),
            )  # fmt: skip
        gathering.ready(message, sender, now)

    def _leaves_it_to_others(self) -> bool:
        """Whether this peer trains no more and others do: as soon as those who ask it hear of that they ask
        one of these, and a round that began here would lack them."""
        return not self._swarm.is_training(self._swarm.me) and bool(self._swarm.training())

    def _answer_decided(
        self, message: Ready, sender: PeerId, verdicts: Verdicts, mine: tuple[int | None, bytes]
    ) -> bool:
        known, newest = verdicts.commit(message.round), verdicts.newest_commit()
        version, digest = mine
        donors = [PeerId(member.peer) for member in newest[1].members] if newest else []
        if known is not None and known[1].state_digest == message.state_digest:
            self._outlet.send(sender, known[0])
        elif version is not None and version >= message.round:
            donors = sorted({*donors, self._swarm.me} - {sender})
            self._outlet.send(
                sender, behind_message(message.fragment, message.round, version, digest, donors)
            )
        elif newest is not None and message.round <= newest[1].key.round <= self._believable(message):
            base = newest[1].key.round - 1
            behind = behind_message(message.fragment, message.round, base, newest[1].state_digest, donors)
            self._outlet.send(sender, behind)
        else:
            return False
        return True

    def _believable(self, message: Ready) -> int:
        """The farthest commit after whose base the asker lets itself be sent, if it hears what we hear."""
        return farthest_version(self._swarm, message.fragment) + 1

    def _answer_begun(self, begun: Begun, message: Ready, sender: PeerId, now: float) -> None:
        if begun.missed_begin(message, sender):
            self._outlet.send(sender, begun.left(now))
            return
        if sender not in begun.late and now <= begun.in_time_until:
            self._history[message.fragment].arrived(message.round, now)
            self._swarm.readies.came(sender)
        begun.late.add(sender)
        self._let_listen(begun, message.state_digest, sender, now)
        ends_at = begun.tally.get_timer()
        within_s = max(bounds.SOON_S, ends_at - now) if ends_at is not None else WAIT_S
        self._outlet.send(
            sender, Waiting(fragment=message.fragment, round=message.round, begins_within_s=within_s)
        )

    def on_listen(self, message: Listen, sender: PeerId, now: float) -> None:
        """A peer wants to hear a round that it is not in, if it has begun."""
        begun = self._begun.get((message.key.fragment, message.key.round))
        if begun is not None:
            self._let_listen(begun, message.state_digest, sender, now)

    def _let_listen(self, begun: Begun, state_digest: bytes, peer: PeerId, now: float) -> None:
        """Tell ``peer``, which is too late, who owns what. A member knows."""
        if peer not in begun.tally.attempt.shares and state_digest == begun.begin.state_digest:
            self._outlet.send(peer, begun.left(now))

    def _is_elsewhere(self, place: Place, peers: Iterable[PeerId], now: float) -> bool:
        """Whether an attempt of the round has committed or we are in one; ``peers``, who asked, are told."""
        known, until = self.known(place), self.joined_until(place)
        if known is None and until is None:
            return False
        within_s = max(bounds.SOON_S, (until or now) - now)
        for peer in peers:
            waiting = Waiting(fragment=place[0], round=place[1], begins_within_s=within_s)
            self._outlet.send(peer, waiting if known is None else known[0])
        return True

    def _note_asker(self, place: Place, peer: PeerId, now: float) -> None:
        """``peer`` asks for a round that we are in: if it should be in it, too, it does not know."""
        if self.joined_until(place) is not None:
            self._askers[place[0]].add(peer)
            for tally in [one for one in self._tallies.values() if one.attempt.fragment == place[0]]:
                self._tell_askers(tally, now)

    def _tell_askers(self, tally: Tally, now: float) -> None:
        tally.never_told(self._askers[tally.attempt.fragment], now)

    def withdraw(self, place: Place, peer: PeerId) -> None:
        """Forget a READY: its peer left, wants another round or coordinator, or has ended the offer."""
        gathering = self._gatherings.get(place)
        if gathering is not None:
            gathering.readies.pop(peer, None)
            if not gathering.readies:
                del self._gatherings[place]

    def close_complete(self, now: float) -> bool:
        """Close the gatherings that need not or may not wait longer; True if there was one."""
        for place, gathering in list(self._gatherings.items()):
            if gathering.may_close(self._moved_to(place), now):
                if self._is_elsewhere(place, gathering.readies, now):
                    del self._gatherings[place]
                    return True
                self._close(place, gathering, now)
                return True
        return False

    def _moved_to(self, place: Place) -> frozenset[PeerId]:
        """Peers known to have made the round before."""
        version, moved = self._moved[place[0]]
        return moved if version == place[1] - 1 else frozenset()

    def _close(self, place: Place, gathering: Gathering, now: float) -> None:
        del self._gatherings[place]
        digest, camp = gathering.agreeing()
        shortage = gathering.shortage(camp, now)
        if shortage:
            self._abort_gathering(place, gathering, self._nonce(place, now), digest, shortage)
            return
        gathering.note_punctuality(self._moved_to(place))
        self._start(place, gathering, now)

    def _nonce(self, place: Place, now: float) -> bytes:
        self._counter += 1
        return attempt_nonce(self._swarm.me, *place, self._counter, now)

    def _start(self, place: Place, gathering: Gathering, now: float) -> None:
        begin = gathering.begin(self._nonce(place, now), self.observed[place[0]])
        tally = self._tally(read_begin(begin, self._swarm.me, self._swarm.shape), now)
        tally.least_votes = gathering.least_votes
        tally.start(now)
        self._begun[place] = begun = Begun(begin, tally, gathering, now)
        group = tuple(tally.attempt.shares)
        begun.late.update(peer for peer in gathering.alike(begin.state_digest) if peer not in group)
        waited_s = now - gathering.first_at
        self._outlet.emit(Began(*place, group, waited_s, gathering.deadline_s, begin.parts_within_s))
        for peer in group:
            self._outlet.send(peer, begin)
        self._end_passed(place[0])

    def _end_passed(self, fragment: int) -> None:
        """Rounds that nobody waits for any more."""
        rounds = [begun for place, begun in self._begun.items() if place[0] == fragment]
        for tally in [begun.tally for begun in passed(rounds, self._swarm.is_live)]:
            if tally.is_decided:
                self._drop(tally)
            else:
                tally.abort(PASSED)

    def _drop(self, tally: Tally) -> None:
        """Count no more: who asks for the round again gathers it anew."""
        self._tallies.pop(tally.attempt.id, None)
        place = tally.attempt.fragment, tally.attempt.round
        if place in self._begun and self._begun[place].tally is tally:
            del self._begun[place]

    def _abort_gathering(
        self, place: Place, gathering: Gathering, attempt: bytes, digest: bytes, reason: str
    ) -> None:
        key = RoundKey(fragment=place[0], round=place[1], attempt=attempt)
        outcome = Outcome(
            key=key,
            run=self._run,
            committed=False,
            reason=reason[: bounds.MAX_REASON],
            state_digest=digest,
            members=gathering.members(),
        )
        decision = sign_outcome(self._identity, outcome)
        for peer in gathering.heal():
            self._outlet.send(peer, decision)

    # ---- counting

    def _tally(self, attempt: Attempt, now: float) -> Tally:
        observed = self._votes[attempt.fragment]
        tally = Tally(attempt, self._swarm, self._outlet, self._decide, observed=observed, now=now)
        self._tallies[attempt.id] = tally
        return tally

    @property
    def counts_for_others(self) -> bool:
        """Whether we count the votes of a round that we are not in."""
        return any(self._swarm.me not in tally.attempt.shares for tally in self._tallies.values())

    def counts(self, attempt: bytes) -> bool:
        """Whether we are counting the votes of an attempt."""
        return attempt in self._tallies

    def has_signed_commit(self, attempt: bytes) -> bool:
        """Of one of the last attempts."""
        return attempt in self._votes_until

    def on_result(self, message: Result, sender: PeerId, mine: Attempt | None, now: float) -> None:
        """A vote. ``mine`` is the attempt if our own member is in it: we may become its coordinator.

        Raises ``RemoteProtocolError``.
        """
        _, _, attempt = read_key(message.key, self._swarm.shape)
        tally = self._tallies.get(attempt)
        if tally is None:
            if mine is None:
                raise RemoteProtocolError("unknown round", "RESULT")
            tally = self._tally(mine, now)
        tally.result(message, sender, now)

    def decline(self, message: Result, sender: PeerId, verdicts: Verdicts, digest: bytes) -> None:
        """``sender`` votes to us, as to the successor of a lost coordinator, in an attempt whose BEGIN never
        came here: we can decide nothing, and it would wait for us, and all who are not in it for it. As the
        coordinator that it follows we end it."""
        outcome = Outcome(key=message.key, run=self._run, state_digest=digest, reason=NEVER_TOLD)
        outcome.members.add(peer=self._swarm.me, weight=1.0, base_version=message.key.round - 1)
        decision = sign_outcome(self._identity, outcome)
        verdicts.keep(decision, outcome)
        self._outlet.send(sender, decision)

    def late_result(self, message: Result, sender: PeerId, now: float) -> None:
        """A vote for what has been decided: it may have been in time all the same."""
        if now <= self._votes_until.get(message.key.attempt, now - 1) and not message.lost_parts:
            self._swarm.votes.came(sender)

    def take_over(self, member: Member, now: float) -> None:
        """Our own member follows us from now on: we decide in the place of a lost coordinator."""
        tally = self._tallies.get(member.attempt.id) or self._tally(member.attempt, now)
        tally.take_over(*member.ownership(), member.term(), now)
        self._tell_askers(tally, now)

    def member_left(self, attempt: Attempt) -> None:
        """Our own member has the outcome: a tally that only waited to succeed is over."""
        self._askers[attempt.fragment].clear()
        tally = self._tallies.get(attempt.id)
        if tally is not None and (tally.successor or tally.get_timer() is None):
            self._drop(tally)

    def _decide(self, outcome: Outcome) -> None:
        """Sign the outcome and tell it."""
        place = (outcome.key.fragment, outcome.key.round)
        known = self.known(place) if outcome.committed else None
        if known is not None and content_of(known[1]) != content_of(outcome):
            # Nothing that was offered here is lost: the members carry it over and catch up.
            outcome.committed, outcome.reason = False, "another attempt of this round was committed"
            outcome.ClearField("parts")
        outcome.run = self._run
        self._tell(outcome, sign_outcome(self._identity, outcome))

    def _tell(self, outcome: Outcome, decision: Decision) -> None:
        """Tell the group, and of a commit every live peer: it is their next version too."""
        place = (outcome.key.fragment, outcome.key.round)
        tally = self._tallies.pop(outcome.key.attempt, None)
        if tally is not None and outcome.committed:
            self._votes_until[outcome.key.attempt] = tally.votes_until
            while len(self._votes_until) > bounds.KEEP_ATTEMPTS:
                self._votes_until.popitem(last=False)
        audience = {PeerId(member.peer) for member in outcome.members}
        begun = self._begun.get(place)
        if begun is not None and begun.tally.attempt.id == outcome.key.attempt:
            audience |= begun.late
            del self._begun[place]
        if outcome.committed:
            audience |= self._swarm.live.keys()
        for peer in sorted(audience):
            self._outlet.send(peer, decision)

    def held(self) -> dict[str, tuple[int, int]]:
        """As ``Rounds.held``. One sender occupies one gathering per fragment, and is in the last round
        of it that began: those that it has left end (``begun.passed``)."""
        most = len(self._history) * len(self._swarm.live)
        return {
            "GATHERINGS": (len(self._gatherings), most),
            "BEGUN": (len(self._begun), most),
            "TALLIES": (len(self._tallies), most + len(self._history)),
        }

    # ---- time and the swarm

    def peers_changed(self, now: float) -> None:
        if self._leaves_it_to_others():
            for place, gathering in self._gatherings.items():
                for peer in filter(self._swarm.is_live, gathering.readies):
                    self._outlet.send(peer, Waiting(fragment=place[0], round=place[1]))
            self._gatherings.clear()
        for place, gathering in list(self._gatherings.items()):
            for peer in [peer for peer in gathering.readies if not self._swarm.is_live(peer)]:
                self.withdraw(place, peer)
        for tally in list(self._tallies.values()):
            tally.peers_changed(now)

    def get_timer(self) -> float | None:
        if not self._gatherings and not self._tallies:
            return None  # most of the time
        times = [gathering.get_timer() for gathering in self._gatherings.values()]
        times += [at for tally in self._tallies.values() if (at := tally.get_timer()) is not None]
        return min(times, default=None)

    def handle_timer(self, now: float) -> None:
        for tally in list(self._tallies.values()):
            tally.handle_timer(now)
