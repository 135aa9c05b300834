"""What comes in: each message to the machine that the table names, refusals counted, senders held back.

``Router`` is the carriers' ``OnMessage`` and ``OnRefused`` for one node; ``Inbox`` gives a message that was
opened to its machine. Laws: whatever a peer sends, the worst that happens is that it is counted against it,
read more slowly, and at last not heard any more. A message of another group is read by nobody and held
against nobody but by its bytes: its sender has moved.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.node.quotas import (
    ASKED_UNITS,
    OVERASKED_UNITS,
    Quotas,
    control_units,
    refused_units,
    useless_units,
)
from p2p_co2.node.state import Effects
from p2p_co2.protocol.catchup import CatchUp
from p2p_co2.protocol.membership import Membership
from p2p_co2.protocol.rounds import Rounds
from p2p_co2.protocol.wire.envelope import OTHER_GROUP, Opened, opened
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.kinds import Cost, Kind, Machine
from p2p_co2.protocol.wire.messages_pb2 import Chunk, Leave, ModelTable, Ping, Ready, Status
from p2p_co2.telemetry import events as ev

MAX_REFUSALS_KEPT = 4096
"""Kinds of refusal by sender that are counted one by one; the rest is counted under ``OTHERS``."""
OTHERS = "(others)"
REFUSALS_REPORTED = 10
"""Refusals of one kind from one peer that are told one by one; after that only each power of two."""
_SAID = frozenset({"shut out", "too many messages"})
"""Reasons for which we dropped a link ourselves."""


@dataclass(frozen=True)
class Inbox:
    """Gives each message to its machine. ``status``: what this peer says of itself now; ``know_all``: lets
    the rounds machine hear of all that came and went."""

    membership: Membership
    rounds: Rounds
    catchup: CatchUp
    status: Callable[[], Status]
    know_all: Callable[[], None]

    def take(self, message: Opened, sender: PeerId, now: float) -> bool:
        """False for bulk that nobody waited for. Raises ``RemoteProtocolError``."""
        kind, body, said = message.kind, message.body, message.said
        if kind.machine is Machine.MEMBERSHIP:
            self._take_membership(body, said, sender, now)
        elif kind.machine is Machine.ROUNDS:
            self.know_all()
            useful = self.rounds.receive(body, sender, now)
            if useful and kind.is_bulk:
                self.catchup.is_busy(sender, now)
            if kind.type is Ready:
                self.catchup.donor.history.shrink()  # its sender has the mean of the round before
            return useful
        else:
            self.catchup.receive(body, sender, now)
        return True

    def _take_membership(self, body: Any, said: Any, sender: PeerId, now: float) -> None:
        """What peers say of themselves."""
        if isinstance(body, Ping) and body.nonce:
            self.membership.status = self.status()  # a pong says where we are, not were
        if isinstance(body, Leave | ModelTable):
            self.membership.receive(body, sender, now)
        else:
            self.membership.receive(body, sender, now, said)


class Router:
    """``group``: the digest of the node's group; ``shut_out``: hears of (peer, why), which is not heard any
    more; ``failed``: of a bug of ours; ``open_``: ``envelope.opened``, or the same with a memory."""

    def __init__(
        self, group: bytes, inbox: Inbox, effects: Effects, shut_out: Callable[[PeerId, str], None],
        failed: Callable[[Exception], None], download_bytes_per_s: float = 0.0,
        open_: Callable[[bytes, bytes], Opened] = opened,
    ) -> None:  # fmt: skip
        self._group, self._inbox, self._do, self._open = group, inbox, effects, open_
        self._shut_out, self._failed = shut_out, failed
        self._quotas = Quotas(download_bytes_per_s)
        self.refusals: Counter[tuple[str, str, str]] = Counter()
        """(sender, kind of message, reason)"""
        self.down_bytes = 0
        """Of messages, since the start."""
        self._asked_chunks: Counter[PeerId] = Counter()
        """Chunks of state that were asked for and have not come."""
        self._overasked: Counter[PeerId] = Counter()
        """What was dropped of what a peer asked for since its last message: it does not take that before."""

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
        now, size_bytes, kind = self._do.now(), len(data), None
        self._quotas.check(sender, now)
        self.down_bytes += size_bytes
        wait_s = self._quotas.read(size_bytes, now)
        try:
            message = self._open(data, self._group)
            kind = message.kind
            useful = self._inbox.take(message, sender, now)
            if kind.type is Chunk:
                useful = self._was_asked(sender)
            wait_s, units = self._cost(message, size_bytes, useful, wait_s)
        except RemoteProtocolError as error:
            if error.reason == OTHER_GROUP:
                units = useless_units(size_bytes)
            else:
                self.refuse(sender, error.reason, error.detail, kind)
                units = refused_units(error.reason, size_bytes, kind is not None and kind.is_bulk)
        except Exception as error:  # named place: a carrier would take our bug for the sender's fault
            self._failed(error)
            return 0.0
        self._do.pump(kind is None or not kind.is_quiet)
        if self._overasked:
            units += OVERASKED_UNITS * self._overasked.pop(sender, 0)
        try:
            return max(wait_s, self._quotas.charge(sender, units, now))
        except RemoteProtocolError as error:
            self._shut_out(sender, str(error))
            raise

    def on_link_refused(self, peer: PeerId | None, error: RemoteProtocolError) -> None:
        self.refuse(peer or "unknown", error.reason, error.detail)
        if peer is None or error.reason in _SAID:
            return
        try:
            self._quotas.charge_link(peer, error.reason, self._do.now())
        except RemoteProtocolError as out:
            self.refuse(peer, "shut out", out.detail)
            self._shut_out(peer, str(out))

    def refuse(self, peer: str, reason: str, detail: str, kind: Kind | None = None) -> None:
        """Count a broken rule against ``peer``; the first few of a kind are told one by one."""
        name = "" if kind is None else kind.name
        if len(self.refusals) >= MAX_REFUSALS_KEPT and (peer, name, reason) not in self.refusals:
            peer = OTHERS
        self.refusals[peer, name, reason] += 1
        count = self.refusals[peer, name, reason]
        if count <= REFUSALS_REPORTED or count & (count - 1) == 0:
            detail = detail[:200]
            self._do.report(ev.MessageRefused, other=peer, message=name, reason=reason, detail=detail)

    def held(self) -> dict[str, tuple[int, int]]:
        """What strangers can make grow: (now, at most) by the name of the bound."""
        return {"MAX_REFUSALS_KEPT": (len(self.refusals), 2 * MAX_REFUSALS_KEPT), **self._quotas.held()}

    def _was_asked(self, sender: PeerId) -> bool:
        """Whether a chunk was asked for; it is expected no more."""
        is_expected = self._asked_chunks[sender] > 0
        self._asked_chunks[sender] -= is_expected
        self._asked_chunks += Counter()  # without those at zero
        return is_expected

    def _cost(self, message: Opened, size_bytes: int, useful: bool, wait_s: float) -> tuple[float, float]:
        """(seconds to wait for the download cap, units) of a message that was taken."""
        if message.kind.cost is Cost.BULK:
            return wait_s, 0.0 if useful else useless_units(size_bytes)
        if message.kind.cost is Cost.QUESTION and message.body.want_chunk:
            return 0.0, ASKED_UNITS
        return 0.0, control_units(size_bytes)
