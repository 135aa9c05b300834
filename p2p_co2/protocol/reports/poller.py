"""The observer's side: whom to ask next, and what their answers come to. No I/O, no clock.

Law: at most ``MAX_ASKED`` peers, one question in flight to each; a peer that fails is asked again ever more
rarely. Times of events are brought to this machine's clock when a peer's is off by more than
``OFFSET_MATTERS_S``. One of its signers sends a round's certificate: what most tellers of a round signed
counts, if two of them did, or its only member. So one liar counts nothing, but two together may.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import DecodeError

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.protocol.reports.reader import MAX_DECISIONS, CheckedReport, open_report, read_decision
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.messages_pb2 import Decision, Outcome, ReportRequest
from p2p_co2.telemetry.events import Event, Recalled, RoundCommitted, RoundCounted
from p2p_co2.telemetry.feed import News, Sighting

MAX_ASKED = 1024
ASK_EVERY_S = 1.0
ASKS_PER_S = 64.0
"""All peers together; with more than this many each is asked less often than every ``ASK_EVERY_S``."""
AGAIN_CAP_S = 30.0
OFFSET_MATTERS_S = 2.0
MAX_ROUNDS_WANTED = 4096
FORGET_LISTED_S = 900.0
"""A peer that is listed no more is asked on for this long: its last events may still be told."""
MAX_READS = 3
"""Different certificates of one round that are kept."""
MAX_SIGNATURES = 256
"""Checked of one answer, under the lock of whoever polls: some 30 ms."""


@dataclass
class _Asked:
    sighting: Sighting
    next_at: float
    listed_at: float
    process: int = 0
    after: int = 0
    failures: int = 0
    in_flight: bool = False
    asked_at: float = 0.0


@dataclass
class _Wanted:
    """A committed round: who told of it, and commits whose certificate holds, by who signed them."""

    at: float
    tellers: set[str] = field(default_factory=set)
    reads: dict[frozenset[str], RoundCounted] = field(default_factory=dict)
    done: bool = False

    def believed(self) -> RoundCounted | None:
        """What most tellers signed, and at least two of them or its only member: certificates of strangers
        cost nothing to make. None if it has not come."""
        told = {signers: len(signers & self.tellers) for signers in self.reads}
        for best in sorted(told, key=lambda signers: (-told[signers], sorted(signers)))[:1]:
            is_alone = told[best] == len(best) == len(self.reads[best].weights) == 1
            if told[best] >= 2 or is_alone:
                return self.reads[best]
        return None


class Poller:
    """``run``: digest of the run, 32 bytes. ``now`` is monotonic seconds, ``unix_now`` unix seconds."""

    def __init__(self, run: bytes) -> None:
        self._run = run
        self._asked: dict[PeerId, _Asked] = {}
        self._wanted: OrderedDict[tuple[int, int], _Wanted] = OrderedDict()
        self._news = News()

    @property
    def answering(self) -> int:
        return sum(asked.sighting.state == "answering" for asked in self._asked.values())

    def __len__(self) -> int:
        return len(self._asked)

    def listed(self, peers: Iterable[PeerId], now: float) -> None:
        """These peers exist now; those that are gone for long are asked no more."""
        for peer in peers:
            known = self._asked.get(peer)
            if known is not None:
                known.listed_at = now
            elif len(self._asked) < MAX_ASKED:
                self._asked[peer] = _Asked(Sighting(peer), next_at=now, listed_at=now)
                self._news.sightings.append(self._asked[peer].sighting)
        self._asked = {
            peer: asked
            for peer, asked in self._asked.items()
            if now - asked.listed_at <= FORGET_LISTED_S or asked.in_flight
        }

    def due(self, now: float, most: int = MAX_ASKED) -> list[tuple[PeerId, bytes]]:
        """Whom to ask now, ``most`` at once, those that have waited longest first, with the serialised
        ``ReportRequest``; each must end in ``answered`` or ``failed``."""
        due = [
            (peer, asked)
            for peer, asked in self._asked.items()
            if not asked.in_flight and asked.next_at <= now
        ]
        found = []
        for peer, asked in sorted(due, key=lambda item: item[1].next_at)[: max(0, most)]:
            asked.in_flight, asked.asked_at = True, now
            request = ReportRequest(run=self._run, process=asked.process, after=asked.after)
            found.append((peer, request.SerializeToString()))
        return found

    def answered(self, peer: PeerId, data: bytes, now: float, unix_now: float) -> None:
        """The answer of ``peer``, whatever it is."""
        asked = self._asked[peer]
        asked.in_flight = False
        try:
            report, _, refused = checked = open_report(data, peer, self._run)
        except RemoteProtocolError as error:
            self._put_off(asked, now)
            self._refuse(asked, Counter({error.reason: 1}), reason=f"sent a report that is none: {error}")
            return
        asked.failures = 0
        asked.next_at = now + max(ASK_EVERY_S, len(self._asked) / ASKS_PER_S, report.again_in_s)
        self._refuse(
            asked, refused, state="answering", reason="", clock_offset_s=report.sent_at - unix_now,
            round_trip_s=now - asked.asked_at,
        )  # fmt: skip
        if report.again_in_s > 0:
            return
        before = asked.after
        self._take_events(asked, checked, unix_now)
        if before < asked.after < report.newest:
            asked.next_at = now  # more than fits into one answer
        signatures = 0
        for decision in report.decisions[:MAX_DECISIONS]:
            wanted = self._wanted_by(decision)
            if wanted is not None and signatures + len(decision.votes) <= MAX_SIGNATURES:
                signatures += len(decision.votes)
                self._read(asked, wanted, decision, unix_now)

    def failed(self, peer: PeerId, reason: str, now: float) -> None:
        """``peer`` could not be asked."""
        asked = self._asked[peer]
        asked.in_flight = False
        self._put_off(asked, now)
        self._see(asked, state="unreachable", reason=reason)

    def take(self) -> News:
        """Everything new since the last call."""
        news, self._news = self._news, News()
        return news

    def _put_off(self, asked: _Asked, now: float) -> None:
        asked.failures += 1
        asked.next_at = now + min(AGAIN_CAP_S, 2.0 ** min(asked.failures, 8))

    def _see(self, asked: _Asked, **changes: Any) -> None:  # fields of Sighting
        asked.sighting = dataclasses.replace(asked.sighting, **changes)
        self._news.sightings.append(asked.sighting)

    def _refuse(self, asked: _Asked, causes: Counter[str], **changes: Any) -> None:  # fields of Sighting
        self._see(asked, refused=asked.sighting.refused + causes, **changes)

    def _take_events(self, asked: _Asked, checked: CheckedReport, unix_now: float) -> None:
        report, events, _ = checked
        follows = report.process == asked.process and report.first == asked.after + 1
        restarts = report.first == 1 or any(isinstance(event, Recalled) for event in events[:1])
        if not follows and not restarts:
            return  # the next question says again where we are
        asked.process, asked.after = report.process, max(report.last, report.first - 1)
        for event in events:
            self._news.events.append(in_our_time(event, report.sent_at - unix_now, unix_now))
            if isinstance(event, RoundCommitted):
                self._told(event, asked.sighting.peer)

    # ---- signed decisions

    def _told(self, event: RoundCommitted, teller: str) -> None:
        wanted = self._wanted.setdefault((event.fragment, event.round), _Wanted(event.at))
        if len(self._wanted) > MAX_ROUNDS_WANTED:
            self._wanted.popitem(last=False)
        if len(wanted.tellers) < MAX_ASKED:
            wanted.tellers.add(teller)
        self._count(wanted)

    def _wanted_by(self, decision: Decision) -> _Wanted | None:
        """The round that this certificate, not yet checked, says it is of; None if that needs no more."""
        try:
            key = Outcome.FromString(decision.outcome).key
        except DecodeError:
            return None
        wanted = self._wanted.get((key.fragment, key.round))
        return wanted if wanted and not wanted.done and len(wanted.reads) < MAX_READS else None

    def _read(self, asked: _Asked, wanted: _Wanted, decision: Decision, unix_now: float) -> None:
        try:
            counted, signers = read_decision(decision, self._run, unix_now)
        except RemoteProtocolError as error:
            self._refuse(asked, Counter({error.reason: 1}))
            return
        if signers & wanted.tellers:
            wanted.reads.setdefault(signers, counted)
            self._count(wanted)

    def _count(self, wanted: _Wanted) -> None:
        read = None if wanted.done else wanted.believed()
        if read is not None:
            wanted.done, wanted.reads = True, {}
            self._news.events.append(dataclasses.replace(read, at=wanted.at))


def in_our_time(event: Event, offset_s: float, unix_now: float) -> Event:
    """``event`` with its times by our clock, none of them ahead of it; ``offset_s``: the writer's minus
    ours."""
    if abs(offset_s) <= OFFSET_MATTERS_S and event.at <= unix_now:
        return event
    return dataclasses.replace(event, at=min(event.at - offset_s, unix_now))
