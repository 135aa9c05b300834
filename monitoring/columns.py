"""The columns of tables of peers, stages, hops and links: each figure once, for the board and the terminal.

A board is sent numbers and a unit in the heading, so that a browser can sort them; a terminal gets words.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

from monitoring.facts import ONLINE, SILENT_AFTER_S, PeerFacts
from monitoring.words import date, figure, links, missed_words, percent, plain, size


class Unit(NamedTuple):
    """Of a column. ``name``: in headings of the board, "" for none; ``factor``, ``decimals``: of its numbers
    there, -1 decimals for text."""

    name: str
    factor: float
    decimals: int

    def words(self, value: Any) -> str:
        """A figure in a terminal."""
        if self.decimals < 0:
            return str(value)
        if self.name == "%":
            return percent(value)
        if self.name in {"kB/s", "MB"}:
            return size(value)
        return figure(None if value is None else value * self.factor, self.decimals)


TEXT = Unit("", 1.0, -1)
COUNT = Unit("", 1.0, 0)
TENTHS = Unit("", 1.0, 1)
HUNDREDTHS = Unit("", 1.0, 2)
THOUSANDTHS = Unit("", 1.0, 3)
SHARE = Unit("%", 100.0, 1)
RATE = Unit("kB/s", 1e-3, 1)
FAST_RATE = Unit("Mbit/s", 8e-6, 2)
VOLUME = Unit("MB", 1e-6, 1)
LARGE_VOLUME = Unit("GB", 1e-9, 1)
SECONDS = Unit("s", 1.0, 1)
MILLISECONDS = Unit("ms", 1e3, 1)


class Column(NamedTuple):
    """``of``: the name of a fact, or what makes the figure of a row. ``short``: its heading in a terminal,
    with a line end where it is cut."""

    name: str
    unit: Unit
    of: str | Callable[[Any], Any]
    short: str = ""

    @property
    def heading(self) -> str:
        """On the board."""
        return f"{self.name} ({self.unit.name})" if self.unit.name else self.name

    def value(self, row: Any) -> Any:
        return self.of(row) if callable(self.of) else attrgetter(self.of)(row)

    def number(self, row: Any) -> Any:
        """For the board: text, a number in the column's unit, or None."""
        value = self.value(row)
        return value if value is None or self.unit.decimals < 0 else round(value * self.unit.factor, 3)

    def words(self, row: Any) -> str:
        """For a terminal."""
        return self.unit.words(self.value(row))


def a_month(peer: PeerFacts, moved_bytes: int) -> float | None:
    """Bytes in a month at the mean rate since the peer trains, of which it moved ``moved_bytes``; None if it
    is not online, or has just begun."""
    if peer.state not in ONLINE or peer.wall_s < SILENT_AFTER_S:
        return None
    month_s = 30 * 86400.0
    return moved_bytes / peer.wall_s * month_s


def _text(fact: str, limit: int) -> Callable[[Any], str]:
    return lambda row: plain(getattr(row, fact), limit)


PEER = {
    "peer": Column("Peer", TEXT, _text("label", 32), "peer"),
    "state": Column("State", TEXT, _text("state", 12), "state"),
    "stage": Column("Stage", COUNT, "stage", "stage"),
    "share": Column("Share, counted", SHARE, "share_counted", "share*"),
    "loss": Column("Training loss", THOUSANDTHS, "loss", "train\nloss"),
    "tokens_per_s": Column("Tokens/s", COUNT, "tokens_per_s", "tokens\nper s"),
    "position": Column("At round", TENTHS, "position", "at\nround"),
    "staleness": Column("Staleness (outer steps)", HUNDREDTHS, "staleness_mean", "stale-\nness"),
    "missed": Column("Not counted (exchanges)", TEXT, lambda peer: missed_words(peer.missed) or "0"),
    "used": Column("Used", SHARE, "utilisation", "compute\nused"),
    "exposed": Column("Exposed", SECONDS, "exposed_s", "exposed\ns"),
    "hidden": Column("Hidden", SECONDS, "hidden_s"),
    "sent": Column("Sent", VOLUME, "up_bytes", "sent"),
    "received": Column("Received", VOLUME, "down_bytes", "received"),
    "tokens": Column("Tokens, own word", COUNT, "tokens", "tokens"),
    "links": Column("Links", TEXT, lambda peer: links(peer.carriers), "links"),
    "waiting": Column("Waiting", SHARE, "waiting_share", "waiting"),
    "device": Column("Device", TEXT, _text("device", 16), "device"),
    "up": Column("Up", RATE, "up_bytes_per_s"),
    "down": Column("Down", RATE, "down_bytes_per_s"),
    "cap": Column("Upload cap", RATE, "upload_cap_bytes_per_s"),
    "month": Column("A month", LARGE_VOLUME, lambda peer: a_month(peer, peer.up_bytes + peer.down_bytes)),
    "floor": Column("Floor", RATE, "needed_bytes_per_s"),
    "software": Column("Software", TEXT, lambda peer: plain(peer.software, 24).removeprefix("p2p-co2 ")),
    "joined": Column("Joined", TEXT, lambda peer: date(peer.joined_at)),
}
"""Of a ``PeerFacts``."""
STAGE = {
    "stage": Column("Stage", COUNT, "stage", "stage"),
    "replicas": Column("Replicas", COUNT, "replicas", "repli-\ncas"),
    "apart": Column("Versions apart", COUNT, "versions_apart", "versions\napart"),
    "tokens_per_s": Column("Tokens/s", COUNT, "tokens_per_s", "tokens\nper s"),
    "queue": Column("Queue", COUNT, "waiting", "queue"),
    "waiting": Column("Waiting", SHARE, "waiting_share", "waiting"),
    "dropped": Column("Dropped", COUNT, "dropped", "drops"),
    "forward": Column("Forward", RATE, "forward_bytes_per_s", "forward\nper s"),
    "back": Column("Back", RATE, "back_bytes_per_s", "back\nper s"),
    "hop": Column("Hop", MILLISECONDS, "forward_round_trip_s", "hop\nms"),
    "committed": Column("Exchanges", COUNT, "rounds_committed", "commits"),
    "aborted": Column("Aborted", COUNT, "rounds_aborted", "aborted"),
    "waits_for": Column("Idle because of", TEXT, _text("waits_for", 60)),
}
"""Of a ``StageFacts``."""
