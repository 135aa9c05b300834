"""Stages of a model on virtual time: the ``Pipeline`` machines of real peers over the simulated internet.

    layout = Layout(stages=loads, microbatches=32)
    world = VirtualStages(layout, [[StageVolunteer(line)] * 2, [StageVolunteer(line)] * 3])
    world.run(60.0)
    world.end()                                  # close stage by stage; all comes to its end
    world.books.violations                       # the laws that were broken

Each replica is a machine, its links (``VirtualLinks``: forwards and gradients share the uplink) and a
training thread that computes for as long as ``StageLoad`` and the peer's speed say. Processes crash, lose
their power, stall and start anew; ways are cut; messages are lost, doubled and late as ``Internet.set_noise``
says.

Laws, checked at every step (``MicrobatchBooks``):

once           at most one replica of a stage counts a microbatch
suffix         who counts one finds it counted in the stage behind
conservation   what is counted was made, with as many tokens; an inner step has no more than was agreed
payload        what is computed on is what the neighbouring stage made for this microbatch
heir           what a gradient leaves out is added to one of the same path and the same inner steps
blame          nobody honest is refused
memory         what a machine holds stays within the bound that it names
deadlines      no timer is overdue, and who waits for a gradient has one
end            when stages close one after the other, all that was under way comes to its end

Price: no tensors, so nothing is learned about learning; rounds of a stage's group are played by ``Swarm``. A
payload is some bytes that stand for all of it, so it is one piece.
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.node.links import LinkObserver
from p2p_co2.planning.pipeline import StageLoad
from p2p_co2.planning.profiles import LinkProfile
from p2p_co2.protocol.pipeline import DroppedMicrobatch, Key, Pipeline, Place, Sizes, Work, window_of
from p2p_co2.protocol.pipeline.machine import Do
from p2p_co2.simnet.internet import LOOK_UP_S, Endpoint, Internet, VirtualLinks, open_parcel
from p2p_co2.simnet.laws import Violation
from p2p_co2.simnet.virtual_time import Handle, VirtualTime, loop_of
from p2p_co2.system.memory import Buffer
from p2p_co2.wire.envelope import head_of, unsent
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.kinds import kind_of

GROUP = hashlib.sha256(b"p2p-co2 simulated stages").digest()
PAYLOAD_BYTES = 512
"""Of the largest payload, as it is played."""
_HEADER = struct.Struct("<QQIBB")
"""Of a payload: owner, number, tokens, boundary, whether it is a gradient."""


@dataclass(frozen=True)
class StageVolunteer:
    """A volunteer: its line, and how fast it computes (1: as the loads say)."""

    line: LinkProfile
    speed: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What is agreed. ``tokens``: of a microbatch, about (they differ, so that a mistake shows). ``window``:
    0 for that of real peers, of all stages or by stage; ``room``: 0 for twice the window. ``urgent_bytes``:
    of an urgent gradient, 0 for those of any other. Routes are drawn anew every ``round_s``."""

    stages: tuple[StageLoad, ...]
    microbatches: int = 8
    window: int | tuple[int, ...] = 0
    room: int = 0
    urgent_bytes: int = 0
    tokens: int = 100
    cap_s: float = 60.0
    round_s: float = 10.0

    @property
    def scale(self) -> float:
        """Real bytes for each that is played."""
        sizes = [size for load in self.stages for size in (load.ahead_bytes, load.back_bytes) if size]
        return max(1.0, min(max(sizes) / PAYLOAD_BYTES, min(sizes) / _HEADER.size))

    def sizes(self, stage: int) -> Sizes:
        """Of the machines of ``stage``, in bytes that are played."""
        comes = self.played(self.stages[stage - 1].ahead_bytes) if stage else 0
        returns = self.gradients(stage + 1) if stage + 1 < len(self.stages) else []
        window = self.window[stage] if isinstance(self.window, tuple) else self.window
        window = window or window_of(stage, len(self.stages), self.microbatches)
        room = self.room or 2 * window
        load = self.stages[stage]
        up = self.played(load.ahead_bytes) + self.played(load.back_bytes)
        return Sizes(self.microbatches, window, room, comes, returns, b"simulated", self.cap_s, up)

    def gradients(self, stage: int) -> list[int]:
        """Bytes of a gradient that ``stage`` sends, by its codec."""
        sizes = [self.stages[stage].back_bytes, self.urgent_bytes]
        return [self.played(size) for size in sizes if size]

    def played(self, real_bytes: int) -> int:
        return max(_HEADER.size, round(real_bytes / self.scale)) if real_bytes else 0


