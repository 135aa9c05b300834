"""One process of a simulated volunteer, from joining to its end, however that comes.

It is the program of a volunteer with its three threads in one loop: the network (the real ``Node``), the
tensor worker (``ledger``) and the training thread (``Training``: the real ``Synchroniser`` over units of
work). What survives a process (identity, line, disk, work done) is its ``Volunteer``.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from p2p_co2.config import PeerConfig
from p2p_co2.errors import TransportError
from p2p_co2.node.environment import Clock, Environment
from p2p_co2.node.node import Node
from p2p_co2.planning.profiles import LinkProfile
from p2p_co2.simnet.internet import Endpoint, VirtualLinks
from p2p_co2.simnet.laws import Auditor
from p2p_co2.simnet.ledger import CountingModel
from p2p_co2.simnet.rendezvous import Doorway
from p2p_co2.simnet.scene import SOFTWARE, Scene
from p2p_co2.simnet.virtual_time import ProcessLoop, VirtualTime, loop_of
from p2p_co2.simnet.work import Saved, WorkUnits
from p2p_co2.telemetry import events as ev
from p2p_co2.trainer.arrival import Arrival, caught_up
from p2p_co2.trainer.synchroniser import Progressed, Source, Synchroniser
from p2p_co2.trainer.views import NodeView
from p2p_co2.wire.heartbeat import SLOWEST_HEARTBEAT_S
from p2p_co2.wire.identity import Identity, PeerId

EPOCH = 1.6e9
"""Unix time at which every simulation begins."""
LOOK_EVERY_S = 0.25
"""How often a training thread that waits for others looks where they are."""
REPORTS_IN_A_QUIET_BEAT = 2.0
"""How often a peer writes its progress down in one slow heartbeat. Every second, as a real one does, a day of
a thousand would be 88 million lines."""
TOKENS_PER_STEP = 1000


@dataclass(frozen=True)
class Disk:
    """What is on a volunteer's disk. ``units``: the work that is in it."""

    fragments: tuple[Saved, ...] = ()
    progressed: Progressed = field(default_factory=Progressed)
    units: int = 0


@dataclass
class Volunteer:
    """A peer over all its processes. ``step_s``: of an inner step; ``skew_s``: its date is off by so much;
    ``drift``: its clocks run too fast by this share; ``counted``: what its last process took for counted, of
    each block of each fragment."""

    name: str
    index: int
    identity: Identity
    profile: LinkProfile
    step_s: float
    skew_s: float
    drift: float
    work: WorkUnits
    disk: Disk = field(default_factory=Disk)
    processes: int = 0
    counted: Sequence[int] = ()

    def clock(self, world: VirtualTime) -> Clock:
        rate = 1.0 + self.drift
        start = EPOCH + self.skew_s
        return Clock(lambda: world.now * rate, lambda: start + world.now * rate)


class Training:
    """The training thread of one process once it is where the swarm is. It goes through the waits of the
    synchroniser, ``sync``, without blocking; an outcome sets ``news``."""

    def __init__(self, scene: Scene, volunteer: Volunteer, sync: Synchroniser, news: asyncio.Event) -> None:
        self._rng = scene.rng
        self._volunteer = volunteer
        self.sync = sync
        self._news = news
        sync.take_outcomes()
        sync.report()

    @property
    def is_over(self) -> bool:
        return self.sync.account.is_over(self.sync.position)

    def ask_to_leave(self) -> None:
        """Ctrl-C, while it trains: whatever it waits for, it looks up."""
        self.sync.stopped = True
        self._news.set()

    async def train(self) -> None:
        """Until the run is over or this peer is asked to leave."""
        while not (self.sync.stopped or self.is_over):
            await asyncio.sleep(self._volunteer.step_s * self._rng.uniform(0.9, 1.1))
            self._volunteer.work.units += 1
            await self.stand_still(self.sync.step_waits(TOKENS_PER_STEP, math.nan))

    async def stand_still(self, waits: Iterator[float]) -> None:
        """As ``synchroniser.stand_still``."""
        for wait_s in waits:
            alarm = asyncio.get_running_loop().call_later(max(wait_s, LOOK_EVERY_S), self._news.set)
            try:
                await self._news.wait()
            finally:
                alarm.cancel()
                self._news.clear()


