"""The outer optimizer: what a committed mean does to the agreed parameters, and how live parameters meet
the result.

``init`` and ``step`` are an algorithm over a plain ``OuterState``, one per fragment. In the papers' symbols:
``params`` is CO2's x and DiLoCo's theta, ``momentum`` CO2's m, ``config.momentum`` beta, ``config.lr`` the
outer learning rate, ``config.clip_phi`` CO2's phi. The outer gradient is ``state.params - params``; the
sign is law.

Laws:

1. Agreed state. ``step`` gives the same bits on every peer. Multiplication and addition are separate
   operations, each rounded once; ``torch.add(alpha=)``, ``addcmul`` and ``lerp`` are never used, because
   some builds fuse them into one rounding. No tensor is divided by a number. Norms have no reduction order
   (``norm_of_pieces``). A process that flushes denormals breaks this law.
2. An aborted round changes nothing: there is no call for it.
3. A state is never modified, unless ``step`` is told that nobody else holds it.

Sources: CO2 (arXiv 2401.16265) for the staleness gap penalty (after its Eq. 3, denominator ours) and outer
momentum clipping; DiLoCo and Streaming DiLoCo (2501.18512) for Nesterov and ``blend``; Eager updates
(2502.12996) for ``eager_correction``; ``keep`` is ours.
"""

from p2p_co2.tensors.outer.merge import Merge, eager_correction, merge
from p2p_co2.tensors.outer.norms import PIECE, magnitude, norm_of_pieces
from p2p_co2.tensors.outer.step import (
    MOVED_NORMS_KEPT,
    OuterState,
    StepReport,
    init,
    last_change,
    stability_warning,
    step,
)

__all__ = ["MOVED_NORMS_KEPT", "PIECE", "Merge", "OuterState", "StepReport", "eager_correction", "init"]
__all__ += ["last_change", "magnitude", "merge", "norm_of_pieces", "stability_warning", "step"]
