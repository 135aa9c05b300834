"""A council before CELL_BEGIN: which cells are ready for one round, and whether it may begin.

Laws: a round needs more than half of the cells that made the round before (of all, for the first one), or
half of them with the lowest, as this peer or a cell that is ready knows them, or as this peer was told
(``makers``) while so many of them are seen; a cell that is done counts and does not come, so at the end of a
run few make no version that all others would have to load.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from p2p_co2.protocol.rounds.cells import are_enough
from p2p_co2.protocol.rounds.speakers import Speakers
from p2p_co2.protocol.rounds.swarm import Swarm
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.messages_pb2 import CellReady


@dataclass
class Forming:
    """The CELL_READYs of one round. ``before``: the cells that made the round before, as far as this peer
    knows; ``heard``: as it was told by now; ``awake``: those that were seen to train of late."""

    fragment: int
    swarm: Swarm
    before: frozenset[int]
    heard: Callable[[], frozenset[int]]
    awake: frozenset[int]
    close_at: float
    give_up_at: float
    speakers: Speakers = field(init=False)

    def __post_init__(self) -> None:
        self.speakers = Speakers(self.swarm, f"{self.swarm.me}/{self.give_up_at!r}")

    @property
    def readies(self) -> dict[int, tuple[CellReady, PeerId]]:
        return self.speakers.readies

    def camp(self) -> tuple[bytes, list[int]]:
        """The state that most cells start from, and these. Of as many, those with more peers, as they say
        themselves. A cell for which only somebody speaks that failed lately is left out if it is not
        needed."""
        trusted = self._strongest(self.readies.keys() - self.speakers.failed)
        return trusted if self._suffices(trusted[1]) else self._strongest(self.readies.keys())

    def _strongest(self, cells: Collection[int]) -> tuple[bytes, list[int]]:
        camps: dict[bytes, list[int]] = {}
        for cell in sorted(cells):
            camps.setdefault(self.readies[cell][0].state_digest, []).append(cell)

        def strength(digest: bytes) -> tuple[int, int, bytes]:
            cells = camps[digest]
            return len(cells), sum(self.readies[cell][0].members for cell in cells), digest

        best = max(camps, key=strength, default=b"")
        return best, camps.get(best, [])

    def expected(self) -> frozenset[int]:
        """The cells of the round before: this peer's word of them, or all that any of the others names, or
        named to this peer, since with fewer a round would begin sooner."""
        here = self._strongest(self.readies.keys())[1]
        told = frozenset(cell for own in here for cell in self.readies[own][0].before)
        return self.before or told | self._heard() or frozenset(range(self.swarm.cells))

    def _heard(self) -> frozenset[int]:
        """What this peer was told, as long as so many of these cells are seen as a round needs: nobody else
        may ever begin if those who made a state are gone."""
        heard = self.heard()
        seen = {self.swarm.cell, *self.swarm.awake, *self.swarm.finished_in, *self.readies}
        return heard if are_enough(heard & seen, heard) else frozenset()

    def done(self) -> frozenset[int]:
        """Those of them that are done with the fragment, and will not come."""
        return self.expected() & self.swarm.finished(self.fragment) - self.readies.keys()

    def may_begin(self) -> bool:
        """Cells that are done count: few others would make a version that all these had to load."""
        return self._suffices(self.camp()[1])

    def _suffices(self, cells: Collection[int]) -> bool:
        expected = self.expected()
        came = expected & set(cells)
        return are_enough(came, expected) and not (2 * len(came) == len(expected) and self.done())

    def begins_at(self) -> float:
        """When to begin, if it may: once all cells are there, or at the deadline; with one for which somebody
        speaks that failed lately no sooner than another may have spoken for it."""
        waited = (self.expected() | self.awake) - self.done()
        from_ = self.speakers.counts_from
        since = max((from_.get(cell, math.inf) for cell in waited), default=0.0)
        risky = (from_[cell] for cell in self.camp()[1] if cell in self.speakers.failed)
        return max(min(self.close_at, since), max(risky, default=0.0))

    def due_at(self) -> float:
        if self.is_too_late():
            return 0.0
        return self.begins_at() if self.may_begin() else self.give_up_at

    def is_too_late(self) -> bool:
        """Whether too many cells are done for another round."""
        done, expected = self.done(), self.expected()
        return bool(done) and 2 * (len(expected) - len(done)) <= len(expected)