class _Payload(NamedTuple):
    key: Key
    tokens: int
    boundary: int
    is_gradient: bool

    def encode(self, size: int) -> bytes:
        return _HEADER.pack(*self.key, self.tokens, self.boundary, self.is_gradient).ljust(size, b"\0")

    @classmethod
    def decode(cls, payload: Buffer) -> _Payload:
        owner, number, tokens, boundary, is_gradient = _HEADER.unpack_from(payload)
        return cls(Key(owner, number), tokens, boundary, bool(is_gradient))


class MicrobatchBooks:
    """The audit of all replicas, which knows every microbatch that was made. ``violations``: laws that were
    broken; ``counted``: by stage, who has counted which. ``digest`` names the whole history."""

    def __init__(self, stages: int, now: Callable[[], float]) -> None:
        self._now = now
        self.violations: list[Violation] = []
        self.made: dict[Key, int] = {}
        self.counted: list[dict[Key, PeerId]] = [{} for _ in range(stages)]
        self.tokens = [0] * stages
        """Counted by stage."""
        self.gradients, self.urgent = [0] * stages, [0] * stages
        """Sent by each stage, and how many of these were urgent."""
        self._paths: dict[Key, list[tuple[Pipeline, int]]] = {}
        """Which process has sent each microbatch on, by stage, and in which inner step."""
        self._inner_steps: Counter[PeerId] = Counter()
        self._heirs: dict[tuple[PeerId, Key], int] = {}
        """In which inner step each must be counted."""
        self.steps: list[Counter[int]] = [Counter() for _ in range(stages)]
        """How many inner steps of so many microbatches."""
        self._history = hashlib.sha256()

    def broken(self, peer: PeerId, law: str, text: str) -> None:
        self.violations.append(Violation(self._now(), peer, law, text))

    def make(self, peer: PeerId, key: Key, tokens: int) -> None:
        if key in self.made:
            self.broken(peer, "once", f"microbatch {key} was made before")
        self.made[key] = tokens

    def count(self, peer: PeerId, stage: int, key: Key, tokens: int) -> None:
        self._history.update(f"{self._now():.6f} {peer} {key}\n".encode())
        if first := self.counted[stage].get(key):
            self.broken(peer, "once", f"stage {stage} counts {key} again, after {first}")
        if stage + 1 < len(self.counted) and key not in self.counted[stage + 1]:
            self.broken(peer, "suffix", f"stage {stage} counts {key}, stage {stage + 1} has not")
        if self.made.get(key) != tokens:
            self.broken(peer, "conservation", f"{key} has {self.made.get(key)} tokens, counted as {tokens}")
        step = self._inner_steps[peer]
        if self._heirs.get((peer, key), step) != step:
            self.broken(peer, "heir", f"{key} inherits from an inner step before the one that counts it")
        self.counted[stage][key] = peer
        self.tokens[stage] += tokens

    def goes_on(self, peer: PeerId, process: Pipeline, key: Key) -> None:
        """``peer`` sends microbatch ``key`` to the next stage."""
        self._paths.setdefault(key, []).append((process, self._inner_steps[peer]))

    def send_back(self, peer: PeerId, stage: int, work: Work) -> None:
        """``stage`` sends the gradient of ``work``."""
        self.gradients[stage] += 1
        self.urgent[stage] += work.is_urgent
        if work.key is None or work.heir is None:
            return
        self._heirs[peer, work.heir] = self._inner_steps[peer]
        ours, theirs = (self._paths[key][:stage] for key in (work.key, work.heir))
        if ours != theirs or work.heir in self.counted[stage]:
            self.broken(peer, "heir", f"{work.heir} inherits from {work.key}, which came another way")

    def step(self, peer: PeerId, stage: int, keys: Sequence[Key], weight: int, most: int) -> None:
        """``weight``: tokens that the inner step is said to have."""
        self.steps[stage][len(keys)] += 1
        self._inner_steps[peer] += 1
        true = sum(self.made.get(key, 0) for key in set(keys))
        if weight != true or len(keys) > most:
            text = f"an inner step of {len(keys)} microbatches weighs {weight}, not {true}"
            self.broken(peer, "conservation", text)

    def check(self, peer: PeerId, machine: Pipeline) -> None:
        """What holds whenever a process has done something."""
        for name, (held, bound) in machine.held().items():
            if held > bound:
                self.broken(peer, "memory", f"{held} of {name}, at most {bound}")

    def digest(self) -> str:
        return self._history.hexdigest()


