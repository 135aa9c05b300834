"""Centred clipping among those whose work agrees with the averaging peer's own: a defence against liars, up
to nearly half of the peers (``scores`` says how)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median_low

from p2p_co2.scores import Scores
from p2p_co2.tensors.aggregation.base import AggregationRule, Mean, Slices
from p2p_co2.tensors.aggregation.centred import LONGEST, centred

BENEFIT = 2.0
"""Of the doubt, since scores are noisy: times a standing that bears out no more than the median weight."""
SHORTER = 2.0
"""Times than ours that a slice may be for the same work. A still shorter one says so much less: else many
little ones for us bear out a few long ones against us."""
NEWCOMERS = 1 / 10
"""Of the mean: what all newcomers together have, at most. Names are free."""


class ScoredMean(AggregationRule):
    """Who works against this peer counts nothing; the others as in a centred mean, by what they claim or by
    what their scores bear out, whichever is less.

    Law: the cosine of two noisy slices grows as the root of the work behind each. So a standing bears out
    its square times the median weight: who boasts gains nothing (``borne_out``).

    Slices of zeros tell nothing. In a table that is used in two ways, whose slices need not agree, and
    without a slice of this peer's, all count as in a centred mean. Price: means depend on who averages.
    Owners tell the weights, so all see them.
    """

    def __init__(self, uses: int = 1, me: str = "") -> None:
        super().__init__(uses, me)
        self._scores = Scores()

    def mean(self, slices: Slices, weights: Sequence[float]) -> Mean:
        if len(slices) <= self.uses or not slices.values:
            return Mean(slices.mean(weights), tuple(weights))
        products = slices.products()[0]
        standing = self._standing(slices.peers, products, weights, slices.values**-0.5)
        usual = median_low(weights)
        believed = [
            min(weight, usual * borne_out(one)) for weight, one in zip(weights, standing, strict=True)
        ]
        kept = [index for index, weight in enumerate(believed) if weight > 0]
        among = centred(
            [[products[row][column] for column in kept] for row in kept],
            [believed[index] for index in kept],
            self.uses,
        )
        counted = [math.ulp(0.0)] * len(weights)
        for index, weight in zip(kept, among, strict=True):
            counted[index] = weight
        self._limit_newcomers(slices.peers, counted)
        # Of who has made little work no more can be expected.
        told = [
            one / math.sqrt(min(1.0, weight / usual)) for one, weight in zip(standing, weights, strict=True)
        ]
        return Mean(slices.mean(counted), tuple(counted), tuple(told))

    def _standing(
        self, peers: Sequence[str], products: Sequence[Sequence[float]], weights: Sequence[float],
        noise: float,
    ) -> list[float]:  # fmt: skip
        if self.uses > 1 or self.me not in peers:
            return [math.inf] * len(peers)
        mine, usual = peers.index(self.me), median_low(weights)
        for index, peer in enumerate(peers):
            square = products[mine][mine] * products[index][index]
            if index != mine and square > 0:
                cosine = products[mine][index] / math.sqrt(square)
                length = math.sqrt(products[index][index] / products[mine][mine])
                done = min(1.0, weights[index] / weights[mine])
                share = min(1.0, weights[index] / usual)
                # What is against us harms by its length; it is cut later.
                says = min(1.0, SHORTER * length / done) if cosine > 0 else min(LONGEST, max(1.0, length))
                self._scores.tell(peer, cosine * says, noise, share)
        standing = self._scores.standing([peer for peer in peers if peer != self.me])
        return [standing.get(peer, math.inf) for peer in peers]

    def _limit_newcomers(self, peers: Sequence[str], counted: list[float]) -> None:
        new = self._scores.newcomers([peer for peer in peers if peer != self.me])
        theirs = math.fsum(one for peer, one in zip(peers, counted, strict=True) if peer in new)
        limit = NEWCOMERS / (1 - NEWCOMERS) * (math.fsum(counted) - theirs)
        if theirs > limit:
            for index, peer in enumerate(peers):
                if peer in new:
                    counted[index] = max(counted[index] * limit / theirs, math.ulp(0.0))


def borne_out(standing: float) -> float:
    """How many median weights a standing bears out."""
    return max(standing**2, min(1.0, (BENEFIT * standing) ** 2))
