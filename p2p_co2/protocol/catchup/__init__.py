"""Catching up: a late peer fetches rounds that it missed, or a fragment's whole agreed state, from its
donors.

A machine without I/O or clock, both sides in one: the donor answers ``Fetch`` with a signed ``Manifest`` of
chunk digests and then with chunks; the peer that is behind asks several donors, goes with what most of them
promise, takes chunks from each as fast as it gives them, and checks every one before it keeps it.

Laws: nothing is allocated on a donor's word (sizes must equal what this peer computes from its own model); a
wrong chunk never reaches the caller; every wait has a timer; a donor that is slow, refuses or lies is
replaced and what the others gave is kept. What a donor holds for others is bounded: ``history`` for past
rounds, ``donor`` for states.

Source of the idea: several donors, digests and resume are what users of hivemind ask for (its issues 169 and
415); the choice of chunks is that of a swarm download without rarest-first, since every donor has them all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeGuard

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.protocol.catchup.awake import Awake
from p2p_co2.protocol.catchup.buffers import BUFFERS, FIRST_REQUEST, Buffers
from p2p_co2.protocol.catchup.donor import Donor
from p2p_co2.protocol.catchup.fetcher import Fetcher
from p2p_co2.protocol.catchup.goals import (
    ROUND,
    STATE,
    CatchUpEvent,
    CatchUpMessage,
    Disputed,
    DonorRefused,
    ExportWanted,
    Fetched,
    FetchFailed,
    Goal,
    Loading,
    Outbox,
    Shape,
    Vouch,
    chunk_bytes_of,
    split_donors,
)
from p2p_co2.protocol.catchup.kept import Store
from p2p_co2.protocol.catchup.manifest import chunk_at, chunk_count, chunk_digest
from p2p_co2.protocol.wire.identity import Identity, PeerId
from p2p_co2.protocol.wire.messages_pb2 import Chunk, Decision, Fetch, Manifest, Refusal
from p2p_co2.system.memory import Buffer, Joined

__all__ = [
    "ROUND",
    "STATE",
    "CatchUp",
    "CatchUpEvent",
    "CatchUpMessage",
    "Disputed",
    "DonorRefused",
    "ExportWanted",
    "FetchFailed",
    "Fetched",
    "Goal",
    "Loading",
    "Shape",
    "Store",
    "chunk_at",
    "chunk_bytes_of",
    "chunk_count",
    "chunk_digest",
    "split_donors",
]


def is_about_buffers(message: CatchUpMessage) -> TypeGuard[Fetch | Chunk | Refusal]:
    """Whether ``Buffers`` is to have it."""
    if isinstance(message, Refusal):
        return message.request >= FIRST_REQUEST
    return message.what == BUFFERS and not isinstance(message, Manifest)


class CatchUp:
    """Both sides behind the verbs of a machine. ``run`` is the run's digest; ``is_everywhere``: see
    ``History``."""

    def __init__(
        self,
        identity: Identity,
        run: bytes,
        shape: Shape,
        is_everywhere: Callable[[int, int], bool] | None = None,
    ) -> None:
        self.shape = shape
        self._fragments = len(shape.mean_bytes)
        self._out = Outbox()
        self.donor = Donor(identity, run, shape, self._out)
        self.donor.history.is_everywhere = is_everywhere or self.donor.history.is_everywhere
        self._fetcher = Fetcher(run, shape, self._out)
        self.buffers = Buffers(self._out)
        self._busy_at = -math.inf
        """When a round's bytes came last while anything was fetched."""
        self.awake = Awake()
        """By which all that is loaded is judged: the only clock that the fetcher knows."""
        self.revision = 0
        """Grows with every call that may have made anything longer that is held."""

    def moves(self, now: float, within_s: float) -> bool:
        """Whether a chunk of what others hold came to this peer of late, or one of what we hold was sent to
        others: of a state or of a round that somebody missed. A round's bytes go before these."""
        came = self.awake.seen(now) - max(self._fetcher.got_at, self._busy_at) <= within_s
        return came or bool(self.donor.takers(now, within_s))

    def keep_in(self, store: Store) -> None:
        """From now on the chunks of states go to ``store``, and come from it after a restart."""
        self._fetcher.store = store

    def ask_swarm(self, vouch: Vouch) -> None:
        """From now on a state is loaded only if ``vouch`` does not contradict its donor, and rather one for
        which others vouch."""
        self._fetcher.vouch = vouch

    def want(self, goal: Goal, now: float) -> None:
        """Start fetching; ends in ``Fetched`` or ``FetchFailed``."""
        self.revision += 1
        self._fetcher.want(goal, self.awake.of(now))

    def fetching(self, fragment: int) -> bool:
        return self._fetcher.fetching(fragment)

    def forget(self, fragment: int, now: float) -> None:
        """What is being fetched of ``fragment`` is wanted no more: nothing tells of its end."""
        self.revision += 1
        self._fetcher.forget(fragment, self.awake.of(now))

    def add_donors(self, fragment: int, peers: Sequence[PeerId], now: float) -> None:
        """``peers`` can serve what is being fetched of ``fragment``, too."""
        self.revision += 1
        self._fetcher.add_donors(fragment, peers, self.awake.of(now))

    def is_busy(self, donor: PeerId, now: float) -> None:
        """A round's bytes came from ``donor``: it is not silent, and its chunks come after them."""
        self._fetcher.is_busy(donor, self.awake.of(now))
        self._busy_at = self._busy_at if self._fetcher.is_idle else self.awake.of(now)

    def forget_donor(self, peer: PeerId, now: float) -> None:
        """``peer`` is gone: goals that wait for it go on with another donor."""
        self.revision += 1
        self._fetcher.forget_donor(peer, self.awake.of(now))

    def quarantine(self, peer: PeerId, reason: str, now: float) -> None:
        """What ``peer`` gave was whole and yet not the agreed state: ask others."""
        self.revision += 1
        self._fetcher.quarantine(peer, self.awake.of(now), reason)

    def moved(self, fragment: int, version: int) -> None:
        """This peer's state of a fragment is at ``version`` now."""
        self.donor.versions[fragment] = version

    def remember(self, fragment: int, version: int, decision: Decision, mean: Buffer) -> None:
        """Keep a committed round for replay, within the memory bound."""
        self.revision += 1
        self.donor.history.remember(fragment, version, decision, mean)

    def turned_back(self, fragment: int) -> None:
        """This peer goes on from an older state of another history: what it holds of its own is given to
        nobody any more."""
        self.donor.turned_back(fragment)

    def given(self, fragment: int) -> int:
        """The newest version, state or round, of which this peer has sent anybody a chunk; -1 for none."""
        return self.donor.given[fragment]

    def exported(
        self,
        fragment: int,
        version: int,
        data: bytes | Joined,
        digest: bytes,
        chunk_digests: list[bytes],
        now: float,
    ) -> None:
        """The answer to ``ExportWanted``; ``chunk_digests`` of ``data``'s chunks, in order."""
        self.revision += 1
        self.donor.exported(fragment, version, data, digest, chunk_digests, now)

    def receive(self, message: CatchUpMessage, sender: PeerId, now: float) -> None:
        """Handle one message; raises ``RemoteProtocolError`` for what breaks the rules."""
        self.revision += 1
        if not isinstance(message, Refusal) and message.fragment >= self._fragments:
            raise RemoteProtocolError("unknown fragment", str(message.fragment))
        if is_about_buffers(message):
            self.buffers.receive(message, sender, now)
        elif isinstance(message, Fetch):
            self.donor.receive(message, sender, now)
        else:
            self._fetcher.receive(message, sender, self.awake.of(now))

    def handle_timer(self, now: float) -> None:
        self.buffers.handle_timer(now)
        if self._fetcher.is_idle and self.donor.get_timer() is None:
            return  # a node asks every time that it wakes up
        self.revision += 1
        self._fetcher.handle_timer(self.awake.of(now))
        self.donor.handle_timer(now)

    def get_timer(self) -> float | None:
        fetcher_at = self._fetcher.get_timer()
        fetcher_at = fetcher_at if fetcher_at is None else self.awake.until(fetcher_at)
        timers = (fetcher_at, self.donor.get_timer(), self.buffers.get_timer())
        return min((at for at in timers if at is not None), default=None)

    def held(self) -> dict[str, tuple[int, int]]:
        """What is held for others and of others: (now, at most) by the name of the bound."""
        return {**self.donor.held(), **self._fetcher.held()}

    def messages_to_send(self) -> list[tuple[PeerId, CatchUpMessage]]:
        messages, self._out.messages = self._out.messages, []
        return messages

    def next_event(self) -> CatchUpEvent | None:
        return self._out.events.popleft() if self._out.events else None
