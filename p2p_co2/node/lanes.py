"""Lanes, one for each peer that something goes to, and the uplink that they share.

TCP gives lanes on one line unequal shares, and one that falls behind goes on alone in the end, no faster than
it has learned to be. So bulk over far ways takes turns: at little more than the line has shown, as long as
what is under way waits for little. A lane that has less left to carry than another that waits leaves it a
turn before each of its own. In a lane, pieces of a round that began earlier go before those of later ones.

Laws: a lane never waits for one that does not ask; turns are at the rate of a ``LinePace``; what is no piece
is overtaken by nothing. Price: the connections' round trips are looked at 25 times a second.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from google.protobuf.message import Message

from p2p_co2.net.transport.base import Link
from p2p_co2.node.meter import LinePace, Pace, UploadMeter
from p2p_co2.protocol.wire.envelope import Unsent
from p2p_co2.protocol.wire.kinds import Kind, Role

QUEUE_LOOK_S = 0.04
"""How often it is looked at what waits before the line."""
LONGEST_LOOK_S, STANDING_S = 5 * QUEUE_LOOK_S, 0.03
"""From one look to the next: more than the first is a pause, in which nothing was to be seen; where more than
the second waits before and after it, the line was full."""
MOST_LOOKED_AT, COMMON_OF = 9, 4
"""Lanes that are asked for that: a look costs 25 us for each connection. The lane counts on which what is
under way waits least, once one of so many has been left out."""
ATTEMPTS_KEPT = 256
"""Whose order is remembered: many more than are open at once."""


class Piece(NamedTuple):
    """What a bulk message is a piece of: a slice in an attempt at a round, or a mean."""

    attempt: bytes
    is_mean: bool


def piece_of(message: Message, kind: Kind) -> Piece | None:
    """Of a message of the protocol."""
    body: Any = message
    return None if kind.role is None else Piece(body.key.attempt, kind.role is Role.MEAN)


class Bulk(NamedTuple):
    """A bulk message that waits. ``is_served``: the receiver asked for it; ``order``: of a piece, those with
    a lower one go first."""

    data: Unsent
    piece: Piece | None
    is_served: bool = False
    order: int = 0

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


@dataclass(eq=False)
class Turn:
    """How far the first bulk message of a lane has come with its turns: the receiver's rate, then our own
    cap, or a slow receiver would hold up what goes to the others, at last the line."""

    at: float | None = None
    """When it may go, as far as it has asked."""
    asked_cap: bool = False
    asked_line: bool = False
    """Whether it has its turn on our line, or needs none."""
    has_yielded: bool = False
    """Whether it leaves a turn to a lane with more to carry."""


@dataclass(eq=False)
class Lane:
    """What goes to one peer."""

    control: deque[Unsent] = field(default_factory=deque)
    control_bytes: int = 0
    bulk: deque[Bulk] = field(default_factory=deque)
    bulk_bytes: int = 0
    served_bytes: int = 0
    """Of these, what the receiver asked for."""
    pace: Pace = field(default_factory=Pace)
    turn: Turn = field(default_factory=Turn)
    under_way: deque[tuple[int, int]] = field(default_factory=deque)
    """Bulk on its way to a peer that says what it has: (what that is when this is there, bytes of this)."""
    carrying: int = 0
    """Bulk messages that are being sent."""
    counted_until: float = 0.0
    """When the last bulk message was there, or bulk began to wait where there was none before."""
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    link: Link | None = None
    task: asyncio.Task[None] | None = None
    grpc_failed_at: float = -1e9

    def put(self, message: Bulk) -> None:
        """Let bulk wait in its order."""
        self.bulk.insert(place_of(message, self.bulk), message)
        self.bulk_bytes += len(message.data)
        self.served_bytes += len(message.data) if message.is_served else 0

    def take(self) -> Bulk:
        """The first bulk message, which waits no more."""
        message = self.bulk.popleft()
        self.bulk_bytes -= len(message.data)
        self.served_bytes -= len(message.data) if message.is_served else 0
        return message

    @property
    def is_far(self) -> bool:
        return self.link is not None and self.link.is_far

    def may_send(self, link: Link) -> bool:
        """Whether there is a message, and room for it: control needs none."""
        has_room = link.acknowledged is None or link.acknowledged.has_room
        return bool(self.control or (self.bulk and has_room))


class Uplink:
    """The line of this process and whose turn it is on it: of all lanes to all peers, whatever group they
    are for. ``cap_bytes_per_s`` 0 means no cap of our own."""

    def __init__(self, cap_bytes_per_s: float = 0.0) -> None:
        self.cap = Pace(cap_bytes_per_s)
        self.meter = UploadMeter()
        self.lanes: list[Lane] = []
        self._line = LinePace()
        self._looked_at, self._waits_s = -1e9, 0.0
        """When, and what, ``_look`` saw."""
        self._there_bytes: dict[Link, int] = {}
        """Of those that it saw."""

    def wait_s(self, lane: Lane, receiver_bytes_per_s: float, now: float) -> float:
        """How long the lane's first bulk message has to wait. ``receiver_bytes_per_s``: how fast its receiver
        wants bulk; 0 for as it comes."""
        turn, size_bytes = lane.turn, len(lane.bulk[0].data)
        if turn.at is None:
            lane.pace.bytes_per_s = receiver_bytes_per_s
            turn.at, turn.asked_cap = lane.pace.admit_at(size_bytes, now), False
            turn.asked_line = not lane.is_far
        if turn.at <= now and not turn.asked_cap:
            turn.at, turn.asked_cap = self.cap.admit_at(size_bytes, now), True
        if turn.at <= now and not turn.asked_line:
            turn.at, turn.asked_line = self._ask(lane, size_bytes, now)
        return turn.at - now

    def give_back(self, lane: Lane) -> None:
        """The lane's first bulk message is dropped: others need not wait for its turn of the rates."""
        if lane.turn.at is not None:
            size_bytes = len(lane.bulk[0].data)
            lane.pace.give_back(size_bytes)
            if lane.turn.asked_cap:
                self.cap.give_back(size_bytes)
        lane.turn.at = None

    def _ask(self, lane: Lane, size_bytes: int, now: float) -> tuple[float, bool]:
        """(when, True): the lane has its turn then. (when, False): it is to ask again then. Who has less left
        to carry than another lane that waits leaves it a turn, once: lanes are to end together."""
        self.meter.rest(now)
        self._look(now)
        self._line.follow(self.meter.bytes_per_s)
        turn_s = self._line.turn_s(size_bytes)
        yields = bool(turn_s) and not lane.turn.has_yielded and self._is_ahead(lane, size_bytes, now)
        lane.turn.has_yielded = yields
        at = now + self._line.free_in_s(now) + turn_s
        if not yields:
            at = self._line.admit_at(size_bytes, now)
        self.meter.held(now, at)
        return at, not yields

    def _is_ahead(self, lane: Lane, size_bytes: int, now: float) -> bool:
        """Whether a lane with a message more to carry waits for its turn."""
        return any(
            one.bulk_bytes >= lane.bulk_bytes + size_bytes
            and one.turn.asked_line
            and one.turn.at is not None
            and one.turn.at > now
            for one in self.lanes
            if one is not lane and one.is_far
        )

    def _look(self, now: float) -> None:
        """See how long what is under way to far peers waits before the line that is common to all: a way on
        which it waits longer has a queue of its own besides. While it waits the line carries all it can: so
        much has come to be there since the last look, unless it also carries what only peers tell of, as
        through relays."""
        if now - self._looked_at < QUEUE_LOOK_S:
            return
        far = carrying = [one for one in self.lanes if one.is_far]
        if is_some := len(far) > MOST_LOOKED_AT:
            carrying = [one for one in far if one.carrying or one.bulk]
            carrying = carrying[:: -(-len(carrying) // MOST_LOOKED_AT) or 1]
        seen = {one.link: one.link.look() for one in carrying if one.link is not None}
        waits_s = sorted(one.queued_s for one in seen.values() if one.queued_s is not None)
        waited_s, self._waits_s = self._waits_s, waits_s[len(waits_s) // COMMON_OF] if waits_s else 0.0
        there = {link: told.there_bytes for link, told in seen.items()}
        untold = any(lane.carrying and lane.link and lane.link.acknowledged for lane in self.lanes)
        if not (is_some or untold) and now - self._looked_at <= LONGEST_LOOK_S:
            known = self._there_bytes
            more = sum(max(0, there[link] - known[link]) for link in there.keys() & known.keys())
            is_full = min(waited_s, self._waits_s) > STANDING_S
            self.meter.came(more, now - self._looked_at, is_full, now)
        self._looked_at, self._there_bytes = now, there
