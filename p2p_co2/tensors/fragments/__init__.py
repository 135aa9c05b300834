"""A module cut into fragments (``plan``), and its live parameters seen through them (``live``)."""

from p2p_co2.tensors.fragments.live import LiveParameters
from p2p_co2.tensors.fragments.plan import Fragment, FragmentPlan, Slice, plan_fragments

__all__ = [
    "Fragment",
    "FragmentPlan",
    "LiveParameters",
    "Slice",
    "plan_fragments",
]
