"""What the node asks of the tensor side. The node knows no torch; the trainer implements this on a worker
thread."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from p2p_co2.errors import LocalProtocolError
from p2p_co2.protocol.rounds.certificate import Derived, counted_weights
from p2p_co2.protocol.rounds.events import Likeness
from p2p_co2.system.memory import Buffer, JoinedBuffers
from p2p_co2.wire.messages_pb2 import Outcome

LATEST_BASE = 2
"""Rounds that a mean counts as late at most, whatever its members claim. Honest gradients are one late at
most."""


@dataclass(frozen=True)
class PartWeights:
    """One part of a mean: blocks [start_block, stop_block), the effective weight of every peer's slice, and
    the ids of the offers that they are of."""

    start_block: int
    stop_block: int
    weights: Mapping[str, float]
    offer_ids: Mapping[str, bytes] = field(default_factory=dict)

    def offer_of(self, peer: str) -> bytes | None:
        """The id of the offer of ``peer`` that counts here, empty if none was told; None if none does."""
        return self.offer_ids.get(peer, b"") if self.weights.get(peer) else None


def only_peer(parts: Sequence[PartWeights]) -> str | None:
    """The peer whose work alone is in all of the parts, if there is such a one."""
    inside = {peer for part in parts for peer, weight in part.weights.items() if weight}
    return inside.pop() if len(inside) == 1 else None


def effective_peers(parts: Sequence[PartWeights]) -> float:
    """So many peers of equal weight would average out as much noise: (sum of weights)² / sum of squares, mean
    of the parts by their sizes."""
    found = []
    for part in parts:
        most = max(part.weights.values(), default=0.0)  # by which none of the squares is lost
        shares = [weight / most for weight in part.weights.values()] if most else [1.0]
        size = part.stop_block - part.start_block
        found.append((size, sum(shares) ** 2 / sum(share * share for share in shares)))
    return sum(size * one for size, one in found) / (sum(size for size, _ in found) or 1)


@dataclass(frozen=True)
class AgreedMean:
    """A committed round: the encoded mean of the whole fragment and who is in it. ``state_digest``: of the
    agreed state that it goes upon."""

    fragment: int
    round: int
    base_version: int
    state_digest: bytes
    mean: Buffer
    parts: tuple[PartWeights, ...]


@Derived
def weights_of(outcome: Outcome) -> tuple[PartWeights, ...]:
    """Who is in the mean of a checked, committed outcome, part by part."""
    names = {member.peer: member.offer_id for member in outcome.members}
    parts = []
    for part in outcome.parts:
        weights = {one.peer: one.weight for one in part.contributors}
        ids = {peer: names[peer] for peer in weights}
        parts.append(PartWeights(part.start_block, part.stop_block, weights, ids))
    return tuple(parts)


def agreed_mean(outcome: Outcome, mean: Buffer) -> AgreedMean:
    """What a checked, committed outcome says about ``mean``, the encoded mean of the whole fragment."""
    key = outcome.key
    counted = counted_weights(outcome)
    said = [(one.base_version, counted[one.peer]) for one in outcome.members if one.peer in counted]
    base_version = agreed_base(said, key.round)
    return AgreedMean(key.fragment, key.round, base_version, outcome.state_digest, mean, weights_of(outcome))


def agreed_base(said: Iterable[tuple[int, float]], round_: int) -> int:
    """The version that a mean counts as measured from, of ``said`` (version, weight that counted): the lower
    median by weight, at most ``LATEST_BASE`` rounds late. So no single claim sets the gap penalty of all."""
    ordered = sorted(said)
    half = sum(weight for _, weight in ordered) / 2
    passed = 0.0
    for version, weight in ordered:
        passed += weight
        if passed >= half:
            return max(version, round_ - 1 - LATEST_BASE)
    raise LocalProtocolError("a mean without members")


@dataclass(frozen=True)
class AgreedVersion:
    """Where a fragment is: its outer version and the digest of its state (32 bytes)."""

    version: int
    digest: bytes


class Reduced(NamedTuple):
    """A mean, encoded, and the effective weight of each slice in it, in their order. ``standing``: as
    ``scores`` has it, of who sent them; empty if nothing is known."""

    mean: Buffer
    weights: tuple[float, ...]
    standing: tuple[float, ...] = ()


class SliceRefused(Exception):
    """A slice in a reduction is hostile; ``peer`` sent it."""

    def __init__(self, peer: str, reason: str) -> None:
        self.peer = peer
        self.reason = reason
        super().__init__(f"{peer}: {reason}")


class Exported(NamedTuple):
    """A state, serialised, and the digests of its chunks, in order."""

    agreed: AgreedVersion
    data: bytes | JoinedBuffers
    chunk_digests: list[bytes]


class Ledger(Protocol):
    """The tensor side. Calls for one fragment are answered in the order in which they were made."""

    async def reduce(self, fragment: int, slices: Sequence[tuple[str, float, Buffer]]) -> Reduced:
        """The encoded weighted mean of (peer, weight, slice); raises ``SliceRefused``."""

    async def check(self, fragment: int, mine: Buffer, mean: Buffer) -> Likeness:
        """What an encoded mean is like beside this peer's slice in it, ``mine``."""

    async def commit(self, mean: AgreedMean) -> AgreedVersion:
        """Take the outer step. Returns where the fragment is then: unchanged if the round does not follow its
        state, which may have been exchanged meanwhile."""

    async def abort(self, fragment: int, offer_id: bytes) -> None:
        """This peer's offer came to nothing; silent if it is not in flight: the next one may be already."""

    async def doubt(self, fragment: int) -> None:
        """An offer of ours may be counted in a history that we do not hold. Until a later one is counted
        whole, a donor's state that is taken over may hold that work already."""

    async def export(self, fragment: int) -> Exported:
        """The fragment's state for a peer that is behind. It stays as it is while the swarm goes on."""

    async def adopt(
        self, fragment: int, data: Buffer, agreed: AgreedVersion,
        parts: Sequence[PartWeights] | None = None, goes_back: bool = False,
    ) -> AgreedVersion:  # fmt: skip
        """Take over a donor's state; work of ours that is not counted yet is offered again. ``parts``: who is
        in the round after the state that we hold, None if nobody told us. ``goes_back``: it may be an older
        one, of another history. The state that is held already changes nothing, and offers go on. Raises
        ``DigestMismatch`` or ``RemoteProtocolError`` and then changes nothing."""
