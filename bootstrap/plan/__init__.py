"""``p2p-co2 plan``: what a run will cost and whether the links are enough, before anybody is invited.

The arithmetic is ``p2p_co2.planning``'s; here the figures are gathered (``plan``: the model is built, its
inner step measured, links are read) and shown (``report``, ``picture``). Nothing is published, dialled or
written but the picture that was asked for; every figure that was measured, given or assumed is said to be
so."""

from __future__ import annotations

import json
from collections.abc import Callable

from bootstrap.plan.plan import Plan, PlanOptions, as_table, make_plan

__all__ = ["Plan", "PlanOptions", "as_table", "make_plan", "run_plan"]


def run_plan(options: PlanOptions, say: Callable[[str], None] = print) -> int:
    """Print the plan; returns the exit status. Raises ``ConfigError`` and ``EnvironmentFault``."""
    plan = make_plan(options)
    if options.as_json:
        say(json.dumps(as_table(plan), indent=2))
    else:
        from bootstrap.plan.report import print_plan

        print_plan(plan)
    if options.plot is not None:
        from bootstrap.plan.picture import draw_plan

        draw_plan(plan, options.plot)
        if not options.as_json:
            say(f"picture: {options.plot}")
    return 0
