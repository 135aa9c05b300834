"""The internet between simulated processes: lines with two rates, delay, jitter and loss; NAT; cuts; links.

A message takes its turn on the sender's uplink (control messages are small and pass bulk), travels, and, if
it is bulk, takes its turn on the receiver's downlink. As over TCP, a lost packet costs time and not the
message, and one connection over a long lossy path is slower than its line (Mathis et al., 1997). What TCP
never does (lose, double or reorder a message of an open link) happens only when ``Noise`` says so.

``VirtualLinks`` promises what ``node.links.LinkPool`` does. A link needs two round trips before its first
message travels. Law: everything is drawn from one random source in the order of the calls. Price: bulk of one
peer shares the uplink message by message, not packet by packet; the pool's own code is not played.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.net.transport.base import CONNECT_TIMEOUT_S
from p2p_co2.node.links import BeginOrder, Bulk, LinkObserver, LinkTraffic, Piece, place_of
from p2p_co2.planning.profiles import LinkProfile
from p2p_co2.simnet.virtual_time import ProcessLoop, VirtualTime
from p2p_co2.wire.envelope import Opened, Unsent, opened
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.messages_pb2 import Envelope

PACKET_BYTES = 1400
MATHIS = 1.22
"""Bytes in flight of one TCP connection at loss p: 1.22 * packet / sqrt(p)."""
SWING = math.sqrt(12)
"""Width of the even distribution whose standard deviation is 1."""
RETRANSMIT_S = 0.2
"""A lost last packet is noticed after this at the earliest (TCP's minimum retransmission time)."""
LINK_GIVEN_UP_S = 2 * CONNECT_TIMEOUT_S
"""Silence after which a carrier takes a link for dead: gRPC's keepalive and its patience together."""
PUNCHED_SHARE = 0.85
"""How often hole punching works between two cone NATs; the rest talk through a relay."""
RELAY_BYTES_PER_S = 1e6
"""What a relay lets one link have."""
MEASURED_AFTER_BYTES = 256 << 10
"""Real bytes of bulk after which a peer knows what its uplink carries (``node.meter``)."""
KNOCK_EVERY_S = 1.0
"""A peer that is not answered knocks again, as TCP does; and so much of what its way has not carried yet a
connection takes. The rest waits here, and may be forgotten."""
LOOK_UP_S = 0.3
"""To find the record of a peer that is not known yet."""


@dataclass(frozen=True)
class Noise:
    """What happens to one message in so many, beyond what the lines do. ``reordered`` ones come up to
    ``late_s`` later than they should."""

    lost: float = 0.0
    doubled: float = 0.0
    reordered: float = 0.0
    late_s: float = 2.0


@dataclass(frozen=True)
class Path:
    """How one peer reaches another."""

    delay_s: float
    jitter_s: float
    loss: float
    bytes_per_s: float


def way_between(sender: LinkProfile, receiver: LinkProfile, relayed: bool) -> Path:
    """By both ends' lines and, over a long lossy way, by what one connection gets through it."""
    times = 2.0 if relayed else 1.0
    delay_s = times * (sender.latency_ms + receiver.latency_ms) / 2000
    loss = min(0.5, times * (sender.loss + receiver.loss) / 2)
    rate = min(sender.up_bits_per_s, receiver.down_bits_per_s) / 8
    if loss > 0:
        rate = min(rate, MATHIS * PACKET_BYTES / (2 * delay_s * math.sqrt(loss)))
    if relayed:
        rate = min(rate, RELAY_BYTES_PER_S)
    return Path(delay_s, times * (sender.jitter_ms + receiver.jitter_ms) / 2000, loss, rate)


@dataclass
class Endpoint:
    """One process on its line. ``is_up``: the process listens; ``host_up``: the machine answers at all (a
    dead process on a live machine refuses a connection at once, a machine without power does not).
    ``on_gone``: who has an open link to it, and how that peer hears that the link broke."""

    peer: PeerId
    profile: LinkProfile
    loop: ProcessLoop
    on_message: Callable[[PeerId, bytes], Coroutine[Any, Any, None]] | None = None
    on_gone: dict[PeerId, Callable[[str], None]] = field(default_factory=dict)
    is_up: bool = True
    host_up: bool = True
    died_at: float = math.inf
    up_free_at: float = 0.0
    down_free_at: float = 0.0
    down_bytes: int = 0

    def __post_init__(self) -> None:
        self.up_bytes_per_s = self.profile.up_bits_per_s / 8
        self.down_bytes_per_s = self.profile.down_bits_per_s / 8
        self.carrier = "grpc" if self.profile.nat == "open" else "libp2p"

    def receive(self, sender: PeerId, data: bytes) -> None:
        """Hand a message to the process. That its sender should wait before the next one is not played."""
        if self.on_message is None:
            return
        work = self.on_message(sender, data)
        try:
            work.send(None)
            work.close()
        except StopIteration:
            return
        except RemoteProtocolError as error:  # its sender is not heard any more
            if hear := self.on_gone.pop(sender, None):
                hear(f"dropped by the other end: {error}")


class Internet:
    """All endpoints and what lies between them. ``scale``: real bytes of bulk data for each simulated byte;
    ``changed``: told when what peers can see of each other may change; ``faults``: what went wrong so far, by
    its name."""

    def __init__(
        self, world: VirtualTime, rng: random.Random, scale: float = 1.0,
        changed: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self.world = world
        self.rng = rng
        self.scale = scale
        self._tell_changed = changed
        self.noise = Noise()
        self.is_noisy = False
        self.faults: Counter[str] = Counter()
        self.endpoints: dict[PeerId, Endpoint] = {}
        self._paths: dict[tuple[PeerId, PeerId], Path] = {}
        self.is_whole = True
        self._sides: dict[PeerId, int] = {}
        self._cut_pairs: set[tuple[PeerId, PeerId]] = set()

    def set_noise(self, noise: Noise) -> None:
        self._tell_changed()
        self.noise = noise
        self.is_noisy = noise != Noise()

    # ---- cuts

    def split(self, sides: dict[PeerId, int]) -> None:
        """Cut the net into ``sides``; peers that are not named are on side 0."""
        self.faults["split"] += 1
        self._sides = sides
        self._changed()

    def cut_pair(self, first: PeerId, second: PeerId) -> None:
        """No way between these two, in neither direction."""
        self.faults["cut pair"] += 1
        self._cut_pairs |= {(first, second), (second, first)}
        self._changed()

    def heal(self) -> None:
        """All ways are free again."""
        self._sides = {}
        self._cut_pairs = set()
        self._changed()

    def _changed(self) -> None:
        """Links that are cut are given up later."""
        self._tell_changed()
        self.is_whole = not self._sides and not self._cut_pairs
        self.world.call_at(self.world.now + LINK_GIVEN_UP_S, self._drop_cut_links)

    def side_of(self, peer: PeerId) -> int:
        return self._sides.get(peer, 0)

    def is_cut(self, first: PeerId, second: PeerId) -> bool:
        if self.is_whole:
            return False
        return self.side_of(first) != self.side_of(second) or (first, second) in self._cut_pairs

    def _drop_cut_links(self) -> None:
        for endpoint in list(self.endpoints.values()):
            for other in [peer for peer in endpoint.on_gone if self.is_cut(endpoint.peer, peer)]:
                endpoint.on_gone.pop(other)("no answer to keepalive")

    # ---- ends

    def died(self, endpoint: Endpoint, host_up: bool) -> None:
        """The process is gone. On a live machine its links break at once; a machine without power is missed
        when its silence is noticed, or when it is back."""
        endpoint.is_up = False
        endpoint.host_up = host_up
        endpoint.died_at = self.world.now
        if host_up:
            self.break_links(endpoint, "connection reset")
        else:
            later = self.world.now + LINK_GIVEN_UP_S
            self.world.call_at(later, self.break_links, endpoint, "no answer to keepalive")

    def break_links(self, endpoint: Endpoint, reason: str) -> None:
        """All who have a link to this end hear that it broke; who is cut off hears it when that is
        noticed."""
        for other, hear in list(endpoint.on_gone.items()):
            if not self.is_cut(endpoint.peer, other):
                del endpoint.on_gone[other]
                hear(reason)

    # ---- ways and messages

    def path(self, sender: Endpoint, receiver: Endpoint) -> Path:
        """The way from one to the other, the same whenever they meet; a relay is always there."""
        ends = sender.peer, receiver.peer
        if ends not in self._paths:
            way = sender.profile.nat
            behind = receiver.profile.nat
            draw = random.Random("/".join(sorted(ends))).random()
            is_punched = way == behind == "cone" and draw < PUNCHED_SHARE
            is_relayed = "open" not in (way, behind) and not is_punched
            self._paths[ends] = way_between(sender.profile, receiver.profile, is_relayed)
        return self._paths[ends]

    def travel_s(self, path: Path, size_bytes: float) -> float:
        """Delay of one message, without its turns on the lines: jitter, and a retransmission if a packet of
        it is lost."""
        random_ = self.rng.random
        delay_s = path.delay_s
        loss = path.loss
        travel_s = delay_s + path.jitter_s * SWING * (random_() - 0.5)
        if loss > 0.0:
            packets = 1 + int(size_bytes / PACKET_BYTES)
            if random_() > (1.0 - loss) ** packets:
                travel_s += max(RETRANSMIT_S, 2 * delay_s) if packets < 4 else 2 * delay_s
        return travel_s if travel_s > delay_s / 4 else delay_s / 4

    def copies(self) -> int:
        """How many of a message that is sent now travel: 1 but for noise."""
        noise = self.noise
        draw = self.rng.random() if self.is_noisy else 1.0
        if draw < noise.lost:
            self.faults["message lost"] += 1
            return 0
        if draw < noise.lost + noise.doubled:
            self.faults["message doubled"] += 1
            return 2
        return 1

    def late_s(self) -> float:
        """So much later than it should a message comes that noise reorders."""
        if not self.is_noisy or self.rng.random() >= self.noise.reordered:
            return 0.0
        self.faults["message reordered"] += 1
        return self.rng.random() * self.noise.late_s

    def deliver(
        self, sender: Endpoint, receiver: Endpoint, departs_at: float, data: bytes, size_bytes: float
    ) -> None:
        """A message is at its receiver's door; ``departs_at``: when its last byte left the sender;
        ``size_bytes``: what it stands for."""
        if sender.died_at >= departs_at and receiver.is_up:
            receiver.down_bytes += int(size_bytes)
            receiver.receive(sender.peer, data)


# ---- one process's links


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
    ``flushes_at``: for when a timer is set."""

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


class VirtualLinks:
    """Implements ``node.environment.Links``; see the module and ``node.links.LinkPool``."""

    def __init__(self, internet: Internet, me: Endpoint, observer: LinkObserver) -> None:
        self._internet = internet
        self._me = me
        self._observer = observer
        self._lanes: dict[PeerId, _Lane] = {}
        self._carried: list[_Lane] = []
        """Those on which bulk has gone."""
        self._used: dict[str, str] = {}
        self._order = BeginOrder()
        self._posted: tuple[Unsent, Parcel] = b"", Parcel()
        """What was posted last: the same bytes go to many, one after the other."""
        self._measured_bytes = self._shown_bytes_per_s = 0.0
        self._gone_at = 0.0
        """When all that was sent so far has left the uplink."""
        self._is_closed = False
        self.up_bytes = 0
        self.is_urgent = False
        self.traffic: dict[PeerId, LinkTraffic] = {}

    @property
    def upload_bytes_per_s(self) -> float:
        """What the upload has shown: its line, or less where all ways that carried bulk carry less."""
        ways = [lane.path.bytes_per_s for lane in self._carried if lane.path]
        if together := sum(ways):
            self._shown_bytes_per_s = min(self._me.up_bytes_per_s, together) / self._internet.scale
        return self._shown_bytes_per_s if self._measured_bytes >= MEASURED_AFTER_BYTES else 0.0

    @property
    def is_full(self) -> bool:
        """Bulk that is still on its way up waits, too."""
        now = self._internet.world.now
        waiting = sum(bool(lane.bulk) or lane.leaves_at > now for lane in self._lanes.values())
        return 2 * waiting > len(self._lanes)

    def set_paces(self, bytes_per_s: Mapping[PeerId, float]) -> None:
        """Lines here are paced by themselves."""

    def post(
        self, peer: PeerId, data: Unsent, bulk: bool, served: bool = False, piece: Piece | None = None
    ) -> bool:
        if self._is_closed:
            return False
        if data is not self._posted[0]:
            self._posted = data, Parcel(data)
        parcel = self._posted[1]
        lane = self._lanes.get(peer)
        if lane is None:
            lane = self._lanes[peer] = _Lane(peer)
            self._knock(lane, self._internet.world.now + CONNECT_TIMEOUT_S)
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
        for lane in self._lanes.values():
            lane.bulk = [one for one in lane.bulk if not one.is_stale(attempt, means)]

    def carriers_used(self) -> dict[str, str]:
        return dict(self._used)

    async def drain(self, timeout_s: float) -> None:
        """What a process says last is on the wire before the process is gone."""
        ends_at = self._internet.world.now + timeout_s
        while (now := self._internet.world.now) < ends_at:
            waits = any(lane.control or lane.bulk for lane in self._lanes.values())
            if not waits and now > self._gone_at:
                return
            await asyncio.sleep(0.05)

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
            return None, f"{receiver.carrier}: no answer within {CONNECT_TIMEOUT_S:.0f} s"
        if not receiver.is_up:
            return 2 * path.delay_s, f"{receiver.carrier}: connection refused"
        return 4 * path.delay_s, path

    def _opened(self, lane: _Lane, outcome: Path | str) -> None:
        receiver = self._internet.endpoints.get(lane.peer)
        if receiver is not None and receiver.is_up and isinstance(outcome, Path):
            lane.path = outcome
            lane.receiver = receiver
            receiver.on_gone[self._me.peer] = partial(self._hear_of_loss, lane)
            carrier = self._used[lane.peer] = receiver.carrier
            reason = "" if carrier == "grpc" else "grpc: no route to host (behind NAT)"
            self._observer.opened(lane.peer, carrier, reason)
            self._flush(lane)
        elif self._lanes.get(lane.peer) is lane:
            self._drop(lane)
            self._observer.unreachable(lane.peer, outcome if isinstance(outcome, str) else "connection reset")

    def _hear_of_loss(self, lane: _Lane, reason: str) -> None:
        """The other end is gone; the news travels as long as anything."""
        if not self._me.loop.dead:
            delay_s = lane.path.delay_s if lane.path is not None else 0.0
            self._me.loop.call_later(delay_s, self._lost, lane, reason)

    def _lost(self, lane: _Lane, reason: str) -> None:
        if self._lanes.get(lane.peer) is lane and lane.path is not None:
            lane.path = lane.receiver = None
            self._observer.lost(lane.peer, self._used[lane.peer], reason)
            self._knock(lane, self._internet.world.now + CONNECT_TIMEOUT_S)

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
        receiver = lane.receiver
        now = self._internet.world.now
        if receiver is None:
            return
        if not self._internet.is_cut(self._me.peer, lane.peer):
            control = lane.control
            lane.control = []
            for data in control:
                self._send(lane, receiver, data, bulk=False)
            while lane.bulk and lane.free_at - now <= KNOCK_EVERY_S and not self._is_reset(lane, receiver):
                self._send(lane, receiver, cast(Parcel, lane.bulk.pop(0).data), bulk=True)
        if (lane.bulk or lane.control) and lane.flushes_at <= now:
            room_at = lane.free_at - KNOCK_EVERY_S
            lane.flushes_at = room_at if room_at > now else now + KNOCK_EVERY_S
            self._me.loop.call_at(lane.flushes_at, self._flush, lane)

    def _is_reset(self, lane: _Lane, receiver: Endpoint) -> bool:
        """Whether the other end is dead, and its machine, which lives or lives again, says so."""
        if receiver.is_up:
            return False
        is_reset = receiver.host_up or self._internet.endpoints.get(receiver.peer) is not receiver
        if is_reset:
            receiver.on_gone.pop(self._me.peer, None)
            self._hear_of_loss(lane, "connection reset")
        return is_reset

    def _send(self, lane: _Lane, receiver: Endpoint, data: Parcel, bulk: bool) -> None:
        for _ in range(0 if self._is_reset(lane, receiver) else self._internet.copies()):
            self._transmit(lane, receiver, data, bulk)

    def _transmit(self, lane: _Lane, receiver: Endpoint, data: Parcel, bulk: bool) -> None:
        internet = self._internet
        path = lane.path
        now = self._internet.world.now
        assert path is not None
        size = data.real_bytes(internet.scale) if bulk else float(len(data))
        self.up_bytes += int(size)
        if not bulk:
            departs_at = now + size / self._me.up_bytes_per_s
            arrives_at = departs_at + internet.travel_s(path, size)
            arrives_at = lane.last_control_at = max(arrives_at, lane.last_control_at)
        else:
            self._measured_bytes += size
            if not lane.last_bulk_at:
                self._carried.append(lane)
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
