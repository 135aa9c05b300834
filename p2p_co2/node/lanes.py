"""Lanes, one for each peer that something goes to, and whose turn it is on the line that they share.

TCP gives lanes on one line unequal shares, and one that falls behind goes on alone in the end, no faster than
it has learned to be. So bulk over far ways takes turns: at little more than the line has shown, as long as
what is under way waits for little (then turns bind, and not TCP's shares), and a lane that has less left to
carry than another that waits leaves it a turn before each of its own.

In a lane, pieces of a round that began earlier go before those of later ones: of two rounds on a full line
the first ends as soon as it would alone, and all members order them alike.

Laws: a lane never waits for one that does not ask, and leaves one turn at most before each of its own; turns
are at the rate of a ``LinePace``; what is no piece is overtaken by nothing. Price: the connections' round
trips are looked at 25 times a second.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from google.protobuf.message import Message

from p2p_co2.net.transport.base import Link
from p2p_co2.node.envelope import Unsent
from p2p_co2.node.meter import LinePace, Pace, UploadMeter
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.messages_pb2 import Mean, Part

QUEUE_LOOK_S = 0.04
"""How often it is looked at what waits before the line."""
MOST_LOOKED_AT = 9
"""Lanes that are asked for that: a look costs 25 us for each connection, and there may be 63 lanes."""
LONGEST_LOOK_S, STANDING_S = 0.2, 0.03
"""From one look to the next: more than the first is a pause, in which nothing was to be seen; where more than
the second waits before and after it, the line was full."""
CRAWLS_OF = 8
"""A connection that may send less than this part of its lane's share of the line crawls: BBR left one of two
at 5 kB/s of 1 MB/s for good, and from 50 kB/s it took four seconds."""
_PIECES = frozenset({"part", "mean"})
"""Kinds of messages that are pieces."""
ATTEMPTS_KEPT = 256
"""Whose order is remembered: many more than are open at once."""
COMMON_OF = 4
"""The lane counts on which what is under way waits least, once one of so many has been left out."""


class UnderWay(NamedTuple):
    """Bulk on its way to a peer that says what it has."""

    end_bytes: int
    """What it will have when this is there."""
    size_bytes: int


class Piece(NamedTuple):
    """What a bulk message is a piece of: a slice in an attempt at a round, or a mean."""

    attempt: bytes
    is_mean: bool


def piece_of(message: Message, kind: str) -> Piece | None:
    """Of a message of the protocol, by its kind."""
    if kind not in _PIECES:
        return None
    assert isinstance(message, Part | Mean)
    return Piece(message.key.attempt, kind == "mean")


class Bulk(NamedTuple):
    """A bulk message that waits."""

    data: Unsent
    piece: Piece | None
    is_served: bool = False
    """Whether the receiver asked for it."""
    order: int = 0
    """Of a piece: those with a lower one go first."""

    def is_stale(self, attempt: bytes, means: bool) -> bool:
        """Whether it is of ``attempt``; of its means only if ``means``."""
        piece = self.piece
        return piece is not None and piece.attempt == attempt and (means or not piece.is_mean)


class BeginOrder:
    """The order in which bulk goes: attempts in the order in which we began to send pieces of them."""

    def __init__(self) -> None:
        self._begun: OrderedDict[bytes, int] = OrderedDict()
        self._last = 0

    def of(self, piece: Piece | None) -> int:
        """Of the next message; 0 for what is no piece."""
        if piece is None:
            return 0
        if piece.attempt not in self._begun:
            self._last += 1
            self._begun[piece.attempt] = self._last
            if len(self._begun) > ATTEMPTS_KEPT:
                self._begun.popitem(last=False)
        return self._begun[piece.attempt]


def place_of(message: Bulk, bulk: Sequence[Bulk]) -> int:
    """Where in ``bulk`` a message waits: before those of later rounds, but never before the first, which may
    have its turn."""
    place = len(bulk)
    while message.order and place > 1 and bulk[place - 1].order > message.order:
        place -= 1
    return place


@dataclass
class Lane:
    """What goes to one peer."""

    control: deque[Unsent] = field(default_factory=deque)
    control_bytes: int = 0
    bulk: deque[Bulk] = field(default_factory=deque)
    bulk_bytes: int = 0
    served_bytes: int = 0
    """Of these, what the receiver asked for."""
    pace: Pace = field(default_factory=Pace)
    turn_at: float | None = None
    """When the first bulk message may go, as far as it has asked for its turns."""
    asked_cap: bool = False
    """Whether it has its turn of our own cap, after that of the receiver's rate."""
    asked_line: bool = False
    """Whether it has its turn on our line, after that, or needs none."""
    has_yielded: bool = False
    """Whether it leaves a turn to a lane with more to carry."""
    under_way: deque[UnderWay] = field(default_factory=deque)
    carrying: int = 0
    """Bulk messages that are being sent."""
    counted_until: float = 0.0
    """When the last bulk message was there, or bulk began to wait where there was none before."""
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    link: Link | None = None
    task: asyncio.Task[None] | None = None
    grpc_failed_at: float = -1e9
    beside: asyncio.Task[None] | None = None
    """Carries bulk over a second connection."""
    link_beside: Link | None = None
    left_at: float | None = None
    """Since when the first bulk message is left to the connection by which it should be there sooner."""
    wake_beside: asyncio.Event = field(default_factory=asyncio.Event)
    beside_failed_at: float = -1e9

    def put_control(self, data: Unsent) -> None:
        """Let a control message wait behind those that do."""
        self.control.append(data)
        self.control_bytes += len(data)

    def take_control(self) -> Unsent:
        """The first control message, which waits no more."""
        data = self.control.popleft()
        self.control_bytes -= len(data)
        return data

    def put(self, message: Bulk, *, first: bool = False) -> None:
        """Let bulk wait: in its order, or before all that does."""
        self.bulk.insert(0 if first else place_of(message, self.bulk), message)
        self.bulk_bytes += len(message.data)
        self.served_bytes += len(message.data) if message.is_served else 0

    def take(self) -> Bulk:
        """The first bulk message, which waits no more."""
        message = self.bulk.popleft()
        self.bulk_bytes -= len(message.data)
        self.served_bytes -= len(message.data) if message.is_served else 0
        return message

    @property
    def links(self) -> list[Link]:
        """Its connections."""
        return [link for link in (self.link, self.link_beside) if link is not None]

    def is_sooner_by_other(self, link: Link, now: float) -> bool:
        """Whether the first bulk message would be there sooner over the lane's other connection than over
        ``link``: TCP may leave one of two at a hundredth of the line, and what that has taken is stuck. How
        long it has been left to the other counts against that: the receiver may be slow to read it."""
        other = self.link_beside if link is self.link else self.link
        if other is None or not self.bulk:
            return False
        size_bytes, left_s = len(self.bulk[0].data), now - (now if self.left_at is None else self.left_at)
        is_sooner = other.there_in_s(size_bytes) + left_s < link.there_in_s(size_bytes)
        if is_sooner and self.left_at is None:
            self.left_at = now
        return is_sooner


