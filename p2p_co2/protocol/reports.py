"""Reports: what a peer tells observers of itself, and how an observer reads it. Both sides, no I/O, no clock.

The peer's side (``Responder``) keeps its newest events, and what the older ones come to. An answer has what
followed the last event that the asker has seen, signed. The observer's side (``Poller``) asks each peer in
turn and checks every answer (``open_report``).

Laws: an observer is no member and changes nothing. What a peer can make an observer hold, or an observer a
peer, is bounded. All in a report is hostile until checked: sizes before decompression, signature before
content, types before values. Every value must be one that an honest peer can have. What fails is dropped and
counted by its cause; the rest of the report stands. What most tellers of a round signed counts, if two of
them did, or its only member. So one liar counts nothing, but two together may.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import zlib
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError

from p2p_co2.config import stage_digest
from p2p_co2.errors import Offence, RemoteProtocolError
from p2p_co2.protocol.rounds import check_certificate, counted_weights
from p2p_co2.telemetry.events import (
    Event,
    LinkLost,
    LinkMeasured,
    LinkOpened,
    PeerJoined,
    PeerLeft,
    PeerStarted,
    Recalled,
    RoundBegan,
    RoundCommitted,
    RoundCounted,
    SliceMissed,
)  # fmt: skip
from p2p_co2.telemetry.feed import News, Sighting
from p2p_co2.telemetry.journal import event_line, parse_event
from p2p_co2.telemetry.view import PeerRecord, numbered, recalled
from p2p_co2.wire.heartbeat import HEARTBEAT_S
from p2p_co2.wire.identity import Identity, PeerId, parsed, public_key_of, unseal
from p2p_co2.wire.limits import MAX_FRAGMENTS, MAX_MEMBERS, MAX_STAGES, MAX_STRING
from p2p_co2.wire.messages_pb2 import Decision, Outcome, Report, ReportRequest

REPORT_CONTEXT = b"p2p-co2 report"
MAX_REPORT_BYTES = 512 << 10
"""A whole answer, before anything in it is read."""
MAX_EVENT_BYTES = 256 << 10
"""Events of one answer, decompressed."""
MAX_EVENTS = 4096
MAX_DECISIONS = 128
"""Of one answer; each costs a check of a signature."""
MAX_COUNT = 2**53
"""Most that a counter may say: past it a float (and a browser) counts no more."""
MAX_REAL = 1e15
MAX_ROUND = 2**40
_MOST: dict[str, float] = {
    "fragment": MAX_FRAGMENTS - 1, "round": MAX_ROUND, "stage": MAX_STAGES - 1, "stages": MAX_STAGES,
}  # fmt: skip
OLDEST_S = 400 * 86400.0
"""How far an event's time may lie before the moment in which its sender reports it."""
NEWEST_S = 60.0
"""The same after it."""


class CheckedReport(NamedTuple):
    """``events``: those that passed, with the sender's times; ``refused``: the others by cause."""

    report: Report
    events: list[Event]
    refused: Counter[str]


def open_report(data: bytes, peer: PeerId, run: bytes) -> CheckedReport:
    """What ``peer`` answered. Raises ``RemoteProtocolError`` if the whole of it is worth nothing."""
    if len(data) > MAX_REPORT_BYTES:
        raise RemoteProtocolError(Offence.TOO_LARGE, f"a report of {len(data)} bytes")
    signer, content = unseal(REPORT_CONTEXT, data)
    report = parsed(Report, content)
    if not signer == report.peer == peer or report.run != run:
        raise RemoteProtocolError("foreign report", f"of {report.peer[:64]!r}, signed by {signer}")
    whole = math.isfinite(report.sent_at) and 0 <= report.again_in_s < 3600
    if not whole or max(report.first, report.last, report.newest) > MAX_COUNT:
        raise RemoteProtocolError("bad report", "numbers out of range")
    checked = CheckedReport(report, [], Counter())
    for line in filter(None, _inflated(report.events).split(b"\n")[:MAX_EVENTS]):
        try:
            event = parse_event(line)
            check_event(event, peer, report.sent_at)
            checked.events.append(event)
        except ValueError as error:
            checked.refused[str(error)] += 1
    return checked


