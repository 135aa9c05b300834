"""What donors owe: the chunks that they were asked for and have not given, in all loads together.

Laws: a donor owes at most ``OUTSTANDING`` chunks: one is on its way while the next is asked for, and a liar
costs two. Donors answer in order: what was asked for before a chunk that came is lost. Price: a donor gives
two chunks in a round trip at most, so a small state over a far way takes seconds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from p2p_co2.protocol.wire.identity import PeerId

OUTSTANDING = 2
SILENT_TIMES, SILENT_FLOOR_S, SILENT_CAP_S = 8.0, 10.0, 60.0
"""A donor that gives nothing for so many times what a chunk usually takes is silent, within these."""
REPEAT_TIMES, REPEAT_FLOOR_S, REPEAT_UNKNOWN_S = 3.0, 0.5, 3.0
"""An idle donor repeats a chunk that another owes for so many times what it needs itself, at least the
second; the third where that is not known."""

Owed = tuple[int, int]
"""A chunk that a donor was asked for: the load's request, and its number."""


@dataclass(eq=False)
class Line:
    """One donor. ``owed``: what it was asked for, oldest first, and when; ``took_s``: its last chunk, after
    the one before it; 0 if not known."""

    heard_at: float
    owed: dict[Owed, float] = field(default_factory=dict)
    took_s: float = 0.0

    @property
    def silent_at(self) -> float:
        if not self.owed:
            return math.inf
        limit_s = max(SILENT_FLOOR_S, SILENT_TIMES * self.took_s) if self.took_s else SILENT_CAP_S
        return self.heard_at + min(SILENT_CAP_S, limit_s)


class OwedChunks:
    """Of all donors that are asked for chunks. ``came_at``: when the last right one came from anybody."""

    def __init__(self) -> None:
        self._lines: dict[PeerId, Line] = {}
        self.came_at = -math.inf

    def clear(self) -> None:
        """Nothing is loaded: what is known of donors grows old."""
        self._lines.clear()

    def ask(self, peer: PeerId, owed: Owed, now: float) -> None:
        line = self._lines.setdefault(peer, Line(now))
        line.heard_at = line.heard_at if line.owed else now
        line.owed[owed] = now

    def gave(self, peer: PeerId, owed: Owed, now: float) -> list[Owed]:
        """A right chunk came: those that were asked for before it, and are lost."""
        line, self.came_at = self._lines.setdefault(peer, Line(now)), now
        lost = list[Owed]()
        if owed in line.owed:
            order = list(line.owed)
            lost = order[: order.index(owed)]
            line.took_s = now - line.heard_at
            line.owed = {one: line.owed[one] for one in order[len(lost) + 1 :]}
        line.heard_at = now
        return lost

    def is_busy(self, peer: PeerId, now: float) -> None:
        """A round's bytes came from ``peer``: its chunks come after them."""
        if (line := self._lines.get(peer)) is not None:
            line.heard_at = now
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
        owing = {peer: len(self._lines[peer].owed) if peer in self._lines else 0 for peer in peers}
        peer = min(owing, key=owing.__getitem__, default=None)
        return peer if peer is not None and owing[peer] < OUTSTANDING else None

    def is_idle(self, peer: PeerId) -> bool:
        return peer in self._lines and not self._lines[peer].owed

    def overdue(self, request: int, missing: Collection[int], idle: PeerId, now: float) -> int | None:
        """The chunk of a load that is owed longest, and too long beside what ``idle`` needs; no chunk more
        than twice."""
        took_s = self._lines[idle].took_s
        limit_s = max(REPEAT_FLOOR_S, REPEAT_TIMES * took_s) if took_s else REPEAT_UNKNOWN_S
        since: dict[int, float] = {}
        askers: Counter[int] = Counter()
        for line in self._lines.values():
            for (known, chunk), at in line.owed.items():
                if known == request and chunk in missing:
                    askers[chunk], since[chunk] = askers[chunk] + 1, min(at, since.get(chunk, math.inf))
        single = [chunk for chunk, at in since.items() if askers[chunk] == 1 and now - at >= limit_s]
        return min(single, key=since.__getitem__, default=None)

    def silent_at(self) -> float:
        """When the first donor counts as silent."""
        return min((line.silent_at for line in self._lines.values()), default=math.inf)

    def silent(self, now: float) -> list[PeerId]:
        """Donors that owe and give nothing."""
        return [peer for peer, line in self._lines.items() if now >= line.silent_at]
