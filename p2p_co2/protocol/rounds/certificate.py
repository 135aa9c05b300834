"""Certificates: a commit is an outcome with the signatures of a quorum of its members.

All members that hold a round's mean make the same ``Outcome``, byte for byte, and sign it. A quorum of
signatures is the commit, and anybody may pass it on (``Decision``). Laws: an outcome is read only after its
certificate held; any two quorums of the same live peers share a member. (``docs/design`` says why.)
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import lru_cache
from struct import pack
from typing import Generic, NamedTuple, TypeVar

from p2p_co2.errors import Offence, RemoteProtocolError
from p2p_co2.protocol.rounds import bounds
from p2p_co2.protocol.rounds.attempt import (
    Attempt,
    capped,
    check_digest,
    check_live,
    check_missed,
    is_quorum,
    read_contributors,
    read_key,
    read_members,
)
from p2p_co2.protocol.rounds.events import PayloadShape
from p2p_co2.protocol.rounds.parts import BlockRange, covers
from p2p_co2.protocol.rounds.rank import coordination_order
from p2p_co2.wire.identity import Identity, PeerId, parsed, verify
from p2p_co2.wire.limits import MAX_MEMBERS, MAX_MESSAGE_BYTES, MAX_PEER_ID
from p2p_co2.wire.messages_pb2 import Decision, Outcome, PartOutcome, SignedMean

DECISION_CONTEXT = b"p2p-co2 decision"
MEAN_CONTEXT = b"p2p-co2 mean"
TELLERS = 2
_T = TypeVar("_T")


def outcome_of(attempt: Attempt, run: bytes, parts: Collection[PartOutcome]) -> bytes:
    """The serialised ``Outcome`` that members of ``attempt`` with these means sign."""
    outcome = Outcome(
        key=attempt.key(), run=run, coordinator=attempt.coordinator, state_digest=attempt.state_digest,
        members=attempt.members(), parts=parts, live=attempt.live,
    )  # fmt: skip
    return outcome.SerializeToString(deterministic=True)


check_signature = lru_cache(4 * MAX_MEMBERS)(verify)
"""Peers of one process share it."""


class Signer(NamedTuple):
    """Who signs, in which run (its digest)."""

    identity: Identity
    run: bytes

    def vote(self, outcome: bytes) -> bytes:
        return self.identity.sign(DECISION_CONTEXT, outcome)


class Seals:
    """Owners' signatures under the means of one attempt. An owner signs one mean of a part in a generation,
    so two that differ prove to anybody that it lied. They are of no use in another attempt or run."""

    def __init__(self, signer: Signer, attempt: Attempt) -> None:
        self._signer = signer
        self._attempt = attempt

    def _content(self, mean: SignedMean) -> bytes:
        return self._signer.run + self._attempt.id + pack("<II", mean.part, mean.generation) + mean.digest

    def sign(self, mean: SignedMean) -> None:
        mean.signature = self._signer.identity.sign(MEAN_CONTEXT, self._content(mean))

    def check(self, mean: SignedMean) -> None:
        """Raise ``RemoteProtocolError`` unless the owner of that part in that generation signed it."""
        check_digest(mean.digest)
        owner = self._attempt.heir(mean.part, mean.generation)
        check_signature(owner, MEAN_CONTEXT, self._content(mean), mean.signature)


def open_decision(decision: Decision, run: bytes, shape: PayloadShape) -> Outcome:
    """The checked outcome of a certificate of this run. Raises ``RemoteProtocolError`` without a quorum of
    good signatures, for another run, or an outcome that no honest peer signs. Whether its signers are who
    they should be is the caller's question. The outcome is shared and must not be written to."""
    if len(decision.outcome) > MAX_MESSAGE_BYTES or len(decision.votes) > MAX_MEMBERS:
        raise RemoteProtocolError(Offence.TOO_LARGE, f"{len(decision.outcome)} bytes, or its votes")
    votes = tuple((vote.member, vote.signature) for vote in decision.votes)
    return _open(decision.outcome, votes, run, shape)


@lru_cache(2 * bounds.KEEP_DECISIONS)
def _open(content: bytes, votes: tuple[tuple[int, bytes], ...], run: bytes, shape: PayloadShape) -> Outcome:
    outcome = check_certificate(content, votes, run)
    _check_outcome(outcome, shape)
    return outcome


