"""Where a reader of a swarm gets its events from, whatever lies behind it: files, peers, or a peer of its
own.

``Feed`` is what boards, terminals and metrics take. Law: events of one peer come in the order it wrote them;
``take`` never blocks and never raises for what a peer did.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

from p2p_co2.config import RunConfig
from p2p_co2.telemetry.events import Event


@dataclass(frozen=True)
class Sighting:
    """What a reader itself knows of one peer.

    ``state``: "new", "answering", "unreachable". ``since_at``, ``asked_at``: unix seconds of the last change
    of state and of the last answer; 0 for never. ``reason``: why not, in words. ``refused``: nonsense of its
    by cause. ``clock_offset_s``: its clock minus ours; ``round_trip_s``: of the last question; None: unknown.
    """

    peer: str
    state: str = "new"
    since_at: float = 0.0
    answered_at: float = 0.0
    reason: str = ""
    refused: Counter[str] = field(default_factory=Counter)
    clock_offset_s: float | None = None
    round_trip_s: float | None = None
    software: str = ""


@dataclass
class News:
    """What came since the last ``take``. ``sightings``: only peers that changed. ``gone``: peers that are
    listed no more."""

    events: list[Event] = field(default_factory=list)
    sightings: list[Sighting] = field(default_factory=list)


@dataclass(frozen=True)
class FeedState:
    """``phase``: "connecting", "connected", "lost" or "ended"; ``words``: what a person should know of it."""

    phase: str = "connecting"
    words: str = ""


class Feed(Protocol):
    """``run``: what all peers agree on, None until it is known. ``place``: where the events come from, in
    words."""

    @property
    def run(self) -> RunConfig | None: ...
    @property
    def place(self) -> str: ...
    @property
    def state(self) -> FeedState: ...
    @property
    def is_whole(self) -> bool:
        """Whether the first ``take`` gives a run's whole past, to be told in its own time."""

    @property
    def me(self) -> str:
        """The one peer that this reader belongs to; "" if it belongs to none."""

    def take(self) -> News:
        """Everything new; called once or twice a second."""

    def watched(self, now: float) -> None:
        """Somebody looks (monotonic seconds): a feed that costs others something may rest without it."""

    def close(self) -> None:
        """Give everything back. May be called twice."""
