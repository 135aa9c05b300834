"""What comes from each donor, in all downloads together: how fast, what it owes, and when it is silent.

A donor is judged by what arrives from it while anything is asked of it, not by the age of one request: of a
donor of 125 kB/s six downloads wait for a chunk each, and the last of these comes after 25 s.

Pure arithmetic on times that are handed in. Laws: a donor has at most ``window`` chunks to answer, and the
window opens from one chunk as its chunks prove right: a donor that lies from the start costs one chunk; it
opens as far as the donor's rate carries in ``QUEUE_S`` and one more, but not beyond ``WINDOW_BYTES``. A donor
answers in the order in which it is asked, but what takes the slower of two connections comes late: what has
not come long after what was asked for later counts as lost, and as given if it comes after all. While nothing
comes from anybody it is our own line that stands still, and nobody is silent, for ``STALL_CAP_S`` at most.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import takewhile

from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.limits import MAX_DATA_BYTES

WINDOW_BYTES = 6 * MAX_DATA_BYTES
"""Of chunks asked of one donor and not yet received; its queue for us holds a few more. Not a number of them:
over far ways six of the smallest would bring 2 MB/s at most."""
QUEUE_S = 0.5
"""A donor is asked for so much in advance that it is never idle over a round trip of this length."""
FIRST_CHUNK_S = 10.0
"""For the first chunk of a donor when nobody's speed is known."""
SLOW_FLOOR_S, SLOW_CAP_S = 2.0, 60.0
SLOWER_THAN_ITSELF, SLOWER_THAN_OTHERS = 4.0, 32.0
"""A donor that pauses for longer than this many of its own slowest answers, or of the others' usual ones, is
slow; of which nothing is known yet, for as many of the others' usual ones as of its own."""
STALLED_OF = 0.5
"""Where nothing came from anybody for this part of that, our own line stood still."""
STALL_CAP_S = 20.0
OUTRUN_S = 60.0
"""A donor that was slow while others gave is asked for no chunk that others can give for so long; what is
known of a line that nobody used for so long is forgotten."""
MAX_LINES = 256
GAPS_KEPT = 8
NEARLY = 1e-6
Asked = tuple[int, int]
"""The request, and the chunk."""


