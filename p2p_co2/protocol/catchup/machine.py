"""Both sides of catching up behind the verbs of a machine."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.protocol.catchup.buffers import Buffers
from p2p_co2.protocol.catchup.donor import Donor
from p2p_co2.protocol.catchup.download import Fetcher
from p2p_co2.protocol.catchup.goals import (
    BUFFERS,
    ROUND,
    STATE,
    CatchUpEvent,
    CatchUpMessage,
    Goal,
    Outbox,
    Shape,
    Vouch,
)
from p2p_co2.protocol.wire.identity import Identity, PeerId
from p2p_co2.protocol.wire.messages_pb2 import Chunk, Decision, Fetch, Manifest, Refusal
from p2p_co2.system.memory import Buffer, Joined


class CatchUp:
    """A donor and a fetcher. ``run`` is the run's digest; ``is_everywhere``: see ``History``. ``revision``
    grows with every call that may have made anything longer that is held."""

    def __init__(
        self, identity: Identity, run: bytes, shape: Shape,
        is_everywhere: Callable[[int, int], bool] | None = None,
    ) -> None:  # fmt: skip
        self.shape = shape
        self._out = Outbox()
        self.donor = Donor(identity, run, shape, self._out)
        self.donor.history.is_everywhere = is_everywhere or self.donor.history.is_everywhere
        self.fetcher = Fetcher(run, shape, self._out)
        self.buffers = Buffers(shape.chunk_bytes, self._out)
        self._busy_at = -math.inf
        self.revision = 0

    def moves(self, now: float, within_s: float) -> bool:
        """Whether a chunk came to this peer of late, or one went to others; of a state or of a round that
        somebody missed. A round's bytes go before these. Other threads may ask."""
        return now - max(self.fetcher.got_at, self._busy_at, self.donor.gave_at) <= within_s

    def ask_swarm(self, vouch: Vouch) -> None:
        """From now on a state is loaded only if ``vouch`` does not contradict its donor."""
        self.fetcher.terms.vouch = vouch

    def want(self, goal: Goal, now: float) -> None:
        """As ``Fetcher.want``."""
        self.revision += 1
        self.fetcher.want(goal, now)

    def fetching(self, fragment: int) -> bool:
        return self.fetcher.fetching(fragment)

    def forget(self, fragment: int, now: float) -> None:
        """What is being fetched of ``fragment`` is wanted no more: nothing tells of its end."""
        self.revision += 1
        self.fetcher.forget(fragment, now)

    def add_donors(self, fragment: int, peers: Sequence[PeerId], now: float) -> None:
        """``peers`` can serve what is being fetched of ``fragment``, too."""
        self.revision += 1
        self.fetcher.add_donors(fragment, peers, now)

    def is_busy(self, donor: PeerId, now: float) -> None:
        """A round's bytes came from ``donor``: it is not silent, and its chunks come after them."""
        self.fetcher.owed.is_busy(donor, now)
        self._busy_at = self._busy_at if self.fetcher.is_idle else now

    def forget_donor(self, peer: PeerId, now: float) -> None:
        """``peer`` is gone: goals that wait for it go on with another donor."""
        self.revision += 1
        self.fetcher.forget_donor(peer, "the donor left", now)

    def quarantine(self, peer: PeerId, reason: str, now: float) -> None:
        """What ``peer`` gave was whole and yet not the agreed state: ask others."""
        self.revision += 1
        self.fetcher.quarantine(peer, reason, now)

    def moved(self, fragment: int, version: int) -> None:
        """This peer's state of a fragment is at ``version`` now."""
        self.donor.versions[fragment] = version

    def remember(self, fragment: int, version: int, decision: Decision, mean: Buffer) -> None:
        """Keep a committed round for replay, within the memory bound."""
        self.revision += 1
        self.donor.history.remember(fragment, version, decision, mean)

    def turned_back(self, fragment: int) -> None:
        """This peer goes on from a state of another history: what it holds of its own is given no more."""
        self.donor.turned_back(fragment)

    def exported(
        self, fragment: int, version: int, data: bytes | Joined, digest: bytes, chunk_digests: list[bytes],
        now: float,
    ) -> None:  # fmt: skip
        """The answer to ``ExportWanted``; ``chunk_digests`` of ``data``'s chunks, in order."""
        self.revision += 1
        self.donor.exported(fragment, version, data, digest, chunk_digests, now)

    def receive(self, message: CatchUpMessage, sender: PeerId, now: float) -> None:
        """Handle one message; raises ``RemoteProtocolError`` for what breaks the rules."""
        self.revision += 1
        if not isinstance(message, Refusal) and message.fragment >= len(self.shape.mean_bytes):
            raise RemoteProtocolError("unknown fragment", str(message.fragment))
        if not isinstance(message, Refusal | Manifest) and message.what not in (ROUND, STATE, BUFFERS):
            raise RemoteProtocolError("unknown kind", str(message.what))
        if isinstance(message, Fetch | Chunk) and message.what == BUFFERS:
            self.buffers.receive(message, sender, now)
        elif isinstance(message, Fetch):
            self.donor.receive(message, sender, now)
        else:
            self.fetcher.receive(message, sender, now)

    def handle_timer(self, now: float) -> None:
        if self.fetcher.is_idle and self.donor.get_timer() is None:
            return  # a node asks every time that it wakes up
        self.revision += 1
        self.fetcher.handle_timer(now)
        self.donor.handle_timer(now)

    def get_timer(self) -> float | None:
        timers = (self.fetcher.get_timer(), self.donor.get_timer())
        return min((at for at in timers if at is not None), default=None)

    def held(self) -> dict[str, tuple[int, int]]:
        """What is held for others and of others: (now, at most) by the name of the bound."""
        return {**self.donor.held(), **self.fetcher.held()}

    def messages_to_send(self) -> list[tuple[PeerId, CatchUpMessage]]:
        messages, self._out.messages = self._out.messages, []
        return messages

    def next_event(self) -> CatchUpEvent | None:
        return self._out.events.popleft() if self._out.events else None
