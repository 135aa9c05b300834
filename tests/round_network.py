"""A small world in virtual time for rounds machines: seeded latency, loss, duplication, reordering and
crashes.

Law: the same seed gives the same history. Every message has its own random delay, so reordering is the rule
even on one link. The tensor side is a toy: the mean of a part is the weighted sum of the slices' bytes,
modulo 256, so equal contributors give equal bytes and any difference shows.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from google.protobuf.message import Message

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.protocol.rounds import (
    Aborted,
    Began,
    CheckWanted,
    Committed,
    FellBehind,
    Likeness,
    Offer,
    OutcomeWithoutBytes,
    PayloadShape,
    PeerView,
    ReduceJob,
    ReduceWanted,
    Rounds,
    RoundsEvent,
)
from p2p_co2.wire.identity import Identity, PeerId
from p2p_co2.wire.limits import MAX_MESSAGE_BYTES
from p2p_co2.wire.messages_pb2 import Contributor, Decision, Member, Outcome, RoundKey
from tests.certificates import certify

RUN = hashlib.sha256(b"a run").digest()
Ending = Committed | Aborted | OutcomeWithoutBytes | FellBehind


def make_identity(seed: int) -> Identity:
    return Identity(Ed25519PrivateKey.from_private_bytes(hashlib.sha256(f"peer {seed}".encode()).digest()))


def forged_commit(
    identity: Identity, round_: int, digest: bytes, members: list[PeerId], attempt: bytes = bytes(16),
    run: bytes = RUN, blocks: int = 16, others: Sequence[Identity] = (),
) -> Decision:  # fmt: skip
    """A commit of a round that never was, signed by ``identity`` and ``others``; a certificate if it needs no
    more."""
    outcome = Outcome(
        key=RoundKey(fragment=0, round=round_, attempt=attempt), run=run, state_digest=digest,
        coordinator=identity.peer_id, live=len(members),
    )  # fmt: skip
    outcome.members.extend(Member(peer=name, weight=1.0, offer_id=bytes(8)) for name in sorted(members))
    part = outcome.parts.add(start_block=0, stop_block=blocks, digest=hashlib.sha256(b"a lie").digest())
    part.contributors.extend(Contributor(peer=name, weight=1.0) for name in sorted(members))
    return certify(outcome, identity, *others)


def contributors_of(event: Committed) -> list[dict[str, float]]:
    """By part of a committed mean, the weights of those whose slices are in it."""
    outcome = Outcome.FromString(Decision.FromString(event.decision).outcome)
    return [{one.peer: one.weight for one in part.contributors} for part in outcome.parts]


def toy_mean(job: ReduceJob) -> bytes:
    """The weighted sum of the slices' bytes, modulo 256."""
    width = len(job.slices[0].data)
    total = bytearray(width)
    for piece in job.slices:
        scale = int(piece.weight)
        for index, value in enumerate(piece.data[:64]):
            total[index] = (total[index] + scale * value) % 256
    return bytes(total)


@dataclass
class Faults:
    """Probabilities per message, and the range of its delay in seconds."""

    loss: float = 0.0
    duplication: float = 0.0
    latency_s: tuple[float, float] = (0.01, 0.05)


@dataclass
class Peer:
    name: PeerId
    identity: Identity
    machine: Rounds
    alive: bool = True
    states: dict[int, tuple[int, bytes]] = field(default_factory=dict)
    """Version and digest per fragment."""

    @property
    def version(self) -> int:
        return self.states[0][0]