def _inflated(packed: bytes) -> bytes:
    if not packed:
        return b""
    inflater = zlib.decompressobj()
    try:
        text = inflater.decompress(packed, MAX_EVENT_BYTES + 1)
    except zlib.error:
        raise RemoteProtocolError(Offence.UNREADABLE, "events that are not zlib") from None
    if len(text) > MAX_EVENT_BYTES or not inflater.eof:
        raise RemoteProtocolError(Offence.TOO_LARGE, "events")
    return text


_NAMING = PeerJoined | PeerLeft | LinkOpened | LinkLost | LinkMeasured | RoundBegan | SliceMissed
"""Events that name peers which exist."""


def check_event(event: Event, peer: PeerId, sent_at: float) -> None:
    """Raise ``ValueError`` with a short cause unless ``peer`` can have written ``event`` by ``sent_at``."""
    if event.peer != peer:
        raise ValueError("an event of another peer")
    if isinstance(event, RoundCounted):
        raise ValueError("a count that only a certificate can tell")
    if not sent_at - OLDEST_S <= event.at <= sent_at + NEWEST_S:
        raise ValueError("an impossible time")
    for name, value in vars(event).items():
        if name not in {"at", "peer"}:
            _check_value(name, value)
    others = event.owners if isinstance(event, SliceMissed) else getattr(event, "group", None)
    others = (getattr(event, "other", ""),) if others is None else others
    if isinstance(event, _NAMING) and not all(_is_peer_id(name) for name in others):
        raise ValueError("a peer that cannot be")


def _check_value(name: str, value: Any) -> None:
    match value:
        case int() | float():
            most = _MOST.get(name, MAX_COUNT if isinstance(value, int) else MAX_REAL)
            is_measured = name in {"loss", "figures"} and (math.isnan(value) or -MAX_REAL <= value < 0)
            if not (0 <= value <= most or is_measured):  # written so that NaN is refused
                raise ValueError("an impossible number")
        case str():
            if len(value) > MAX_STRING:
                raise ValueError("a text that is too long")
        case tuple():
            if len(value) > (MAX_MEMBERS if name in {"group", "owners"} else MAX_FRAGMENTS):
                raise ValueError("too many items")
            for item in value:
                _check_value(name, item)
        case dict():
            for key, item in value.items():
                _check_value("", key)
                _check_value(name, item)


@lru_cache(maxsize=8192)
def _is_peer_id(name: str) -> bool:
    try:
        public_key_of(name)
    except RemoteProtocolError:
        return False
    return True


def read_decision(decision: Decision, run: bytes, at: float) -> tuple[RoundCounted, frozenset[str]]:
    """Whose work a commit says was in the mean, and who signed it, if its certificate holds. ``run``: digest
    of the run, or of the group of a stage. Raises ``RemoteProtocolError``."""
    votes = [(vote.member, vote.signature) for vote in decision.votes[: MAX_MEMBERS + 1]]
    outcome = check_certificate(decision.outcome, votes, run)
    weights = {member.peer: member.weight for member in outcome.members}
    right = _is_peer_id(outcome.coordinator) and 0 < len(weights) <= MAX_MEMBERS
    right = right and len(outcome.parts) <= MAX_MEMBERS and outcome.key.fragment < MAX_FRAGMENTS
    right = right and 0 < outcome.key.round <= MAX_ROUND
    right = right and all(_is_peer_id(peer) and 0 < weight < MAX_REAL for peer, weight in weights.items())
    stop = 0
    for part in outcome.parts if right else ():
        shares = {one.peer: one.weight for one in part.contributors}
        right = right and part.start_block == stop < part.stop_block
        right = right and len(shares) == len(part.contributors)
        right = right and all(0 < weight <= weights.get(peer, 0.0) for peer, weight in shares.items())
        stop = part.stop_block
    if not right:
        raise RemoteProtocolError("bad decision", "members, parts or a round that cannot be")
    counted = RoundCounted(
        at=at, peer=outcome.coordinator, fragment=outcome.key.fragment, round=outcome.key.round,
        weights=counted_weights(outcome),
    )  # fmt: skip
    return counted, frozenset(outcome.members[index].peer for index, _ in votes)


