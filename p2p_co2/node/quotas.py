"""How fast this peer reads what others send, and whom it hears no more: arithmetic on times handed in.

Each sender has an allowance in units that refills with time. A control message costs a unit and more by its
size, bulk that is waited for nothing, other bulk by its bytes, refused messages more, offences that no honest
peer commits most. Who has used up its allowance is read more slowly; who goes on pressing is shut out, for
longer each time. So is who trickles: such a link holds a place for a minute.

Laws: an honest peer never uses up its allowance, though it were late with 100 MB in the smallest pieces, or
loaded a state at a gigabyte a second; nobody else can use it up for it. One sender can make this peer do
``REFILL_PER_S`` units a second at most, and ``ALLOWANCE`` at once. Over any stretch the bytes read are at
most the download rate times its length plus one message per link. Price: an identity is free to make, so
this bounds a sender and not a crowd; how many may speak at all is ``admission``'s business.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.node.meter import Pace
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.limits import MAX_PEERS

ALLOWANCE, REFILL_PER_S = 2000.0, 200.0
CONTROL_BYTES_PER_UNIT = 16 << 10
USELESS_UNITS, USELESS_BYTES_PER_UNIT = 0.25, 256 << 10
ASKED_UNITS, OVERASKED_UNITS = 0.1, 4.0
"""For asking for a chunk, and for one that found the asker's queue here full of what it does not take."""
REFUSED_UNITS, GRAVE_UNITS = 4.0, 20.0
LINK_UNITS = 100.0
"""For a link that was turned away, or broke the rules of links."""
TOO_SLOW = "too slow"
"""Reason of the carriers for a link that brought no whole message in ``MESSAGE_TIMEOUT_S``."""
PATIENCE_S, FORGIVING = 10.0, 0.1
"""Seconds of waiting that a sender may cause itself, and the share of each second that is forgiven."""
SHUT_OUT_S, DOUBLED_AT_MOST = 60.0, 6
"""How long a sender is shut out, doubled each time: to an hour."""
MAX_SENDERS = MAX_PEERS
GRAVE = frozenset({
    "unreadable", "unknown message", "too large", "wrong message size", "bad status", "unknown fragment",
    "wrong signature", "wrong digest length", "wrong attempt length", "wrong attempt", "bad peer id",
    "impossible weight", "impossible rate", "impossible duration", "padded",
})  # fmt: skip
"""Reasons of ``RemoteProtocolError`` for which there is no innocent explanation (a race, a restart)."""
OTHERS_FAULT = frozenset({
    "unknown round", "replayed round", "unknown peer", "too much held", "wrong size", "wrong piece",
    "wrong owner", "wrong parts", "wrong generation", "not a member",
})  # fmt: skip
"""Reasons that an honest peer may meet with each piece of a payload: we were started anew, a stranger took
the room for what comes early, or the coordinator told us another BEGIN than the sender."""


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
    if is_bulk and reason in OTHERS_FAULT:
        return useless_units(size_bytes)
    return (GRAVE_UNITS if reason in GRAVE else REFUSED_UNITS) + control_units(size_bytes)


class Quotas:
    """``download_bytes_per_s`` 0 means no cap."""

    def __init__(self, download_bytes_per_s: float) -> None:
        self._pace = Pace(download_bytes_per_s)
        self._senders: OrderedDict[PeerId, _Sender] = OrderedDict()

    def check(self, sender: PeerId, now: float) -> None:
        """Raise ``RemoteProtocolError("shut out")`` for one that is not heard."""
        known = self._senders.get(sender)
        if known is not None and known.shut_out_until > now:
            raise RemoteProtocolError("shut out", f"for {known.shut_out_until - now:.0f} s more")

    def charge(self, sender: PeerId, units: float, now: float) -> float:
        """Take ``units`` off the sender's allowance; seconds to wait before it is read on.

        Raises ``RemoteProtocolError("too many messages")`` when it is shut out by this.
        """
        known = self._known(sender)
        passed_s = max(0.0, now - known.at)
        known.left = min(ALLOWANCE, known.left + REFILL_PER_S * passed_s) - units
        known.at = now
        if known.left >= 0 and not known.pressed_s:
            return 0.0  # nearly always
        known.pressed_s = max(0.0, known.pressed_s - FORGIVING * passed_s)
        wait_s = max(0.0, -known.left / REFILL_PER_S)
        if wait_s:
            known.pressed_s += units / REFILL_PER_S
        if known.pressed_s <= PATIENCE_S:
            return wait_s
        raise self._shut_out(known, now, "too many messages")

    def charge_link(self, sender: PeerId, reason: str, now: float) -> None:
        """A link of ``sender`` was dropped or turned away for ``reason``.

        Raises ``RemoteProtocolError("too many messages")`` or ``("too slow")`` when it is shut out by this.
        """
        if reason == TOO_SLOW:
            raise self._shut_out(self._known(sender), now, TOO_SLOW)
        self.charge(sender, LINK_UNITS, now)

    def read(self, size_bytes: int, now: float) -> float:
        """A message was read: seconds to wait before the next one, for the download cap."""
        if not self._pace.bytes_per_s:
            return 0.0
        return self._pace.admit_at(size_bytes, now) + size_bytes / self._pace.bytes_per_s - now

    def held(self) -> dict[str, tuple[int, int]]:
        """What strangers can make grow: (now, at most) by the name of the bound."""
        return {"MAX_SENDERS": (len(self._senders), MAX_SENDERS)}

    def _shut_out(self, known: _Sender, now: float, reason: str) -> RemoteProtocolError:
        shut_out_s = SHUT_OUT_S * 2 ** min(known.times, DOUBLED_AT_MOST)
        known.times, known.shut_out_until = known.times + 1, now + shut_out_s
        known.left, known.pressed_s = ALLOWANCE, 0.0
        return RemoteProtocolError(reason, f"shut out for {shut_out_s:.0f} s")

    def _known(self, sender: PeerId) -> _Sender:
        known = self._senders.get(sender)
        if known is None:
            if len(self._senders) >= MAX_SENDERS:
                self._senders.popitem(last=False)
            known = self._senders[sender] = _Sender()
        self._senders.move_to_end(sender)
        return known
