"""Plain clipping: the first half of centred clipping."""

from __future__ import annotations

from collections.abc import Sequence

from p2p_co2.tensors.aggregation.base import AggregationRule, Mean, Slices
from p2p_co2.tensors.aggregation.centred import centred


class ClippedMean(AggregationRule):
    """No slice pulls harder than one of the usual length for its work."""

    def mean(self, slices: Slices, weights: Sequence[float]) -> Mean:
        counted = tuple(weights)
        if len(slices) > self.uses:
            counted = centred(slices.products()[0], weights, self.uses, steps=0)
        return Mean(slices.mean(counted), counted)
