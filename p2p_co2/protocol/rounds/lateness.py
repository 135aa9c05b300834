"""Owners whose means come late: what they say of their links is believed less, by whom they kept waiting.

A round is divided so that all owners are done at about the same time (``parts``). An owner whose last mean
comes much later than the others' has a slower link than it claims, or works against the round; the round
waits for it all the same, because a lost part is given away only at its deadline. So every member
measures each owner from BEGIN to its last mean, and when it coordinates it gives a late one a smaller share.

Laws: only shares of the averaging follow from this, never whose slices count: somebody who makes an owner
seem late (by slices that come late to it alone) takes work off it, and nothing else. Time is compared with
the other owners' of the same round, so a slow swarm or a busy machine blames nobody; only where there is no
other owner, with the deadline for slices, which is several times what the links need by what they say. What
is remembered is one number for each live peer. Price: each peer finds out by itself; a late owner is tried
again in the end, since links get better, and costs a late round then, one in about fifteen.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from statistics import median_low

from p2p_co2.protocol.rounds import bounds
from p2p_co2.protocol.wire.identity import PeerId

LATE = 2.0
"""Times as long as the middle one of the owners: links differ, and slices reach one owner sooner."""
HARDEST, LEAST = 1 / 4, 1 / 64
"""What one round, and all rounds, may leave of an owner's claim."""
FORGIVING = 1.1
"""For each round without being late."""


class Lateness:
    """What is believed of each peer's claim to be a fast owner, from 1 (all of it) down to ``LEAST``."""

    def __init__(self) -> None:
        self._believed: dict[PeerId, float] = {}
        """Of those that were late."""

    def of_claim(self, peer: PeerId) -> float:
        return self._believed.get(peer, 1.0)

    def owners_took(self, took_s: Mapping[PeerId, float], parts_within_s: float) -> None:
        """A round is over. ``took_s``: by owner, this peer too if it was one, seconds from BEGIN to its last
        mean; what has not come counts up to now. ``parts_within_s``: as in BEGIN."""
        self._forgive()
        fair_s = median_low(took_s.values()) if len(took_s) > 1 else parts_within_s
        late_s = LATE * fair_s if len(took_s) > 1 else fair_s
        for peer, owner_s in took_s.items():
            if owner_s > late_s and owner_s - fair_s > bounds.CHEAP_S:
                share = max(HARDEST, fair_s / owner_s)
                self._believed[peer] = max(LEAST, self.of_claim(peer) * share)

    def keep(self, live: Collection[PeerId]) -> None:
        """Forget peers that are gone."""
        if self._believed:
            self._believed = {peer: share for peer, share in self._believed.items() if peer in live}

    def _forgive(self) -> None:
        believed = {peer: share * FORGIVING for peer, share in self._believed.items()}
        self._believed = {peer: share for peer, share in believed.items() if share < 1}
