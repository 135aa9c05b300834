"""``p2p-co2 plan``: what a run will cost and whether the links are enough, before anybody is invited.

The arithmetic is ``p2p_co2.planning``'s; here the figures are gathered (the model is built, its inner step is
measured, links are read) and shown. Laws: nothing is published, dialled or written but the picture that was
asked for; every figure that was measured, given or assumed is said to be so. Price: measuring a step builds
the model and trains it for some seconds on this machine.
"""

from bootstrap.plan.command import PlanOptions, run_plan

__all__ = ["PlanOptions", "run_plan"]
