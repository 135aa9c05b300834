"""The microbatches that are here, and what crosses between this peer and its neighbours: forwards, gradients,
and word of what was declined or dropped. ``machine`` has the phases and the laws."""

from __future__ import annotations

import hashlib
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, auto
from typing import NamedTuple

from google.protobuf.message import Message

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.protocol.pipeline.neighbours import NeighbourPeer, Neighbours
from p2p_co2.protocol.rounds.assembly import Assembly, pieces
from p2p_co2.system.memory import Buffer
from p2p_co2.wire.envelope import with_data
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.limits import MAX_PIECE_BYTES
from p2p_co2.wire.messages_pb2 import Backward, Declined, Dropped, Forward, MicrobatchKey, Neighbour

RECENT = 4096
"""Microbatches that are over and still known, so that what comes twice counts once."""


class Key(NamedTuple):
    """Which microbatch: the process that made it (random, 64 bits), and its count."""

    owner: int
    number: int

    def on_wire(self) -> MicrobatchKey:
        return MicrobatchKey(owner=self.owner, number=self.number)


@dataclass(frozen=True)
class Place:
    """Where this peer is: its id, its process's number, its stage of how many."""

    me: PeerId
    process: int
    stage: int
    stages: int

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.stages - 1


@dataclass(frozen=True)
class Sizes:
    """``microbatches``: of an inner step; ``window``: at most so many between forward and backward;
    ``room``: held at most, waiting ones too. ``forward_bytes``: of what comes from the stage before, 0 at
    the first. ``backward_bytes``: of the gradient from behind, by the number of its codec, none at the last.
    ``boundaries``: digest of what crosses where."""

    microbatches: int
    window: int
    room: int
    forward_bytes: int
    backward_bytes: Sequence[int]
    boundaries: bytes
    cap_s: float
    """No gradient is waited for longer."""
    up_bytes: int = 0
    """Of a microbatch on the line up: to the next stage, and its gradient back in codec 0."""


class Passage(IntEnum):
    """Of a microbatch here, in order; see ``machine``."""

    RECEIVING = auto()
    WAITING = auto()
    COMPUTING = auto()
    PLACING = auto()
    AWAY = auto()
    RETURNED = auto()
    COMPUTING_BACK = auto()


@dataclass(frozen=True)
class WorkReady:
    """``next_work`` has something that it had not."""


@dataclass(frozen=True)
class DroppedMicrobatch:
    """``key``, which was begun here, counts nowhere from here on to its owner: let go of what is held for
    it."""

    key: Key
    reason: str


@dataclass(frozen=True)
class UselessPayload:
    """What ``sender`` gave us to compute with was no use: ``kind`` of message, and why."""

    sender: PeerId
    kind: type[Message]
    error: RemoteProtocolError


PipelineEvent = WorkReady | DroppedMicrobatch | UselessPayload
PipelineMessage = Neighbour | Forward | Backward | Declined | Dropped


@dataclass
class Microbatch:
    phase: Passage
    sender: PeerId | None = None
    """The stage before; None for our own, and when it is gone."""
    receiver: PeerId | None = None
    """The stage behind, from when it was sent there."""
    path: int = 0
    """Digest of the replicas that it came through and of their inner steps so far."""
    payload: Buffer | None = None
    coming: Assembly | None = None
    sent_at: float = 0.0
    deadline: float = math.inf
    tokens: int = 0
    loss: float = 0.0
    codec: int = 0
    begun_at: float = 0.0
    """When its computing began, forward or back."""
    forward_s: float = 0.0

    @property
    def is_begun(self) -> bool:
        """Whether it is in this inner step."""
        return self.phase > Passage.WAITING


class Past(NamedTuple):
    """Of a microbatch that is over: where it had gone, and when if its gradient was given up. ``declined``:
    it was never taken, nor will be, since another replica may have it by now."""

    receiver: PeerId | None
    given_up: float | None = None
    declined: bool = False


