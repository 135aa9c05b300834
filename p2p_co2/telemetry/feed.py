"""Where a reader of a swarm gets its events from, whatever lies behind it. Law: events of one peer come in
the order it wrote them; ``take`` never blocks and never raises for what a peer did."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from p2p_co2.config import RunConfig
from p2p_co2.telemetry.events import Event


@dataclass(frozen=True)
class Sighting:
    """What a reader itself knows of one peer.

    ``state``: "new", "answering", "unreachable"; ``reason``: why not, in words. ``refused``: nonsense of its
    by cause. ``clock_offset_s``: its clock minus ours; ``round_trip_s``: of the last question; None: unknown.
    """

    peer: str
    state: str = "new"
    reason: str = ""
    refused: Counter[str] = field(default_factory=Counter)
    clock_offset_s: float | None = None
    round_trip_s: float | None = None


@dataclass
class News:
    """What came since the last ``take``. ``sightings``: only peers that changed."""

    events: list[Event] = field(default_factory=list)
    sightings: list[Sighting] = field(default_factory=list)


@dataclass(frozen=True)
class FeedState:
    """``phase``: "connecting", "connected", "lost" or "ended"; ``words``: what a person should know of it.
    ``position``: in rounds, where the run was when those that do not answer last said so; 0: not known.
    ``rounds``: when it ends, likewise."""

    phase: str = "connecting"
    words: str = ""
    position: float = 0.0
    rounds: int = 0


class Feed:
    """The base of all feeds. ``run``: what all peers agree on, None until it is known. ``place``: where the
    events come from, in words. ``is_whole``: whether the first ``take`` gives a run's whole past, to be told
    in its own time. ``me``: the one peer that this reader belongs to; "" if it belongs to none."""

    run: RunConfig | None = None
    place: str = ""
    state: FeedState = FeedState()
    is_whole: bool = False
    me: str = ""
    folder: Path | None = None
    """Of that peer, if it runs on this machine and its own board reads this."""

    def take(self) -> News:
        """Everything new; called once or twice a second."""
        raise NotImplementedError

    def watched(self, now: float) -> None:
        """Somebody looks (monotonic seconds): a feed that costs others something may rest without it."""

    def invitation(self) -> str:
        """A ticket of the run, "" while none is known. May read a small file."""
        return ""

    def tokens_in_model(self) -> float | None:
        """Of the reader's own peer, as its record of credit says; None if there is none. May read a file."""
        return None

    def close(self) -> None:
        """Give everything back. May be called twice."""
