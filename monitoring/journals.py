"""A feed from journals on this disk: a demo while it runs, or any run that is over.

``place`` is a run's folder (``events.jsonl`` of each peer below ``peers/``, or one merged file), or one
peer's. Law: files are only read, and followed while they grow. Price: each look stats every journal.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from p2p_co2.config import RunConfig, read_run_config
from p2p_co2.errors import EnvironmentFault
from p2p_co2.system.process import is_kept
from p2p_co2.telemetry.events import PeerFinished, PeerStarted
from p2p_co2.telemetry.feed import FeedState, News, Sighting
from p2p_co2.telemetry.journal import Tail

MAX_JOURNALS = 1024
MAX_EVENTS_AT_ONCE = 20_000
QUIET_S = 15.0
"""A run whose journals do not grow for this long, and whose peers have finished or died, is over."""
FORSAKEN_S = 300.0
"""The same where no lock tells whether a peer's process lives: journals that were copied here."""
_LOOK_FOR_NEW_S = 2.0


class JournalFeed:
    """See ``telemetry.feed.Feed``. Raises ``EnvironmentFault`` if there is no such folder, ``ConfigError``
    for a ``run.toml`` that is none."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise EnvironmentFault(f"there is no folder {folder}; name a run's folder, or a ticket")
        self._folder = folder
        run_file = folder / "run.toml"
        self._run = read_run_config(run_file) if run_file.exists() else None
        self._tails: dict[Path, Tail] = {}
        self._looked_at = -1e9
        self._grew_at = 0.0
        """When the youngest journal grew, unix seconds."""
        self._alive, self._asked_locks_at = True, -1e9
        self._open: set[str] = set()
        self._seen: set[str] = set()

    @property
    def run(self) -> RunConfig | None:
        return self._run

    @property
    def place(self) -> str:
        return f"journals in {self._folder.resolve().name}"

    @property
    def state(self) -> FeedState:
        if not self._seen:
            return FeedState("connected", "no peer has written an event yet")
        quiet_s = time.time() - self._grew_at
        if not self._open and quiet_s > QUIET_S:
            return FeedState("ended", "the run is over: every peer has finished")
        if quiet_s > QUIET_S and not self._may_be_alive():
            return FeedState("ended", "the run is over: of those who wrote it no process lives any more")
        if quiet_s > FORSAKEN_S:
            return FeedState("ended", "the journals have not grown for long: whoever wrote them is gone")
        return FeedState("connected", f"{len(self._open)} of {len(self._seen)} peers are writing")

    def _may_be_alive(self) -> bool:
        """Whether some writer's process lives, by the locks of the peers' folders, or none can tell."""
        if time.monotonic() - self._asked_locks_at > _LOOK_FOR_NEW_S:
            self._asked_locks_at = time.monotonic()
            kept = [is_kept(path.parent) for path in self._tails]
            self._alive = True in kept or False not in kept
        return self._alive

    @property
    def is_whole(self) -> bool:
        return True

    @property
    def me(self) -> str:
        return ""

    def take(self) -> News:
        now = time.monotonic()
        if now - self._looked_at > _LOOK_FOR_NEW_S:
            self._looked_at = now
            self._find()
        news = News()
        for tail in self._tails.values():
            news.events += tail.new_events()
        for event in news.events:
            if event.peer not in self._seen:
                self._seen.add(event.peer)
                news.sightings.append(Sighting(event.peer, "answering", event.at))
            if isinstance(event, PeerStarted):
                self._open.add(event.peer)
            elif isinstance(event, PeerFinished):
                self._open.discard(event.peer)
        for path in self._tails if news.events else ():
            with contextlib.suppress(OSError):  # a peer's folder was cleared away while the others write
                self._grew_at = max(self._grew_at, path.stat().st_mtime)
        return news

    def watched(self, now: float) -> None:
        return  # nobody else is asked for anything

    def close(self) -> None:
        return  # journals are opened for each look only

    def _find(self) -> None:
        single = sorted(self._folder.glob("peers/*/events.jsonl")) or [self._folder / "events.jsonl"]
        for path in single[:MAX_JOURNALS]:
            if path not in self._tails and path.exists():
                self._tails[path] = Tail(path)
