"""Who loads what a donor holds, and whose turn it is for the room that it leaves.

A state counts as in use by those who take its chunks: each new chunk that one of them asks for, and takes
off our hands, keeps it for as long as a slow line needs for it. For who asks for its manifest it is kept for
the time that choosing takes, once: who then takes nothing has wasted its turn. Who is turned away meanwhile
stands in a queue, and room that becomes free goes to the first that still asks.

Laws: asking without loading keeps a state from others for ``CHOOSING_S`` at most, whichever states one asks
for, and not at all where others were turned away before; who wasted a turn stands behind all who did not for
``WASTED_S``; nobody else loses its place in the queue to who comes later. Nothing here grows beyond
``MAX_WAITING`` and ``MAX_CHOOSING``.

Price: identities are free to make. Each that stands before a newcomer may waste one turn, so behind k of them
it waits for up to k times ``CHOOSING_S`` and what the exports take; who really loads, at 90 kB/s or more from
each donor (16 kB/s in the smallest chunks), holds its turn for as long as an export may last; and a crowd
that fills all places before a newcomer comes, and goes on filling them, keeps it out. How many may speak at
all is the door's business.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field

from p2p_co2.protocol.catchup.line import WINDOW_BYTES
from p2p_co2.protocol.catchup.source import AGAIN_MOST_S
from p2p_co2.protocol.wire.identity import PeerId

CHOOSING_S = 4.0
"""A newcomer asks for its first chunk within so long: it compares what several donors promise."""
CHUNK_SLOWEST_BYTES_PER_S = 250e3
CHUNK_LATE_S = 4.0
"""A chunk keeps its state in use for the time that it takes at this rate, and so much longer."""
MAX_WAITING = 64
"""Peers that wait for one export; that load one; that were turned away."""
ASKS_AGAIN_S = AGAIN_MOST_S + 1.0
"""Who was turned away and has not asked for longer than this is passed over."""
PLACE_KEPT_S = 15.0
"""After this its place is gone: a download that failed begins anew after 5 s."""
WASTED_S = 60.0
MAX_CHOOSING = 256


@dataclass
class _Loader:
    asked_at: float = -math.inf
    in_use_until: float = -math.inf
    chunks: int = 0
    """Those that it was sent, a bit each: one that is asked for twice is no progress."""


@dataclass
class Loaders:
    """Who loads one state, and until when it is in use by each. ``asked_last_at``: by anybody, for
    anything."""

    asked_last_at: float
    _peers: dict[PeerId, _Loader] = field(default_factory=dict)

    def asked(self, peer: PeerId, now: float) -> None:
        """``peer`` asks for its manifest or for a chunk."""
        self.asked_last_at = self._known(peer).asked_at = now

    def asked_at(self, peer: PeerId) -> float:
        """When ``peer`` asked last; minus infinity if it did not."""
        return self._peers[peer].asked_at if peer in self._peers else -math.inf

    def keep_for(self, peer: PeerId, until: float) -> None:
        """``peer`` was sent the manifest, and may choose until then."""
        loader = self._known(peer)
        loader.in_use_until = max(loader.in_use_until, until)

    def gave(self, peer: PeerId, chunk: int, chunk_bytes: float, now: float) -> bool:
        """``peer`` is sent a chunk; whether it is a new one."""
        loader = self._known(peer)
        if loader.chunks >> chunk & 1:
            return False
        loader.chunks |= 1 << chunk
        takes_s = chunk_bytes / CHUNK_SLOWEST_BYTES_PER_S
        most = now + WINDOW_BYTES / CHUNK_SLOWEST_BYTES_PER_S
        loader.in_use_until = min(most, max(now, loader.in_use_until - CHUNK_LATE_S) + takes_s) + CHUNK_LATE_S
        return True

    def has_taken(self, peer: PeerId) -> bool:
        """Whether ``peer`` was sent any chunk."""
        return peer in self._peers and self._peers[peer].chunks > 0

    @property
    def take_any(self) -> bool:
        """Whether anybody was sent a chunk."""
        return any(one.chunks for one in self._peers.values())

    def takes_nothing(self, peer: PeerId) -> None:
        """What ``peer`` was sent lies before its line: it is not in use."""
        if peer in self._peers:
            self._peers[peer].in_use_until = -math.inf

    def is_in_use(self, now: float, but_for: PeerId | None = None) -> bool:
        return any(now < one.in_use_until for peer, one in self._peers.items() if peer != but_for)

    def _known(self, peer: PeerId) -> _Loader:
        if peer not in self._peers and len(self._peers) >= MAX_WAITING:
            del self._peers[min(self._peers, key=lambda known: self._peers[known].in_use_until)]
        return self._peers.setdefault(peer, _Loader())


@dataclass
class _Choosing:
    """What a peer was promised and has taken nothing of since."""

    since: float
    fragments: set[int]


@dataclass
class _Turned:
    fragment: int
    since: float
    asked_at: float


class Turns:
    def __init__(self) -> None:
        self._choosing: OrderedDict[PeerId, _Choosing] = OrderedDict()
        self._turned: dict[PeerId, _Turned] = {}
        """Who was turned away, in the order in which they came."""

    def __len__(self) -> int:
        return len(self._turned)

    def turned_away(self, peer: PeerId, fragment: int, now: float) -> None:
        """``peer`` asked for a state and there is no room."""
        self._turned = {one: its for one, its in self._turned.items() if now - its.asked_at < PLACE_KEPT_S}
        known = self._turned.get(peer)
        if known is None and len(self._turned) >= MAX_WAITING:
            wasted = [one for one in self._turned if self._has_wasted(one, now)]
            if not wasted or self._has_wasted(peer, now):
                return
            del self._turned[wasted[-1]]
        self._turned[peer] = _Turned(fragment, now if known is None else known.since, now)

    def may_have_room(self, peer: PeerId, fragment: int, now: float) -> bool:
        """Whether nobody else is to have it first, or the first wants the same."""
        if peer in self._turned:
            self._turned[peer].asked_at = now
        first = self._first(now)
        if first is None or peer == first or self._turned[first].fragment == fragment:
            return True
        return peer not in self._turned and not self._has_wasted(peer, now) and self._has_wasted(first, now)

    def promised(self, peer: PeerId, fragment: int, now: float, is_its_turn: bool) -> float:
        """``peer`` is sent a manifest: until when the state is kept for it to choose. ``is_its_turn``: it was
        made for this peer."""
        if peer in self._turned and (is_its_turn or self._turned[peer].fragment == fragment):
            del self._turned[peer]
        first = self._first(now)
        if not is_its_turn and first is not None and self._turned[first].fragment != fragment:
            return -math.inf
        choosing = self._choosing.get(peer)
        if choosing is None or now - choosing.since >= WASTED_S:
            choosing = self._choosing[peer] = _Choosing(now, set())
            self._choosing.move_to_end(peer)
            if len(self._choosing) > MAX_CHOOSING:
                self._choosing.popitem(last=False)
        choosing.fragments.add(fragment)
        return choosing.since + CHOOSING_S

    def took(self, peer: PeerId, fragment: int) -> None:
        """``peer`` loads what it was promised."""
        choosing = self._choosing.get(peer)
        if choosing is not None and fragment in choosing.fragments:
            del self._choosing[peer]

    def _first(self, now: float) -> PeerId | None:
        asking = [peer for peer, its in self._turned.items() if now - its.asked_at < ASKS_AGAIN_S]
        return min(
            asking, key=lambda peer: (self._has_wasted(peer, now), self._turned[peer].since), default=None
        )

    def _has_wasted(self, peer: PeerId, now: float) -> bool:
        choosing = self._choosing.get(peer)
        return choosing is not None and CHOOSING_S <= now - choosing.since < WASTED_S
