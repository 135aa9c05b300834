"""A simulated process's links to others: what ``node.links.LinkPool`` is in a real one, over ``Internet``.

The same promises: ``post`` never blocks, control overtakes bulk, bulk is bounded by the same named bounds,
what cannot be delivered is dropped, a link that breaks is opened again, and a peer that no carrier reaches is
reported. A link needs two round trips before the first message travels, and may not be opened at all.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

from p2p_co2.node.lanes import BeginOrder, Bulk, Piece, place_of
from p2p_co2.node.links import (
    MAX_CONTROL_BYTES,
    MAX_LANES,
    MAX_QUEUED_BYTES,
    MAX_QUEUED_CONTROL,
    MAX_SERVED_BYTES,
    LinkObserver,
    LinkTraffic,
)
from p2p_co2.protocol.wire.envelope import Unsent
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.messages_pb2 import Envelope
from p2p_co2.simnet.internet import CONNECT_PATIENCE_S, Endpoint, Internet, Path
from p2p_co2.simnet.parcel import Parcel
from p2p_co2.simnet.virtual_time import Handle

MEASURED_AFTER_BYTES = 256 << 10
"""Real bytes of bulk after which a peer knows what its uplink carries (``node.meter``)."""
SYN_AGAIN_S = (1.0, 2.0, 4.0)
"""Who is not answered knocks again after so long each, as TCP does (RFC 6298: a second, then doubled)."""
DRAIN_LOOK_S, JUST_AFTER_S = 0.05, 1e-6
BUFFERED_S = 1.0
"""What a connection takes beyond what its way has carried; the rest waits here, and may be forgotten."""
LOOK_UP_S = 0.3
"""To find the record of a peer that is not known yet."""


@dataclass
class _Lane:
    path: Path | None = None
    receiver: Endpoint | None = None
    is_opening: bool = False
    control: list[bytes] = field(default_factory=list)
    bulk: list[Bulk] = field(default_factory=list)
    bulk_bytes: int = 0
    """Bulk that is queued or on its way up."""
    is_timed: bool = False
    """Whether a timer is set for bulk that waits."""
    free_at: float = 0.0
    last_control_at: float = 0.0
    last_bulk_at: float = 0.0
    measured: Path | None = None
    """The way on which bulk has gone: it is part of what the upload has shown."""


class VirtualLinks:
    """Implements ``node.environment.Links``."""

    def __init__(self, internet: Internet, me: Endpoint, observer: LinkObserver) -> None:
        self._internet, self._me, self._observer = internet, me, observer
        self._world = internet.world
        self._lanes: dict[PeerId, _Lane] = {}
        self._opening: dict[PeerId, _Lane] = {}
        """Those of them in which anything may wait."""
        self._used: dict[str, str] = {}
        self._queued_bytes, self._order = 0, BeginOrder()
        self._going_up: deque[tuple[float, _Lane, int]] = deque()
        """Bulk on the uplink: when it will have left, whose it is, how much."""
        self._measured_bytes = 0.0
        self._sized: tuple[bytes, float] = b"", 0.0
        self._posted: Unsent = b""
        self._parcel = Parcel()
        """What was posted last: the same bytes go to many, one after the other."""
        self.waited = 0
        """Messages for which there was no open lane, and bulk: nothing else makes a queue longer."""
        self._is_closed = False
        self._control_gone_at = 0.0
        """When the last control message so far has left the uplink."""
        self.up_bytes = 0
        self.traffic: dict[PeerId, LinkTraffic] = {}
        self._uplink_bytes_per_s = me.profile.up_bits_per_s / 8
        self._shown_bytes_per_s = 0.0
        """What the upload has shown that it can do: its line, or less where all ways together carry less."""

    @property
    def upload_bytes_per_s(self) -> float:
        return self._shown_bytes_per_s if self._measured_bytes >= MEASURED_AFTER_BYTES else 0.0

    @property
    def is_full(self) -> bool:
        """As ``LinkPool.is_full``."""
        self._count_gone()
        return 2 * sum(lane.bulk_bytes > 0 for lane in self._lanes.values()) > len(self._lanes)

    @property
    def queued_bytes(self) -> int:
        """Bulk that waits for all peers together."""
        self._count_gone()
        return self._queued_bytes

    @property
    def queued_control(self) -> int:
        """Control messages that wait for the peer that has most of them."""
        return max((len(lane.control) for lane in self._opening.values()), default=0)

    def held(self) -> dict[str, tuple[int, int]]:
        """As ``Rounds.held``."""
        return {
            "MAX_LANES": (len(self._lanes), MAX_LANES),
            "MAX_QUEUED_BYTES": (self.queued_bytes, MAX_QUEUED_BYTES),
            "MAX_QUEUED_CONTROL": (self.queued_control, MAX_QUEUED_CONTROL),
        }

    def set_paces(self, bytes_per_s: Mapping[PeerId, float]) -> None:
        """As ``LinkPool.set_paces``; lines here are paced by themselves."""

    def post(
        self, peer: PeerId, data: Unsent, bulk: bool, served: bool = False, piece: Piece | None = None
    ) -> bool:
        if data is not self._posted:
            self._posted, self._parcel = data, Parcel(data)
        data = self._parcel
        lane = self._lanes.get(peer)
        if lane is not None and lane.path is not None and not bulk and len(data) <= MAX_CONTROL_BYTES:
            self._send(lane, data, bulk=False)  # no control message waits in an open lane
            return True
        self.waited += 1
        if lane is None:
            if len(self._lanes) >= MAX_LANES or self._is_closed:
                return False
            lane = self._lanes[peer] = _Lane()
        if bulk:
            self._count_gone()
            full = self._queued_bytes + len(data) > MAX_QUEUED_BYTES
            served_bytes = sum(len(one.data) for one in lane.bulk if one.is_served) if served else 0
            if full or (served and served_bytes + len(data) > MAX_SERVED_BYTES):
                return False
            lane.bulk_bytes += len(data)
            self._queued_bytes += len(data)
        elif len(lane.control) >= MAX_QUEUED_CONTROL or (
            sum(map(len, lane.control)) + len(data) > MAX_CONTROL_BYTES
        ):
            return False
        if bulk:
            message = Bulk(data, piece, served, self._order.of(piece))
            lane.bulk.insert(place_of(message, lane.bulk), message)
        else:
            lane.control.append(data)
        if lane.path is None:
            self._open(peer, lane)
        elif bulk:
            self._flush(lane)
        return True

    def forget(self, attempt: bytes, means: bool) -> None:
        """As ``Links.forget``."""
        for lane in self._lanes.values():
            waiting, lane.bulk = lane.bulk, []
            for one in waiting:
                if one.is_stale(attempt, means):
                    self._gone_up(lane, len(one.data))
                else:
                    lane.bulk.append(one)

    def carriers_used(self) -> dict[str, str]:
        return dict(self._used)

    async def drain(self, timeout_s: float) -> None:
        """As ``Links.drain``: what a process says last is on the wire before the process is gone."""
        ends_at = self._world.now + timeout_s
        while self._world.now < ends_at:
            self._count_gone()
            waits = any(lane.control or lane.bulk_bytes for lane in self._lanes.values())
            left_s = self._control_gone_at - self._world.now
            if not waits and left_s < 0:
                return
            await asyncio.sleep(DRAIN_LOOK_S if waits else min(left_s + JUST_AFTER_S, timeout_s))

    async def close(self) -> None:
        self._is_closed = True
        for peer in list(self._lanes):
            self._forget(peer)

    # ---- opening and losing

    def _open(self, peer: PeerId, lane: _Lane) -> None:
        if lane.is_opening:
            return
        lane.is_opening = True
        self._opening[peer] = lane
        self._knock(peer, lane, self._world.now, SYN_AGAIN_S)

    def _knock(self, peer: PeerId, lane: _Lane, began_at: float, again_s: tuple[float, ...]) -> None:
        after_s, outcome, is_answered = self._dial(peer)
        if is_answered or not again_s:
            at = self._world.now + after_s if is_answered else began_at + CONNECT_PATIENCE_S
            self._me.loop.call_at(at, self._opened, peer, lane, outcome)
        else:
            self._me.loop.call_later(again_s[0], self._knock, peer, lane, began_at, again_s[1:])

    def _dial(self, peer: PeerId) -> tuple[float, Path | str, bool]:
        """What comes of it, after how long, and whether anybody answers at all."""
        receiver = self._internet.endpoints.get(peer)
        if receiver is None:
            return LOOK_UP_S, "no record of this peer is known", True
        path = self._internet.path(self._me, receiver)
        if isinstance(path, str):
            return CONNECT_PATIENCE_S, path, False
        if self._internet.is_cut(self._me.peer, peer) or not receiver.host_up:
            return CONNECT_PATIENCE_S, f"{path.carrier}: no answer within {CONNECT_PATIENCE_S:.0f} s", False
        if not receiver.is_up:
            return 2 * path.delay_s, f"{path.carrier}: connection refused", True
        return 4 * path.delay_s, path, True

    def _opened(self, peer: PeerId, lane: _Lane, outcome: Path | str) -> None:
        lane.is_opening = False
        if self._opening.get(peer) is lane:
            del self._opening[peer]
        receiver = self._internet.endpoints.get(peer)
        if isinstance(outcome, Path) and (receiver is None or not receiver.is_up):
            outcome = f"{outcome.carrier}: connection reset"
        if isinstance(outcome, str) or receiver is None:
            if self._lanes.get(peer) is lane:
                self._forget(peer)
                self._observer.unreachable(peer, str(outcome))
            return
        lane.path, lane.receiver = outcome, receiver
        receiver.on_gone[self._me.peer] = lambda reason: self._hear_of_loss(peer, lane, reason)
        self._used[peer] = outcome.carrier
        self._observer.opened(peer, outcome.carrier, outcome.reason)
        self._flush(lane)

    def _hear_of_loss(self, peer: PeerId, lane: _Lane, reason: str) -> None:
        """The other end is gone; the news travels as long as anything."""
        if not self._me.loop.dead:
            delay_s = lane.path.delay_s if lane.path is not None else 0.0
            self._me.loop.call_later(delay_s, self._lost, peer, lane, reason)

    def _lost(self, peer: PeerId, lane: _Lane, reason: str) -> None:
        if self._lanes.get(peer) is not lane or lane.path is None:
            return
        carrier, lane.path, lane.receiver = lane.path.carrier, None, None
        self._observer.lost(peer, carrier, reason)
        self._open(peer, lane)

    def _forget(self, peer: PeerId) -> None:
        lane = self._lanes.pop(peer)
        self._opening.pop(peer, None)
        self._queued_bytes -= lane.bulk_bytes
        lane.bulk_bytes = 0
        lane.control.clear()
        lane.bulk.clear()
        if lane.receiver is not None:
            lane.receiver.on_gone.pop(self._me.peer, None)
        lane.path = lane.receiver = None
        if lane.measured is not None:
            self._measure_ways()

    # ---- sending

    def _flush(self, lane: _Lane) -> None:
        """Send what waits, but for bulk that would only wait in a buffer on the way."""
        control, lane.control = lane.control, []
        for data in control:
            self._send(lane, data, bulk=False)
        while lane.bulk and self._takes_bulk(lane) and lane.free_at - self._world.now <= BUFFERED_S:
            self._send(lane, cast(Parcel, lane.bulk.pop(0).data), bulk=True)
        if lane.bulk and lane.path is not None and not lane.is_timed:
            lane.is_timed = True
            now, room_at = self._world.now, lane.free_at - BUFFERED_S
            self._me.loop.call_at(room_at if room_at > now else now + BUFFERED_S, self._release, lane)

    def _takes_bulk(self, lane: _Lane) -> bool:
        """Whether what is sent now leaves this end: what waits is not lost with a way, and may be
        forgotten."""
        receiver = lane.receiver
        if lane.path is None or receiver is None or self._internet.is_cut(self._me.peer, receiver.peer):
            return False
        if receiver.is_up or not self._internet.answers_reset(receiver):
            return True
        receiver.on_gone.pop(self._me.peer, None)
        self._hear_of_loss(receiver.peer, lane, "connection reset")
        return False

    def _release(self, lane: _Lane) -> None:
        """The way has carried what was before the bulk that waits."""
        lane.is_timed = False
        if lane.path is not None:
            self._flush(lane)

    def _send(self, lane: _Lane, data: bytes, bulk: bool) -> None:
        internet, receiver = self._internet, lane.receiver
        assert receiver is not None
        if not internet.is_whole and internet.is_cut(self._me.peer, receiver.peer):
            if bulk:
                self._gone_up(lane, len(data))
            internet.hold(self._me.peer, receiver.peer, lambda: self._send_again(lane, data, bulk))
            return
        if not receiver.is_up and internet.answers_reset(receiver):
            receiver.on_gone.pop(self._me.peer, None)
            self._hear_of_loss(receiver.peer, lane, "connection reset")
            return
        if internet.is_noisy:
            noise, draw = internet.noise, internet.rng.random()
            if draw < noise.lost:
                internet.noises["message lost"] += 1
                if bulk:
                    self._gone_up(lane, len(data))
                return
            if draw < noise.lost + noise.doubled:
                internet.noises["message doubled"] += 1
                self._transmit(lane, receiver, data, bulk, counts=False)
        self._transmit(lane, receiver, data, bulk, counts=True)

    def _send_again(self, lane: _Lane, data: bytes, bulk: bool) -> None:
        if lane.path is not None and lane.receiver is not None and not self._me.loop.dead:
            self._transmit(lane, lane.receiver, data, bulk, counts=False)

    def _transmit(self, lane: _Lane, receiver: Endpoint, data: bytes, bulk: bool, counts: bool) -> None:
        """``counts``: whether the bulk bytes leave the queue with it; a copy was never in it."""
        internet, world, path = self._internet, self._world, lane.path
        assert path is not None
        size = self._real_bytes(data) if bulk else float(len(data))
        self.up_bytes += int(size)
        uplink = self._uplink_bytes_per_s
        if not bulk:
            departs_at = world.now + size / uplink
            self._control_gone_at = max(self._control_gone_at, departs_at)
            arrives_at = departs_at + internet.travel_s(path, size)
            arrives_at = lane.last_control_at = max(arrives_at, lane.last_control_at)
        else:
            self._measured_bytes += size
            if lane.measured is not path:
                lane.measured = path
                self._measure_ways()
            starts_at = max(world.now, self._me.up_free_at)
            departs_at = self._me.up_free_at = starts_at + size / uplink
            lane.free_at = max(departs_at, max(starts_at, lane.free_at) + size / path.bytes_per_s)
            if counts:
                self._going_up.append((departs_at, lane, len(data)))
            through_s = 8 * size / receiver.profile.down_bits_per_s
            # Who sends slowly leaves the receiver's line to the others: it is free for them as it comes.
            receiver.down_free_at = max(world.now, receiver.down_free_at) + through_s
            arrives_at = lane.free_at + internet.travel_s(path, size) + through_s
            arrives_at = lane.last_bulk_at = max(arrives_at, lane.last_bulk_at, receiver.down_free_at)
        if internet.is_noisy and (share := internet.noise.reordered) and internet.rng.random() < share:
            internet.noises["message reordered"] += 1
            arrives_at += internet.rng.random() * internet.noise.late_s
        arguments = (self._me, receiver, departs_at, data, size)
        world.at(arrives_at, Handle(internet.deliver, arguments, receiver.loop))

    def _measure_ways(self) -> None:
        """Of the ways that are left; as before where there are none."""
        ways = [lane.measured.bytes_per_s for lane in self._lanes.values() if lane.measured is not None]
        if ways:
            self._shown_bytes_per_s = min(self._uplink_bytes_per_s, sum(ways)) / self._internet.scale

    def _real_bytes(self, data: bytes) -> float:
        """What a bulk message stands for: its payload is scaled, what is around it is as large as it is."""
        if self._internet.scale == 1.0:
            return float(len(data))
        if data is not self._sized[0]:  # a mean goes to all members, one after the other
            envelope = Envelope.FromString(data)
            payload = len(getattr(envelope, envelope.WhichOneof("body") or "").data)
            self._sized = data, len(data) + payload * (self._internet.scale - 1.0)
        return self._sized[1]

    def _count_gone(self) -> None:
        while self._going_up and self._going_up[0][0] <= self._world.now:
            _, lane, size_bytes = self._going_up.popleft()
            self._gone_up(lane, size_bytes)

    def _gone_up(self, lane: _Lane, size_bytes: int) -> None:
        if lane.bulk_bytes >= size_bytes:
            lane.bulk_bytes -= size_bytes
            self._queued_bytes -= size_bytes