class LineTurns:
    """Of ``lanes``, which others change; ``meter`` says what the line has shown."""

    def __init__(self, lanes: Mapping[PeerId, Lane], meter: UploadMeter) -> None:
        self._lanes, self._meter = lanes, meter
        self._line = LinePace()
        self._looked_at, self._waits_s = -1e9, 0.0
        """When, and what, ``_look`` saw."""
        self._there_bytes: dict[Link, int] = {}
        """Of those that it saw."""

    def ask(self, lane: Lane, size_bytes: int, now: float) -> tuple[float, bool]:
        """(when, True): the lane has its turn then. (when, False): it is to ask again then. Who has less left
        to carry than another lane that waits leaves it a turn, once: lanes are to end together."""
        self._meter.rest(now)
        self._look(now)
        queued_s = self._waits_s if self._meter.may_ease else 0.0
        is_eased = self._line.follow(self._meter.bytes_per_s, queued_s, now)
        turn_s = self._line.turn_s(size_bytes)
        if is_eased and turn_s:
            self._meter.eased(now)
        lane.has_yielded = bool(turn_s) and not lane.has_yielded and self._is_ahead(lane, size_bytes, now)
        at = now + self._line.free_in_s(now) + turn_s
        if not lane.has_yielded:
            at = self._line.admit_at(size_bytes, now)
        self._meter.held(now, at)
        return at, not lane.has_yielded

    def _is_ahead(self, lane: Lane, size_bytes: int, now: float) -> bool:
        """Whether a lane with a message more to carry waits for its turn."""
        return any(
            one.bulk_bytes >= lane.bulk_bytes + size_bytes
            and one.asked_line
            and one.turn_at is not None
            and one.turn_at > now
            for one in self._lanes.values()
            if one is not lane and one.link is not None and one.link.is_far
        )

    @property
    def _carries_untold(self) -> bool:
        """Whether bulk is under way of which only the peer says what is there, as through relays: it may have
        most of the line."""
        links = (one.link for one in self._lanes.values() if one.carrying)
        return any(link is not None and link.acknowledged is not None for link in links)

    def _look(self, now: float) -> None:
        """See how long what is under way to far peers waits before the line that is common to all: a way on
        which it waits longer has a queue of its own besides, as before the receiver's line. While it waits
        the line carries all it can: so much has come to be there since the last look, unless it also carries
        what the kernel does not tell of."""
        if now - self._looked_at < QUEUE_LOOK_S:
            return
        far = [one for one in self._lanes.values() if one.link is not None and one.link.is_far]
        if is_all := len(far) <= MOST_LOOKED_AT:
            carrying = far
        else:
            carrying = [one for one in far if one.carrying or one.bulk]
            carrying = carrying[:: -(-len(carrying) // MOST_LOOKED_AT) or 1]
        seen = [{link: link.look() for link in one.links} for one in carrying]
        least = (_least(one.queued_s for one in links.values()) for links in seen)
        waits_s = sorted(one for one in least if one is not None)
        waited_s, self._waits_s = self._waits_s, waits_s[len(waits_s) // COMMON_OF] if waits_s else 0.0
        there = {link: told.there_bytes for links in seen for link, told in links.items()}
        if is_all and now - self._looked_at <= LONGEST_LOOK_S and not self._carries_untold:
            more = (
                bytes_ - self._there_bytes[link]
                for link, bytes_ in there.items()
                if link in self._there_bytes
            )
            is_full = min(waited_s, self._waits_s) > STANDING_S
            self._meter.came(sum(max(0, one) for one in more), now - self._looked_at, is_full, now)
        self._looked_at, self._there_bytes = now, there
        share = self._meter.bytes_per_s / (CRAWLS_OF * max(1, sum(bool(one.bulk) for one in far)))
        for lane, links in zip(carrying, seen, strict=True):
            for link, told in links.items():
                if lane.bulk and 0 < told.at_most_bytes_per_s < share:
                    link.begin_anew(now)


def _least(seconds: Iterable[float | None]) -> float | None:
    """Of those that are known."""
    return min((one for one in seconds if one is not None), default=None)
