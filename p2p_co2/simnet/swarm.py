"""A whole simulated swarm: volunteers, their processes, the net between them, faults, and the laws.

``run`` plays one to its end and says what came of it. The same settings and the same seed give the same
events, byte by byte, in any process on any machine: everything is drawn from the seed, every queue is
ordered, and no real clock is read.
"""

from __future__ import annotations

import gc
import hashlib
import random
from collections.abc import Callable

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from p2p_co2.planning.profiles import profile_of
from p2p_co2.simnet.eventlog import EventLog
from p2p_co2.simnet.laws import Books
from p2p_co2.simnet.ledger import CountingLedger
from p2p_co2.simnet.oversight import Inspector, Result
from p2p_co2.simnet.process import Disk, Process, Volunteer
from p2p_co2.simnet.scene import Scene, Settings
from p2p_co2.simnet.work import WorkUnits
from p2p_co2.trainer.arrival import CATCH_UP_BOUND_S
from p2p_co2.wire.identity import Identity, PeerId


class _Witness(Identity):
    """An identity whose signatures the audit sees."""

    def __init__(self, key: Ed25519PrivateKey, books: Books) -> None:
        super().__init__(key)
        self._books = books

    def sign(self, context: bytes, content: bytes) -> bytes:
        self._books.sign(context, content)
        return super().sign(context, content)


class VirtualSwarm:
    """See the module. ``make_ledger`` is where a test plants its bugs."""

    def __init__(
        self, settings: Settings, log: EventLog, make_ledger: Callable[..., CountingLedger] = CountingLedger
    ) -> None:
        self.scene = scene = Scene(settings, log, make_ledger)
        self.settings = settings
        self.log = log
        self.world = scene.world
        self.books = scene.books
        self.internet = scene.internet
        self.rendezvous = scene.rendezvous
        self._faults = scene.internet.faults
        self.volunteers = [self._volunteer(index) for index in range(settings.peers)]
        self.processes: dict[int, Process] = {}
        self.inspector = Inspector(scene, self.volunteers, self.processes, self._process_ended)
        self.ended_early = False
        self._bug: BaseException | None = None
        calm_at = settings.faults.calm_at if settings.faults is not None else 0.0
        self._last_start_at = max(settings.start_spread_s, calm_at)
        """Nobody starts after this."""

    def _volunteer(self, index: int) -> Volunteer:
        settings = self.settings
        seed = self.settings.seed
        rng = random.Random(f"{seed}/volunteer/{index}")
        key = hashlib.sha256(f"{seed}/identity/{index}".encode()).digest()
        identity = _Witness(Ed25519PrivateKey.from_private_bytes(key), self.books)
        work = self.books.works[identity.peer_id] = WorkUnits(f"{seed}/{index}")
        return Volunteer(
            f"peer-{index}", index, identity, profile_of(settings.profile, seed, index),
            step_s=settings.step_s * settings.speed_spread ** rng.uniform(-1, 1),
            skew_s=rng.uniform(-1, 1) * settings.largest_skew_s,
            drift=rng.uniform(-1, 1) * settings.largest_drift, work=work,
        )  # fmt: skip

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
        return self.inspector.result(self.ended_early)

    @property
    def limit_s(self) -> float:
        """When a run is cut off that is not over: twice what its rounds take after the last start, and time
        to load each fragment, to wait for awaited rounds, and for what a run's begin and end take."""
        run = self.settings.run
        loads = 4 + run.fragments * (1 + run.outer.blocking_rounds)
        return self._last_start_at + 2 * self.settings.planned_s + loads * CATCH_UP_BOUND_S

    def stop(self) -> None:
        """Let ``run`` end now, with what there is by then; a signal handler may call it at any time."""
        self.ended_early = True
        self.world.stop()

    # ---- what happens to peers

    def start(self, index: int, with_disk: bool) -> None:
        """Start a volunteer's next process; once the one that runs has left, if it is leaving."""
        running = self.processes.get(index)
        volunteer = self.volunteers[index]
        if running is not None:
            if running.is_leaving:
                self.world.call_at(self.world.now + 1.0, self.start, index, with_disk)
            return
        if not with_disk:
            volunteer.disk = Disk()
        work = volunteer.work
        saved = volunteer.disk.units
        if work.units > saved:
            # What went down with the last process and is in no agreed state that it knew.
            lost = (len(work.kept(max(saved, reached), work.units)) for reached in volunteer.counted)
            self.books.written_off["went down with a process"] += sum(lost)
            work.lost.update(range(saved + 1, work.units + 1))
        old = self.internet.endpoints.get(volunteer.identity.peer_id)
        if old is not None:
            self.internet.break_links(old, "connection reset")
            self._faults["restart with its disk" if with_disk else "restart without its disk"] += 1
        self.inspector.starts(volunteer.identity.peer_id)
        self.processes[index] = Process(self.scene, volunteer, self.inspector)

    def _process_ended(self, process: Process, error: BaseException | None) -> None:
        fragments = process.ledger.fragments
        index = process.volunteer.index
        process.volunteer.counted = [reached for fragment in fragments for reached in fragment.counted]
        if self.processes.get(index) is process:
            del self.processes[index]
        self._bug = self._bug or error
        if error is not None or (not self.processes and self.world.now > self._last_start_at):
            self.world.stop()

    def kill(self, index: int, host_up: bool) -> None:
        if process := self.processes.get(index):
            self.books.views_differ()
            self._faults["crash" if host_up else "power loss"] += 1
            process.die(host_up)

    def leave(self, index: int) -> None:
        if process := self.processes.get(index):
            self._faults["leave"] += 1
            process.ask_to_leave()

    def stall(self, index: int, until: float) -> None:
        """SIGSTOP until then."""
        process = self.processes.get(index)
        if process is not None and process.stalled_until <= self.world.now:
            self.books.views_differ()
            self._faults["stall"] += 1
            process.stalls.append((self.world.now, until))
            process.loop.stall()
            self.world.call_at(until, self._go_on, process)

    def _go_on(self, process: Process) -> None:
        self.books.views_differ()
        if process.alive:
            process.loop.go_on()
