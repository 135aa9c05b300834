"""Catching up: a late peer fetches rounds that it missed, or a fragment's whole agreed state, from its
donors.

A machine without I/O or clock, both sides in one: the donor answers ``Fetch`` with a ``Manifest`` of chunk
digests and then with chunks; the peer that is behind asks for the manifest, checks that its sizes are the
ones it can compute itself, asks for chunks a few at a time, and checks every chunk's digest before it keeps
it.

Laws: nothing is allocated on a donor's word (sizes must equal what this peer computes from its own model); a
wrong chunk never reaches the caller; every wait has a timer, and a donor that is slow, refuses or lies is
replaced by the next one, chunks already verified against the same manifest being kept. A donor holds at most
``EXPORTS_KEPT`` states and ``HISTORY_BYTES_SHARE`` of the model in past rounds.

Source of the idea: several donors, digests and resume are what users of hivemind ask for (its issues 169 and
415).
"""

from __future__ import annotations

from p2p_co2.catchup.donor import Donor
from p2p_co2.catchup.fetcher import Fetcher
from p2p_co2.catchup.goals import (
    ROUND,
    STATE,
    CatchUpEvent,
    CatchUpMessage,
    DonorRefused,
    ExportWanted,
    Fetched,
    FetchFailed,
    Goal,
    Outbox,
    Shape,
    split_donors,
)
from p2p_co2.errors import RemoteProtocolError
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.messages_pb2 import Decision, Fetch, Refusal

__all__ = [
    "ROUND",
    "STATE",
    "CatchUp",
    "CatchUpEvent",
    "CatchUpMessage",
    "DonorRefused",
    "ExportWanted",
    "FetchFailed",
    "Fetched",
    "Goal",
    "Shape",
    "split_donors",
]


class CatchUp:
    """Both sides behind the verbs of a machine."""

    def __init__(self, shape: Shape) -> None:
        self._fragments = len(shape.mean_bytes)
        self._out = Outbox()
        self.donor = Donor(shape, self._out)
        self._fetcher = Fetcher(shape, self._out)

    def want(self, goal: Goal, now: float) -> None:
        """Start fetching; ends in ``Fetched`` or ``FetchFailed``."""
        self._fetcher.want(goal, now)

    def fetching(self, fragment: int) -> bool:
        return self._fetcher.fetching(fragment)

    def forget_donor(self, peer: PeerId, now: float) -> None:
        """``peer`` is gone: goals that wait for it go on with another donor."""
        self._fetcher.forget_donor(peer, now)

    def remember(self, fragment: int, version: int, decision: Decision, mean: bytes) -> None:
        """Keep a committed round for replay, within the memory bound."""
        self.donor.remember(fragment, version, decision, mean)

    def exported(self, fragment: int, version: int, data: bytes, digest: bytes, now: float) -> None:
        """The answer to ``ExportWanted``."""
        self.donor.exported(fragment, version, data, digest, now)

    def receive(self, message: CatchUpMessage, sender: PeerId, now: float) -> None:
        """Handle one message; raises ``RemoteProtocolError`` for what breaks the rules."""
        if not isinstance(message, Refusal) and message.fragment >= self._fragments:
            raise RemoteProtocolError("unknown fragment", str(message.fragment))
        if isinstance(message, Fetch):
            self.donor.receive(message, sender, now)
        else:
            self._fetcher.receive(message, sender, now)

    def handle_timer(self, now: float) -> None:
        self._fetcher.handle_timer(now)
        self.donor.handle_timer(now)

    def get_timer(self) -> float | None:
        times = (self._fetcher.get_timer(), self.donor.get_timer())
        return min((at for at in times if at is not None), default=None)

    def messages_to_send(self) -> list[tuple[PeerId, CatchUpMessage]]:
        messages, self._out.messages = self._out.messages, []
        return messages

    def next_event(self) -> CatchUpEvent | None:
        return self._out.events.popleft() if self._out.events else None