class Network:
    """``count`` peers that all know each other, at version 0 of every fragment."""

    def __init__(
        self,
        count: int,
        seed: int = 0,
        faults: Faults | None = None,
        *,
        shape: PayloadShape | None = None,
    ) -> None:
        self.random = random.Random(seed)
        self.faults = faults or Faults()
        self.shape = shape or PayloadShape(8, (16,))
        self.now = 1000.0
        self.peers: dict[PeerId, Peer] = {}
        for index in range(count):
            identity = make_identity(index)
            machine = Rounds(identity, RUN, self.shape)
            self.peers[identity.peer_id] = Peer(identity.peer_id, identity, machine)
        self.names = sorted(self.peers)
        self.events: list[tuple[PeerId, RoundsEvent]] = []
        self.began_at: dict[int, float] = {}
        """By round, when the last attempt at it began."""
        self.refused: list[tuple[PeerId, PeerId, RemoteProtocolError]] = []
        self.sent: list[tuple[PeerId, PeerId, Message]] = []
        self.archive: dict[tuple[PeerId, int, int], Committed] = {}
        self.on_send: Callable[[PeerId, PeerId, Message], bool] = lambda source, to, message: True
        """Return False to lose the message; may crash the sender."""
        self.on_reduce: Callable[[PeerId, ReduceJob], bool] = lambda peer, job: True
        self.finds_itself: Callable[[PeerId, CheckWanted], bool] = lambda peer, job: True
        """Whether a peer finds its slice in a mean."""
        self.notices = False
        """Whether heartbeats move those that most others are beyond."""
        self._late: set[PeerId] = set()
        self.detect_s = 3.0
        self.reduce_s = 0.01
        self.offered: set[PeerId] = set()
        self.planned: set[PeerId] = set()
        self.offer_ids: dict[PeerId, bytes] = {}
        """Of each one's newest offer."""
        self.busy: set[PeerId] = set()
        self.offering = True
        self.done: set[PeerId] = set()
        """Who says that it has nothing more to offer, and offers nothing."""
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self.uploads = dict.fromkeys(self.names, 1e6)
        for name in self.names:
            for fragment in range(len(self.shape.blocks)):
                self.set_state(name, fragment, 0, hashlib.sha256(b"start").digest())
        self.tell_everybody()

    # ---- the world

    def at(self, time: float, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._queue, (time, self._count, action))

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self._queue and self._queue[0][0] <= end:
            self.now, _, action = heapq.heappop(self._queue)
            action()
        self.now = end

    def run_until_settled(self, limit_s: float = 5000.0) -> None:
        """Until every surviving peer that offered has an ending."""
        end = self.now + limit_s
        while self._queue and self._queue[0][0] <= end and self.undecided():
            self.now, _, action = heapq.heappop(self._queue)
            action()

    def undecided(self) -> list[PeerId]:
        ended = {name for name, event in self.events if isinstance(event, Ending)}
        return [
            name
            for name in self.names
            if self.peers[name].alive and name in (self.offered | self.planned) - ended
        ]

    def crash(self, name: PeerId) -> None:
        """The peer stops; the others' membership sees it after ``detect_s``."""
        if not self.peers[name].alive:
            return
        self.peers[name].alive = False
        self.at(self.now + self.detect_s, self.tell_everybody)

    def restart(self, name: PeerId, period_s: float) -> None:
        """The peer comes back with its state and no memory of its rounds, and offers again."""
        peer = self.peers[name]
        if peer.alive:
            return
        peer.machine = Rounds(peer.identity, RUN, self.shape)
        peer.alive = True
        self.busy.discard(name)
        self.set_state(name, 0, *peer.states[0])
        self.tell_everybody()
        self._offer_again(name, period_s)

    def tell_everybody(self) -> None:
        live = {name: self._view(name) for name in self.names if self.peers[name].alive}
        for name in live:
            self.peers[name].machine.set_peers(live, self.now)
            self.pump(name)

    def _view(self, name: PeerId) -> PeerView:
        states = self.peers[name].states
        versions, peer = tuple(states[f][0] for f in range(len(states))), self.peers[name].machine
        finished = frozenset(states if name in self.done else ())
        return PeerView(
            self.uploads[name], not finished, versions, finished=finished,
            counted=peer.swarm.voters.has_worked(name),
        )  # fmt: skip

    def mislead(self, name: PeerId, share: float) -> None:
        """Membership of one peer wrongly drops a share of the others."""
        seen = [other for other in self.names if other == name or self.random.random() >= share]
        live = {other: self._view(other) for other in seen if self.peers[other].alive}
        if self.peers[name].alive:
            self.peers[name].machine.set_peers(live, self.now)
            self.pump(name)

    def keep_offering(self, period_s: float) -> None:
        """Everybody offers the round after its version, again and again; catch-up copies a live peer's
        state; heartbeats tell where all are."""
        self.at(self.now + 2.0, self._tell_regularly)
        for name in self.names:
            self.at(
                self.now + self.random.uniform(0, period_s),
                lambda name=name: self._offer_again(name, period_s),
            )  # type: ignore[misc]

    def stop_offering(self) -> None:
        self.offering = False

    def _tell_regularly(self) -> None:
        self.tell_everybody()
        if self.notices:
            self._notice()
        self.at(self.now + 2.0, self._tell_regularly)

    def _notice(self) -> None:
        """As the node does: who sees half of the others beyond it for some seconds loads their state."""
        versions = sorted((peer.version for peer in self.peers.values() if peer.alive), reverse=True)
        if not versions:
            return
        newest = versions[(len(versions) - 1) // 2]
        late = {name for name in self.names if self.peers[name].version < newest}
        donor = next(peer for peer in self.peers.values() if peer.version == newest)
        for name in late & self._late:
            self.set_state(name, 0, *donor.states[0])
            self.pump(name)
        self._late = late

    def _offer_again(self, name: PeerId, period_s: float) -> None:
        peer = self.peers[name]
        if not peer.alive:
            return
        if name not in self.busy and name not in self.done and self.offering:
            self.busy.add(name)
            self.offer(name, peer.version + 1)
        self.at(self.now + period_s, lambda: self._offer_again(name, period_s))

    # ---- one peer

    def payload(self, name: PeerId, fragment: int = 0, round_: int = 1) -> bytes:
        seed = hashlib.sha256(f"{name}/{fragment}/{round_}".encode()).digest()
        size = self.shape.payload_bytes(fragment)
        return (seed * (size // 32 + 1))[:size]

    def weight(self, name: PeerId) -> float:
        return float(1 + self.names.index(name))

    def offer(self, name: PeerId, round_: int = 1, fragment: int = 0, *, is_last: bool = False) -> None:
        digest = self.peers[name].states[fragment][1]
        self.offered.add(name)
        payload, weight = self.payload(name, fragment, round_), self.weight(name)
        self._count += 1
        named = self._count.to_bytes(8, "big")
        self.offer_ids[name] = named
        offer = Offer(fragment, round_, round_ - 1, digest, payload, weight, is_last, named)
        self.peers[name].machine.offer(offer, self.now)
        self.pump(name)

    def offer_all(self, spread_s: float = 0.2, round_: int = 1, fragment: int = 0) -> None:
        for name in self.names:
            if self.peers[name].alive:
                self.planned.add(name)
                at = self.now + self.random.uniform(0, spread_s)
                self.at(at, lambda name=name: self._offer_if_alive(name, round_, fragment))  # type: ignore[misc]

    def _offer_if_alive(self, name: PeerId, round_: int, fragment: int) -> None:
        if self.peers[name].alive:
            self.offer(name, round_, fragment)

    def deliver(self, source: PeerId, to: PeerId, message: Message) -> None:
        if not self.peers[to].alive:
            return
        try:
            self.peers[to].machine.receive(message, source, self.now)
        except RemoteProtocolError as error:
            self.refused.append((to, source, error))
        self.pump(to)

    def pump(self, name: PeerId) -> None:
        peer = self.peers[name]
        for to, message in peer.machine.messages_to_send():
            if not peer.alive:
                break
            assert message.ByteSize() <= MAX_MESSAGE_BYTES - 256
            self._send(name, to, message)
        while peer.alive and (event := peer.machine.next_event()) is not None:
            self._event(peer, event)
        timer_at = peer.machine.get_timer()
        if peer.alive and timer_at is not None:
            self.at(max(timer_at, self.now), lambda: self._timer(peer))

    def _timer(self, peer: Peer) -> None:
        timer_at = peer.machine.get_timer()
        if peer.alive and timer_at is not None and timer_at <= self.now:
            peer.machine.handle_timer(self.now)
            later = peer.machine.get_timer()
            assert later is None or later > self.now, "a timer that fires for ever"
            self.pump(peer.name)

    def _send(self, source: PeerId, to: PeerId, message: Message) -> None:
        self.sent.append((source, to, message))
        if to not in self.peers:
            return
        if not self.on_send(source, to, message) or self.random.random() < self.faults.loss:
            return
        copies = 2 if self.random.random() < self.faults.duplication else 1
        for _ in range(copies):
            delay_s = self.random.uniform(*self.faults.latency_s)
            self.at(self.now + delay_s, lambda: self.deliver(source, to, message))

    def _event(self, peer: Peer, event: RoundsEvent) -> None:
        self.events.append((peer.name, event))
        if isinstance(event, Began):
            self.began_at[event.round] = self.now
        if isinstance(event, Ending) and getattr(event, "ends_offer", True):
            self.busy.discard(peer.name)
        if isinstance(event, ReduceWanted) and self.on_reduce(peer.name, event.job):
            job = event.job
            self.at(self.now + self.reduce_s, lambda: self._reduce(peer, job))
        elif isinstance(event, CheckWanted):
            self.at(self.now + self.reduce_s, lambda: self._check(peer, event))
        elif isinstance(event, Committed):
            self.archive[(peer.name, event.fragment, event.round)] = event
            self._apply(peer, event.fragment, event.round, event.mean)
        elif isinstance(event, OutcomeWithoutBytes):
            self._replay(peer, event, tries=5)
        elif isinstance(event, FellBehind):
            self._catch_up(peer, event)

    def _replay(self, peer: Peer, event: OutcomeWithoutBytes, tries: int) -> None:
        """Fetch a mean from a donor; one that has only just committed may not hold it yet."""
        for donor in event.donors:
            held = self.archive.get((donor, event.fragment, event.round))
            if held is not None and self.peers[donor].alive:
                self._apply(peer, event.fragment, event.round, held.mean)
                return
        if tries:
            self.at(self.now + 0.3, lambda: self._replay(peer, event, tries - 1))
        elif peer.version < event.round:
            peer.machine.forget_outcome(event.fragment, event.round)
            self.pump(peer.name)

    def set_state(self, name: PeerId, fragment: int, version: int, digest: bytes) -> None:
        self.peers[name].states[fragment] = (version, digest)
        self.peers[name].machine.set_state(fragment, version, digest)

    def _catch_up(self, peer: Peer, event: FellBehind) -> None:
        """Copy the state of the first live donor that holds what the majority holds, or more."""
        for donor in event.donors:
            other = self.peers.get(donor)
            if other is None or not other.alive or other is peer:
                continue
            version, digest = other.states[event.fragment]
            if version > event.version or (version == event.version and event.digest in (b"", digest)):
                self.set_state(peer.name, event.fragment, version, digest)
                return
        peer.machine.forget_outcome(event.fragment, event.version)

    def _apply(self, peer: Peer, fragment: int, round_: int, mean: bytes) -> None:
        version, digest = peer.states[fragment]
        if version == round_ - 1:
            self.set_state(peer.name, fragment, round_, hashlib.sha256(digest + mean).digest())

    def _reduce(self, peer: Peer, job: ReduceJob) -> None:
        if peer.alive:
            peer.machine.reduced(job, toy_mean(job), self.now)
            self.pump(peer.name)

    def _check(self, peer: Peer, job: CheckWanted) -> None:
        if peer.alive:
            is_good = self.finds_itself(peer.name, job)
            peer.machine.checked(job, Likeness(1.0 if is_good else -1.0, 1.0, 1.0), self.now)
            self.pump(peer.name)

    # ---- what happened

    def endings(self, round_: int = 1) -> dict[PeerId, Ending]:
        """The last ending of every peer for a round."""
        return {
            name: event
            for name, event in self.events
            if isinstance(event, Committed | Aborted | OutcomeWithoutBytes) and event.round == round_
        }

    def committed(self, round_: int = 1) -> dict[PeerId, Committed]:
        return {name: event for name, event in self.endings(round_).items() if isinstance(event, Committed)}

    def check_agreement(self, round_: int = 1) -> None:
        """All who committed hold equal bytes from equal contributors, each counted once, who really sent."""
        committed = [
            event for _, event in self.events if isinstance(event, Committed) and event.round == round_
        ]
        for event in committed:
            assert event.mean == committed[0].mean
            outcome, first = (Decision.FromString(one.decision).outcome for one in (event, committed[0]))
            assert outcome == first
            for part in Outcome.FromString(outcome).parts:
                peers = [one.peer for one in part.contributors]
                assert peers == sorted(set(peers))
                assert set(peers) <= self.offered
                slices = bytearray(8 * (part.stop_block - part.start_block))
                if self.shape.block_bytes == 8:
                    for peer, weight in ((PeerId(one.peer), one.weight) for one in part.contributors):
                        assert weight == self.weight(peer)
                        own = self.payload(peer, event.fragment, round_)
                        piece = own[8 * part.start_block : 8 * part.stop_block]
                        for index, value in enumerate(piece[:64]):
                            slices[index] = (slices[index] + int(weight) * value) % 256
                    assert event.mean[8 * part.start_block : 8 * part.stop_block] == slices
