"""What is worked out of an outcome, once for all who ask.

Who opens the same decision shares its outcome (``decision.open_decision``), and several places then ask who
is in it: at a peer two or three, in a simulation all members of a round, and of 51 members it takes
milliseconds. Laws: an outcome that was opened is written to no more; what was derived is kept for the last
``OUTCOMES_KEPT`` and is shared, so nobody writes to it either. Peers of one process may ask from a thread
each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from p2p_co2.protocol.wire.messages_pb2 import Outcome

_T = TypeVar("_T")
OUTCOMES_KEPT = 16
"""Of each kind."""


class Derived(Generic[_T]):
    """``make(outcome)``, remembered by the outcome's identity."""

    def __init__(self, make: Callable[[Outcome], _T]) -> None:
        self._make = make
        self.__doc__ = make.__doc__
        self._known: dict[int, tuple[Outcome, _T]] = {}

    def __call__(self, outcome: Outcome) -> _T:
        known = self._known.get(id(outcome))
        if known is not None:
            return known[1]
        value = self._make(outcome)
        self._known[id(outcome)] = outcome, value  # as long as it is held, nobody else has its id
        for oldest in list(self._known)[:-OUTCOMES_KEPT]:  # another thread may do the same
            self._known.pop(oldest, None)
        return value
