"""One attempt at a round as its BEGIN fixed it, and the checks that a peer's message must pass.

Law: an ``Attempt`` or a checked value is never built from an unchecked number. Whatever fails is a
``RemoteProtocolError`` with a short constant reason, and nothing was allocated for it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median_low
from typing import NamedTuple

from p2p_co2.errors import Offence, RemoteProtocolError
from p2p_co2.protocol.rounds import bounds
from p2p_co2.protocol.rounds.events import Offer, PayloadShape
from p2p_co2.protocol.rounds.parts import BlockRange, check_owned, covers
from p2p_co2.protocol.rounds.rank import coordination_order
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.limits import MAX_MEMBERS, MAX_PEER_ID, MAX_VERSION
from p2p_co2.wire.messages_pb2 import (
    Begin,
    Behind,
    Contributor,
    Member,
    Missed,
    Outcome,
    Ready,
    RoundKey,
)

MOST_PEERS_SHARE = 3
"""Of a group of more than so many, no peer counts for more than one of so many equal shares."""


class Share(NamedTuple):
    """A member's weight, the outer version its gradient was measured from, and its offer's name."""

    weight: float
    base_version: int
    offer_id: bytes = b""


@dataclass(frozen=True)
class Attempt:
    """What BEGIN fixed: ``shares`` per member (sorted by peer), part ``i`` is ``ranges[i]``, starts with
    ``owners[i]``, and is averaged from the slices of ``senders[i]``."""

    fragment: int
    round: int
    id: bytes
    shares: Mapping[PeerId, Share]
    ranges: tuple[BlockRange, ...]
    owners: tuple[PeerId, ...]
    senders: tuple[frozenset[PeerId], ...]
    state_digest: bytes
    coordinator: PeerId
    parts_within_s: float
    result_within_s: float
    live: int = 0
    """Peers that may make this round, as the coordinator saw them."""
    weight_cap: float = 0.0
    counts_whole: bool = True
    """As of ``PayloadShape``."""

    @cached_property
    def ranked(self) -> list[PeerId]:
        """The members by rendezvous hash."""
        return coordination_order(self.shares, self.fragment, self.round)

    def heir(self, part: int, generation: int) -> PeerId:
        """Who averages a part if its owner and the heirs before are lost: the next owner by rank, then the
        other members."""
        if not generation:
            return self.owners[part]
        owners = [peer for peer in self.ranked if peer in self.owners]
        first = owners.index(self.owners[part])
        order = owners[first:] + owners[:first] + [peer for peer in self.ranked if peer not in self.owners]
        return order[generation % len(order)]

    @cached_property
    def weights(self) -> dict[PeerId, float]:
        """What each member's slices count as, at most."""
        return capped(self.shares, self.weight_cap)

    @property
    def is_alone(self) -> bool:
        """Whether its only member makes the round for itself."""
        return len(self.shares) == 1

    def key(self) -> RoundKey:
        return RoundKey(fragment=self.fragment, round=self.round, attempt=self.id)

    def is_quorum(self, voters: Collection[PeerId]) -> bool:
        """Whether these members may commit."""
        return is_quorum(voters, self.live, self.coordinator)

    def repeats(self, offer: Offer, me: PeerId) -> bool:
        """Whether BEGIN answers the READY that ``me`` sent for ``offer``."""
        same_round = (self.fragment, self.round, self.state_digest) == (
            offer.fragment, offer.round, offer.state_digest,
        )  # fmt: skip
        return same_round and self.shares.get(me) == (offer.weight, offer.base_version, offer.offer_id)

    def check_outcome(self, outcome: Outcome) -> None:
        """Raise ``RemoteProtocolError`` unless a commit is about the round that began here."""
        ranges = [(part.start_block, part.stop_block) for part in outcome.parts]
        is_same = list(outcome.members) == self.members() and outcome.live == self.live
        if not is_same or ranges != list(self.ranges):
            raise RemoteProtocolError("wrong group", "a decision that is not about the round that began")

    def members(self) -> list[Member]:
        return [
            Member(peer=peer, weight=share.weight, base_version=share.base_version, offer_id=share.offer_id)
            for peer, share in self.shares.items()
        ]


def is_quorum(voters: Collection[str], live: int, coordinator: str) -> bool:
    """Whether so many members may commit: more than half of the ``live`` peers, or half of them with the
    coordinator. Any two such sets of the same live peers share one."""
    return 2 * len(voters) > live or (2 * len(voters) == live and coordinator in voters)


def check_live(live: int, members: int) -> None:
    """Raise ``RemoteProtocolError`` unless a group of ``members`` may be of so many live peers."""
    if not members <= live <= 2 * members:
        raise RemoteProtocolError("wrong group", f"{members} members of {live} live peers")


