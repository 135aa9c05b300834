"""What a program that runs peers tells the one that shows them, so that neither knows the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from p2p_co2.telemetry.events import Event


class Watch(Protocol):
    """Shows peers to a person. ``see`` gets new events, in the order in which each peer wrote them. ``close``
    gives the terminal back and may be called twice."""

    def see(self, events: Sequence[Event]) -> None: ...
    def say(self, text: str) -> None: ...
    def close(self) -> None: ...
