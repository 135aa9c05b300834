"""How the slices that peers sent for a part become one mean: by the run's ``AggregationRule``.

    rule = get_rule("scored", me="a")
    mean = reduce_slices(rule, codec, [("a", 1000.0, payload), ("b", 800.0, other)])

``p2p_co2.rule_specs.AGGREGATION_RULES`` lists the rules.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib import import_module

from p2p_co2.errors import LocalProtocolError
from p2p_co2.rule_specs import AGGREGATION_RULES
from p2p_co2.system.memory import Buffer
from p2p_co2.tensors.aggregation.base import AggregationRule, HostileSlice, Mean, Slices
from p2p_co2.tensors.codec import Codec

__all__ = ["AggregationRule", "HostileSlice", "Mean", "Slices", "compare", "get_rule", "reduce_slices"]

LOOKED_AT = 4
"""Of the pieces of a mean, each member looks at one in so many. Nobody knows at which before."""
Part = tuple[str, float, Buffer]
"""(peer, weight, payload slice)"""


def get_rule(name: str, uses: int = 1, me: str = "") -> AggregationRule:
    """The rule called ``name``, which config has checked. ``uses``, ``me`` as ``AggregationRule`` has it."""
    module, _, kind = AGGREGATION_RULES[name].made_by.partition(":")
    rule: AggregationRule = getattr(import_module(module), kind)(uses, me)
    return rule


def reduce_slices(rule: AggregationRule, codec: Codec, parts: Sequence[Part]) -> Mean:
    """The mean of ``parts``, in any order, by ``rule``; what it tells of each of them is in their order.

    Weights are positive (tokens); all slices have the same number of whole blocks. Raises ``HostileSlice``
    for one that ``Codec.admit`` would refuse. Raises ``LocalProtocolError`` for no parts, a peer named twice,
    unequal sizes, or a weight that is not finite and positive.
    """
    _check(codec, parts)
    order = sorted(range(len(parts)), key=lambda index: parts[index][0])
    peers, weights, payloads = zip(*(parts[index] for index in order), strict=True)
    mean = rule.mean(Slices(codec, peers, payloads), weights)
    in_order = sorted(range(len(parts)), key=order.__getitem__)
    standing = tuple(mean.standing[place] for place in in_order) if mean.standing else ()
    return Mean(mean.encoded, tuple(mean.weights[place] for place in in_order), standing)


def compare(codec: Codec, mine: Buffer, mean: Buffer) -> tuple[float, float, float, float]:
    """What a mean is like beside a slice in it: the cosine between the two, how many times as long it is, and
    the slice's root mean square, and the share of its blocks that are not zero, all where they were looked
    at. (0, 0, ...) where one of them is zero, which tells nothing; (-1, inf, 0, 0) for a mean that is not
    finite.

    Law: both are of the mean before it was encoded, so that one bound fits all codecs. What a codec keeps of
    Gaussian values, ``1 - error`` of their squares, is by how much less it points along any slice.
    """
    slices = Slices(codec, ("mine", "mean"), (mine, mean))
    try:
        ((own, along), (_, whole)), seen, used = slices.products(LOOKED_AT)
    except HostileSlice:
        return -1.0, math.inf, 0.0, 0.0
    size = math.sqrt(own / max(1, seen * codec.block_values))
    share = used / max(1, seen)
    if own == 0.0 or whole == 0.0:
        return 0.0, 0.0, size, share
    kept = math.sqrt(1 - codec.spec.error)
    cosine = along / math.sqrt(own) / math.sqrt(whole) / kept
    return min(1.0, max(-1.0, cosine)), math.sqrt(whole) / math.sqrt(own) / kept, size, share


def _check(codec: Codec, parts: Sequence[Part]) -> None:
    peers = [peer for peer, _, _ in parts]
    weights = [weight for _, weight, _ in parts]
    if not parts or len(set(peers)) != len(peers):
        raise LocalProtocolError(f"a mean needs parts, one a peer, not of {sorted(peers)}")
    sizes = [memoryview(payload).nbytes for _, _, payload in parts]
    if len(set(sizes)) != 1 or sizes[0] % codec.block_bytes:
        raise LocalProtocolError(f"slices of {sizes} bytes are not equal numbers of {codec.name} blocks")
    if not all(weight > 0.0 for weight in weights) or not math.isfinite(sum(weights)):
        raise LocalProtocolError(f"weights {weights} are not finite and positive")
