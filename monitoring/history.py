"""What a board remembers: figures over time, what happened and whose work counted, in one SQLite file.

Laws: the file is bounded (``TIERS``, ``MAX_HAPPENINGS``, ``MAX_COUNTED_ROUNDS``) whatever a swarm does. A
board that is started again goes on where the last one stopped. A damaged file is set aside under another
name, and a place that cannot be written is replaced by memory (``or_in_memory``). One thread writes, in one
transaction per ``write``; readers have a connection of their own, so a page never waits for a write.

Price: a week of 64 peers takes some 100 MB (``benchmarks/offline.py board``). What is older than a tier
is the mean over the next tier's step, so a short dip is not seen for ever.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from p2p_co2.errors import EnvironmentFault

TIERS = ((2, 1200), (20, 4 * 3600), (120, 48 * 3600), (900, 90 * 86400))
"""(seconds per sample, seconds that such samples are kept), finest first."""
SWARM = ""
"""In the place of a peer id: the whole swarm."""
AGREED = "agreed"
"""In the place of a peer id: the agreed parameters, of which tokens and loss are known. With a slash and a
name: another figure of theirs, in the place of the loss."""
MEASURES = ("tokens", "tokens_per_s", "loss", "utilisation", "up_bytes_per_s", "down_bytes_per_s")
"""The columns of a sample, in their order."""
MAX_HAPPENINGS = 100_000
MAX_COUNTED_ROUNDS = 20_000
MAX_POINTS = 720
MAX_LINES = 200
"""Of what happened, that a page is sent."""
_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS samples (
    step INTEGER, key TEXT, at INTEGER, {", ".join(f"{name} REAL" for name in MEASURES)},
    PRIMARY KEY (step, key, at)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS happenings (
    id INTEGER PRIMARY KEY, at REAL, kind TEXT, peer TEXT, fragment INTEGER, round INTEGER, words TEXT,
    key TEXT UNIQUE);
CREATE INDEX IF NOT EXISTS happenings_by_time ON happenings (at);
CREATE TABLE IF NOT EXISTS counted (peer TEXT PRIMARY KEY, weight REAL);
CREATE TABLE IF NOT EXISTS counted_rounds (id INTEGER PRIMARY KEY, fragment INTEGER, round INTEGER,
    UNIQUE (fragment, round));
"""
_FORMAT = 3


class Happening(NamedTuple):
    """One line of what happened. ``fragment`` (``telemetry.view.numbered``), ``round``: -1 if it is about
    none. Of those with one ``key`` the first is kept."""

    at: float
    kind: str
    peer: str
    fragment: int
    round: int
    words: str
    key: str


@dataclass
class Batch:
    """What one ``write`` takes. ``samples``: by peer, ``SWARM`` or ``AGREED``, values in the order of
    ``MEASURES``; NaN: not known. ``counted``: new totals of work by peer. ``counted_rounds``: (fragment,
    round) that they hold newly."""

    at: float
    samples: dict[str, Sequence[float]] = field(default_factory=dict)
    happenings: list[Happening] = field(default_factory=list)
    counted: Mapping[str, float] = field(default_factory=dict)
    counted_rounds: set[tuple[int, int]] = field(default_factory=set)


