"""What slowed lines carried, exchange by exchange, and what the swarm made of them: for rehearsals.

An exchange is a committed round from its BEGIN to the moment when its last member knew of the commit. Its
goodput is the payload that the reduction needs (2 (1 - 1/M) times the fragment's bytes per peer and
direction) over that time. Its transfer is the part in which payload moves: until the last member holds all
means. Law: a pure function of events and profiles.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from monitoring.words import figure, percent
from p2p_co2.planning.profiles import LinkProfile
from p2p_co2.telemetry import events as ev
from p2p_co2.telemetry.view import SwarmView

Spans = list[tuple[float, float]]


@dataclass(frozen=True)
class TimedExchange:
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


def timed_exchanges(view: SwarmView) -> list[TimedExchange]:
    """Those of which both ends are known, by their beginning."""
    found = []
    for round_ in view.rounds.values():
        commits = round_.commits.values()
        ended_at = max((commit.at for commit in commits), default=0.0)
        if round_.begun is not None and ended_at > round_.begun[0]:
            began_at, _, group = round_.begun
            of_stage = (peer for peer in view.peers.values() if peer.stage == round_.stage)
            sent = [peer.sent[round_.fragment] for peer in of_stage if round_.fragment in peer.sent]
            payload_bytes = sent[-1].payload_bytes if sent else 0
            transfer_s = max(0.0, *(commit.means_s - commit.begun_s for commit in commits))
            found.append(TimedExchange(began_at, ended_at, len(group), payload_bytes, transfer_s))
    return sorted(found, key=lambda exchange: exchange.began_at)


def exchange_figures(view: SwarmView, lines: Iterable[LinkProfile], since: float = 0.0) -> dict[str, Any]:
    """The ``exchanges`` of a rehearsal's summary, of those that began at ``since`` (unix) or later.

    Exchanges that overlap count as one. ``goodput_share``: goodput over the mean upload rate;
    ``transfer_share``: the same over the exchange's transfer. ``exchanging_share``: of the time, in which an
    exchange was going on.
    """
    found = [exchange for exchange in timed_exchanges(view) if exchange.began_at >= since]
    busy = _union([(one.began_at, one.ended_at) for one in found])
    together = [[one for one in found if start <= one.began_at <= end] for start, end in busy]
    rates = [line.up_bits_per_s for line in lines]
    upload = statistics.fmean(rates) if rates else 0.0
    goodput = [_rate(each, [one.ended_at for one in each]) for each in together]
    transfer = [_rate(each, [one.began_at + one.transfer_s for one in each]) for each in together]
    busy_s = sum(end - start for start, end in busy)
    return {
        "count": len(found),
        "duration_s": _spread([one.ended_at - one.began_at for one in found]),
        "goodput_share": _spread([rate / upload for rate in goodput if rate and upload]),
        "transfer_share": _spread([rate / upload for rate in transfer if rate and upload]),
        "exchanging_share": round(busy_s / (busy[-1][1] - busy[0][0]), 4) if busy else None,
    }


def _rate(together: Sequence[TimedExchange], ends: Sequence[float]) -> float:
    """Bits per second of payload and means of each peer until each exchange's end; 0 where a part of it is
    not known."""
    spans = [(each.began_at, end) for each, end in zip(together, ends, strict=True)]
    if not all(each.moved_bits for each in together) or any(end <= start for start, end in spans):
        return 0.0
    return sum(each.moved_bits for each in together) / sum(end - start for start, end in _union(spans))


def _union(spans: Spans) -> Spans:
    merged: Spans = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def _spread(values: Sequence[float]) -> dict[str, float | None]:
    if not values:
        return {"median": None, "lowest": None, "highest": None}
    figures = {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}
    return {name: round(float(value), 4) for name, value in figures.items()}


@dataclass
class _Course:
    """A peer's stage, its ``Progress`` after its first rounds and its last, and by event the (at, seconds)
    for which training stood still."""

    name: str = ""
    stage: int = 0
    first: ev.Progress | None = None
    last: ev.Progress | None = None
    stood: dict[str, list[tuple[float, float]]] = field(default_factory=dict)


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
                course.name = event.name
                course.stage = event.stage
                course.first = None
            case ev.Progress(phase="training") if event.inner_steps:
                if course.first is None and min(event.versions, default=0) >= self.first_rounds:
                    course.first = event
                course.last = event
            case ev.CheckpointSaved() | ev.AgreedMeasured():
                course.stood.setdefault(event.kind, []).append((event.at, event.duration_s))

    def since(self) -> float | None:
        """When the last peer had its first rounds behind it (unix); None if one has not."""
        known = [course.first.at for course in self._courses.values() if course.first is not None]
        return max(known) if known and len(known) == len(self._courses) else None

    def figures(self) -> dict[str, Any]:
        """By peer's name: ``utilisation``, seconds in inner steps over seconds; of the same time what went
        into checkpoints (``saving_share``) and into measuring (``measuring_share``). ``tokens_per_s`` of all
        peers of the first stage together."""
        told: dict[str, dict[str, float]] = {"utilisation": {}, "saving_share": {}, "measuring_share": {}}
        tokens_per_s = 0.0
        for course in sorted(self._courses.values(), key=lambda course: course.name):
            first = course.first
            last = course.last
            if first is None or last is None or last.wall_s <= first.wall_s:
                continue
            wall_s = last.wall_s - first.wall_s
            tokens_per_s += (last.tokens - first.tokens) / wall_s if course.stage == 0 else 0.0
            told["utilisation"][course.name] = round((last.train_s - first.train_s) / wall_s, 4)
            for name, kind in (("saving_share", "checkpoint_saved"), ("measuring_share", "agreed_measured")):
                stood = course.stood.get(kind, ())
                stood_s = sum(took_s for at, took_s in stood if first.at < at <= last.at)
                told[name][course.name] = round(stood_s / wall_s, 4)
        return {**told, "tokens_per_s": round(tokens_per_s, 1)}


def exchange_words(exchanges: dict[str, Any]) -> str:
    """The ``exchanges`` of a rehearsal's summary in a sentence."""
    duration = exchanges["duration_s"]
    return (
        f"{exchanges['count']} exchanges, median {figure(duration['median'], 2)} s "
        f"({figure(duration['lowest'], 2)} to {figure(duration['highest'], 2)}); "
        f"line used by payload: median {percent(exchanges['goodput_share']['median'])}, "
        f"until all means had come {percent(exchanges['transfer_share']['median'])}; "
        f"an exchange was going on {percent(exchanges['exchanging_share'])} of the time"
    )
