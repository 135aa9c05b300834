"""Who speaks for a cell towards the council: several may say that they do, and one counts.

Ids are free, any id of a cell can send CELL_READY in its name, and the council's peer, which is of another
cell, cannot see who coordinates there. Laws: whose word for a cell came to nothing lately counts after all
others'; then who coordinated or summed in a commit that this peer was in, or is live in its own cell, counts
before a stranger; of those who has more members, of strangers one by lot, which differs from round to round.
A stranger is not begun with at once, and one that is contradicted by a peer that is known has cost seconds
(``council``). What is held of one cell is bounded.

Price: until a cell's coordinator has worked in a commit that this peer was in, as a rule the first that both
were in, a stranger may speak for it, and each such id costs a round or two.
"""

from __future__ import annotations

import hashlib

from p2p_co2.protocol.rounds.swarm import Swarm
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.messages_pb2 import CellReady

STALE_S = 12.0
"""Who did not repeat its CELL_READY for so long is forgotten as soon as another speaks: its coordinator is
gone, or has given up. Longer than it ever waits before it does (``delegate.AGAIN_CAP_S``)."""
STRANGER_S = 4.0
"""A stranger that speaks for a cell of which others are known is begun with only after this, and so is who
failed."""
SPEAKERS_KEPT = 4
"""Of one cell."""


class Speakers:
    """Of one round that gathers. ``readies``: by cell, the CELL_READY that counts and its sender;
    ``counts_from``: from when on that cell need not be waited for. ``lot``: what no other round has."""

    def __init__(self, swarm: Swarm, lot: str) -> None:
        self.readies: dict[int, tuple[CellReady, PeerId]] = {}
        self.counts_from: dict[int, float] = {}
        self.failed: set[int] = set()
        """Cells for which nobody speaks whose word came to something lately."""
        self._swarm, self._lot = swarm, lot
        self._heard: dict[int, dict[PeerId, tuple[CellReady, float, float]]] = {}
        """With when it was heard last and first."""

    def take(self, message: CellReady, sender: PeerId, now: float) -> None:
        heard = self._heard.setdefault(message.cell, {})
        for peer in [peer for peer, (_, at, _) in heard.items() if now - at > STALE_S]:
            del heard[peer]
        heard[sender] = message, now, heard[sender][2] if sender in heard else now

        def counts(peer: PeerId) -> tuple[bool, bool, int, bytes]:
            is_bad, is_known = self._swarm.repute.is_passed_over(peer, now), self._swarm.is_vouched(peer)
            drawn = hashlib.sha256(f"{self._lot}/{peer}".encode()).digest()
            return not is_bad, is_known, heard[peer][0].members if is_known else 0, drawn

        if len(heard) > SPEAKERS_KEPT:
            del heard[min(heard, key=counts)]
        best = max(heard, key=counts)
        self.readies[message.cell] = heard[best][0], best
        is_good, is_known, _, _ = counts(best)
        is_doubtful = not is_good or (not is_known and message.cell in self._swarm.known_cells)
        self.counts_from[message.cell] = heard[best][2] + STRANGER_S if is_doubtful else now
        (self.failed.discard if is_good else self.failed.add)(message.cell)

    def are_several(self, cell: int) -> bool:
        """Whether more than one speaks for ``cell``."""
        return len(self._heard.get(cell, ())) > 1

    def most(self) -> int:
        """Speakers of the cell that has most."""
        return max(map(len, self._heard.values()), default=0)
