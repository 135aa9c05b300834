"""The weighted mean, without defence."""

from __future__ import annotations

from collections.abc import Sequence

from p2p_co2.tensors.aggregation.base import AggregationRule, Mean, Slices


class WeightedMean(AggregationRule):
    """Each slice counts with its weight."""

    def mean(self, slices: Slices, weights: Sequence[float]) -> Mean:
        return Mean(slices.mean(weights), tuple(weights))
