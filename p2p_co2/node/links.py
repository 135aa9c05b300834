"""Links to other peers: a lane for each, the carrier chosen for it, and the line that all of them share.

Direct gRPC is tried first where the peer's record names an address, then libp2p streams. ``post`` never
blocks: what cannot be delivered is dropped, because every message of the protocol may be lost. Control
messages overtake bulk data, which is bounded.

Bulk keeps to the receiver's rate and to our own cap, and over far ways it takes turns on our line. In a lane,
pieces of a round that began earlier go before those of later ones. docs/design/lines-and-pacing.md says why.

Laws: all that leaves this machine for a peer leaves through ``post``. A lane never waits for one that does
not ask, and a control message never for a turn. What is no piece is overtaken by nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from google.protobuf.message import Message

from p2p_co2.errors import PeerLost, RemoteProtocolError, TransportError
from p2p_co2.net.transport.base import Carrier, Link, refused_for_s
from p2p_co2.net.transport.flow import Acknowledged, Seen
from p2p_co2.node.meter import LEAST_SPAN_S, LinePace, LineRate, Pace
from p2p_co2.wire.envelope import Unsent
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.kinds import Kind, Role
from p2p_co2.wire.limits import MAX_DATA_BYTES, MAX_FRAGMENTS, MAX_PEERS
from p2p_co2.wire.messages_pb2 import PeerRecord

MOST_LOOKED_AT = 9
"""Lanes that are asked how long what is under way waits."""
COMMON_OF = 4
"""The lane counts on which it waits least, once one of so many has been left out."""
TURNS_OF_ONE = 8
"""On a line that urgent lanes fill, one in so many turns is another lane's."""
MAX_QUEUED_BYTES = 1 << 30
"""Bulk bytes waiting for all peers together, and for one peer at most as much as is left for all others."""
MAX_SERVED_BYTES = 8 * MAX_DATA_BYTES
"""Bulk bytes waiting for one peer that it asked for itself: twice what a fetcher asks for at once."""
MAX_QUEUED_CONTROL = 4096
"""Control messages that wait for one peer."""
MAX_CONTROL_BYTES = 16 << 20
"""Their bytes."""


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
            if len(self._begun) > MAX_FRAGMENTS:  # more than are open at once
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
    """How far the first bulk message of a lane has come with its turns: the receiver's rate, our own cap, at
    last the line. In another order a slow receiver would hold up what goes to the others."""

    at: float | None = None
    """When it may go, as far as it has asked."""
    asked_cap: bool = False
    asked_line: bool = False
    """Whether it has its turn on our line, or needs none."""
    yielded: int = 0
    """Turns in a row that it has left to lanes with more to carry, or more urgent ones."""