class BoardHistory:
    """The file at ``path``; None keeps all in memory. ``writing`` and ``reading`` from one thread each.
    ``trouble``: what is wrong with it for as long as it lives, in words."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.trouble = ""
        self._place = str(path) if path else f"file:{secrets.token_hex(8)}?mode=memory&cache=shared"
        self._writer = self._opened()
        self._reader = self._connect()
        if path is None:
            # In memory there is no write-ahead log: without this a reader meets the locks of the writer.
            self._reader.execute("PRAGMA read_uncommitted=1")
        self._lock = threading.Lock()
        self._kept_until = 0.0

    @classmethod
    def or_in_memory(cls, path: Path | None) -> BoardHistory:
        """The history at ``path``, or one in memory whose ``trouble`` says why."""
        try:
            return cls(path)
        except EnvironmentFault as error:
            history = cls(None)
            history.trouble = f"{error}. What this board remembers ends with it"
            return history

    def _opened(self) -> sqlite3.Connection:
        try:
            if self.path is None:
                return self._prepared()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            try:
                return self._prepared()
            except sqlite3.OperationalError:
                raise
            except sqlite3.DatabaseError:
                os.replace(self.path, self.path.with_name(f"{self.path.name}.damaged-{time.time():.0f}"))
                return self._prepared()
        except (OSError, sqlite3.Error) as error:
            words = f"cannot keep the board's history in {self.path}: {error}"
            raise EnvironmentFault(f"{words}; choose another place with --folder") from None

    def _prepared(self) -> sqlite3.Connection:
        connection = self._connect()
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=NORMAL")
            if connection.execute("PRAGMA user_version").fetchone()[0] not in (0, _FORMAT):
                raise sqlite3.DatabaseError("a history of another version")
            connection.executescript(_SCHEMA)
            connection.execute(f"PRAGMA user_version={_FORMAT}")
            if connection.execute("PRAGMA quick_check(1)").fetchone()[0] != "ok":
                raise sqlite3.DatabaseError("a damaged history")
        except sqlite3.Error:
            connection.close()  # before another file takes this one's place: closing it takes away the log
            raise
        return connection

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(
            self._place, timeout=5.0, isolation_level=None, check_same_thread=False, uri=self.path is None
        )

    def close(self) -> None:
        """May be called twice."""
        with self._lock:
            self._writer.close()
            self._reader.close()

    # ---- writing

    def write(self, batch: Batch) -> None:
        """Keep a batch, roll up what has grown old. Raises ``EnvironmentFault`` if the disk refuses; what was
        kept before stays."""
        with self._lock:
            try:
                self._writer.execute("BEGIN")
                self._write(batch)
                self._roll_up(batch.at)
                if batch.at // 300 > self._kept_until // 300:
                    self._prune(batch.at)
                self._writer.execute("COMMIT")
                self._kept_until = max(self._kept_until, batch.at)
            except (sqlite3.Error, OverflowError, ValueError) as error:  # or a number that it cannot hold
                with contextlib.suppress(sqlite3.Error):
                    self._writer.execute("ROLLBACK")
                raise EnvironmentFault(f"the board's history is not written: {error}") from None

    def _write(self, batch: Batch) -> None:
        step = TIERS[0][0]
        at = int(batch.at // step * step)
        many = self._writer.executemany
        rows = [
            (key, *(value if math.isfinite(value) else None for value in row))
            for key, row in batch.samples.items()
        ]
        many(f"INSERT OR REPLACE INTO samples VALUES ({step},?,{at}{',?' * len(MEASURES)})", rows)
        columns = ", ".join(Happening._fields)
        many(f"INSERT OR IGNORE INTO happenings ({columns}) VALUES (?,?,?,?,?,?,?)", batch.happenings)
        many("INSERT OR REPLACE INTO counted VALUES (?,?)", list(batch.counted.items()))
        many("INSERT OR IGNORE INTO counted_rounds (fragment, round) VALUES (?,?)", batch.counted_rounds)

    def _roll_up(self, now: float) -> None:
        """Make the samples of each coarser tier from the finer one below it, for every step that is over."""
        means = ", ".join(f"{'max' if name == 'tokens' else 'avg'}({name})" for name in MEASURES)
        for (finer, _), (step, _) in itertools.pairwise(TIERS):
            until = int(now // step * step)
            since = max(int(self._kept_until // step * step), until - 40 * step)
            if since < until:
                self._writer.execute(
                    f"INSERT OR REPLACE INTO samples SELECT {step}, key, at / {step} * {step}, {means} "
                    f"FROM samples WHERE step = ? AND at >= ? AND at < ? GROUP BY key, at / {step}",
                    (finer, since, until),
                )

    def _prune(self, now: float) -> None:
        for step, kept_s in TIERS:
            self._writer.execute("DELETE FROM samples WHERE step = ? AND at < ?", (step, int(now - kept_s)))
        for table, most in (("happenings", MAX_HAPPENINGS), ("counted_rounds", MAX_COUNTED_ROUNDS)):
            newest = f"SELECT id FROM {table} ORDER BY id DESC LIMIT 1 OFFSET {most}"
            self._writer.execute(f"DELETE FROM {table} WHERE id < ({newest})")

    # ---- reading

    def series(self, key: str, since: float, until: float) -> list[tuple[float, ...]]:
        """(at, values in the order of ``MEASURES``) of a peer, ``SWARM`` or ``AGREED``, oldest first, at most
        about ``MAX_POINTS``; NaN where nothing was known."""
        span_s = until - since
        fitting = (step for step, kept_s in TIERS if span_s / step <= MAX_POINTS and span_s <= kept_s)
        step = next(fitting, TIERS[-1][0])
        found = self._reader.execute(
            f"SELECT at, {', '.join(MEASURES)} FROM samples "
            "WHERE step = ? AND key = ? AND at >= ? AND at <= ? ORDER BY at",
            (step, key, int(since) - step, int(until)),
        )
        return [tuple(math.nan if value is None else float(value) for value in row) for row in found]

    def counted_rounds(self) -> set[tuple[int, int]]:
        """(fragment, round) of the newest rounds that ``counted`` holds."""
        return set(self._reader.execute("SELECT fragment, round FROM counted_rounds"))

    def happenings(self, newest: int, peer: str = "", kinds: Sequence[str] = ()) -> list[Happening]:
        """The newest happenings, of ``peer`` or ("") of all, newest first; ``kinds``: of events, all if there
        are none."""
        of_kinds = f"AND kind IN ({', '.join('?' * len(kinds))}) " if kinds else ""
        found = self._reader.execute(
            f"SELECT {', '.join(Happening._fields)} FROM happenings WHERE ? IN ('', peer) {of_kinds}"
            "ORDER BY at DESC, id DESC LIMIT ?",
            (peer, *kinds, newest),
        )
        return [Happening(*row) for row in found]

    def moved(self, key: str, since: float) -> tuple[float, float]:
        """About how many bytes a peer sent and received since then, as far as samples are kept."""
        until = 2**53
        sent = 0.0
        received = 0.0
        coarser = [step for step, _ in TIERS[1:]] + [1]
        for (step, _), next_step in zip(TIERS, coarser, strict=True):
            rows = self._reader.execute(
                "SELECT at, up_bytes_per_s, down_bytes_per_s FROM samples "
                "WHERE step = ? AND key = ? AND at >= ? AND at < ? ORDER BY at",
                (step, key, math.ceil(since), until),
            ).fetchall()
            if rows:
                until = -(-rows[0][0] // next_step) * next_step  # what is before it is in the next tier
                whole = [row for row in rows if row[0] >= until]
                sent += step * sum(row[1] or 0.0 for row in whole)
                received += step * sum(row[2] or 0.0 for row in whole)
        return sent, received

    def counted(self) -> dict[str, float]:
        """Work by peer as it was last kept."""
        return dict(self._reader.execute("SELECT peer, weight FROM counted").fetchall())

    def span(self) -> tuple[float, float]:
        """From when to when there are samples; (0, 0) if there are none."""
        steps = ", ".join(str(step) for step, _ in TIERS)
        ends = f"SELECT min(at), max(at) FROM samples WHERE step IN ({steps}) AND key = ?"
        first, last = self._reader.execute(ends, (SWARM,)).fetchone()
        return (float(first), float(last)) if first is not None else (0.0, 0.0)
