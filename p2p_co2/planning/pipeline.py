"""What a microbatch costs in each stage of a model. ``simnet.stage_forecast`` plays it.

loads = loads_of(costs, "int8", "int8")  # costs: StageCost of each stage
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from p2p_co2.codec_specs import SPECS


@dataclass(frozen=True, kw_only=True)
class StageCost:
    """What one microbatch costs in a stage, before anything is encoded.

    ``forward_s``, ``backward_s``: of computing on a machine of speed 1. ``values``: that go on to the next
    stage, 0 at the last. ``side_bytes``: that travel with them. ``parameters``: of the stage.
    ``entry_bytes``: held between forward and backward.
    """

    forward_s: float
    backward_s: float
    values: int = 0
    side_bytes: int = 0
    parameters: int = 0
    entry_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class StageLoad(StageCost):
    """With what is encoded. ``ahead_bytes``: what it sends to the next stage, 0 at the last; ``back_bytes``:
    to the one before, 0 at the first. The last stage computes forward and backward at once."""

    ahead_bytes: int = 0
    back_bytes: int = 0

    @property
    def compute_s(self) -> float:
        return self.forward_s + self.backward_s


def loads_of(costs: Sequence[StageCost], forward: str, backward: str) -> tuple[StageLoad, ...]:
    """With activations in the codec ``forward`` and their gradients in ``backward``."""
    before = [0, *(cost.values for cost in costs)]
    return tuple(
        StageLoad(
            **vars(cost),
            ahead_bytes=SPECS[forward].payload_bytes(cost.values) + cost.side_bytes if cost.values else 0,
            back_bytes=SPECS[backward].payload_bytes(came) if came else 0,
        )
        for cost, came in zip(costs, before, strict=False)
    )
