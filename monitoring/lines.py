"""What emulated lines carried, exchange by exchange, and what the swarm made of them: for rehearsals.

An exchange is a committed round from its BEGIN to the moment when its last member knew of the commit. Its
bytes are what the lines' own counters say, packet headers and retransmissions included. ``goodput`` is the
other side: the payload that the reduction needs (2 (1 - 1/M) times the fragment's bytes per peer and
direction) over the same time. Its transfer is the part in which payload moves: until the last member holds
all means; votes and the decision come after it.

Law: a pure function of events, samples and profiles. Price: counters are read ten times a second and
interpolated between, so an exchange of less than a second is measured coarsely. Exchanges that overlap share
the lines, so they are held against them as one.
"""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from monitoring.words import figure, percent
from p2p_co2.planning.profiles import LinkProfile
from p2p_co2.telemetry import events as ev

Sample = tuple[float, Mapping[str, tuple[int, int]]]
"""(unix time, bytes (up, down) since the start by peer's name)."""
Place = tuple[int, int]
"""(fragment, round)"""
Spans = list[tuple[float, float]]


@dataclass(frozen=True)
class Exchange:
    """One committed round; times unix seconds, ``payload_bytes`` one encoded fragment, ``transfer_s`` from
    BEGIN until the slowest member held all means (0: nobody told)."""

    began_at: float
    ended_at: float
    group_size: int
    payload_bytes: int
    transfer_s: float

    @property
    def moved_bits(self) -> float:
        """What each peer sent, and received, of payload and means."""
        return 8 * 2 * (1 - 1 / self.group_size) * self.payload_bytes if self.group_size else 0.0


@dataclass
class ExchangeLog:
    """Collects what the figures need; ``add`` the events in any order that keeps each peer's own."""

    _begun: dict[Place, ev.RoundBegan] = field(default_factory=dict)
    _commits: dict[Place, list[ev.RoundCommitted]] = field(default_factory=dict)
    _payload_bytes: dict[int, int] = field(default_factory=dict)

    def add(self, event: ev.Event) -> None:
        match event:
            case ev.FragmentSent():
                self._payload_bytes[event.fragment] = event.payload_bytes
            case ev.RoundBegan():
                self._begun[event.fragment, event.round] = event
            case ev.RoundCommitted():
                self._commits.setdefault((event.fragment, event.round), []).append(event)

    def exchanges(self) -> list[Exchange]:
        """Those of which both ends are known, by their beginning."""
        found = []
        for place, begun in self._begun.items():
            commits = self._commits.get(place, [])
            ended_at = max((commit.at for commit in commits), default=begun.at)
            if ended_at > begun.at:
                transfer_s = max(0.0, *(commit.means_s - commit.begun_s for commit in commits))
                payload_bytes = self._payload_bytes.get(place[0], 0)
                found.append(Exchange(begun.at, ended_at, len(begun.group), payload_bytes, transfer_s))
        return sorted(found, key=lambda exchange: exchange.began_at)


def exchange_figures(
    log: ExchangeLog, traffic: Sequence[Sample], lines: Mapping[str, LinkProfile], since: float = 0.0
) -> dict[str, Any]:
    """The ``exchanges`` of a rehearsal's summary, of those that began at ``since`` (unix) or later.

    Exchanges that overlap count as one. ``line_share``: the bytes on its members' lines over what the lines
    could carry in the time, the busier direction of each, mean over the peers; None without ``traffic``.
    ``goodput_share``: the same of the payload alone, against the mean upload rate; ``transfer_share``: the
    same over the exchange's transfer. ``while_exchanging``: per peer, Mbit/s in the time in which at least
    one exchange was going on, and the share of the line.
    """
    found = [exchange for exchange in log.exchanges() if exchange.began_at >= since]
    busy = _union([(one.began_at, one.ended_at) for one in found])
    together = [[one for one in found if start <= one.began_at <= end] for start, end in busy]
    upload = statistics.fmean(line.up_bits_per_s for line in lines.values()) if lines else 0.0
    whole = [_rate(each, [(one.began_at, one.ended_at) for one in each]) for each in together]
    moving = [
        _rate(each, [(one.began_at, one.began_at + one.transfer_s) for one in each]) for each in together
    ]
    counters = _Counters(traffic) if len(traffic) > 1 else None
    busy_s = sum(end - start for start, end in busy)
    return {
        "count": len(found),
        "duration_s": _spread([one.ended_at - one.began_at for one in found]),
        "line_share": _spread([_line_share(span, counters, lines) for span in busy] if counters else []),
        "goodput_share": _spread([rate / upload for rate in whole if rate and upload]),
        "transfer_share": _spread([rate / upload for rate in moving if rate and upload]),
        "exchanging_share": round(busy_s / (busy[-1][1] - busy[0][0]), 4) if busy else None,
        "while_exchanging": {
            name: _while(name, line, busy, counters) for name, line in lines.items() if counters
        },
    }


class _Counters:
    """Bytes of a line at any time, interpolated between samples."""

    def __init__(self, traffic: Sequence[Sample]) -> None:
        self._samples = list(traffic)
        self._at = [at for at, _ in self._samples]

    def between(self, name: str, start: float, end: float) -> tuple[float, float]:
        """Bytes (up, down) of peer ``name`` from ``start`` to ``end`` (unix)."""
        before, after = self._reading(name, start), self._reading(name, end)
        return after[0] - before[0], after[1] - before[1]

    def _reading(self, name: str, at: float) -> tuple[float, float]:
        right = min(max(bisect.bisect_left(self._at, at), 1), len(self._at) - 1)
        (start, first), (end, last) = self._samples[right - 1], self._samples[right]
        part = min(1.0, max(0.0, (at - start) / (end - start))) if end > start else 0.0
        (up_0, down_0), (up_1, down_1) = first[name], last[name]
        return up_0 + part * (up_1 - up_0), down_0 + part * (down_1 - down_0)