class Replica:
    """One process of a peer of a stage. ``number``: of the process; ``directory``: (stage, rate) of all that
    are there."""

    def __init__(
        self, layout: Layout, me: PeerId, stage: int, peer: StageVolunteer, number: int, internet: Internet,
        books: MicrobatchBooks, directory: Mapping[PeerId, Record],
    ) -> None:  # fmt: skip
        self.me = me
        self.stage = stage
        self.peer = peer
        self.books = books
        self._layout = layout
        self._directory = directory
        self._head = head_of(GROUP)
        place = Place(me, number << 32, stage, len(layout.stages))
        self.machine = Pipeline(place, layout.sizes(stage))
        self.machine.upload_bytes_per_s = peer.line.up_bits_per_s / 8 / layout.scale
        self.endpoint = Endpoint(me, peer.line, loop_of(internet.world))
        self.endpoint.on_message = self._take
        observer = LinkObserver(self._opened, self._lost, lambda other, reason: self._lost(other, "", reason))
        self.links = VirtualLinks(internet, self.endpoint, observer)
        self.spent = Spent(internet.world.now)
        self._work: Work | None = None
        self._step: list[Key] = []
        self._weight = 0
        self._alarm: tuple[float, Handle] | None = None
        self.endpoint.loop.after_turn = self.pump

    @property
    def now(self) -> float:
        return self.endpoint.loop.time()

    @property
    def is_last(self) -> bool:
        return self.stage == len(self._layout.stages) - 1

    def meet(self) -> None:
        """All that are in the directory; those that are known already stay so."""
        for other, record in self._directory.items():
            if other != self.me:
                self.machine.join(other, record.stage)

    def draw(self, seed: bytes) -> None:
        """Routes of a new round; whoever could not be reached is tried again. Every timer that was due has
        rung by then."""
        rates = {peer: record.rate for peer, record in self._directory.items() if record.stage == self.stage}
        if self.endpoint.is_up and self.endpoint.loop.held is None and self.me in rates:
            if (timer := self.machine.get_timer()) is not None and timer < self.now:
                self.books.broken(self.me, "deadlines", f"a timer is {self.now - timer:.1f} s overdue")
            self.meet()
            self.machine.draw(rates, seed, rates[self.me])
            self.pump()

    def close(self) -> None:
        self.machine.close(self.now)
        self.pump()

    def pump(self) -> None:
        """Send, hear, compute, and set the alarm: after each turn of the process."""
        if not self.endpoint.is_up:
            return
        machine = self.machine
        now = self.now
        for receiver, message in machine.messages_to_send():
            self.links.post(receiver, unsent(message, self._head), kind_of(message).is_bulk)
        while (event := machine.next_event()) is not None:
            if isinstance(event, DroppedMicrobatch):
                self.spent.dropped[event.reason.partition(" peer ")[0]] += 1
        if self._work is None and (work := machine.next_work(now)) is not None:
            self._work = work
            self.spent.waits(now, "")
            self.endpoint.loop.call_at(now + self._duration_s(work), self._done, work)
        if self._work is None:
            why = machine.waits_for
            self.spent.waits(now, why)
            if why.startswith("gradients") and machine.get_timer() is None:
                self.books.broken(self.me, "deadlines", "gradients are waited for without a timer")
        self.books.check(self.me, machine)
        self._set_alarm()

    # ---- the network

    async def _take(self, sender: PeerId, data: bytes) -> None:
        try:
            self.machine.receive(open_parcel(data, GROUP).body, sender, self.now)
        except RemoteProtocolError as error:
            self.books.broken(self.me, "blame", f"{sender} is refused: {error}")

    def _opened(self, other: PeerId, carrier: str, reason: str) -> None:
        if record := self._directory.get(other):
            self.machine.join(other, record.stage)

    def _lost(self, other: PeerId, carrier: str, reason: str) -> None:
        self.machine.lose(other)

    # ---- the clock

    def _set_alarm(self) -> None:
        timer = self.machine.get_timer()
        if self._alarm is not None and self._alarm[0] == timer:
            return
        if self._alarm is not None:
            self._alarm[1].cancel()
        self._alarm = None
        if timer is not None:
            self._alarm = timer, self.endpoint.loop.call_at(timer, self._ring)

    def _ring(self) -> None:
        self._alarm = None
        self.machine.handle_timer(self.now)

    # ---- the training thread

    def _duration_s(self, work: Work) -> float:
        load = self._layout.stages[self.stage]
        if work.do is Do.STEP:
            return 0.0
        if self.is_last:
            return load.compute_s / self.peer.speed
        return (load.backward_s if work.do is Do.BACKWARD else load.forward_s) / self.peer.speed

    def _done(self, work: Work) -> None:
        now = self.now
        machine = self.machine
        load = self._layout.stages[self.stage]
        self._work = None
        if work.do is not Do.STEP:
            self.spent.ends(now)
        if work.key is None:
            self.books.step(self.me, self.stage, self._step, self._weight, self._layout.microbatches)
            self._step = []
            self._weight = 0
            machine.stepped()
        elif work.do is Do.BACKWARD or self.is_last:
            tokens = work.tokens if work.do is Do.BACKWARD else self._tokens(work)
            self._step.append(work.key)
            self._weight += tokens
            self.books.count(self.me, self.stage, work.key, tokens)
            if work.do is Do.BACKWARD:
                self._check(work, self.stage, is_gradient=True)
            back = _Payload(work.key, tokens, self.stage - 1, is_gradient=True) if self.stage else None
            codec = int(work.is_urgent and self._layout.urgent_bytes > 0)
            if back is not None:
                self.books.send_back(self.me, self.stage, work)
            sent = back and back.encode(self._layout.gradients(self.stage)[codec])
            machine.counted(work.key, sent, tokens, 1.0, now, codec)
        else:
            tokens = self._tokens(work)
            ahead = _Payload(work.key, tokens, self.stage, is_gradient=False)
            self.books.goes_on(self.me, machine, work.key)
            machine.forwarded(work.key, ahead.encode(self._layout.played(load.ahead_bytes)), tokens, now)

    def _tokens(self, work: Work) -> int:
        """Of a microbatch that came from the stage before, or is made here."""
        assert work.key is not None
        if self.stage:
            return self._check(work, self.stage - 1, is_gradient=False)
        tokens = self._layout.tokens + work.key.number % 7
        self.books.make(self.me, work.key, tokens)
        return tokens

    def _check(self, work: Work, boundary: int, is_gradient: bool) -> int:
        """The tokens of a payload; that it is the right one."""
        assert work.payload is not None
        assert work.key is not None
        came = _Payload.decode(work.payload)
        due = _Payload(work.key, came.tokens, boundary, is_gradient)
        if came != due:
            self.books.broken(self.me, "payload", f"{came} came in place of {due}")
        return came.tokens


