"""A model cut into stages: what one peer computes, and how tensors cross from a stage to the next.

``Boundary`` encodes what crosses, ``LowRank`` gradients in fewer bytes; ``StageReplica`` runs one stage
forward and back and keeps its gradient;
``Chain`` puts all stages in a row in one process, which is the model that they make together.
"""

from __future__ import annotations

from p2p_co2.tensors.stages.boundary import Boundary, UsualSizes
from p2p_co2.tensors.stages.chain import Chain
from p2p_co2.tensors.stages.low_rank import LowRank
from p2p_co2.tensors.stages.replica import Counted, StageReplica

__all__ = ["Boundary", "Chain", "Counted", "LowRank", "StageReplica", "UsualSizes"]
