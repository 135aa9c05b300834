"""The peers of the stages before and behind: how much each may send, and who gets the next microbatch.

A receiver grants each sender room for so many more microbatches. Grants are cumulative, so that one that is
lost or comes twice does no harm; both sides count what was used since they met. A meeting has a number: who
lost the other, or was started anew, begins another one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from p2p_co2.errors import Offence, RemoteProtocolError
from p2p_co2.protocol.pipeline.routes import Rates, shares
from p2p_co2.protocol.rounds.deadline import Durations
from p2p_co2.wire.heartbeat import SILENCE_FLOOR_S
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.messages_pb2 import Neighbour

MAX_NEIGHBOURS = 64
"""Peers of one neighbouring stage."""
_NUMBERS = 1 << 64


@dataclass
class NeighbourPeer:
    """One of them. ``is_before``: it sends us forwards; else we send it ours. ``granted``: how many may be
    sent in all since we met; ``used``: how many were. ``ours``, ``theirs``: each side's number of the
    meeting, 0 for its until it has said what crosses.

    ``durations``: from a forward that went there to its gradient. ``is_late``: one was given up, and none
    has come since. ``drops``: how many it has dropped since one came; more than a window of them is no death
    behind it."""

    is_before: bool
    ours: int
    theirs: int = 0
    rate: float = 0.0
    granted: int = 0
    used: int = 0
    durations: Durations = field(default_factory=Durations)
    is_late: bool = False
    drops: int = 0

    @property
    def room(self) -> int:
        return self.granted - self.used

    def late_s(self, cap_s: float) -> float:
        """After this a gradient from it is late."""
        return self.durations.deadline_s(cap_s, SILENCE_FLOOR_S, cap_s)


class Neighbours:
    """``me``, ``stage``: this peer's; ``boundaries``: digest of what crosses where; ``say`` sends a
    message."""

    def __init__(
        self,
        me: PeerId,
        stage: int,
        process: int,
        boundaries: bytes,
        say: Callable[[PeerId, Neighbour], None],
    ) -> None:
        self._me = me
        self._stage = stage
        self._boundaries = boundaries
        self._say = say
        self._meeting = process
        self._peers: dict[PeerId, NeighbourPeer] = {}
        self._shares: Mapping[PeerId, float] = {}
        self.rate = 0.0
        """Tokens a second of this peer, as others are told."""

    def __len__(self) -> int:
        return len(self._peers)

    def get(self, peer: PeerId) -> NeighbourPeer | None:
        return self._peers.get(peer)

    def join(self, peer: PeerId, stage: int) -> bool:
        """``peer`` is there, in ``stage``; only the stages beside ours matter. Whether that is new."""
        side = self.before() if stage < self._stage else self.behind()
        if abs(stage - self._stage) != 1 or peer in self._peers or len(side) >= MAX_NEIGHBOURS:
            return False
        self._meeting = (self._meeting + 1) % _NUMBERS
        self._peers[peer] = NeighbourPeer(stage < self._stage, self._meeting)
        self.introduce(peer)
        return True

    def lose(self, peer: PeerId) -> bool:
        """Whether it was one."""
        return self._peers.pop(peer, None) is not None

    def hear(self, said: Neighbour, sender: PeerId) -> bool:
        """What a neighbour says of itself; True if it has met us anew: what it had of us is gone. One of
        another stage than its record's has moved, and is met once its record says so. Raises
        ``RemoteProtocolError``; then nothing is taken from it."""
        peer = self._peers[sender]
        if said.boundaries != self._boundaries:
            peer.theirs = 0
            raise RemoteProtocolError("other boundaries", f"{said.boundaries[:8].hex()} crosses there")
        if said.stage != (self._stage - 1 if peer.is_before else self._stage + 1):
            return False
        if not math.isfinite(said.tokens_per_s) or said.tokens_per_s < 0:
            raise RemoteProtocolError(Offence.IMPOSSIBLE_RATE, f"{said.tokens_per_s} tokens a second")
        peer.rate = said.tokens_per_s
        is_new = said.meeting != peer.theirs
        was_met = peer.theirs != 0
        peer.theirs = said.meeting
        if is_new:
            peer.granted = peer.used = 0
            self.introduce(sender)
        if not peer.is_before:
            peer.granted = max(peer.granted, said.granted)
        return is_new and was_met

    def before(self) -> dict[PeerId, NeighbourPeer]:
        return {peer: known for peer, known in self._peers.items() if known.is_before}

    def behind(self) -> dict[PeerId, NeighbourPeer]:
        return {peer: known for peer, known in self._peers.items() if not known.is_before}

    def grant(self, free: int) -> None:
        """Let those before send ``free`` more in all, those with the least room first."""
        before = self.before()
        told: set[PeerId] = set()
        for _ in range(free - sum(peer.room for peer in before.values()) if before else 0):
            chosen = min(before, key=lambda peer: (before[peer].room, peer))
            before[chosen].granted += 1
            told.add(chosen)
        for peer in sorted(told):  # the same run gives the same history in any process
            self.introduce(peer)

    def introduce(self, peer: PeerId) -> None:
        """Say what this peer is, and what ``peer`` may send."""
        known = self._peers[peer]
        granted = known.granted if known.is_before else 0
        said = Neighbour(stage=self._stage, meeting=known.ours, boundaries=self._boundaries, granted=granted)
        said.tokens_per_s = self.rate
        self._say(peer, said)

    def draw(self, peers: Rates, seed: bytes) -> None:
        """Routes of a new round; ``peers``: tokens a second of this stage's replicas, this one's too."""
        behind = {peer: known.rate for peer, known in self.behind().items()}
        self._shares = shares(self._me, peers, behind, seed)
        for peer, known in self._peers.items():
            known.is_late = False
            self.introduce(peer)  # our rate has changed, and what was said before may have been lost

    def receiver(self, away: Mapping[PeerId | None, int], window: int) -> PeerId | None:
        """Who gets the next microbatch: of those with room the one where it would wait least, beyond that
        peer's share of the window. ``away``: how many are there. A share alone would let all wait for the
        slowest replica while others wait for an inner step to be drained. One that is late is left out for
        the rest of the round, unless all are: what it does not answer holds an inner step up each time."""

        def wait(item: tuple[PeerId, NeighbourPeer]) -> tuple[float, PeerId]:
            peer, known = item
            beyond = away.get(peer, 0) + 1 - window * self._shares.get(peer, 0.0)
            return beyond / (known.rate or 1.0), peer

        behind = self.behind()
        answering = {peer: known for peer, known in behind.items() if not known.is_late} or behind
        room = [item for item in answering.items() if item[1].room > 0]
        return min(room, key=wait)[0] if room else None
