"""Centred clipping: a defence against peers that send noise, lies or boasts (Karimireddy, He and Jaggi, 2021,
"Learning from History", eq. CC)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median_high, median_low

from p2p_co2.tensors.aggregation.base import AggregationRule, Mean, Slices

STEPS = 3
"""Of the centre, from the first mean on."""
LONGEST = 2.0
"""Times as long as usual: so much longer a slice may be for the work behind it, however much that is."""
SHORTEST = 1 / 16
"""The same for little work."""
NEXT_TO_NOTHING = 1e-12
"""Of the largest product: squares of distances below it are what rounding left."""
ROUNDED_BITS = 12
LEAST_OF_MIDDLE = 1 / 4
"""Of its weight: what the upper middle one of an even number of slices counts with, at least."""


class CentredMean(AggregationRule):
    """No slice pulls harder than one of the usual length for its work, nor lies further from the others than
    most of them do (``centred``)."""

    def mean(self, slices: Slices, weights: Sequence[float]) -> Mean:
        counted = tuple(weights)
        if len(slices) > self.uses:
            counted = centred(slices.products()[0], weights, self.uses)
        return Mean(slices.mean(counted), counted)


def centred(
    products: Sequence[Sequence[float]], weights: Sequence[float], uses: int = 1, steps: int = STEPS
) -> tuple[float, ...]:
    """The weights with which slices count, at most what was asked for them. ``products``: [k][k], of each
    slice with each. Centred clipping from a first mean of slices that were cut to the usual length
    (``usual_length``).

    ``steps`` times the centre moves by the mean of what the slices differ from it. Each difference is cut to
    the median one for its work (its weight by the median weight). All that is a mean of the slices with other
    weights, so it takes their products alone and one pass for the mean. Their sum is the divisor: that some
    are cut makes the step no shorter.

    Law: where most slices that are not zero are honest, none pulls harder than the longest honest one of its
    work, in either cut. Slices of zeros have no say: most peers may not use an expert, or an adapter at its
    start.

    Of two the shorter one is believed: noise ruins a model, and a short step costs a round. ``uses``: of a
    table whose slices are longer in one use than in the other. Usual is then what is so among the longest,
    their share of all, and only lengths are cut.
    """
    count = len(weights)
    norms = [math.sqrt(max(0.0, products[index][index])) for index in range(count)]
    middle = median_low(weights)
    work = [min(LONGEST, max(SHORTEST, weight / middle)) for weight in weights]
    usual = usual_length([norm / done for norm, done in zip(norms, work, strict=True)], uses)
    cut = [_cut(usual * done, norm) for norm, done in zip(norms, work, strict=True)]
    as_cut = [
        [product * mine * other for product, other in zip(row, cut, strict=True)]
        for row, mine in zip(products, cut, strict=True)
    ]
    asked = math.fsum(weights)
    left = math.fsum(map(math.prod, zip(weights, cut, strict=True)))
    centre = [weight / left for weight in weights]
    for _ in range(steps if count > 2 and uses == 1 else 0):
        far = [_distance(as_cut, centre, index) for index in range(count)]
        told = [one / done for one, done, norm in zip(far, work, norms, strict=True) if norm > 0]
        usual = median_high(told) if told else math.inf
        shares = [
            weight / asked * _cut(usual * done, one)
            for weight, done, one in zip(weights, work, far, strict=True)
        ]
        stays = 1 - math.fsum(shares)
        centre = [stays * at + share for at, share in zip(centre, shares, strict=True)]
    centre = list(map(math.prod, zip(centre, cut, strict=True)))
    most = max(at / weight for at, weight in zip(centre, weights, strict=True))
    # Rounded, so that all machines make the same of sums that differ in their last bits.
    counted = [_rounded(at / weight / most) for at, weight in zip(centre, weights, strict=True)]
    return tuple(max(weight * one, math.ulp(0.0)) for weight, one in zip(weights, counted, strict=True))


def usual_length(lengths: Sequence[float], uses: int) -> float:
    """The median of those above 0; endless if there is none. Of four or more, if even, it is the lower middle
    one, but not less than ``LEAST_OF_MIDDLE`` of the upper one. So newcomers whose learning rate warms up
    silence nobody. Law: where more than half are honest, it lies between the shortest honest one and the
    longest."""
    sizes = sorted(length for length in lengths if length > 0)
    sizes = sizes[-(-len(sizes) * (uses - 1) // uses) :]
    if not sizes:
        return math.inf
    usual = median_low(sizes)
    return max(usual, LEAST_OF_MIDDLE * median_high(sizes)) if len(sizes) > 2 else usual


def _cut(limit: float, length: float) -> float:
    return limit / length if length > limit else 1.0


def _distance(products: Sequence[Sequence[float]], centre: Sequence[float], index: int) -> float:
    """Of the slice at ``index`` from the sum of all, each times its ``centre``."""
    off = [(at == index) - share for at, share in enumerate(centre)]
    square = math.fsum(
        a * b * one for a, row in zip(off, products, strict=True) for b, one in zip(off, row, strict=True)
    )
    largest = max(row[at] for at, row in enumerate(products))
    return math.sqrt(square) if square > NEXT_TO_NOTHING * largest else 0.0


def _rounded(value: float) -> float:
    mantissa, exponent = math.frexp(value)
    return math.ldexp(round(math.ldexp(mantissa, ROUNDED_BITS)), exponent - ROUNDED_BITS)
