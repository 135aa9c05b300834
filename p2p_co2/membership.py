"""Who is alive, how far away, and where they are in the run: a machine without I/O or clock.

Each peer pings each other every ``HEARTBEAT_S``; pings and pongs carry the sender's ``Status``. A peer is
live from its first ping or pong until it says goodbye, its link breaks and cannot be opened again, or it is
silent for longer than its own habit explains. There is no fixed timeout to guess: the silence that we accept
grows with the gaps that were seen.

Law: ``live`` holds only peers that were heard directly; a peer that only the DHT knows is not live. Time is
compared with this machine's clock alone; other clocks are only measured (``clock_offset_s``), never trusted.

Price: n - 1 small messages per heartbeat and peer, so it serves groups of up to a few hundred, not thousands.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.limits import MAX_FRAGMENTS, MAX_PEERS, MAX_STRING
from p2p_co2.wire.messages_pb2 import Leave, Ping, Pong, Status

HEARTBEAT_S = 1.0
SILENCE_FLOOR_S = 6.0
"""A peer is never declared silent sooner: a busy laptop may starve a thread for seconds."""
SILENCE_CAP_S = 30.0
GAPS_KEPT = 16
OFFSETS_KEPT = 9
ONE_WAY_S = 2.0
"""A peer that we hear but cannot reach is no peer for this long; without it, it would join and leave all the
time."""
REVISIT_S = 5.0
"""A peer that the DHT still lists is tried again this long after it left."""


@dataclass(frozen=True)
class Joined:
    peer: PeerId


@dataclass(frozen=True)
class Left:
    """``reason`` in words: what we saw, not what we guess."""

    peer: PeerId
    reason: str


MembershipEvent = Joined | Left


@dataclass
class PeerInfo:
    """What is known of one live peer. ``round_trip_s`` is the smallest of late; ``clock_offset_s`` theirs
    minus ours."""

    status: Status
    heard_at: float
    status_at: float
    gaps_s: deque[float] = field(default_factory=lambda: deque(maxlen=GAPS_KEPT))
    round_trips_s: deque[float] = field(default_factory=lambda: deque(maxlen=OFFSETS_KEPT))
    offsets_s: deque[float] = field(default_factory=lambda: deque(maxlen=OFFSETS_KEPT))

    @property
    def round_trip_s(self) -> float:
        return min(self.round_trips_s, default=0.2)

    @property
    def clock_offset_s(self) -> float:
        return median(self.offsets_s) if self.offsets_s else 0.0

    @property
    def silence_limit_s(self) -> float:
        """Seconds without a word after which the peer counts as gone."""
        habit = 4.0 * max(self.gaps_s, default=HEARTBEAT_S)
        return min(SILENCE_CAP_S, max(SILENCE_FLOOR_S, habit))


class Membership:
    """The five verbs of a machine, plus ``found`` (the DHT lists these) and ``unreachable`` (no carrier gets
    through)."""

    def __init__(self, me: PeerId) -> None:
        self.me = me
        self.status = Status()
        self._live: dict[PeerId, PeerInfo] = {}
        self._candidates: dict[PeerId, float] = {}
        """Peers the DHT lists that are not live, and when to try them next."""
        self._one_way_until: dict[PeerId, float] = {}
        self._next_heartbeat_at: float | None = None
        self._nonce = 0
        self._outgoing: list[tuple[PeerId, Ping | Pong | Leave]] = []
        self._events: deque[MembershipEvent] = deque()

    @property
    def live(self) -> Mapping[PeerId, PeerInfo]:
        """Live peers other than this one."""
        return self._live

    @property
    def unheard(self) -> int:
        """Peers that the DHT lists and that are not live."""
        return len(self._candidates)

    def found(self, peers: Iterable[PeerId], now: float) -> None:
        """The DHT lists these peers; those not yet live are pinged."""
        for peer in peers:
            if peer == self.me or peer in self._live or len(self._candidates) >= MAX_PEERS:
                continue
            self._candidates.setdefault(peer, now)
        self._greet(now)
        if self._next_heartbeat_at is None:
            self._next_heartbeat_at = now + HEARTBEAT_S

    def forget(self, listed: Iterable[PeerId]) -> None:
        """Keep as candidates only the peers that the DHT still lists."""
        keep = set(listed)
        self._candidates = {peer: at for peer, at in self._candidates.items() if peer in keep}

    def receive(self, message: Ping | Pong | Leave, sender: PeerId, now: float) -> None:
        """Handle one message of the membership part; raises ``RemoteProtocolError`` for nonsense in it."""
        if isinstance(message, Leave):
            self._drop(sender, f"left: {message.reason[:MAX_STRING] or 'no reason given'}")
            return
        check_status(message.status)
        if self._one_way_until.get(sender, 0.0) > now:
            return
        self._heard(sender, message.status, now)
        if isinstance(message, Ping):
            self._outgoing.append(
                (
                    sender,
                    Pong(
                        nonce=message.nonce, ping_sent_at=message.sent_at, answered_at=now, status=self.status
                    ),
                )
            )
            return
        round_trip_s = now - message.ping_sent_at
        if not (0 <= round_trip_s < SILENCE_CAP_S and math.isfinite(message.answered_at)):
            return
        info = self._live.get(sender)
        if info is None:
            return  # as many peers as we take are live already
        info.round_trips_s.append(round_trip_s)
        info.offsets_s.append(message.answered_at - (message.ping_sent_at + round_trip_s / 2))

    def unreachable(self, peer: PeerId, reason: str, now: float) -> None:
        """No carrier can open a link to ``peer``: it is gone until the DHT lists it again."""
        self._drop(peer, reason)
        self._candidates[peer] = now + REVISIT_S
        self._one_way_until = {other: until for other, until in self._one_way_until.items() if until > now}
        self._one_way_until[peer] = now + ONE_WAY_S

    def announce(self, now: float) -> None:
        """Tell every live peer this peer's status now, instead of at the next heartbeat."""
        for peer in self._live:
            self._ping(peer, now)

    def say_goodbye(self, reason: str) -> None:
        """Tell every live peer that this one leaves."""
        self._outgoing.extend((peer, Leave(reason=reason)) for peer in self._live)

    def handle_timer(self, now: float) -> None:
        if self._next_heartbeat_at is None or now < self._next_heartbeat_at:
            return
        self._next_heartbeat_at = now + HEARTBEAT_S
        for peer, info in list(self._live.items()):
            silent_s = now - info.heard_at
            if silent_s > info.silence_limit_s:
                self._drop(peer, f"silent for {silent_s:.0f} s")
                self._candidates[peer] = now + REVISIT_S
            else:
                self._ping(peer, now)
        self._greet(now)

    def get_timer(self) -> float | None:
        return self._next_heartbeat_at

    def messages_to_send(self) -> list[tuple[PeerId, Ping | Pong | Leave]]:
        messages, self._outgoing = self._outgoing, []
        return messages

    def next_event(self) -> MembershipEvent | None:
        return self._events.popleft() if self._events else None

    def positions(self, now: float, rounds_per_s: float) -> list[float]:
        """Where the training peers are now on the swarm clock, in rounds, from their last status."""
        return [
            info.status.position + (now - info.status_at + info.round_trip_s / 2) * rounds_per_s
            for info in self._live.values()
            if info.status.phase == Status.TRAINING
        ]

    def clock_offset_s(self) -> float:
        """Median of the others' clocks minus ours, seconds; 0 when alone."""
        offsets = [info.clock_offset_s for info in self._live.values() if info.offsets_s]
        return median(offsets) if offsets else 0.0

    def _heard(self, peer: PeerId, status: Status, now: float) -> None:
        info = self._live.get(peer)
        if info is None:
            if len(self._live) >= MAX_PEERS:
                return
            self._live[peer] = PeerInfo(status=status, heard_at=now, status_at=now)
            self._candidates.pop(peer, None)
            self._events.append(Joined(peer))
            if self._next_heartbeat_at is None:
                self._next_heartbeat_at = now
            return
        info.gaps_s.append(now - info.heard_at)
        info.heard_at = info.status_at = now
        info.status = status

    def _greet(self, now: float) -> None:
        for peer, at in self._candidates.items():
            if at <= now:
                self._candidates[peer] = now + REVISIT_S
                self._ping(peer, now)

    def _ping(self, peer: PeerId, now: float) -> None:
        self._nonce += 1
        self._outgoing.append((peer, Ping(nonce=self._nonce, sent_at=now, status=self.status)))

    def _drop(self, peer: PeerId, reason: str) -> None:
        if self._live.pop(peer, None) is not None:
            self._events.append(Left(peer, reason))


def check_status(status: Status) -> None:
    """Raise ``RemoteProtocolError`` for a status that cannot be true."""
    numbers = (status.position, status.upload_bytes_per_s, status.download_bytes_per_s)
    if not all(math.isfinite(number) and 0 <= number < 1e18 for number in numbers):
        raise RemoteProtocolError("bad status", f"position or rate out of range: {numbers}")
    if len(status.versions) > MAX_FRAGMENTS or len(status.digests) not in (0, len(status.versions)):
        raise RemoteProtocolError("bad status", "versions and digests do not belong together")
    if any(len(digest) != 32 for digest in status.digests) or len(status.software) > MAX_STRING:
        raise RemoteProtocolError("bad status", "a digest has the wrong length")
