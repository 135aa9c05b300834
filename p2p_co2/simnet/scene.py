"""What all processes of a simulated swarm share: its settings, its time, its net, the books of its laws."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from p2p_co2.config import RunConfig
from p2p_co2.planning.profiles import LinkProfile
from p2p_co2.protocol.catchup.goals import chunk_bytes_of
from p2p_co2.protocol.rounds import PayloadShape
from p2p_co2.protocol.rounds.bounds import ASSUMED_UPLOAD_BYTES_PER_S
from p2p_co2.rule_specs import AGGREGATION_RULES
from p2p_co2.simnet.eventlog import EventLog
from p2p_co2.simnet.internet import Internet, open_parcel, way_between
from p2p_co2.simnet.laws import Books
from p2p_co2.simnet.ledger import CountingLedger
from p2p_co2.simnet.rendezvous import Rendezvous
from p2p_co2.simnet.virtual_time import VirtualTime
from p2p_co2.simnet.work import BLOCK_BYTES, starts
from p2p_co2.version import __version__
from p2p_co2.wire.envelope import Opened

SOFTWARE = f"p2p-co2 {__version__}"
MAX_CHUNKS = 512
"""In how many chunks a state travels at most. Of states above 256 MB a simulated chunk is larger than a real
one, and a donor on a slow way may count as silent over it."""
MAX_STATE_FACTOR = 64
"""Most times that a serialised state is larger than an encoded gradient."""


class Faults(Protocol):
    """What goes wrong, and when (``campaign``); nothing does after ``calm_at``."""

    @property
    def calm_at(self) -> float: ...
    def plan(self, swarm: Any) -> None: ...


@dataclass(frozen=True)
class Settings:
    """What is simulated. ``blocks``: simulated blocks per fragment, 16 bytes each; each stands for
    ``real_bytes_per_block`` bytes of an encoded gradient, ``state_factor`` times as many of a state.
    ``step_s``: the typical peer's inner step, others are up to ``speed_spread`` times slower or faster.
    ``parameters`` is only reported. ``offers_within_s``: how long an offer may be open, 0: what rounds may
    take at most."""

    run: RunConfig
    peers: int
    seed: int
    profile: str = "home-mix"
    faults: Faults | None = None
    blocks: tuple[int, ...] = (8, 8)
    real_bytes_per_block: float = 16.0
    state_factor: int = 15
    parameters: int = 0
    step_s: float = 0.5
    speed_spread: float = 2.0
    start_spread_s: float = 2.0
    checkpoint_every_s: float = 60.0
    largest_skew_s: float = 60.0
    largest_drift: float = 1e-4
    offers_within_s: float = 0.0

    @property
    def planned_s(self) -> float:
        """Virtual seconds of all rounds, without what the end of the run takes."""
        clock = self.run.clock
        steps_s = clock.inner_steps_per_round * self.step_s * self.speed_spread * 1.1
        return clock.rounds * (clock.round_s if clock.mode == "time" else steps_s)


class Scene:
    """See the module. ``make_ledger`` and ``open_message``: where a test plants its bugs."""

    def __init__(self, settings: Settings, log: EventLog, make_ledger: Callable[..., CountingLedger]) -> None:
        self.settings = settings
        self.log = log
        self.make_ledger = make_ledger
        self.open_message: Callable[[bytes, bytes], Opened] = open_parcel
        self.world = VirtualTime()
        self.rng = random.Random(f"{settings.seed}/net")
        scale = settings.real_bytes_per_block / BLOCK_BYTES
        factor = min(MAX_STATE_FACTOR, max(2, settings.state_factor))
        self.state_bytes = [count * BLOCK_BYTES * factor for count in settings.blocks]
        # A chunk as large as a real one; of states so large that they have more chunks, larger.
        real_bytes = chunk_bytes_of([round(scale * size) for size in self.state_bytes])
        least_bytes = math.ceil(max(self.state_bytes) / MAX_CHUNKS)
        chunk_bytes = max(math.ceil(real_bytes / max(1.0, scale)), least_bytes)
        clock = settings.run.clock
        self.shape = PayloadShape(
            BLOCK_BYTES, settings.blocks, clock.round_s if clock.mode == "time" else 0.0,
            ASSUMED_UPLOAD_BYTES_PER_S / scale, chunk_bytes, scale, settings.run.weight_cap,
            clock.mode == "steps", AGGREGATION_RULES[settings.run.aggregation.rule].cuts,
        )  # fmt: skip
        self.starts = starts(settings.blocks, self.state_bytes, chunk_bytes)
        self.books = Books(self.starts, lambda: self.world.now)
        self.internet = Internet(self.world, self.rng, scale, self.books.views_differ)
        self.rendezvous = Rendezvous(self.internet, random.Random(f"{settings.seed}/dht"))

    def loading_s(self, line: LinkProfile, lines: set[LinkProfile]) -> float:
        """Seconds that all fragments' states take over a ``line``, from the slowest of ``lines``."""
        ways = (way_between(other, line, "open" not in (other.nat, line.nat)) for other in lines)
        return sum(self.state_bytes) * self.internet.scale / min(way.bytes_per_s for way in ways)
