"""Outcomes: signing, opening, keeping.

Laws: an outcome is read only after its signature held; two outcomes of one round are the same if their
content is the same, whoever signed (a successor that repeats the verdict of a lost coordinator does not
contradict it); a commit that is kept is never replaced. An abort binds only its own attempt, and a later
proof that the attempt was committed beats it.

The price: one signature proves who decided, not that a quorum voted. A member that lies about votes is caught
by the digests of the next READY, not here.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from functools import lru_cache

from google.protobuf.message import DecodeError

from p2p_co2.errors import LocalProtocolError, RemoteProtocolError
from p2p_co2.protocol.rounds import bounds
from p2p_co2.protocol.rounds.attempt import (
    capped,
    check_digest,
    check_place,
    read_contributors,
    read_key,
    read_members,
)
from p2p_co2.protocol.rounds.derived import OUTCOMES_KEPT, Derived
from p2p_co2.protocol.rounds.events import PayloadShape, Stale
from p2p_co2.protocol.rounds.parts import BlockRange, covers
from p2p_co2.protocol.wire.identity import Identity, PeerId, verify
from p2p_co2.protocol.wire.limits import MAX_MEMBERS, MAX_MESSAGE_BYTES, MAX_STRING
from p2p_co2.protocol.wire.messages_pb2 import Decision, Outcome

DECISION_CONTEXT = b"p2p-co2 decision"
ANNOUNCEMENT_CONTEXT = b"p2p-co2 announced decision"


def sign_outcome(identity: Identity, outcome: Outcome) -> Decision:
    """The outcome as ``identity`` decided it; fills in ``decided_by``."""
    outcome.decided_by = identity.peer_id
    content = outcome.SerializeToString(deterministic=True)
    return Decision(outcome=content, signature=identity.sign(DECISION_CONTEXT, content))


def announcement(decision: Decision, identity: Identity) -> bytes:
    """Our own decision in short, for the DHT: how the round ended and the digest of each part's mean.

    A serialised ``Decision`` without members and contributors, signed for ``ANNOUNCEMENT_CONTEXT`` so that it
    does not pass for the whole. Always below 4 KiB. Raises ``LocalProtocolError`` for another's decision.
    """
    outcome = Outcome.FromString(decision.outcome)
    if outcome.decided_by != identity.peer_id:
        raise LocalProtocolError(f"an announcement by {identity.peer_id}, decided by {outcome.decided_by}")
    short = Outcome(
        key=outcome.key, run=outcome.run, committed=outcome.committed, state_digest=outcome.state_digest,
        decided_by=outcome.decided_by,
    )  # fmt: skip
    if outcome.committed:
        for part in outcome.parts:
            short.parts.add(start_block=part.start_block, stop_block=part.stop_block, digest=part.digest)
    else:
        short.reason = outcome.reason[: bounds.MAX_REASON]
    content = short.SerializeToString(deterministic=True)
    signature = identity.sign(ANNOUNCEMENT_CONTEXT, content)
    return Decision(outcome=content, signature=signature).SerializeToString()


def open_decision(decision: Decision, run: bytes, shape: PayloadShape) -> Outcome:
    """The checked outcome inside a decision of this run. Also for decisions that catch-up or the DHT brought.

    Raises ``RemoteProtocolError`` for a wrong signature, another run, or an outcome that no honest peer
    signs. Whether the signer had the right to decide is the caller's question. The outcome is shared: several
    callers open the same decision, and opening one of a large group costs milliseconds.
    """
    if len(decision.outcome) > MAX_MESSAGE_BYTES:
        raise RemoteProtocolError("too large", f"outcome of {len(decision.outcome)} bytes")
    return _open(decision.outcome, decision.signature, run, shape)


@lru_cache(maxsize=OUTCOMES_KEPT)
def _open(content: bytes, signature: bytes, run: bytes, shape: PayloadShape) -> Outcome:
    outcome = _read_outcome(content, run)
    verify(outcome.decided_by, DECISION_CONTEXT, content, signature)
    _check_outcome(outcome, shape)
    return outcome


def _read_outcome(content: bytes, run: bytes) -> Outcome:
    outcome = Outcome()
    try:
        outcome.ParseFromString(content)
    except DecodeError:
        raise RemoteProtocolError("unreadable", "not an Outcome") from None
    if outcome.run != run:
        raise RemoteProtocolError("wrong run", "a decision of another run")
    return outcome


def _check_outcome(outcome: Outcome, shape: PayloadShape) -> None:
    fragment, round_, _ = read_key(outcome.key, shape)
    check_place(fragment, round_, shape)
    check_digest(outcome.state_digest)
    weights = capped(read_members(outcome.members, round_), shape.weight_cap)
    if len(outcome.reason) > MAX_STRING or len(outcome.parts) > MAX_MEMBERS:
        raise RemoteProtocolError("too large", "reason or parts of an outcome")
    if not outcome.committed:
        return
    if not covers([BlockRange(p.start_block, p.stop_block) for p in outcome.parts], shape.blocks[fragment]):
        raise RemoteProtocolError("wrong parts", "they do not cover the fragment's blocks once, in order")
    for part in outcome.parts:
        check_digest(part.digest)
        read_contributors(part.contributors, weights, not shape.weight_cap)


@Derived
def counted_weights(outcome: Outcome) -> dict[str, float]:
    """Whose work is in a committed outcome: by peer, the weight (tokens) that it counted with times the share
    of the fragment's blocks whose mean holds its slice."""
    blocks = max((part.stop_block for part in outcome.parts), default=0)
    weights: dict[str, float] = {}
    for part in outcome.parts:
        share = (part.stop_block - part.start_block) / blocks
        for contributor in part.contributors:
            known = weights.get(contributor.peer, 0.0)
            weights[contributor.peer] = known + contributor.weight * share
    return weights


