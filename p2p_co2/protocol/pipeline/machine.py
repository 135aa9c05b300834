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

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

from google.protobuf.message import Message

from p2p_co2.errors import LocalProtocolError, RemoteProtocolError
from p2p_co2.protocol.pipeline.neighbours import MAX_NEIGHBOURS
from p2p_co2.protocol.pipeline.routes import Rates
from p2p_co2.protocol.pipeline.transit import (
    RECENT,
    Key,
    Microbatch,
    Passage,
    PipelineEvent,
    Place,
    Sizes,
    Transit,
    UselessPayload,
    WorkReady,
)
from p2p_co2.protocol.rounds.assembly import pieces
from p2p_co2.system.memory import Buffer
from p2p_co2.wire.envelope import with_data
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.limits import MAX_PIECE_BYTES
from p2p_co2.wire.messages_pb2 import Backward, Declined, Forward, Neighbour

WINDOW = 6
"""Times the stages from here to the last: microbatches between forward and backward. One of each is enough
where links take no time; latency needs the rest."""


def window_of(stage: int, stages: int, microbatches: int) -> int:
    """How many microbatches of an inner step may be between forward and backward at a replica of
    ``stage``."""
    return min(microbatches, WINDOW * (stages - stage))


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


class Pipeline:
    """``place``: where this peer is; ``sizes``: what is agreed and what it has room for."""

    def __init__(self, place: Place, sizes: Sizes) -> None:
        self._place = place
        self._sizes = sizes
        self._transit = Transit(place, sizes)
        self._last_phase = Passage.COMPUTING if place.is_last else Passage.COMPUTING_BACK
        self._counted = 0
        self._made = 0
        self._computing_s = 0.0
        self._is_starved = False
        self.upload_bytes_per_s = 0.0
        """What the line up carries, as the shell has measured it; 0: not known."""

    # ---- what the shell says

    def join(self, peer: PeerId, stage: int) -> None:
        """``peer`` is live and in ``stage``, as its signed record says; only neighbouring stages matter."""
        known = self._transit.peers.get(peer)
        if known is not None and stage != self._place.stage + (-1 if known.is_before else 1):
            self.lose(peer)  # it has moved
        if self._transit.peers.join(peer, stage):
            self._transit.events.append(WorkReady())  # for it
        self._transit.grant()

    def lose(self, peer: PeerId) -> None:
        """``peer`` is gone, or only the link to it: what is there is dropped, what it waits for is ours."""
        if self._transit.peers.lose(peer):
            self._transit.let_go(peer)
            self._transit.grant()

    def draw(self, peers: Rates, seed: bytes, rate: float = 0.0) -> None:
        """Routes of a new round. ``peers``: tokens a second of this stage's replicas, this one's too, which
        is told to the neighbours (``rate``)."""
        self._transit.peers.rate = rate
        self._transit.peers.draw(peers, seed)

    def close(self, now: float) -> None:
        """Begin nothing more; what is under way comes to its end, and then a last step."""
        self._transit.is_closing = True
        for key, one in list(self._transit.held.items()):
            if not one.is_begun:
                self._transit.decline(key, one, "leaving")
            elif one.phase is Passage.PLACING:
                self._transit.await_room(one, now)
        self._transit.events.append(WorkReady())

    @property
    def is_closing(self) -> bool:
        """Whether it begins nothing more."""
        return self._transit.is_closing

    @property
    def is_drained(self) -> bool:
        """Whether nothing is held or counted that was not stepped."""
        return not self._transit.held and not self._counted

    @property
    def is_over(self) -> bool:
        """Whether it was closed and has come to its end: nothing is sent to the next stage any more."""
        return self.is_closing and self.is_drained

    @property
    def waiting(self) -> int:
        """Microbatches that are here and not begun."""
        return sum(one.phase is Passage.WAITING for one in self._transit.held.values())

    @property
    def waits_for(self) -> str:
        """Why ``next_work`` has nothing, in words; empty if it has."""
        if self._work() is not None:
            return ""
        if not self._transit.has_behind:
            return f"stage {self._place.stage + 1} has no replica"
        if any(one.phase is Passage.PLACING for one in self._transit.held.values()):
            return f"stage {self._place.stage + 1} has no room"
        if self.in_flight and not self._place.is_last:
            return f"gradients from stage {self._place.stage + 1}"
        if not self._place.is_first and not self._transit.peers.before():
            return f"stage {self._place.stage - 1} has no replica"
        return "the end" if self._place.is_first else f"microbatches from stage {self._place.stage - 1}"

    # ---- what the training thread asks and says

    @property
    def in_flight(self) -> int:
        """Begun in this inner step, and neither counted nor dropped."""
        return self._transit.in_flight

    def next_work(self, now: float) -> Work | None:
        """What is to be computed next: backward before forward, and a step when all that was begun is
        counted. None: nothing yet; ``WorkReady`` tells."""
        work = self._work()
        if work is None or work.key is None:
            return work
        if work.do is Do.BACKWARD:
            self._transit.held[work.key].phase = Passage.COMPUTING_BACK
        elif work.payload is None:
            self._made += 1
            self._transit.held[work.key] = Microbatch(Passage.COMPUTING)
        else:
            self._transit.held[work.key].phase = Passage.COMPUTING
        one = self._transit.held[work.key]
        one.begun_at = now
        binds = self._sizes.up_bytes > self._computing_s * self.upload_bytes_per_s > 0
        if one.phase is self._last_phase and one.sender is not None and (binds or self._is_draining):
            room = 0 if self._is_draining else self._sizes.microbatches - self.in_flight - self._counted
            return replace(
                work, is_urgent=True, heir=_heir(self._transit.held, work.key, self._last_phase, room)
            )
        return work

    def forwarded(self, key: Key, payload: Buffer, tokens: int, now: float) -> None:
        """Microbatch ``key`` was computed: ``payload`` goes to the next stage, unless it was dropped
        meanwhile."""
        one = self._transit.held.get(key)
        if one is None:
            return
        _must_be(one, Passage.COMPUTING)
        one.forward_s = now - one.begun_at
        one.payload = payload
        one.tokens = tokens
        self._transit.await_room(one, now)
        self._transit.place_all(now)

    def counted(
        self, key: Key, payload: Buffer | None, tokens: int, loss: float, now: float, codec: int = 0
    ) -> None:
        """Microbatch ``key`` is in the gradient; ``payload`` (None at the first stage): what goes back, in
        ``codec``."""
        one = self._transit.held[key]
        _must_be(one, self._last_phase)
        self._counted += 1
        self._computing_s = one.forward_s + now - one.begun_at
        self._transit.starves_at = now + 2 * self._sizes.cap_s
        self._transit.over(key)
        if one.sender is not None and payload is not None:
            view = memoryview(payload).cast("B")
            for offset, data in pieces(view, MAX_PIECE_BYTES):
                body = Backward(key=key.on_wire(), tokens=tokens, loss=loss, offset=offset, total=len(view))
                body.codec = codec
                self._transit.out.append((one.sender, with_data(body, data)))
        self._transit.grant()

    def failed(self, key: Key, error: RemoteProtocolError | ValueError) -> None:
        """What came for ``key`` could not be used: it is dropped, and held against its sender if that one
        broke a rule."""
        one = self._transit.held[key]
        is_forward = one.phase is Passage.COMPUTING
        sender = one.sender if is_forward else one.receiver
        if sender is not None and isinstance(error, RemoteProtocolError):
            self._transit.events.append(UselessPayload(sender, Forward if is_forward else Backward, error))
        self._transit.drop(key, str(error))
        self._transit.grant()

    def stepped(self) -> None:
        """The inner step has been taken."""
        self._counted = 0
        self._is_starved = False
        self._transit.starves_at = math.inf
        self._transit.steps += 1
        self._transit.events.append(WorkReady())

    # ---- the five verbs

    def receive(self, message: Any, sender: PeerId, now: float) -> bool:
        """Take a neighbour's message. Raises ``RemoteProtocolError`` for one that nobody honest sends; False
        for bulk that was waited for no more."""
        peer = self._transit.peers.get(sender)
        if peer is None:
            return False  # it is new, or gone: what it says is true again in a moment
        if isinstance(message, Neighbour):
            if self._transit.peers.hear(message, sender):
                self._transit.let_go(sender)
            self._transit.grant()
            self._transit.place_all(now)
            return True
        if not peer.theirs:
            return False  # it has not said what crosses
        key = Key(message.key.owner, message.key.number)
        if isinstance(message, Forward):
            return self._transit.take_forward(message, key, sender, peer, now)
        if isinstance(message, Backward):
            return self._transit.take_gradient(message, key, sender, peer, now)
        if isinstance(message, Declined):
            self._transit.take_declined(key, sender, peer, now)
        else:
            self._transit.take_dropped(key, sender, peer)
        return True

    def handle_timer(self, now: float) -> None:
        for key, one in list(self._transit.held.items()):
            if one.deadline <= now:
                late = self._transit.peers.get(one.receiver) if one.receiver is not None else None
                if late is not None:
                    late.is_late = True
                what = "gradient" if one.phase is Passage.AWAY else "rest of it"
                self._transit.drop(key, f"the {what} did not come in time")
        if self._transit.starves_at <= now:
            self._is_starved = self._counted > 0
            self._transit.starves_at = math.inf
            for key in [key for key, one in self._transit.held.items() if one.phase is Passage.PLACING]:
                self._transit.drop(key, "nobody behind had room in time")
            self._transit.events.append(WorkReady())
        self._transit.grant()

    def get_timer(self) -> float | None:
        soonest = min((one.deadline for one in self._transit.held.values()), default=math.inf)
        soonest = min(soonest, self._transit.starves_at)
        return None if soonest == math.inf else soonest

    def messages_to_send(self) -> Iterator[tuple[PeerId, Message]]:
        while self._transit.out:
            yield self._transit.out.popleft()

    def next_event(self) -> PipelineEvent | None:
        return self._transit.events.popleft() if self._transit.events else None

    def held(self) -> dict[str, tuple[int, int]]:
        """What others can make grow: (now, at most) by the name of the bound."""
        return {
            "room for microbatches": (len(self._transit.held), self._sizes.room + self._sizes.window),
            "MAX_NEIGHBOURS": (len(self._transit.peers), 2 * MAX_NEIGHBOURS),
            "RECENT microbatches": (len(self._transit.recent), RECENT),
        }

    # ---- messages

    def _work(self) -> Work | None:
        for key, one in self._transit.held.items():
            if one.phase is Passage.RETURNED:
                return Work(
                    Do.BACKWARD, key, one.payload, one.tokens, one.loss, one.receiver, one.codec
                )  # fmt: skip
        begun = self.in_flight
        is_draining = self._is_draining
        if self._counted and not begun and is_draining:
            return Work(Do.STEP)
        if is_draining or begun >= self._sizes.window or not self._transit.has_behind:
            return None
        if self._place.is_first:
            return Work(Do.FORWARD, Key(self._place.process, self._made + 1))
        for key, one in self._transit.held.items():
            if one.phase is Passage.WAITING:
                return Work(Do.FORWARD, key, one.payload, sender=one.sender)
        return None

    @property
    def _is_draining(self) -> bool:
        """Whether this inner step begins no more."""
        is_full = self.in_flight + self._counted >= self._sizes.microbatches
        return self.is_closing or is_full or self._is_starved


def _must_be(one: Microbatch, phase: Passage) -> None:
    if one.phase is not phase:
        raise LocalProtocolError(f"a microbatch that is {one.phase.name} is not {phase.name}")


def _heir(held: Mapping[Key, Microbatch], key: Key, last: Passage, room: int) -> Key | None:
    """Another that came the path of ``key`` and is not in the ``last`` phase. Its gradient goes later in this
    inner step, which begins ``room`` more."""
    for other, one in held.items():
        room -= not one.is_begun
        goes_later = one.phase is not last if one.is_begun else one.phase is Passage.WAITING and room >= 0
        if other != key and goes_later and one.path == held[key].path and one.sender is not None:
            return other
    return None
