"""What comes in: each message to the machine that the table names, refusals counted, senders held back.

``Router`` is the carriers' ``OnMessage`` and ``OnRefused`` for one group. ``Quotas`` says how fast each
sender is read. Each has an allowance in units that refills with time. A control message costs a unit and more
by its size; bulk that is waited for nothing, other bulk by its bytes. Refused messages cost more, offences
that no honest peer commits most. A sender that has used up its allowance is read more slowly; one that goes
on pressing is shut out, for longer each time. So is one that trickles: such a link holds a place for a
minute.

Laws: whatever a peer sends is at worst counted against it. It is read more slowly, and at last not heard any
more. A message of another group is held against nobody but by its bytes: its sender has moved. An honest peer
never uses up its allowance, though it were late with 100 MB in the smallest pieces, or loaded a state at a
gigabyte a second. Nobody else can use it up for it. One sender can make this peer do
``REFILL_PER_S`` units a second at most, and ``ALLOWANCE`` at once. Over any stretch the bytes read are at
most the download rate times its length plus one message per link. Price: an identity is free to make, so
this bounds a sender and not a crowd; how many may speak at all is ``admission``'s business.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from p2p_co2.errors import Blame, Offence, RemoteProtocolError, blame_of
from p2p_co2.node.meter import Pace
from p2p_co2.node.state import Effects
from p2p_co2.telemetry import events as ev
from p2p_co2.wire.envelope import Opened, opened
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.kinds import Cost, Kind
from p2p_co2.wire.limits import MAX_PEERS
from p2p_co2.wire.messages_pb2 import Chunk

ALLOWANCE = 2000.0
REFILL_PER_S = 200.0
CONTROL_BYTES_PER_UNIT = 16 << 10
USELESS_UNITS = 0.25
USELESS_BYTES_PER_UNIT = 256 << 10
ASKED_UNITS = 0.1
"""For asking for a chunk."""
REFUSED_UNITS = 4.0
"""For a message, or a question whose answer found the asker's queue full of what it does not take."""
GRAVE_UNITS = 20.0
USELESS_PAYLOAD_UNITS = 1000.0
"""For a payload that was waited for and computed with, and was no use: it has cost a microbatch."""
LINK_UNITS = 100.0
"""For a link that was turned away, or broke the rules of links."""
PATIENCE_S = 10.0
"""Waiting that a sender may cause itself."""
FORGIVING = 0.1
"""Of that waiting, for each second that passes."""
SHUT_OUT_S = 60.0
"""A sender is shut out for this long, doubled each time."""
DOUBLED_AT_MOST = 6
"""Times: to an hour."""
MAX_REFUSALS_KEPT = 4096
"""Kinds of refusal by sender that are counted one by one; the rest is counted under ``OTHERS``."""
OTHERS = "(others)"
REFUSALS_REPORTED = 10
"""Refusals of one kind from one peer that are told one by one; after that only each power of two."""
_SAID = frozenset({Offence.SHUT_OUT, Offence.TOO_MANY_MESSAGES})
"""Reasons for which we dropped a link ourselves."""


@dataclass
class _Sender:
    left: float = ALLOWANCE
    at: float = 0.0
    pressed_s: float = 0.0
    shut_out_until: float = -1.0
    times: int = 0


def control_units(size_bytes: int) -> float:
    return 1 + size_bytes / CONTROL_BYTES_PER_UNIT


def useless_units(size_bytes: int) -> float:
    """Of bulk that came for nothing: late, doubled, or never asked for."""
    return USELESS_UNITS + size_bytes / USELESS_BYTES_PER_UNIT


def refused_units(reason: str, size_bytes: int, is_bulk: bool) -> float:
    blame = blame_of(reason)
    if is_bulk and blame is Blame.OTHERS:
        return useless_units(size_bytes)
    return (GRAVE_UNITS if blame is Blame.GRAVE else REFUSED_UNITS) + control_units(size_bytes)


