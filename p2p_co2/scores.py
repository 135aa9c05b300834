"""How well what each peer sends agrees with what this peer learned itself.

    scores = Scores()
    scores.tell("b", cosine)              # of its slice, or its mean, and ours
    scores.standing(["b", "c", "d"])      # {"b": 1.1, "c": 1.0, "d": 0.0}

A cosine of two changes that were learned from different data tells how far one of them lowers the other's
loss, to first order. This peer's own change is the anchor, as in FLTrust (Cao et al. 2021, "Byzantine-robust
Federated Learning via Trust Bootstrapping"). Nobody else has it: the slice of a part that one averages is
sent to nobody. So it takes no held-out text, no message and no majority. Price: it is this peer's view alone,
and one whose data are unlike all others' believes nobody less.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection
from statistics import median_high
from typing import NamedTuple

from p2p_co2.wire.limits import MAX_PEERS

FADES = 15 / 16
"""What is left of a cosine with each that follows."""
ERRORS = 2.0
"""Standard errors that a score may lie too low."""
KNOWN_AFTER = 16
"""Cosines: from so many on a peer is no newcomer."""


class Told(NamedTuple):
    """Of one peer: sums of its cosines, of their squares and of ones, all fading; how many; the noise of the
    last one."""

    total: float = 0.0
    squares: float = 0.0
    weight: float = 0.0
    times: int = 0
    noise: float = 0.0

    @property
    def score(self) -> float:
        return self.total / self.weight

    @property
    def variance(self) -> float:
        return max(0.0, self.squares / self.weight - self.score**2)

    def most(self, variance: float) -> float:
        """That the score may be, but for chance. ``variance``: at most so much is chance."""
        chance = max(min(self.variance, variance), self.noise**2)
        return self.score + ERRORS * math.sqrt(chance / self.weight)


class Scores:
    """Of each peer a mean of cosines, of which older ones fade. Those told of longest ago are forgotten."""

    def __init__(self) -> None:
        self._told: OrderedDict[str, Told] = OrderedDict()

    def tell(self, peer: str, cosine: float, noise: float = 0.0, share: float = 1.0) -> None:
        """``noise``: the standard deviation of the cosine of two that have nothing in common, if known.
        ``share``: of a telling, that this is."""
        old = self._told.pop(peer, Told())
        self._told[peer] = Told(
            old.total * FADES + share * cosine, old.squares * FADES + share * cosine**2,
            old.weight * FADES + share, old.times + 1, noise,
        )  # fmt: skip
        if len(self._told) > MAX_PEERS:
            self._told.popitem(last=False)

    def standing(self, peers: Collection[str] = ()) -> dict[str, float]:
        """By peer, its score over the median one of ``peers``, or of all. A score below the median counts as
        what it may be but for chance; 0 if that is below 0. 1 for who was never told of. All 1 where that
        median is not above 0: then most differ from this peer. Chance is no greater than the usual one: who
        is now for us and now against us gains nothing by that.

        Law: where more than half are honest, the median lies among the scores of the honest. Where all is
        noise, nobody stands low."""
        peers = peers or self._told.keys()
        told = {peer: self._told[peer] for peer in peers if peer in self._told}
        # Some may be late, so most of those that are here may be liars; but not most of all that are known.
        usual = max(
            (median_high(one.score for one in of.values()) for of in (told, self._told) if of), default=0.0
        )
        if usual <= 0:
            return dict.fromkeys(peers, 1.0)
        chance = median_high(one.variance for one in told.values())
        found = {peer: max(one.score, min(one.most(chance), usual)) / usual for peer, one in told.items()}
        return {peer: max(0.0, found.get(peer, 1.0)) for peer in peers}

    def newcomers(self, peers: Collection[str]) -> set[str]:
        """Those told of less than half as often as who was told of most, and less than half ``KNOWN_AFTER``
        times: as a run begins, and to who has just come, nobody is new."""
        counts = {peer: self._told.get(peer, Told()).times for peer in peers}
        most = max(counts.values(), default=0)
        return {peer for peer, count in counts.items() if 2 * count < min(KNOWN_AFTER, most)}