def check_place(fragment: int, round_: int, shape: PayloadShape) -> None:
    """Raise ``RemoteProtocolError`` unless the fragment exists and the round number is possible."""
    if fragment >= len(shape.blocks):
        raise RemoteProtocolError(Offence.UNKNOWN_FRAGMENT, f"{fragment} of {len(shape.blocks)}")
    if not 1 <= round_ <= MAX_VERSION:
        raise RemoteProtocolError(Offence.UNKNOWN_ROUND, str(round_))


def check_digest(digest: bytes) -> None:
    if len(digest) != bounds.DIGEST_BYTES:
        raise RemoteProtocolError(Offence.WRONG_DIGEST_LENGTH, f"{len(digest)} bytes")


def check_duration(duration_s: float, cap_s: float) -> None:
    if not 0 <= duration_s <= cap_s:  # NaN fails every comparison
        raise RemoteProtocolError(Offence.IMPOSSIBLE_DURATION, f"{duration_s} s, at most {cap_s:g}")


def check_behind(message: Behind) -> None:
    """Raise ``RemoteProtocolError`` unless it may say where others are and who gives that."""
    check_digest(message.state_digest)
    if len(message.donors) > MAX_MEMBERS or any(len(donor) > MAX_PEER_ID for donor in message.donors):
        raise RemoteProtocolError(Offence.TOO_LARGE, "donors")
    if not message.round - 1 <= message.version <= MAX_VERSION:
        raise RemoteProtocolError("impossible version", f"{message.version} for round {message.round}")


def check_weight(weight: float) -> None:
    if not 0 < weight <= bounds.MAX_WEIGHT:
        raise RemoteProtocolError(Offence.IMPOSSIBLE_WEIGHT, str(weight))


def check_offer_id(name: bytes) -> None:
    if len(name) != bounds.OFFER_ID_BYTES:
        raise RemoteProtocolError("wrong offer", f"an id of {len(name)} bytes")


def check_ready(message: Ready, shape: PayloadShape) -> None:
    """Raise ``RemoteProtocolError`` for a READY that no honest peer sends."""
    check_place(message.fragment, message.round, shape)
    check_digest(message.state_digest)
    check_weight(message.weight)
    for rate in (message.upload_bytes_per_s, message.download_bytes_per_s):
        if not math.isfinite(rate) or rate < 0:
            raise RemoteProtocolError(Offence.IMPOSSIBLE_RATE, f"{rate} bytes/s")
    check_offer_id(message.offer_id)
    if message.base_version >= message.round:
        raise RemoteProtocolError(
            "impossible version", f"base {message.base_version} for round {message.round}"
        )


def read_members(members: Sequence[Member], round_: int) -> dict[PeerId, Share]:
    """Members as a mapping sorted by peer; raises ``RemoteProtocolError``."""
    if not 1 <= len(members) <= MAX_MEMBERS:
        raise RemoteProtocolError("wrong group", f"{len(members)} members")
    shares: dict[PeerId, Share] = {}
    last = ""
    for member in members:
        check_weight(member.weight)
        check_offer_id(member.offer_id)
        if member.peer <= last or len(member.peer) > MAX_PEER_ID or member.base_version >= round_:
            raise RemoteProtocolError(
                "wrong group", "members must be sorted, distinct and measured before the round"
            )
        last = member.peer
        shares[PeerId(member.peer)] = Share(member.weight, member.base_version, member.offer_id)
    return shares


def capped(shares: Mapping[PeerId, Share], cap: float) -> dict[PeerId, float]:
    """What the members' weights count as: at most ``cap`` times their median; 0 for no cap. Of four or more
    each counts for a third of them all at most (``MOST_PEERS_SHARE``).

    Made of BEGIN's members alone, so everybody can check it. Of an even number the lower middle one is the
    median: half of the group may boast, and moves it nowhere.
    """
    limit = cap * median_low([share.weight for share in shares.values()]) if cap else math.inf
    sizes = sorted((min(share.weight, limit) for share in shares.values()), reverse=True)
    for above in range(MOST_PEERS_SHARE if cap and len(sizes) > MOST_PEERS_SHARE else 0):
        limit = math.fsum(sizes[above:]) / (MOST_PEERS_SHARE - above)
        if sizes[above] <= limit:
            break
    return {peer: min(share.weight, limit) for peer, share in shares.items()}


