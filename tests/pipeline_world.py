"""Replicas of stages on virtual time: pipeline machines, a training thread each, and links between them."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from google.protobuf.message import Message

from p2p_co2.protocol.pipeline.machine import Do, DroppedMicrobatch, Key, Pipeline, Place, Sizes, Work
from p2p_co2.protocol.wire.identity import PeerId

TOKENS = 100


@dataclass
class Faults:
    """``lose``, ``double``: chance of a message; ``jitter_s``: at most, added to each, so that they overtake
    one another."""

    lose: float = 0.0
    double: float = 0.0
    jitter_s: float = 0.0


@dataclass
class Replica:
    """A peer of a stage: its machine, and what its training thread is doing."""

    machine: Pipeline
    stage: int
    compute_s: float
    process: int
    is_up: bool = True
    work: Work | None = None
    busy_s: float = 0.0
    counted: Counter[Key] = field(default_factory=Counter)
    steps: list[int] = field(default_factory=list)
    """Microbatches of each inner step."""
    this_step: int = 0
    gradients: int = 0
    """Sent to the stage before."""
    urgent: list[Work] = field(default_factory=list)
    """Of these, what others waited for."""
    dropped: list[str] = field(default_factory=list)
    line_free_at: float = 0.0
    """Of its line up, which all that it sends shares."""


class World:
    """``counts``: replicas by stage; ``compute_s``: seconds of a forward, by stage (a backward takes twice as
    much). ``window``: of all stages, or by stage. ``urgent``: bytes of an urgent gradient, 0 for those of
    any other."""

    def __init__(
        self, counts: list[int], compute_s: list[float], *, microbatches: int = 8,
        window: int | list[int] = 8, urgent: int = 0, room: int = 0, latency_s: float = 0.01,
        payload: int = 40_000, bytes_per_s: float = 1e8,
        cap_s: float = 60.0, seed: int = 0, faults: Faults | None = None,
    ) -> None:  # fmt: skip
        self.now = 0.0
        self.random = random.Random(seed)
        self._faults, self._latency_s, self._rate = faults or Faults(), latency_s, bytes_per_s
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._windows = [window] * len(counts) if isinstance(window, int) else window
        self._gradients = [bytes(payload), bytes(urgent)] if urgent else [bytes(payload)]
        room = room or 2 * max(self._windows)
        sizes = [len(gradient) for gradient in self._gradients]
        self._sizes = Sizes(microbatches, 0, room, payload, sizes, b"b", cap_s)
        self.went: dict[Key, list[tuple[int, int]]] = {}
        """The processes that each microbatch was sent on by, and which inner step that was in."""
        self.payload, self.compute_s, self.stages = bytes(payload), compute_s, len(counts)
        self.peers: dict[PeerId, Replica] = {}
        self._born = 0
        self.refused: list[str] = []
        for stage, count in enumerate(counts):
            for _ in range(count):
                self.start(stage)

    def start(self, stage: int, name: str = "", slower: float = 1.0) -> PeerId:
        """A new replica, or ``name`` again as another process."""
        self._born += 1
        me = PeerId(name or f"s{stage}p{self._born}")
        place = Place(me, self._born << 32, stage, self.stages)
        machine = Pipeline(place, self.sizes(stage))
        machine.upload_bytes_per_s = self._rate
        replica = Replica(machine, stage, self.compute_s[stage] * slower, place.process)
        if me in self.peers:
            self.peers[PeerId(f"{me} before {self._born}")] = self.peers[me]
        self.peers[me] = replica
        for other, known in self.peers.items():
            if other != me and known.is_up:
                replica.machine.join(other, known.stage)
                known.machine.join(me, stage)
                self.pump(other)
        self.draw()
        self.pump(me)
        return me

    def sizes(self, stage: int) -> Sizes:
        up = len(self.payload) * ((stage > 0) + (stage < self.stages - 1))
        return replace(self._sizes, window=self._windows[stage], up_bytes=up)

    def kill(self, peer: PeerId, noticed_s: float = 0.5) -> None:
        self.peers[peer].is_up = False
        self.at(noticed_s, lambda: self._notice(peer))

    def _notice(self, peer: PeerId) -> None:
        for other, known in self.peers.items():
            if known.is_up:
                known.machine.lose(peer)
                self.pump(other)
        self.draw()

    def cut(self, one: PeerId, other: PeerId, for_s: float) -> None:
        """Only the link between two; each notices by itself, or does not."""
        for a, b in ((one, other), (other, one)):
            if self.random.random() < 0.7:
                self.peers[a].machine.lose(b)
                self.at(for_s, lambda a=a, b=b: self._meet(a, b))  # type: ignore[misc]
                self.pump(a)

    def _meet(self, a: PeerId, b: PeerId) -> None:
        if self.peers[a].is_up and self.peers[b].is_up:
            self.peers[a].machine.join(b, self.peers[b].stage)
            self.pump(a)

    def draw(self) -> None:
        """New routes for all."""
        for peer, known in self.peers.items():
            same = {p: 1.0 / k.compute_s for p, k in self.peers.items() if k.stage == known.stage and k.is_up}
            if known.is_up:
                known.machine.draw(same, str(int(self.now)).encode(), 1.0 / known.compute_s)
                self.pump(peer)

    def at(self, in_s: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (self.now + in_s, next(self._order), do))

    def run(self, seconds: float) -> None:
        stop = self.now + seconds
        while self._agenda and self._agenda[0][0] <= stop:
            self.now, _, do = heapq.heappop(self._agenda)
            do()
        self.now = stop

    def pump(self, peer: PeerId) -> None:
        known = self.peers[peer]
        machine = known.machine
        for receiver, message in machine.messages_to_send():
            self._send(peer, receiver, message)
        while (event := machine.next_event()) is not None:
            if isinstance(event, DroppedMicrobatch):
                known.dropped.append(event.reason)
        if known.work is None and known.is_up and (work := machine.next_work(self.now)) is not None:
            known.work = work
            self.at(self._duration_s(known, work), lambda: self._done(peer, work))
        if (timer := machine.get_timer()) is not None:
            self.at(max(0.0, timer - self.now), lambda: self._ring(peer))

    def _duration_s(self, known: Replica, work: Work) -> float:
        if work.do is Do.STEP:
            return 0.001
        is_last = known.stage == self.stages - 1
        times = 3 if is_last else 2 if work.do is Do.BACKWARD else 1
        known.busy_s += times * known.compute_s
        return times * known.compute_s

    def _done(self, peer: PeerId, work: Work) -> None:
        known = self.peers[peer]
        if not known.is_up or known.work is not work:
            return
        known.work = None
        machine, is_last = known.machine, known.stage == self.stages - 1
        if work.do is Do.STEP:
            known.steps.append(known.this_step)
            known.this_step = 0
            machine.stepped()
        elif work.key is not None and (work.do is Do.BACKWARD or is_last):
            known.counted[work.key] += 1
            known.this_step += 1
            codec = len(self._gradients) - 1 if work.is_urgent else 0
            payload = None if known.stage == 0 else self._gradients[codec]
            known.gradients += payload is not None
            known.urgent += [work] if work.is_urgent else []
            machine.counted(work.key, payload, TOKENS, 1.0, self.now, codec)
        elif work.key is not None:
            self.went.setdefault(work.key, []).append((known.process, len(known.steps)))
            machine.forwarded(work.key, self.payload, TOKENS, self.now)
        self.pump(peer)

    def _ring(self, peer: PeerId) -> None:
        if self.peers[peer].is_up:
            self.peers[peer].machine.handle_timer(self.now)
            self.pump(peer)

    def _send(self, sender: PeerId, receiver: PeerId, message: Message) -> None:
        known, faults = self.peers[sender], self._faults
        free_at = max(self.now, known.line_free_at) + message.ByteSize() / self._rate
        known.line_free_at = free_at
        for _ in range(1 + (self.random.random() < faults.double)):
            if self.random.random() >= faults.lose:
                wait_s = free_at - self.now + self._latency_s + self.random.random() * faults.jitter_s
                self.at(wait_s, lambda: self._arrive(sender, receiver, message))

    def _arrive(self, sender: PeerId, receiver: PeerId, message: Any) -> None:
        known = self.peers.get(receiver)
        if known is not None and known.is_up:
            known.machine.receive(message, sender, self.now)
            self.pump(receiver)

    # ---- laws

    def check(self) -> None:
        """Once and suffix, that what is held stays within its bounds, and that what a gradient leaves out may
        only be added to one that the same inner steps of the same replicas count."""
        by_stage = [Counter[Key]() for _ in range(self.stages)]
        for known in self.peers.values():
            by_stage[known.stage] += known.counted
            for name, (now, most) in known.machine.held().items():
                assert now <= most, (name, now, most)
        for stage, counted in enumerate(by_stage):
            assert all(times == 1 for times in counted.values()), f"stage {stage} counted one twice"
            if stage:
                assert set(by_stage[stage - 1]) <= set(counted), (
                    f"stage {stage} lacks what {stage - 1} counted"
                )

        for known in self.peers.values():
            for work in known.urgent:
                if work.key is not None and work.heir is not None:
                    paths = [self.went[key][: known.stage] for key in (work.key, work.heir)]
                    assert paths[0] == paths[1], f"{work.heir} went elsewhere than {work.key}"

    def end(self) -> None:
        """Close stage by stage, and see that all comes to its end."""
        for stage in range(self.stages):
            for peer, known in self.peers.items():
                if known.stage == stage and known.is_up:
                    known.machine.close(self.now)
                    self.pump(peer)
            self.run(self._sizes.cap_s + 30.0)
        for peer, known in self.peers.items():
            assert not known.is_up or known.machine.is_drained, (peer, known.machine.held())
        self.check()
