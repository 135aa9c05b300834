"""One process of a simulated volunteer, from joining to its end, however that comes.

It is the program of a volunteer with its three threads in one loop: the network (the real ``Node``), the
tensor worker (``ledger``) and the training thread (``training``). What a process may not take with it into
the next one is here; what survives it (identity, line, disk, work done) is its ``Volunteer``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from p2p_co2.config import PeerConfig
from p2p_co2.errors import TransportError
from p2p_co2.node.environment import Clock, Environment
from p2p_co2.node.node import Node
from p2p_co2.node.progress import LACKS
from p2p_co2.planning.profiles import LinkProfile
from p2p_co2.protocol.wire.identity import Identity
from p2p_co2.simnet.internet import Endpoint
from p2p_co2.simnet.laws import Auditor
from p2p_co2.simnet.ledger import CountingLedger, Saved
from p2p_co2.simnet.links import VirtualLinks
from p2p_co2.simnet.rendezvous import Doorway
from p2p_co2.simnet.training import Pace, Progressed, Training
from p2p_co2.simnet.virtual_time import VirtualTime
from p2p_co2.simnet.work import Work
from p2p_co2.telemetry import events as ev

if TYPE_CHECKING:
    from p2p_co2.simnet.swarm import Swarm

EPOCH_S = 1.6e9
"""Unix time at which every simulation begins."""
JOIN_AGAIN_S = 5.0
"""Between two attempts to reach a seed."""
MEETS_WITHIN_S = 30.0
"""Two peers hear each other this long after the later one has begun, over any line: one that makes a round
alone before that may be ahead of others who begin beside it."""


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


class Process:
    """Made by ``Swarm.start``. ``on_end`` is called once, with how it ended."""

    def __init__(self, swarm: Swarm, volunteer: Volunteer) -> None:
        self.swarm, self.volunteer = swarm, volunteer
        volunteer.processes += 1
        self.loop = swarm.world.loop(1.0 + volunteer.drift)
        self.peer = volunteer.identity.peer_id
        self.endpoint = Endpoint(self.peer, volunteer.profile, self.loop)
        self.started_at = swarm.world.now
        self.stalls: list[tuple[float, float]] = []
        """From when until when it stood still, or will stand."""
        self.trained_at: float | None = None
        self.contributed_at: float | None = None
        self.finished = False
        self.node: Node | None = None
        self.training: Training | None = None
        self.links: VirtualLinks | None = None
        self._clock = volunteer.clock(swarm.world)
        self._is_cut = False
        self._node_task: asyncio.Task[None] | None = None
        self.ledger = self._new_ledger()
        self.task = self.loop.create_task(self._live())
        self.task.add_done_callback(self._ended)

    @property
    def alive(self) -> bool:
        return not self._is_cut

    @property
    def stalled_until(self) -> float:
        return self.stalls[-1][1] if self.stalls else 0.0

    @property
    def is_leaving(self) -> bool:
        return self.training is not None and self.training.asked_to_leave

    def _new_ledger(self) -> CountingLedger:
        swarm = self.swarm
        return swarm.make_ledger(
            self.peer, swarm.starts, swarm.internet.scale,
            work=self.volunteer.work, audit=Auditor(swarm.books, self.peer), loop=self.loop,
        )  # fmt: skip

    # ---- its life

    async def _live(self) -> None:
        swarm, volunteer = self.swarm, self.volunteer
        swarm.internet.endpoints[self.peer] = self.endpoint
        saved, start = volunteer.disk, Progressed()
        if saved is not None:
            self.ledger.restore(saved.fragments)
            start = saved.progressed
        doorway = Doorway(
            volunteer.identity, PeerConfig(name=volunteer.name), swarm.run_config, swarm.software,
            self.endpoint, swarm.rendezvous,
        )  # fmt: skip
        self._say_started()
        await self._join(doorway)
        node = self.node = swarm.make_node(
            Environment.of(doorway, self._clock, self._make_links, swarm.open_message),
            swarm.shape, swarm.state_bytes, self.ledger, self.ledger.agreed(), self.report,
        )  # fmt: skip
        swarm.inspector.saw_node(self, node)
        self._node_task = self.loop.create_task(node.run())
        self._node_task.add_done_callback(self._node_ended)
        training = self.training = Training(
            swarm.run_config, node, self.ledger, volunteer.pace, start,
            min_peers=swarm.min_peers, rng=swarm.rng, traffic=self._traffic,
        )  # fmt: skip
        if not await training.catch_up():
            if swarm.came_after_the_end(self):
                swarm.left_behind.add(volunteer.name)
            elif node.progress.met:
                swarm.inspector.not_given.add(self.peer)
            self.say(ev.Warned, text="no peer could give this one the agreed state; try again later")
            await self._leave("could not catch up")
            return
        if swarm.came_after_the_end(self):
            swarm.left_behind.add(volunteer.name)
        self.trained_at = swarm.world.now
        saver = self.loop.create_task(self._keep_saving())
        await training.train()
        saver.cancel()
        await training.flush()
        await self._leave("the run is over" if training.over else "stopped")

    async def _join(self, doorway: Doorway) -> None:
        while True:
            try:
                await doorway.join()
                return
            except TransportError as error:
                self.say(ev.Warned, text=str(error))
                await asyncio.sleep(JOIN_AGAIN_S)

    async def _leave(self, reason: str) -> None:
        assert self.node is not None
        assert self._node_task is not None
        digests = [agreed.digest for agreed in self.ledger.agreed()]
        versions = tuple(agreed.version for agreed in self.ledger.agreed())
        carriers = self.links.carriers_used() if self.links is not None else {}
        self.node.say_goodbye(reason)
        self.node.stop()
        await self._node_task
        self.save()
        self.finished = reason == "the run is over"
        self.say(
            ev.PeerFinished, reason=reason, digest=b"".join(digests).hex(), versions=versions,
            carriers=carriers,
        )  # fmt: skip

    async def _keep_saving(self) -> None:
        while True:
            await asyncio.sleep(self.swarm.checkpoint_every_s)
            self.save()

    def save(self) -> None:
        """Write a checkpoint: whole, at one moment."""
        assert self.training is not None
        self.volunteer.disk = Checkpoint(
            tuple(self.ledger.save()), self.training.progressed(), self.volunteer.work.units
        )

    def ask_to_leave(self) -> None:
        """Ctrl-C, once; before it trains there is nothing to finish."""
        if self.training is not None and self.trained_at is not None:
            self.training.ask_to_leave()
        else:
            self.die(host_up=True)

    def die(self, host_up: bool) -> None:
        """End now, without a word. ``host_up`` False: the whole machine lost its power."""
        if self._is_cut:
            return
        self._is_cut = True
        self.swarm.internet.died(self.endpoint, host_up)
        tasks = [self.task] + ([self._node_task] if self._node_task is not None else [])
        self.swarm.world.end(self.loop, tasks)
        self.swarm.process_ended(self)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """It ended by itself, or by a bug."""
        if self._is_cut:
            return
        self._is_cut = True
        self.swarm.internet.died(self.endpoint, host_up=True)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.swarm.bug(self, error)
        self.swarm.process_ended(self)

    def _node_ended(self, task: asyncio.Task[None]) -> None:
        if not self._is_cut and not task.cancelled() and (error := task.exception()) is not None:
            self.swarm.bug(self, error)

    def _has_met_all(self) -> bool:
        """Whether it hears all whom it may not have met yet (``MEETS_WITHIN_S``)."""
        lately, node = self.swarm.world.now - MEETS_WITHIN_S, self.node
        known = {self.peer, *node.membership.live} if node is not None else set()
        return node is None or not any(
            other.peer not in known
            for other in self.swarm.processes.values()
            if max(other.started_at, self.started_at) > lately
        )

    # ---- what it says

    def _make_links(self, carriers, find_record, observer, tasks, cap) -> VirtualLinks:  # type: ignore[no-untyped-def]
        self.links = VirtualLinks(self.swarm.internet, self.endpoint, observer)
        return self.links

    def _traffic(self) -> tuple[int, int]:
        return self.links.up_bytes if self.links is not None else 0, self.endpoint.down_bytes

    def say(self, kind: type[ev.Event], **fields: object) -> None:
        """An event of this process that is not the node's."""
        self.report(kind(at=self._clock.unix(), peer=self.peer, **fields))

    def report(self, event: ev.Event) -> None:
        if self._is_cut:
            return
        if isinstance(event, ev.FragmentApplied) and event.contributed and self.contributed_at is None:
            self.contributed_at = self.swarm.world.now
        if isinstance(event, ev.Warned) and event.text.startswith(LACKS):
            self.swarm.inspector.lacking.add(self.peer)
        if isinstance(event, ev.RoundBegan) and len(event.group) == 1 and not self._has_met_all():
            self.swarm.begins_unmet(self.peer, event.fragment, event.round)
        if isinstance(event, ev.TrainingEnded):
            self.swarm.inspector.saw_training_end(self, event.offers_within_s + event.settles_within_s)
        self.swarm.log.write(event)

    def _say_started(self) -> None:
        swarm, volunteer = self.swarm, self.volunteer
        self.say(
            ev.PeerStarted, name=volunteer.name, pid=1000 * volunteer.processes + volunteer.index,
            software=swarm.software, device="simulated", parameters=swarm.parameters,
            fragments=len(swarm.shape.blocks), run=swarm.run_config.digest().hex(),
        )  # fmt: skip