class Record(NamedTuple):
    """What a replica's signed record says: its stage, and tokens a second."""

    stage: int
    rate: float


@dataclass
class Spent:
    """What a training thread's time went to, seconds since ``began_at``. ``waited_s``: by what; ``dropped``:
    microbatches, by reason."""

    began_at: float
    busy_s: float = 0.0
    waited_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    dropped: Counter[str] = field(default_factory=Counter)
    _since: float = 0.0
    _why: str = ""

    def ends(self, now: float) -> None:
        self.busy_s += now - self._since
        self._since = now

    def waits(self, now: float, why: str) -> None:
        if self._why:
            self.waited_s[self._why] += now - self._since
        self._since = now
        self._why = why


class VirtualStages:
    """The whole: see the module. ``peers``: by stage."""

    def __init__(self, layout: Layout, peers: Sequence[Sequence[StageVolunteer]], seed: int = 0) -> None:
        self.layout = layout
        self._seed = seed
        self.world = VirtualTime()
        self.rng = random.Random(f"{seed}/stages")
        self.internet = Internet(self.world, self.rng, layout.scale)
        self.books = MicrobatchBooks(len(layout.stages), lambda: self.world.now)
        self.replicas: dict[PeerId, Replica] = {}
        """Processes that run."""
        self._directory: dict[PeerId, Record] = {}
        self._peers: dict[PeerId, tuple[int, StageVolunteer]] = {}
        self._processes = 0
        for stage, group in enumerate(peers):
            for peer in group:
                self.add(stage, peer)
        self._draw()

    @property
    def now(self) -> float:
        return self.world.now

    def add(self, stage: int, peer: StageVolunteer) -> PeerId:
        """A new volunteer."""
        me = PeerId(f"stage{stage}-peer{len(self._peers)}")
        self._peers[me] = stage, peer
        self.start(me)
        return me

    def start(self, me: PeerId) -> None:
        """Its next process; nothing if one runs."""
        if me in self.replicas:
            return
        stage, peer = self._peers[me]
        self._processes += 1
        if old := self.internet.endpoints.get(me):
            self.internet.break_links(old, "connection reset")
            self.internet.faults["restart"] += 1
        load = self.layout.stages[stage]
        speed = peer.speed
        self._directory[me] = Record(stage, self.layout.tokens * speed / load.compute_s)
        replica = Replica(
            self.layout, me, stage, peer, self._processes, self.internet, self.books, self._directory
        )
        self.replicas[me] = replica
        self.internet.endpoints[me] = replica.endpoint
        self.world.call_at(self.now + LOOK_UP_S, self._draw_all)

    def of_stage(self, stage: int) -> list[Replica]:
        return [replica for replica in self.replicas.values() if replica.stage == stage]

    # ---- time

    def run(self, seconds: float) -> None:
        self.world.run(self.now + seconds)

    def end(self) -> None:
        """Close stage by stage, each when the one before is empty; see that all comes to its end."""
        cap_s = self.layout.cap_s
        for stage in range(len(self.layout.stages)):
            closing = self.of_stage(stage)
            for replica in closing:
                replica.close()
            ends_at = self.now + 3 * cap_s
            while self.now < ends_at and not all(replica.machine.is_drained for replica in closing):
                self.run(cap_s / 60)
        for me, replica in self.replicas.items():
            if not replica.machine.is_drained:
                text = f"not drained, waits for {replica.machine.waits_for}: {replica.machine.held()}"
                self.books.broken(me, "end", text)

    def _draw(self) -> None:
        self._draw_all()
        self.world.call_at(self.now + self.layout.round_s, self._draw)

    def _draw_all(self) -> None:
        seed = str(int(self.now / self.layout.round_s)).encode()
        for replica in list(self.replicas.values()):
            replica.draw(seed)

    # ---- faults

    def kill(self, me: PeerId, host_up: bool = True) -> None:
        """Its process ends without a word; ``host_up`` False: the machine lost its power."""
        if (replica := self.replicas.pop(me, None)) is not None:
            del self._directory[me]
            self.internet.faults["crash" if host_up else "power loss"] += 1
            self.internet.died(replica.endpoint, host_up)
            replica.endpoint.loop.die([])

    def stall(self, me: PeerId, for_s: float) -> None:
        """SIGSTOP for so long."""
        if (replica := self.replicas.get(me)) is not None:
            self.internet.faults["stall"] += 1
            replica.endpoint.loop.stall()
            self.world.call_at(self.now + for_s, replica.endpoint.loop.go_on)

    def cut(self, one: PeerId, other: PeerId, for_s: float) -> None:
        """No way between two."""
        self.internet.cut_pair(one, other)
        self.world.call_at(self.now + for_s, self.internet.heal)
