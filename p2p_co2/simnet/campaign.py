"""What goes wrong in a simulation: plans that are drawn from the seed before anything runs.

``Storm`` is every fault at once: processes that crash, lose their power, stall, leave; that come back with or
without their disk; coordinators and owners that die in the middle of a round; a net that splits, pairs that
cannot reach each other; messages lost, doubled, late; seeds that die. ``Churn`` is what a run of volunteers
sees: peers that go and come back at a rate.

Laws: after ``calm_at`` nothing goes wrong any more and everybody is back. A fault that meets a process that
is not there does nothing; ``Result.faults`` counts those that came to pass. Price: a storm of 32 peers takes
a second or two of processor time.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from p2p_co2.config import ClockConfig, RunConfig
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.simnet.internet import Noise
from p2p_co2.simnet.scene import Settings
from p2p_co2.simnet.swarm import Swarm
from p2p_co2.telemetry.events import RoundBegan

LEAVES, CRASHES = 0.5, 0.35
"""Of peers that go: the share that leaves with a word, and that whose process dies; the rest lose power."""
KEEPS_DISK = 0.7
STORM_SHARES = 0.25, 0.1, 0.1, 0.15
"""Of all peers: those that crash, lose their power, leave and stall in a storm."""
ASSASSINATIONS, CUT_PAIRS = 3, 6
STORM_NOISE = Noise(lost=0.03, doubled=0.025, reordered=0.03)
STORM_FROM_S, STORM_UNTIL_S = 3.5, 10.5
"""The first rounds begin at about 4 s; what they left is made good, and the last ones are made, after it."""
STORM_OFFER_S = 60.0
"""No offer of a storm is open for longer, whoever of those that should answer it goes, sleeps or is cut off.
By their own deadlines alone machines might wait for several times this."""


@dataclass(frozen=True)
class Churn:
    """``per_h``: times an hour that each peer goes, to stay away for ``away_mean_s`` on average; nobody goes
    after ``calm_at`` seconds."""

    per_h: float
    calm_at: float
    away_mean_s: float = 600.0

    def plan(self, swarm: Swarm) -> None:
        """Put the faults into the swarm's time."""
        at_ = swarm.world.call_at
        for index in range(len(swarm.volunteers)):
            rng = random.Random(f"{swarm.settings.seed}/churn/{index}")
            at = 0.0
            while self.per_h > 0:
                at += rng.expovariate(self.per_h / 3600)
                away_s = rng.expovariate(1 / self.away_mean_s)
                if at + away_s >= self.calm_at:
                    break
                how, with_disk = rng.random(), rng.random() < KEEPS_DISK
                if how < LEAVES:
                    at_(at, swarm.leave, index)
                else:
                    at_(at, swarm.kill, index, how < LEAVES + CRASHES)
                at += away_s
                at_(at, swarm.start, index, with_disk)


@dataclass(frozen=True)
class Storm:
    """Everything at once between ``from_s`` and ``calm_at``."""

    from_s: float
    calm_at: float

    def plan(self, swarm: Swarm) -> None:
        """Put the faults into the swarm's time."""
        rng = random.Random(f"{swarm.settings.seed}/storm")
        at_, start = swarm.world.call_at, swarm.start
        # At most one fault for each peer: none meets a process that another has ended.
        crashing, powerless, leaving, stalling = _some(rng, len(swarm.volunteers))
        for number, index in enumerate(crashing + powerless):
            at, back_at = self._times(rng)
            # Of those that crash one comes back without its disk, and one with it, in any storm.
            with_disk = rng.random() < KEEPS_DISK if number > 1 else bool(number)
            at_(at, swarm.kill, index, number < len(crashing))
            at_(back_at, start, index, with_disk)
        for index in leaving:
            _, back_at = self._times(rng)
            at = self.from_s + rng.random()  # soon: it may finish its first round before it goes
            at_(at, swarm.leave, index)
            # A start that finds it still there does nothing, and no other comes: never before it goes.
            at_(max(at, back_at), start, index, rng.random() < KEEPS_DISK)
        for index in stalling:
            at, until = self._times(rng)
            at_(at, swarm.stall, index, until)
        for number in range(ASSASSINATIONS):
            # The first one takes the first round of all: in a storm there may be no other.
            at = rng.uniform(self.from_s, self.calm_at - 4) if number else 0.0
            self._assassinate(swarm, random.Random(f"{swarm.settings.seed}/assassin/{number}"), at)
        self._disturb_net(swarm, rng)

    def _times(self, rng: random.Random) -> tuple[float, float]:
        """When something begins, and when it is over."""
        at = rng.uniform(self.from_s, self.calm_at - 3)
        return at, min(self.calm_at, at + rng.choice((1.0, 4.0, 12.0)) * rng.uniform(0.5, 1.5))

    def _disturb_net(self, swarm: Swarm, rng: random.Random) -> None:
        at_, peers, net = swarm.world.call_at, swarm.peer_ids(), swarm.internet
        at, until = self._times(rng)
        share = rng.choice((0.05, 0.3, 0.5))
        at_(at, net.split, {peer: int(rng.random() < share) for peer in peers})
        at_(until, net.heal)
        at_(self.from_s, net.set_noise, STORM_NOISE)
        at_(self.calm_at, net.set_noise, Noise())
        at, _ = self._times(rng)
        for _ in range(CUT_PAIRS if len(peers) > 1 else 0):
            at_(at, net.cut_pair, *rng.sample(peers, 2))
        at_(self.calm_at, net.heal)
        for seed in swarm.rendezvous.seeds:
            seed.side = rng.randrange(2)
            at, until = self._times(rng)
            at_(at, swarm.rendezvous.set_seed, seed, False)
            at_(until, swarm.rendezvous.set_seed, seed, True)

    def _assassinate(self, swarm: Swarm, rng: random.Random, after: float) -> None:
        """Kill the coordinator or another member of the first round that begins after that, in its middle."""
        readers, at_ = swarm.log.readers_of[RoundBegan], swarm.world.call_at

        def strike(event: RoundBegan) -> None:
            now = swarm.world.now
            if not after <= now < self.calm_at - 2:
                return
            readers.remove(strike)
            victim = event.peer if rng.random() < 0.6 else rng.choice(sorted(event.group))
            index = swarm.peer_ids().index(PeerId(victim))
            at = now + rng.choice((0.0, 0.02, 0.1, 0.4)) * rng.random()
            at_(at, swarm.kill, index, True)
            at_(min(self.calm_at, at + rng.uniform(1, 8)), swarm.start, index, rng.random() < KEEPS_DISK)

        readers.append(strike)


def _some(rng: random.Random, peers: int) -> list[list[int]]:
    """Different peers for each of ``STORM_SHARES``, rounded by chance."""
    left = rng.sample(range(peers), peers)
    counts = [int(share * peers + rng.random()) for share in STORM_SHARES]
    return [[left.pop(0) for _ in range(min(count, len(left)))] for count in counts]


def storm_settings(seed: int, peers: int = 32) -> Settings:
    """A short run in which everything goes wrong that can; two fragments of parts enough for owners to
    die."""
    clock = ClockConfig(mode="time", round_s=4.0, rounds=3)
    return Settings(
        run=RunConfig(name="storm", fragments=2, clock=clock), peers=peers, seed=seed, blocks=(6, 3),
        faults=Storm(STORM_FROM_S, STORM_UNTIL_S), checkpoint_every_s=4.0, start_spread_s=0.5,
        offers_within_s=STORM_OFFER_S,
    )  # fmt: skip
