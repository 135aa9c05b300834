"""Microbatches on their way through the stages: a machine without tensors, I/O or clock.

A microbatch begins at a peer of stage 0 and goes through one replica of each stage, and back the same way.
At each replica:

    RECEIVING -> WAITING -> COMPUTING -> PLACING -> AWAY -> RETURNED -> COMPUTING_BACK -> counted
                 (whole)    (forward)   (no room    (at the  (gradient   (backward)
                                         there yet)  next)    is here)

The first stage begins at COMPUTING; the last counts after COMPUTING. From everywhere a microbatch may be
dropped: it is counted nowhere from here to its owner.

    machine.receive(message, sender, now)   handle_timer(now)  get_timer()  messages_to_send()  next_event()
    work = machine.next_work(now)           what the training thread computes next, or None
    machine.forwarded(...), counted(...), stepped(...)          what has come of it

Laws: **once**: at most one replica of a stage counts a microbatch. It goes to a second one only if the first
has said that it did not take it (``Declined``); any other doubt drops it. **Suffix**: a replica that counts a
microbatch knows that every stage behind has, since its gradient came through them. A gradient is taken only
from the peer that the forward went to. Inner steps are drained: a replica begins no more than
``microbatches`` until all that it began has been counted or dropped, and then it steps. All that is held has
a bound (``Sizes.room``), and everything that waits for one peer has a deadline. ``docs/design/stages.md`` has
the reasons, and which gradients are urgent.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, IntEnum, auto
from typing import Any, NamedTuple

from google.protobuf.message import Message

from p2p_co2.errors import LocalProtocolError, RemoteProtocolError
from p2p_co2.protocol.pipeline.neighbours import MAX_NEIGHBOURS, NeighbourPeer, Neighbours
from p2p_co2.protocol.pipeline.routes import Rates
from p2p_co2.protocol.rounds.assembly import Assembly, pieces
from p2p_co2.system.memory import Buffer
from p2p_co2.wire.envelope import with_data
from p2p_co2.wire.heartbeat import SILENCE_FLOOR_S
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.limits import MAX_PIECE_BYTES
from p2p_co2.wire.messages_pb2 import Backward, Declined, Dropped, Forward, MicrobatchKey, Neighbour

WINDOW = 6
"""Times the stages from here to the last: microbatches between forward and backward. One of each is enough
where links take no time; latency needs the rest."""
RECENT = 4096
"""Microbatches that are over and still known, so that what comes twice counts once."""


def window_of(stage: int, stages: int, microbatches: int) -> int:
    """How many microbatches of an inner step may be between forward and backward at a replica of
    ``stage``."""
    return min(microbatches, WINDOW * (stages - stage))


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
    """Of a microbatch here, in order; see above."""

    RECEIVING = auto()
    WAITING = auto()
    COMPUTING = auto()
    PLACING = auto()
    AWAY = auto()
    RETURNED = auto()
    COMPUTING_BACK = auto()


class Do(Enum):
    """What the training thread is to do."""

    FORWARD = auto()
    BACKWARD = auto()
    STEP = auto()


@dataclass(frozen=True)
class Work:
    """``payload``: the bytes from the stage before, or those of the gradient, in ``codec``. It is None at
    the first stage, which draws its own. ``sender``: the peer that sent them. ``tokens``, ``loss``: with a
    gradient, what it is the gradient of. ``is_urgent``: others wait for the gradient that this sends.
    ``heir``: whose gradient goes after it and may carry what its encoding leaves out."""

    do: Do
    key: Key | None = None
    payload: Buffer | None = None
    tokens: int = 0
    loss: float = 0.0
    sender: PeerId | None = None
    codec: int = 0
    is_urgent: bool = False
    heir: Key | None = None


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
class _Microbatch:
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


class _Past(NamedTuple):
    """Of a microbatch that is over: where it had gone, and when if its gradient was given up. ``declined``:
    it was never taken, nor will be, since another replica may have it by now."""

    receiver: PeerId | None
    given_up: float | None = None
    declined: bool = False


class Pipeline:
    """``place``: where this peer is; ``sizes``: what is agreed and what it has room for."""

    def __init__(self, place: Place, sizes: Sizes) -> None:
        self._place = place
        self._sizes = sizes
        self._peers = Neighbours(
            place.me, place.stage, place.process, sizes.boundaries, lambda *said: self._out.append(said)
        )
        self._held: OrderedDict[Key, _Microbatch] = OrderedDict()
        self._recent: OrderedDict[Key, _Past] = OrderedDict()
        self._out: deque[tuple[PeerId, Message]] = deque()
        self._events: deque[PipelineEvent] = deque()
        self._last_phase = Passage.COMPUTING if place.is_last else Passage.COMPUTING_BACK
        self._counted = 0
        self._made = 0
        self._steps = 0
        self._computing_s = 0.0
        self.is_closing = False
        self._is_starved = False
        self._starves_at = math.inf
        """When what was begun or counted has waited long enough for more, or for room behind."""
        self.upload_bytes_per_s = 0.0
        """What the line up carries, as the shell has measured it; 0: not known."""

    # ---- what the shell says

    def join(self, peer: PeerId, stage: int) -> None:
        """``peer`` is live and in ``stage``, as its signed record says; only neighbouring stages matter."""
        known = self._peers.get(peer)
        if known is not None and stage != self._place.stage + (-1 if known.is_before else 1):
            self.lose(peer)  # it has moved
        if self._peers.join(peer, stage):
            self._events.append(WorkReady())  # for it
        self._grant()

    def lose(self, peer: PeerId) -> None:
        """``peer`` is gone, or only the link to it: what is there is dropped, what it waits for is ours."""
        if self._peers.lose(peer):
            self._let_go(peer)
            self._grant()

    def draw(self, peers: Rates, seed: bytes, rate: float = 0.0) -> None:
        """Routes of a new round. ``peers``: tokens a second of this stage's replicas, this one's too, which
        is told to the neighbours (``rate``)."""
        self._peers.rate = rate
        self._peers.draw(peers, seed)

    def close(self, now: float) -> None:
        """Begin nothing more; what is under way comes to its end, and then a last step."""
        self.is_closing = True
        for key, one in list(self._held.items()):
            if not one.is_begun:
                self._decline(key, one, "leaving")
            elif one.phase is Passage.PLACING:
                self._await_room(one, now)
        self._events.append(WorkReady())

    @property
    def is_drained(self) -> bool:
        """Whether nothing is held or counted that was not stepped."""
        return not self._held and not self._counted

    @property
    def is_over(self) -> bool:
        """Whether it was closed and has come to its end: nothing is sent to the next stage any more."""
        return self.is_closing and self.is_drained

    @property
    def waiting(self) -> int:
        """Microbatches that are here and not begun."""
        return sum(one.phase is Passage.WAITING for one in self._held.values())

    @property
    def waits_for(self) -> str:
        """Why ``next_work`` has nothing, in words; empty if it has."""
        if self._work() is not None:
            return ""
        if not self._has_behind:
            return f"stage {self._place.stage + 1} has no replica"
        if any(one.phase is Passage.PLACING for one in self._held.values()):
            return f"stage {self._place.stage + 1} has no room"
        if self.in_flight and not self._place.is_last:
            return f"gradients from stage {self._place.stage + 1}"
        if not self._place.is_first and not self._peers.before():
            return f"stage {self._place.stage - 1} has no replica"
        return "the end" if self._place.is_first else f"microbatches from stage {self._place.stage - 1}"

    # ---- what the training thread asks and says

    @property
    def in_flight(self) -> int:
        """Begun in this inner step, and neither counted nor dropped."""
        return sum(one.is_begun for one in self._held.values())

    def next_work(self, now: float) -> Work | None:
        """What is to be computed next: backward before forward, and a step when all that was begun is
        counted. None: nothing yet; ``WorkReady`` tells."""
        work = self._work()
        if work is None or work.key is None:
            return work
        if work.do is Do.BACKWARD:
            self._held[work.key].phase = Passage.COMPUTING_BACK
        elif work.payload is None:
            self._made += 1
            self._held[work.key] = _Microbatch(Passage.COMPUTING)
        else:
            self._held[work.key].phase = Passage.COMPUTING
        one = self._held[work.key]
        one.begun_at = now
        binds = self._sizes.up_bytes > self._computing_s * self.upload_bytes_per_s > 0
        if one.phase is self._last_phase and one.sender is not None and (binds or self._is_draining):
            room = 0 if self._is_draining else self._sizes.microbatches - self.in_flight - self._counted
            return replace(work, is_urgent=True, heir=_heir(self._held, work.key, self._last_phase, room))
        return work

    def forwarded(self, key: Key, payload: Buffer, tokens: int, now: float) -> None:
        """Microbatch ``key`` was computed: ``payload`` goes to the next stage, unless it was dropped
        meanwhile."""
        one = self._held.get(key)
        if one is None:
            return
        _must_be(one, Passage.COMPUTING)
        one.forward_s = now - one.begun_at
        one.payload = payload
        one.tokens = tokens
        self._await_room(one, now)
        self._place_all(now)

    def counted(
        self, key: Key, payload: Buffer | None, tokens: int, loss: float, now: float, codec: int = 0
    ) -> None:
        """Microbatch ``key`` is in the gradient; ``payload`` (None at the first stage): what goes back, in
        ``codec``."""
        one = self._held[key]
        _must_be(one, self._last_phase)
        self._counted += 1
        self._computing_s = one.forward_s + now - one.begun_at
        self._starves_at = now + 2 * self._sizes.cap_s
        self._over(key)
        if one.sender is not None and payload is not None:
            view = memoryview(payload).cast("B")
            for offset, data in pieces(view, MAX_PIECE_BYTES):
                body = Backward(key=key.on_wire(), tokens=tokens, loss=loss, offset=offset, total=len(view))
                body.codec = codec
                self._out.append((one.sender, with_data(body, data)))
        self._grant()

    def failed(self, key: Key, error: RemoteProtocolError | ValueError) -> None:
        """What came for ``key`` could not be used: it is dropped, and held against its sender if that one
        broke a rule."""
        one = self._held[key]
        is_forward = one.phase is Passage.COMPUTING
        sender = one.sender if is_forward else one.receiver
        if sender is not None and isinstance(error, RemoteProtocolError):
            self._events.append(UselessPayload(sender, Forward if is_forward else Backward, error))
        self._drop(key, str(error))
        self._grant()

    def stepped(self) -> None:
        """The inner step has been taken."""
        self._counted = 0
        self._is_starved = False
        self._starves_at = math.inf
        self._steps += 1
        self._events.append(WorkReady())

    # ---- the five verbs

    def receive(self, message: Any, sender: PeerId, now: float) -> bool:
        """Take a neighbour's message. Raises ``RemoteProtocolError`` for one that nobody honest sends; False
        for bulk that was waited for no more."""
        peer = self._peers.get(sender)
        if peer is None:
            return False  # it is new, or gone: what it says is true again in a moment
        if isinstance(message, Neighbour):
            if self._peers.hear(message, sender):
                self._let_go(sender)
            self._grant()
            self._place_all(now)
            return True
        if not peer.theirs:
            return False  # it has not said what crosses
        key = Key(message.key.owner, message.key.number)
        if isinstance(message, Forward):
            return self._take_forward(message, key, sender, peer, now)
        if isinstance(message, Backward):
            return self._take_gradient(message, key, sender, peer, now)
        if isinstance(message, Declined):
            self._take_declined(key, sender, peer, now)
        else:
            self._take_dropped(key, sender, peer)
        return True

    def handle_timer(self, now: float) -> None:
        for key, one in list(self._held.items()):
            if one.deadline <= now:
                late = self._peers.get(one.receiver) if one.receiver is not None else None
                if late is not None:
                    late.is_late = True
                what = "gradient" if one.phase is Passage.AWAY else "rest of it"
                self._drop(key, f"the {what} did not come in time")
        if self._starves_at <= now:
            self._is_starved = self._counted > 0
            self._starves_at = math.inf
            for key in [key for key, one in self._held.items() if one.phase is Passage.PLACING]:
                self._drop(key, "nobody behind had room in time")
            self._events.append(WorkReady())
        self._grant()

    def get_timer(self) -> float | None:
        soonest = min((one.deadline for one in self._held.values()), default=math.inf)
        soonest = min(soonest, self._starves_at)
        return None if soonest == math.inf else soonest

    def messages_to_send(self) -> Iterator[tuple[PeerId, Message]]:
        while self._out:
            yield self._out.popleft()

    def next_event(self) -> PipelineEvent | None:
        return self._events.popleft() if self._events else None

    def held(self) -> dict[str, tuple[int, int]]:
        """What others can make grow: (now, at most) by the name of the bound."""
        return {
            "room for microbatches": (len(self._held), self._sizes.room + self._sizes.window),
            "MAX_NEIGHBOURS": (len(self._peers), 2 * MAX_NEIGHBOURS),
            "RECENT microbatches": (len(self._recent), RECENT),
        }

    # ---- messages

    def _take_forward(
        self, message: Forward, key: Key, sender: PeerId, peer: NeighbourPeer, now: float
    ) -> bool:
        if not peer.is_before:
            raise RemoteProtocolError("wrong stage", "a forward from a stage that is not the one before")
        one = self._held.get(key)
        if one is None:
            if key in self._recent:
                return False
            if self.is_closing or peer.room <= 0:
                if message.offset == 0:
                    self._out.append((sender, Declined(key=key.on_wire(), reason="no room")))
                    self._remember(key, _Past(None, declined=True))
                return False
            coming = Assembly(self._sizes.forward_bytes)
            coming.add(message.offset, message.total, message.data)
            peer.used += 1
            one = _Microbatch(Passage.RECEIVING, sender, path=message.path, coming=coming)
            one.deadline = now + self._sizes.cap_s
            self._held[key] = one
        elif one.coming is None or one.sender != sender:
            return False  # doubled; or another has sent it too, and one of them lies
        elif not one.coming.add(message.offset, message.total, message.data):
            return False
        if one.coming is not None and one.coming.whole is not None:
            one.phase = Passage.WAITING
            one.payload = one.coming.whole
            one.coming = None
            one.deadline = math.inf
            self._events.append(WorkReady())
        return True

    def _take_gradient(
        self, message: Backward, key: Key, sender: PeerId, peer: NeighbourPeer, now: float
    ) -> bool:
        one = self._held.get(key)
        past = self._recent.get(key)
        if past is not None and past.receiver == sender:
            if past.given_up is not None and message.offset + len(message.data) == message.total:
                peer.durations.add(now - past.given_up)  # the next ones are given more time
                peer.is_late = False
                self._recent[key] = _Past(sender)
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
            self._events.append(WorkReady())
        return True

    def _take_declined(self, key: Key, sender: PeerId, peer: NeighbourPeer, now: float) -> None:
        one = self._held.get(key)
        if one is not None and one.receiver == sender and one.phase is Passage.AWAY and one.coming is None:
            peer.used -= 1
            peer.granted = peer.used  # until it says anew what it has room for
            one.receiver = None
            self._await_room(one, now)
            self._place_all(now)

    def _take_dropped(self, key: Key, sender: PeerId, peer: NeighbourPeer) -> None:
        one = self._held.get(key)
        if one is None:
            past = self._recent.get(key)
            if (past is None or past.declined) and peer.is_before:
                peer.used += 1  # it was lost on its way, and what comes of it is not taken
                self._remember(key, _Past(None))
        elif one.receiver == sender and one.phase is Passage.AWAY:
            peer.drops += 1
            peer.is_late |= peer.drops > self._sizes.window
            self._drop(key, "dropped behind")
        elif one.sender == sender and not one.is_begun:
            self._drop(key, "dropped before")
        self._grant()

    # ---- what follows

    def _work(self) -> Work | None:
        for key, one in self._held.items():
            if one.phase is Passage.RETURNED:
                return Work(
                    Do.BACKWARD, key, one.payload, one.tokens, one.loss, one.receiver, one.codec
                )  # fmt: skip
        begun = self.in_flight
        is_draining = self._is_draining
        if self._counted and not begun and is_draining:
            return Work(Do.STEP)
        if is_draining or begun >= self._sizes.window or not self._has_behind:
            return None
        if self._place.is_first:
            return Work(Do.FORWARD, Key(self._place.process, self._made + 1))
        for key, one in self._held.items():
            if one.phase is Passage.WAITING:
                return Work(Do.FORWARD, key, one.payload, sender=one.sender)
        return None

    @property
    def _has_behind(self) -> bool:
        """Whether anybody may take what is computed: who begins nothing is between steps, and can rest."""
        return self._place.is_last or bool(self._peers.behind())

    @property
    def _is_draining(self) -> bool:
        """Whether this inner step begins no more."""
        is_full = self.in_flight + self._counted >= self._sizes.microbatches
        return self.is_closing or is_full or self._is_starved

    def _await_room(self, one: _Microbatch, now: float) -> None:
        """Behind, for what is computed; while this peer goes on, as long as anything is counted."""
        one.phase = Passage.PLACING
        one.deadline = now + self._sizes.cap_s if self.is_closing else math.inf
        self._starves_at = min(self._starves_at, now + 2 * self._sizes.cap_s)

    def _place_all(self, now: float) -> None:
        """Send what waits for room behind, as far as there is any."""
        away = Counter(one.receiver for one in self._held.values() if one.phase is Passage.AWAY)
        for key, one in self._held.items():
            if one.phase is not Passage.PLACING or one.payload is None:
                continue
            receiver = self._peers.receiver(away, self._sizes.window)
            peer = self._peers.get(receiver) if receiver is not None else None
            if receiver is None or peer is None:
                return
            peer.used += 1
            away[receiver] += 1
            late_s = self._late_s(peer)
            one.phase = Passage.AWAY
            one.receiver = receiver
            one.sent_at = now
            one.deadline = now + late_s
            view = memoryview(one.payload).cast("B")
            path = _onward(one.path, self._place.process, self._steps)
            for offset, data in pieces(view, MAX_PIECE_BYTES):
                body = Forward(key=key.on_wire(), offset=offset, total=len(view), path=path)
                self._out.append((receiver, with_data(body, data)))

    def _late_s(self, peer: NeighbourPeer) -> float:
        """After this a gradient from ``peer`` is late."""
        return peer.durations.deadline_s(self._sizes.cap_s, SILENCE_FLOOR_S, self._sizes.cap_s)

    def _wait_on(self, sender: PeerId, peer: NeighbourPeer, now: float) -> None:
        """A queue that moves is not late, however long it has become: what else is at ``sender`` has its time
        from now, within the cap."""
        by = now + self._late_s(peer)
        cap_s = self._sizes.cap_s
        for one in self._held.values():
            if one.receiver == sender and one.phase is Passage.AWAY:
                one.deadline = min(one.sent_at + cap_s, max(one.deadline, by))

    def _drop(self, key: Key, reason: str) -> None:
        """And tell those on both sides of it."""
        one = self._held[key]
        for peer in (one.sender, one.receiver):
            if peer is not None and self._peers.get(peer) is not None:
                self._out.append((peer, Dropped(key=key.on_wire(), reason=reason[:200])))
        self._over(key, one.sent_at if one.phase is Passage.AWAY else None)
        if one.phase not in {
            Passage.RECEIVING,
            Passage.WAITING,
        }:  # others may make and drop any number of those
            self._events.append(DroppedMicrobatch(key, reason))
        self._events.append(WorkReady())

    def _decline(self, key: Key, one: _Microbatch, reason: str) -> None:
        if one.sender is not None:
            self._out.append((one.sender, Declined(key=key.on_wire(), reason=reason)))
        self._over(key)

    def _over(self, key: Key, given_up: float | None = None) -> None:
        self._remember(key, _Past(self._held.pop(key).receiver, given_up))

    def _remember(self, key: Key, past: _Past) -> None:
        self._recent[key] = past
        while len(self._recent) > RECENT:
            self._recent.popitem(last=False)

    def _grant(self) -> None:
        """Tell those before how much more they may send: what there is room for, alike for all."""
        if not self.is_closing:
            self._peers.grant(self._sizes.room - len(self._held))

    def _let_go(self, peer: PeerId) -> None:
        """Of all that is with ``peer`` or from it: it was started anew, is gone, or has lost us."""
        for key, one in list(self._held.items()):
            if one.receiver == peer and one.phase is Passage.AWAY:
                self._drop(key, f"peer {peer} is gone")
            elif one.sender == peer:
                one.sender = None
                if not one.is_begun:
                    self._drop(key, f"peer {peer} is gone")


def _must_be(one: _Microbatch, phase: Passage) -> None:
    if one.phase is not phase:
        raise LocalProtocolError(f"a microbatch that is {one.phase.name} is not {phase.name}")


def _heir(held: Mapping[Key, _Microbatch], key: Key, last: Passage, room: int) -> Key | None:
    """Another that came the path of ``key`` and is not in the ``last`` phase. Its gradient goes later in this
    inner step, which begins ``room`` more."""
    for other, one in held.items():
        room -= not one.is_begun
        goes_later = one.phase is not last if one.is_begun else one.phase is Passage.WAITING and room >= 0
        if other != key and goes_later and one.path == held[key].path and one.sender is not None:
            return other
    return None


def _onward(path: int, *here: int) -> int:
    """The path of what has come ``path`` and goes on from ``here``."""
    said = b"".join(number.to_bytes(8, "big") for number in (path, *here))
    return int.from_bytes(hashlib.sha256(said).digest()[:8], "big")
