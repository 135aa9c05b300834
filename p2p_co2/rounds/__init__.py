"""Rounds: READY, BEGIN, PARTS, MEAN, RESULT, COMMIT or ABORT(reason), as one machine without I/O or clock."""

from p2p_co2.rounds.decision import (
    ANNOUNCEMENT_CONTEXT,
    DECISION_CONTEXT,
    announcement,
    counted_weights,
    open_decision,
)
from p2p_co2.rounds.events import (
    Aborted,
    AgreedPart,
    Began,
    CellWanted,
    Committed,
    Doubted,
    FellBehind,
    Offer,
    OutcomeWithoutBytes,
    PayloadShape,
    PeerView,
    ReduceJob,
    ReduceWanted,
    Refused,
    RoundsEvent,
    Slice,
)
from p2p_co2.rounds.machine import Rounds

__all__ = [
    "ANNOUNCEMENT_CONTEXT",
    "DECISION_CONTEXT",
    "Aborted",
    "AgreedPart",
    "Began",
    "CellWanted",
    "Committed",
    "Doubted",
    "FellBehind",
    "Offer",
    "OutcomeWithoutBytes",
    "PayloadShape",
    "PeerView",
    "ReduceJob",
    "ReduceWanted",
    "Refused",
    "Rounds",
    "RoundsEvent",
    "Slice",
    "announcement",
    "counted_weights",
    "open_decision",
]
