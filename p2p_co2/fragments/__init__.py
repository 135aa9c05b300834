"""A module cut into fragments (``plan``), its live parameters seen through them (``live``), and when each
is sent (``schedule``)."""

from p2p_co2.fragments.live import LiveParameters
from p2p_co2.fragments.plan import Fragment, FragmentPlan, Slice, plan_fragments
from p2p_co2.fragments.schedule import SwarmClock, due, points_passed

__all__ = [
    "Fragment",
    "FragmentPlan",
    "LiveParameters",
    "Slice",
    "SwarmClock",
    "due",
    "plan_fragments",
    "points_passed",
]