# ---- the peer's side

MAX_EVENTS_KEPT = 2048
"""About a quarter of an hour of a peer in four fragments with a round every five seconds."""
MAX_DECISIONS_KEPT = 64
MAX_REQUEST_BYTES = 4096
MAX_ANSWER_BYTES = 128 << 10
"""Of decisions in one answer; events have ``MAX_EVENT_BYTES``."""
MIN_INTERVAL_S = 0.3
"""Between two answers to one asker that is up to date."""
RETELL_INTERVAL_S = 2.0
"""The same to one that asks for what it has been told."""
MAX_ANSWERS_PER_S = 20.0
"""To all askers together; beyond it they are told to come again later."""
ANSWER_BYTES = 64 << 10
"""Of events: what more of them than this are counts as several answers."""
MAX_ASKERS = 256


class Responder:
    """``identity`` signs, ``run`` is the run's digest, ``process`` a random number of at most 63 bits. All
    calls come from one thread; ``now`` is monotonic seconds, ``unix_now`` unix seconds.

    Law: base plus kept events is the whole story. What falls out of the ring is folded into ``_base``, so a
    late observer knows what an early one does. The view of rounds is excepted: only kept events tell it.
    """

    def __init__(self, identity: Identity, run: bytes, process: int) -> None:
        self._identity = identity
        self._run = run
        self._process = process
        self._base = PeerRecord(identity.peer_id)
        self._events: deque[Event] = deque()
        self._first = 1
        self._decisions: OrderedDict[tuple[int, int], Decision] = OrderedDict()
        self._askers: OrderedDict[PeerId, tuple[float, int]] = OrderedDict()
        """When each was answered last, and the newest event that it had then."""
        self._allowance = MAX_ANSWERS_PER_S
        self._allowed_at = 0.0

    def see(self, event: Event) -> None:
        """Keep the next event of this peer. What its decisions say, the decisions themselves tell better."""
        if isinstance(event, RoundCounted):
            return
        self._events.append(event)
        if len(self._events) > MAX_EVENTS_KEPT:
            self._base.add(self._events.popleft())
            self._first += 1

    def remember(self, fragment: int, round_: int, decision: Decision) -> None:
        """Keep the certificate of a committed round if this peer is to tell it: of its signers that is the
        coordinator, or else the first."""
        outcome = Outcome.FromString(decision.outcome)
        signers = {outcome.members[vote.member].peer for vote in decision.votes}
        teller = outcome.coordinator if outcome.coordinator in signers else min(signers)
        if teller == self._identity.peer_id and decision.ByteSize() <= MAX_ANSWER_BYTES:
            self._decisions[fragment, round_] = decision
            if len(self._decisions) > MAX_DECISIONS_KEPT:
                self._decisions.popitem(last=False)

    def answer(self, data: bytes, asker: PeerId, now: float, unix_now: float) -> bytes:
        """The sealed ``Report`` to a serialised ``ReportRequest``. Raises ``RemoteProtocolError`` for one
        that breaks the rules."""
        request = self._read(data)
        report = Report(
            run=self._run, peer=self._identity.peer_id, process=self._process, sent_at=unix_now,
            newest=self._first + len(self._events) - 1,
        )  # fmt: skip
        known = request.after if request.process == self._process else 0
        known = min(known, report.newest)
        answered_at, told = self._askers.get(asker, (-math.inf, 0))
        interval_s = RETELL_INTERVAL_S if known < told else MIN_INTERVAL_S if known == report.newest else 0.0
        if (again_in_s := self._again_in_s(answered_at + interval_s, now)) > 0:
            report.again_in_s = again_in_s
        else:
            self._fill(report, known)
            self._askers[asker] = now, report.last
            self._askers.move_to_end(asker)
            if len(self._askers) > MAX_ASKERS:
                self._askers.popitem(last=False)
        return self._identity.seal(REPORT_CONTEXT, report.SerializeToString())

    def told_everybody(self, now: float) -> bool:
        """Whether each asker of late, which may come again, has had the newest event."""
        newest = self._first + len(self._events) - 1
        return all(told >= newest for at, told in self._askers.values() if now - at < 5 * HEARTBEAT_S)

    def _read(self, data: bytes) -> ReportRequest:
        if len(data) > MAX_REQUEST_BYTES:
            raise RemoteProtocolError(Offence.TOO_LARGE, f"a request of {len(data)} bytes")
        request = parsed(ReportRequest, data)
        if request.run != self._run:
            raise RemoteProtocolError("another run", request.run.hex()[:16])
        return request

    def _fill(self, report: Report, known: int) -> None:
        lines: list[bytes] = []
        if known < self._first - 1:
            lines = [event_line(event) for event in recalled(self._base)]
            known = self._first - 1
        size_bytes = sum(map(len, lines))
        decision_bytes = 0
        report.first = known + 1
        report.last = known
        for event in itertools.islice(self._events, known + 1 - self._first, None):
            line = event_line(event)
            if size_bytes + len(line) > MAX_EVENT_BYTES:
                break
            lines.append(line)
            size_bytes += len(line)
            report.last += 1
            if isinstance(event, RoundCommitted):
                decision = self._decisions.get((event.fragment, event.round))
                if decision is not None and decision_bytes + decision.ByteSize() <= MAX_ANSWER_BYTES:
                    decision_bytes += decision.ByteSize()
                    report.decisions.append(decision)
        self._allowance -= size_bytes / ANSWER_BYTES
        report.events = zlib.compress(b"".join(lines), 6) if lines else b""

    def _again_in_s(self, free_at: float, now: float) -> float:
        """0 if an asker that may have its answer from ``free_at`` on has it now, else how long to wait."""
        gained = max(0.0, now - self._allowed_at) * MAX_ANSWERS_PER_S
        self._allowance = min(MAX_ANSWERS_PER_S, self._allowance + gained)
        self._allowed_at = now
        if self._allowance < 1.0:
            return 1.0
        self._allowance -= now >= free_at
        return max(0.0, free_at - now)