class Quotas:
    """``download_bytes_per_s`` 0 means no cap."""

    def __init__(self, download_bytes_per_s: float) -> None:
        self._pace = Pace(download_bytes_per_s)
        self._senders: OrderedDict[PeerId, _Sender] = OrderedDict()

    def check(self, sender: PeerId, now: float) -> None:
        """Raise ``Offence.SHUT_OUT`` for one that is not heard."""
        known = self._senders.get(sender)
        if known is not None and known.shut_out_until > now:
            raise RemoteProtocolError(Offence.SHUT_OUT, f"for {known.shut_out_until - now:.0f} s more")

    def charge(self, sender: PeerId, units: float, now: float) -> float:
        """Take ``units`` off the sender's allowance; seconds to wait before it is read on.

        Raises ``Offence.TOO_MANY_MESSAGES`` when it is shut out by this.
        """
        known = self._known(sender)
        now = max(now, known.at)  # groups have clocks of their own, a little apart: no time passes twice
        passed_s = now - known.at
        known.at = now
        known.left = min(ALLOWANCE, known.left + REFILL_PER_S * passed_s) - units
        if known.left >= 0 and not known.pressed_s:
            return 0.0  # nearly always
        known.pressed_s = max(0.0, known.pressed_s - FORGIVING * passed_s)
        wait_s = max(0.0, -known.left / REFILL_PER_S)
        if wait_s:
            known.pressed_s += units / REFILL_PER_S
        if known.pressed_s <= PATIENCE_S:
            return wait_s
        raise self._shut_out(known, now, Offence.TOO_MANY_MESSAGES)

    def charge_link(self, sender: PeerId, reason: str, now: float) -> None:
        """A link of ``sender`` was dropped or turned away for ``reason``.

        Raises ``Offence.TOO_MANY_MESSAGES`` or ``TOO_SLOW`` when it is shut out by this.
        """
        if reason == Offence.TOO_SLOW:
            raise self._shut_out(self._known(sender), now, Offence.TOO_SLOW)
        self.charge(sender, LINK_UNITS, now)

    def read(self, size_bytes: int, now: float) -> float:
        """A message was read: seconds to wait before the next one, for the download cap."""
        if not self._pace.bytes_per_s:
            return 0.0
        return self._pace.admit_at(size_bytes, now) + size_bytes / self._pace.bytes_per_s - now

    def held(self) -> dict[str, tuple[int, int]]:
        """What strangers can make grow: (now, at most) by the name of the bound."""
        return {"MAX_PEERS": (len(self._senders), MAX_PEERS)}

    def _shut_out(self, known: _Sender, now: float, reason: Offence) -> RemoteProtocolError:
        shut_out_s = SHUT_OUT_S * 2 ** min(known.times, DOUBLED_AT_MOST)
        known.times = known.times + 1
        known.shut_out_until = now + shut_out_s
        known.left = ALLOWANCE
        known.pressed_s = 0.0
        return RemoteProtocolError(reason, f"shut out for {shut_out_s:.0f} s more")

    def _known(self, sender: PeerId) -> _Sender:
        if sender not in self._senders and len(self._senders) >= MAX_PEERS:
            self._senders.popitem(last=False)
        known = self._senders.setdefault(sender, _Sender())
        self._senders.move_to_end(sender)
        return known


Deliver = Callable[[Opened, PeerId, float], bool]
"""(message, sender, now): gives it to its machine. False for bulk that nobody waited for. Raises
``RemoteProtocolError``."""


class Router:
    """``group``: the digest of the node's group. ``deliver``: hears of each message. ``quotas``: of the
    process. ``shut_out``: hears of (peer, why), which is not heard any more. ``failed``: hears of a bug of
    ours. ``open_``: ``envelope.opened``, or the same with a memory."""

    def __init__(
        self, group: bytes, deliver: Deliver, effects: Effects, shut_out: Callable[[PeerId, str], None],
        failed: Callable[[Exception], None], quotas: Quotas,
        open_: Callable[[bytes, bytes], Opened] = opened,
    ) -> None:  # fmt: skip
        self._group = group
        self._deliver = deliver
        self._do = effects
        self._open = open_
        self._shut_out = shut_out
        self._failed = failed
        self._quotas = quotas
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
        if (wait_s := self.take(sender, data)) > 0:
            await asyncio.sleep(wait_s)

    def take(self, sender: PeerId, data: bytes) -> float:
        """``on_message``, without the waiting: seconds until the sender's next one may be read."""
        now = self._do.now()
        size_bytes = len(data)
        kind = None
        self._quotas.check(sender, now)
        self.down_bytes += size_bytes
        wait_s = self._quotas.read(size_bytes, now)
        try:
            message = self._open(data, self._group)
            kind = message.kind
            useful = self._deliver(message, sender, now)
            if kind.type is Chunk:
                useful = self._was_asked(sender)
            wait_s, units = self._cost(message, size_bytes, useful, wait_s)
        except RemoteProtocolError as error:
            if error.reason == Offence.OTHER_GROUP:
                units = useless_units(size_bytes)
            else:
                self.refuse(sender, error.reason, error.detail, kind)
                units = refused_units(error.reason, size_bytes, kind is not None and kind.is_bulk)
        except Exception as error:  # named place: a carrier would take our bug for the sender's fault
            self._failed(error)
            return 0.0
        self._do.pump(kind is None or not kind.is_quiet)
        if self._overasked:
            units += REFUSED_UNITS * self._overasked.pop(sender, 0)
        try:
            return max(wait_s, self._quotas.charge(sender, units, now))
        except RemoteProtocolError as error:
            self._shut_out(sender, str(error))
            raise

    def on_link_refused(self, peer: PeerId | None, error: RemoteProtocolError) -> None:
        self.refuse(peer or "unknown", error.reason, error.detail)
        if peer is None or error.reason in _SAID:
            return
        self._hold_against(peer, lambda now: self._quotas.charge_link(peer, error.reason, now))

    def on_useless(self, peer: PeerId, error: RemoteProtocolError, kind: Kind) -> None:
        """What ``peer`` has sent was waited for, and is no use after all."""
        self.refuse(peer, error.reason, error.detail, kind)
        self._hold_against(peer, lambda now: self._quotas.charge(peer, USELESS_PAYLOAD_UNITS, now))

    def _hold_against(self, peer: PeerId, charge: Callable[[float], object]) -> None:
        try:
            charge(self._do.now())
        except RemoteProtocolError as out:
            self.refuse(peer, Offence.SHUT_OUT, out.detail)
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
        is_asking = message.kind.cost is Cost.QUESTION and message.body.want_chunk
        return 0.0, ASKED_UNITS if is_asking else control_units(size_bytes)
