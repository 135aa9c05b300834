"""What a volunteer sees of their own peer: a line every ten seconds, and the events that matter as they come.

It only reads events and never raises into the thread that reports them; the journal has all figures.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable

from p2p_co2.telemetry.events import (
    CaughtUp,
    CheckpointSaved,
    Event,
    FragmentApplied,
    LinkOpened,
    MessageRefused,
    Paused,
    PeerFinished,
    PeerJoined,
    PeerLeft,
    PeerStarted,
    Progress,
    Resumed,
    RoundAborted,
    RoundCommitted,
    StateLoading,
    TrainingEnded,
    Warned,
)

EVERY_S = 10.0
MOST_NAMED = 8
"""Fragments in one line."""


class StatusLines:
    """A ``daemon.Watch`` for a log or a pipe. ``see`` may be called from any thread; ``say`` gets one line of
    text at a time."""

    def __init__(self, say: Callable[[str], None], every_s: float = EVERY_S) -> None:
        self._say, self._every_s = say, every_s
        self._lock = threading.Lock()
        self._next_at = 0.0
        self._carriers: dict[str, str] = {}
        self._committed = self._alone = self._aborted = 0
        self._staleness = 0

    def see(self, event: Event) -> None:
        """Take in one event; prints if it is worth a line of its own, or if the next status line is due."""
        with self._lock:
            self._count(event)
            text = self._news(event)
            if isinstance(event, Progress) and time.monotonic() >= self._next_at:
                self._next_at = time.monotonic() + self._every_s
                text = self._status(event)
        if text:
            self.say(f"{time.strftime('%H:%M:%S')} {text}")

    def say(self, text: str) -> None:
        """One line. A pipe that nobody reads any more, or a log on a full disk, must not end a peer."""
        with contextlib.suppress(OSError):
            self._say(text)

    def close(self) -> None:
        return  # lines need no end

    def _count(self, event: Event) -> None:
        match event:
            case LinkOpened():
                self._carriers[event.other] = event.carrier
            case PeerLeft():
                self._carriers.pop(event.other, None)
            case RoundCommitted():
                self._committed += event.group_size > 1
                self._alone += event.group_size == 1
            case RoundAborted():
                self._aborted += 1
            case FragmentApplied():
                self._staleness = event.staleness

    def _news(self, event: Event) -> str:
        text = ""
        match event:
            case PeerStarted():
                size = f"{event.parameters:,} parameters on {event.device}"
                text = f"peer {event.peer} up: {size}, run {event.run[:12]}"
            case PeerJoined():
                text = f"peer {event.other} is here"
            case PeerLeft():
                text = f"peer {event.other} left: {event.reason.removeprefix('left: ')}"
            case RoundAborted():
                text = f"round {event.round} of fragment {event.fragment} aborted: {event.reason}"
            case StateLoading() | CaughtUp():
                text = _catching_up(event)
            case MessageRefused():
                text = f"refused a message of {event.other}: {event.reason}"
            case CheckpointSaved():
                text = f"checkpoint saved in {event.path}"
            case Paused():
                text = f"pausing: {event.reason}; the others go on (SIGUSR1 ends it)"
            case Resumed():
                text = f"going on after {event.paused_s:.0f} s"
            case TrainingEnded():
                text = (
                    "the run is over: waiting for the last rounds, so that no work is lost: "
                    f"{len(event.fragments)} fragments with work of this peer in at most "
                    f"{event.offers_within_s:.0f} s, then until all peers agree in at most "
                    f"{event.settles_within_s:.0f} s more"
                )
            case Warned():
                text = f"warning: {event.text}"
            case PeerFinished():
                text = f"left: {event.reason}; agreed state {event.digest[:16]}"
        return "".join(char if char.isprintable() else "?" for char in text)

    def _status(self, now: Progress) -> str:
        used = list(self._carriers.values())
        carriers = ", ".join(f"{used.count(name)} {name}" for name in sorted(set(used))) or "none"
        figures = (
            f"{now.phase}",
            f"round {now.position:.2f}",
            f"step {now.inner_steps}",
            f"loss {now.loss:.3f}" if math.isfinite(now.loss) else "loss -",
            f"{now.tokens_per_s:,.0f} tokens/s",
            f"links: {carriers}",
            f"{self._committed} committed, "
            f"{f'{self._alone} alone, ' if self._alone else ''}{self._aborted} aborted",
            f"staleness {self._staleness}",
            f"up {now.up_bytes / 1e6:.1f} MB, down {now.down_bytes / 1e6:.1f} MB",
            f"stood still {now.exposed_s:.1f} s",
        )
        return " | ".join(figures)


def _catching_up(event: StateLoading | CaughtUp) -> str:
    if isinstance(event, CaughtUp):
        return f"caught up fragment {event.fragment} to version {event.to_version} by {event.how}"
    named = ", ".join(map(str, event.fragments[:MOST_NAMED]))
    more = ", ..." if len(event.fragments) > MOST_NAMED else ""
    to_come = f"{(event.total_bytes - event.received_bytes) / 1e6:.1f} MB to come"
    return f"loading the agreed state: {to_come} (fragments: {named}{more}; donors: {event.donors})"
