"""One process of a simulated volunteer, from joining to its end, however that comes.

It is the program of a volunteer with its three threads in one loop: the network (the real ``Node``), the
tensor worker (``ledger``) and the training thread (``training``). What a process may not take with it into
the next one is here; what survives it (identity, line, disk, work done) is its ``Volunteer``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from p2p_co2.config import PeerConfig
from p2p_co2.errors import TransportError
from p2p_co2.node.environment import Clock, Environment
from p2p_co2.node.node import Node
from p2p_co2.planning.profiles import LinkProfile
from p2p_co2.protocol.wire.identity import Identity, PeerId
from p2p_co2.simnet.internet import Endpoint
from p2p_co2.simnet.laws import Auditor
from p2p_co2.simnet.ledger import Saved, Work
from p2p_co2.simnet.links import VirtualLinks
from p2p_co2.simnet.rendezvous import Doorway
from p2p_co2.simnet.scene import Scene
from p2p_co2.simnet.training import Pace, Training
from p2p_co2.simnet.virtual_time import ProcessLoop, VirtualTime, loop_of
from p2p_co2.telemetry import events as ev
from p2p_co2.trainer.network_thread import NodeView
from p2p_co2.trainer.synchroniser import Progressed

EPOCH_S = 1.6e9
"""Unix time at which every simulation begins."""
JOIN_AGAIN_S = 5.0
"""Between two attempts to reach a seed."""
REPORTS_IN_A_QUIET_BEAT = 2.0
"""A real peer writes its progress down every second; a day of a thousand would be 88 million lines, so in
rounds of minutes it is so often in one of their slow heartbeats."""
THE_RUN_IS_OVER = "the run is over"


@dataclass(frozen=True)
class Checkpoint:
    """What is on a volunteer's disk. ``units``: the work that is in it."""

    fragments: tuple[Saved, ...]
    progressed: Progressed
    units: int


@dataclass
class Volunteer:
    """A peer over all its processes. ``skew_s``: its date is off by so much; ``drift``: its clocks run too
    fast by this share."""

    name: str
    index: int
    identity: Identity
    profile: LinkProfile
    pace: Pace
    skew_s: float
    drift: float
    work: Work
    disk: Checkpoint | None = None
    processes: int = 0
    counted: Sequence[Sequence[int]] = ()
    """What its last process took for counted, per fragment and block."""

    def clock(self, world: VirtualTime) -> Clock:
        rate, start = 1.0 + self.drift, EPOCH_S + self.skew_s
        return Clock(lambda: world.now * rate, lambda: start + world.now * rate)


class Watch(Protocol):
    """Who is told what a process comes to. ``ended``: last of all and once, with an error that is ours."""

    def saw_node(self, process: Process, node: Node) -> None: ...
    def saw_arrival(self, process: Process, is_there: bool) -> None: ...
    def hear(self, process: Process, event: ev.Event) -> None: ...
    def ended(self, process: Process, error: BaseException | None) -> None: ...


