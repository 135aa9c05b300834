"""Links to other peers: for each peer one outgoing queue, the carrier chosen for it, and its rate.

Direct gRPC is tried first where the peer's record names an address, then libp2p streams (relay, hole
punching). ``post`` never blocks: control messages overtake bulk data, bulk is bounded, and what cannot be
delivered is dropped, because every message of the protocol may be lost. Bulk keeps to the receiver's rate, to
our own cap, and takes turns on the line (``lanes.Uplink``); a control message never waits for a turn. Where a
link's peer says what it has, that is what counts as sent, and bulk waits for room on the way.

Law: all that leaves this machine for a peer leaves through ``post``.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from p2p_co2.errors import PeerLost, RemoteProtocolError, TransportError
from p2p_co2.net.transport.base import MESSAGE_TIMEOUT_S, Carrier, Link
from p2p_co2.net.transport.flow import Acknowledged
from p2p_co2.node.lanes import BeginOrder, Bulk, Lane, Piece, Turn, Uplink
from p2p_co2.protocol.wire.envelope import Unsent
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.limits import MAX_DATA_BYTES, MAX_PEERS
from p2p_co2.protocol.wire.messages_pb2 import PeerRecord

MAX_QUEUED_BYTES = 1 << 30
"""Bulk bytes waiting for all peers together, and for one peer at most as much as is left for all others: who
takes nothing off our hands takes the room of its own messages only, the oldest first."""
MAX_SERVED_BYTES = 8 * MAX_DATA_BYTES
"""Bulk bytes waiting for one peer that it asked for itself: twice what a fetcher asks for at once."""
MAX_QUEUED_CONTROL, MAX_CONTROL_BYTES = 4096, 16 << 20
"""Control messages that wait for one peer, and their bytes."""

FindRecord = Callable[[PeerId, bool], Awaitable[PeerRecord | None]]
"""(peer, whether a fresh one is wanted) to its record."""


@dataclass
class LinkObserver:
    """What the node wants to hear, on the event loop. ``opened``: (peer, carrier, why not the preferred
    carrier and how the bytes travel if not directly); ``lost``: (peer, carrier, reason), an open link broke;
    ``unreachable``: (peer, reason), no carrier gets through."""

    opened: Callable[[PeerId, str, str], None]
    lost: Callable[[PeerId, str, str], None]
    unreachable: Callable[[PeerId, str], None]


@dataclass
class LinkTraffic:
    """Bulk bytes sent to one peer since the start, and the seconds in which there were some to send: what
    waits for its turn on the line is on its way, or a line would seem as fast as a buffer that takes it."""

    bulk_bytes: int = 0
    bulk_s: float = 0.0


class LinkPool:
    """All outgoing links of a node, on the ``uplink`` of its process."""

    def __init__(
        self, carriers: Sequence[Carrier], find_record: FindRecord, observer: LinkObserver,
        tasks: asyncio.TaskGroup, uplink: Uplink,
    ) -> None:  # fmt: skip
        self._carriers, self._find_record, self._observer = tuple(carriers), find_record, observer
        self._tasks, self._uplink = tasks, uplink
        self._paces: Mapping[PeerId, float] = {}
        self._lanes: dict[PeerId, Lane] = {}
        self._order = BeginOrder()
        self._used: dict[str, str] = {}
        self.queued_bytes = 0
        """Bulk that waits for all peers together."""
        self._joined_last: tuple[Unsent | None, bytes] = (None, b"")
        self.up_bytes = 0
        self.traffic: dict[PeerId, LinkTraffic] = {}

    @property
    def upload_bytes_per_s(self) -> float:
        """What the line has shown it can carry; 0 until measured."""
        self._uplink.meter.rest(time.monotonic())
        return self._uplink.meter.bytes_per_s

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
            lane = self._lanes[peer] = Lane()
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
        """Drop the slices of ``attempt`` that wait and, with ``means``, its means: on the way to a slow peer
        they would go before what is needed now."""
        for lane in self._lanes.values():
            kept = [one for one in lane.bulk if not one.is_stale(attempt, means)]
            if len(kept) < len(lane.bulk):
                if not kept or kept[0] is not lane.bulk[0]:
                    self._uplink.give_back(lane)
                kept_bytes = sum(len(one.data) for one in kept)
                self.queued_bytes += kept_bytes - lane.bulk_bytes
                lane.bulk, lane.bulk_bytes = deque(kept), kept_bytes

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
                link, lane.link = lane.link, None
                for _ in lane.under_way:  # nobody will say what became of it
                    self._uplink.meter.finished(peer, 0, time.monotonic())
                lane.carrying -= len(lane.under_way)
                lane.under_way.clear()
                self._observer.lost(peer, link.carrier, str(error))
                await link.close()  # its carrier holds it, and its connection, until then

    async def _open(self, peer: PeerId, lane: Lane) -> bool:
        record = await self._find_record(peer, False)
        reasons: list[str] = []
        for carrier in self._carriers if record is not None else ():
            assert record is not None
            if carrier.name == "grpc" and time.monotonic() - lane.grpc_failed_at < MESSAGE_TIMEOUT_S:
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
        self._forget_lane(peer, lane)
        self._observer.unreachable(peer, "; ".join(reasons) or "no record of this peer is known")
        return False

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
        lane.turn, data = Turn(has_yielded=lane.turn.has_yielded), lane.take().data
        self.queued_bytes -= len(data)
        self._uplink.meter.started(time.monotonic())
        lane.carrying += 1
        try:
            await link.send(self._joined(data))
        except BaseException:
            lane.carrying -= 1
            self._uplink.meter.finished(link.peer, 0, time.monotonic())
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
        self._uplink.meter.finished(peer, size_bytes, now)
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