def _rate(together: Sequence[Exchange], spans: Spans) -> float:
    """Bits per second of payload and means of each peer in the time of ``spans``; 0 where a part of it is
    not known."""
    if not all(each.moved_bits and end > start for each, (start, end) in zip(together, spans, strict=True)):
        return 0.0
    return sum(each.moved_bits for each in together) / sum(end - start for start, end in _union(spans))


def _line_share(
    span: tuple[float, float], counters: _Counters, lines: Mapping[str, LinkProfile]
) -> float | None:
    shares = []
    for name, line in lines.items():
        up, down = (8 * moved / (span[1] - span[0]) for moved in counters.between(name, *span))
        shares.append(max(up / line.up_bits_per_s, down / line.down_bits_per_s))
    return statistics.fmean(shares) if shares else None


def _while(name: str, line: LinkProfile, busy: Spans, counters: _Counters | None) -> dict[str, float | None]:
    busy_s = sum(end - start for start, end in busy)
    if not busy_s or counters is None:
        return dict.fromkeys(("up_mbit_per_s", "down_mbit_per_s", "up_share", "down_share"))
    moved = [counters.between(name, start, end) for start, end in busy]
    up, down = (8 * sum(column) / busy_s for column in zip(*moved, strict=True))
    return {
        "up_mbit_per_s": round(up / 1e6, 3), "down_mbit_per_s": round(down / 1e6, 3),
        "up_share": round(up / line.up_bits_per_s, 4), "down_share": round(down / line.down_bits_per_s, 4),
    }  # fmt: skip


def _union(spans: Spans) -> Spans:
    merged: Spans = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def _spread(values: Sequence[float | None]) -> dict[str, float | None]:
    known = sorted(value for value in values if value is not None)
    if not known:
        return {"median": None, "lowest": None, "highest": None}
    ends = {"lowest": round(known[0], 4), "highest": round(known[-1], 4)}
    return {"median": round(statistics.median(known), 4), **ends}


@dataclass
class _Course:
    """A peer's ``Progress`` after its first rounds and its last, and (at, seconds) that training stood still
    for checkpoints and for measuring the agreed parameters."""

    name: str = ""
    first: ev.Progress | None = None
    last: ev.Progress | None = None
    saved: list[tuple[float, float]] = field(default_factory=list)
    measured: list[tuple[float, float]] = field(default_factory=list)

    def share(
        self, stood_still: Sequence[tuple[float, float]], first: ev.Progress, last: ev.Progress
    ) -> float:
        stood_s = sum(took_s for at, took_s in stood_still if first.at < at <= last.at)
        return round(stood_s / (last.wall_s - first.wall_s), 4)


@dataclass
class SteadyState:
    """Compute utilisation between a peer's first rounds and its last: what a long run looks like.

    ``first_rounds``: rounds of each fragment that are not counted: 1, or as many as training waits for
    (``outer.blocking_rounds``). Law: a difference of two of the peer's own ``Progress`` reports, so nothing
    is estimated."""

    first_rounds: int
    _courses: dict[str, _Course] = field(default_factory=dict)

    def add(self, event: ev.Event) -> None:
        course = self._courses.setdefault(event.peer, _Course(event.peer))
        match event:
            case ev.PeerStarted():
                course.name, course.first = event.name, None
            case ev.Progress(phase="training") if event.inner_steps:
                if course.first is None and min(event.versions, default=0) >= self.first_rounds:
                    course.first = event
                course.last = event
            case ev.CheckpointSaved():
                course.saved.append((event.at, event.duration_s))
            case ev.AgreedMeasured():
                course.measured.append((event.at, event.duration_s))

    def since(self) -> float | None:
        """When the last peer had its first rounds behind it (unix); None if one has not."""
        firsts = [course.first for course in self._courses.values()]
        known = [first.at for first in firsts if first is not None]
        return max(known) if known and len(known) == len(firsts) else None

    def figures(self) -> dict[str, Any]:
        """By peer's name: ``utilisation``, seconds in inner steps over seconds; of the same time what went
        into checkpoints (``saving_share``) and into measuring (``measuring_share``). ``tokens_per_s`` of all
        peers together."""
        courses = sorted(self._courses.values(), key=lambda course: course.name)
        spans = [
            (course, course.first, course.last)
            for course in courses
            if course.first is not None and course.last is not None
            if course.last.wall_s > course.first.wall_s
        ]
        rates = [(last.tokens - first.tokens) / (last.wall_s - first.wall_s) for _, first, last in spans]
        return {
            "utilisation": {
                course.name: round((last.train_s - first.train_s) / (last.wall_s - first.wall_s), 4)
                for course, first, last in spans
            },
            "saving_share": {one.name: one.share(one.saved, first, last) for one, first, last in spans},
            "measuring_share": {one.name: one.share(one.measured, first, last) for one, first, last in spans},
            "tokens_per_s": round(sum(rates), 1),
        }


def exchange_words(exchanges: dict[str, Any]) -> str:
    """The ``exchanges`` of a rehearsal's summary in a sentence."""
    duration = exchanges["duration_s"]
    return (
        f"{exchanges['count']} exchanges, median {figure(duration['median'], 2)} s "
        f"({figure(duration['lowest'], 2)} to {figure(duration['highest'], 2)}); "
        f"line used in an exchange: median {percent(exchanges['line_share']['median'])}, "
        f"payload alone {percent(exchanges['goodput_share']['median'])}, "
        f"until all means had come {percent(exchanges['transfer_share']['median'])}; "
        f"an exchange was going on {percent(exchanges['exchanging_share'])} of the time"
    )