class Transit:
    """``place``: where this peer is; ``sizes``: what is agreed and what it has room for. ``steps``: inner
    steps that it has taken; ``starves_at``: when what was begun or counted has waited long enough for more,
    or for room behind."""

    def __init__(self, place: Place, sizes: Sizes) -> None:
        self._place = place
        self._sizes = sizes
        self.held: OrderedDict[Key, Microbatch] = OrderedDict()
        self.recent: OrderedDict[Key, Past] = OrderedDict()
        self.out: deque[tuple[PeerId, Message]] = deque()
        self.events: deque[PipelineEvent] = deque()
        self.peers = Neighbours(
            place.me, place.stage, place.process, sizes.boundaries, lambda *said: self.out.append(said)
        )
        self.steps = 0
        self.is_closing = False
        self.starves_at = math.inf

    @property
    def in_flight(self) -> int:
        """Begun in this inner step, and neither counted nor dropped."""
        return sum(one.is_begun for one in self.held.values())

    @property
    def has_behind(self) -> bool:
        """Whether anybody may take what is computed: who begins nothing is between steps, and can rest."""
        return self._place.is_last or bool(self.peers.behind())

    # ---- what neighbours send

    def take_forward(
        self, message: Forward, key: Key, sender: PeerId, peer: NeighbourPeer, now: float
    ) -> bool:
        if not peer.is_before:
            raise RemoteProtocolError("wrong stage", "a forward from a stage that is not the one before")
        one = self.held.get(key)
        if one is None:
            if key in self.recent:
                return False
            if self.is_closing or peer.room <= 0:
                if message.offset == 0:
                    self.out.append((sender, Declined(key=key.on_wire(), reason="no room")))
                    self._remember(key, Past(None, declined=True))
                return False
            coming = Assembly(self._sizes.forward_bytes)
            coming.add(message.offset, message.total, message.data)
            peer.used += 1
            one = Microbatch(Passage.RECEIVING, sender, path=message.path, coming=coming)
            one.deadline = now + self._sizes.cap_s
            self.held[key] = one
        elif one.coming is None or one.sender != sender:
            return False  # doubled; or another has sent it too, and one of them lies
        elif not one.coming.add(message.offset, message.total, message.data):
            return False
        if one.coming is not None and one.coming.whole is not None:
            one.phase = Passage.WAITING
            one.payload = one.coming.whole
            one.coming = None
            one.deadline = math.inf
            self.events.append(WorkReady())
        return True

    def take_gradient(
        self, message: Backward, key: Key, sender: PeerId, peer: NeighbourPeer, now: float
    ) -> bool:
        one = self.held.get(key)
        past = self.recent.get(key)
        if past is not None and past.receiver == sender:
            if past.given_up is not None and message.offset + len(message.data) == message.total:
                peer.durations.add(now - past.given_up)  # the next ones are given more time
                peer.is_late = False
                self.recent[key] = Past(sender)
            return False
        if one is None and past is None:
            return False  # of a process that was here before: it waited in the sender's queue
        if one is None or one.receiver != sender:
            raise RemoteProtocolError("wrong sender", "a gradient of what did not go there")
        if one.phase is not Passage.AWAY:
            return False
        if message.tokens != one.tokens or not math.isfinite(message.loss):
            raise RemoteProtocolError("wrong count", f"{message.tokens} tokens of {one.tokens}")
        if message.codec >= len(self._sizes.backward_bytes):
            raise RemoteProtocolError("wrong codec", f"gradient codec {message.codec} is none of this run")
        if one.coming is None:
            one.codec = message.codec
            one.coming = Assembly(self._sizes.backward_bytes[message.codec])
        elif message.codec != one.codec:
            raise RemoteProtocolError("wrong codec", "a gradient's pieces are in two codecs")
        if not one.coming.add(message.offset, message.total, message.data):
            return False
        if one.coming.whole is not None:
            peer.durations.add(now - one.sent_at)
            peer.is_late = False
            peer.drops = 0
            one.payload = one.coming.whole
            one.loss = message.loss
            one.coming = None
            one.phase = Passage.RETURNED
            one.deadline = math.inf
            self._wait_on(sender, peer, now)
            self.events.append(WorkReady())
        return True

    def take_declined(self, key: Key, sender: PeerId, peer: NeighbourPeer, now: float) -> None:
        one = self.held.get(key)
        if one is not None and one.receiver == sender and one.phase is Passage.AWAY and one.coming is None:
            peer.used -= 1
            peer.granted = peer.used  # until it says anew what it has room for
            one.receiver = None
            self.await_room(one, now)
            self.place_all(now)

    def take_dropped(self, key: Key, sender: PeerId, peer: NeighbourPeer) -> None:
        one = self.held.get(key)
        if one is None:
            past = self.recent.get(key)
            if (past is None or past.declined) and peer.is_before:
                peer.used += 1  # it was lost on its way, and what comes of it is not taken
                self._remember(key, Past(None))
        elif one.receiver == sender and one.phase is Passage.AWAY:
            peer.drops += 1
            peer.is_late |= peer.drops > self._sizes.window
            self.drop(key, "dropped behind")
        elif one.sender == sender and not one.is_begun:
            self.drop(key, "dropped before")
        self.grant()

    # ---- what follows

    def await_room(self, one: Microbatch, now: float) -> None:
        """Behind, for what is computed; while this peer goes on, as long as anything is counted."""
        one.phase = Passage.PLACING
        one.deadline = now + self._sizes.cap_s if self.is_closing else math.inf
        self.starves_at = min(self.starves_at, now + 2 * self._sizes.cap_s)

    def place_all(self, now: float) -> None:
        """Send what waits for room behind, as far as there is any."""
        away = Counter(one.receiver for one in self.held.values() if one.phase is Passage.AWAY)
        for key, one in self.held.items():
            if one.phase is not Passage.PLACING or one.payload is None:
                continue
            receiver = self.peers.receiver(away, self._sizes.window)
            peer = self.peers.get(receiver) if receiver is not None else None
            if receiver is None or peer is None:
                return
            peer.used += 1
            away[receiver] += 1
            late_s = peer.late_s(self._sizes.cap_s)
            one.phase = Passage.AWAY
            one.receiver = receiver
            one.sent_at = now
            one.deadline = now + late_s
            view = memoryview(one.payload).cast("B")
            path = _onward(one.path, self._place.process, self.steps)
            for offset, data in pieces(view, MAX_PIECE_BYTES):
                body = Forward(key=key.on_wire(), offset=offset, total=len(view), path=path)
                self.out.append((receiver, with_data(body, data)))

    def _wait_on(self, sender: PeerId, peer: NeighbourPeer, now: float) -> None:
        """A queue that moves is not late, however long it has become: what else is at ``sender`` has its time
        from now, within the cap."""
        by = now + peer.late_s(self._sizes.cap_s)
        cap_s = self._sizes.cap_s
        for one in self.held.values():
            if one.receiver == sender and one.phase is Passage.AWAY:
                one.deadline = min(one.sent_at + cap_s, max(one.deadline, by))

    def drop(self, key: Key, reason: str) -> None:
        """And tell those on both sides of it."""
        one = self.held[key]
        for peer in (one.sender, one.receiver):
            if peer is not None and self.peers.get(peer) is not None:
                self.out.append((peer, Dropped(key=key.on_wire(), reason=reason[:200])))
        self.over(key, one.sent_at if one.phase is Passage.AWAY else None)
        if one.is_begun:  # others may make and drop any number of the rest
            self.events.append(DroppedMicrobatch(key, reason))
        self.events.append(WorkReady())

    def decline(self, key: Key, one: Microbatch, reason: str) -> None:
        if one.sender is not None:
            self.out.append((one.sender, Declined(key=key.on_wire(), reason=reason)))
        self.over(key)

    def over(self, key: Key, given_up: float | None = None) -> None:
        self._remember(key, Past(self.held.pop(key).receiver, given_up))

    def _remember(self, key: Key, past: Past) -> None:
        self.recent[key] = past
        while len(self.recent) > RECENT:
            self.recent.popitem(last=False)

    def grant(self) -> None:
        """Tell those before how much more they may send: what there is room for, alike for all."""
        if not self.is_closing:
            self.peers.grant(self._sizes.room - len(self.held))

    def let_go(self, peer: PeerId) -> None:
        """Of all that is with ``peer`` or from it: it was started anew, is gone, or has lost us."""
        for key, one in list(self.held.items()):
            if one.receiver == peer and one.phase is Passage.AWAY:
                self.drop(key, f"peer {peer} is gone")
            elif one.sender == peer:
                one.sender = None
                if not one.is_begun:
                    self.drop(key, f"peer {peer} is gone")


def _onward(path: int, *here: int) -> int:
    """The path of what has come ``path`` and goes on from ``here``."""
    said = b"".join(number.to_bytes(8, "big") for number in (path, *here))
    return int.from_bytes(hashlib.sha256(said).digest()[:8], "big")
