"""The outer optimizer: what a committed mean does to the agreed parameters, and how live parameters meet
the result.

``init`` and ``step`` are an algorithm over a plain ``OuterState``, one per fragment; nothing is hidden and
nothing is changed in place, so saving, replaying and comparing states come free. In the papers' symbols:
``params`` is CO2's x and DiLoCo's theta, ``momentum`` CO2's m, ``config.momentum`` beta, ``config.lr`` the
outer learning rate, ``config.clip_phi`` CO2's phi. The outer gradient is ``state.params - params``; the
sign is law.

Laws:

1. Agreed state. ``step`` gives the same bits on every peer. Multiplication and addition are separate
   operations, each rounded once; ``torch.add(alpha=)``, ``addcmul`` and ``lerp`` are never used, because
   some builds fuse them into one rounding and some do not, and one last bit of difference is another
   digest. There is no division of a tensor by a number either: one device divides, another multiplies by
   the inverse. Norms come from ``exact_norm``, which has no reduction order. (A process that flushes
   denormals, ``torch.set_flush_denormal``, breaks this law: leave it off.)
2. An aborted round changes nothing: there is no call for it.
3. A state is never modified, unless ``step`` is told that nobody else holds it.

Sources: CO2 (arXiv 2401.16265) for the staleness gap penalty (after its Eq. 3, denominator ours) and outer
momentum clipping; DiLoCo and Streaming DiLoCo (2501.18512) for Nesterov and ``blend``; Eager updates
(2502.12996) for ``eager_correction``; ``keep`` is ours.
"""

from p2p_co2.tensors.outer.merge import (
    Merge,
    boundary_merge,
    eager_correction,
    lost_work_of,
    merge,
    outer_gradient,
)
from p2p_co2.tensors.outer.norms import PIECE, exact_norm, magnitude
from p2p_co2.tensors.outer.step import (
    MOVED_NORMS_KEPT,
    OuterState,
    StepReport,
    init,
    last_change,
    stability_warning,
    step,
)

__all__ = [
    "MOVED_NORMS_KEPT",
    "PIECE",
    "Merge",
    "OuterState",
    "StepReport",
    "boundary_merge",
    "eager_correction",
    "exact_norm",
    "init",
    "last_change",
    "lost_work_of",
    "magnitude",
    "merge",
    "outer_gradient",
    "stability_warning",
    "step",
]
