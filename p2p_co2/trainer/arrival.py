"""Whether a peer that joins is where the swarm is, or is sure that it is alone; asked again and again.

Law: no thread, no clock and no waiting here: ``now`` is an argument.
"""

from __future__ import annotations

import operator
from dataclasses import replace

from p2p_co2.config import ClockConfig
from p2p_co2.errors import TransportError
from p2p_co2.node.node import Node
from p2p_co2.protocol.wire.limits import MAX_MEMBERS
from p2p_co2.trainer.synchroniser import Progressed

GATHER_BOUND_S = 120.0
"""Waiting for ``min_peers``."""
LISTEN_S, LISTEN_TO_LISTED_S = 3.0, 12.0
"""A peer that hears nobody for this long after its start is the first one; the longer time if the DHT lists
others, who may only be slow to answer."""
CATCH_UP_BOUND_S = 600.0
"""For the first fragment that a peer without the agreed state is to be given, and for each further one."""
LEFT_BEHIND_BOUND_S = 60.0
"""When all who have the agreed state went before this peer had it: how long one of them is waited for."""


class Arrival:
    """Of a ``node`` that has run since ``began_at``, in seconds of the ``now`` that is given."""

    def __init__(self, node: Node, began_at: float) -> None:
        self._node, self.began_at = node, began_at
        self._followed_at = self._given_at = began_at
        self._began_with, self._given = tuple(node.agreed), 0

    def is_there(self, now: float, in_doubt: bool = False) -> bool:
        """Whether it has arrived; not while it is ``in_doubt`` whether the others train its model. Raises
        ``TransportError`` if it cannot any more."""
        node, known = self._node, self._node.progress.conclusions
        if known.full:
            raise TransportError(
                f"this run has {MAX_MEMBERS} peers already, as many as it can have; "
                "join again when one has left"
            )
        if (moved := sum(map(operator.ne, node.agreed, self._began_with))) > self._given:
            self._given, self._given_at = moved, now
        # Of others that just came, or went, it is concluded only in a moment what that means.
        waited_s = now - self.began_at
        if not known.left_behind:
            self._followed_at = now
        if not (in_doubt or known.left_behind) and (known.heard or node.live_peers() == 0):
            unheard = node.unheard_peers()
            listened = waited_s > (LISTEN_TO_LISTED_S if unheard else LISTEN_S)
            # Those who join as we do know no more than we: who is listed may be about to answer.
            found = waited_s > 0.2 and (known.met or not unheard or listened)
            if found and known.abreast if known.heard else listened:
                return True
        if now - self._followed_at > LEFT_BEHIND_BOUND_S:
            raise TransportError(
                "the others left before this peer had their state; join again when one is back"
            )
        if now - self._given_at > CATCH_UP_BOUND_S:
            raise TransportError("no peer could give this one the agreed state; try again later")
        return False


def caught_up(
    progressed: Progressed, others: tuple[float, float] | None, clock: ClockConfig, now: float
) -> Progressed:
    """``progressed`` at the position of ``others`` (it, and when it was that), if that is further on."""
    if others is None:
        return progressed
    moved = (now - others[1]) / clock.round_s if clock.mode == "time" else 0.0
    return replace(progressed, position=max(others[0] + moved, progressed.position))
