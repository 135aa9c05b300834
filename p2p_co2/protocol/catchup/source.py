"""One donor as seen by a download: what it promised, what was asked of it, and when patience with it ends.
And what all downloads share."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from p2p_co2.protocol.catchup.goals import Outbox, Vouch
from p2p_co2.protocol.catchup.line import FIRST_CHUNK_S, SLOWER_THAN_ITSELF, Line, Lines
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.messages_pb2 import Manifest

MANIFEST_FLOOR_S = 3.0
EXPORT_BYTES_PER_S = 100e6
"""How fast a donor surely serialises and digests a state, beside its training."""
AGAIN_FIRST_S, AGAIN_MOST_S = 0.25, 2.0
"""A donor that said "again" is asked after the first, then after twice as long each time, up to the most."""
REPEAT_S, REPEAT_TIMES = 0.5, 3.0
"""Near the end a free donor repeats a chunk that another will still need so long for, and so many times what
the free one needs."""
REPEATS_MOST = 2
"""The last donor left is asked anew so often, and any for one chunk that it does not give (counted anew where
it is asked anew, as the last or for another version)."""
MOVES_MOST = 4
"""A donor that says after each chunk that it has something else by now is asked for that so often: else a
download of which it promises ever more would begin anew for ever."""
DOUBLED_AT_MOST = 10
"""It may say so a thousand times at once, and no double is two to that power."""


@dataclass(frozen=True)
class Context:
    """What all downloads of a peer share."""

    run: bytes
    out: Outbox
    next_request: Callable[[], int]
    vouch: Vouch
    chunk_bytes: int
    lines: Lines
    pending: Callable[[], int]
    """Chunks that nobody was asked for yet, in all downloads."""
    scale: float
    """As ``Shape.scale``."""


@dataclass
class Source:
    """``asked``: chunks and when they were asked for, oldest first; ``answered``: those that came."""

    peer: PeerId
    request: int
    asked_at: float
    line: Line
    manifest: Manifest | None = None
    content: bytes = b""
    """What its manifest promises."""
    asked: dict[int, float] = field(default_factory=dict)
    _place: dict[int, int] = field(default_factory=dict)
    """Of each chunk among all that the donor owed when it was asked for."""
    answered: set[int] = field(default_factory=set)
    held: bool = False
    """Whether it was asked for the very version that an interrupted process of this peer had begun."""
    again_at: float | None = None
    """Set while the donor wants to be asked later."""
    agains: int = 0
    moved_on: bool = False
    """Whether it no longer has what was chosen, and is asked for whatever it has."""
    repeats: int = 0
    """How often it was asked anew after it had failed to answer."""
    moves: int = 0
    """How often it no longer had what it had promised, or what was chosen."""
    lost: Counter[int] = field(default_factory=Counter)
    """How often each chunk did not come though later ones did."""

    def ask(self, chunk: int, now: float, lines: Lines) -> None:
        lines.ask(self.line, (self.request, chunk), now)
        self.asked[chunk], self._place[chunk] = now, len(self.line.asked)

    def gave(self, chunk: int, now: float, lines: Lines) -> None:
        """A right chunk came."""
        lines.gave(self.line, (self.request, chunk), now, is_in_turn=not self.lost[chunk])
        self.asked.pop(chunk, None)
        self.answered.add(chunk)

    def give_up(self, chunks: Collection[int]) -> None:
        """Wait no more for these that were asked of it."""
        for chunk in list(chunks):
            self.line.forget((self.request, chunk))
            del self.asked[chunk]

    def note_lost(self, now: float) -> list[int]:
        """The chunks that it owes and that will not come: a message was lost, or it keeps them back."""
        lost = [chunk for chunk in self.asked if now >= self.line.lost_at((self.request, chunk))]
        self.lost.update(lost)
        return lost

    def keeps_back(self) -> list[int]:
        """Chunks that it was asked for too often."""
        return [chunk for chunk, times in self.lost.items() if times > REPEATS_MOST]

    def expected_s(self, chunk: int, now: float, default_gap_s: float) -> float:
        """As ``Line.expected_s``; one that is late though its donor gives others will take as long again."""
        due_at = self.asked[chunk] + self._place[chunk] * (self.line.gap_s or default_gap_s)
        return max(now - due_at, self.line.expected_s((self.request, chunk), now, default_gap_s))

    def waits_since(self) -> float:
        """When it gave anything last, to whichever download; where this one has asked, no later than when
        that should have been here."""
        if not self.asked:
            return self.line.gave_at
        dues = (at + self._place[chunk] * self.line.gap_s for chunk, at in self.asked.items())
        return min(self.line.gave_at, *dues)

    def ask_again_later(self, request: int, now: float) -> None:
        """It has nothing for us now, whatever it promised: it is asked for nothing until it promises anew.
        ``request``: a new one, by which what is still on its way is known for an answer to the old one."""
        self.manifest, self.request = None, request
        self.answered.clear()
        self.again_at = now + min(AGAIN_MOST_S, AGAIN_FIRST_S * 2 ** min(self.agains, DOUBLED_AT_MOST))
        self.agains += 1

    def stand_by(self, request: int) -> None:
        """It is asked for nothing more of what it promised, and may be once more. ``request``: as for
        ``ask_again_later``."""
        self.give_up(list(self.asked))
        self.request = request
        self.answered.clear()
        self.lost.clear()

    def patience_ends_at(self, total_bytes: float, lines: Lines, others_gap_s: float) -> float | None:
        """When this donor counts as silent or slow; None while nothing is asked of it. ``others_gap_s``: as
        in ``Line.patience_s``."""
        if self.again_at is not None:
            return None
        if self.manifest is None:
            return self.asked_at + MANIFEST_FLOOR_S + total_bytes / EXPORT_BYTES_PER_S
        lost_at = [self.line.lost_at((self.request, chunk)) for chunk in self.asked]
        return min(lines.silent_at(self.line, others_gap_s), *lost_at) if self.asked else None


def others_gap_s(source: Source, known: Iterable[Source], useful: Iterable[Source] | None) -> float:
    """The usual time between two chunks of the other donors, 0 if not known. Where it is chosen what is
    loaded (``useful``: from whom), those that promise something else are no measure unless they are slow:
    by them one sees what our own line carries."""
    beside_s = _usual_gap_s(known, source)
    if useful is None:
        return beside_s
    patient_s = beside_s if SLOWER_THAN_ITSELF * beside_s > FIRST_CHUNK_S else 0.0
    return _usual_gap_s(useful, source) or patient_s


def _usual_gap_s(sources: Iterable[Source], but: Source) -> float:
    gaps = sorted(gap_s for source in sources if source is not but and (gap_s := source.line.gap_s))
    return gaps[len(gaps) // 2] if gaps else 0.0


def overdue(sources: Sequence[Source], missing: Collection[int], free: Line, now: float) -> int | None:
    """A chunk that ``sources`` owe and will be long about, beside what ``free`` would need for it: the one
    that would come last, and no chunk more than twice."""
    askers = Counter(chunk for source in sources for chunk in source.asked if chunk in missing)
    waits = [
        (math.inf if source.line.slow_until > now else source.expected_s(chunk, now, free.gap_s), chunk)
        for source in sources
        for chunk in source.asked
        if askers[chunk] == 1
    ]
    longest_s, chunk = max(waits, default=(0.0, 0))
    return chunk if longest_s >= max(REPEAT_S, REPEAT_TIMES * free.gap_s) else None
