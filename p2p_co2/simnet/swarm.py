"""A whole simulated swarm: volunteers, their processes, the net between them, faults, and the laws.

``simulate`` runs one to its end and says what came of it. The same settings and the same seed give the same
events, byte by byte, in any process on any machine: everything is drawn from the seed, every queue is
ordered, and no real clock is read.
"""

from __future__ import annotations

import gc
import hashlib
import random
from collections import Counter
from collections.abc import Callable

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from p2p_co2.node.node import Node
from p2p_co2.planning.profiles import profile_of
from p2p_co2.protocol.schedule import FIRST_ROUND_BOUND_S, FLUSH_CAP_S, LOADS_CAP_S, SLEW, settle_bound_s
from p2p_co2.protocol.wire.identity import Identity, PeerId
from p2p_co2.simnet.eventlog import EventLog
from p2p_co2.simnet.internet import Noise
from p2p_co2.simnet.laws import Books
from p2p_co2.simnet.ledger import CountingLedger
from p2p_co2.simnet.oversight import Inspector, Result
from p2p_co2.simnet.process import Process, Volunteer
from p2p_co2.simnet.rendezvous import Seed
from p2p_co2.simnet.scene import Scene, Settings
from p2p_co2.simnet.work import Work
from p2p_co2.trainer.arrival import CATCH_UP_BOUND_S, GATHER_BOUND_S

SPARE_S = 60.0
"""To reach a seed, for the step that is under way when the last round is over, and to hang up."""


class _Witness(Identity):
    """An identity whose signatures the audit sees."""

    def __init__(self, key: Ed25519PrivateKey, books: Books) -> None:
        super().__init__(key)
        self._books = books

    def sign(self, context: bytes, content: bytes) -> bytes:
        self._books.sign(context, content)
        return super().sign(context, content)


