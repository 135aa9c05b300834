"""The internet between simulated processes: lines with two rates, delay, jitter and loss; NAT; cuts.

A message takes its turn on the sender's uplink (bulk waits behind bulk; control messages are small and pass),
travels, and, if it is bulk, takes its turn on the receiver's downlink. As over TCP, a lost packet costs time
and not the message, and one connection over a long lossy path is slower than its line (Mathis et al., 1997,
``MATHIS``). What TCP never does (lose, double or reorder a message of an open link) happens only when
``Noise`` says so: the protocol promises to bear it.

Law: everything is drawn from one random source in the order of the calls. Price: bulk of one peer shares the
uplink in the order in which it was posted, not packet by packet.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.planning.profiles import LinkProfile
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.simnet.virtual_time import ProcessLoop, VirtualTime

PACKET_BYTES = 1400
MATHIS = 1.22
"""Bytes in flight of one TCP connection at loss p: 1.22 * packet / sqrt(p)."""
SWING = math.sqrt(12)
"""Width of the even distribution whose standard deviation is 1."""
RETRANSMIT_S = 0.2
"""A lost last packet is noticed after this at the earliest (TCP's minimum retransmission time)."""
LINK_GIVEN_UP_S = 20.0
"""Silence after which a carrier takes a link for dead: gRPC's keepalive and its patience together."""
CONNECT_PATIENCE_S = 10.0
PUNCHED_SHARE = 0.85
"""How often hole punching works between two cone NATs; the rest talk through a relay."""
LATE_S = 2.0
RELAY_BYTES_PER_S = 1e6
"""What a relay lets one link have."""


@dataclass(frozen=True)
class Noise:
    """What happens to one message in so many, beyond what the lines do. ``reordered`` ones come up to
    ``LATE_S`` later than they should."""

    lost: float = 0.0
    doubled: float = 0.0
    reordered: float = 0.0


@dataclass(frozen=True)
class Path:
    """How one peer reaches another. ``carrier`` and ``reason`` as ``node.links`` would report them."""

    delay_s: float
    jitter_s: float
    loss: float
    bytes_per_s: float
    carrier: str = "grpc"
    reason: str = ""


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
    dead process on a live machine refuses a connection at once, a machine without power does not)."""

    peer: PeerId
    profile: LinkProfile
    loop: ProcessLoop
    on_message: Callable[[PeerId, bytes], Coroutine[Any, Any, None]] | None = None
    on_gone: dict[PeerId, Callable[[str], None]] = field(default_factory=dict)
    """Who has an open link to us, and how it hears that the link broke."""
    is_up: bool = True
    host_up: bool = True
    died_at: float = math.inf
    up_free_at: float = 0.0
    down_free_at: float = 0.0
    down_bytes: int = 0
    on_free: Callable[[], None] = lambda: None
    """Told when a way that was cut may be free again."""

    def __post_init__(self) -> None:
        self.up_bytes_per_s, self.down_bytes_per_s = (
            self.profile.up_bits_per_s / 8,
            self.profile.down_bits_per_s / 8,
        )

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
            hear = self.on_gone.pop(sender, None)
            if hear is not None:
                hear(f"dropped by the other end: {error}")


def _path(sender: Endpoint, receiver: Endpoint) -> tuple[Path, bool]:
    """From one peer to another, and whether it is over a relay: the same whenever they meet."""
    first, second = sender.profile, receiver.profile
    if second.nat == "open":
        return way_between(first, second, False), False
    both_cone = first.nat == second.nat == "cone"
    is_relayed = first.nat != "open" and not (both_cone and _punches(sender.peer, receiver.peer))
    reason = "grpc: no route to host (behind NAT)"
    return replace(way_between(first, second, is_relayed), carrier="libp2p", reason=reason), is_relayed


def _punches(first: PeerId, second: PeerId) -> bool:
    """Whether hole punching works between two cone NATs: drawn once for each pair."""
    return random.Random("/".join(sorted((first, second)))).random() < PUNCHED_SHARE


class Internet:
    """All endpoints and what lies between them. ``scale``: real bytes of bulk data for each simulated
    byte."""

    def __init__(self, world: VirtualTime, rng: random.Random, scale: float = 1.0) -> None:
        self.world, self.rng, self.scale = world, rng, scale
        self.set_noise(Noise())
        self.noises: Counter[str] = Counter()
        """What ``noise`` did to messages."""
        self.endpoints: dict[PeerId, Endpoint] = {}
        self.relays_up: Callable[[PeerId], bool] = lambda peer: True
        self._paths: dict[tuple[PeerId, PeerId], tuple[Path, bool]] = {}
        """From whom to whom a way was asked for; whether it is over a relay."""
        self.is_whole = True
        self._sides: dict[PeerId, int] = {}
        self._cut_pairs: set[tuple[PeerId, PeerId]] = set()

    def set_noise(self, noise: Noise) -> None:
        self.noise, self.is_noisy = noise, noise != Noise()

    # ---- cuts

    def split(self, sides: dict[PeerId, int]) -> None:
        """Cut the net into ``sides``; peers that are not named are on side 0."""
        self._sides = sides
        self._changed()

    def cut_pair(self, first: PeerId, second: PeerId) -> None:
        """No way between these two, in neither direction."""
        self._cut_pairs |= {(first, second), (second, first)}
        self._changed()

    def heal(self) -> None:
        """All ways are free again."""
        self._sides, self._cut_pairs = {}, set()
        self._changed()

    def _changed(self) -> None:
        """What waits for a way that is free goes with TCP's next retransmission; links that are cut are given
        up later."""
        now, self.is_whole = self.world.now, not self._sides and not self._cut_pairs
        for endpoint in self.endpoints.values():
            self.world.call_at(now + self.rng.uniform(RETRANSMIT_S, 3.0), endpoint.on_free)
        self.world.call_at(now + LINK_GIVEN_UP_S, self._drop_cut_links)

    def side_of(self, peer: PeerId) -> int:
        return self._sides.get(peer, 0)

    def is_cut(self, first: PeerId, second: PeerId) -> bool:
        if self.is_whole:
            return False
        return self._sides.get(first, 0) != self._sides.get(second, 0) or (first, second) in self._cut_pairs

    def _drop_cut_links(self) -> None:
        for endpoint in list(self.endpoints.values()):
            for other in [peer for peer in endpoint.on_gone if self.is_cut(endpoint.peer, peer)]:
                endpoint.on_gone.pop(other)("no answer to keepalive")

    # ---- ends

    def died(self, endpoint: Endpoint, host_up: bool) -> None:
        """The process is gone. On a live machine its links break at once; a machine without power is missed
        only when its silence is noticed, or when it is back and knows of nothing."""
        endpoint.is_up, endpoint.host_up, endpoint.died_at = False, host_up, self.world.now
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

    def answers_reset(self, endpoint: Endpoint) -> bool:
        """Whether a packet for this dead end is answered: its machine lives, or lives again."""
        return endpoint.host_up or self.endpoints.get(endpoint.peer) is not endpoint

    # ---- ways

    def path(self, sender: Endpoint, receiver: Endpoint) -> Path | str:
        """The way from one to the other, or why there is none."""
        ends = sender.peer, receiver.peer
        known = self._paths.get(ends)
        if known is None:
            known = self._paths[ends] = _path(sender, receiver)
        path, is_relayed = known
        if is_relayed and not self.relays_up(sender.peer):
            return "grpc: no route to host (behind NAT); libp2p: no relay answers"
        return path

    # ---- messages

    def travel_s(self, path: Path, size_bytes: float) -> float:
        """Delay of one message, without its turns on the lines: jitter, and a retransmission if a packet of
        it is lost."""
        random_ = self.rng.random
        delay_s, loss = path.delay_s, path.loss
        travel_s = delay_s + path.jitter_s * SWING * (random_() - 0.5)
        if loss > 0.0:
            packets = 1 + int(size_bytes / PACKET_BYTES)
            if random_() > (1.0 - loss) ** packets:
                travel_s += max(RETRANSMIT_S, 2 * delay_s) if packets < 4 else 2 * delay_s
        return travel_s if travel_s > delay_s / 4 else delay_s / 4

    def copies(self) -> int:
        """How many of a message that is sent now travel: 1 but for noise."""
        noise, draw = self.noise, self.rng.random() if self.is_noisy else 1.0
        if draw < noise.lost:
            self.noises["message lost"] += 1
            return 0
        if draw < noise.lost + noise.doubled:
            self.noises["message doubled"] += 1
            return 2
        return 1

    def late_s(self) -> float:
        """So much later than it should a message comes that noise reorders."""
        if not self.is_noisy or self.rng.random() >= self.noise.reordered:
            return 0.0
        self.noises["message reordered"] += 1
        return self.rng.random() * LATE_S

    def deliver(
        self, sender: Endpoint, receiver: Endpoint, departs_at: float, data: bytes, size_bytes: float
    ) -> None:
        """A message is at its receiver's door; ``departs_at``: when its last byte left the sender;
        ``size_bytes``: what it stands for."""
        if sender.died_at >= departs_at and receiver.is_up:
            receiver.down_bytes += int(size_bytes)
            receiver.receive(sender.peer, data)
