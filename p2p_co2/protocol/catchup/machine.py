"""Both sides of catching up behind the verbs of a machine."""

from __future__ import annotations

import math
from collections.abc import Callable

from p2p_co2.errors import Offence, RemoteProtocolError
from p2p_co2.protocol.catchup.donor import Donor
from p2p_co2.protocol.catchup.fetcher import Fetcher
from p2p_co2.protocol.catchup.goals import (
    BUFFERS,
    ROUND,
    STATE,
    CatchUpEvent,
    CatchUpMessage,
    Outbox,
    TransferSizes,
)
from p2p_co2.system.memory import Buffer
from p2p_co2.wire.identity import Identity, PeerId
from p2p_co2.wire.messages_pb2 import Fetch, Refusal


class CatchUp:
    """A ``donor`` and a ``fetcher``. ``run``: the run's digest; ``is_everywhere``: see ``History``."""

    def __init__(
        self, identity: Identity, run: bytes, shape: TransferSizes,
        is_everywhere: Callable[[int, int], bool] = lambda fragment, version: False,
    ) -> None:  # fmt: skip
        self._out = Outbox()
        self._fragments = len(shape.mean_bytes)
        self.donor = Donor(identity, run, shape, self._out, is_everywhere)
        self.fetcher = Fetcher(run, shape, self._out)
        self._busy_at = -math.inf
        self.take_buffers: Callable[[Buffer], None] = lambda data: None
        """Hears what has come of a goal of buffers: empty if nothing."""

    def moves(self, now: float, within_s: float) -> bool:
        """Whether a chunk came to this peer of late, or one went to others; of a state or of a round that
        somebody missed. A round's bytes go before these. Other threads may ask."""
        return now - max(self.fetcher.got_at, self._busy_at, self.donor.gave_at) <= within_s

    def is_busy(self, donor: PeerId, now: float) -> None:
        """A round's bytes came from ``donor``: it is not silent, and its chunks come after them."""
        self.fetcher.owed.is_busy(donor, now)
        self._busy_at = self._busy_at if self.fetcher.is_idle else now

    def receive(self, message: CatchUpMessage, sender: PeerId, now: float) -> None:
        """Handle one message; raises ``RemoteProtocolError`` for what breaks the rules."""
        if not isinstance(message, Refusal):
            if message.what not in (ROUND, STATE, BUFFERS):
                raise RemoteProtocolError("unknown kind", str(message.what))
            if message.fragment >= self._fragments + (message.what == BUFFERS):
                raise RemoteProtocolError(Offence.UNKNOWN_FRAGMENT, str(message.fragment))
        if isinstance(message, Fetch):
            self.donor.receive(message, sender, now)
        else:
            self.fetcher.receive(message, sender, now)

    def handle_timer(self, now: float) -> None:
        if not self.fetcher.is_idle:  # a node asks every time that it wakes up
            self.fetcher.handle_timer(now)
        self.donor.handle_timer(now)

    def get_timer(self) -> float | None:
        timers = (self.fetcher.get_timer(), self.donor.get_timer())
        return min((at for at in timers if at is not None), default=None)

    def messages_to_send(self) -> list[tuple[PeerId, CatchUpMessage]]:
        messages = self._out.messages
        self._out.messages = []
        return messages

    def next_event(self) -> CatchUpEvent | None:
        return self._out.events.popleft() if self._out.events else None