def check_certificate(content: bytes, votes: Collection[tuple[int, bytes]], run: bytes) -> Outcome:
    """The outcome, if a quorum of its members signed it; what else it says is not checked. Raises
    ``RemoteProtocolError``."""
    outcome = parsed(Outcome, content)
    if outcome.run != run:
        raise RemoteProtocolError("wrong run", "a decision of another run")
    members = [member.peer for member in outcome.members]
    if len(members) > MAX_MEMBERS or any(index >= len(members) for index, _ in votes):
        raise RemoteProtocolError("wrong group", f"{len(members)} members, or votes of others")
    check_live(outcome.live, len(members))
    signers = {members[index]: signature for index, signature in votes}
    if not is_quorum(signers.keys(), outcome.live, outcome.coordinator):
        raise RemoteProtocolError("no quorum", f"{len(signers)} signatures of {outcome.live} peers")
    for peer, signature in signers.items():
        check_signature(peer, DECISION_CONTEXT, content, signature)
    return outcome


def _check_outcome(outcome: Outcome, shape: PayloadShape) -> None:
    fragment, round_, _ = read_key(outcome.key, shape)
    check_digest(outcome.state_digest)
    weights = capped(read_members(outcome.members, round_), shape.weight_cap)
    if len(outcome.coordinator) > MAX_PEER_ID or len(outcome.parts) > MAX_MEMBERS:
        raise RemoteProtocolError(Offence.TOO_LARGE, "coordinator or parts of an outcome")
    if not covers([BlockRange(p.start_block, p.stop_block) for p in outcome.parts], shape.blocks[fragment]):
        raise RemoteProtocolError(Offence.WRONG_PARTS, "they do not cover the blocks once, in order")
    for part in outcome.parts:
        check_digest(part.digest)
        read_contributors(part.contributors, weights, shape.counts_whole)
        check_missed(part.missed, len(weights) - len(part.contributors))


def signers_of(decision: Decision, outcome: Outcome) -> list[PeerId]:
    """Who signed an opened certificate."""
    return [PeerId(outcome.members[vote.member].peer) for vote in decision.votes]


def tellers_of(decision: Decision, outcome: Outcome) -> list[PeerId]:
    """Which signers pass an opened certificate on to peers that may lack it: the first by rank."""
    ranked = coordination_order(signers_of(decision, outcome), outcome.key.fragment, outcome.key.round)
    return ranked[:TELLERS]


class Derived(Generic[_T]):
    """``make(outcome)``, remembered by the outcome's identity: several ask who is in one, and of a large
    group it takes milliseconds. What is derived is shared, so nobody writes to it. Any thread may ask."""

    def __init__(self, make: Callable[[Outcome], _T]) -> None:
        self._make = make
        self.__doc__ = make.__doc__
        self._known: dict[int, tuple[Outcome, _T]] = {}

    def __call__(self, outcome: Outcome) -> _T:
        known = self._known.get(id(outcome))
        if known is not None:
            return known[1]
        value = self._make(outcome)
        self._known[id(outcome)] = outcome, value  # as long as it is held, nobody else has its id
        for oldest in list(self._known)[: -2 * bounds.KEEP_DECISIONS]:  # another thread may do the same
            self._known.pop(oldest, None)
        return value


@Derived
def counted_weights(outcome: Outcome) -> dict[str, float]:
    """By peer, its work in a committed outcome: its weight (tokens) times the share of the blocks whose mean
    holds its slice."""
    return _weights(outcome, {})


@Derived
def claimed_weights(outcome: Outcome) -> dict[str, float]:
    """As ``counted_weights``, with the weights that the members claim."""
    return _weights(outcome, {member.peer: member.weight for member in outcome.members})


def _weights(outcome: Outcome, claims: dict[str, float]) -> dict[str, float]:
    blocks = max((part.stop_block for part in outcome.parts), default=0)
    weights: dict[str, float] = {}
    for part in outcome.parts:
        share = (part.stop_block - part.start_block) / blocks
        for one in part.contributors:
            counted = claims.get(one.peer, one.weight) * share
            weights[one.peer] = weights.get(one.peer, 0.0) + counted
    return weights
