"""Centred clipping among those whose work agrees with the averaging peer's own: a defence against liars, up
to nearly half of the peers (``scores`` says how)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from p2p_co2.scores import Scores
from p2p_co2.tensors.aggregation.base import AggregationRule, Mean, Slices
from p2p_co2.tensors.aggregation.centred import centred

NEWCOMERS = 1 / 10
"""Of the mean: what all newcomers together have, at most. Names are free."""


class ScoredMean(AggregationRule):
    """Who works against this peer counts nothing; the others as in a centred mean, times their worth. Slices
    of zeros tell nothing. In a table that is used in two ways, whose slices need not agree, and without a
    slice of this peer's, all count as in a centred mean.

    Price: means depend on who averages. Owners tell the weights, so all see them.
    """

    def __init__(self, uses: int = 1, me: str = "") -> None:
        super().__init__(uses, me)
        self._scores = Scores()

    def mean(self, slices: Slices, weights: Sequence[float]) -> Mean:
        if len(slices) <= self.uses:
            return Mean(slices.mean(weights), tuple(weights))
        products = slices.products()[0]
        worth = self._worth(slices.peers, products)
        kept = [index for index, one in enumerate(worth) if one > 0]
        among = centred(
            [[products[row][column] for column in kept] for row in kept],
            [weights[index] for index in kept],
            self.uses,
        )
        counted = [math.ulp(0.0)] * len(weights)
        for index, weight in zip(kept, among, strict=True):
            counted[index] = max(weight * worth[index], math.ulp(0.0))
        self._limit_newcomers(slices.peers, counted)
        return Mean(slices.mean(counted), tuple(counted), tuple(worth))

    def _worth(self, peers: Sequence[str], products: Sequence[Sequence[float]]) -> list[float]:
        if self.uses > 1 or self.me not in peers:
            return [1.0] * len(peers)
        mine = peers.index(self.me)
        for index, peer in enumerate(peers):
            square = products[mine][mine] * products[index][index]
            if index != mine and square > 0:
                self._scores.tell(peer, products[mine][index] / math.sqrt(square))
        worth = self._scores.worth([peer for peer in peers if peer != self.me])
        return [worth.get(peer, 1.0) for peer in peers]

    def _limit_newcomers(self, peers: Sequence[str], counted: list[float]) -> None:
        new = self._scores.newcomers([peer for peer in peers if peer != self.me])
        theirs = math.fsum(one for peer, one in zip(peers, counted, strict=True) if peer in new)
        limit = NEWCOMERS / (1 - NEWCOMERS) * (math.fsum(counted) - theirs)
        if theirs > limit:
            for index, peer in enumerate(peers):
                if peer in new:
                    counted[index] = max(counted[index] * limit / theirs, math.ulp(0.0))
