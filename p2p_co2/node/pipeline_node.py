"""The group between neighbouring stages: microbatches on the network, and the training thread's work.

    carriers -> router -> membership, pipeline -> links
                              ^           |
       training thread: exchange(result) -+-> handed: what is to be computed next

A process with a stage is in two groups. That of its stage's replicas is an ordinary ``Node``; that of the
whole run is this. ``Membership`` says which peers are live in the neighbouring stages, and its signed record
in which stage a peer is.

Law: the training thread waits for nothing but its next work.
"""

from __future__ import annotations

import hashlib
import math
import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from p2p_co2.errors import LocalProtocolError
from p2p_co2.node.environment import Environment
from p2p_co2.node.shell import Shell
from p2p_co2.protocol.membership import Membership, NewPeer, positions
from p2p_co2.protocol.pipeline import DroppedMicrobatch, Key, Pipeline, Place, Sizes, UselessPayload, Work
from p2p_co2.telemetry import events as ev
from p2p_co2.wire.envelope import Opened
from p2p_co2.wire.heartbeat import HEARTBEAT_S
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.kinds import Machine, kind_of
from p2p_co2.wire.messages_pb2 import PeerRecord, Status

Result = Callable[[Pipeline, float], None]
"""What has come of a piece of work, told to the machine at this time."""
Listed = Callable[[int], Sequence[PeerRecord]]
"""Records of the other peers of a stage, as the DHT listed them last."""


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


@dataclass
class Handover:
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


class PipelineNode(Shell):
    """Make it once the stage's own node runs. ``environment``: of the whole run's group; ``status``: the
    stage node's, which says where this peer is."""

    is_urgent = True

    def __init__(
        self, environment: Environment, place: Place, sizes: Sizes, listed: Listed,
        status: Callable[[], Status], report: Callable[[ev.Event], None],
    ) -> None:  # fmt: skip
        super().__init__(environment, report)
        self._place = place
        self._status = status
        self.handed = Handover()
        self.machine = Pipeline(place, sizes)
        membership = Membership(place.me)
        self.beside = BesideStages(place, membership, listed)
        self.serve(membership, (membership, self.machine), self._own_status)
        self._fed_s = 2 * sizes.cap_s
        """How long it waits at its end for one more microbatch: a training thread that hangs says for ever
        that it trains."""
        self._stays_until = math.inf
        """When it begins nothing more; infinity while it goes on."""
        self._told_at = self.now()
        self._drawn: object = None

    # ---- what the training thread asks; on the loop

    def exchange(self, result: Result | None) -> None:
        """Take the ``result`` of the work that was handed, and hand the next to ``handed.work`` as soon as
        there is any."""
        try:
            if result is not None:
                result(self.machine, self.now())
                if self._stays_until < math.inf:
                    self._stays_until = self.now() + self._fed_s
            self.handed.is_asked = True
        except LocalProtocolError as error:
            self.life.crash(error)
        self.pump()

    def finish(self, at_once: bool) -> None:
        """Come to the end: begin nothing more as soon as nobody of the stage before trains, or
        ``at_once``."""
        self._stays_until = min(self._stays_until, self.now() + self._fed_s)
        self._close_if(at_once)
        self.pump()

    def _close_if(self, at_once: bool) -> None:
        is_ending = self._stays_until < math.inf and not self.machine.is_closing
        if is_ending and (at_once or self.now() >= self._stays_until or not self.beside.is_fed):
            self.machine.close(self.now())

    def draw(self, round_: int, rate: float) -> None:
        """Routes of round ``round_``, if they are not drawn among these peers yet. ``rate``: tokens a second
        of this peer, while it computes."""
        own = {PeerId(one.peer): one.tokens_per_s for one in self.beside.listed(self._place.stage)}
        behind = frozenset(self.beside.live(1))
        if (round_, frozenset(own), behind) == self._drawn:
            return
        self._drawn = round_, frozenset(own), behind
        seed = self.environment.group + b"%d %d" % (round_, self._place.stage)
        self.machine.draw({**own, self._place.me: rate}, hashlib.sha256(seed).digest(), rate)
        self.pump()

    # ---- what others may look at

    def positions(self, now: float, rounds_per_s: float) -> list[float]:
        """Where the neighbours are in the run: the swarm clock is common to all stages."""
        return positions(self.membership.live.values(), now, rounds_per_s)

    # ---- the shell's questions

    def has_worked(self, peer: PeerId) -> bool:
        return peer in self.membership.live

    def deliver(self, message: Opened, sender: PeerId, now: float) -> bool:
        if message.kind.machine is not Machine.PIPELINE:
            return super().deliver(message, sender, now)
        return self.machine.receive(message.body, sender, now)

    def pump(self, timers: bool = True) -> None:
        """As ``Shell.pump``; time, and the phases of others, may have ended what this peer waits for."""
        self._close_if(at_once=False)
        super().pump()

    def _look(self, now: float) -> None:
        self.membership.status = self._own_status()
        self.membership.found(self.beside.all(), now)
        for side in (-1, 1):
            for peer in self.beside.live(side):
                self.machine.join(peer, self._place.stage + side)
        self.membership.handle_timer(now)
        self.machine.handle_timer(now)
        self.machine.upload_bytes_per_s = self.links.upload_bytes_per_s
        self.pump()
        if now - self._told_at >= HEARTBEAT_S:
            self._tell()

    def _handle_events(self) -> bool:
        is_some = False
        while (event := self.membership.next_event()) is not None:
            is_some = True
            if isinstance(event, NewPeer):
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
        if self.machine.is_over and not self.handed.is_over:
            is_some = True
            self.handed.is_over = True
            self.membership.announce(self.now())
            self._tell()
        return is_some

    def say_goodbye(self, reason: str) -> None:
        self._tell()
        super().say_goodbye(reason)

    def _tell(self) -> None:
        self._told_at = self.now()
        machine = self.machine
        handed = self.handed
        waits_for = machine.waits_for if handed.is_asked else ""  # else it computes
        self.report(
            ev.StageProgress, stage=self._place.stage, waiting=machine.waiting, in_flight=machine.in_flight,
            counted=handed.counted, dropped=handed.drops, waiting_s=handed.waited_s,
            before=len(self.beside.live(-1)), behind=len(self.beside.live(1)), waits_for=waits_for,
        )  # fmt: skip

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

    def _link_opened(self, peer: PeerId, carrier: str, reason: str) -> None:
        super()._link_opened(peer, carrier, reason)
        if peer in self.membership.live:
            self._meet(peer)
            self.pump()

    def _link_lost(self, peer: PeerId, carrier: str, reason: str) -> None:
        super()._link_lost(peer, carrier, reason)
        self.machine.lose(peer)
        self.pump()
