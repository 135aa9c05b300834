"""Many simulations, one seed after the other, and the command that plays one of them again.

A campaign is the strongest test of the protocol: every fault at once, another mixture for each seed. Law: a
seed that breaks a law is named with the very command that replays it, on any machine. Price: one seed of 32
peers takes seconds of processor time; give the seeds to as many processes as there are cores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from p2p_co2.config import ClockConfig, RunConfig
from p2p_co2.errors import P2PCo2Error
from p2p_co2.simnet.eventlog import EventLog
from p2p_co2.simnet.faults import Storm
from p2p_co2.simnet.ledger import CountingLedger
from p2p_co2.simnet.oversight import Result
from p2p_co2.simnet.scene import Settings
from p2p_co2.simnet.swarm import Swarm
from p2p_co2.telemetry.events import RoundCommitted

STORM_ROUND_S, STORM_ROUNDS = 4.0, 3
STORM_FROM_S, STORM_UNTIL_S = 3.5, 10.5
"""The first rounds begin at about 4 s; what they left is made good, and the last ones are made, after it."""
STORM_BLOCKS = (6, 3)
"""Of two fragments: parts enough for owners to die."""
STORM_OFFER_S = 60.0
"""No offer of a storm is open for longer, whoever of those that should answer it goes, sleeps or is cut off.
By their own deadlines alone machines might wait for several times this."""
BUGS = (
    P2PCo2Error, LookupError, TypeError, ValueError, ArithmeticError, AssertionError, RuntimeError,
)  # fmt: skip
"""How a simulation ends that is ended by a bug."""


@dataclass(frozen=True)
class Played:
    """What one seed came to. ``failure``: the laws that it broke and how to play it again, "" if none;
    ``faults``: how often each kind came to pass; ``committed_after``: how often a peer committed a round
    after the last of them; ``longest_offer_s``: how long one was open at most."""

    seed: int
    failure: str
    faults: Mapping[str, int]
    committed_after: int
    longest_offer_s: float = 0.0


def storm_settings(seed: int, peers: int = 32) -> Settings:
    """A short run in which everything goes wrong that can."""
    clock = ClockConfig(mode="time", round_s=STORM_ROUND_S, rounds=STORM_ROUNDS)
    return Settings(
        run=RunConfig(name="storm", fragments=2, clock=clock), peers=peers, seed=seed, blocks=STORM_BLOCKS,
        faults=Storm(STORM_FROM_S, STORM_UNTIL_S), checkpoint_every_s=4.0, start_spread_s=0.5,
        offers_within_s=STORM_OFFER_S,
    )  # fmt: skip


def replay_command(seed: int, peers: int) -> str:
    return f"p2p-co2 simulate --storm --peers {peers} --seed {seed}"


def play(seed: int, peers: int = 32, make_ledger: Callable[..., CountingLedger] = CountingLedger) -> Played:
    """One storm. A bug that ends a simulation is a failure of its seed, with the bug as cause."""
    swarm, after = Swarm(storm_settings(seed, peers), EventLog(digests=False), make_ledger), [0]

    def count(event: RoundCommitted) -> None:
        after[0] += swarm.world.now > STORM_UNTIL_S

    swarm.log.readers_of[RoundCommitted].append(count)
    result, broken = Result(), list[str]()
    try:
        result = swarm.run()
        broken += map(str, result.violations[:5])
    except BUGS as error:
        broken.append(f"ended by a bug: {error!r}")
    told = (f"seed {seed}; replay it with: {replay_command(seed, peers)}", *broken)
    failure = "\n  ".join(told) if broken else ""
    return Played(seed, failure, result.faults, after[0], result.longest_offer_s)
