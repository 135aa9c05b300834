"""A peer between the neighbouring stages: its microbatches on the network, and the training thread's work.

    carriers -> router -> membership, pipeline -> links
                              ^           |
       training thread: exchange(result) -+-> handed: what is to be computed next

A process with a stage is in two groups over one set of carriers: that of its stage's replicas, an ordinary
``Node``, and that of the whole run, where this is. Who is live in the neighbouring stages is what
``Membership`` says, and in which stage a peer is what its signed record says.

Laws: one loop, and the machines are called on it alone; what a peer sends can at worst be counted against it;
the training thread waits for nothing but its next work.
"""

from __future__ import annotations

import asyncio
import hashlib
import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from p2p_co2.errors import LocalProtocolError, RemoteProtocolError
from p2p_co2.node.environment import Environment, Links
from p2p_co2.node.links import LinkObserver
from p2p_co2.node.node import Lifetime
from p2p_co2.node.pump import Alarm
from p2p_co2.node.router import Router
from p2p_co2.node.state import Effects
from p2p_co2.protocol.membership import Joined, Membership, positions
from p2p_co2.protocol.pipeline import DroppedMicrobatch, Key, Pipeline, Place, Sizes, UselessPayload, Work
from p2p_co2.system.clock import ProcessClock
from p2p_co2.telemetry import events as ev
from p2p_co2.wire.envelope import Opened, head_of, unsent
from p2p_co2.wire.heartbeat import HEARTBEAT_S
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.kinds import Machine, kind_of
from p2p_co2.wire.messages_pb2 import PeerRecord, Ping, Status

Result = Callable[[Pipeline, float], None]
"""What has come of a piece of work, told to the machine at this time."""
Listed = Callable[[int], Sequence[PeerRecord]]
"""Records of the other peers of a stage, as the DHT listed them last."""
FED_CAPS = 2.0
"""Of the longest that a gradient is waited for: at its end a peer waits so long for one more microbatch of
those that train before it. A training thread that hangs says that it trains for as long as its process is."""


@dataclass(frozen=True)
class PipelineInbox:
    """Gives each message to its machine. ``status``: what this peer says of itself now."""

    membership: Membership
    pipeline: Pipeline
    status: Callable[[], Status]

    def take(self, message: Opened, sender: PeerId, now: float) -> bool:
        """False for bulk that nobody waited for. Raises ``RemoteProtocolError``."""
        kind = message.kind
        body = message.body
        if kind.machine is Machine.PIPELINE:
            return self.pipeline.receive(body, sender, now)
        if kind.machine is not Machine.MEMBERSHIP:
            raise RemoteProtocolError("wrong group", f"a {kind.name} between stages")
        if isinstance(body, Ping) and body.nonce:
            self.membership.status = self.status()
        said = message.said
        self.membership.receive(body, sender, now, said)
        return True


class BesideStages:
    """Who is in the stages beside ours: live by ``membership``, and in the stage that its signed record
    says. ``listed``: records of the other peers of a stage, as the DHT listed them last."""

    def __init__(self, place: Place, membership: Membership, listed: Listed) -> None:
        self._place = place
        self._membership = membership
        self.listed = listed

    def live(self, side: int) -> list[PeerId]:
        """Peers of the next stage (1) or the one before (-1)."""
        stage = self._place.stage + side
        return [peer for one in self.listed(stage) if (peer := PeerId(one.peer)) in self._membership.live]

    def stage_of(self, peer: PeerId) -> int | None:
        """None if it is in neither, or has no record yet."""
        sides = self._place.stage - 1, self._place.stage + 1
        return next((s for s in sides for one in self.listed(s) if one.peer == peer), None)

    def all(self) -> list[PeerId]:
        """That are listed."""
        stage = self._place.stage
        return [PeerId(one.peer) for s in (stage - 1, stage + 1) for one in self.listed(s)]

    @property
    def is_fed(self) -> bool:
        """Whether any peer of the stage before still trains, and so may send something."""
        live = self._membership.live
        return any(live[peer].status.phase == Status.TRAINING for peer in self.live(-1))


class End(Enum):
    """How far this peer is on its way to the end: it goes on, waits until nobody before it trains or sends
    anything, or begins nothing more."""

    GOES_ON = auto()
    WAITS = auto()
    CLOSED = auto()


@dataclass
class Ending:
    """``fed_s``: how long a peer that waits does so for one more microbatch; ``by``: until when it waits."""

    fed_s: float
    end: End = End.GOES_ON
    by: float = 0.0

    def fed(self, now: float) -> None:
        self.by = now + self.fed_s


