"""A whole simulated swarm: volunteers, their processes, the net between them, faults, and the laws.

``simulate`` runs one to its end and says what came of it. The same settings and the same seed give the same
events, byte by byte, in any process on any machine: everything is drawn from the seed, every queue is
ordered, and no real clock is read.
"""

from __future__ import annotations

import gc
import hashlib
import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from p2p_co2 import __version__
from p2p_co2.config import RunConfig
from p2p_co2.node.node import Node
from p2p_co2.planning.profiles import profile_of
from p2p_co2.protocol.catchup import chunk_bytes_of
from p2p_co2.protocol.rounds import PayloadShape
from p2p_co2.protocol.rounds.bounds import ASSUMED_UPLOAD_BYTES_PER_S
from p2p_co2.protocol.schedule import FIRST_ROUND_BOUND_S
from p2p_co2.protocol.wire.identity import Identity, PeerId
from p2p_co2.simnet.eventlog import EventLog
from p2p_co2.simnet.faults import Churn, Storm
from p2p_co2.simnet.inspection import Inspector
from p2p_co2.simnet.internet import Internet, Noise
from p2p_co2.simnet.laws import Books, Violation
from p2p_co2.simnet.ledger import CountingLedger, starts
from p2p_co2.simnet.parcel import open_parcel
from p2p_co2.simnet.patience import run_bound_s
from p2p_co2.simnet.process import Process, Volunteer
from p2p_co2.simnet.rendezvous import Rendezvous, Seed
from p2p_co2.simnet.training import Pace
from p2p_co2.simnet.virtual_time import VirtualTime
from p2p_co2.simnet.work import BLOCK_BYTES, Work

MAX_CHUNKS = 512
"""In how many chunks a state travels at most. Of states above 256 MB a simulated chunk is larger than a real
one, and a donor on a slow way may count as silent over it."""
MAX_STATE_FACTOR = 64
"""Most times that a serialised state is larger than an encoded gradient."""


@dataclass(frozen=True)
class Settings:
    """What is simulated. ``blocks``: simulated blocks per fragment, 16 bytes each; each stands for
    ``real_bytes_per_block`` bytes of an encoded gradient, ``state_factor`` times as many of a state.
    ``step_s``: the typical peer's inner step, others are up to ``speed_spread`` times slower or faster.
    ``parameters`` is only reported. ``offers_within_s``: how long an offer may be open, 0: what follows from
    the run (``patience``)."""

    run: RunConfig
    peers: int
    seed: int
    profile: str = "home-mix"
    faults: Churn | Storm | None = None
    blocks: tuple[int, ...] = (8, 8)
    real_bytes_per_block: float = 16.0
    state_factor: int = 15
    parameters: int = 0
    step_s: float = 0.5
    speed_spread: float = 2.0
    tokens_per_step: int = 1000
    seeds: int = 2
    min_peers: int = 1
    start_spread_s: float = 2.0
    checkpoint_every_s: float = 60.0
    largest_skew_s: float = 60.0
    largest_drift: float = 1e-4
    offers_within_s: float = 0.0


