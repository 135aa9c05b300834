"""A coordinator from BEGIN to the decision: it counts RESULTs, gives lost parts away and signs the outcome.

Why two contents of one attempt are never both committed:

1. a complete RESULT is a vote, and a commit needs a quorum of equal votes (``Attempt.is_quorum``: any two
   share a member);
2. a member votes only to the coordinator it follows, and follows only forwards, from the first to its
   successors;
3. a member changes its vote only for a REASSIGN of the coordinator it follows;
4. a successor gives a lost part away only when a quorum has answered it. If one of them holds the part's
   mean, the newest holder sends that same mean again; only a part that nobody of the quorum holds is computed
   anew, for then the predecessor cannot have committed, and no longer can.

So a successor repeats the lost coordinator's verdict or finds that there was none: single-decree Paxos
(Lamport 1998) with votes as promises and the held mean as the value to adopt. It may still abort where the
predecessor had committed and told nobody who can be heard; that commit stands when it surfaces, and the
digests of the next READY heal the rest.

That two attempts of one round are not both committed follows from who begins them, a majority of those who
train (``gathering``): two have a member in common, which knows of the first. But it forgets a commit that it
cannot load. So where there are three, whether they train or are done, a group of two needs both votes. Half
of it with its coordinator is one peer of three, whose state the two others would not load on its word alone,
and would make again without it. Price: on lines too slow for the run such rounds abort that a coordinator
committed alone, with its own work only; they are given ``SAFETY`` times as long, so one that is silent holds
the other up for longer.

A mean that is sent again also costs least: no slice has to travel twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Set

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.protocol.rounds import bounds
from p2p_co2.protocol.rounds.attempt import Attempt, check_digest, read_who_is_in
from p2p_co2.protocol.rounds.deadline import Durations, votes_deadline_s
from p2p_co2.protocol.rounds.swarm import Outlet, Swarm, coordination_order, named, short
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.limits import MAX_MEMBERS
from p2p_co2.protocol.wire.messages_pb2 import Outcome, PartOutcome, Reassign, Result

MAX_SOUND = 4 * MAX_MEMBERS
"""Checked parts that are remembered; honest votes need one for each part."""


class Tally:
    """The votes of one attempt. ``decide`` is called once, with the unsigned outcome."""

    def __init__(
        self, attempt: Attempt, swarm: Swarm, outlet: Outlet, decide: Callable[[Outcome], None], *,
        observed: Durations, now: float,
    ) -> None:  # fmt: skip
        self.attempt = attempt
        self.is_decided = False
        self.successor = False
        self.least_votes = 1
        """So many must be for a commit: of a majority of three peers, two, not its coordinator alone."""
        self._term = 0
        self._swarm, self._outlet, self._decide = swarm, outlet, decide
        self._observed = observed
        self._began_at = now
        self._decide_at: float | None = None
        self._quorum_at: float | None = None
        self.votes_until = now
        """Once there is a quorum: until when the others' votes are waited for."""
        self._owners = list(attempt.owners)
        self._generations = [0] * len(attempt.ranges)
        self._is_held = [False] * len(attempt.ranges)
        """Whether the part's present owner was chosen because it holds the mean."""
        self._lost_by: set[PeerId] = set()
        """Whose parts were given to others."""
        self._askers: set[PeerId] = set()
        """Who asks for the round as if it were not in it."""
        self._lack: list[set[PeerId]] = [set() for _ in attempt.ranges]
        """Per part, who said last that its mean is not there."""
        self._votes: dict[PeerId, Result] = {}
        self._is_pending: dict[PeerId, bool] = {}
        """Of those: whether more is to come."""
        self._contents: dict[PeerId, bytes] = {}
        """Of the complete votes: what each says."""
        self._sound: set[bytes] = set()
        """Parts of votes that were checked: all members say the same, and checking costs."""
        self._heard: set[PeerId] = set()
        self._reassigned = False
        """Whether we gave parts away ourselves: older votes are void from then on."""

    def start(self, now: float) -> None:
        """The coordinator of BEGIN counts from now on."""
        self._decide_at = now + self.attempt.result_within_s

    def take_over(self, owners: list[PeerId], generations: list[int], term: int, now: float) -> None:
        """Our own member has moved to us: decide as a successor, from the owners and generations that it
        knows."""
        if not self.successor:
            self.successor, self._term = True, term
            self._owners, self._generations = list(owners), list(generations)
            self._decide_at = now + self.attempt.parts_within_s + bounds.GRACE_S
        self._evaluate(now)

    def abort(self, reason: str) -> None:
        """Somebody above us has given the round up."""
        if not self.is_decided:
            self._abort(reason)

    def never_told(self, peers: Set[PeerId], now: float) -> None:
        """These still ask for the round: BEGIN never came to them, or they were restarted, or they lie."""
        self._askers |= peers
        self._evaluate(now)

    def _untold(self) -> list[PeerId]:
        """Owners that still ask for the round, for whose means a successor need not wait: too few are left
        who may hold these, so nobody can have committed with them. Their word alone does not show that."""
        if not self.successor:
            return []
        lost_by = self._askers - self._heard
        parts = [i for i, owner in enumerate(self._owners) if owner in lost_by and not self._is_held[i]]
        able = (self.attempt.shares.keys() - lost_by - self._lack[part] for part in parts)
        told = zip(parts, able, strict=True)
        lost = {self._owners[part] for part, peers in told if not self.attempt.is_quorum(peers)}
        return sorted(lost)

    def has_heard(self, peer: PeerId) -> bool:
        return peer in self._heard

    def get_timer(self) -> float | None:
        if self.is_decided or self._decide_at is None or self._quorum_at is None:
            return None if self.is_decided else self._decide_at
        return min(self._decide_at, self.votes_until)

    def handle_timer(self, now: float) -> None:
        timer_at = self.get_timer()
        if self._decide_at is not None and timer_at is not None and now >= timer_at:
            self._evaluate(now, final=now >= self._decide_at)

    def peers_changed(self, now: float) -> None:
        self._evaluate(now)

    def result(self, message: Result, sender: PeerId, now: float) -> None:
        """Count a vote or a report of lost parts. Raises ``RemoteProtocolError``."""
        if sender not in self.attempt.shares:
            raise RemoteProtocolError("not a member", "RESULT")
        self._check(message)
        self._heard.add(sender)
        for told, lack in zip(message.parts, self._lack, strict=True):
            (lack.discard if told.digest else lack.add)(sender)
        stale = [i for i, part in enumerate(message.parts) if part.generation < self._generations[i]]
        if stale and self._reassigned:
            for part in stale:
                self._tell_reassigned(sender, part)
            return
        known = self._votes.get(sender)
        if known is None or _rank(message) >= _rank(known):
            self._votes[sender] = message
            self._is_pending[sender] = _is_pending(message)
            self._contents.pop(sender, None)
            if _is_complete(message):
                self._contents[sender] = _content(message)
        self._evaluate(now)

    def _check(self, message: Result) -> None:
        if len(message.parts) != len(self.attempt.ranges):
            raise RemoteProtocolError("wrong parts", f"{len(message.parts)} in RESULT")
        lost = set(message.lost_parts)
        if len(lost) != len(message.lost_parts) or any(part >= len(message.parts) for part in lost):
            raise RemoteProtocolError("wrong parts", "lost parts that do not exist")
        for index, part in enumerate(message.parts):
            if (part.start_block, part.stop_block) != self.attempt.ranges[index]:
                raise RemoteProtocolError("wrong parts", "other blocks than in BEGIN")
            if part.generation > bounds.MAX_GENERATION:
                raise RemoteProtocolError("wrong generation", str(part.generation))
            if part.digest:
                if index in lost:
                    raise RemoteProtocolError("wrong parts", "a part both held and lost")
                check_digest(part.digest)
                content = part.SerializeToString(deterministic=True)
                if content not in self._sound:
                    read_who_is_in(part, self.attempt)
                    if len(self._sound) < MAX_SOUND:
                        self._sound.add(content)

    # ---- the verdict

    def _evaluate(self, now: float, final: bool = False) -> None:
        if self.is_decided or self._decide_at is None:
            return
        voters, parts = self._best()
        waiting = [peer for peer in self.attempt.shares if self._is_awaited(peer)]
        if self._may_commit(voters):
            if self._has_waited(waiting, now) or final:
                self._note_punctuality(waiting, now)
                self._commit(parts)
                return
        else:
            self._quorum_at = None
        if untold := self._untold():
            self._abort(f"the coordinator was lost before it had told {named(untold)}")
            return
        timed_out = now - self._began_at >= self._swarm.shape.round_cap_s
        if not timed_out and self._reassign_lost(now, heard_all=final or not waiting):
            return
        if final or timed_out or (not waiting and not self._may_still_hear()):
            self._abort(self._why(voters))

    def _may_commit(self, voters: Collection[PeerId]) -> bool:
        return len(voters) >= self.least_votes and self.attempt.is_quorum(voters)

    def _has_waited(self, waiting: list[PeerId], now: float) -> bool:
        """Whether a quorum need not wait longer for the votes of the others. It need not wait at all: who is
        late gets the decision, and goes on receiving the means. But a vote that comes shows that everybody
        has the bytes."""
        if self._quorum_at is None:
            self._quorum_at = now
            self.votes_until = now + votes_deadline_s(now - self._began_at, self._observed)
        return now >= self.votes_until or not any(map(self._swarm.votes.is_awaited, waiting))

    def _note_punctuality(self, waiting: list[PeerId], now: float) -> None:
        assert self._quorum_at is not None
        late = [peer for peer in waiting if self._swarm.votes.is_awaited(peer)]
        # A vote that missed the deadline took longer than we know: count twice the wait so that it can grow.
        waited_s = now - self._quorum_at
        self._observed.add(2 * waited_s if late else waited_s)
        for peer in self._votes:
            self._swarm.votes.came(peer)
        for peer in late:
            self._swarm.votes.missed(peer, self.attempt.id)

    def _is_awaited(self, peer: PeerId) -> bool:
        return self._swarm.is_live(peer) and self._is_pending.get(peer, True)

    def _may_still_hear(self) -> bool:
        """A successor waits for its deadline: somebody may hold the predecessor's decision. A member that
        reported lost parts may still complete them, if enough of the group is left for that to matter."""
        if self.successor:
            return True
        return any(vote.lost_parts for vote in self._votes.values()) and self._may_commit(self._living())

    def _best(self) -> tuple[list[PeerId], list[PartOutcome]]:
        """The largest set of equal complete votes."""
        camps: dict[bytes, list[PeerId]] = {}
        for peer in sorted(self._contents):
            camps.setdefault(self._contents[peer], []).append(peer)
        if not camps:
            return [], []
        best = max(camps, key=lambda content: (len(camps[content]), content))
        return camps[best], list(self._votes[camps[best][0]].parts)

    def _reassign_lost(self, now: float, heard_all: bool) -> bool:
        """Give lost parts to other owners; True if one was, or the round ended over it."""
        parts = self._to_reassign(heard_all)
        if not parts or not self._may_reassign():
            return False
        holders = {part: self._holders(part) for part in parts}
        if self.successor and any(held and not living for held, living in holders.values()):
            return False  # the value to adopt is out of reach: wait, somebody may hold the decision
        for part in parts:
            told = max(vote.parts[part].generation for vote in self._votes.values())
            self._generations[part] = max(self._generations[part], told)
            living = holders[part][1]
            self._lost_by.add(self._owners[part])
            heirs = living or [peer for peer in self._living() if peer != self._owners[part]]
            first = self._term * (bounds.MAX_REASSIGNS + 1)
            generation = max(self._generations[part] + 1, first)
            if generation > first + bounds.MAX_REASSIGNS or not heirs:
                self._abort(f"part {part} was lost again and again, last by {short(self._owners[part])}")
                return True
            self._owners[part] = self._heir(heirs)
            self._generations[part] = generation
            self._is_held[part] = bool(living)
        self._votes.clear()
        self._is_pending.clear()
        self._contents.clear()
        self._reassigned = True
        self._decide_at = now + self.attempt.result_within_s
        for part in parts:
            for peer in self.attempt.shares:
                self._tell_reassigned(peer, part)
        return True

    def _heir(self, heirs: list[PeerId]) -> PeerId:
        """Of those who may take a lost part, the one with the fewest. Who was given none by BEGIN has a link
        that could not carry one (``parts``), and comes after all others, but for those who lost one: BEGIN
        may never have come to them, and they have the fewest since."""
        loads, given, lost = Counter(self._owners), set(self.attempt.owners), self._lost_by
        return min(heirs, key=lambda peer: (peer in lost, peer not in given, loads[peer], heirs.index(peer)))

    def _holders(self, part: int) -> tuple[list[PeerId], list[PeerId]]:
        """Who holds the newest mean of a part: all who voted so, and those of them who live."""
        generations = {p: v.parts[part].generation for p, v in self._votes.items() if v.parts[part].digest}
        newest = max(generations.values(), default=0)
        held = [peer for peer in self.attempt.shares if generations.get(peer) == newest]
        return held, [peer for peer in held if self._swarm.is_live(peer)]

    def _to_reassign(self, heard_all: bool) -> list[int]:
        """The parts without which no quorum can be complete. Once everybody has spoken: as few of the lost
        parts as leave a quorum with nothing else lost, those lost most often first."""
        lost = Counter(part for vote in self._votes.values() for part in vote.lost_parts)
        chosen = [part for part in sorted(lost) if not self._may_commit(self._possible_voters(part))]
        if heard_all:
            for part in sorted(lost, key=lambda part: (-lost[part], part)):
                able = [p for p, vote in self._votes.items() if set(vote.lost_parts) <= set(chosen)]
                if self._may_commit(able):
                    break
                if part not in chosen:
                    chosen.append(part)
        return chosen

    def _possible_voters(self, part: int) -> list[PeerId]:
        able = []
        for peer in self.attempt.shares:
            vote = self._votes.get(peer)
            if (vote is None and self._swarm.is_live(peer)) or (
                vote is not None and part not in vote.lost_parts
            ):
                able.append(peer)
        return able

    def _may_reassign(self) -> bool:
        answered = not self.successor or self.attempt.is_quorum(self._votes)
        return answered and self._may_commit(self._living())

    def _living(self) -> list[PeerId]:
        order = coordination_order(self.attempt.shares, self.attempt.fragment, self.attempt.round)
        return [peer for peer in order if self._swarm.is_live(peer)]

    def _tell_reassigned(self, peer: PeerId, part: int) -> None:
        message = Reassign(
            key=self.attempt.key(), part=part, owner=self._owners[part],
            generation=self._generations[part],
            parts_within_s=0.0 if self._is_held[part] else self.attempt.parts_within_s,
        )  # fmt: skip
        self._outlet.send(peer, message)

    def _why(self, voters: list[PeerId]) -> str:
        group = len(self.attempt.shares)
        who = "the coordinator was lost and " if self.successor else ""
        silent = [peer for peer in self.attempt.shares if peer not in self._votes]
        lost = sorted({part for vote in self._votes.values() for part in vote.lost_parts})
        why = f"{who}only {len(voters)} of {group} members hold the same mean"
        if silent:
            why += f"; no RESULT from {named(silent)}"
        if lost:
            why += f"; lost parts {', '.join(f'{part} (owner {short(self._owners[part])})' for part in lost)}"
        return why

    def _commit(self, parts: list[PartOutcome]) -> None:
        self._finish(Outcome(committed=True, parts=parts))

    def _abort(self, reason: str) -> None:
        self._finish(Outcome(committed=False, reason=reason[: bounds.MAX_REASON]))

    def _finish(self, outcome: Outcome) -> None:
        self.is_decided = True
        outcome.key.CopyFrom(self.attempt.key())
        outcome.state_digest = self.attempt.state_digest
        outcome.members.extend(self.attempt.members())
        self._decide(outcome)


def _is_complete(vote: Result) -> bool:
    return all(part.digest for part in vote.parts)


def _is_pending(vote: Result) -> bool:
    """Whether a part is neither held nor lost: the member will tell more."""
    return any(not part.digest and i not in vote.lost_parts for i, part in enumerate(vote.parts))


def _content(vote: Result) -> bytes:
    """What a vote says: a mean is the same mean in whatever generation it came."""
    bare = Result(parts=vote.parts)
    for part in bare.parts:
        part.generation = 0
    return bare.SerializeToString(deterministic=True)


def _rank(vote: Result) -> tuple[int, int, int]:
    """Later news of one member ranks higher, in whatever order it arrives."""
    held = sum(bool(part.digest) for part in vote.parts)
    return sum(part.generation for part in vote.parts), held, -len(vote.lost_parts)
