"""When fragments are sent and what of their work counts: schedule points on the swarm's position, the clock
that says the position, the account of offers, and the end of a run.

Law: nothing here reads a clock, a socket or a tensor.
"""

from p2p_co2.protocol.schedule.account import (
    ALONE_S,
    DISTINCT,
    FIRST_ROUND_BOUND_S,
    Lag,
    Sent,
    Stage,
    WorkAccount,
)
from p2p_co2.protocol.schedule.clock import SLEW, SwarmClock, due, points_passed
from p2p_co2.protocol.schedule.ending import (
    FLUSH_CAP_S,
    FLUSH_FLOOR_S,
    LOADS_CAP_S,
    LOADS_QUIET_S,
    SETTLE_S,
    STILL_LOADS,
    Ending,
    few_at_once,
    flush_bound_s,
    settle_bound_s,
)

__all__ = [
    "ALONE_S",
    "DISTINCT",
    "FIRST_ROUND_BOUND_S",
    "FLUSH_CAP_S",
    "FLUSH_FLOOR_S",
    "LOADS_CAP_S",
    "LOADS_QUIET_S",
    "SETTLE_S",
    "SLEW",
    "STILL_LOADS",
    "Ending",
    "Lag",
    "Sent",
    "Stage",
    "SwarmClock",
    "WorkAccount",
    "due",
    "few_at_once",
    "flush_bound_s",
    "points_passed",
    "settle_bound_s",
]