@dataclass
class Handed:
    """What the network thread gives the training thread. ``work``: one piece for each that was asked for;
    ``dropped``: microbatches whose activations may go."""

    work: queue.SimpleQueue[Work] = field(default_factory=queue.SimpleQueue)
    dropped: queue.SimpleQueue[Key] = field(default_factory=queue.SimpleQueue)
    is_asked: bool = False
    """Whether the training thread waits for work."""
    is_over: bool = False
    """Whether no more work comes."""
    drops: int = 0
    counted: int = 0
    """Microbatches, as the training thread says."""
    waited_s: float = 0.0
    """Seconds that it stood still for microbatches."""


class PipelineNode:
    """Make it on the network thread once the stage's own node runs, then run ``run`` as a task.
    ``environment``: of the whole run's group; ``status``: the stage node's, which says where this peer is."""

    def __init__(
        self, environment: Environment, place: Place, sizes: Sizes, listed: Listed,
        status: Callable[[], Status], report: Callable[[ev.Event], None],
    ) -> None:  # fmt: skip
        self._environment = environment
        self._place = place
        self._report = report
        self._status = status
        clock = ProcessClock(environment.clock.monotonic, environment.clock.unix())
        self.now = clock.now
        self._alarm = Alarm(clock)
        self.life = Lifetime()
        self.handed = Handed()
        self.membership = Membership(place.me)
        self.machine = Pipeline(place, sizes)
        self.beside = BesideStages(place, self.membership, listed)
        effects = Effects(self.now, self.report, self.life.spawn, self._refuse, self.pump)
        self.router = Router(
            environment.group, PipelineInbox(self.membership, self.machine, self._own_status), effects,
            self._unreachable, self.life.crash, environment.quotas, environment.open_message,
        )  # fmt: skip
        self.links: Links | None = None
        self._ending = Ending(FED_CAPS * sizes.cap_s)
        self._drawn: object = None

    # ---- life

    async def run(self) -> None:
        """Until ``stop``."""
        environment = self._environment
        async with asyncio.TaskGroup() as tasks:
            self.life.tasks = tasks
            observer = LinkObserver(self._link_opened, self._link_lost, self._unreachable)
            heard = self.router.on_message, self.router.on_link_refused
            carriers = await environment.switch.join(environment.group, *heard, self._is_neighbour)
            find = environment.network.find_record
            self.links = environment.make_links(carriers, find, observer, tasks, environment.uplink)
            self.links.is_urgent = True
            background = tasks.create_task(self._keep_time(), name="pipeline")
            await self.life.stopping.wait()
            background.cancel()
            await self.links.drain(HEARTBEAT_S)
            environment.switch.leave(environment.group)
            links = self.links
            self.links = None
            await links.close()
        if self.life.bug is not None:
            raise self.life.bug

    def stop(self) -> None:
        self.life.stopping.set()

    def say_goodbye(self, reason: str) -> None:
        self._tell()
        self.membership.say_goodbye(reason)
        self.pump()

    # ---- what the training thread asks; on the loop

    def exchange(self, result: Result | None) -> None:
        """Take the ``result`` of the work that was handed, and hand the next to ``handed.work`` as soon as
        there is any."""
        try:
            if result is not None:
                result(self.machine, self.now())
                self._ending.fed(self.now())
            self.handed.is_asked = True
        except LocalProtocolError as error:
            self.life.crash(error)
        self.pump()

    def finish(self, at_once: bool) -> None:
        """Come to the end: begin nothing more as soon as nobody of the stage before trains, or
        ``at_once``."""
        if self._ending.end is End.GOES_ON:
            self._ending.end = End.WAITS
            self._ending.fed(self.now())
        self._close_if(at_once)
        self.pump()

    def _close_if(self, at_once: bool) -> None:
        ending = self._ending
        if ending.end is End.WAITS and (at_once or self.now() >= ending.by or not self.beside.is_fed):
            ending.end = End.CLOSED
            self.machine.close(self.now())

    def draw(self, round_: int, rate: float) -> None:
        """Routes of round ``round_``, if they are not drawn among these peers yet. ``rate``: tokens a second
        of this peer, while it computes."""
        own = {PeerId(one.peer): one.tokens_per_s for one in self.beside.listed(self._place.stage)}
        behind = frozenset(self.beside.live(1))
        if (round_, frozenset(own), behind) == self._drawn:
            return
        self._drawn = round_, frozenset(own), behind
        seed = self._environment.group + b"%d %d" % (round_, self._place.stage)
        self.machine.draw({**own, self._place.me: rate}, hashlib.sha256(seed).digest(), rate)
        self.pump()

    # ---- what others may look at

    def positions(self, now: float, rounds_per_s: float) -> list[float]:
        """Where the neighbours are in the run: the swarm clock is common to all stages."""
        return positions(self.membership.live.values(), now, rounds_per_s)

    def traffic_bytes(self) -> tuple[int, int]:
        """Of messages (up, down) since the start."""
        return (self.links.up_bytes if self.links is not None else 0), self.router.down_bytes

    # ---- the pump

    def pump(self, timers: bool = True) -> None:
        """Send what the machines have to send, carry out their events, and hand out work."""
        if self.links is None or self.life.stopping.is_set():
            return
        self._close_if(at_once=False)
        head = head_of(self._environment.group)
        while self._handle() or not self.membership.is_idle:
            for machine in (self.membership, self.machine):
                for peer, message in machine.messages_to_send():
                    self.links.post(peer, unsent(message, head), kind_of(message).is_bulk)
        if self.machine.is_over and not self.handed.is_over:
            self.handed.is_over = True
            self.membership.announce(self.now())
            self._tell()
        if not self._alarm.is_awake:
            self._alarm.ring_by(self._next_timer_at())

    def _handle(self) -> bool:
        """Whether there may be more to send."""
        is_some = self.machine.has_messages
        while (event := self.membership.next_event()) is not None:
            is_some = True
            if isinstance(event, Joined):
                self._meet(event.peer)
            else:
                self.machine.lose(event.peer)
        while (happened := self.machine.next_event()) is not None:
            is_some = True
            if isinstance(happened, DroppedMicrobatch):
                self.handed.dropped.put(happened.key)
                self.handed.drops += 1
                self.report(ev.MicrobatchDropped, reason=happened.reason)
            elif isinstance(happened, UselessPayload):
                self.router.on_useless(happened.sender, happened.error, kind_of(happened.kind()))
        if self.handed.is_asked and (work := self.machine.next_work(self.now())) is not None:
            self.handed.is_asked = False
            self.handed.work.put(work)  # after what was dropped: a step finds nothing in flight any more
        return is_some

    def _tell(self) -> None:
        machine = self.machine
        handed = self.handed
        waits_for = machine.waits_for if handed.is_asked else ""  # else it computes
        self.report(
            ev.StageProgress, stage=self._place.stage, waiting=machine.waiting, in_flight=machine.in_flight,
            counted=handed.counted, dropped=handed.drops, waiting_s=handed.waited_s,
            before=len(self.beside.live(-1)), behind=len(self.beside.live(1)), waits_for=waits_for,
        )  # fmt: skip

    async def _keep_time(self) -> None:
        told_at = self.now()
        while True:
            now = self.now()
            self.membership.status = self._own_status()
            self.membership.found(self.beside.all(), now)
            for side in (-1, 1):
                for peer in self.beside.live(side):
                    self.machine.join(peer, self._place.stage + side)
            self.membership.handle_timer(now)
            self.machine.handle_timer(now)
            if self.links is not None:
                self.machine.upload_bytes_per_s = self.links.upload_bytes_per_s
            self.pump()
            if now - told_at >= HEARTBEAT_S:
                told_at = now
                self._tell()
            await self._alarm.sleep(min(self._next_timer_at(), now + HEARTBEAT_S))

    def _next_timer_at(self) -> float:
        times = self.membership.get_timer(), self.machine.get_timer()
        return min((at for at in times if at is not None), default=self.now() + HEARTBEAT_S)

    def _own_status(self) -> Status:
        """Where this peer is; one that has begun its last microbatch trains no more."""
        said = self._status()
        phase = Status.DRAINING if self.machine.is_over else said.phase
        return Status(phase=phase, position=said.position, process=said.process)

    # ---- who is there

    def _meet(self, peer: PeerId) -> None:
        """A peer is live: the machine is told its stage, once its record is known."""
        if (stage := self.beside.stage_of(peer)) is not None:
            self.machine.join(peer, stage)

    def _is_neighbour(self, peer: PeerId) -> bool:
        return peer in self.membership.live

    def _link_opened(self, peer: PeerId, carrier: str, reason: str) -> None:
        self.report(ev.LinkOpened, other=peer, carrier=carrier, reason=reason)
        self.membership.link_opened(peer, self.now())
        if peer in self.membership.live:
            self._meet(peer)
        self.pump()

    def _link_lost(self, peer: PeerId, carrier: str, reason: str) -> None:
        self.report(ev.LinkLost, other=peer, carrier=carrier, reason=reason)
        self.membership.link_broke(peer)
        self.machine.lose(peer)
        self.pump()

    def _unreachable(self, peer: PeerId, reason: str) -> None:
        self.membership.unreachable(peer, f"unreachable: {reason}", self.now())
        self.pump()

    def _refuse(self, peer: str, reason: str, detail: str) -> None:
        self.router.refuse(peer, reason, detail)

    def report(self, kind: type[ev.Event], **fields: Any) -> None:  # the fields of one frozen event type
        self._report(kind(at=self._environment.clock.unix(), peer=self._place.me, **fields))
