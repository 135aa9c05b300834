"""Coordinators whose rounds came to nothing are asked last for a while.

A coordinator can only fail to form a group; what is committed is proved by its members. So one number for
each peer is enough: after the second time in a row it is passed over for ``FIRST_S``, then twice as long each
time, until a round of its own is committed. Each fragment counts for itself: a liar about one may serve the
others well. Price: each peer judges by what it sees; an honest coordinator with a bad line is passed over,
too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from p2p_co2.protocol.rounds.events import Distrusted
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.limits import MAX_PEERS

FIRST_S, LONGEST_S = 60.0, 3600.0


class Repute:
    """What this peer remembers of the others: by (peer, fragment), (times, until when)."""

    def __init__(self) -> None:
        self.emit: Callable[[Distrusted], None] = lambda news: None
        """Hears when somebody is asked last from now on, and why."""
        self._failed: OrderedDict[tuple[PeerId, int], tuple[int, float]] = OrderedDict()

    def failed(self, peer: PeerId, fragment: int, why: str, now: float) -> None:
        times, until = self._failed.pop((peer, fragment), (0, now))
        if now < until:
            self._failed[peer, fragment] = times, until
            return
        lasts_s = min(LONGEST_S, FIRST_S * 2 ** min(times - 1, 10)) if times else 0.0
        self._failed[peer, fragment] = times + 1, now + lasts_s
        if len(self._failed) > MAX_PEERS:
            self._failed.popitem(last=False)
        if lasts_s:
            self.emit(Distrusted(peer, f"asked last to coordinate, since {why}", lasts_s))

    def committed(self, peer: PeerId, fragment: int) -> None:
        """A round that it coordinated was committed."""
        self._failed.pop((peer, fragment), None)

    def is_passed_over(self, peer: PeerId, fragment: int, now: float) -> bool:
        return now < self._failed.get((peer, fragment), (0, now))[1]

    def held(self) -> dict[str, tuple[int, int]]:
        """As ``Rounds.held``."""
        return {"MAX_REMEMBERED": (len(self._failed), MAX_PEERS)}
