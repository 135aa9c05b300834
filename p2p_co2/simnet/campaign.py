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
from collections.abc import Iterator
from dataclasses import dataclass, replace

from p2p_co2.config import ClockConfig, RunConfig
from p2p_co2.planning.pipeline import StageLoad
from p2p_co2.planning.profiles import profile_of
from p2p_co2.simnet.internet import Noise
from p2p_co2.simnet.microbatches import Layout, StageVolunteer, VirtualStages
from p2p_co2.simnet.scene import Settings
from p2p_co2.simnet.swarm import VirtualSwarm
from p2p_co2.telemetry.events import RoundBegan
from p2p_co2.wire.identity import PeerId

LEAVES, CRASHES = 0.5, 0.35
"""Of peers that go: the share that leaves with a word, and that whose process dies; the rest lose power."""
KEEPS_DISK = 0.7
STORM_SHARES = 0.25, 0.1, 0.1, 0.15
"""Of all peers: those that crash, lose their power, leave and stall in a storm."""
ASSASSINATIONS = 3
CUT_PAIRS = 6
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

    def plan(self, swarm: VirtualSwarm) -> None:
        """Put the faults into the swarm's time."""
        at_ = swarm.world.call_at
        for index in range(len(swarm.volunteers)):
            rng = random.Random(f"{swarm.settings.seed}/churn/{index}")
            for at, back_at in self.absences(rng):
                how = rng.random()
                with_disk = rng.random() < KEEPS_DISK
                if how < LEAVES:
                    at_(at, swarm.leave, index)
                else:
                    at_(at, swarm.kill, index, how < LEAVES + CRASHES)
                at_(back_at, swarm.start, index, with_disk)

    def absences(self, rng: random.Random) -> Iterator[tuple[float, float]]:
        """From when until when one peer is away, one after the other."""
        back_at = 0.0
        while self.per_h > 0:
            at = back_at + rng.expovariate(self.per_h / 3600)
            back_at = at + rng.expovariate(1 / self.away_mean_s)
            if back_at >= self.calm_at:
                return
            yield at, back_at


@dataclass(frozen=True)
class Storm:
    """Everything at once between ``from_s`` and ``calm_at``."""

    from_s: float
    calm_at: float

    def plan(self, swarm: VirtualSwarm) -> None:
        """Put the faults into the swarm's time."""
        rng = random.Random(f"{swarm.settings.seed}/storm")
        at_ = swarm.world.call_at
        start = swarm.start
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

    def _disturb_net(self, swarm: VirtualSwarm, rng: random.Random) -> None:
        at_ = swarm.world.call_at
        peers = swarm.peer_ids()
        net = swarm.internet
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

    def _assassinate(self, swarm: VirtualSwarm, rng: random.Random, after: float) -> None:
        """Kill the coordinator or another member of the first round that begins after that, in its middle."""
        readers = swarm.log.readers_of[RoundBegan]
        at_ = swarm.world.call_at

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


# ---- stages


def plan_churn(world: VirtualStages, churn: Churn, seed: int) -> None:
    """Put the ``churn`` of peers that hold stages into the world's time: they crash or lose their power, and
    come back."""
    for index, peer in enumerate(sorted(world.replicas)):
        rng = random.Random(f"{seed}/churn/{index}")
        for at, back_at in churn.absences(rng):
            world.world.call_at(at, world.kill, peer, rng.random() < LEAVES + CRASHES)
            world.world.call_at(back_at, world.start, peer)


STORM_LINES = "fibre", "cable", "dsl", "4g"
"""What is on its way over them comes back within the cap; a window over a relayed satellite does not."""


def play_stage_storm(seed: int, stages: int = 0) -> VirtualStages:
    """A storm of microbatches over ``stages`` (0: 2 to 4, by the seed): unequal peers that crash, lose their
    power, stall and start anew, stages that stand empty, ways that are cut, messages lost, doubled and late.
    Then calm, in which every stage must count again, and the end."""
    rng = random.Random(f"{seed}/stage storm")
    stages = stages or 2 + seed % 3
    world = _stages_before_the_storm(rng, stages, seed)
    noise = replace(STORM_NOISE, late_s=rng.choice((0.1, 1.0)))
    at_ = world.world.call_at
    from_s = 5.0
    until_s = 65.0
    at_(from_s, world.internet.set_noise, noise)
    at_(until_s, world.internet.set_noise, Noise())
    peers = sorted(world.replicas)
    for _ in range(rng.randint(3, 8)):
        victim = rng.choice(peers)
        at = rng.uniform(from_s, until_s)
        away_s = rng.choice((0.1, 2.0, 20.0)) * rng.uniform(0.5, 1.5)
        if rng.random() < 1 / 3:
            at_(at, world.stall, victim, min(away_s, until_s - at))
        else:
            at_(at, world.kill, victim, rng.random() < LEAVES + CRASHES)
            at_(min(until_s, at + away_s), world.start, victim)
    for _ in range(rng.randint(0, 3)):
        at = rng.uniform(from_s, until_s)
        at_(at, world.cut, *rng.sample(peers, 2), min(rng.choice((1.0, 15.0)), until_s - at))
    if rng.random() < 1 / 3:
        empty = rng.randrange(stages)
        for peer in (replica.me for replica in world.of_stage(empty)):
            at_(30.0, world.kill, peer, True)
            at_(30.0 + rng.uniform(1, 20), world.start, peer)
    world.run(until_s + 2 * world.layout.cap_s)
    counted = list(world.books.tokens)
    world.run(2 * world.layout.cap_s)
    for stage, (before, after) in enumerate(zip(counted, world.books.tokens, strict=True)):
        if after <= before:
            waits = {replica.me: replica.machine.waits_for for replica in world.of_stage(stage)}
            world.books.broken(PeerId(""), "progress", f"stage {stage} counts nothing in the calm: {waits}")
    world.end()
    return world


def _stages_before_the_storm(rng: random.Random, stages: int, seed: int) -> VirtualStages:
    """One to four replicas of each stage, up to four times slower than others, on ordinary lines."""
    size = rng.choice((4_000, 20_000))
    forward_s = rng.choice((0.02, 0.1))
    loads = tuple(
        StageLoad(
            forward_s=forward_s * rng.uniform(0.5, 1.5),
            backward_s=2 * forward_s * rng.uniform(0.5, 1.5),
            ahead_bytes=size if stage < stages - 1 else 0,
            back_bytes=size if stage else 0,
        )
        for stage in range(stages)
    )
    layout = Layout(
        stages=loads, microbatches=rng.choice((8, 16, 32)), window=rng.choice((4, 8, 16)), cap_s=20.0
    )
    peers = [
        [
            StageVolunteer(profile_of(rng.choice(STORM_LINES), seed, 0), rng.uniform(0.25, 1.0))
            for _ in range(rng.randint(1, 4))
        ]
        for stage in range(stages)
    ]
    return VirtualStages(layout, peers, seed)
