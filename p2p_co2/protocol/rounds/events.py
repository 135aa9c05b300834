"""What goes into the rounds machine and what comes out of it, as frozen types.

Law: an offer ends in exactly one of ``Committed``, ``Aborted``, ``OutcomeWithoutBytes`` or ``FellBehind``;
the last two also come without an offer (``ends_offer`` is False then).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from p2p_co2.errors import LocalProtocolError
from p2p_co2.protocol.rounds import bounds
from p2p_co2.protocol.rounds.bounds import DIGEST_BYTES, MAX_WEIGHT, OFFER_ID_BYTES
from p2p_co2.system.memory import Buffer
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.messages_pb2 import Missed


@dataclass(frozen=True)
class PayloadShape:
    """What travels, and how often; the same on all peers. Every fragment's encoded size: ``blocks[f]`` blocks
    of ``block_bytes`` bytes. ``round_s``: the run's time between two rounds of a fragment, 0 where it counts
    inner steps (``counts_steps``). ``assumed_upload_bytes_per_s``: what a line carries that nobody has
    measured. ``chunk_bytes``: what is asked for at once of states and past means; 0: as the states suggest.
    ``scale``: how many real bytes each byte of a simulation stands for. ``weight_cap``: the run's; ``cuts``:
    whether its rule may count a slice for less."""

    block_bytes: int
    blocks: tuple[int, ...]
    round_s: float = 0.0
    assumed_upload_bytes_per_s: float = bounds.ASSUMED_UPLOAD_BYTES_PER_S
    chunk_bytes: int = 0
    scale: float = 1.0
    weight_cap: float = 0.0
    counts_steps: bool = False
    cuts: bool = True

    def __post_init__(self) -> None:
        if self.block_bytes < 1 or not self.blocks or min(self.blocks) < 1:
            raise LocalProtocolError(f"a payload needs blocks of at least one byte: {self}")

    def payload_bytes(self, fragment: int) -> int:
        return self.block_bytes * self.blocks[fragment]

    @property
    def counts_whole(self) -> bool:
        """Whether each contributor counts with all of its weight."""
        return not (self.weight_cap and self.cuts)

    @property
    def mean_bytes(self) -> tuple[int, ...]:
        """Of each fragment's encoded mean."""
        return tuple(blocks * self.block_bytes for blocks in self.blocks)

    @property
    def parts_cap_s(self) -> float:
        """How long owners wait for slices at most."""
        return bounds.parts_cap_s(self.round_s)

    @property
    def round_cap_s(self) -> float:
        """How long an attempt lasts at most."""
        return bounds.round_cap_s(self.round_s)


@dataclass(frozen=True)
class PeerView:
    """What membership knows of a live peer. ``upload_bytes_per_s`` 0: unknown; ``download_bytes_per_s`` 0: no
    cap. ``versions``, ``digests``: per fragment, may be empty. ``finished``: fragments for which it has
    nothing more to offer in this run. ``step_s``: of an inner step, of this peer alone; 0: unknown.
    ``is_missed``: its link broke, and it was not heard since. ``counted``: it says that its work was in one
    of the last means."""

    upload_bytes_per_s: float = 0.0
    training: bool = True
    versions: tuple[int, ...] = ()
    download_bytes_per_s: float = 0.0
    finished: frozenset[int] = frozenset()
    digests: tuple[bytes, ...] = ()
    step_s: float = 0.0
    is_missed: bool = False
    counted: bool = False


@dataclass(frozen=True)
class Offer:
    """This peer's part in round ``round`` of ``fragment``: its encoded outer gradient and its weight
    (tokens).

    ``round`` is the version the round would make, and ``state_digest`` is of the agreed state before it.
    ``base_version``: the version that the gradient was measured from. ``is_last``: this peer trains no more,
    so it loses nothing by waiting for others. ``offer_id``: eight random bytes that name this offer.
    """

    fragment: int
    round: int
    base_version: int
    state_digest: bytes
    payload: Buffer
    weight: float
    is_last: bool = False
    offer_id: bytes = b""

    def __post_init__(self) -> None:
        lengths = len(self.state_digest), len(self.offer_id)
        if lengths != (DIGEST_BYTES, OFFER_ID_BYTES) or not 0 < self.weight <= MAX_WEIGHT:
            raise LocalProtocolError(
                f"offer for round {self.round}: weight {self.weight}, digest or id impossible"
            )
        if not 0 <= self.base_version < self.round:
            raise LocalProtocolError(
                f"offer for round {self.round} measured from version {self.base_version}"
            )


