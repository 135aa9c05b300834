"""What catching up is about: goals, sizes and events, as frozen types."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from p2p_co2.system.memory import Buffer
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.limits import MAX_DATA_BYTES
from p2p_co2.wire.messages_pb2 import Chunk, Decision, Fetch, Manifest, Refusal

ROUND = Fetch.ROUND
STATE = Fetch.STATE
BUFFERS = Fetch.BUFFERS
CatchUpMessage = Fetch | Manifest | Chunk | Refusal

PATIENCE_S = 60.0
"""A donor that owes a chunk, and a newcomer that had one, are waited for so long. The largest takes 52 s over
a line of 10 kB/s. Twice that: for a load that gets nothing, and until a donor that lied is asked again."""
EXPORTS_FREE_BYTES = 16 << 20
"""States up to this much together are given, and loaded, side by side. Larger ones go one after the other,
so that a donor never holds more than one of them."""
CHUNKS_OF_A_STATE = 128
"""A chunk is a state's part of so many, but within ``LEAST_CHUNK_BYTES`` and ``MAX_DATA_BYTES``."""
LEAST_CHUNK_BYTES = 64 << 10
"""What a slow line still takes between two heartbeats or so."""


def chunk_bytes_of(state_bytes: Sequence[int]) -> int:
    """Bytes of a chunk where the fragments' states have so many. Small models get small chunks: what says
    that a peer lives waits behind one."""
    return min(MAX_DATA_BYTES, max(LEAST_CHUNK_BYTES, -(-max(state_bytes) // CHUNKS_OF_A_STATE)))


@dataclass(frozen=True)
class TransferSizes:
    """Sizes that every peer computes for itself: per fragment, bytes of an encoded mean and of a serialised
    state; of a chunk of either. ``scale``: real bytes for each of them, other than 1 in simulations alone."""

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
    """What is wanted: the round that made ``version`` (ROUND), or a state at ``version`` or after it (STATE).
    Or the buffers whose layout is ``version`` (BUFFERS): ``size_bytes`` of them, one donor's as good as
    another's; ``fragment`` is the number after the last.

    ``digest``: what most peers report as the state of ``version``, empty if not known. ``donors``: in the
    order in which they are asked. ``oldest``: a state as old as this will do where a donor has no room for
    a newer one; 0 for ``version`` itself.
    """

    what: Fetch.What
    fragment: int
    version: int
    donors: tuple[PeerId, ...]
    digest: bytes = b""
    oldest: int = 0
    size_bytes: int = 0


Vouch = Callable[[PeerId, int, int, bytes], bool | None]
"""(donor, fragment, version, digest of its state): whether others than the donor say so too (True), or
otherwise (False); None if nobody else says anything."""


@dataclass(frozen=True)
class Fetched:
    """All bytes of a goal, every chunk checked against the manifest. ``decision`` is the signed outcome of a
    ROUND, ``digest`` of anything else. ``donors``: who signed the manifest, the one that gave most first."""

    goal: Goal
    version: int
    data: Buffer
    decision: Decision
    digest: bytes
    donors: tuple[PeerId, ...]
    duration_s: float


@dataclass(frozen=True)
class FetchFailed:
    """No donor could serve the goal."""

    goal: Goal
    reason: str


@dataclass(frozen=True)
class ExportWanted:
    """Somebody asks for a state: the tensor side should serialise it and call ``Donor.exported``."""

    fragment: int


@dataclass(frozen=True)
class DonorRefused:
    """A donor broke the rules and was replaced."""

    peer: PeerId
    reason: str
    detail: str


@dataclass(frozen=True)
class Loading:
    """States have been loaded for a while and are not there yet. ``fragments``: theirs; ``received_bytes``:
    what is right of their ``total_bytes``, in whole chunks; ``donors``: who gave any of it."""

    fragments: tuple[int, ...]
    received_bytes: int
    total_bytes: int
    donors: int


CatchUpEvent = Fetched | FetchFailed | ExportWanted | DonorRefused | Loading


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
    """Donors for a fragment, each fragment starting with another one, so that they are loaded evenly."""
    start = fragment % max(1, len(peers))
    return (*peers[start:], *peers[:start])
