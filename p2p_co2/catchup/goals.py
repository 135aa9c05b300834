"""What catching up is about: goals, sizes and events, as frozen types."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.messages_pb2 import Chunk, Decision, Fetch, Manifest, Refusal

ROUND, STATE = Fetch.ROUND, Fetch.STATE
CatchUpMessage = Fetch | Manifest | Chunk | Refusal


@dataclass(frozen=True)
class Shape:
    """Sizes that every peer computes for itself: per fragment, bytes of an encoded mean and of a serialised
    state."""

    mean_bytes: tuple[int, ...]
    state_bytes: tuple[int, ...]


@dataclass(frozen=True)
class Goal:
    """What is wanted: the round that made ``version`` (``what`` ROUND), or the newest state at or after it
    (STATE)."""

    what: Fetch.What
    fragment: int
    version: int
    donors: tuple[PeerId, ...]


@dataclass(frozen=True)
class Fetched:
    """All bytes of a goal, every chunk checked. ``decision`` is the signed outcome of a ROUND, ``digest`` of
    a STATE."""

    goal: Goal
    version: int
    data: bytes
    decision: Decision
    digest: bytes
    donor: PeerId
    duration_s: float


@dataclass(frozen=True)
class FetchFailed:
    """No donor could serve the goal; ``newest_version`` is the highest that a refusing donor named."""

    goal: Goal
    reason: str
    newest_version: int


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


CatchUpEvent = Fetched | FetchFailed | ExportWanted | DonorRefused


@dataclass
class Outbox:
    """What the machine has to send and to say; both its sides write into one."""

    messages: list[tuple[PeerId, CatchUpMessage]] = field(default_factory=list)
    events: deque[CatchUpEvent] = field(default_factory=deque)


def split_donors(peers: Sequence[PeerId], fragment: int) -> tuple[PeerId, ...]:
    """Donors for a fragment, each fragment starting with another one, so that a newcomer loads them
    evenly."""
    if not peers:
        return ()
    start = fragment % len(peers)
    return (*peers[start:], *peers[:start])
