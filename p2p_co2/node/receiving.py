"""What comes in: each message to the machine it is for, refusals counted, senders held back (``allowances``).

Laws: whatever a peer sends, the worst that happens is that it is counted against it, read more slowly, and at
last not heard any more; nothing is taken out of a message before its size, version and run are checked.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.node.allowances import (
    ASKED_UNITS,
    OVERASKED_UNITS,
    Allowances,
    control_units,
    refused_units,
    useless_units,
)
from p2p_co2.outlook import check_sights
from p2p_co2.telemetry import events as ev
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.limits import MAX_MESSAGE_BYTES, MAX_STATUS_BYTES, PROTOCOL_VERSION
from p2p_co2.wire.messages_pb2 import Envelope

if TYPE_CHECKING:
    from p2p_co2.node.node import Node

MAX_REFUSALS_KEPT = 4096
"""Kinds of refusal by sender that are counted one by one: ids are free to make. The rest is counted under
``OTHERS``."""
OTHERS = "(others)"
REFUSALS_REPORTED = 10
"""Refusals of one kind from one peer that become events one by one; after that only each power of two."""

_MEMBERSHIP = frozenset({"ping", "pong", "leave"})
_MEMBER_TO_COORDINATOR = frozenset({"ready", "result", "ask_outcome"})
_COORDINATOR_TO_MEMBER = frozenset({"waiting", "begin", "reassign", "decision", "behind"})
CELL_KINDS = frozenset(
    {"cell_ready", "cell_waiting", "cell_begin", "cell_part", "cell_mean", "cell_result", "cell_decision"}
)
OUTLOOK_KINDS = frozenset({"cell_look", "cell_sight"})
_ROUNDS = _MEMBER_TO_COORDINATOR | _COORDINATOR_TO_MEMBER | CELL_KINDS | {"part", "mean"}
_CATCH_UP = frozenset({"fetch", "manifest", "chunk", "refusal"})
BULK = frozenset({"part", "mean", "chunk", "cell_part", "cell_mean"})
_QUIET = _MEMBERSHIP | OUTLOOK_KINDS
"""They move no timer but their own machines'."""
_SAID = frozenset({"shut out", "too many messages"})
"""Reasons for which we dropped a link ourselves."""


