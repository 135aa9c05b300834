"""What a board remembers: figures over time, rounds and happenings in one SQLite file, rolled up as they age.

Laws: the file is bounded (``TIERS``, ``MAX_ROUNDS`` and its like), whatever a swarm does; a board that
is started again goes on where the last one stopped; a damaged file is set aside under another name, never a
reason not to look at the swarm, and neither is a place that cannot be written (``or_in_memory``). One thread
writes, in one transaction per ``write``; readers have a connection of their own (write-ahead log), so a page
never waits for a write.

Price: a week of 64 peers takes tens of megabytes (``benchmarks/board.py`` measures it); what is older than a
tier is the mean over the next tier's step, so a short dip is not seen for ever.
"""

from __future__ import annotations

import contextlib
import math
import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from p2p_co2.errors import EnvironmentFault

TIERS = ((2, 1200), (20, 4 * 3600), (120, 48 * 3600), (900, 90 * 86400))
"""(seconds per sample, seconds that such samples are kept), finest first."""
SWARM = ""
"""In the place of a peer id: the whole swarm."""
MEASURES = (
    "tokens", "tokens_per_s", "loss", "utilisation", "up_bytes_per_s", "down_bytes_per_s", "exposed_s",
    "in_flight_s", "peers",
)  # fmt: skip
FRAGMENT_MEASURES = ("gap", "momentum_norm", "staleness")
MAX_ROUNDS = 200_000
MAX_HAPPENINGS = 100_000
MAX_AGREED = 20_000
"""Newest measurements of the agreed parameters."""
MAX_TIME_LINES = 2_000
"""Newest rounds whose members' times are kept."""
MAX_NAMES = 4096
"""With more peers than these, those of which nothing is kept any more go."""
MAX_POINTS = 720
_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS peers (id INTEGER PRIMARY KEY, peer TEXT UNIQUE NOT NULL);
CREATE TABLE IF NOT EXISTS samples (
    step INTEGER, peer INTEGER, at INTEGER, {", ".join(f"{name} REAL" for name in MEASURES)},
    PRIMARY KEY (step, peer, at)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS fragments (
    step INTEGER, fragment INTEGER, at INTEGER, {", ".join(f"{name} REAL" for name in FRAGMENT_MEASURES)},
    PRIMARY KEY (step, fragment, at)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS rounds (
    fragment INTEGER, round INTEGER, at REAL, outcome TEXT, group_size INTEGER, contributors INTEGER,
    staleness INTEGER, duration_s REAL, counted INTEGER, reason TEXT, PRIMARY KEY (fragment, round)
    ) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS rounds_by_time ON rounds (at);
CREATE TABLE IF NOT EXISTS time_lines (
    fragment INTEGER, round INTEGER, members TEXT, PRIMARY KEY (fragment, round)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS happenings (
    id INTEGER PRIMARY KEY, at REAL, kind TEXT, peer INTEGER, fragment INTEGER, round INTEGER, words TEXT);
CREATE INDEX IF NOT EXISTS happenings_by_time ON happenings (at);
CREATE TABLE IF NOT EXISTS counted (peer INTEGER PRIMARY KEY, weight REAL);
CREATE TABLE IF NOT EXISTS agreed (at REAL PRIMARY KEY, tokens REAL, loss REAL) WITHOUT ROWID;
"""
_FORMAT = 1
_ALL = {
    "samples": "peer IN (SELECT id FROM peers)",
    "fragments": "fragment BETWEEN 0 AND 255",
}
"""Every key, spelt so that SQLite looks up each one's newest rows and does not read all there are."""


class RoundRow(NamedTuple):
    """One round as it is kept. ``outcome``: "committed", "partial", "late", "aborted"; ``reason`` of an
    abort."""

    fragment: int
    round: int
    at: float
    outcome: str
    group_size: int
    contributors: int
    staleness: int
    duration_s: float
    counted: int
    reason: str


class Happening(NamedTuple):
    """One line of what happened. ``fragment``, ``round``: -1 if it is about none."""

    at: float
    kind: str
    peer: str
    fragment: int
    round: int
    words: str


@dataclass
class Batch:
    """What one ``write`` takes. ``samples``: by peer, values in the order of ``MEASURES`` (NaN: not known);
    ``fragments``: by fragment, in the order of ``FRAGMENT_MEASURES``; ``time_lines``: JSON by (fragment,
    round); ``counted``: new totals by peer; ``agreed``: (at, tokens, loss)."""

    at: float
    samples: Mapping[str, Sequence[float]]
    fragments: Mapping[int, Sequence[float]]
    rounds: Sequence[RoundRow] = ()
    time_lines: Mapping[tuple[int, int], str] | None = None
    happenings: Sequence[Happening] = ()
    counted: Mapping[str, float] | None = None
    agreed: Sequence[tuple[float, float, float]] = ()


class History:
    """The file at ``path``; None keeps all in memory. ``writing`` and ``reading`` from one thread each."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.trouble = ""
        """What is wrong with it for as long as it lives, in words."""
        self._place = str(path) if path else f"file:board-{os.getpid()}-{id(self)}?mode=memory&cache=shared"
        self._writer = self._opened()
        self._reader = self._connect()
        if path is None:
            # In memory there is no write-ahead log: without this a reader meets the locks of the writer.
            self._reader.execute("PRAGMA read_uncommitted=1")
        self._lock = threading.Lock()
        self._peers = self._names()
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
            if self.path is not None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            try:
                return self._prepared()
            except sqlite3.DatabaseError as error:
                if self.path is None or isinstance(error, sqlite3.OperationalError):
                    raise
                aside = self.path.with_name(f"{self.path.name}.damaged-{time.time():.0f}")
                os.replace(self.path, aside)
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
            before = dict(self._peers), list(self._rolled_at), self._pruned_at
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
                self._peers, self._rolled_at, self._pruned_at = before  # as the file has them
                raise EnvironmentFault(f"the board's history is not written: {error}") from None

    def _write(self, batch: Batch) -> None:
        step = TIERS[0][0]
        at = int(batch.at // step * step)
        marks = ",".join("?" * (3 + len(MEASURES)))
        self._writer.executemany(
            f"INSERT OR REPLACE INTO samples VALUES ({marks})",
            [(step, self._number(peer), at, *map(_finite, row)) for peer, row in batch.samples.items()],
        )
        marks = ",".join("?" * (3 + len(FRAGMENT_MEASURES)))
        self._writer.executemany(
            f"INSERT OR REPLACE INTO fragments VALUES ({marks})",
            [(step, fragment, at, *map(_finite, row)) for fragment, row in batch.fragments.items()],
        )
        self._writer.executemany("INSERT OR REPLACE INTO rounds VALUES (?,?,?,?,?,?,?,?,?,?)", batch.rounds)
        self._writer.executemany(
            "INSERT OR REPLACE INTO time_lines VALUES (?,?,?)",
            [(*key, members) for key, members in (batch.time_lines or {}).items()],
        )
        self._writer.executemany(
            "INSERT INTO happenings (at, kind, peer, fragment, round, words) VALUES (?,?,?,?,?,?)",
            [(h.at, h.kind, self._number(h.peer), h.fragment, h.round, h.words) for h in batch.happenings],
        )
        self._writer.executemany(
            "INSERT OR REPLACE INTO counted VALUES (?,?)",
            [(self._number(peer), weight) for peer, weight in (batch.counted or {}).items()],
        )
        self._writer.executemany("INSERT OR REPLACE INTO agreed VALUES (?,?,?)", batch.agreed)

    def _number(self, peer: str) -> int:
        number = self._peers.get(peer)
        if number is None:
            row = self._writer.execute("INSERT INTO peers (peer) VALUES (?) RETURNING id", (peer,)).fetchone()
            number = self._peers[peer] = int(row[0])
        return number

    def _roll_up(self, now: float) -> None:
        """Make the samples of each coarser tier from the finer one below it, for every step that is over."""
        for tier in range(1, len(TIERS)):
            step, finer = TIERS[tier][0], TIERS[tier - 1][0]
            until = int(now // step * step)
            if until <= self._rolled_at[tier]:
                continue
            since = max(self._rolled_at[tier], until - 40 * step)
            self._rolled_at[tier] = until
            for table, key, names in (
                ("samples", "peer", MEASURES),
                ("fragments", "fragment", FRAGMENT_MEASURES),
            ):
                means = ", ".join(f"{'max' if name == 'tokens' else 'avg'}({name})" for name in names)
                fresh = f"step = ? AND {_ALL[table]} AND at >= ? AND at < ?"
                self._writer.execute(
                    f"INSERT OR REPLACE INTO {table} SELECT {step}, {key}, at / {step} * {step}, {means} "
                    f"FROM {table} WHERE {fresh} GROUP BY {key}, at / {step}",
                    (finer, since, until),
                )

    def _prune(self, now: float) -> None:
        self._pruned_at = now
        for step, kept_s in TIERS:
            for table in ("samples", "fragments"):
                self._writer.execute(
                    f"DELETE FROM {table} WHERE step = ? AND {_ALL[table]} AND at < ?",
                    (step, int(now - kept_s)),
                )
        for table, most in (("rounds", MAX_ROUNDS), ("happenings", MAX_HAPPENINGS), ("agreed", MAX_AGREED)):
            self._writer.execute(
                f"DELETE FROM {table} WHERE at < "
                f"(SELECT at FROM {table} ORDER BY at DESC LIMIT 1 OFFSET {most})"
            )
        self._writer.execute(
            "DELETE FROM time_lines WHERE (fragment, round) NOT IN "
            f"(SELECT fragment, round FROM rounds ORDER BY at DESC LIMIT {MAX_TIME_LINES})"
        )
        if len(self._peers) > MAX_NAMES:
            self._prune_names()

    def _prune_names(self) -> None:
        sampled = " OR ".join(
            f"EXISTS (SELECT 1 FROM samples WHERE step = {step} AND peer = peers.id)" for step, _ in TIERS
        )
        self._writer.execute(
            "DELETE FROM peers WHERE id NOT IN (SELECT peer FROM happenings) "
            f"AND id NOT IN (SELECT peer FROM counted) AND NOT ({sampled})"
        )
        self._peers = self._names()

    def _names(self) -> dict[str, int]:
        return {peer: number for number, peer in self._writer.execute("SELECT id, peer FROM peers")}

    # ---- reading

    def series(self, peer: str, since: float, until: float) -> list[tuple[float, ...]]:
        """(at, values in the order of ``MEASURES``) of a peer or ``SWARM``, oldest first, at most about
        ``MAX_POINTS``; NaN where nothing was known."""
        return self._series("samples", "peer", self._peers.get(peer, -1), since, until)

    def fragment_series(self, fragment: int, since: float, until: float) -> list[tuple[float, ...]]:
        """The same of a fragment, over all peers, in the order of ``FRAGMENT_MEASURES``."""
        return self._series("fragments", "fragment", fragment, since, until)

    def _series(
        self, table: str, key: str, number: int, since: float, until: float
    ) -> list[tuple[float, ...]]:
        step = next(
            (
                step
                for step, kept_s in TIERS
                if (until - since) / step <= MAX_POINTS and until - since <= kept_s
            ),
            TIERS[-1][0],
        )
        names = MEASURES if table == "samples" else FRAGMENT_MEASURES
        found = self._reader.execute(
            f"SELECT at, {', '.join(names)} FROM {table} "
            f"WHERE step = ? AND {key} = ? AND at >= ? AND at <= ? ORDER BY at",
            (step, number, int(since) - step, int(until)),
        )
        return [tuple(math.nan if value is None else float(value) for value in row) for row in found]

    def rounds(self, newest: int, fragment: int | None = None) -> list[RoundRow]:
        """The newest rounds, newest first."""
        chosen, values = ("", ()) if fragment is None else ("WHERE fragment = ?", (fragment,))
        found = self._reader.execute(
            f"SELECT * FROM rounds {chosen} ORDER BY at DESC LIMIT ?", (*values, newest)
        )
        return [RoundRow(*row) for row in found]

    def counted_rounds(self) -> Iterator[tuple[int, int]]:
        """(fragment, round) of the rounds that ``counted`` has been told of, newest first."""
        found = self._reader.execute(
            "SELECT fragment, round FROM rounds WHERE counted = 1 ORDER BY at DESC LIMIT 20000"
        )
        yield from found

    def time_line(self, fragment: int, round_: int) -> str:
        """The members' times of a round, as JSON; "" if they are not kept."""
        found = self._reader.execute(
            "SELECT members FROM time_lines WHERE fragment = ? AND round = ?", (fragment, round_)
        ).fetchone()
        return str(found[0]) if found else ""

    def happenings(
        self, newest: int, *, peer: str | None = None, fragment: int | None = None, kinds: Sequence[str] = ()
    ) -> list[Happening]:
        """The newest happenings that fit, newest first."""
        terms, values = ["1"], list[object]()
        if peer is not None:
            terms.append("happenings.peer = ?")
            values.append(self._peers.get(peer, -1))
        if fragment is not None:
            terms.append("fragment = ?")
            values.append(fragment)
        if kinds:
            terms.append(f"kind IN ({','.join('?' * len(kinds))})")
            values += kinds
        found = self._reader.execute(
            "SELECT at, kind, peers.peer, fragment, round, words FROM happenings "
            f"JOIN peers ON peers.id = happenings.peer WHERE {' AND '.join(terms)} ORDER BY at DESC, "
            "happenings.id DESC LIMIT ?",
            (*values, newest),
        )
        return [Happening(*row) for row in found]

    def newest_happening_at(self) -> float:
        """When the newest kept happening was, unix seconds; 0 if there is none."""
        return float(self._reader.execute("SELECT max(at) FROM happenings").fetchone()[0] or 0.0)

    def counted(self) -> dict[str, float]:
        """Work by peer as it was last kept."""
        found = self._reader.execute(
            "SELECT peers.peer, weight FROM counted JOIN peers ON peers.id = counted.peer"
        )
        return {str(peer): float(weight) for peer, weight in found}

    def agreed(self) -> list[tuple[float, float, float]]:
        """(at, tokens of the swarm, held-out loss) of the agreed parameters, oldest first, thinned to about
        ``MAX_POINTS``."""
        rows = self._reader.execute("SELECT at, tokens, loss FROM agreed ORDER BY at").fetchall()
        stride = max(1, len(rows) // MAX_POINTS)
        return [(float(at), float(tokens), float(loss)) for at, tokens, loss in rows[::stride]]

    def span(self) -> tuple[float, float]:
        """From when to when there are samples; (0, 0) if there are none."""
        found = self._reader.execute(
            "SELECT min(at), max(at) FROM samples WHERE peer = ?", (self._peers.get(SWARM, -1),)
        ).fetchone()
        return (float(found[0]), float(found[1])) if found[0] is not None else (0.0, 0.0)

    def size_bytes(self) -> int:
        """Of the file, without the write-ahead log."""
        pages, page_bytes = (
            self._reader.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "page_size")
        )
        return int(pages) * int(page_bytes)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