class OpenOffer(NamedTuple):
    """An offer that waits: since when, and when it is looked at again at the latest."""

    fragment: int
    offered_at: float
    timer_at: float


class PeerSlice(NamedTuple):
    peer: PeerId
    weight: float
    data: Buffer


@dataclass(frozen=True)
class ReduceJob:
    """One part to average: the weighted mean of ``slices`` (sorted by peer), encoded into
    ``(stop_block - start_block) * block_bytes`` bytes. ``key`` is the attempt's id. The answer holds the same
    slices with the weights that they counted with, which may be smaller."""

    key: bytes
    fragment: int
    round: int
    part: int
    generation: int
    start_block: int
    stop_block: int
    slices: tuple[PeerSlice, ...]


@dataclass(frozen=True)
class ReduceWanted:
    """Answer with ``Rounds.reduced``, or ``Rounds.refused_slice`` if one of the slices is hostile."""

    job: ReduceJob


@dataclass(frozen=True)
class CheckWanted:
    """The mean of a part has come that says that our slice is in it. Answer with ``Rounds.checked``. ``key``
    is the attempt's id."""

    key: bytes
    fragment: int
    part: int
    generation: int
    mine: Buffer
    mean: Buffer


class Likeness(NamedTuple):
    """Of a mean to our slice: the cosine between the two, how many times as long it is, the root mean square
    of the slice, and the share of its blocks that are not zero."""

    cosine: float
    length: float
    size: float
    used: float = 1.0


@dataclass(frozen=True)
class Committed:
    """The round stands and we hold its bytes. ``mean`` is the whole fragment's encoded mean, ``decision`` a
    serialised ``Decision``. ``duration_s`` counts from our offer."""

    fragment: int
    round: int
    decision: bytes
    mean: Buffer
    group: tuple[PeerId, ...]
    coordinator: PeerId
    duration_s: float
    begun_s: float
    """From our offer to BEGIN, ``parts_s`` to the last reduction of ours, ``means_s`` to the last mean."""
    parts_s: float
    means_s: float


@dataclass(frozen=True)
class MissedSlices:
    """Slices of ours that are not in a committed mean: of ``parts`` of it, for this reason. ``owners``: who
    averaged these and says so, sorted."""

    fragment: int
    round: int
    reason: Missed
    owners: tuple[PeerId, ...]
    parts: int


@dataclass(frozen=True)
class Aborted:
    """Our offer came to nothing and nothing changed; the gradient carries over."""

    fragment: int
    round: int
    reason: str
    offer_id: bytes


@dataclass(frozen=True)
class Began:
    """Written by the coordinator: a round of ``group`` begins."""

    fragment: int
    round: int
    group: tuple[PeerId, ...]


@dataclass(frozen=True)
class FellBehind:
    """The majority is at ``version`` with ``digest``; ``donors`` hold it."""

    fragment: int
    version: int
    digest: bytes
    donors: tuple[PeerId, ...]
    ends_offer: bool


@dataclass(frozen=True)
class OutcomeWithoutBytes:
    """The round that follows our state was committed, but we lack its mean: fetch it from ``donors`` and
    replay."""

    fragment: int
    round: int
    decision: bytes
    donors: tuple[PeerId, ...]
    ends_offer: bool


@dataclass(frozen=True)
class Stale:
    """Slices of ``attempt`` that wait to be sent are of no use to anybody; with
    ``means``, nor are its means."""

    attempt: bytes
    means: bool


@dataclass(frozen=True)
class Refused:
    """A peer's content was dropped after it had been let in; count it like a ``RemoteProtocolError``."""

    peer: PeerId
    reason: str
    detail: str


@dataclass(frozen=True)
class Distrusted:
    """What ``peer`` says of rounds counts less for ``lasts_s`` seconds (0: until it does better).
    ``reason``: how and why, in words."""

    peer: PeerId
    reason: str
    lasts_s: float


@dataclass(frozen=True)
class Doubted:
    """A commit is not of the only attempt at its round that this peer was in. Its offer may be counted in a
    history that it does not hold."""

    fragment: int


RoundsEvent = (
    ReduceWanted
    | CheckWanted
    | Committed
    | MissedSlices
    | Aborted
    | Began
    | FellBehind
    | OutcomeWithoutBytes
    | Stale
    | Refused
    | Distrusted
    | Doubted
)
