"""What comes in: each message to the machine it is for, refusals counted, senders held back (``allowances``).

Laws: whatever a peer sends, the worst that happens is that it is counted against it, read more slowly, and at
last not heard any more; nothing is taken out of a message before its size, version and run are checked.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.node.allowances import (
    ASKED_UNITS,
    OVERASKED_UNITS,
    Allowances,
    control_units,
    refused_units,
    useless_units,
)
from p2p_co2.node.envelope import Opened, opened
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.limits import MAX_STATUS_BYTES
from p2p_co2.protocol.wire.model_table import MAX_TABLE_BYTES
from p2p_co2.telemetry import events as ev

if TYPE_CHECKING:
    from p2p_co2.node.node import Node

MAX_REFUSALS_KEPT = 4096
"""Kinds of refusal by sender that are counted one by one: ids are free to make. The rest is counted under
``OTHERS``."""
OTHERS = "(others)"
REFUSALS_REPORTED = 10
"""Refusals of one kind from one peer that become events one by one; after that only each power of two."""

_MEMBERSHIP = frozenset({"ping", "pong", "leave"})
_MEMBER_TO_COORDINATOR = frozenset({"ready", "result", "ask_outcome", "listen"})
_COORDINATOR_TO_MEMBER = frozenset({"waiting", "begin", "decision", "behind"})
_ROUNDS = _MEMBER_TO_COORDINATOR | _COORDINATOR_TO_MEMBER | {"part", "mean"}
_CATCH_UP = frozenset({"fetch", "manifest", "chunk", "refusal"})
BULK = frozenset({"part", "mean", "chunk"})
_SAID = frozenset({"shut out", "too many messages"})
"""Reasons for which we dropped a link ourselves."""


class Receiving:
    """The carriers' ``OnMessage`` and ``OnRefused`` for one node. ``open_``: ``envelope.opened``, or the same
    with a memory. ``down_bytes``: of messages, since the start."""

    def __init__(
        self, node: Node, download_bytes_per_s: float, open_: Callable[[bytes, bytes], Opened] = opened
    ) -> None:
        self._node, self._open = node, open_
        self._allowances = Allowances(download_bytes_per_s)
        self.refusals: Counter[tuple[str, str, str]] = Counter()
        """(sender, kind of message, reason)"""
        self.down_bytes = 0
        self._asked_chunks: Counter[PeerId] = Counter()
        """Chunks of state that were asked for and have not come."""
        self._overasked: Counter[PeerId] = Counter()
        """Chunks and manifests that were dropped since the peer's last message: it does not take those
        before."""

    def asked(self, peer: PeerId) -> None:
        """``peer`` was asked for a chunk: one more may come."""
        self._asked_chunks[peer] += 1

    def overasked(self, peer: PeerId) -> None:
        """What ``peer`` asked for found no room in the queue of what goes to it."""
        self._overasked[peer] += 1

    async def on_message(self, sender: PeerId, data: bytes) -> None:
        """Take one message; returns when the sender's next one may be read. Raises ``RemoteProtocolError``
        for a sender that is not heard (any more): its link is dropped."""
        wait_s = self.take(sender, data)
        if wait_s > 0:
            await asyncio.sleep(wait_s)

    def take(self, sender: PeerId, data: bytes) -> float:
        """``on_message``, without the waiting: seconds until the sender's next one may be read."""
        node, size_bytes = self._node, len(data)
        now = node.now()
        self._allowances.check(sender, now)
        self.down_bytes += size_bytes
        wait_s = self._allowances.read(size_bytes, now)
        kind = ""
        try:
            message = self._open(data, node.run_digest)
            kind = message.kind
            useful = self._dispatch(message, size_bytes, sender, now)
            if kind == "fetch" and message.body.want_chunk:
                wait_s, units = 0.0, ASKED_UNITS
            elif kind not in BULK:
                wait_s, units = 0.0, control_units(size_bytes)
            else:
                units = 0.0 if useful else useless_units(size_bytes)
        except RemoteProtocolError as error:
            self.refuse(sender, error.reason, error.detail, kind)
            units = refused_units(error.reason, size_bytes, kind in BULK)
        except Exception as error:  # named place: a carrier would take our bug for the sender's fault
            node.crash(error)
            return 0.0
        node.pump(timers=kind not in _MEMBERSHIP)
        if self._overasked:
            units += OVERASKED_UNITS * self._overasked.pop(sender, 0)
        try:
            return max(wait_s, self._allowances.charge(sender, units, now))
        except RemoteProtocolError as error:
            node.shut_out(sender, str(error))
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

    def _dispatch(self, opened: Opened, size_bytes: int, sender: PeerId, now: float) -> bool:
        """Give the body to its machine; False for bulk that nobody waited for."""
        node, kind, message, useful = self._node, opened.kind, opened.body, True
        if kind in _MEMBERSHIP or kind == "model_table":
            self._take_membership(opened, size_bytes, sender, now)
        elif kind in _ROUNDS:
            node.know_all()
            useful = node.rounds.receive(message, sender, now)
            if useful and kind in BULK:
                node.catchup.is_busy(sender, now)
            if kind == "ready":
                node.catchup.donor.history.shrink()  # its sender has the mean of the round before
        elif kind in _CATCH_UP:
            if kind == "chunk":
                useful = self._asked_chunks[sender] > 0
                self._asked_chunks[sender] -= useful
                self._asked_chunks += Counter()  # without those at zero
            node.catchup.receive(message, sender, now)
        else:
            raise RemoteProtocolError("unknown message", "no body that this version knows")
        return useful

    def _take_membership(self, opened: Opened, size_bytes: int, sender: PeerId, now: float) -> None:
        """What peers say of themselves."""
        node, kind, message = self._node, opened.kind, opened.body
        if size_bytes > (MAX_STATUS_BYTES if kind in _MEMBERSHIP else 2 * MAX_TABLE_BYTES):
            raise RemoteProtocolError("too large", f"a {kind} of {size_bytes} bytes")
        if kind in {"leave", "model_table"}:
            node.membership.receive(message, sender, now)
            return
        if kind == "ping" and message.nonce:
            node.membership.status = node.progress.status()  # a pong says where we are, not were
        node.membership.receive(message, sender, now, opened.status)