def write_senders(sending: Collection[PeerId], members: Sequence[PeerId]) -> bytes:
    """The members of ``sending`` as bits, lowest first; empty if it is all of them."""
    bits = sum(1 << index for index, peer in enumerate(members) if peer in sending)
    everybody = (1 << len(members)) - 1
    return b"" if bits == everybody else bits.to_bytes(-(-len(members) // 8), "little")


def read_senders(bits: bytes, members: Sequence[PeerId]) -> frozenset[PeerId]:
    """What ``write_senders`` wrote; raises ``RemoteProtocolError``."""
    if not bits:
        return frozenset(members)
    number = int.from_bytes(bits, "little")
    if len(bits) != -(-len(members) // 8) or number >> len(members):
        raise RemoteProtocolError("wrong group", "senders that are no members")
    return frozenset(peer for index, peer in enumerate(members) if number >> index & 1)


def read_contributors(
    contributors: Sequence[Contributor], weights: Mapping[PeerId, float], is_exact: bool = True
) -> tuple[tuple[PeerId, float], ...]:
    """Contributors of one part: sorted members, each with the weight that it counted with. ``weights``: of
    all members, sorted, as ``capped`` has them; an owner may have counted less unless ``is_exact``. Raises
    ``RemoteProtocolError``."""
    if not 1 <= len(contributors) <= len(weights):
        raise RemoteProtocolError("wrong contributors", f"{len(contributors)} of {len(weights)} members")
    read = tuple((PeerId(contributor.peer), contributor.weight) for contributor in contributors)
    rest = iter(weights)
    for peer, weight in read:
        if peer not in rest:  # each is looked for behind the one before
            raise RemoteProtocolError("wrong contributors", "must be sorted members")
        most = weights[peer]
        if weight != most and (is_exact or not 0 < weight < most):
            raise RemoteProtocolError("wrong contributors", "must have the weights of BEGIN, at most")
    return read


def check_missed(missed: Collection[int], others: int) -> None:
    """Raise ``RemoteProtocolError`` unless there is a reason for each of so many that are no contributors."""
    if len(missed) != others or not set(Missed.values()[1:]).issuperset(missed):
        raise RemoteProtocolError("wrong reasons", f"{len(missed)} for {others} members")


def read_key(key: RoundKey, shape: PayloadShape) -> tuple[int, int, bytes]:
    """(fragment, round, attempt id) of a message; raises ``RemoteProtocolError``."""
    check_place(key.fragment, key.round, shape)
    if len(key.attempt) != bounds.ATTEMPT_BYTES:
        raise RemoteProtocolError(Offence.WRONG_ATTEMPT_LENGTH, f"{len(key.attempt)} bytes")
    return key.fragment, key.round, key.attempt


def seal_begin(begin: Begin, coordinator: PeerId) -> None:
    """Give a BEGIN its attempt's id."""
    begin.key.attempt = _attempt_of(begin, coordinator)


def _attempt_of(begin: Begin, coordinator: PeerId) -> bytes:
    """The digest of what a BEGIN says and of who says it, without its times: they shrink when it is repeated.

    So a coordinator cannot tell two members different things about one attempt: one of them would see that
    the id is another's.
    """
    bare = Begin()
    bare.CopyFrom(begin)
    bare.key.attempt = b""
    bare.parts_within_s = bare.result_within_s = 0.0
    content = coordinator.encode() + b"\0" + bare.SerializeToString(deterministic=True)
    return hashlib.sha256(content).digest()[: bounds.ATTEMPT_BYTES]


def read_begin(message: Begin, sender: PeerId, shape: PayloadShape) -> Attempt:
    """Check a BEGIN against the agreed shape; raises ``RemoteProtocolError``."""
    fragment, round_, attempt = read_key(message.key, shape)
    shares = read_members(message.members, round_)
    check_digest(message.state_digest)
    check_duration(message.parts_within_s, shape.parts_cap_s)
    check_duration(message.result_within_s, shape.round_cap_s)
    if not 1 <= len(message.parts) <= MAX_MEMBERS:
        raise RemoteProtocolError(Offence.WRONG_PARTS, f"{len(message.parts)} for {len(shares)} members")
    ranges = tuple(BlockRange(part.start_block, part.stop_block) for part in message.parts)
    owners = tuple(PeerId(part.owner) for part in message.parts)
    if not covers(ranges, shape.blocks[fragment]):
        raise RemoteProtocolError(Offence.WRONG_PARTS, "they do not cover the blocks once, in order")
    if not shares.keys() >= set(owners):
        raise RemoteProtocolError(Offence.WRONG_OWNER, "an owner is no member")
    members = tuple(shares)
    everybody = frozenset(shares)
    senders = tuple(
        read_senders(part.senders, members) if part.senders else everybody for part in message.parts
    )
    if any(owner not in sending for owner, sending in zip(owners, senders, strict=True)):
        raise RemoteProtocolError(Offence.WRONG_OWNER, "an owner does not send its own slice")
    check_live(message.live, len(shares))
    if len(message.nonce) != bounds.ATTEMPT_BYTES or attempt != _attempt_of(message, sender):
        raise RemoteProtocolError(Offence.WRONG_ATTEMPT, "BEGIN is not what its attempt's id stands for")
    check_owned(ranges, owners, len(shares))
    return Attempt(
        fragment, round_, attempt, shares, ranges, owners, senders, message.state_digest, sender,
        message.parts_within_s, message.result_within_s, message.live, shape.weight_cap, shape.counts_whole,
    )  # fmt: skip