@dataclass
class Result:
    """What came of a simulation. ``digest``: sha256 of all events. ``virtual_s``: how long it was;
    ``turns``: callbacks it took; ``counts`` of events and ``faults`` that came to pass, by kind. ``digests``:
    the agreed states of the peers that finished, hex, by peer. ``left_behind``: peers that came when the
    others had finished, or were still joining when the last of them went; ``lacking``: peers that said
    that they leave without what others hold, or that nobody could give it to them. ``ended_early``: somebody
    stopped it, and how it would have ended was not judged."""

    digest: str
    virtual_s: float
    turns: int
    violations: list[Violation]
    digests: dict[str, str]
    written_off: dict[str, int]
    units: int
    recoveries_s: list[float]
    first_contributions_s: list[float]
    forks: int
    longest_fork_s: float
    longest_offer_s: float
    held: dict[str, tuple[int, int]]
    counts: dict[str, int]
    faults: dict[str, int]
    left_behind: list[str]
    lacking: list[str]
    versions: list[int] = field(default_factory=list)
    ended_early: bool = False


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
        self.settings, self.log, self.seed = settings, log, settings.seed
        self.make_node, self.make_ledger = make_node, make_ledger
        self.open_message = open_parcel
        self.run_config, self.min_peers = settings.run, settings.min_peers
        self.checkpoint_every_s, self.parameters = settings.checkpoint_every_s, settings.parameters
        self.software = f"p2p-co2 {__version__}"
        self.world = VirtualTime()
        self.rng = random.Random(f"{self.seed}/net")
        self.internet = Internet(self.world, self.rng, settings.real_bytes_per_block / BLOCK_BYTES)
        seeds = [Seed(side=index % 2) for index in range(settings.seeds)]
        self.rendezvous = Rendezvous(self.internet, random.Random(f"{self.seed}/dht"), seeds)
        self.internet.relays_up = self.rendezvous.seed_answers
        clock, factor = settings.run.clock, min(MAX_STATE_FACTOR, max(2, settings.state_factor))
        self.state_bytes = [count * BLOCK_BYTES * factor for count in settings.blocks]
        self.shape = PayloadShape(
            BLOCK_BYTES,
            settings.blocks,
            clock.round_s if clock.mode == "time" else 0.0,
            ASSUMED_UPLOAD_BYTES_PER_S / self.internet.scale,
            self._chunk_bytes(),
            self.internet.scale,
            settings.run.weight_cap,
            clock.mode == "steps",
        )
        self.starts = starts(settings.blocks, self.state_bytes, self.shape.chunk_bytes)
        self.books = Books(self.starts, lambda: self.world.now, settings.run.weight_cap)
        self.volunteers = [self._volunteer(index) for index in range(settings.peers)]
        self._index = {v.identity.peer_id: v.index for v in self.volunteers}
        self.processes: dict[int, Process] = {}
        self.ended: list[Process] = []
        self._starts_again: dict[int, bool] = {}
        self.views_differed_at: float | None = None
        self.inspector = Inspector(self)
        self.faults: Counter[str] = Counter()
        """What went wrong, by its name."""
        self.left_behind: set[str] = set()
        """Names of volunteers whose last process found that the others had gone, or met none of them."""
        self.ended_early = False
        self._bug: BaseException | None = None
        self._last_start_at = settings.start_spread_s
        """Nobody starts after this."""

    def _chunk_bytes(self) -> int:
        """A chunk as large as a real one; of states so large that they have more chunks, larger."""
        scale = self.internet.scale
        real = math.ceil(chunk_bytes_of([round(scale * size) for size in self.state_bytes]) / max(1.0, scale))
        return max(real, math.ceil(max(self.state_bytes) / MAX_CHUNKS))

    def _volunteer(self, index: int) -> Volunteer:
        settings = self.settings
        rng = random.Random(f"{self.seed}/volunteer/{index}")
        key = hashlib.sha256(f"{self.seed}/identity/{index}".encode()).digest()
        identity = _Witness(Ed25519PrivateKey.from_private_bytes(key), self.books)
        spread = settings.speed_spread ** rng.uniform(-1, 1)
        work = self.books.works[identity.peer_id] = Work(f"{self.seed}/{index}")
        return Volunteer(
            name=f"peer-{index}",
            index=index,
            identity=identity,
            profile=profile_of(settings.profile, self.seed, index),
            pace=Pace(settings.step_s * spread, settings.tokens_per_step),
            skew_s=rng.uniform(-1, 1) * settings.largest_skew_s,
            drift=rng.uniform(-1, 1) * settings.largest_drift,
            work=work,
        )

    def peer_ids(self) -> list[PeerId]:
        return [volunteer.identity.peer_id for volunteer in self.volunteers]

    def index_of(self, peer: str) -> int:
        return self._index[PeerId(peer)]

    # ---- the run

    def run(self) -> Result:
        """Start everybody and let time pass until all have ended."""
        rng = random.Random(f"{self.seed}/start")
        for volunteer in self.volunteers:
            at = rng.uniform(0, self.settings.start_spread_s)
            self.world.call_at(at, self.start, volunteer.index, False)
        if self.settings.faults is not None:
            self.settings.faults.plan(self)
            self._last_start_at = max(self._last_start_at, self.settings.faults.calm_at)
        run = self.run_config
        waits_s = run.outer.blocking_rounds * run.fragments * FIRST_ROUND_BOUND_S
        planned_s, step_s = self.planned_s + waits_s, self._slowest_step_s
        limit_s = run_bound_s(self._last_start_at, planned_s, step_s, run.fragments)
        before = gc.get_threshold()
        gc.set_threshold(200_000, 20, 50)  # tasks and futures are many and short-lived
        try:
            self.world.run(limit_s)
        finally:
            gc.set_threshold(*before)
            self._close()
        if self._bug is not None:
            raise self._bug
        return self.inspector.result()

    @property
    def planned_s(self) -> float:
        """Virtual seconds of all rounds, without what the end of the run takes."""
        clock = self.run_config.clock
        of_steps_s = clock.inner_steps_per_round * self._slowest_step_s
        return clock.rounds * (clock.round_s if clock.mode == "time" else of_steps_s)

    @property
    def _slowest_step_s(self) -> float:
        return self.settings.step_s * self.settings.speed_spread * 1.1

    def stop(self) -> None:
        """Let ``run`` end now, with what there is by then; a signal handler may call it at any time."""
        self.ended_early = True
        self.world.stop()

    def _close(self) -> None:
        for process in list(self.processes.values()):
            process.die(host_up=True)
        for text in self.world.errors:
            self.books.broken("", "bug", text)

    def bug(self, process: Process, error: BaseException) -> None:
        """A simulated process ended with an error that is ours: the simulation ends with it."""
        self._bug = self._bug or error
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
        work = volunteer.work
        saved = volunteer.disk.units if volunteer.disk is not None else 0
        if work.units > saved:
            self._write_off(volunteer, saved)
            work.lose(saved, work.units)
        old = self.internet.endpoints.get(volunteer.identity.peer_id)
        if old is not None:
            self.internet.break_links(old, "connection reset")
        if volunteer.processes:
            self.faults["restart with its disk" if with_disk else "restart without its disk"] += 1
        self.left_behind.discard(volunteer.name)
        self.inspector.starts(volunteer.identity.peer_id)
        self.processes[index] = Process(self, volunteer)

    def _write_off(self, volunteer: Volunteer, saved: int) -> None:
        """Count the units that went down with the last process and are in no agreed state that it knew."""
        work = volunteer.work
        lost = [
            work.count(max(saved, reached), work.units)
            for counted in volunteer.counted
            for reached in counted
        ]
        self.books.written_off["went down with a process"] += sum(lost)

    def process_ended(self, process: Process) -> None:
        index = process.volunteer.index
        process.volunteer.counted = [tuple(fragment.counted) for fragment in process.ledger.fragments]
        if self.processes.get(index) is process:
            del self.processes[index]
        self.ended.append(process)
        self.inspector.saw_end(process)
        if index in self._starts_again:
            self.world.call_at(self.world.now, self.start, index, self._starts_again.pop(index))
            return
        if not self.processes and self.world.now > self._last_start_at:
            self.world.stop()

    def came_after_the_end(self, process: Process) -> bool:
        """Whether a peer that joins (or gave it up) could not have met the run any more: it began when some
        had finished, all who are there came after that, and it is with them or has heard nobody."""
        if process.started_at < self.inspector.first_end_at:
            return False
        others = [other for other in self.processes.values() if other is not process]
        inside = [other.volunteer.name for other in others if other.trained_at is not None]
        if not self.left_behind.issuperset(inside):
            return False
        progress = process.node.progress if process.node is not None else None
        return bool(inside) or progress is None or progress.left_behind or not progress.met

    def kill(self, index: int, host_up: bool) -> None:
        process = self.processes.get(index)
        if process is not None:
            self.views_differ()
            self.faults["crash" if host_up else "power loss"] += 1
            process.die(host_up)

    def stall(self, index: int, until: float) -> None:
        """SIGSTOP until then."""
        process = self.processes.get(index)
        if process is None or process.stalled_until > self.world.now:
            return
        self.views_differ()
        self.faults["stall"] += 1
        process.stalls.append((self.world.now, until))
        process.loop.stall()
        self.world.call_at(until, self._go_on, process)

    def _go_on(self, process: Process) -> None:
        self.views_differ()
        if process.alive:
            process.loop.go_on()

    def count_faults(self) -> Counter[str]:
        """All that went wrong so far, with what is wrong with peers by nature."""
        return self.faults + self.internet.noises + Counter({
            "behind NAT": sum(v.profile.nat != "open" for v in self.volunteers),
            "skewed clock": sum(v.skew_s != 0.0 and v.drift != 0.0 for v in self.volunteers),
        })  # fmt: skip

    # ---- what happens to the net

    def went_wrong_at(self) -> float | None:
        """When peers could last come to see different swarms: now, while anything is wrong; None if never."""
        is_wrong = (
            not self.internet.is_whole
            or self.internet.is_noisy
            or any(process.stalled_until > self.world.now for process in self.processes.values())
        )
        return self.world.now if is_wrong else self.views_differed_at

    def views_differ(self) -> None:
        """From now on, and for a while, peers may see different swarms."""
        self.views_differed_at = self.world.now
        self.books.views_differed = True

    def begins_unmet(self, peer: PeerId, fragment: int, round_: int) -> None:
        """A peer makes a round alone before it has met all who are there: others may make that round, too."""
        self.views_differed_at = self.world.now
        self.books.unmet.add((peer, fragment, round_))

    def split(self, sides: dict[PeerId, int]) -> None:
        self.views_differ()
        self.faults["split"] += 1
        self.internet.split(sides)
        self.rendezvous.net_changed()

    def cut_pair(self, first: PeerId, second: PeerId) -> None:
        self.views_differ()
        self.faults["cut pair"] += 1
        self.internet.cut_pair(first, second)
        self.rendezvous.net_changed()

    def heal(self) -> None:
        self.views_differ()
        self.internet.heal()
        self.rendezvous.net_changed()

    def set_noise(self, noise: Noise) -> None:
        self.views_differ()
        self.internet.set_noise(noise)

    def set_seed(self, seed: Seed, is_up: bool) -> None:
        seed.is_up = is_up
        if not is_up:
            self.faults["seed down"] += 1


def simulate(settings: Settings, log: EventLog | None = None) -> Result:
    """Run one simulation to its end. Raises what a bug of ours raised in it."""
    log = log or EventLog()
    try:
        return Swarm(settings, log).run()
    finally:
        log.close()
