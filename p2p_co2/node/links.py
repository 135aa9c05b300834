"""Links to other peers: for each peer one outgoing queue, the carrier chosen for it, and its rate.

Direct gRPC is tried first where the peer's record names an address, then libp2p streams (relay, hole
punching). The choice is per link and direction, and is an event with its reason. ``post`` never blocks:
control messages overtake bulk data, bulk is bounded, and what cannot be delivered is dropped, because every
message of the protocol may be lost.

Bulk keeps to two rates: this peer's own cap, for all links together, and the rate at which the receiver said
that it wants it. Lanes get their turns in the order in which they ask, one message each; a control message
never waits for a turn.

What a link's peer says that it has (``acknowledged``) is what counts as sent, where it says so: the upload is
measured by it, and bulk waits until there is room on the way, so that little lies between a control message
and the line.

TCP over a far way stands still for a third of a second now and then (a packet that is lost twice; BBR, which
measures the way every 10 s), and a round waits for the slowest of all its lanes. So a lane with much to carry
has two connections, and each message goes over the one by which it is there sooner, as the kernel tells: TCP
(BBR) may leave one of them at a hundredth of the line for many rounds. And lanes that share a line do not
share it evenly: TCP gives some twice what others get, and the last lane of three goes on alone for half a
second, at the rate it has learned. So bulk over far ways takes turns on the line (``lanes``).

Law: all that leaves this machine for a peer leaves through ``post``.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from p2p_co2.errors import PeerLost, RemoteProtocolError, TransportError
from p2p_co2.net.transport.base import Carrier, Link
from p2p_co2.net.transport.flow import Acknowledged
from p2p_co2.node.envelope import Unsent
from p2p_co2.node.lanes import BeginOrder, Bulk, Lane, LineTurns, Piece, UnderWay
from p2p_co2.node.meter import Pace, UploadMeter
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.limits import MAX_DATA_BYTES, MAX_PEERS
from p2p_co2.protocol.wire.messages_pb2 import PeerRecord

MAX_QUEUED_BYTES = 1 << 30
"""Bulk bytes waiting for all peers together, and for one peer at most as much as is left for all others: who
takes nothing off our hands takes the room of its own messages only, the oldest first (rounds go by, and the
protocol asks again for what still matters)."""
MAX_SERVED_BYTES = 8 * MAX_DATA_BYTES
"""Bulk bytes waiting for one peer that it asked for itself, whatever waits for it besides: twice what a
fetcher asks for at once."""
MAX_LANES = 2 * MAX_PEERS
MAX_QUEUED_CONTROL, MAX_CONTROL_BYTES = 4096, 16 << 20
"""Control messages that wait for one peer, and their bytes: one that asks for a large state's manifest and
does not read would have us hold it thousands of times."""
BESIDE_BYTES = 256 << 10
"""A lane with so much to carry over a far way opens a second connection."""
BESIDE_IDLE_S = 30.0
"""A second connection that has carried nothing for so long is closed (it carries no control): half of what
makes it ``too slow``, for which its sender is shut out."""
LOOK_AGAIN_S = 0.03
"""A connection looks again after so long whether it is the one over which a message would be there sooner."""
RETRY_DIRECT_S = 60.0
"""After gRPC failed, libp2p serves the link for this long before gRPC is tried again."""


@dataclass
class LinkObserver:
    """What the node wants to hear. All calls come from the event loop."""

    opened: Callable[[PeerId, str, str], None]
    """(peer, carrier, why not the preferred carrier and how the bytes travel if not directly)"""
    lost: Callable[[PeerId, str, str], None]
    """(peer, carrier, reason): an open link broke."""
    unreachable: Callable[[PeerId, str], None]
    """(peer, reason): no carrier gets through."""


@dataclass
class LinkTraffic:
    """Bulk bytes sent to one peer since the start, and the seconds in which there were some to send: what
    waits for its turn on the line is on its way, or a line would seem as fast as a buffer that takes it."""

    bulk_bytes: int = 0
    bulk_s: float = 0.0


class Links:
    """All outgoing links of this process. ``upload_cap_bytes_per_s`` 0 means no cap."""

    def __init__(
        self,
        carriers: Sequence[Carrier],
        find_record: Callable[[PeerId, bool], Awaitable[PeerRecord | None]],
        observer: LinkObserver,
        tasks: asyncio.TaskGroup,
        upload_cap_bytes_per_s: float,
    ) -> None:
        self._carriers = tuple(carriers)
        self._find_record = find_record
        self._observer = observer
        self._tasks = tasks
        self._meter = UploadMeter()
        self._cap = Pace(upload_cap_bytes_per_s)
        self._paces: Mapping[PeerId, float] = {}
        self._lanes: dict[PeerId, Lane] = {}
        self._order = BeginOrder()
        self._turns = LineTurns(self._lanes, self._meter)
        self._used: dict[str, str] = {}
        self._queued_bytes = 0
        self._joined_last: tuple[Unsent | None, bytes] = (None, b"")
        self.up_bytes = 0
        self.traffic: dict[PeerId, LinkTraffic] = {}

    @property
    def upload_bytes_per_s(self) -> float:
        """What the link has shown it can carry; 0 until measured."""
        self._meter.rest(time.monotonic())
        return self._meter.bytes_per_s

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
            if len(self._lanes) >= MAX_LANES:
                return False
            lane = self._lanes[peer] = Lane()
        if bulk:
            if not lane.bulk and not lane.carrying:
                lane.counted_until = time.monotonic()
            overasked = served and lane.served_bytes + len(data) > MAX_SERVED_BYTES
            if overasked or not self._make_room(lane, len(data)):
                return False
            lane.put(Bulk(data, piece, served, self._order.of(piece)))
            self._queued_bytes += len(data)
        else:
            if len(lane.control) >= MAX_QUEUED_CONTROL or lane.control_bytes + len(data) > MAX_CONTROL_BYTES:
                return False
            lane.put_control(data)
        lane.wake.set()
        if bulk:
            lane.wake_beside.set()
        if lane.task is None or lane.task.done():
            lane.task = self._tasks.create_task(self._serve(peer, lane), name=f"lane {peer[-6:]}")
        elif bulk and self._wants_company(lane):
            lane.beside = self._tasks.create_task(self._carry_beside(peer, lane), name=f"beside {peer[-6:]}")
        return True

    def forget(self, attempt: bytes, means: bool) -> None:
        """Drop the slices of ``attempt`` that wait and, with ``means``, its means: on the way to a slow peer
        they would go before what is needed now."""
        for lane in self._lanes.values():
            kept = [one for one in lane.bulk if not one.is_stale(attempt, means)]
            if len(kept) < len(lane.bulk):
                if not kept or kept[0] is not lane.bulk[0]:
                    self._give_turn_back(lane)
                kept_bytes = sum(len(one.data) for one in kept)
                self._queued_bytes += kept_bytes - lane.bulk_bytes
                lane.bulk, lane.bulk_bytes = deque(kept), kept_bytes

    def _give_turn_back(self, lane: Lane) -> None:
        """The lane's first bulk message is dropped. Its share of a cap is not: an upload of 1 Mbit/s to 31
        peers would rest for 4 s."""
        lane.left_at = None
        if lane.turn_at is not None:
            size_bytes, lane.turn_at = len(lane.bulk[0].data), None
            lane.pace.give_back(size_bytes)
            if lane.asked_cap:
                self._cap.give_back(size_bytes)

    def _wants_company(self, lane: Lane) -> bool:
        """Whether a second connection would help: each of a far way's stands still now and then, for a lost
        packet or to measure the way, and the line with it."""
        if lane.link is None or not lane.link.is_far or lane.bulk_bytes < BESIDE_BYTES:
            return False
        is_there = lane.beside is not None and not lane.beside.done()
        return not is_there and time.monotonic() - lane.beside_failed_at > RETRY_DIRECT_S

    def _make_room(self, lane: Lane, size_bytes: int) -> bool:
        """Drop the oldest bulk of ``lane`` as far as it takes for ``size_bytes`` more."""
        while lane.bulk_bytes + size_bytes > MAX_QUEUED_BYTES - self._queued_bytes - size_bytes:
            if not lane.bulk:
                return False
            self._give_turn_back(lane)
            self._queued_bytes -= len(lane.take().data)
        return True

    def carriers_used(self) -> dict[str, str]:
        """The last carrier that reached each peer."""
        return dict(self._used)

    async def drain(self, timeout_s: float) -> None:
        """Wait until the queues of reachable peers are empty, at most ``timeout_s`` seconds."""
        ends_at = time.monotonic() + timeout_s
        while any(lane.control or lane.bulk for lane in self._lanes.values()) or self._meter.busy:
            if time.monotonic() > ends_at:
                return
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        """Stop all lanes and close their links. Safe to cancel."""
        for lane in self._lanes.values():
            for task in (lane.task, lane.beside):
                if task is not None:
                    task.cancel()
        links = [lane.link for lane in self._lanes.values() if lane.link is not None]
        self._lanes.clear()
        await asyncio.gather(*(link.close() for link in links), return_exceptions=True)

    async def _serve(self, peer: PeerId, lane: Lane) -> None:
        """One lane's task: lives while there is something to send or an open link to watch."""
        while True:
            if lane.link is None and not await self._open(peer, lane):
                return
            assert lane.link is not None
            try:
                await self._send_until_idle(peer, lane, lane.link)
                await self._wait(lane, lane.link)
            except TransportError as error:
                carrier, lane.link = lane.link.carrier, None
                self._give_up(peer, lane)
                self._observer.lost(peer, carrier, str(error))

    async def _open(self, peer: PeerId, lane: Lane) -> bool:
        record = await self._find_record(peer, False)
        reasons: list[str] = []
        for carrier in self._carriers if record is not None else ():
            assert record is not None
            if carrier.name == "grpc" and time.monotonic() - lane.grpc_failed_at < RETRY_DIRECT_S:
                reasons.append("grpc failed a moment ago")
                continue
            try:
                lane.link = await self._connect(carrier, peer, record)
            except (TransportError, RemoteProtocolError) as error:
                reasons.append(f"{carrier.name}: {error}")
                if carrier.name == "grpc" and len(self._carriers) > 1:
                    lane.grpc_failed_at = time.monotonic()
                continue
            if lane.link.acknowledged is not None:
                lane.link.acknowledged.on_news = partial(self._hear, peer, lane, lane.link.acknowledged)
            self._used[peer] = carrier.name
            lane.counted_until = time.monotonic()
            if lane.link.way != "direct":
                reasons.append(lane.link.way)
            self._observer.opened(peer, carrier.name, "; ".join(reasons))
            return True
        self._queued_bytes -= lane.bulk_bytes
        self._lanes.pop(peer, None)
        if lane.beside is not None:
            lane.beside.cancel()  # what it could not send would count as queued for ever
        self._observer.unreachable(peer, "; ".join(reasons) or "no record of this peer is known")
        return False

    async def _connect(self, carrier: Carrier, peer: PeerId, record: PeerRecord) -> Link:
        """Connect; a peer that was started again is looked up again, since its addresses are new."""
        try:
            return await carrier.connect(record)
        except TransportError:
            newer = await self._find_record(peer, True)
            if newer is None or (newer.grpc_addresses, newer.maddrs) == (
                record.grpc_addresses,
                record.maddrs,
            ):
                raise
            return await carrier.connect(newer)

    async def _send_until_idle(self, peer: PeerId, lane: Lane, link: Link) -> None:
        while lane.control or lane.bulk:
            if lane.control:
                data = bytes(lane.take_control())
                self._cap.admit_at(len(data), time.monotonic())  # counts, but does not wait
                await link.send(data)
                self.up_bytes += len(data)
                continue
            wait_s = self._wait_s(peer, lane, time.monotonic())
            if wait_s > 0:
                await _wait_for_news(lane.wake, wait_s)
                continue
            if link.acknowledged is not None and not link.acknowledged.has_room:
                await self._wait(lane, link)
                continue
            if lane.is_sooner_by_other(link, time.monotonic()):
                await _wait_for_news(lane.wake, LOOK_AGAIN_S)
                continue
            await self._send_bulk(lane, link, self._next_bulk(lane).data)

    def _next_bulk(self, lane: Lane) -> Bulk:
        """The lane's next bulk message, whose turn it is."""
        lane.turn_at = lane.left_at = None
        message = lane.take()
        self._queued_bytes -= len(message.data)
        return message

    async def _carry_beside(self, peer: PeerId, lane: Lane) -> None:
        """Carry bulk of ``lane`` over a second connection, as long as there is a first one and enough to
        carry. What it could not send goes over the first; peers take nothing twice."""
        link = lane.link_beside = await self._connect_beside(peer, lane)
        message, used_at = Bulk(b"", None), time.monotonic()
        try:
            while link is not None and lane.link is not None:
                wait_s = self._wait_s(peer, lane, time.monotonic()) if lane.bulk else math.inf
                if wait_s <= 0 and lane.is_sooner_by_other(link, time.monotonic()):
                    wait_s = LOOK_AGAIN_S
                if wait_s <= 0:
                    message = self._next_bulk(lane)
                    await self._send_bulk(lane, link, message.data)
                    used_at = time.monotonic()
                elif (left_s := used_at + BESIDE_IDLE_S - time.monotonic()) <= 0:
                    break
                elif lane.bulk:
                    await asyncio.sleep(min(wait_s, left_s))
                else:
                    await _wait_for_news(lane.wake_beside, left_s)
        except TransportError:
            lane.put(message, first=True)
            self._queued_bytes += len(message.data)
            lane.beside_failed_at = time.monotonic()
            lane.wake.set()
        finally:
            lane.link_beside = None
            if link is not None:
                await link.close()

    async def _connect_beside(self, peer: PeerId, lane: Lane) -> Link | None:
        """None where the peer has no place for a second connection, or cannot be reached any more."""
        record, first = await self._find_record(peer, False), lane.link
        if record is None or first is None:
            return None
        carrier = next(one for one in self._carriers if one.name == first.carrier)
        try:
            return await carrier.connect(record)
        except (TransportError, RemoteProtocolError):
            lane.beside_failed_at = time.monotonic()
            return None

    def _wait_s(self, peer: PeerId, lane: Lane, now: float) -> float:
        """How long the lane's first bulk message has to wait: first for the receiver's rate, then for our
        own cap, or a slow receiver would hold up what goes to the others, at last for the line."""
        size_bytes = len(lane.bulk[0].data)
        if lane.turn_at is None:
            lane.pace.bytes_per_s = self._paces.get(peer, 0.0)
            lane.turn_at, lane.asked_cap = lane.pace.admit_at(size_bytes, now), False
            lane.asked_line = lane.link is None or not lane.link.is_far
        if lane.turn_at <= now and not lane.asked_cap:
            lane.turn_at, lane.asked_cap = self._cap.admit_at(size_bytes, now), True
        if lane.turn_at <= now and not lane.asked_line:
            lane.turn_at, lane.asked_line = self._turns.ask(lane, size_bytes, now)
        return lane.turn_at - now

    async def _send_bulk(self, lane: Lane, link: Link, data: Unsent) -> None:
        self._meter.started(time.monotonic())
        lane.carrying += 1
        try:
            await link.send(self._joined(data))
        except BaseException:
            lane.carrying -= 1
            self._meter.finished(link.peer, 0, time.monotonic())
            raise
        self.up_bytes += len(data)
        if link.acknowledged is None:
            self._arrived(link.peer, lane, len(data))
            return
        lane.under_way.append(UnderWay(link.acknowledged.sent_bytes, len(data)))
        self._hear(link.peer, lane, link.acknowledged)  # it may have been there before ``send`` returned

    def _joined(self, data: Unsent) -> bytes:
        """Its bytes. A mean goes to all members, to most of them at the same time: the last ones are kept as
        long as bulk waits."""
        last, joined = self._joined_last
        if last is not data:
            joined = bytes(data)
        if not self._queued_bytes:
            self._joined_last = None, b""
        elif joined is not data:
            self._joined_last = data, joined
        return joined

    def _hear(self, peer: PeerId, lane: Lane, acknowledged: Acknowledged) -> None:
        """The peer says that more is there."""
        while lane.under_way and lane.under_way[0].end_bytes <= acknowledged.arrived_bytes:
            message = lane.under_way.popleft()
            self._arrived(peer, lane, message.size_bytes)
        lane.wake.set()

    def _arrived(self, peer: PeerId, lane: Lane, size_bytes: int) -> None:
        """Bulk is there, or the line has taken it."""
        now = time.monotonic()
        lane.carrying -= 1
        self._meter.finished(peer, size_bytes, now)
        traffic = self.traffic.setdefault(peer, LinkTraffic())
        traffic.bulk_bytes += size_bytes
        traffic.bulk_s += now - lane.counted_until
        lane.counted_until = now

    def _give_up(self, peer: PeerId, lane: Lane) -> None:
        """The link is gone: nobody will say what became of what was under way."""
        for _ in lane.under_way:
            self._meter.finished(peer, 0, time.monotonic())
        lane.carrying -= len(lane.under_way)
        lane.under_way.clear()

    async def _wait(self, lane: Lane, link: Link) -> None:
        """Until there is something to send, and room for it; raises ``PeerLost`` when the link dies first."""
        lane.wake.clear()
        if _may_send(lane, link):
            return
        woken = asyncio.ensure_future(lane.wake.wait())
        closed = asyncio.ensure_future(link.wait_closed())
        try:
            await asyncio.wait({woken, closed}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            woken.cancel()
            closed.cancel()
        if closed.done() and not closed.cancelled() and not _may_send(lane, link):
            raise PeerLost(closed.result())


def _may_send(lane: Lane, link: Link) -> bool:
    """Whether there is a message, and room for it: control needs none."""
    return bool(lane.control or (lane.bulk and (link.acknowledged is None or link.acknowledged.has_room)))


async def _wait_for_news(news: asyncio.Event, timeout_s: float) -> None:
    """Until something is posted to a lane, at most ``timeout_s`` seconds."""
    news.clear()
    try:
        async with asyncio.timeout(timeout_s):
            await news.wait()
    except TimeoutError:
        return
