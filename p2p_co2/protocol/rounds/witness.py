"""What peers of a council's cell tell other cells of its coordinator: that it is gone, as they see first.

The cells of a round hear nothing of a council that was killed, and wait some seconds (``delegate.Voice``);
its own cell's links to it have closed by then. Laws: a witness speaks only of a coordinator of its own cell
that is not live in its eyes; all that are asked must say so, and then the silent one is waited for a shorter
time, no more: who is there and answers is not given up by their word. What is remembered is bounded.

Price: a coordinator that stands still for that shorter time commits nothing any more (``council``).
"""

from __future__ import annotations

from collections import OrderedDict

from p2p_co2.protocol.rounds import bounds
from p2p_co2.protocol.rounds.asking import Asking
from p2p_co2.protocol.rounds.attempt import Attempt
from p2p_co2.protocol.rounds.swarm import Outlet, Swarm
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.messages_pb2 import CellWaiting, Council, RoundKey

COUNCIL_LOST = "its council's coordinator is lost"
WITNESSES = 2


def witnesses_of(council: Council, swarm: Swarm) -> list[PeerId]:
    """Who of its coordinator's cell is asked: they sum for all cells, so they are in the round."""
    cell = swarm.cell_of(council.coordinator)
    roots = dict.fromkeys(PeerId(peer) for slot in council.roots for peer in slot.peers)
    near = [peer for peer in roots if swarm.cell_of(peer) == cell and peer != council.coordinator]
    return near[:WITNESSES]


class Witness:
    """Of this peer, towards other cells."""

    def __init__(self, swarm: Swarm, outlet: Outlet) -> None:
        self._swarm, self._outlet = swarm, outlet
        self._seen: OrderedDict[bytes, PeerId] = OrderedDict()
        """Of the last attempts that we were in: which council's they were, and who coordinated it."""

    def left(self, attempt: Attempt) -> None:
        """Our own member was in an attempt that is over."""
        if attempt.council is not None:
            self._seen[attempt.council.key.attempt] = PeerId(attempt.council.coordinator)
            while len(self._seen) > bounds.KEEP_ATTEMPTS:
                self._seen.popitem(last=False)

    def answer(self, key: RoundKey, sender: PeerId, mine: Attempt | None, asking: Asking | None) -> bool:
        """``sender`` asks how a round over all cells ended. Tell it if its council was a coordinator of ours
        that is lost: as one that was in it (``mine``: the attempt that we are in), or that still asks it to
        be taken in."""
        if self._swarm.is_near(sender):
            return False
        council = mine.council if mine is not None else None
        if council is not None and council.key.attempt == key.attempt:
            coordinators = [PeerId(council.coordinator)]
        elif key.attempt in self._seen:
            coordinators = [self._seen[key.attempt]]
        else:
            coordinators = asking.asked if asking is not None and asking.offer.round == key.round else []
        if not any(self._swarm.is_near(peer) and not self._swarm.is_live(peer) for peer in coordinators):
            return False
        self._outlet.send(sender, CellWaiting(fragment=key.fragment, round=key.round, refusal=COUNCIL_LOST))
        return True
