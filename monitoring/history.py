"""What a board remembers: figures over time, rounds and happenings in one SQLite file, rolled up as they age.

Laws: the file is bounded (``TIERS``, ``MAX_ROUNDS`` and its like), whatever a swarm does; a board that
is started again goes on where the last one stopped; a damaged file is set aside under another name, never a
reason not to look at the swarm, and neither is a place that cannot be written (``or_in_memory``). One thread
writes, in one transaction per ``write``; readers have a connection of their own (write-ahead log), so a page
never waits for a write.

Price: a week of 64 peers takes some 100 MB (``benchmarks/board.py`` measures it); what is older than a tier
is the mean over the next tier's step, so a short dip is not seen for ever.
"""

from __future__ import annotations

import contextlib
import math
import os
import sqlite3
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from monitoring.facts import RoundFacts
from p2p_co2.errors import EnvironmentFault

TIERS = ((2, 1200), (20, 4 * 3600), (120, 48 * 3600), (900, 90 * 86400))
"""(seconds per sample, seconds that such samples are kept), finest first."""
SWARM = ""
"""In the place of a peer id: the whole swarm."""
MEASURES = (
    "tokens", "tokens_per_s", "loss", "utilisation", "up_bytes_per_s", "down_bytes_per_s", "exposed_s",
    "in_flight_s", "peers",
)  # fmt: skip
"""Of a peer or of the swarm, in the columns' order."""
FRAGMENT_MEASURES = ("gap", "momentum_norm", "staleness")
"""Of a fragment (``fragment_key``), in the first columns."""
MAX_ROUNDS = 200_000
MAX_HAPPENINGS = 100_000
MAX_AGREED = 20_000
"""Newest measurements of the agreed parameters."""
MAX_TIME_LINES = 2_000
"""Newest rounds whose members' times are kept."""
MAX_POINTS = 720
_COLUMNS = tuple(f"v{place}" for place in range(len(MEASURES)))
_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS samples (
    step INTEGER, key TEXT, at INTEGER, {", ".join(f"{name} REAL" for name in _COLUMNS)},
    PRIMARY KEY (step, key, at)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS rounds (
    fragment INTEGER, round INTEGER, at REAL, outcome TEXT, group_size INTEGER, contributors INTEGER,
    staleness INTEGER, duration_s REAL, reason TEXT, counted INTEGER, members TEXT,
    PRIMARY KEY (fragment, round)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS rounds_by_time ON rounds (at);
CREATE TABLE IF NOT EXISTS happenings (
    id INTEGER PRIMARY KEY, at REAL, kind TEXT, peer TEXT, fragment INTEGER, round INTEGER, words TEXT,
    key TEXT UNIQUE);
CREATE INDEX IF NOT EXISTS happenings_by_time ON happenings (at);
CREATE TABLE IF NOT EXISTS counted (peer TEXT PRIMARY KEY, weight REAL);
CREATE TABLE IF NOT EXISTS agreed (at REAL PRIMARY KEY, tokens REAL, loss REAL) WITHOUT ROWID;
"""
_FORMAT = 2


def fragment_key(fragment: int) -> str:
    """In the place of a peer id: a fragment, over all peers."""
    return f"#{fragment}"


class Happening(NamedTuple):
    """One line of what happened. ``fragment``, ``round``: -1 if it is about none. Of those with one ``key``
    the first is kept."""

    at: float
    kind: str
    peer: str
    fragment: int
    round: int
    words: str
    key: str


@dataclass
class Batch:
    """What one ``write`` takes. ``samples``: by peer, ``SWARM`` or ``fragment_key``, values in the order of
    their measures (NaN: not known); ``rounds``: with the members' times as JSON; ``counted``: new totals by
    peer; ``agreed``: (at, tokens, loss)."""

    at: float
    samples: Mapping[str, Sequence[float]] = field(default_factory=dict)
    rounds: Sequence[tuple[RoundFacts, str]] = ()
    happenings: Sequence[Happening] = ()
    counted: Mapping[str, float] = field(default_factory=dict)
    agreed: Sequence[tuple[float, float, float]] = ()


class History:
    """The file at ``path``; None keeps all in memory. ``writing`` and ``reading`` from one thread each.
    ``trouble``: what is wrong with it for as long as it lives, in words."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.trouble = ""
        self._place = str(path) if path else f"file:board-{os.getpid()}-{id(self)}?mode=memory&cache=shared"
        self._writer = self._opened()
        self._reader = self._connect()
        if path is None:
            # In memory there is no write-ahead log: without this a reader meets the locks of the writer.
            self._reader.execute("PRAGMA read_uncommitted=1")
        self._lock = threading.Lock()
        self._rolled_at = [0] * len(TIERS)
        self._pruned_at = 0.0

    @classmethod
    def or_in_memory(cls, path: Path | None) -> History:
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
            except sqlite3.DatabaseError as error:
                if isinstance(error, sqlite3.OperationalError):
                    raise
                os.replace(self.path, self.path.with_name(f"{self.path.name}.damaged-{time.time():.0f}"))
                return self._prepared()
        except (OSError, sqlite3.Error) as error:
            raise EnvironmentFault(
                f"cannot keep the board's history in {self.path}: {error}; choose another place with --folder"
            ) from None

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
            before = list(self._rolled_at), self._pruned_at
            try:
                self._writer.execute("BEGIN")
                self._write(batch)
                self._roll_up(batch.at)
                if batch.at - self._pruned_at > 300:
                    self._prune(batch.at)
                self._writer.execute("COMMIT")
            except (sqlite3.Error, OverflowError, ValueError) as error:  # or a number that it cannot hold
                with contextlib.suppress(sqlite3.Error):
                    self._writer.execute("ROLLBACK")
                self._rolled_at, self._pruned_at = before  # as the file has them
                raise EnvironmentFault(f"the board's history is not written: {error}") from None

    def _write(self, batch: Batch) -> None:
        step = TIERS[0][0]
        at = int(batch.at // step * step)
        for key, row in batch.samples.items():
            names, marks = ", ".join(_COLUMNS[: len(row)]), ",".join("?" * (3 + len(row)))
            self._writer.execute(
                f"INSERT OR REPLACE INTO samples (step, key, at, {names}) VALUES ({marks})",
                (step, key, at, *(value if math.isfinite(value) else None for value in row)),
            )
        self._writer.executemany(
            "INSERT OR REPLACE INTO rounds VALUES (?,?,?,?,?,?,?,?,?,?,?)",
            [
                (*(getattr(one, name) for name in RoundFacts.model_fields), times)
                for one, times in batch.rounds
            ],
        )
        self._writer.executemany(
            "INSERT OR IGNORE INTO happenings (at, kind, peer, fragment, round, words, key) "
            "VALUES (?,?,?,?,?,?,?)",
            batch.happenings,
        )
        self._writer.executemany("INSERT OR REPLACE INTO counted VALUES (?,?)", list(batch.counted.items()))
        self._writer.executemany("INSERT OR REPLACE INTO agreed VALUES (?,?,?)", batch.agreed)

    def _roll_up(self, now: float) -> None:
        """Make the samples of each coarser tier from the finer one below it, for every step that is over."""
        means = ", ".join(f"{'max' if name == _COLUMNS[0] else 'avg'}({name})" for name in _COLUMNS)
        for tier in range(1, len(TIERS)):
            step, finer = TIERS[tier][0], TIERS[tier - 1][0]
            until = int(now // step * step)
            if until <= self._rolled_at[tier]:
                continue
            since = max(self._rolled_at[tier], until - 40 * step)
            self._rolled_at[tier] = until
            self._writer.execute(
                f"INSERT OR REPLACE INTO samples SELECT {step}, key, at / {step} * {step}, {means} "
                f"FROM samples WHERE step = ? AND at >= ? AND at < ? GROUP BY key, at / {step}",
                (finer, since, until),
            )

    def _prune(self, now: float) -> None:
        self._pruned_at = now
        for step, kept_s in TIERS:
            self._writer.execute("DELETE FROM samples WHERE step = ? AND at < ?", (step, int(now - kept_s)))
        for table, most in (("rounds", MAX_ROUNDS), ("happenings", MAX_HAPPENINGS), ("agreed", MAX_AGREED)):
            self._writer.execute(f"DELETE FROM {table} WHERE at < {_nth_newest(table, most)}")
        old = _nth_newest("rounds", MAX_TIME_LINES)
        self._writer.execute(f"UPDATE rounds SET members = '' WHERE members != '' AND at < {old}")

    # ---- reading

    def series(self, key: str, since: float, until: float) -> list[tuple[float, ...]]:
        """(at, values in the order of the measures) of a peer, ``SWARM`` or a fragment, oldest first, at most
        about ``MAX_POINTS``; NaN where nothing was known."""
        span_s = until - since
        fitting = (step for step, kept_s in TIERS if span_s / step <= MAX_POINTS and span_s <= kept_s)
        step = next(fitting, TIERS[-1][0])
        found = self._reader.execute(
            f"SELECT at, {', '.join(_COLUMNS)} FROM samples "
            "WHERE step = ? AND key = ? AND at >= ? AND at <= ? ORDER BY at",
            (step, key, int(since) - step, int(until)),
        )
        return [tuple(math.nan if value is None else float(value) for value in row) for row in found]

    def round(self, fragment: int, number: int) -> tuple[RoundFacts, str] | None:
        """A round and its members' times as JSON ("" if they are not kept); None if it is not kept."""
        row = self._reader.execute(
            "SELECT * FROM rounds WHERE fragment = ? AND round = ?", (fragment, number)
        ).fetchone()
        if row is None:
            return None
        *values, members = row
        return RoundFacts(**dict(zip(RoundFacts.model_fields, values, strict=True))), str(members)

    def counted_rounds(self) -> set[tuple[int, int]]:
        """(fragment, round) of the newest rounds that ``counted`` has been told of."""
        return set(
            self._reader.execute(
                "SELECT fragment, round FROM rounds WHERE counted = 1 ORDER BY at DESC LIMIT 20000"
            )
        )

    def happenings(
        self, newest: int, *, peer: str = "", fragment: int | None = None, kinds: Sequence[str] = ()
    ) -> list[Happening]:
        """The newest happenings that fit, newest first."""
        terms, values = ["1"], list[object]()
        if peer:
            terms.append("peer = ?")
            values.append(peer)
        if fragment is not None:
            terms.append("fragment = ?")
            values.append(fragment)
        if kinds:
            terms.append(f"kind IN ({','.join('?' * len(kinds))})")
            values += kinds
        found = self._reader.execute(
            f"SELECT at, kind, peer, fragment, round, words, key FROM happenings WHERE {' AND '.join(terms)} "
            "ORDER BY at DESC, id DESC LIMIT ?",
            (*values, newest),
        )
        return [Happening(*row) for row in found]

    def counted(self) -> dict[str, float]:
        """Work by peer as it was last kept."""
        return dict(self._reader.execute("SELECT peer, weight FROM counted").fetchall())

    def agreed(self) -> list[tuple[float, float, float]]:
        """(at, tokens of the swarm, held-out loss) of the agreed parameters, oldest first, thinned to about
        ``MAX_POINTS``."""
        rows = self._reader.execute("SELECT at, tokens, loss FROM agreed ORDER BY at").fetchall()
        return rows[:: max(1, len(rows) // MAX_POINTS)]

    def span(self) -> tuple[float, float]:
        """From when to when there are samples; (0, 0) if there are none."""
        steps = ", ".join(str(step) for step, _ in TIERS)
        ends = f"SELECT min(at), max(at) FROM samples WHERE step IN ({steps}) AND key = ?"
        first, last = self._reader.execute(ends, (SWARM,)).fetchone()
        return (float(first), float(last)) if first is not None else (0.0, 0.0)

    def size_bytes(self) -> int:
        """Of the file, without the write-ahead log."""
        pages = self._reader.execute("PRAGMA page_count").fetchone()[0]
        return int(pages) * int(self._reader.execute("PRAGMA page_size").fetchone()[0])


def _nth_newest(table: str, number: int) -> str:
    return f"(SELECT at FROM {table} ORDER BY at DESC LIMIT 1 OFFSET {number})"