class ProcessWatch(Protocol):
    """Who is told what a process comes to. ``ended``: last of all and once, with an error that is ours."""

    def saw_node(self, process: Process, node: Node) -> None: ...
    def saw_arrival(self, process: Process, is_there: bool) -> None: ...
    def hear(self, process: Process, event: ev.Event) -> None: ...
    def ended(self, process: Process, error: BaseException | None) -> None: ...


class Process:
    """Of a ``volunteer``, in a ``scene``. ``stalls``: from when until when it stood still, or will stand;
    ``trained_at``: since when it trains, in virtual seconds; ``contributed_at``: when it was in a mean
    first."""

    def __init__(self, scene: Scene, volunteer: Volunteer, watch: ProcessWatch) -> None:
        self._scene = scene
        self.volunteer = volunteer
        self._watch = watch
        volunteer.processes += 1
        loop = loop_of(scene.world, 1.0 + volunteer.drift)
        self.endpoint = Endpoint(volunteer.identity.peer_id, volunteer.profile, loop)
        self.started_at = scene.world.now
        self.stalls: list[tuple[float, float]] = []
        self.trained_at: float | None = None
        self.contributed_at: float | None = None
        self.node: Node | None = None
        self._training: Training | None = None
        self.alive = True
        self._reported_at = 0.0
        self.ledger = scene.make_ledger(
            self.peer, scene.starts, scene.internet.scale,
            work=volunteer.work, audit=Auditor(scene.books, self.peer), loop=self.loop,
        )  # fmt: skip
        self._tasks = [self.loop.create_task(self._live())]
        self._tasks[0].add_done_callback(self._ended)

    @property
    def peer(self) -> PeerId:
        return self.endpoint.peer

    @property
    def loop(self) -> ProcessLoop:
        return self.endpoint.loop

    @property
    def stalled_until(self) -> float:
        return self.stalls[-1][1] if self.stalls else 0.0

    @property
    def is_leaving(self) -> bool:
        return self._training is not None and self._training.sync.stopped

    # ---- its life

    async def _live(self) -> None:
        scene = self._scene
        volunteer = self.volunteer
        settings = self._scene.settings
        scene.internet.endpoints[self.peer] = self.endpoint
        if volunteer.disk.fragments:
            self.ledger.restore(volunteer.disk.fragments)
        doorway = Doorway(
            volunteer.identity, PeerConfig(name=volunteer.name), settings.run, SOFTWARE, self.endpoint,
            scene.rendezvous,
        )  # fmt: skip
        self._say(
            ev.PeerStarted, name=volunteer.name, pid=1000 * volunteer.processes + volunteer.index,
            software=SOFTWARE, device="simulated", parameters=settings.parameters,
            fragments=len(settings.blocks), run=settings.run.digest().hex(),
        )  # fmt: skip
        await self._join(doorway)
        clock = volunteer.clock(scene.world)
        environment = Environment(
            doorway, clock, lambda *given: VirtualLinks(scene.internet, self.endpoint, given[2]),
            scene.open_message,
        )  # fmt: skip
        node = self.node = Node(
            environment, scene.shape, scene.state_bytes, self.ledger, self.ledger.agreed(), self._report
        )
        self._watch.saw_node(self, node)
        self._tasks.append(self.loop.create_task(node.run()))
        self._tasks[1].add_done_callback(self._ended)
        is_there = await self._arrive(node)
        self._watch.saw_arrival(self, is_there)
        if not is_there:
            self._say(ev.Warned, text="no peer could give this one the agreed state; try again later")
            await self._leave(node, "could not catch up")
            return
        training = self._training = self._begin(node, clock)
        self.trained_at = scene.world.now
        self._tasks.append(self.loop.create_task(self._keep_saving(training.sync)))
        await training.train()
        self._tasks[2].cancel()
        await training.stand_still(training.sync.flush_waits(training.is_over))
        await self._leave(node, ev.THE_RUN_IS_OVER if training.is_over else "stopped")

    async def _join(self, doorway: Doorway) -> None:
        while True:
            try:
                await doorway.rebootstrap()
                return
            except TransportError as error:
                self._say(ev.Warned, text=str(error))
                await asyncio.sleep(SLOWEST_HEARTBEAT_S)

    async def _arrive(self, node: Node) -> bool:
        """Wait until this peer is where the swarm is or is sure to be alone; False if that takes too long, or
        if the others went before this peer had what they had."""
        now = node.clock.monotonic
        arrival = Arrival(node, now(), self._scene.settings.run.group_size)
        try:
            while not arrival.is_there(now()):  # noqa: ASYNC110  # nothing is set when it is
                await asyncio.sleep(LOOK_EVERY_S)
        except TransportError:
            return False
        return True

    def _begin(self, node: Node, clock: Clock) -> Training:
        scene = self._scene
        ledger = self.ledger
        run = self._scene.settings.run
        view = NodeView(node, self.loop, self._report_training, lambda: None)
        news = asyncio.Event()
        ledger.on_outcome = news.set
        now = clock.monotonic
        start = caught_up(self.volunteer.disk.progressed, view.swarm_position(), run.clock, now())
        model = CountingModel(ledger.work, [agreed.version for agreed in ledger.agreed()])
        source = Source(now, lambda: scene.rng.randbytes(8))
        sync = Synchroniser(run, cast(Any, model), cast(Any, ledger), view, start, source)
        return Training(scene, self.volunteer, sync, news)

    async def _leave(self, node: Node, reason: str) -> None:
        agreed = self.ledger.agreed()
        carriers = node.links.carriers_used()
        node.say_goodbye(reason)
        node.stop()
        await self._tasks[1]
        if self._training is not None:
            self._save(self._training.sync)
        self._say(
            ev.PeerFinished, reason=reason, digest=b"".join(one.digest for one in agreed).hex(),
            versions=tuple(one.version for one in agreed), carriers=carriers,
        )  # fmt: skip

    async def _keep_saving(self, sync: Synchroniser) -> None:
        while True:
            await asyncio.sleep(self._scene.settings.checkpoint_every_s)
            self._save(sync)

    def _save(self, sync: Synchroniser) -> None:
        """Write a checkpoint: whole, at one moment."""
        progressed = Progressed(sync.position, sync.inner_steps, sync.figures.tokens)
        self.volunteer.disk = Disk(tuple(self.ledger.save()), progressed, self.volunteer.work.units)

    # ---- its end

    def ask_to_leave(self) -> None:
        """Ctrl-C, once; before it trains there is nothing to finish."""
        if self._training is not None:
            self._training.ask_to_leave()
        else:
            self.die(host_up=True)

    def die(self, host_up: bool) -> None:
        """End now, without a word. ``host_up`` False: the whole machine lost its power."""
        if self.alive:
            self.alive = False
            self._scene.internet.died(self.endpoint, host_up)
            self.loop.die(self._tasks)
            self._watch.ended(self, None)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """It ended by itself, or by a bug; its node alone only by a bug."""
        error = None if task.cancelled() else task.exception()
        if self.alive and (task is self._tasks[0] or error is not None):
            self.alive = False
            self._scene.internet.died(self.endpoint, host_up=True)
            self._watch.ended(self, error)

    # ---- what it says

    def _say(self, kind: type[ev.Event], **fields: Any) -> None:
        """An event of this process that is not the node's."""
        at = self.volunteer.clock(self._scene.world).unix()
        self._report(kind(at=at, peer=self.peer, **fields))

    def _report_training(self, kind: type[ev.Event], fields: Mapping[str, Any]) -> None:
        """Of the training thread, with the bytes that messages stand for."""
        if kind is ev.Progress and self.node is not None:
            now = self._scene.world.now
            every_s = self.node.membership.quiet_s / REPORTS_IN_A_QUIET_BEAT
            if fields["phase"] == "training" and now - self._reported_at < every_s:
                return
            self._reported_at = now
            fields = {**fields, "down_bytes": self.endpoint.down_bytes}
        self._say(kind, **fields)

    def _report(self, event: ev.Event) -> None:
        if self.alive:
            self._watch.hear(self, event)
