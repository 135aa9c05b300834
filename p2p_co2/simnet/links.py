"""A simulated process's links to others: what ``node.links.LinkPool`` is in a real one, over ``Internet``.

The same promises: ``post`` never blocks, control overtakes bulk, what cannot be delivered is dropped, a link
that breaks is opened again, and a peer that no carrier reaches is reported. A link needs two round trips
before the first message travels, and may not be opened at all. Price: the pool's own code is not played (its
task for each lane, turns on the line).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import cast

from p2p_co2.node.links import BeginOrder, Bulk, LinkObserver, LinkTraffic, Piece, place_of
from p2p_co2.protocol.wire.envelope import Opened, Unsent, opened
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.messages_pb2 import Envelope
from p2p_co2.simnet.internet import CONNECT_PATIENCE_S, Endpoint, Internet, Path

MEASURED_AFTER_BYTES = 256 << 10
"""Real bytes of bulk after which a peer knows what its uplink carries (``node.meter``)."""
KNOCK_EVERY_S = 1.0
"""A peer that is not answered knocks again, as TCP does."""
DRAIN_LOOK_S = 0.05
BUFFERED_S = 1.0
"""What a connection takes beyond what its way has carried; the rest waits here, and may be forgotten."""
LOOK_UP_S = 0.3
"""To find the record of a peer that is not known yet."""


class Parcel(bytes):
    """The bytes of one message, read once for all to whom they go: a heartbeat goes to fifty peers, a mean to
    a whole group. ``opened``: what the first receiver read, which nobody writes to."""

    opened: Opened | None = None
    _real_bytes = 0.0

    def real_bytes(self, scale: float) -> float:
        """What it stands for as bulk: its payload is scaled, what is around it is as large as it is."""
        if scale != 1.0 and not self._real_bytes:
            envelope = Envelope.FromString(self)
            payload = len(getattr(envelope, envelope.WhichOneof("body") or "").data)
            self._real_bytes = len(self) + payload * (scale - 1.0)
        return self._real_bytes or float(len(self))


def open_parcel(data: bytes, group: bytes) -> Opened:
    """As ``wire.envelope.opened``; all peers of a simulation are in one ``group``."""
    if not isinstance(data, Parcel):
        return opened(data, group)
    if data.opened is None:
        data.opened = opened(bytes(data), group)  # of a copy: what was read may hold on to its bytes
    return data.opened


@dataclass
class _Lane:
    """``free_at``: when its way has carried what it took; ``leaves_at``: when that has left this machine;
    ``flushes_at``: for when a timer is set; ``carried``: whether bulk has gone on it."""

    peer: PeerId
    path: Path | None = None
    receiver: Endpoint | None = None
    control: list[Parcel] = field(default_factory=list)
    bulk: list[Bulk] = field(default_factory=list)
    free_at: float = 0.0
    leaves_at: float = 0.0
    flushes_at: float = 0.0
    last_control_at: float = 0.0
    last_bulk_at: float = 0.0
    carried: bool = False


class VirtualLinks:
    """Implements ``node.environment.Links``."""

    def __init__(self, internet: Internet, me: Endpoint, observer: LinkObserver) -> None:
        self._internet, self._me, self._observer = internet, me, observer
        self._lanes: dict[PeerId, _Lane] = {}
        self._used: dict[str, str] = {}
        self._order = BeginOrder()
        self._posted: tuple[Unsent, Parcel] = b"", Parcel()
        """What was posted last: the same bytes go to many, one after the other."""
        self._measured_bytes = self._shown_bytes_per_s = 0.0
        self._gone_at = 0.0
        """When all that was sent so far has left the uplink."""
        self._is_closed = False
        self.up_bytes = 0
        self.traffic: dict[PeerId, LinkTraffic] = {}

    @property
    def upload_bytes_per_s(self) -> float:
        """What the upload has shown: its line, or less where all ways that carried bulk carry less."""
        ways = (lane.path.bytes_per_s for lane in self._lanes.values() if lane.carried and lane.path)
        if together := sum(ways):
            self._shown_bytes_per_s = min(self._me.up_bytes_per_s, together) / self._internet.scale
        return self._shown_bytes_per_s if self._measured_bytes >= MEASURED_AFTER_BYTES else 0.0

    @property
    def is_full(self) -> bool:
        """As ``LinkPool.is_full``: bulk that is still on its way up waits, too."""
        now = self._internet.world.now
        waiting = sum(bool(lane.bulk) or lane.leaves_at > now for lane in self._lanes.values())
        return 2 * waiting > len(self._lanes)

    def set_paces(self, bytes_per_s: Mapping[PeerId, float]) -> None:
        """As ``LinkPool.set_paces``; lines here are paced by themselves."""

    def post(
        self, peer: PeerId, data: Unsent, bulk: bool, served: bool = False, piece: Piece | None = None
    ) -> bool:
        if self._is_closed:
            return False
        if data is not self._posted[0]:
            self._posted = data, Parcel(data)
        parcel, lane = self._posted[1], self._lanes.get(peer)
        if lane is None:
            lane = self._lanes[peer] = _Lane(peer)
            self._knock(lane, self._internet.world.now + CONNECT_PATIENCE_S)
        if bulk:
            message = Bulk(parcel, piece, served, self._order.of(piece))
            lane.bulk.insert(place_of(message, lane.bulk), message)
        elif lane.receiver is not None and not self._internet.is_cut(self._me.peer, peer):
            self._send(lane, lane.receiver, parcel, bulk=False)
            return True
        else:
            lane.control.append(parcel)
        self._flush(lane)
        return True

    def forget(self, attempt: bytes, means: bool) -> None:
        """As ``LinkPool.forget``."""
        for lane in self._lanes.values():
            lane.bulk = [one for one in lane.bulk if not one.is_stale(attempt, means)]

    def carriers_used(self) -> dict[str, str]:
        return dict(self._used)

    async def drain(self, timeout_s: float) -> None:
        """As ``LinkPool.drain``: what a process says last is on the wire before the process is gone."""
        ends_at = self._internet.world.now + timeout_s
        while (now := self._internet.world.now) < ends_at:
            waits = any(lane.control or lane.bulk for lane in self._lanes.values())
            if not waits and now > self._gone_at:
                return
            await asyncio.sleep(DRAIN_LOOK_S)

    async def close(self) -> None:
        self._is_closed = True
        for lane in list(self._lanes.values()):
            self._drop(lane)

    # ---- opening and losing

    def _knock(self, lane: _Lane, until: float) -> None:
        """Dial; again and again where nobody answers at all."""
        after_s, outcome = self._dial(lane.peer)
        if after_s is not None:
            self._me.loop.call_later(after_s, self._opened, lane, outcome)
        elif self._internet.world.now + KNOCK_EVERY_S < until:
            self._me.loop.call_later(KNOCK_EVERY_S, self._knock, lane, until)
        else:
            self._me.loop.call_at(until, self._opened, lane, outcome)

    def _dial(self, peer: PeerId) -> tuple[float | None, Path | str]:
        """After how long there is an answer, None if never, and which."""
        receiver = self._internet.endpoints.get(peer)
        if receiver is None:
            return LOOK_UP_S, "no record of this peer is known"
        path = self._internet.path(self._me, receiver)
        if self._internet.is_cut(self._me.peer, peer) or not receiver.host_up:
            return None, f"{path.carrier}: no answer within {CONNECT_PATIENCE_S:.0f} s"
        if not receiver.is_up:
            return 2 * path.delay_s, f"{path.carrier}: connection refused"
        return 4 * path.delay_s, path

    def _opened(self, lane: _Lane, outcome: Path | str) -> None:
        receiver = self._internet.endpoints.get(lane.peer)
        if isinstance(outcome, Path) and (receiver is None or not receiver.is_up):
            outcome = f"{outcome.carrier}: connection reset"
        if isinstance(outcome, str) or receiver is None:
            if self._lanes.get(lane.peer) is lane:
                self._drop(lane)
                self._observer.unreachable(lane.peer, str(outcome))
            return
        lane.path, lane.receiver = outcome, receiver
        receiver.on_gone[self._me.peer] = partial(self._hear_of_loss, lane)
        self._used[lane.peer] = outcome.carrier
        self._observer.opened(lane.peer, outcome.carrier, outcome.reason)
        self._flush(lane)

    def _hear_of_loss(self, lane: _Lane, reason: str) -> None:
        """The other end is gone; the news travels as long as anything."""
        if not self._me.loop.dead:
            delay_s = lane.path.delay_s if lane.path is not None else 0.0
            self._me.loop.call_later(delay_s, self._lost, lane, reason)

    def _lost(self, lane: _Lane, reason: str) -> None:
        if self._lanes.get(lane.peer) is lane and lane.path is not None:
            carrier, lane.path, lane.receiver = lane.path.carrier, None, None
            self._observer.lost(lane.peer, carrier, reason)
            self._knock(lane, self._internet.world.now + CONNECT_PATIENCE_S)

    def _drop(self, lane: _Lane) -> None:
        del self._lanes[lane.peer]
        lane.control.clear()
        lane.bulk.clear()
        if lane.receiver is not None:
            lane.receiver.on_gone.pop(self._me.peer, None)
        lane.path = lane.receiver = None

    # ---- sending

    def _flush(self, lane: _Lane) -> None:
        """Send what waits, but for bulk that would only wait in a buffer on the way. Over a way that is cut
        all waits: it goes with one of TCP's retransmissions."""
        receiver, now = lane.receiver, self._internet.world.now
        if receiver is None:
            return
        if not self._internet.is_cut(self._me.peer, lane.peer):
            control, lane.control = lane.control, []
            for data in control:
                self._send(lane, receiver, data, bulk=False)
            while lane.bulk and lane.free_at - now <= BUFFERED_S and not self._is_reset(lane, receiver):
                self._send(lane, receiver, cast(Parcel, lane.bulk.pop(0).data), bulk=True)
        if (lane.bulk or lane.control) and lane.flushes_at <= now:
            room_at = lane.free_at - BUFFERED_S
            lane.flushes_at = room_at if room_at > now else now + BUFFERED_S
            self._me.loop.call_at(lane.flushes_at, self._flush, lane)

    def _is_reset(self, lane: _Lane, receiver: Endpoint) -> bool:
        """Whether the other end is dead, and its machine says so."""
        is_reset = not receiver.is_up and self._internet.answers_reset(receiver)
        if is_reset:
            receiver.on_gone.pop(self._me.peer, None)
            self._hear_of_loss(lane, "connection reset")
        return is_reset

    def _send(self, lane: _Lane, receiver: Endpoint, data: Parcel, bulk: bool) -> None:
        if self._is_reset(lane, receiver):
            return
        for _ in range(self._internet.copies()):
            self._transmit(lane, receiver, data, bulk)

    def _transmit(self, lane: _Lane, receiver: Endpoint, data: Parcel, bulk: bool) -> None:
        internet, path, now = self._internet, lane.path, self._internet.world.now
        assert path is not None
        size = data.real_bytes(internet.scale) if bulk else float(len(data))
        self.up_bytes += int(size)
        if not bulk:
            departs_at = now + size / self._me.up_bytes_per_s
            arrives_at = departs_at + internet.travel_s(path, size)
            arrives_at = lane.last_control_at = max(arrives_at, lane.last_control_at)
        else:
            self._measured_bytes += size
            lane.carried = True
            starts_at = max(now, self._me.up_free_at)
            departs_at = lane.leaves_at = self._me.up_free_at = starts_at + size / self._me.up_bytes_per_s
            lane.free_at = max(departs_at, max(starts_at, lane.free_at) + size / path.bytes_per_s)
            through_s = size / receiver.down_bytes_per_s
            # Who sends slowly leaves the receiver's line to the others: it is free for them as it comes.
            receiver.down_free_at = max(now, receiver.down_free_at) + through_s
            arrives_at = lane.free_at + internet.travel_s(path, size) + through_s
            arrives_at = lane.last_bulk_at = max(arrives_at, lane.last_bulk_at, receiver.down_free_at)
        self._gone_at = max(self._gone_at, departs_at)
        arguments = (self._me, receiver, departs_at, data, size)
        internet.world.at(arrives_at + internet.late_s(), internet.deliver, arguments, receiver.loop)