class Receiving:
    """The carriers' ``OnMessage`` and ``OnRefused`` for one node. ``down_bytes``: of messages, since the
    start."""

    def __init__(self, node: Node, download_bytes_per_s: float) -> None:
        self._node = node
        self._allowances = Allowances(download_bytes_per_s)
        self.refusals: Counter[tuple[str, str, str]] = Counter()
        """(sender, kind of message, reason)"""
        self.down_bytes = 0
        self._asked_chunks: Counter[PeerId] = Counter()
        """Chunks of state that were asked for and have not come."""
        self._overasked: Counter[PeerId] = Counter()
        """Chunks that were dropped since the peer's last message, because it does not take those before."""

    def asked(self, peer: PeerId) -> None:
        """``peer`` was asked for a chunk: one more may come."""
        self._asked_chunks[peer] += 1

    def overasked(self, peer: PeerId) -> None:
        """A chunk that ``peer`` asked for found no room in the queue of what goes to it."""
        self._overasked[peer] += 1

    async def on_message(self, sender: PeerId, data: bytes) -> None:
        """Take one message; returns when the sender's next one may be read. Raises ``RemoteProtocolError``
        for a sender that is not heard (any more): its link is dropped."""
        wait_s = self.take(sender, data)
        if wait_s > 0:
            await asyncio.sleep(wait_s)

    def take(self, sender: PeerId, data: bytes) -> float:
        """``on_message``, without the waiting: seconds until the sender's next one may be read."""
        now = self._node.now()
        self._allowances.check(sender, now)
        self.down_bytes += len(data)
        wait_s = self._allowances.read(len(data), now)
        kind = ""
        try:
            envelope = _opened(data, self._node.run_digest)
            kind = envelope.WhichOneof("body") or ""
            useful = self._dispatch(envelope, kind, len(data), sender, now)
            if kind == "fetch" and envelope.fetch.want_chunk:
                wait_s, units = 0.0, ASKED_UNITS
            elif kind not in BULK:
                wait_s, units = 0.0, control_units(len(data))
            else:
                units = 0.0 if useful else useless_units(len(data))
        except RemoteProtocolError as error:
            self.refuse(sender, error.reason, error.detail, kind)
            units = refused_units(error.reason, len(data), kind in BULK)
        except Exception as error:  # named place: a carrier would take our bug for the sender's fault
            self._node.crash(error)
            return 0.0
        self._node.pump(timers=kind not in _QUIET)
        units += OVERASKED_UNITS * self._overasked.pop(sender, 0)
        try:
            return max(wait_s, self._allowances.charge(sender, units, now))
        except RemoteProtocolError as error:
            self._node.shut_out(sender, str(error))
            raise

    def on_link_refused(self, peer: PeerId | None, error: RemoteProtocolError) -> None:
        self.refuse(peer or "unknown", error.reason, error.detail)
        if peer is None or error.reason in _SAID:
            return
        try:
            self._allowances.charge_link(peer, error.reason, self._node.now())
        except RemoteProtocolError as out:
            self.refuse(peer, "shut out", out.detail)
            self._node.shut_out(peer, str(out))

    def refuse(self, peer: str, reason: str, detail: str, message: str = "") -> None:
        """Count a broken rule against ``peer``; the first few of a kind become events one by one."""
        if len(self.refusals) >= MAX_REFUSALS_KEPT and (peer, message, reason) not in self.refusals:
            peer = OTHERS
        self.refusals[peer, message, reason] += 1
        count = self.refusals[peer, message, reason]
        if count <= REFUSALS_REPORTED or count & (count - 1) == 0:
            self._node.report(
                ev.MessageRefused, other=peer, message=message, reason=reason, detail=detail[:200]
            )

    def _dispatch(self, envelope: Envelope, kind: str, size_bytes: int, sender: PeerId, now: float) -> bool:
        """Give the body to its machine; False for bulk that nobody waited for."""
        node, useful = self._node, True
        if kind in _MEMBERSHIP:
            if size_bytes > MAX_STATUS_BYTES:
                raise RemoteProtocolError("too large", f"a {kind} of {size_bytes} bytes")
            if not node.far.is_near(sender):
                raise RemoteProtocolError("wrong cell", f"a {kind} from another cell")
            message = getattr(envelope, kind)
            if kind == "ping" and message.nonce:
                node.membership.status = node.standing.status()  # a pong says where we are, not were
            if kind != "leave":
                check_sights(message.status, node.far.cells)
            node.membership.receive(message, sender, now)
        elif kind in OUTLOOK_KINDS:
            if size_bytes > MAX_STATUS_BYTES:
                raise RemoteProtocolError("too large", f"a {kind} of {size_bytes} bytes")
            outlook = node.far.outlook
            outlook.mine = node.far.sight()
            outlook.receive(getattr(envelope, kind), sender, now)
        elif kind in _ROUNDS:
            node.know_all()
            useful = node.rounds.receive(getattr(envelope, kind), sender, now)
        elif kind in _CATCH_UP:
            if kind == "chunk":
                useful = self._asked_chunks[sender] > 0
                self._asked_chunks[sender] -= useful
                self._asked_chunks += Counter()  # without those at zero
            node.catchup.receive(getattr(envelope, kind), sender, now)
        else:
            raise RemoteProtocolError("unknown message", "no body that this version knows")
        return useful


def _opened(data: bytes, run: bytes) -> Envelope:
    """An envelope of this version and run. Raises ``RemoteProtocolError``."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise RemoteProtocolError("too large", f"{len(data)} bytes")
    envelope = Envelope()
    try:
        envelope.ParseFromString(data)
    except DecodeError:
        raise RemoteProtocolError("unreadable", "not an Envelope") from None
    if envelope.version != PROTOCOL_VERSION:
        raise RemoteProtocolError(
            "unknown version", f"{envelope.version}, this peer speaks {PROTOCOL_VERSION}"
        )
    if envelope.run != run:
        raise RemoteProtocolError("another run", envelope.run.hex()[:16])
    return envelope
