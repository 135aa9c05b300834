"""A cell's coordinator towards the council: it says that its cell is ready, and later how the cell voted.

The council of a round is the coordinator of the cell that comes first by rendezvous hash. Whom to ask there
is known from the last decision, or looked up (``CellWanted``); any peer of that cell says who coordinates.

Laws: one peer is asked at a time and every wait has a timer; a cell takes part in one council only, the first
that begins; how it voted is repeated until the decision comes or the time is up, and then nothing changes.
"""

from __future__ import annotations

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.rounds import bounds
from p2p_co2.rounds.attempt import check_behind
from p2p_co2.rounds.cells import council_order
from p2p_co2.rounds.events import CellWanted
from p2p_co2.rounds.swarm import Outlet, Swarm, coordination_order
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.messages_pb2 import CellReady, CellResult, CellWaiting, Council

TRIES = 2
"""CELL_READYs to one peer before another is asked."""
ANSWER_S = 1.5
PEERS_ASKED = 4
"""Of one cell, before the next cell is asked."""
LOOK_UP_S = 4.0
COUNCIL_CAP_S = 90.0
"""From the end of the cell's gathering to CELL_BEGIN."""
REPEAT_S = 2.0


class Delegate:
    """One round of one cell, from CELL_READY to CELL_BEGIN. ``failure``: why the cell gives up;
    ``elsewhere``: where the other cells are, if they are past the round or have another state."""

    def __init__(self, ready: CellReady, swarm: Swarm, outlet: Outlet, now: float) -> None:
        self.ready = ready
        self.failure = ""
        self.elsewhere: CellWaiting | None = None
        self._swarm, self._outlet = swarm, outlet
        self._order = council_order(range(swarm.cells), ready.key.fragment, ready.key.round)
        self._give_up_at = now + COUNCIL_CAP_S
        self._tried: list[PeerId] = []
        self._tries = 0
        self._looked_up = False
        self._timer_at = now
        self._next(now)

    def get_timer(self) -> float:
        return min(self._timer_at, self._give_up_at)

    def handle_timer(self, now: float) -> None:
        if now >= self._give_up_at:
            self.failure = f"the other cells did not begin within {COUNCIL_CAP_S:.0f} s"
        elif now >= self._timer_at:
            if 0 < self._tries < TRIES:
                self._send(now)
            else:
                self._next(now)

    def cells_changed(self, now: float) -> None:
        """Peers of some cell were found."""
        if self._tries == 0 and self._looked_up:
            self._next(now)

    def waiting(self, message: CellWaiting, sender: PeerId, now: float) -> None:
        """The answer of the peer that was asked last. Raises ``RemoteProtocolError``."""
        if not self._tried or sender != self._tried[-1]:
            return
        if not 0 <= message.begins_within_s <= bounds.ROUND_CAP_S:
            raise RemoteProtocolError("impossible duration", f"{message.begins_within_s} s")
        if message.version:
            check_behind(message)
            self.elsewhere = message
        elif message.refusal:
            self.failure = message.refusal[: bounds.MAX_REASON]
        elif message.ask:
            asked = PeerId(message.ask)
            if self._swarm.cell_of(asked) != self._order[0]:
                raise RemoteProtocolError("wrong cell", "told to ask another cell's peer")
            if asked not in self._tried:
                self._ask(asked, now)
        else:
            self._tries = TRIES
            self._timer_at = now + message.begins_within_s + bounds.GRACE_S

    def _next(self, now: float) -> None:
        """Ask the next peer of the council's cell, or go to the next cell."""
        while self._order:
            cell = self._order[0]
            known = [self._swarm.me] if cell == self._swarm.cell else self._swarm.others.get(cell, [])
            order = coordination_order(known, self.ready.key.fragment, self.ready.key.round)
            left = [peer for peer in order if peer not in self._tried]
            asked = sum(self._swarm.cell_of(peer) == cell for peer in self._tried)
            if left and asked < PEERS_ASKED:
                self._ask(left[0], now)
                return
            if not self._looked_up and cell != self._swarm.cell:
                self._looked_up = True
                self._tries = 0
                self._timer_at = now + LOOK_UP_S
                self._outlet.emit(CellWanted(cell))
                return
            self._order.pop(0)
            self._looked_up = False
        self.failure = "no other cell's coordinator answered"

    def _ask(self, peer: PeerId, now: float) -> None:
        self._tried.append(peer)
        self._tries = 0
        self._send(now)

    def _send(self, now: float) -> None:
        self._tries += 1
        self._timer_at = now + ANSWER_S * self._tries
        self._outlet.send(self._tried[-1], self.ready)


class Voice:
    """How a cell voted, on its way to the council. ``failure``: nobody answered in time."""

    def __init__(
        self, council: Council, result: CellResult, outlet: Outlet, now: float, until: float
    ) -> None:
        self.council, self.result = council, result
        self.failure = ""
        self._outlet, self._give_up_at = outlet, until
        self._send(now)

    def get_timer(self) -> float:
        return min(self._again_at, self._give_up_at)

    def handle_timer(self, now: float) -> None:
        if now >= self._give_up_at:
            self.failure = "the cells' council did not decide in time"
        elif now >= self._again_at:
            self._send(now)

    def _send(self, now: float) -> None:
        self._again_at = now + REPEAT_S
        self._outlet.send(PeerId(self.council.coordinator), self.result)