@dataclass(eq=False)
class Line:
    """``asked``: chunks of all downloads and when they were asked for, oldest first."""

    heard_at: float
    """When its last chunk came, or the first was asked for after it had given all."""
    asked: dict[Asked, float] = field(default_factory=dict)
    window_most: int = WINDOW_BYTES // MAX_DATA_BYTES
    window: int = 1
    slow_until: float = -math.inf
    busy_at: float = -math.inf
    """When something else that is large came from it last: what a round needs goes before chunks."""
    gave_at: float = -math.inf
    """When its last chunk came."""
    _silent_s: float = 0.0
    """How long it was waited for when it was given up last, if nothing came since."""
    _gaps_s: deque[float] = field(default_factory=lambda: deque(maxlen=GAPS_KEPT))
    _lost_at: dict[Asked, float] = field(default_factory=dict)
    """Of what was asked for before something that has come, as far as one can tell."""

    @property
    def gap_s(self) -> float:
        """Its usual time between two chunks, 0 if not known."""
        return sorted(self._gaps_s)[len(self._gaps_s) // 2] if self._gaps_s else 0.0

    @property
    def has_room(self) -> bool:
        return len(self.asked) < self.window

    def begin_anew(self, now: float) -> None:
        """Nobody has used it for long, and what is known of it is forgotten; a download that goes on may hold
        it all the same, and what that asks for counts."""
        self.heard_at, self.window, self.slow_until, self._silent_s = now, 1, -math.inf, 0.0
        self._gaps_s.clear()

    def ask(self, asked: Asked, now: float) -> None:
        if not self.asked:
            self.heard_at = now
            if self._silent_s:
                self._gaps_s.append(self._silent_s)
                self._silent_s = 0.0
        self.asked[asked] = now

    def was_silent(self, now: float) -> None:
        """It is given up. Where it is asked again it may need more than that: newcomers have come, and each
        has its part of the donor's line."""
        self._silent_s = now - self.heard_at

    def gave(self, asked: Asked, now: float, is_in_turn: bool = True) -> None:
        """A right chunk came: the window opens. ``is_in_turn``: it is known which asking it answers; not of
        one that counted as lost before."""
        is_owed = asked in self.asked  # else it was given up, and came when it was waited for no more
        if is_owed:
            self._gaps_s.append(now - self.heard_at)
        self.heard_at, self.gave_at, self._silent_s = now, now, 0.0
        if is_in_turn and is_owed:
            for earlier in takewhile(asked.__ne__, self.asked):
                self._lost_at.setdefault(earlier, now + self.patience_s(0.0))
        self.forget(asked)
        wanted = 1 + math.ceil(QUEUE_S / max(self.gap_s, 1e-3))
        self.window = min(2 * self.window, max(2, min(self.window_most, wanted)))

    def forget(self, asked: Asked) -> None:
        """It came, or is waited for no more."""
        self.asked.pop(asked, None)
        self._lost_at.pop(asked, None)

    def lost_at(self, asked: Asked) -> float:
        """When what it owes is given up, since it goes on giving what was asked for later."""
        return self._lost_at.get(asked, math.inf)

    def expected_s(self, asked: Asked, now: float, default_gap_s: float) -> float:
        """How long an asked chunk will still take, as far as one can tell: one gap for each chunk before it,
        and for a donor that is late as long again as it has kept us waiting."""
        gap_s = self.gap_s or default_gap_s
        waited_s = now - self.heard_at
        return list(self.asked).index(asked) * gap_s + max(gap_s - waited_s, waited_s - gap_s, 0.0)

    def free_in_s(self, now: float) -> float:
        """In how long it should have given all that it owes, as far as one can tell."""
        waited_s = now - self.heard_at if self.asked else 0.0
        gap_s = max(self.gap_s, waited_s)
        return len(self.asked) * gap_s - min(waited_s, gap_s if self.asked else 0.0)

    def next_in_s(self, now: float) -> float:
        """In how long a chunk that it is asked for now should be there; at once where nothing is known of
        it."""
        return self.free_in_s(now) + self.gap_s

    def patience_s(self, others_gap_s: float) -> float:
        """For how long it may give nothing before it counts as silent or slow. ``others_gap_s``: the usual
        time between two chunks of the other donors, 0 if not known."""
        first_s = max(FIRST_CHUNK_S, SLOWER_THAN_ITSELF * others_gap_s)
        limit_s = SLOWER_THAN_ITSELF * max(self._gaps_s) if self._gaps_s else first_s
        if others_gap_s:
            limit_s = min(limit_s, SLOWER_THAN_OTHERS * others_gap_s)
        return min(SLOW_CAP_S, max(SLOW_FLOOR_S, limit_s))


def all_there_in_s(lines: Collection[Line], chunks: int, now: float, default_gap_s: float = 0.0) -> float:
    """In how long ``chunks`` more should be there at the soonest, each given by whoever has it there first: a
    donor that is later than this with its next one holds the others up. Who has given nothing yet counts as
    with ``default_gap_s``, or not. Reckoned from now and counted in chunks, so that it ends: at unix time a
    double carries no more than 0.2 us."""
    gaps = [(line, line.gap_s or default_gap_s) for line in lines]
    free = sorted((line.free_in_s(now), gap_s) for line, gap_s in gaps if gap_s)
    if not free:
        return math.inf  # nothing is known yet
    end_s, rate, given = math.inf, 0.0, 0.0
    for free_s, gap_s in free:  # as if chunks could be cut
        if free_s < end_s:
            rate, given = rate + 1 / gap_s, given + free_s / gap_s
            end_s = (chunks + given) / rate
    counts = [max(0, math.floor((end_s - free_s) / gap_s + NEARLY)) for free_s, gap_s in free]
    nexts = [(free_s + (n + 1) * gap_s, gap_s) for n, (free_s, gap_s) in zip(counts, free, strict=True)]
    heapq.heapify(nexts)
    for _ in range(chunks - sum(counts)):
        next_s, gap_s = heapq.heapreplace(nexts, (nexts[0][0] + nexts[0][1], nexts[0][1]))
        end_s = max(end_s, next_s)
    return end_s + NEARLY


class Lines:
    """Of all donors of late. ``chunk_bytes``: of a whole one; ``came_at``: when the last right one came from
    anybody, or the first was asked for after all had come."""

    def __init__(self, chunk_bytes: float = MAX_DATA_BYTES) -> None:
        self._lines: OrderedDict[PeerId, Line] = OrderedDict()
        self.window_most = int(WINDOW_BYTES / chunk_bytes)
        self.came_at = -math.inf
        self._pause_s, self._pause_ended_at = 0.0, -math.inf
        """The last time in which something was asked and nothing came for longer than ``SLOW_FLOOR_S``'s
        part."""

    def __len__(self) -> int:
        return len(self._lines)

    def chunks_in(self, seconds: float) -> float:
        """How many those give in so long that give any now."""
        return sum(seconds / line.gap_s for line in self._lines.values() if line.asked and line.gap_s)

    def of(self, peer: PeerId, now: float) -> Line:
        line = self._lines.setdefault(peer, Line(now, window_most=self.window_most))
        if not line.asked and max(line.heard_at, line.slow_until) < now - OUTRUN_S:
            line.begin_anew(now)
        self._lines.move_to_end(peer)
        if len(self._lines) > MAX_LINES:
            unused = (known for known, its in self._lines.items() if not its.asked and its is not line)
            del self._lines[next(unused, next(iter(self._lines)))]
        return line

    def ask(self, line: Line, asked: Asked, now: float) -> None:
        if not any(one.asked for one in self._lines.values()):
            self.came_at = now
        line.ask(asked, now)

    def gave(self, line: Line, asked: Asked, now: float, is_in_turn: bool = True) -> None:
        """As ``Line.gave``."""
        if asked in line.asked and now - self.came_at > STALLED_OF * SLOW_FLOOR_S:
            self._pause_s, self._pause_ended_at = now - self.came_at, now
        self.came_at = now
        line.gave(asked, now, is_in_turn)

    def is_busy(self, peer: PeerId, now: float) -> None:
        """Something large came from ``peer`` that is no chunk."""
        if peer in self._lines:
            self._lines[peer].busy_at = now

    def outran(self, line: Line, now: float) -> None:
        """It was slow while others gave: each download would lose a chunk's time by it, and the donor the
        time of its line that its rounds need."""
        if self.came_at > (line.heard_at + now) / 2:  # else it is our own line
            line.slow_until = now + OUTRUN_S

    def silent_at(self, line: Line, others_gap_s: float) -> float:
        """When a donor that owes chunks counts as silent or slow."""
        limit_s = line.patience_s(others_gap_s)
        since = line.heard_at
        if self._pause_ended_at > since and self._pause_s > STALLED_OF * limit_s:
            since = self._pause_ended_at
        ends_at = max(since, line.busy_at) + limit_s
        others_owe = any(one.asked for one in self._lines.values() if one is not line)
        if (
            others_owe and ends_at - max(self.came_at, line.heard_at) > STALLED_OF * limit_s
        ):  # so far none gives
            ends_at = max(ends_at, self.came_at + STALL_CAP_S)
        return min(ends_at, line.heard_at + limit_s + STALL_CAP_S)
