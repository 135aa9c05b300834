"""A model in stages as the planner sees it: what each stage computes, sends and holds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StageLoad:
    """What one microbatch costs in one stage.

    ``forward_s``, ``backward_s``: of computing on a machine of speed 1; the last stage does both at once.
    ``ahead_bytes``: what it sends to the next stage, 0 at the last; ``back_bytes``: to the one before, 0 at
    the first. ``parameters``: of the stage. ``entry_bytes``: held between forward and backward.
    """

    forward_s: float
    backward_s: float
    ahead_bytes: int = 0
    back_bytes: int = 0
    parameters: int = 0
    entry_bytes: int = 0

    @property
    def compute_s(self) -> float:
        return self.forward_s + self.backward_s
