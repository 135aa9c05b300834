"""What catching up is about: goals, sizes and events, as frozen types."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.limits import MAX_DATA_BYTES
from p2p_co2.protocol.wire.messages_pb2 import Chunk, Decision, Fetch, Manifest, Refusal
from p2p_co2.system.memory import Buffer

ROUND, STATE = Fetch.ROUND, Fetch.STATE
CatchUpMessage = Fetch | Manifest | Chunk | Refusal

EXPORTS_FREE_BYTES = 16 << 20
"""States up to this much together are given, and loaded, side by side; larger ones one after the other, so
that a donor never holds more than one of them."""


CHUNKS_OF_A_STATE, LEAST_CHUNK_BYTES = 128, 64 << 10
"""A chunk is a state's part of so many, but within ``LEAST_CHUNK_BYTES`` and ``MAX_DATA_BYTES``."""


MOST_NAMED = 3
"""Donors that a warning names."""


def chunk_bytes_of(state_bytes: Sequence[int]) -> int:
    """Bytes of a chunk where the fragments' states have so many. A way of 10 kB/s, as through a relay between
    two satellites, carries the largest chunk in 52 s: its donor would count as silent, and on a connection
    that it shares, what says that a peer lives would wait behind it. Whatever such ways can carry at all
    within a newcomer's patience is small."""
    return min(MAX_DATA_BYTES, max(LEAST_CHUNK_BYTES, -(-max(state_bytes) // CHUNKS_OF_A_STATE)))


@dataclass(frozen=True)
class Shape:
    """Sizes that every peer computes for itself: per fragment, bytes of an encoded mean and of a serialised
    state; of a chunk of either. ``scale``: bytes that each of them stands for, other than 1 in simulations
    alone."""

    mean_bytes: tuple[int, ...]
    state_bytes: tuple[int, ...]
    chunk_bytes: int = MAX_DATA_BYTES
    scale: float = 1.0

    def is_free(self, size_bytes: int) -> bool:
        """Whether states of so many bytes together are given, and loaded, side by side."""
        return size_bytes * self.scale <= EXPORTS_FREE_BYTES

    def bytes_of(self, what: Fetch.What, fragment: int) -> int:
        return (self.mean_bytes if what == ROUND else self.state_bytes)[fragment]

    def replayable(self, fragment: int) -> int:
        """Missed rounds of a fragment that cost less than half of what its whole state costs."""
        return max(1, self.state_bytes[fragment] // (2 * max(1, self.mean_bytes[fragment])))


@dataclass(frozen=True)
class Goal:
    """What is wanted: the round that made ``version`` (``what`` ROUND), or a state at ``version`` or after it
    (STATE); a state as old as ``oldest`` will do where a donor has no room for a newer one.

    ``digest``: what most peers report as the state of ``version``, empty if not known. ``donors``: in the
    order in which they are asked.
    """

    what: Fetch.What
    fragment: int
    version: int
    donors: tuple[PeerId, ...]
    digest: bytes = b""
    oldest: int = 0

    def wanted(self, request: int, only: int) -> Fetch:
        """The question for its manifest. ``only``: of this version of a state and no other; 0 for any that
        will do."""
        fetch = Fetch(what=self.what, fragment=self.fragment, version=only or self.oldest or self.version)
        if self.what == ROUND:
            fetch.version = self.version
        elif only:
            fetch.newest = only
        fetch.request = request
        return fetch


Vouch = Callable[[PeerId, int, int, bytes], bool | None]
"""(donor, fragment, version, digest of its state): whether others than the donor say so too (True), or
otherwise (False); None if nobody else says anything."""


@dataclass(frozen=True)
class Fetched:
    """All bytes of a goal, every chunk checked against the manifest. ``decision`` is the signed outcome of a
    ROUND, ``digest`` of a STATE. ``donors``: who signed the manifest, the one that gave most first."""

    goal: Goal
    version: int
    data: Buffer
    decision: Decision
    digest: bytes
    donors: tuple[PeerId, ...]
    duration_s: float
    chunks_wasted: int
    """Chunks that came and were thrown away: wrong, or given by two donors."""
    chunks_kept: int = 0
    """Chunks that an earlier process of this peer had loaded."""

    @property
    def donor(self) -> PeerId:
        """The one that gave most."""
        return self.donors[0]


@dataclass(frozen=True)
class FetchFailed:
    """No donor could serve the goal; ``newest_version`` is the highest that a refusing donor named,
    ``chunks_given`` how many had come."""

    goal: Goal
    reason: str
    newest_version: int
    chunks_given: int = 0


@dataclass(frozen=True)
class ExportWanted:
    """Somebody asks for a state: the tensor side should serialise it and call ``exported``."""

    fragment: int


@dataclass(frozen=True)
class DonorRefused:
    """A donor broke the rules and was replaced."""

    peer: PeerId
    reason: str
    detail: str


@dataclass(frozen=True)
class Disputed:
    """Donors give different states of one version, and nobody else says which is right: one word against
    another. Those of ``taken`` are believed, for want of better."""

    fragment: int
    version: int
    taken: tuple[PeerId, ...]
    others: tuple[PeerId, ...]

    def __str__(self) -> str:
        taken, others = (", ".join(peers[:MOST_NAMED]) for peers in (self.taken, self.others))
        return (
            f"two states of fragment {self.fragment} are given out as version {self.version}, and nobody "
            f"else says which is right: taking that of {taken}; {others} would give another"
        )


@dataclass(frozen=True)
class Loading:
    """States have been loaded for a while and are not there yet. ``fragments``: theirs; ``received_bytes``:
    what is right of their ``total_bytes``, in whole chunks; ``donors``: who gave any of it."""

    fragments: tuple[int, ...]
    received_bytes: int
    total_bytes: int
    donors: int


CatchUpEvent = Fetched | FetchFailed | ExportWanted | DonorRefused | Disputed | Loading


@dataclass
class Outbox:
    """What the machine has to send and to say; both its sides write into one."""

    messages: list[tuple[PeerId, CatchUpMessage]] = field(default_factory=list)
    events: deque[CatchUpEvent] = field(default_factory=deque)

    def send(self, peer: PeerId, message: CatchUpMessage) -> None:
        self.messages.append((peer, message))

    def emit(self, event: CatchUpEvent) -> None:
        self.events.append(event)


def split_donors(peers: Sequence[PeerId], fragment: int) -> tuple[PeerId, ...]:
    """Donors for a fragment, each fragment starting with another one, so that a newcomer loads them
    evenly."""
    if not peers:
        return ()
    start = fragment % len(peers)
    return (*peers[start:], *peers[:start])
