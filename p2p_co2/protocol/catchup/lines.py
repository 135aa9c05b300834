"""What comes from each donor, in all loads together: how fast, what it owes, and when it is silent.

Laws: a donor owes at most ``window`` chunks; the window opens from one as its chunks prove right, so a donor
that lies from the start costs one chunk, as far as its rate carries in ``QUEUE_S``. Patience follows what the
donor usually takes; while nothing comes from anybody it may be our own line that stands still.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection
from dataclasses import dataclass, field

from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.limits import MAX_DATA_BYTES

QUEUE_S = 0.5
"""A donor is asked for so much in advance that it is never idle over a round trip of this length."""
WINDOW_BYTES = 6 * MAX_DATA_BYTES
"""Asked of one donor and not yet received, at most."""
PATIENCE_FLOOR_S, PATIENCE_CAP_S, PATIENCE_TIMES = 10.0, 60.0, 4.0
"""A chunk counts as lost when it takes so many times what all that its donor owes usually takes."""
SLOWEST_BYTES_PER_S = 10e3
"""Our line carries at least this, while nothing is known of it."""
REPEAT_FLOOR_S, REPEAT_TIMES, REPEAT_UNKNOWN_S = 0.5, 3.0, 3.0
"""An idle donor repeats a chunk that is owed for so many times what it needs itself, within these."""

Owed = tuple[int, int]
"""A chunk that a donor was asked for: the load's request, and its number."""


@dataclass(eq=False)
class Line:
    """One donor. ``owed``: what it was asked for, oldest first, and when; ``gaps_s``: between its last
    chunks."""

    heard_at: float
    owed: dict[Owed, float] = field(default_factory=dict)
    window: int = 1
    gaps_s: deque[float] = field(default_factory=lambda: deque(maxlen=8))

    @property
    def gap_s(self) -> float:
        """Its usual time between two chunks, 0 if not known."""
        return sorted(self.gaps_s)[len(self.gaps_s) // 2] if self.gaps_s else 0.0


class Lines:
    """Of all donors that are asked for chunks. ``chunk_bytes``: of a whole one; ``came_at``: when the last
    right one came from anybody."""

    def __init__(self, chunk_bytes: float) -> None:
        self._chunk_bytes = chunk_bytes
        self._lines: dict[PeerId, Line] = {}
        self.came_at = -math.inf

    def clear(self) -> None:
        """Nothing is loaded: what is known of donors grows old."""
        self._lines.clear()

    def ask(self, peer: PeerId, owed: Owed, now: float) -> None:
        line = self._lines.setdefault(peer, Line(now))
        line.heard_at = line.heard_at if line.owed else now
        line.owed[owed] = now

    def gave(self, peer: PeerId, owed: Owed, now: float) -> None:
        """A right chunk came: the window opens as far as the rate asks for."""
        line, self.came_at = self._lines.setdefault(peer, Line(now)), now
        if line.owed.pop(owed, None) is not None:
            line.gaps_s.append(now - line.heard_at)
            wanted = 1 + math.ceil(QUEUE_S / max(line.gap_s, 1e-3))
            most = max(2, int(WINDOW_BYTES / self._chunk_bytes))
            line.window = min(2 * line.window, most, max(2, wanted))
        line.heard_at = now

    def is_busy(self, peer: PeerId, now: float) -> None:
        """A round's bytes came from ``peer``: its chunks come after them."""
        if (line := self._lines.get(peer)) is not None:
            line.owed = dict.fromkeys(line.owed, now)

    def forget(self, request: int, peer: PeerId | None = None) -> list[int]:
        """Wait no more for what ``peer`` (None: anybody) owes to one load; those chunks that nobody else
        owes."""
        lines = self._lines.values() if peer is None else [self._lines[peer]] if peer in self._lines else []
        chunks = [chunk for line in lines for known, chunk in line.owed if known == request]
        for line in lines:
            line.owed = {owed: at for owed, at in line.owed.items() if owed[0] != request}
        still = {chunk for line in self._lines.values() for known, chunk in line.owed if known == request}
        return [chunk for chunk in chunks if chunk not in still]

    def drop(self, peer: PeerId) -> None:
        self._lines.pop(peer, None)

    def least_owing(self, peers: Collection[PeerId]) -> PeerId | None:
        """Who of these has room and owes least."""
        owing = [(len(line.owed), peer) for peer in peers if (line := self._of(peer)).window > len(line.owed)]
        return min(owing, key=lambda one: one[0])[1] if owing else None

    def is_idle(self, peer: PeerId) -> bool:
        return peer in self._lines and not self._lines[peer].owed

    def overdue(self, request: int, missing: Collection[int], idle: PeerId, now: float) -> int | None:
        """The chunk of a load that is owed longest, and too long beside what ``idle`` needs; no chunk more
        than twice."""
        since: dict[int, float] = {}
        askers: Counter[int] = Counter()
        for line in self._lines.values():
            for (known, chunk), at in line.owed.items():
                if known == request and chunk in missing:
                    askers[chunk], since[chunk] = askers[chunk] + 1, min(at, since.get(chunk, math.inf))
        gap_s = self._lines[idle].gap_s or self._usual_gap_s()
        limit_s = max(REPEAT_FLOOR_S, REPEAT_TIMES * gap_s) if gap_s else REPEAT_UNKNOWN_S
        single = [chunk for chunk, at in since.items() if askers[chunk] == 1 and now - at >= limit_s]
        return min(single, key=since.__getitem__, default=None)

    def silent_at(self) -> float:
        """When the first chunk counts as lost."""
        return min((self._lost_at(line) for line in self._lines.values() if line.owed), default=math.inf)

    def take_lost(self, now: float) -> list[tuple[PeerId, Owed, bool]]:
        """Chunks that will not come, whose they were, and whether that donor gave nothing since."""
        lost = []
        for peer, line in self._lines.items():
            if line.owed and now >= self._lost_at(line):
                owed, at = next(iter(line.owed.items()))
                del line.owed[owed]
                lost.append((peer, owed, line.heard_at <= at))
        return lost

    def _of(self, peer: PeerId) -> Line:
        return self._lines.get(peer) or Line(0.0)

    def _usual_gap_s(self) -> float:
        gaps = sorted(line.gap_s for line in self._lines.values() if line.gaps_s)
        return gaps[len(gaps) // 2] if gaps else 0.0

    def _lost_at(self, line: Line) -> float:
        since = next(iter(line.owed.values()))
        gap_s = max([self._usual_gap_s(), *line.gaps_s])
        if self.came_at < since:
            owed = sum(len(one.owed) for one in self._lines.values())
            gap_s = max(gap_s, owed * self._chunk_bytes / SLOWEST_BYTES_PER_S)
        limit_s = PATIENCE_TIMES * len(line.owed) * gap_s
        return since + min(PATIENCE_CAP_S, max(PATIENCE_FLOOR_S, limit_s))
