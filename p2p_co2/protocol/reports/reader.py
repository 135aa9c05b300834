"""The observer's check of a report: everything in it is hostile until it has passed here.

Laws: sizes before decompression, signature before content, types before values (``journal.parse_event``), and
then every value must be one that an honest peer can have: its unit is in its name, and nothing that is
counted or measured is negative, infinite or beyond what a run can reach. What fails is dropped and counted
by its cause; the rest of the report stands.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from functools import lru_cache
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.protocol.rounds import check_certificate, counted_weights
from p2p_co2.protocol.wire.identity import PeerId, public_key_of, unseal
from p2p_co2.protocol.wire.limits import MAX_FRAGMENTS, MAX_MEMBERS, MAX_STRING
from p2p_co2.protocol.wire.messages_pb2 import Decision, Report
from p2p_co2.telemetry.events import (
    Event,
    LinkLost,
    LinkMeasured,
    LinkOpened,
    PeerJoined,
    PeerLeft,
    RoundBegan,
    RoundCounted,
)  # fmt: skip
from p2p_co2.telemetry.journal import parse_event

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
_MOST: dict[str, float] = {"fragment": MAX_FRAGMENTS - 1, "round": MAX_ROUND}
OLDEST_S, NEWEST_S = 400 * 86400.0, 60.0
"""How far an event's time may lie before and after the moment in which its sender reports it."""


class CheckedReport(NamedTuple):
    """``events``: those that passed, with the sender's times; ``refused``: the others by cause."""

    report: Report
    events: list[Event]
    refused: Counter[str]


def open_report(data: bytes, peer: PeerId, run: bytes) -> CheckedReport:
    """What ``peer`` answered. Raises ``RemoteProtocolError`` if the whole of it is worth nothing."""
    if len(data) > MAX_REPORT_BYTES:
        raise RemoteProtocolError("too large", f"a report of {len(data)} bytes")
    signer, content = unseal(REPORT_CONTEXT, data)
    report = Report()
    try:
        report.ParseFromString(content)
    except DecodeError:
        raise RemoteProtocolError("unreadable", "not a Report") from None
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
        raise RemoteProtocolError("unreadable", "events that are not zlib") from None
    if len(text) > MAX_EVENT_BYTES or not inflater.eof:
        raise RemoteProtocolError("too large", "events")
    return text


_NAMING = PeerJoined | PeerLeft | LinkOpened | LinkLost | LinkMeasured | RoundBegan
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
    others = getattr(event, "group", (getattr(event, "other", ""),))
    if isinstance(event, _NAMING) and not all(_is_peer_id(name) for name in others):
        raise ValueError("a peer that cannot be")


def _check_value(name: str, value: Any) -> None:
    match value:
        case int() | float():
            most = _MOST.get(name, MAX_COUNT if isinstance(value, int) else MAX_REAL)
            is_known_loss = name == "loss" and (math.isnan(value) or -MAX_REAL <= value < 0)
            if not (0 <= value <= most or is_known_loss):  # written so that NaN is refused
                raise ValueError("an impossible number")
        case str():
            if len(value) > MAX_STRING:
                raise ValueError("a text that is too long")
        case tuple():
            if len(value) > (MAX_MEMBERS if name == "group" else MAX_FRAGMENTS):
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
    """Whose work a commit of this run says was in the mean, and who signed it, if its certificate holds.
    Raises ``RemoteProtocolError``."""
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