class Process:
    """Of a ``volunteer``, in a ``scene``."""

    def __init__(self, scene: Scene, volunteer: Volunteer, watch: Watch) -> None:
        self._scene, self.volunteer, self._watch = scene, volunteer, watch
        volunteer.processes += 1
        loop = loop_of(scene.world, 1.0 + volunteer.drift)
        self.endpoint = Endpoint(volunteer.identity.peer_id, volunteer.profile, loop)
        self.started_at = scene.world.now
        self.stalls: list[tuple[float, float]] = []
        """From when until when it stood still, or will stand."""
        self.trained_at: float | None = None
        """Since when it trains, in virtual seconds."""
        self.contributed_at: float | None = None
        self.node: Node | None = None
        self.training: Training | None = None
        self.links: VirtualLinks | None = None
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
        return self.training is not None and self.training.asked_to_leave

    # ---- its life

    async def _live(self) -> None:
        scene, volunteer, settings = self._scene, self.volunteer, self._scene.settings
        scene.internet.endpoints[self.peer] = self.endpoint
        saved, start = volunteer.disk, Progressed()
        if saved is not None:
            self.ledger.restore(saved.fragments)
            start = saved.progressed
        config = PeerConfig(name=volunteer.name)
        doorway = Doorway(
            volunteer.identity, config, settings.run, scene.software, self.endpoint, scene.rendezvous
        )
        self._say(
            ev.PeerStarted, name=volunteer.name, pid=1000 * volunteer.processes + volunteer.index,
            software=scene.software, device="simulated", parameters=settings.parameters,
            fragments=len(settings.blocks), run=settings.run.digest().hex(),
        )  # fmt: skip
        await self._join(doorway)
        node = self.node = scene.make_node(
            Environment.of(doorway, volunteer.clock(scene.world), self._make_links, scene.open_message),
            scene.shape, scene.state_bytes, self.ledger, self.ledger.agreed(), self._report,
        )  # fmt: skip
        self._watch.saw_node(self, node)
        node_task = self.loop.create_task(node.run())
        node_task.add_done_callback(self._node_ended)
        self._tasks.append(node_task)
        view = NodeView(node, self.loop, self._report_training, lambda: None)
        training = Training(settings.run, view, self.ledger, volunteer.pace, scene.rng)
        self.training = training
        is_there = await training.arrive(start, settings.min_peers)
        self._watch.saw_arrival(self, is_there)
        if not is_there:
            self._say(ev.Warned, text="no peer could give this one the agreed state; try again later")
            await self._leave("could not catch up")
            return
        self.trained_at = scene.world.now
        saver = self.loop.create_task(self._keep_saving())
        self._tasks.append(saver)
        await training.train()
        saver.cancel()
        await training.flush()
        await self._leave(THE_RUN_IS_OVER if training.is_over else "stopped")

    async def _join(self, doorway: Doorway) -> None:
        while True:
            try:
                await doorway.join()
                return
            except TransportError as error:
                self._say(ev.Warned, text=str(error))
                await asyncio.sleep(JOIN_AGAIN_S)

    async def _leave(self, reason: str) -> None:
        assert self.node is not None
        agreed = self.ledger.agreed()
        carriers = self.links.carriers_used() if self.links is not None else {}
        self.node.say_goodbye(reason)
        self.node.stop()
        await self._tasks[1]
        if self.trained_at is not None:
            self._save()
        self._say(
            ev.PeerFinished, reason=reason, digest=b"".join(one.digest for one in agreed).hex(),
            versions=tuple(one.version for one in agreed), carriers=carriers,
        )  # fmt: skip

    async def _keep_saving(self) -> None:
        while True:
            await asyncio.sleep(self._scene.settings.checkpoint_every_s)
            self._save()

    def _save(self) -> None:
        """Write a checkpoint: whole, at one moment."""
        assert self.training is not None
        saved, progressed = tuple(self.ledger.save()), self.training.progressed()
        self.volunteer.disk = Checkpoint(saved, progressed, self.volunteer.work.units)

    # ---- its end

    def ask_to_leave(self) -> None:
        """Ctrl-C, once; before it trains there is nothing to finish."""
        if self.training is not None and self.trained_at is not None:
            self.training.ask_to_leave()
        else:
            self.die(host_up=True)

    def die(self, host_up: bool) -> None:
        """End now, without a word. ``host_up`` False: the whole machine lost its power."""
        if self.alive:
            self.alive = False
            self._scene.internet.died(self.endpoint, host_up)
            self._scene.world.end(self.loop, self._tasks)
            self._watch.ended(self, None)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """It ended by itself, or by a bug."""
        if self.alive:
            self.alive = False
            self._scene.internet.died(self.endpoint, host_up=True)
            self._watch.ended(self, None if task.cancelled() else task.exception())

    def _node_ended(self, task: asyncio.Task[None]) -> None:
        if self.alive and not task.cancelled() and (error := task.exception()) is not None:
            self.alive = False
            self._watch.ended(self, error)

    # ---- what it says

    def _make_links(self, carriers, find_record, observer, tasks, cap) -> VirtualLinks:  # type: ignore[no-untyped-def]
        self.links = VirtualLinks(self._scene.internet, self.endpoint, observer)
        return self.links

    def _say(self, kind: type[ev.Event], **fields: Any) -> None:
        """An event of this process that is not the node's."""
        at = self.volunteer.clock(self._scene.world).unix()
        self._report(kind(at=at, peer=self.peer, **fields))

    def _report_training(self, kind: type[ev.Event], fields: Mapping[str, Any]) -> None:
        """Of the training thread, with the bytes that messages stand for."""
        if kind is ev.Progress and self.node is not None:
            now, every_s = self._scene.world.now, self.node.membership.quiet_s / REPORTS_IN_A_QUIET_BEAT
            if fields["phase"] == "training" and now - self._reported_at < every_s:
                return
            self._reported_at = now
            up_bytes = self.links.up_bytes if self.links is not None else 0
            fields = {**fields, "up_bytes": up_bytes, "down_bytes": self.endpoint.down_bytes}
        self._say(kind, **fields)

    def _report(self, event: ev.Event) -> None:
        if self.alive:
            self._watch.hear(self, event)
