"""One donor as seen by a download: what was asked of it, how fast it answers, and when patience with it ends.

Pure arithmetic on times that are handed in. Law: a donor has at most ``window`` chunks to answer, and the
window opens from one chunk as its chunks prove right: a donor that lies from the start costs one chunk.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.messages_pb2 import Manifest

WINDOW_MOST = 6
"""Chunks asked of one donor and not yet received, all downloads together; its queue for us holds a few
more."""
QUEUE_S = 0.5
"""A donor is asked for so much in advance that it is never idle over a round trip of this length."""
MANIFEST_FLOOR_S = 3.0
EXPORT_BYTES_PER_S = 100e6
"""How fast a donor surely serialises and digests a state, beside its training."""
FIRST_CHUNK_S = 10.0
"""For the first chunk of a donor when nobody's speed is known."""
SLOW_FLOOR_S, SLOW_CAP_S = 2.0, 20.0
SLOWER_THAN_ITSELF, SLOWER_THAN_OTHERS = 4.0, 8.0
"""A donor that pauses for longer than this many of its own slowest answers, or of the others' usual ones, is
slow."""
OUTRUN_S = 60.0
"""A donor that was slow while others gave is asked for no chunk that others can give for so long."""
MAX_OUTRUN = 256
GAPS_KEPT = 8
AGAIN_FIRST_S, AGAIN_MOST_S = 0.25, 2.0
"""A donor that said "again" is asked after the first, then after twice as long each time, up to the most."""


class Outrun:
    """The donors that were slow while others gave, in any download: each would cost the next one a chunk, and
    the donor the time of its line that its rounds need."""

    def __init__(self) -> None:
        self._until: dict[PeerId, float] = {}

    def note(self, peer: PeerId, now: float) -> None:
        self._until = {slow: until for slow, until in self._until.items() if until > now}
        if len(self._until) < MAX_OUTRUN:
            self._until[peer] = now + OUTRUN_S

    def is_slow(self, peer: PeerId, now: float) -> bool:
        return self._until.get(peer, now) > now

    def __len__(self) -> int:
        return len(self._until)


@dataclass
class Source:
    """``asked``: chunks and when they were asked for, oldest first; ``answered``: those that came."""

    peer: PeerId
    request: int
    asked_at: float
    heard_at: float = 0.0
    manifest: Manifest | None = None
    content: bytes = b""
    """What its manifest promises."""
    asked: dict[int, float] = field(default_factory=dict)
    answered: set[int] = field(default_factory=set)
    window: int = 1
    held: bool = False
    """Whether it was asked for the very version that an interrupted process of this peer had begun."""
    again_at: float | None = None
    """Set while the donor wants to be asked later."""
    agains: int = 0
    repeats: int = 0
    """How often it was asked anew after it had failed to answer."""
    _gaps_s: deque[float] = field(default_factory=lambda: deque(maxlen=GAPS_KEPT))

    @property
    def gap_s(self) -> float:
        """Its usual time between two chunks, 0 if not known."""
        return sorted(self._gaps_s)[len(self._gaps_s) // 2] if self._gaps_s else 0.0

    def ask(self, chunk: int, now: float) -> None:
        if not self.asked:
            self.heard_at = now
        self.asked[chunk] = now

    def gave(self, chunk: int, now: float) -> None:
        """A right chunk came: the window opens."""
        self._gaps_s.append(now - self.heard_at)
        self.heard_at = now
        self.asked.pop(chunk, None)
        self.answered.add(chunk)
        wanted = 1 + math.ceil(QUEUE_S / max(self.gap_s, 1e-3))
        self.window = min(2 * self.window, max(2, min(WINDOW_MOST, wanted)))

    def expected_s(self, chunk: int, now: float, default_gap_s: float) -> float:
        """How long an asked chunk will still take, as far as one can tell: one gap for each chunk before it,
        and for a donor that is late as long again as it has kept us waiting."""
        gap_s = self.gap_s or default_gap_s
        waited_s = now - self.heard_at
        return list(self.asked).index(chunk) * gap_s + max(gap_s - waited_s, waited_s - gap_s, 0.0)

    def ask_again_later(self, now: float) -> None:
        self.again_at = now + min(AGAIN_MOST_S, AGAIN_FIRST_S * 2**self.agains)
        self.agains += 1

    def patience_ends_at(self, total_bytes: int, others_gap_s: float) -> float | None:
        """When this donor counts as silent or slow; None while nothing is asked of it. ``others_gap_s``: the
        usual time between two chunks of the other donors, 0 if not known."""
        if self.again_at is not None:
            return None
        if self.manifest is None:
            return self.asked_at + MANIFEST_FLOOR_S + total_bytes / EXPORT_BYTES_PER_S
        if not self.asked:
            return None
        limit_s = SLOWER_THAN_ITSELF * max(self._gaps_s) if self._gaps_s else FIRST_CHUNK_S
        if others_gap_s:
            limit_s = min(limit_s, SLOWER_THAN_OTHERS * others_gap_s)
        return self.heard_at + min(SLOW_CAP_S, max(SLOW_FLOOR_S, limit_s))
