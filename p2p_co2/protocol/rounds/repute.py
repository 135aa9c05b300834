"""Coordinators whose rounds came to nothing are asked last for a while.

A coordinator can only fail to form a group; what is committed is proved by its members. So one number for
each peer is enough: after the second time in a row it is passed over for ``FIRST_S``, then twice as long each
time, until a round of its own is committed, of the fragment that it failed last. Price: each peer judges by
what it sees; an honest coordinator with a bad line is passed over, too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from p2p_co2.protocol.rounds.events import Distrusted
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.limits import MAX_PEERS

FIRST_S, LONGEST_S = 60.0, 3600.0


class Repute:
    """What this peer remembers of the others, by (times, until when, the last fragment)."""

    def __init__(self) -> None:
        self.emit: Callable[[Distrusted], None] = lambda news: None
        """Hears when somebody is asked last from now on, and why."""
        self._failed: OrderedDict[PeerId, tuple[int, float, int]] = OrderedDict()

    def failed(self, peer: PeerId, fragment: int, why: str, now: float) -> None:
        times, until, _ = self._failed.pop(peer, (0, now, fragment))
        if now < until:
            self._failed[peer] = times, until, fragment
            return
        lasts_s = min(LONGEST_S, FIRST_S * 2 ** min(times - 1, 10)) if times else 0.0
        self._failed[peer] = times + 1, now + lasts_s, fragment
        if len(self._failed) > MAX_PEERS:
            self._failed.popitem(last=False)
        if lasts_s:
            self.emit(Distrusted(peer, f"asked last to coordinate, since {why}", lasts_s))

    def committed(self, peer: PeerId, fragment: int) -> None:
        """A round that it coordinated was committed."""
        if self._failed.get(peer, (0, 0.0, -1))[2] == fragment:
            del self._failed[peer]

    def is_passed_over(self, peer: PeerId, now: float) -> bool:
        return now < self._failed.get(peer, (0, now, 0))[1]

    def held(self) -> dict[str, tuple[int, int]]:
        """As ``Rounds.held``."""
        return {"MAX_REMEMBERED": (len(self._failed), MAX_PEERS)}
