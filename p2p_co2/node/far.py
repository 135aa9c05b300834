"""Peers of other cells, as a node deals with them: whom to ask for, and what our own cell's looks bring in.

Law: a peer of another cell is met over a slot, a question or a state, and is never a member of ours: its link
may come and go without anybody being counted as lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from p2p_co2.errors import TransportError
from p2p_co2.protocol.membership import positions as member_positions
from p2p_co2.protocol.outlook import Outlook
from p2p_co2.protocol.schedule import ALONE_S
from p2p_co2.protocol.wire.identity import PeerId, cell_of
from p2p_co2.protocol.wire.messages_pb2 import CellSight, PeerRecord, Status
from p2p_co2.protocol.wire.status import finished_bits
from p2p_co2.telemetry import events as ev

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from p2p_co2.node.node import Node

CONCLUDED_EVERY_S, CONCLUDED_QUICKLY_EVERY_S = 4.0, 1.0
"""How often our cell's sights are put together, as ``LOOK_EVERY_S`` and ``LOOK_QUICKLY_EVERY_S``."""
WATCH_CONTEXT = b"p2p-co2 watch order"
LINGER_S = 6.0
"""A peer that is done, and sees that all are, stays for so long: the other cells look at ours every few
seconds, and have to see it too."""


class Far:
    """``find_peers(cell)`` asks the DHT, as ``Environment.network`` has it."""

    def __init__(
        self, node: Node, cells: int, find_peers: Callable[[int | None], Awaitable[list[PeerRecord]]]
    ) -> None:
        self.cells, self.cell = cells, cell_of(node.me, cells)
        secret = node.identity.sign(WATCH_CONTEXT, b"").hex() if cells > 1 else ""  # it goes to nobody
        self.outlook = Outlook(node.me, cells, node.membership.quiet_s, secret)
        self._node, self._find_peers = node, find_peers
        self._concluded_at = -math.inf
        self._together: tuple[tuple[tuple[int, ...], tuple[bytes, ...]], float] | None = None
        """The state at which all cells were seen to be done, and since when."""
        self._home = False
        """Whether our own cell has settled."""

    def is_near(self, peer: PeerId) -> bool:
        """Whether ``peer`` is of our cell."""
        return self.cells == 1 or cell_of(peer, self.cells) == self.cell

    async def look_up(self, cell: int) -> None:
        """Find peers of another cell in the DHT, for whoever asked for them."""
        node = self._node
        try:
            peers = [PeerId(record.peer) for record in await self._find_peers(cell)]
        except TransportError as error:
            node.report(ev.Warned, text=f"nobody of cell {cell} is found: {error}")
            peers = []
        self.outlook.found(cell, peers, node.now())
        node.rounds.set_cell(cell, peers, node.now())
        node.pump()

    def handle(self) -> bool:
        """Carry out what the outlook asks for; True if it asked."""
        if not self.outlook.wanted:
            return False
        wanted, self.outlook.wanted = self.outlook.wanted, []
        for cell in wanted:
            self._node.spawn(self.look_up(cell), is_errand=True)
        return True

    def conclude(self, now: float) -> None:
        """Put together what our cell sees of the others, now and then; soon in short rounds: a cell that sees
        late what the others made without it comes late to their next round, too, and so on."""
        if self.cells == 1:
            return
        phase, has_heard = self._node.progress.local.phase, self._node.catching.has_heard
        is_round_short = self._node.progress.rounds_per_s * ALONE_S >= 1.0
        self.outlook.hurry = phase != Status.TRAINING or has_heard or is_round_short
        self.outlook.ends = phase == Status.DRAINING
        self.outlook.rests = self._node.progress.rests
        every_s = CONCLUDED_QUICKLY_EVERY_S if self.outlook.hurry else CONCLUDED_EVERY_S
        if self.outlook.rests and not has_heard:
            every_s = max(every_s, self._node.membership.quiet_s)
        if now - self._concluded_at < every_s:
            return
        self._concluded_at = now
        self.outlook.conclude(self._node.membership.live, now, self._node.progress.rounds_per_s)
        words = self.outlook.recent(now)
        self._node.rounds.set_other_cells(
            {word.cell: word.versions for word in words if word.trains},
            {word.cell: word.finished for word in words},
        )
        if self.outlook.has_seen_news and (phase == Status.DRAINING or has_heard):
            self.outlook.has_seen_news = False
            self._node.membership.announce(now)  # the others of our cell wait for it

    def together(
        self, home: bool, alike: bool, versions: tuple[int, ...], digests: tuple[bytes, ...], now: float
    ) -> bool:
        """Whether every cell is done, ours too (``home``), and has had the time to see that of the others."""
        here = versions, digests
        known = self._together is not None and self._together[0] == here
        # Who sees the others of its cell go is no less done than they were, as long as those left are alike.
        self._home = home or (known and alike)
        if self.cells == 1:
            return home
        if not (self._home and self.outlook.is_done(versions, digests, now)):
            self._together = None
            return False
        if self._together is None or not known:
            self._together = here, now
        return self.outlook.is_alone(now) or now - self._together[1] >= LINGER_S

    def sight(self) -> CellSight:
        """How our cell stands, for those who watch it; without versions as long as nobody has joined."""
        node, now = self._node, self._node.now()
        live = node.membership.live
        phase = node.progress.local.phase
        phases = {info.status.phase for info in live.values()} | {phase}
        sight = CellSight(cell=self.cell, peer=node.me)
        if phases.isdisjoint({Status.TRAINING, Status.DRAINING}):
            return sight
        sight.trains = Status.TRAINING in phases
        done = [info.status.settled for info in live.values() if info.status.phase == Status.DRAINING]
        # One that rests, or joins, tells what those say who are done.
        settled = self._home if phase == Status.DRAINING else bool(done) and all(done)
        sight.settled = settled and not sight.trains
        own = [node.progress.position()] if phase == Status.TRAINING or len(live) == 0 else []
        positions = sorted([*own, *member_positions(live.values(), now, node.progress.rounds_per_s)])
        sight.position = positions[(len(positions) - 1) // 2] if positions else node.progress.position()
        fragments = range(len(node.agreed))
        sight.finished = finished_bits(filter(node.rounds.has_closed, fragments), len(fragments))
        majority = node.catching.majority
        for fragment in range(len(node.agreed)):
            version = majority.near_version(fragment)
            sight.versions.append(version)
            sight.digests.append(majority.digest(fragment, version) or b"")
        return sight

    def position(self, near: Sequence[float], now: float) -> float | None:
        """The lower median position of all who train, in all cells, each cell counting as many as ours."""
        if self.cells == 1:
            return sorted(near)[(len(near) - 1) // 2] if near else None
        far = self.outlook.positions(now, self._node.progress.rounds_per_s)
        weighted = sorted([*((at, 1) for at in near), *((at, max(1, len(near))) for at in far)])
        total, passed = sum(weight for _, weight in weighted), 0
        for position, weight in weighted:
            passed += weight
            if 2 * passed >= total:
                return position
        return None