class Swarm:
    """See the module. ``make_node`` and ``make_ledger`` are what a test plants its bugs in, and the door for
    another node."""

    def __init__(
        self,
        settings: Settings,
        log: EventLog,
        make_node: Callable[..., Node] = Node,
        make_ledger: Callable[..., CountingLedger] = CountingLedger,
    ) -> None:
        self.scene = scene = Scene(settings, log, make_node, make_ledger)
        self.settings, self.log, self.world, self.books = settings, log, scene.world, scene.books
        self.internet, self.rendezvous = scene.internet, scene.rendezvous
        self.volunteers = [self._volunteer(index) for index in range(settings.peers)]
        self.processes: dict[int, Process] = {}
        self.inspector = Inspector(scene, self.volunteers, self.processes, self._process_ended)
        self.faults: Counter[str] = Counter()
        """What went wrong, by its name."""
        self.ended_early = False
        self._starts_again: dict[int, bool] = {}
        self._bug: BaseException | None = None
        calm_at = settings.faults.calm_at if settings.faults is not None else 0.0
        self._last_start_at = max(settings.start_spread_s, calm_at)
        """Nobody starts after this."""

    def _volunteer(self, index: int) -> Volunteer:
        settings, seed = self.settings, self.settings.seed
        rng = random.Random(f"{seed}/volunteer/{index}")
        key = hashlib.sha256(f"{seed}/identity/{index}".encode()).digest()
        identity = _Witness(Ed25519PrivateKey.from_private_bytes(key), self.books)
        step_s = settings.step_s * settings.speed_spread ** rng.uniform(-1, 1)
        work = self.books.works[identity.peer_id] = Work(f"{seed}/{index}")
        return Volunteer(
            name=f"peer-{index}",
            index=index,
            identity=identity,
            profile=profile_of(settings.profile, seed, index),
            step_s=step_s,
            skew_s=rng.uniform(-1, 1) * settings.largest_skew_s,
            drift=rng.uniform(-1, 1) * settings.largest_drift,
            work=work,
        )

    def peer_ids(self) -> list[PeerId]:
        return [volunteer.identity.peer_id for volunteer in self.volunteers]

    # ---- the run

    def run(self) -> Result:
        """Start everybody and let time pass until all have ended. Raises what a bug of ours raised in it."""
        rng = random.Random(f"{self.settings.seed}/start")
        for volunteer in self.volunteers:
            at = rng.uniform(0, self.settings.start_spread_s)
            self.world.call_at(at, self.start, volunteer.index, False)
        if self.settings.faults is not None:
            self.settings.faults.plan(self)
        before = gc.get_threshold()
        gc.set_threshold(200_000, 20, 50)  # tasks and futures are many and short-lived
        try:
            self.world.run(self.limit_s)
        finally:
            gc.set_threshold(*before)
            for process in list(self.processes.values()):
                process.die(host_up=True)
            self.world.unwind()
            for text in self.world.errors:
                self.books.broken("", "bug", text)
        if self._bug is not None:
            raise self._bug
        by_nature = {
            "behind NAT": sum(v.profile.nat != "open" for v in self.volunteers),
            "skewed clock": sum(v.skew_s != 0.0 and v.drift != 0.0 for v in self.volunteers),
        }
        faults = self.faults + self.internet.noises + Counter(by_nature)
        return self.inspector.result(faults, self.ended_early)

    @property
    def limit_s(self) -> float:
        """When the run is over for everybody: the last peer that starts has joined, loaded all states,
        trained for all rounds by the slowest clock, and flushed."""
        settings, run = self.settings, self.settings.run
        joined_s = self._last_start_at + GATHER_BOUND_S + CATCH_UP_BOUND_S * (1 + run.fragments)
        waits_s = run.outer.blocking_rounds * run.fragments * FIRST_ROUND_BOUND_S
        trained_s = (settings.planned_s + waits_s) / (1 - SLEW) + settings.slowest_step_s
        return joined_s + trained_s + FLUSH_CAP_S + settle_bound_s(FLUSH_CAP_S) + LOADS_CAP_S + SPARE_S

    def stop(self) -> None:
        """Let ``run`` end now, with what there is by then; a signal handler may call it at any time."""
        self.ended_early = True
        self.world.stop()

    # ---- what happens to peers

    def start(self, index: int, with_disk: bool) -> None:
        """Start a volunteer's next process; once the one that runs has left, if it is leaving."""
        running = self.processes.get(index)
        if running is not None:
            if running.is_leaving:
                self._starts_again[index] = with_disk
            return
        volunteer = self.volunteers[index]
        if not with_disk:
            volunteer.disk = None
        work, saved = volunteer.work, volunteer.disk.units if volunteer.disk is not None else 0
        if work.units > saved:
            # What went down with the last process and is in no agreed state that it knew.
            reached = (max(saved, reached) for counted in volunteer.counted for reached in counted)
            lost = sum(len(work.kept(start, work.units)) for start in reached)
            self.books.written_off["went down with a process"] += lost
            work.lost.update(range(saved + 1, work.units + 1))
        old = self.internet.endpoints.get(volunteer.identity.peer_id)
        if old is not None:
            self.internet.break_links(old, "connection reset")
        if volunteer.processes:
            self.faults["restart with its disk" if with_disk else "restart without its disk"] += 1
        self.inspector.starts(volunteer.identity.peer_id)
        self.processes[index] = Process(self.scene, volunteer, self.inspector)

    def _process_ended(self, process: Process, error: BaseException | None) -> None:
        index = process.volunteer.index
        process.volunteer.counted = [tuple(fragment.counted) for fragment in process.ledger.fragments]
        if self.processes.get(index) is process:
            del self.processes[index]
        if error is not None:
            self._bug = self._bug or error
            self.world.stop()
        elif index in self._starts_again:
            self.world.call_at(self.world.now, self.start, index, self._starts_again.pop(index))
        elif not self.processes and self.world.now > self._last_start_at:
            self.world.stop()

    def kill(self, index: int, host_up: bool) -> None:
        process = self.processes.get(index)
        if process is not None:
            self.books.views_differ()
            self.faults["crash" if host_up else "power loss"] += 1
            process.die(host_up)

    def leave(self, index: int) -> None:
        """Ctrl-C."""
        process = self.processes.get(index)
        if process is not None:
            self.faults["leave"] += 1
            process.ask_to_leave()

    def stall(self, index: int, until: float) -> None:
        """SIGSTOP until then."""
        process = self.processes.get(index)
        if process is None or process.stalled_until > self.world.now:
            return
        self.books.views_differ()
        self.faults["stall"] += 1
        process.stalls.append((self.world.now, until))
        process.loop.stall()
        self.world.call_at(until, self._go_on, process)

    def _go_on(self, process: Process) -> None:
        self.books.views_differ()
        if process.alive:
            process.loop.go_on()

    # ---- what happens to the net

    def split(self, sides: dict[PeerId, int]) -> None:
        self.faults["split"] += 1
        self.internet.split(sides)
        self._net_changed()

    def cut_pair(self, first: PeerId, second: PeerId) -> None:
        self.faults["cut pair"] += 1
        self.internet.cut_pair(first, second)
        self._net_changed()

    def heal(self) -> None:
        self.internet.heal()
        self._net_changed()

    def _net_changed(self) -> None:
        self.books.views_differ()
        self.rendezvous.net_changed()

    def set_noise(self, noise: Noise) -> None:
        self.books.views_differ()
        self.internet.set_noise(noise)

    def set_seed(self, seed: Seed, is_up: bool) -> None:
        seed.is_up = is_up
        self.faults["seed down"] += not is_up


def simulate(settings: Settings, log: EventLog | None = None) -> Result:
    """Run one simulation to its end. Raises what a bug of ours raised in it."""
    log = log or EventLog()
    try:
        return Swarm(settings, log).run()
    finally:
        log.close()
