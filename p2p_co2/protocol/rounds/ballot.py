"""The votes of one attempt as one member hears them.

Laws: one member has one vote, for one outcome; a second one that differs is a lie. A member that has given
up signs no more. Nothing is held beyond one vote and one list of lost parts for each member.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from itertools import chain

from p2p_co2.digest import digest
from p2p_co2.errors import Offence, RemoteProtocolError
from p2p_co2.protocol.rounds import bounds
from p2p_co2.protocol.rounds.attempt import Attempt
from p2p_co2.protocol.rounds.certificate import DECISION_CONTEXT, Seals, check_signature
from p2p_co2.protocol.rounds.swarm import named
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.messages_pb2 import Decision, LostPart, Result, SignedMean, Vote

SIGNATURE_BYTES = 64


class Ballot:
    """``refuse(peer, detail)`` hears of a signature that does not hold. ``believes``: whether this peer would
    believe a commit that these signed; a coordinator may tell too few live peers. ``gave_up``: members that
    make no certificate of this attempt any more. ``lost``: by member, the (part, generation) whose mean it
    lacks. ``two_faced``: owners that signed two means of one part."""

    def __init__(
        self, attempt: Attempt, seals: Seals, refuse: Callable[[PeerId, str], None],
        believes: Callable[[Collection[PeerId]], bool],
    ) -> None:  # fmt: skip
        self._attempt = attempt
        self._seals = seals
        self._refuse = refuse
        self._believes = believes
        self._votes: dict[PeerId, tuple[bytes, bytes]] = {}
        self._counts: Counter[bytes] = Counter()
        self.gave_up: set[PeerId] = set()
        self.lost: dict[PeerId, frozenset[tuple[int, int]]] = {}
        self._refused: dict[PeerId, frozenset[tuple[int, int]]] = {}
        self._means: dict[tuple[int, int], bytes] = {}
        self.two_faced: set[PeerId] = set()

    def hear(self, message: Result, sender: PeerId) -> None:
        """A member's RESULT. Raises ``RemoteProtocolError``."""
        if sender not in self._attempt.shares:
            raise RemoteProtocolError(Offence.NOT_A_MEMBER, "RESULT")
        parts = len(self._attempt.ranges)
        told: list[LostPart | SignedMean] = [*message.lost, *message.refused, *message.means]
        if len(told) > parts * (1 + bounds.MAX_GENERATION) or any(
            one.part >= parts or one.generation > bounds.MAX_GENERATION for one in told
        ):
            raise RemoteProtocolError(Offence.WRONG_PARTS, "lost parts that do not exist")
        if message.gave_up:
            self.gave_up.add(sender)
        self.lost[sender] = frozenset((one.part, one.generation) for one in message.lost)
        if message.refused:
            self._refused[sender] = frozenset((one.part, one.generation) for one in message.refused)
        if message.digest:
            if len(message.digest) != bounds.DIGEST_BYTES or len(message.signature) != SIGNATURE_BYTES:
                raise RemoteProtocolError(Offence.WRONG_DIGEST_LENGTH, "in RESULT")
            vote = message.digest, message.signature
            if sender not in self._votes:
                self._votes[sender] = vote
                self._counts[message.digest] += 1
            elif self._votes[sender] != vote:
                raise RemoteProtocolError("two votes", "it signed two outcomes of one attempt")
        for mean in message.means:  # whoever tells of it: nobody can sign another's
            place = mean.part, mean.generation
            owner = self._attempt.heir(*place)
            if owner not in self.two_faced and self._means.get(place) != mean.digest:
                self._seals.check(mean)
                if self._means.setdefault(place, mean.digest) != mean.digest:
                    self.two_faced.add(owner)

    @property
    def is_split(self) -> bool:
        """Whether some members did not get what others did, as it seems."""
        return len(self._counts) > 1 or bool(self._refused)

    @property
    def is_quiet(self) -> bool:
        """Whether nothing follows yet from what was heard: equal votes, and too few of them."""
        few = len(self._counts) <= 1 and 2 * len(self._votes) < self._attempt.live
        return few and not self.gave_up and not self._refused and not any(self.lost.values())

    def caught(self, voters: Collection[PeerId]) -> Counter[PeerId]:
        """Owners of means that more than half of the other ``voters`` among the members refuse, and how many
        do."""
        owners = (
            {self._attempt.heir(part, generation) for part, generation in refused} - {peer}
            for peer, refused in self._refused.items()
            if peer in voters
        )
        accused = Counter(chain.from_iterable(owners))
        size = len(self._attempt.shares.keys() & set(voters))
        return Counter({who: n for who, n in accused.items() if 2 * n > size - (who in voters)})

    def _of(self, outcome: bytes) -> list[PeerId]:
        return [peer for peer, (voted, _) in self._votes.items() if voted == outcome]

    def leading(self) -> bytes:
        """The digest that a quorum voted for; empty as long as there is none."""
        best = max(self._counts, key=self._weight, default=b"")
        if 2 * self._counts[best] < self._attempt.live:
            return b""
        return best if best and self._may_be_made_by(self._of(best)) else b""

    def _weight(self, outcome: bytes) -> tuple[int, bool, bytes]:
        """Where two have half of the votes each, the coordinator's is the one that may be a quorum."""
        return self._counts[outcome], self._attempt.coordinator in self._of(outcome), outcome

    def voters(self) -> list[PeerId]:
        """Who voted for what leads."""
        return self._of(self.leading())

    def has_voted(self, peer: PeerId) -> bool:
        return peer in self._votes

    def certificate(self, outcome: bytes) -> Decision | None:
        """The commit of an outcome, once a quorum has signed it. A vote with a bad signature is dropped."""
        voted = digest(outcome)
        if self.leading() != voted:
            return None
        votes: list[Vote] = []
        for index, peer in enumerate(self._attempt.shares):
            if self._votes.get(peer, (b"", b""))[0] != voted:
                continue
            try:
                check_signature(peer, DECISION_CONTEXT, outcome, self._votes[peer][1])
            except RemoteProtocolError as error:
                del self._votes[peer]
                self._counts[voted] -= 1
                self._refuse(peer, error.detail)
            else:
                votes.append(Vote(member=index, signature=self._votes[peer][1]))
        return Decision(outcome=outcome, votes=votes) if self.leading() == voted else None

    def may_commit(self, may_vote: Iterable[PeerId]) -> bool:
        """Whether some outcome may still have a quorum, if ``may_vote`` are those that can yet vote."""
        silent = self._votes.keys() | self.gave_up | self._refused.keys()
        open_ = {peer for peer in may_vote if peer not in silent}
        return any(self._may_be_made_by({*self._of(one), *open_}) for one in (*self._counts, b""))

    def _may_be_made_by(self, signers: Collection[PeerId]) -> bool:
        return self._attempt.is_quorum(signers) and self._believes(signers)

    def why(self) -> str:
        """Why there is no certificate, in words."""
        most = max(self._counts.values(), default=0)
        lost = sorted({part for parts in self.lost.values() for part, _ in parts})
        words = f"only {most} of {len(self._attempt.shares)} members signed the same mean"
        if self._refused:
            parts = {self._attempt.heir(*one) for refused in self._refused.values() for one in refused}
            words += f"; {len(self._refused)} do not find their work in the mean of {named(sorted(parts))}"
        return words + (f"; lost parts {', '.join(map(str, lost[: bounds.MAX_NAMED]))}" if lost else "")