@dataclass(eq=False)
class Lane:
    """What goes to one peer. ``is_urgent``: a peer stands still for it."""

    is_urgent: bool = False
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
    is_in_burst: bool = False
    """Whether it had some to send or to carry since the line was at rest."""
    counted_until: float = 0.0
    """When the last bulk message was there, or bulk began to wait where there was none before."""
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    link: Link | None = None
    task: asyncio.Task[None] | None = None

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
        self.lanes: list[Lane] = []
        self.rate = LineRate(self._seen)
        self._line = LinePace()
        self._looked_at = -1e9
        self._waits_s = 0.0
        """When ``_look`` saw how long what is under way waits, and what it saw."""

    def wait_s(self, lane: Lane, receiver_bytes_per_s: float, now: float) -> float:
        """How long the lane's first bulk message has to wait. ``receiver_bytes_per_s``: how fast its receiver
        wants bulk; 0 for as it comes."""
        turn = lane.turn
        size_bytes = len(lane.bulk[0].data)
        if turn.at is None:
            lane.pace.bytes_per_s = receiver_bytes_per_s
            turn.at = lane.pace.admit_at(size_bytes, now)
            turn.asked_cap = False
            turn.asked_line = not lane.is_far
        if turn.at <= now and not turn.asked_cap:
            turn.at = self.cap.admit_at(size_bytes, now)
            turn.asked_cap = True
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

    def watch(self, now: float) -> None:
        """Measure the line, when bulk is put, begins or ends to be carried, or the rate is asked."""
        open_lanes = [lane for lane in self.lanes if lane.link is not None]
        at_work = [lane for lane in open_lanes if lane.bulk or lane.carrying]
        for lane in at_work or open_lanes:
            lane.is_in_burst = bool(at_work)
        waiting = sum(bool(lane.bulk) for lane in at_work)
        is_full = 2 * waiting > sum(lane.is_in_burst for lane in open_lanes)
        self.rate.watch(bool(at_work), is_full and waiting >= min(2, len(open_lanes)), now)

    def _seen(self) -> dict[Link, Seen]:
        return {lane.link: lane.link.look() for lane in self.lanes if lane.link is not None}

    def _ask(self, lane: Lane, size_bytes: int, now: float) -> tuple[float, bool]:
        """(when, True): the lane has its turn then. (when, False): it is to ask again then. Who has less left
        to carry than another lane that waits leaves it a turn, once: lanes are to end together."""
        self._look(now)
        self._line.follow(self.rate.bytes_per_s, self._waits_s)
        turn_s = self._line.turn_s(size_bytes)
        yielded = lane.turn.yielded
        is_behind = yielded < TURNS_OF_ONE - 1 and self._is_less_urgent(lane)
        yields = bool(turn_s) and (is_behind or (not yielded and self._is_ahead(lane, size_bytes, now)))
        lane.turn.yielded = yielded + 1 if yields else 0
        at = now + self._line.free_in_s(now) + turn_s
        if not yields:
            at = self._line.admit_at(size_bytes, now)
        return at, not yields

    def _is_less_urgent(self, lane: Lane) -> bool:
        """Whether a lane that is urgent, as this one is not, has something to send, and a link for it."""
        return not lane.is_urgent and any(one.is_urgent and one.bulk and one.link for one in self.lanes)

    def _is_ahead(self, lane: Lane, size_bytes: int, now: float) -> bool:
        """Whether a lane with a message more to carry waits for its turn."""
        waiting = [one for one in self.lanes if one.turn.asked_line and (one.turn.at or now) > now]
        return any(one.is_far and one.bulk_bytes >= lane.bulk_bytes + size_bytes for one in waiting)

    def _look(self, now: float) -> None:
        """See how long what is under way to far peers waits before the line that is common to all. A way on
        which it waits longer has a queue of its own besides."""
        if now - self._looked_at < LEAST_SPAN_S:
            return
        self._looked_at = now
        far = [one.link for one in self.lanes if one.link and one.is_far and (one.bulk or one.carrying)]
        some = far[:: -(-len(far) // MOST_LOOKED_AT) or 1]
        waits_s = sorted(waits for link in some if (waits := link.look().queued_s) is not None)
        self._waits_s = waits_s[len(waits_s) // COMMON_OF] if waits_s else 0.0


FindRecord = Callable[[PeerId, bool], Awaitable[PeerRecord | None]]
"""(peer, whether a fresh one is wanted) to its record."""


@dataclass
class LinkObserver:
    """What the node wants to hear, on the event loop.

    ``opened``: (peer, carrier, why not the preferred carrier, and how the bytes travel if not directly).
    ``lost``: (peer, carrier, reason), an open link broke. ``unreachable``: (peer, reason), no carrier gets
    through."""

    opened: Callable[[PeerId, str, str], None]
    lost: Callable[[PeerId, str, str], None]
    unreachable: Callable[[PeerId, str], None]


@dataclass
class LinkTraffic:
    """Bulk bytes sent to one peer since the start, and the seconds in which there were some to send, or
    waited for their turn."""

    bulk_bytes: int = 0
    bulk_s: float = 0.0


class LinkPool:
    """All outgoing links of a node, on the ``uplink`` of its process."""

    def __init__(
        self, carriers: Sequence[Carrier], find_record: FindRecord, observer: LinkObserver,
        tasks: asyncio.TaskGroup, uplink: Uplink,
    ) -> None:  # fmt: skip
        self._carriers = tuple(carriers)
        self._find_record = find_record
        self._observer = observer
        self._tasks = tasks
        self._uplink = uplink
        self._paces: Mapping[PeerId, float] = {}
        self._lanes: dict[PeerId, Lane] = {}
        self._refused_until: dict[PeerId, float] = {}
        """When those that have shut us out may be dialled again; of others it is past, or not there."""
        self._order = BeginOrder()
        self._used: dict[str, str] = {}
        self.queued_bytes = 0
        """Bulk that waits for all peers together."""
        self._joined_last: tuple[Unsent | None, bytes] = (None, b"")
        self.up_bytes = 0
        self.is_urgent = False
        """Whether peers stand still for what is posted; may be set before anything is."""
        self.traffic: dict[PeerId, LinkTraffic] = {}

    @property
    def upload_bytes_per_s(self) -> float:
        """What the line has shown it can carry; 0 until measured."""
        self._uplink.watch(time.monotonic())
        return self._uplink.rate.bytes_per_s

    @property
    def is_full(self) -> bool:
        """Whether bulk waits for most peers: then it is our line that it waits for, and not theirs. Other
        threads may ask."""
        lanes = list(self._lanes.values())
        return 2 * sum(bool(lane.bulk) for lane in lanes) > len(lanes)

    def set_paces(self, bytes_per_s: Mapping[PeerId, float]) -> None:
        """How fast these peers want bulk data from us; others take what comes."""
        self._paces = bytes_per_s

    def post(
        self, peer: PeerId, data: Unsent, bulk: bool, served: bool = False, piece: Piece | None = None
    ) -> bool:
        """Queue a message; False if it was dropped because the queue is full. ``served``: bulk that ``peer``
        asked for, so that asking without reading costs us little. ``piece``: what ``forget`` knows it by."""
        lane = self._lanes.get(peer)
        if lane is None:
            if len(self._lanes) >= 2 * MAX_PEERS:
                return False
            lane = self._lanes[peer] = Lane(self.is_urgent)
            self._uplink.lanes.append(lane)
        if bulk:
            if not lane.bulk and not lane.carrying:
                lane.counted_until = time.monotonic()
            overasked = served and lane.served_bytes + len(data) > MAX_SERVED_BYTES
            if overasked or not self._make_room(lane, len(data)):
                return False
            lane.put(Bulk(data, piece, served, self._order.of(piece)))
            self.queued_bytes += len(data)
        else:
            if len(lane.control) >= MAX_QUEUED_CONTROL or lane.control_bytes + len(data) > MAX_CONTROL_BYTES:
                return False
            lane.control.append(data)
            lane.control_bytes += len(data)
        lane.wake.set()
        if lane.task is None or lane.task.done():
            lane.task = self._tasks.create_task(self._serve(peer, lane), name=f"lane {peer[-6:]}")
        return True

    def forget(self, attempt: bytes, means: bool) -> None:
        """Drop the slices of ``attempt`` that wait and, with ``means``, its means. They would go before what
        is needed now."""
        for lane in self._lanes.values():
            kept = [one for one in lane.bulk if not one.is_stale(attempt, means)]
            if len(kept) < len(lane.bulk):
                if not kept or kept[0] is not lane.bulk[0]:
                    self._uplink.give_back(lane)
                kept_bytes = sum(len(one.data) for one in kept)
                self.queued_bytes += kept_bytes - lane.bulk_bytes
                lane.bulk = deque(kept)
                lane.bulk_bytes = kept_bytes

    def carriers_used(self) -> dict[str, str]:
        """The last carrier that reached each peer."""
        return dict(self._used)

    async def drain(self, timeout_s: float) -> None:
        """Wait until the queues of reachable peers are empty, at most ``timeout_s`` seconds."""
        ends_at = time.monotonic() + timeout_s
        while any(lane.control or lane.bulk or lane.carrying for lane in self._lanes.values()):
            if time.monotonic() > ends_at:
                return
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        """Stop all lanes and close their links. Safe to cancel."""
        closing = [lane.link.close() for lane in self._lanes.values() if lane.link is not None]
        for peer, lane in list(self._lanes.items()):
            if lane.task is not None:
                lane.task.cancel()
            self._forget_lane(peer, lane)
        await asyncio.gather(*closing, return_exceptions=True)

    # ---- room

    def _make_room(self, lane: Lane, size_bytes: int) -> bool:
        """Drop the oldest bulk of ``lane`` as far as it takes for ``size_bytes`` more."""
        while lane.bulk_bytes + size_bytes > MAX_QUEUED_BYTES - self.queued_bytes - size_bytes:
            if not lane.bulk:
                return False
            self._uplink.give_back(lane)
            self.queued_bytes -= len(lane.take().data)
        return True

    def _forget_lane(self, peer: PeerId, lane: Lane) -> None:
        self.queued_bytes -= lane.bulk_bytes
        self._lanes.pop(peer, None)
        self._uplink.lanes.remove(lane)

    # ---- the connection

    async def _serve(self, peer: PeerId, lane: Lane) -> None:
        """One lane's task: lives while there is something to send or an open link to watch."""
        while True:
            if lane.link is None and not await self._open(peer, lane):
                return
            assert lane.link is not None
            try:
                await self._send_until_idle(peer, lane, lane.link)
                await _wait_for_work(lane, lane.link)
            except TransportError as error:
                link = lane.link
                lane.link = None
                lane.carrying -= len(lane.under_way)
                lane.under_way.clear()
                self._note_refusal(peer, str(error))
                self._observer.lost(peer, link.carrier, str(error))
                await link.close()  # its carrier holds it, and its connection, until then

    async def _open(self, peer: PeerId, lane: Lane) -> bool:
        reasons: list[str] = []
        if (shut_out_s := self._refused_until.get(peer, 0.0) - time.monotonic()) > 0:
            reasons.append(f"it hears us no more for {shut_out_s:.0f} s")
        record = None if reasons else await self._find_record(peer, False)
        for carrier in self._carriers if record is not None else ():
            assert record is not None
            try:
                lane.link = await self._connect(carrier, peer, record)
            except (TransportError, RemoteProtocolError) as error:
                reasons.append(f"{carrier.name}: {error}")
                self._note_refusal(peer, str(error))
                continue
            if lane.link.acknowledged is not None:
                lane.link.acknowledged.on_news = partial(self._hear, peer, lane, lane.link.acknowledged)
            self._used[peer] = carrier.name
            lane.counted_until = time.monotonic()
            if lane.link.way != "direct":
                reasons.append(lane.link.way)
            self._observer.opened(peer, carrier.name, "; ".join(reasons))
            return True
        self._forget_lane(peer, lane)
        self._observer.unreachable(peer, "; ".join(reasons) or "no record of this peer is known")
        return False

    def _note_refusal(self, peer: PeerId, cause: str) -> None:
        if shut_out_s := refused_for_s(cause):
            self._refused_until[peer] = time.monotonic() + shut_out_s
            if len(self._refused_until) > MAX_PEERS:
                del self._refused_until[next(iter(self._refused_until))]

    async def _connect(self, carrier: Carrier, peer: PeerId, record: PeerRecord) -> Link:
        """Connect; a peer that was started again is looked up again, since its addresses are new."""
        try:
            return await carrier.connect(record)
        except TransportError:
            newer = await self._find_record(peer, True)
            known = record.grpc_addresses, record.maddrs
            if newer is None or (newer.grpc_addresses, newer.maddrs) == known:
                raise
            return await carrier.connect(newer)

    async def _send_until_idle(self, peer: PeerId, lane: Lane, link: Link) -> None:
        while lane.control or lane.bulk:
            if lane.control:
                data = bytes(lane.control.popleft())
                lane.control_bytes -= len(data)
                self._uplink.cap.admit_at(len(data), time.monotonic())  # counts, but does not wait
                await link.send(data)
                self.up_bytes += len(data)
                continue
            wait_s = self._uplink.wait_s(lane, self._paces.get(peer, 0.0), time.monotonic())
            if wait_s > 0:
                lane.wake.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await lane.wake.wait()
            elif not lane.may_send(link):
                await _wait_for_work(lane, link)
            else:
                await self._send_bulk(lane, link)

    # ---- bulk

    async def _send_bulk(self, lane: Lane, link: Link) -> None:
        """The lane's next bulk message, whose turn it is."""
        lane.turn, data = Turn(yielded=lane.turn.yielded), lane.take().data
        self.queued_bytes -= len(data)
        lane.carrying += 1
        self._uplink.watch(time.monotonic())
        try:
            await link.send(self._joined(data))
        except BaseException:
            lane.carrying -= 1
            raise
        self.up_bytes += len(data)
        if link.acknowledged is None:
            self._arrived(link.peer, lane, len(data))
            return
        lane.under_way.append((link.acknowledged.sent_bytes, len(data)))
        self._hear(link.peer, lane, link.acknowledged)  # it may have been there before ``send`` returned

    def _joined(self, data: Unsent) -> bytes:
        """Its bytes. A mean goes to all members, to most of them at the same time: the last ones are kept as
        long as bulk waits."""
        last, joined = self._joined_last
        joined = joined if last is data else bytes(data)
        if not self.queued_bytes:
            self._joined_last = None, b""
        elif joined is not data:
            self._joined_last = data, joined
        return joined

    def _hear(self, peer: PeerId, lane: Lane, acknowledged: Acknowledged) -> None:
        """The peer says that more is there."""
        while lane.under_way and lane.under_way[0][0] <= acknowledged.arrived_bytes:
            self._arrived(peer, lane, lane.under_way.popleft()[1])
        lane.wake.set()

    def _arrived(self, peer: PeerId, lane: Lane, size_bytes: int) -> None:
        """Bulk is there, or the line has taken it."""
        now = time.monotonic()
        lane.carrying -= 1
        self._uplink.watch(now)
        traffic = self.traffic.setdefault(peer, LinkTraffic())
        traffic.bulk_bytes += size_bytes
        traffic.bulk_s += now - lane.counted_until
        lane.counted_until = now


async def _wait_for_work(lane: Lane, link: Link) -> None:
    """Until there is something to send, and room for it; raises ``PeerLost`` when the link dies first."""
    lane.wake.clear()
    if lane.may_send(link):
        return
    woken = asyncio.ensure_future(lane.wake.wait())
    closed = asyncio.ensure_future(link.wait_closed())
    try:
        await asyncio.wait({woken, closed}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        woken.cancel()
        closed.cancel()
    if closed.done() and not closed.cancelled() and not lane.may_send(link):
        raise PeerLost(closed.result())
