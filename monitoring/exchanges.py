"""What emulated lines carried, exchange by exchange: counters of the lines held against the rounds' events.

An exchange is a committed round from its BEGIN to the moment when its last member knew of the commit. Its
bytes are what the lines' own counters say, packet headers and retransmissions included, so a figure here is
of the line and not of the program's hopes. ``goodput`` is the other side: the payload that the reduction
needs (2 (1 - 1/M) times the fragment's bytes per peer and direction) over the same time. Its transfer is the
part in which payload moves: until the last member holds all means; votes and the decision come after it.

Law: a pure function of events, samples and profiles. Price: counters are read ten times a second and
interpolated between, so an exchange of less than a second is measured coarsely. Exchanges that overlap share
the lines, so they are held against them as one: all that they moved, over the time in which one went on.
"""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from p2p_co2.planning.profiles import LinkProfile
from p2p_co2.telemetry.events import Event, FragmentSent, PeerStarted, RoundBegan, RoundCommitted

Sample = tuple[float, Mapping[str, tuple[int, int]]]
"""(unix time, bytes (up, down) since the start by peer's name)."""
Place = tuple[int, int]
"""(fragment, round)"""


@dataclass
class ExchangeLog:
    """Collects what the figures need; ``add`` the events in any order that keeps each peer's own."""

    names: dict[str, str] = field(default_factory=dict)
    _begun: dict[Place, tuple[float, int]] = field(default_factory=dict)
    _ended: dict[Place, float] = field(default_factory=dict)
    _payload_bytes: dict[int, int] = field(default_factory=dict)
    _transfer_s: dict[Place, float] = field(default_factory=dict)

    def add(self, event: Event) -> None:
        match event:
            case PeerStarted():
                self.names[event.peer] = event.name
            case FragmentSent():
                self._payload_bytes[event.fragment] = event.payload_bytes
            case RoundBegan():
                self._begun[event.fragment, event.round] = event.at, len(event.group)
            case RoundCommitted():
                place = event.fragment, event.round
                self._ended[place] = max(event.at, self._ended.get(place, 0.0))
                transfer_s = event.means_s - event.begun_s
                self._transfer_s[place] = max(transfer_s, self._transfer_s.get(place, 0.0))

    def exchanges(self) -> list[Exchange]:
        """Those of which both ends are known, by their beginning."""
        known = [
            Exchange(
                *place,
                begun[0],
                self._ended[place],
                begun[1],
                self._payload_bytes.get(place[0], 0),
                self._transfer_s[place],
            )
            for place, begun in self._begun.items()
            if place in self._ended and self._ended[place] > begun[0]
        ]
        return sorted(known, key=lambda exchange: exchange.began_at)


@dataclass(frozen=True)
class Exchange:
    """One committed round; times unix seconds, ``payload_bytes`` one encoded fragment, ``transfer_s`` from
    BEGIN until the slowest member held all means (0: nobody told)."""

    fragment: int
    round: int
    began_at: float
    ended_at: float
    group_size: int
    payload_bytes: int
    transfer_s: float = 0.0

    @property
    def duration_s(self) -> float:
        return self.ended_at - self.began_at

    @property
    def moved_bits(self) -> float:
        """What each peer sent, and received, of payload and means."""
        return 8 * 2 * (1 - 1 / self.group_size) * self.payload_bytes if self.group_size else 0.0


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
    counters = _Counters(traffic)
    upload = statistics.fmean(line.up_bits_per_s for line in lines.values()) if lines else 0.0
    together = _overlapping(found)
    shares = [share for each in together if (share := _line_share(each, counters, lines)) is not None]
    whole = [_rate(each, [(one.began_at, one.ended_at) for one in each]) for each in together]
    moving = [
        _rate(each, [(one.began_at, one.began_at + one.transfer_s) for one in each]) for each in together
    ]
    busy = _union([(exchange.began_at, exchange.ended_at) for exchange in found])
    return {
        "count": len(found),
        "duration_s": _spread([exchange.duration_s for exchange in found]),
        "line_share": _spread(shares),
        "goodput_share": _spread([rate / upload for rate in whole if rate and upload]),
        "transfer_share": _spread([rate / upload for rate in moving if rate and upload]),
        "exchanging_share": _exchanging_share(busy),
        "while_exchanging": {
            name: _while(name, line, busy, counters) for name, line in lines.items() if counters
        },
    }


class _Counters:
    """Bytes of a line at any time, interpolated between samples."""

    def __init__(self, traffic: Sequence[Sample]) -> None:
        self._samples = list(traffic)
        self._at = [at for at, _ in self._samples]

    def __bool__(self) -> bool:
        return len(self._at) > 1

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


def _overlapping(found: Sequence[Exchange]) -> list[list[Exchange]]:
    """Exchanges that follow each other without a pause, together; ``found`` by their beginning."""
    together: list[list[Exchange]] = []
    ends_at = float("-inf")
    for exchange in found:
        if exchange.began_at <= ends_at:
            together[-1].append(exchange)
        else:
            together.append([exchange])
        ends_at = max(ends_at, exchange.ended_at)
    return together


def _rate(together: Sequence[Exchange], spans: Sequence[tuple[float, float]]) -> float:
    """Bits per second of payload and means of each peer in the time of ``spans``; 0 where a part of it is
    not known."""
    if not all(each.moved_bits and end > start for each, (start, end) in zip(together, spans, strict=True)):
        return 0.0
    return sum(each.moved_bits for each in together) / sum(end - start for start, end in _union(spans))


def _line_share(
    together: Sequence[Exchange], counters: _Counters, lines: Mapping[str, LinkProfile]
) -> float | None:
    if not counters or not lines:
        return None
    start, end = together[0].began_at, max(exchange.ended_at for exchange in together)
    shares = []
    for name, line in lines.items():
        up, down = counters.between(name, start, end)
        bits_per_s = 8 * up / (end - start), 8 * down / (end - start)
        shares.append(max(bits_per_s[0] / line.up_bits_per_s, bits_per_s[1] / line.down_bits_per_s))
    return statistics.fmean(shares)


def _while(
    name: str, line: LinkProfile, busy: Sequence[tuple[float, float]], counters: _Counters
) -> dict[str, float | None]:
    busy_s = sum(end - start for start, end in busy)
    if not busy_s:
        return {"up_mbit_per_s": None, "down_mbit_per_s": None, "up_share": None, "down_share": None}
    moved = [counters.between(name, start, end) for start, end in busy]
    up, down = (8 * sum(column) / busy_s for column in zip(*moved, strict=True))
    return {
        "up_mbit_per_s": round(up / 1e6, 3),
        "down_mbit_per_s": round(down / 1e6, 3),
        "up_share": round(up / line.up_bits_per_s, 4),
        "down_share": round(down / line.down_bits_per_s, 4),
    }


def _exchanging_share(busy: Sequence[tuple[float, float]]) -> float | None:
    """Share of the time from the first exchange's begin to the last one's end with an exchange going on."""
    if not busy:
        return None
    return round(sum(end - start for start, end in busy) / (busy[-1][1] - busy[0][0]), 4)


def _union(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def _spread(values: Sequence[float]) -> dict[str, float | None]:
    if not values:
        return {"median": None, "lowest": None, "highest": None}
    ordered = sorted(values)
    middle = statistics.median(ordered)
    return {"median": round(middle, 4), "lowest": round(ordered[0], 4), "highest": round(ordered[-1], 4)}
