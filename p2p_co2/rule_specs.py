"""The rules that a run file may name, known without torch: config, planner and board read this.

``OUTER_RULES`` say how live parameters meet agreed ones (``tensors.outer_rules``), ``AGGREGATION_RULES`` how
the peers' slices become one mean (``tensors.aggregation``). To add a rule, write its class and one line here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OuterRuleSpec:
    """``made_by``: the class, as "module:name". ``returns_work``: an offer takes its work out of the live
    parameters, and what does not count is put back. They meet a mean at the fragment's next schedule point.
    ``copies``: of the fragment that are held from one round to the next."""

    made_by: str
    returns_work: bool = False
    copies: int = 0


@dataclass(frozen=True)
class AggregationRuleSpec:
    """``made_by`` as above. ``cuts``: a slice may count with less than its weight, so members look at means
    and owners tell weights (``weight_cap`` must not be 0)."""

    made_by: str
    cuts: bool = False


_OUTER = "p2p_co2.tensors.outer_rules"
OUTER_RULES = {
    "keep": OuterRuleSpec(f"{_OUTER}:Keep"),
    "co2": OuterRuleSpec(f"{_OUTER}:SetOutAnew", returns_work=True),
    "blend": OuterRuleSpec(f"{_OUTER}:Blend"),
    "eager": OuterRuleSpec(f"{_OUTER}:Eager", returns_work=True, copies=2),
}
_AGGREGATION = "p2p_co2.tensors.aggregation"
AGGREGATION_RULES = {
    "scored": AggregationRuleSpec(f"{_AGGREGATION}.scored:ScoredMean", cuts=True),
    "centred": AggregationRuleSpec(f"{_AGGREGATION}.centred:CentredMean", cuts=True),
    "clipped": AggregationRuleSpec(f"{_AGGREGATION}.clipped:ClippedMean", cuts=True),
    "median": AggregationRuleSpec(f"{_AGGREGATION}.median:Median"),
    "mean": AggregationRuleSpec(f"{_AGGREGATION}.mean:WeightedMean"),
}


def implied_rule(weight_cap: float, *, members: bool = False) -> str:
    """The aggregation rule of a run file that names none. Who was invited by name is believed more: "scored"
    costs a swarm of very different speeds some of the fast ones' work."""
    if not weight_cap:
        return "mean"
    return "centred" if members else "scored"
