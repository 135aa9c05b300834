"""The peer's side: keeps what observers may ask for, and answers within bounds.

Law: base plus kept events is the whole story: what falls out of the ring has been folded into ``_base``, so
an observer that comes late folds base and ring to what it would know had it been there from the start (the
view of rounds excepted, which only the kept events tell).
"""

from __future__ import annotations

import itertools
import zlib
from collections import OrderedDict, deque

from google.protobuf.message import DecodeError

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.protocol.reports.reader import MAX_EVENT_BYTES, REPORT_CONTEXT
from p2p_co2.protocol.wire.identity import Identity, PeerId
from p2p_co2.protocol.wire.messages_pb2 import Decision, Outcome, Report, ReportRequest
from p2p_co2.telemetry.events import Event, RoundCommitted, RoundCounted
from p2p_co2.telemetry.journal import event_line
from p2p_co2.telemetry.view import PeerView, recalled

MAX_EVENTS_KEPT = 2048
"""About a quarter of an hour of a peer in four fragments with a round every five seconds."""
MAX_DECISIONS_KEPT = 64
MAX_REQUEST_BYTES = 4096
MAX_ANSWER_BYTES = 128 << 10
"""Of decisions in one answer; events have ``reader.MAX_EVENT_BYTES``."""
MIN_INTERVAL_S, RETELL_INTERVAL_S = 0.3, 2.0
"""Between two answers to one asker that is up to date, or that asks for what it has been told."""
MAX_ANSWERS_PER_S, ANSWER_BYTES = 20.0, 64 << 10
"""To all askers together, an answer for each so many bytes of events in it; beyond it they are told to come
again later."""
MAX_ASKERS = 256
RECENTLY_S = 5.0
"""An asker of that long ago may come again."""


class Responder:
    """``identity`` signs, ``run`` is the run's digest, ``process`` a random number of at most 63 bits. All
    calls come from one thread; ``now`` is monotonic seconds, ``unix_now`` unix seconds."""

    def __init__(self, identity: Identity, run: bytes, process: int) -> None:
        self._identity, self._run, self._process = identity, run, process
        self._base = PeerView(identity.peer_id)
        self._events: deque[Event] = deque()
        self._first = 1
        self._decisions: OrderedDict[tuple[int, int], Decision] = OrderedDict()
        self._asked_at: OrderedDict[PeerId, float] = OrderedDict()
        self._told: dict[PeerId, int] = {}
        self._allowance, self._allowed_at = MAX_ANSWERS_PER_S, 0.0

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
        is_retold = known < self._told.get(asker, 0)
        interval_s = RETELL_INTERVAL_S if is_retold else MIN_INTERVAL_S if known == report.newest else 0.0
        again_in_s = self._again_in_s(asker, now, interval_s)
        if again_in_s > 0:
            report.again_in_s = again_in_s
        else:
            self._fill(report, known)
            self._told[asker] = report.last
        return self._identity.seal(REPORT_CONTEXT, report.SerializeToString())

    def told_everybody(self, now: float) -> bool:
        """Whether each asker of late has had the newest event."""
        newest = self._first + len(self._events) - 1
        return all(
            self._told.get(asker, 0) >= newest
            for asker, at in self._asked_at.items()
            if now - at < RECENTLY_S
        )

    def _read(self, data: bytes) -> ReportRequest:
        if len(data) > MAX_REQUEST_BYTES:
            raise RemoteProtocolError("too large", f"a request of {len(data)} bytes")
        request = ReportRequest()
        try:
            request.ParseFromString(data)
        except DecodeError:
            raise RemoteProtocolError("unreadable", "not a ReportRequest") from None
        if request.run != self._run:
            raise RemoteProtocolError("another run", request.run.hex()[:16])
        return request

    def _fill(self, report: Report, known: int) -> None:
        lines: list[bytes] = []
        if known < self._first - 1:
            lines, known = [event_line(event) for event in recalled(self._base)], self._first - 1
        size_bytes, decision_bytes = sum(map(len, lines)), 0
        report.first, report.last = known + 1, known
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

    def _again_in_s(self, asker: PeerId, now: float, interval_s: float) -> float:
        """0 if the asker may have its answer now, ``interval_s`` after its last one, else how long to
        wait."""
        gained = max(0.0, now - self._allowed_at) * MAX_ANSWERS_PER_S
        self._allowance, self._allowed_at = min(MAX_ANSWERS_PER_S, self._allowance + gained), now
        wait_s = self._asked_at.get(asker, -1e9) + interval_s - now
        if self._allowance < 1.0:
            return 1.0
        if wait_s > 0:
            return wait_s
        self._allowance -= 1.0
        self._asked_at[asker] = now
        self._asked_at.move_to_end(asker)
        if len(self._asked_at) > MAX_ASKERS:
            forgotten, _ = self._asked_at.popitem(last=False)
            self._told.pop(forgotten, None)
        return 0.0