# ---- the observer's side

MAX_ASKED = 1024
ASKS_PER_S = 64.0
"""All peers together; with more than this many each is asked less often than it beats at most."""
OFFSET_MATTERS_S = 2.0
"""Times of events are brought to this machine's clock when a peer's is off by more."""
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
    group: bytes
    """Digest under which its rounds are made: the run's, or its stage's."""
    stage: int = 0
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
    """Asks at most ``MAX_ASKED`` peers, one question in flight to each; a peer that fails is asked again ever
    more rarely. ``run``: digest of the run, 32 bytes. ``now``: monotonic seconds, ``unix_now``: unix."""

    def __init__(self, run: bytes) -> None:
        self._run = run
        self._asked: dict[PeerId, _Asked] = {}
        self._wanted: OrderedDict[tuple[int, int], _Wanted] = OrderedDict()
        self._news = News()

    def counted(self, state: str) -> int:
        """Peers in this ``Sighting.state``."""
        return sum(asked.sighting.state == state for asked in self._asked.values())

    def __len__(self) -> int:
        return len(self._asked)

    def listed(self, peers: Iterable[PeerId], now: float) -> None:
        """These peers exist now; those that are gone for long are asked no more."""
        for peer in peers:
            known = self._asked.get(peer)
            if known is not None:
                known.listed_at = now
            elif len(self._asked) < MAX_ASKED:
                self._asked[peer] = _Asked(Sighting(peer), now, now, self._run)
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
            asked.in_flight = True
            asked.asked_at = now
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
            self._see(asked, [error.reason], reason=f"sent a report that is none: {error}")
            return
        asked.failures = 0
        asked.next_at = now + max(HEARTBEAT_S, len(self._asked) / ASKS_PER_S, report.again_in_s)
        self._see(
            asked, refused.elements(), state="answering", reason="", clock_offset_s=report.sent_at - unix_now,
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
            wanted = self._wanted_by(decision, asked.stage)
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
        news = self._news
        self._news = News()
        return news

    def _put_off(self, asked: _Asked, now: float) -> None:
        asked.failures += 1
        asked.next_at = now + 2.0 ** min(asked.failures, 5)

    def _see(self, asked: _Asked, causes: Iterable[str] = (), **changes: Any) -> None:  # fields of Sighting
        refused = asked.sighting.refused + Counter(causes)
        asked.sighting = dataclasses.replace(asked.sighting, refused=refused, **changes)
        self._news.sightings.append(asked.sighting)

    def _take_events(self, asked: _Asked, checked: CheckedReport, unix_now: float) -> None:
        report, events, _ = checked
        follows = report.process == asked.process and report.first == asked.after + 1
        restarts = report.first == 1 or any(isinstance(event, Recalled) for event in events[:1])
        if not follows and not restarts:
            return  # the next question says again where we are
        asked.process = report.process
        asked.after = max(report.last, report.first - 1)
        offset_s = report.sent_at - unix_now
        for event in events:
            is_ours = abs(offset_s) <= OFFSET_MATTERS_S and event.at <= unix_now
            at = event.at if is_ours else min(event.at - offset_s, unix_now)
            self._news.events.append(dataclasses.replace(event, at=at))
            if isinstance(event, PeerStarted):
                asked.stage = event.stage
                asked.group = stage_digest(self._run, event.stage, event.stages)
            elif isinstance(event, RoundCommitted):
                self._told(event, asked)

    # ---- certificates

    def _told(self, event: RoundCommitted, teller: _Asked) -> None:
        key = numbered(teller.stage, event.fragment), event.round
        wanted = self._wanted.setdefault(key, _Wanted(event.at))
        if len(self._wanted) > MAX_ROUNDS_WANTED:
            self._wanted.popitem(last=False)
        if len(wanted.tellers) < MAX_ASKED:
            wanted.tellers.add(teller.sighting.peer)
        self._count(wanted)

    def _wanted_by(self, decision: Decision, stage: int) -> _Wanted | None:
        """The round of ``stage`` that this certificate, not yet checked, says it is of; None if that needs no
        more."""
        try:
            key = Outcome.FromString(decision.outcome).key
        except DecodeError:
            return None
        wanted = self._wanted.get((numbered(stage, key.fragment), key.round))
        return wanted if wanted and not wanted.done and len(wanted.reads) < MAX_READS else None

    def _read(self, asked: _Asked, wanted: _Wanted, decision: Decision, unix_now: float) -> None:
        try:
            counted, signers = read_decision(decision, asked.group, unix_now)
        except RemoteProtocolError as error:
            self._see(asked, [error.reason])
            return
        if signers & wanted.tellers:
            wanted.reads.setdefault(signers, counted)
            self._count(wanted)

    def _count(self, wanted: _Wanted) -> None:
        read = None if wanted.done else wanted.believed()
        if read is not None:
            wanted.done = True
            wanted.reads = {}
            told = wanted.tellers  # whose stage is known: the coordinator may be nobody whom we ask
            peer = read.peer if read.peer in told else min(told)
            self._news.events.append(dataclasses.replace(read, at=wanted.at, peer=peer))