@Derived
def claimed_weights(outcome: Outcome) -> dict[str, float]:
    """As ``counted_weights``, with the weights that the members claim."""
    asked = {member.peer: member.weight for member in outcome.members}
    blocks = max((part.stop_block for part in outcome.parts), default=0)
    weights: dict[str, float] = {}
    for part in outcome.parts:
        share = (part.stop_block - part.start_block) / blocks
        for one in part.contributors:
            weights[one.peer] = weights.get(one.peer, 0.0) + asked[one.peer] * share
    return weights


@Derived
def _workers(outcome: Outcome) -> frozenset[str]:
    """Whose slices are in a committed mean."""
    return frozenset(one.peer for part in outcome.parts for one in part.contributors)


def content_of(outcome: Outcome) -> bytes:
    """What an outcome says, without who said it: equal bytes mean the same verdict."""
    bare = Outcome()
    bare.CopyFrom(outcome)
    bare.decided_by = bare.reason = ""
    for part in bare.parts:
        part.generation = 0
    return bare.SerializeToString(deterministic=True)


class Verdicts:
    """The last ``KEEP_DECISIONS`` decisions of one fragment, and the attempts that ended."""

    def __init__(self) -> None:
        self._commits: OrderedDict[int, tuple[Decision, Outcome]] = OrderedDict()
        self._workers: dict[int, frozenset[str]] = {}
        """Of each kept commit, whose slices are in its mean."""
        self._aborts: OrderedDict[bytes, tuple[Decision, str]] = OrderedDict()
        """With their signers."""
        self._ended: deque[bytes] = deque(maxlen=bounds.KEEP_ATTEMPTS)
        self._joined: deque[tuple[int, bytes, float]] = deque(maxlen=bounds.KEEP_ATTEMPTS)
        """Attempts that we were in, and in which others may have counted us: round, id, the weight that we
        offered."""
        self._left: deque[tuple[int, bytes]] = deque(maxlen=bounds.KEEP_ATTEMPTS)
        """The last of them that has committed, and those since that we left before they were decided."""

    def keep(self, decision: Decision, outcome: Outcome) -> None:
        self.end(outcome.key.attempt)
        if not outcome.committed:
            self._aborts[outcome.key.attempt] = decision, outcome.decided_by
            while len(self._aborts) > bounds.KEEP_DECISIONS:
                self._aborts.popitem(last=False)
        elif outcome.key.round not in self._commits:
            self._commits[outcome.key.round] = (decision, outcome)
            while len(self._commits) > bounds.KEEP_DECISIONS:
                self._commits.pop(min(self._commits))
            counted = _workers(outcome)
            self._workers = {round_: self._workers.get(round_, counted) for round_ in self._commits}

    def end(self, attempt: bytes) -> None:
        """Remember an attempt that is over, so that its stragglers are recognised."""
        if attempt not in self._ended:
            self._ended.append(attempt)

    def leave(self, round_: int, attempt: bytes, emit: Callable[[Stale], None]) -> None:
        """``end`` an attempt that we were in, and tell what nobody needs any more: its slices and, if it has
        committed only when the next one ends, for slower members, its means."""
        self.end(attempt)
        known = self._commits.get(round_)
        has_committed = known is not None and known[1].key.attempt == attempt
        is_over = known is not None or attempt in self._aborts  # else the others go on without us
        if not is_over:
            self._left.append((round_, attempt))
            return
        if has_committed:
            self.outrun(round_ + 1, emit)
            self._left.append((round_, attempt))
        emit(Stale(attempt, means=not has_committed))

    def outrun(self, version: int, emit: Callable[[Stale], None]) -> None:
        """``version`` has been reached: means of rounds before its own are of no use to anybody. Who slept in
        an attempt, or lost its line, hears of no outcome, but takes a later state."""
        for attempt in (one for round_, one in self._left if round_ < version):
            emit(Stale(attempt, means=True))
        later = [left for left in self._left if left[0] >= version]
        self._left.clear()
        self._left.extend(later)

    def join(self, round_: int, attempt: bytes, weight: float) -> None:
        """We are in an attempt, and not alone, or somebody listens: what we offer there may be counted,
        whatever we hear of it."""
        joined = (round_, attempt, weight)
        if joined not in self._joined:  # each of those that listen calls this
            self._joined.append(joined)

    def was_elsewhere(self, outcome: Outcome) -> bool:
        """Whether we were in another attempt at the round of a commit."""
        key = outcome.key
        return any(round_ == key.round and attempt != key.attempt for round_, attempt, _ in self._joined)

    def is_settled_by(self, outcome: Outcome, me: PeerId) -> bool:
        """Whether a commit that is replayed leaves open nothing of what we offered: it was doubted when we
        heard of it, or all that we offered last is in it. (Earlier offers for its round held no more.)"""
        offered = [weight for round_, _, weight in self._joined if round_ == outcome.key.round]
        asked = next((member.weight for member in outcome.members if member.peer == me), None)
        is_whole = all(any(one.peer == me for one in part.contributors) for part in outcome.parts)
        is_known = self.commit(outcome.key.round) is not None
        return is_known or (bool(offered) and is_whole and asked == offered[-1])

    def forget(self, round_: int) -> list[PeerId]:
        """Drop a commit and all after it: its bytes are nowhere to be had. Returns who signed them."""
        later = [known for known in self._commits if known >= round_]
        return [PeerId(self._commits.pop(known)[1].decided_by) for known in later]

    def aborted_by(self, attempt: bytes) -> str:
        """Who ended an attempt that we were in without a commit; empty if we know of nobody."""
        return self._aborts[attempt][1] if attempt in self._aborts else ""

    def has_ended(self, attempt: bytes) -> bool:
        return attempt in self._ended

    def has_worked(self, peer: PeerId) -> bool:
        """Whether a slice of ``peer`` is in one of the kept commits."""
        return any(peer in workers for workers in self._workers.values())

    def held(self) -> dict[str, tuple[int, int]]:
        """As ``Rounds.held``."""
        decisions = max(len(self._commits), len(self._aborts))
        return {
            "KEEP_DECISIONS": (decisions, bounds.KEEP_DECISIONS),
            "KEEP_ATTEMPTS": (len(self._ended), bounds.KEEP_ATTEMPTS),
        }

    def commit(self, round_: int) -> tuple[Decision, Outcome] | None:
        return self._commits.get(round_)

    def newest_commit(self) -> tuple[Decision, Outcome] | None:
        return self._commits[max(self._commits)] if self._commits else None

    def find(self, round_: int, attempt: bytes) -> Decision | None:
        """The commit of the round, or else the abort of that attempt."""
        known = self._commits.get(round_)
        aborted = self._aborts.get(attempt)
        return known[0] if known else aborted and aborted[0]
