"""What one fragment of a peer remembers of rounds: the last commits, and attempts that are over.

Law: a commit that is kept is never replaced. What is kept is bounded.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable

from p2p_co2.protocol.rounds import bounds
from p2p_co2.protocol.rounds.certificate import Derived, tellers_of
from p2p_co2.protocol.rounds.events import Doubted, Stale
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.messages_pb2 import Decision, Missed, Outcome, PartOutcome, Result


@Derived
def workers_of(outcome: Outcome) -> frozenset[str]:
    """Whose slices are in a committed mean."""
    return frozenset(one.peer for part in outcome.parts for one in part.contributors)


def is_in_all(outcome: Outcome, me: PeerId) -> bool:
    """Whether a slice of ours is in every part of a committed mean."""
    return all(any(one.peer == me for one in part.contributors) for part in outcome.parts)


def missed_in(part: PartOutcome, outcome: Outcome, peer: PeerId) -> Missed | None:
    """Why its slice is not in one part of a committed mean of which it is a member; None if it is."""
    contributors = {one.peer for one in part.contributors}
    absent = (member.peer for member in outcome.members if member.peer not in contributors)
    return dict(zip(absent, part.missed, strict=True)).get(peer)


class History:
    """Where this peer is in one fragment, the last ``KEEP_DECISIONS`` commits, and the attempts that ended.
    ``is_live``: whether a peer is here now; ``met``: who had a vote. A commit may name anybody, so only these
    have worked in it. ``at_work``: who is here and not done with the fragment."""

    def __init__(
        self, is_live: Callable[[PeerId], bool] = lambda peer: True, met: Collection[PeerId] = (),
        at_work: Callable[[], Iterable[str]] | None = None,
    ) -> None:  # fmt: skip
        self._is_live = is_live
        self._at_work = at_work or (lambda: filter(is_live, map(PeerId, self.workers)))
        self._met = met
        self.version: int | None = None
        """The agreed state that we hold; None while joining."""
        self.digest = b""
        self._beyond: tuple[Decision, Outcome] | None = None
        """The last commit that was heard while the one before it was not known either."""
        self.workers: frozenset[str] = frozenset()
        """Whose slices are in the kept commits."""
        self._workers: dict[int, frozenset[str]] = {}
        self._here: dict[int, frozenset[str]] = {}
        """By round of a kept commit: who is in it; who of ``workers`` was here when it was heard."""
        self._beside: dict[int, frozenset[str]] = {}
        """Those of them that were at work then."""
        self._commits: OrderedDict[int, tuple[Decision, Outcome]] = OrderedDict()
        self._ended: deque[bytes] = deque(maxlen=bounds.KEEP_ATTEMPTS)
        self._joined: deque[tuple[int, bytes, bytes]] = deque(maxlen=bounds.KEEP_ATTEMPTS)
        """Attempts that we were in, and in which others may have counted us: round, id, and which offer
        of ours."""
        self._left: deque[tuple[int, bytes]] = deque(maxlen=bounds.KEEP_ATTEMPTS)
        """The last of them that has committed, and those since that we left before they were decided."""

    def go_to(self, version: int, digest: bytes) -> tuple[Decision, Outcome] | None:
        """Our state now. The commit that follows it, if that is known: replays follow one another. What was
        known of another history is forgotten."""
        is_healed = version == self.version and digest != self.digest
        if self.version is not None and (is_healed or not version - 1 <= self.version <= version):
            self.forget(0)  # it goes over to most others
        self.version = version
        self.digest = digest
        if self._beyond is not None and self._beyond[1].key.round == version + 1:
            self.keep(*self._beyond)
            self._beyond = None
        following = self.next_commit()
        if following is None and version + 1 in self._commits:
            self.forget(version + 1)
        return following

    def next_commit(self) -> tuple[Decision, Outcome] | None:
        """The commit that follows the state that we hold, if anybody told us of it."""
        known = None if self.version is None else self.commit(self.version + 1)
        return known if known is not None and known[1].state_digest == self.digest else None

    def reached(self) -> int:
        """The newest version that we hold or have seen committed; -1 while joining."""
        return max([-1 if self.version is None else self.version, *self._commits])

    def hear_beyond(self, decision: Decision, outcome: Outcome) -> None:
        """A commit that does not follow what we know; one of another history hides nothing."""
        is_foreign = outcome.key.round == (self.version or 0) + 1 and outcome.state_digest != self.digest
        self._beyond = None if is_foreign else (decision, outcome)

    def keep(self, decision: Decision, outcome: Outcome) -> None:
        self.end(outcome.key.attempt)
        if outcome.key.round not in self._commits:
            self._commits[outcome.key.round] = (decision, outcome)
            named = map(PeerId, workers_of(outcome))
            known = {peer for peer in named if self._is_live(peer) or peer in self._met}
            self._workers[outcome.key.round] = frozenset(known)
            while len(self._commits) > bounds.KEEP_DECISIONS:
                self._commits.pop(min(self._commits))
            self._note_workers()
            here = filter(self._is_live, map(PeerId, self.workers))
            self._here[outcome.key.round] = frozenset(here)
            self._beside[outcome.key.round] = self._here[outcome.key.round] & {*self._at_work()}

    def end(self, attempt: bytes) -> None:
        """Remember an attempt that is over, so that its stragglers are recognised."""
        if attempt not in self._ended:
            self._ended.append(attempt)

    def leave(self, round_: int, attempt: bytes, emit: Callable[[Stale], None], *, is_over: bool) -> None:
        """``end`` an attempt that we were in, and tell what nobody needs any more: its slices. Its means,
        too, if it has not committed; else slower members need them until the next one ends. Not ``is_over``:
        others may go on with it."""
        self.end(attempt)
        known = self._commits.get(round_)
        has_committed = known is not None and known[1].key.attempt == attempt
        if known is None and not is_over:
            self._left.append((round_, attempt))
            return
        if has_committed:
            self.outrun(round_ + 1, emit)
            self._left.append((round_, attempt))
        emit(Stale(attempt, means=not has_committed))

    def outrun(self, version: int, emit: Callable[[Stale], None]) -> None:
        """``version`` has been reached: means of rounds before its own are of no use to anybody."""
        for attempt in (one for round_, one in self._left if round_ < version):
            emit(Stale(attempt, means=True))
        later = [left for left in self._left if left[0] >= version]
        self._left.clear()
        self._left.extend(later)

    def join(self, round_: int, attempt: bytes, offer_id: bytes) -> None:
        """We are in an attempt, and not alone: what we offer there may be counted, whatever we hear of it."""
        self._joined.append((round_, attempt, offer_id))

    def doubt(self, outcome: Outcome, emit: Callable[[Doubted], None]) -> None:
        """What we offered in other attempts at the round of a commit may have been counted there."""
        key = outcome.key
        if any(round_ == key.round and attempt != key.attempt for round_, attempt, _ in self._joined):
            emit(Doubted(key.fragment))

    def is_settled_by(self, outcome: Outcome, me: PeerId) -> bool:
        """Whether a commit that is replayed leaves open nothing of what we offered. It was doubted when we
        heard of it, or all that we offered last is in it. (Earlier offers for its round held no more.)"""
        offered = [offer_id for round_, _, offer_id in self._joined if round_ == outcome.key.round]
        asked = next((member.offer_id for member in outcome.members if member.peer == me), None)
        is_known = self.commit(outcome.key.round) is not None
        return is_known or (bool(offered) and is_in_all(outcome, me) and asked == offered[-1])

    def forget(self, round_: int) -> None:
        """Drop a commit and all after it: its bytes are nowhere to be had, or it is of another history."""
        for known in [known for known in self._commits if known >= round_]:
            del self._commits[known]
        self._note_workers()

    def _note_workers(self) -> None:
        self._workers = {round_: self._workers[round_] for round_ in self._commits}
        self._here = {round_: self._here[round_] for round_ in self._commits if round_ in self._here}
        self._beside = {round_: self._beside[round_] for round_ in self._here}
        self.workers = frozenset[str]().union(*self._workers.values())

    @property
    def steady(self) -> frozenset[str]:
        """Whose slices are in each of the kept commits; those aside that it took with nobody in sight."""
        workers = [one for one in self._workers.values() if one]
        return frozenset.intersection(*workers) if workers else frozenset()

    @property
    def newest(self) -> frozenset[str]:
        """Whose slices are in the last of them, and who were here then."""
        last = max(self._workers, default=0)
        return self._workers[last] & self._here[last] if self._workers else frozenset()

    def at_once(self, peers: Collection[str]) -> frozenset[str]:
        """The most of ``peers`` that worked at the same time: each in one of these commits and in a later
        one, or the same, so that whose slices are missed now and then counts; or seen at work then."""
        at = {one: [r for r in self._commits if one in self._workers[r] & self._here[r]] for one in peers}
        groups = (
            frozenset(
                one for one in at if one in self._beside[r] or (at[one] and min(at[one]) <= r <= max(at[one]))
            )
            for r in self._commits
        )
        return max(groups, key=len, default=frozenset())

    @property
    def is_full(self) -> bool:
        """Whether nobody is missing in ``workers``: the last commits are known, or all since the start."""
        return len(self._commits) == bounds.KEEP_DECISIONS or 1 in self._commits

    def has_ended(self, attempt: bytes) -> bool:
        return attempt in self._ended

    def verdict(self, heard: Result, me: PeerId) -> Decision | Result | None:
        """How the attempt of ``heard`` ended, for a member that has to ask; None if there is nothing to tell.
        One that votes hears the others' votes, and asks two of them when it says so again."""
        known = self.commit(heard.key.round)
        hears_votes = bool(heard.digest)
        if known is not None:
            return known[0] if not hears_votes or (heard.again and me in tellers_of(*known)) else None
        return None if heard.gave_up or hears_votes else Result(key=heard.key, gave_up=True)

    def held(self) -> dict[str, tuple[int, int]]:
        """As ``Rounds.held``."""
        return {
            "KEEP_DECISIONS": (len(self._commits), bounds.KEEP_DECISIONS),
            "KEEP_ATTEMPTS": (len(self._ended), bounds.KEEP_ATTEMPTS),
        }

    def commit(self, round_: int) -> tuple[Decision, Outcome] | None:
        return self._commits.get(round_)

    def newest_commit(self) -> tuple[Decision, Outcome] | None:
        return self._commits[max(self._commits)] if self._commits else None
