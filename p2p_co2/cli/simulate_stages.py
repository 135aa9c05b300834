"""``p2p-co2 simulate`` of a run with stages, and of storms over stages: figures by stage, and broken laws.

The very machines of real peers on virtual time (``simnet.microbatches``). A peer's inner step takes
``--step-s`` in the largest stage, others are up to twice as fast or slow. Rounds of a stage's group are those
of an ordinary swarm: simulate them with ``stages = 1``. Exit status 0 only if no law was broken."""

from __future__ import annotations

import json
import math
import random
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from p2p_co2.cli.options import SimulationOptions
from p2p_co2.config import RunConfig
from p2p_co2.errors import ConfigError
from p2p_co2.planning.pipeline import loads_of
from p2p_co2.planning.profiles import profile_of
from p2p_co2.simnet.campaign import Churn, plan_churn, play_stage_storm
from p2p_co2.simnet.microbatches import Layout, StageVolunteer, VirtualStages
from p2p_co2.system.process import StopSignals

SPREAD = 2.0
"""Peers are so many times slower or faster than the typical one, at most."""
MOST_MICROBATCHES = 50_000
"""Of all first stages: what is played ends there, long after everything repeats itself."""


def play_storm(options: SimulationOptions, say: Callable[[str], None] = print) -> int:
    """One storm over ``--stages``. Raises ``ConfigError``."""
    if not 2 <= options.stages <= 32:
        raise ConfigError.of_option("--stages", f"2 to 32 (got {options.stages})")
    world = play_stage_storm(options.seed, options.stages)
    if options.as_json:
        print(json.dumps({"violations": [str(one) for one in world.books.violations]}, indent=2))
    else:
        for line in (*_lines(world), *_broken(world)):
            say(line)
    return 1 if world.books.violations else 0


def world_of(options: SimulationOptions, run: RunConfig, step_s: float) -> VirtualStages:
    """What is to be played. Raises ``ConfigError``."""
    from bootstrap.plan.step import stage_costs

    pipeline = run.pipeline
    if options.peers < pipeline.stages:
        problem = f"{pipeline.stages} stages need a peer each (got {options.peers})"
        raise ConfigError.of_option("--peers", problem)
    costs, tokens, _ = stage_costs(run, step_s, "cpu", 0)
    loads = loads_of(costs, pipeline.forward, pipeline.backward)
    rng = random.Random(f"{options.seed}/speeds")
    peers: list[list[StageVolunteer]] = [[] for _ in loads]
    for index in range(options.peers):
        line = profile_of(options.profile, options.seed, index)
        peers[index % len(loads)].append(StageVolunteer(line, SPREAD ** rng.uniform(-1, 1)))
    round_s = run.clock.round_s if run.clock.mode == "time" else 60.0
    layout = Layout(
        stages=loads, microbatches=pipeline.microbatches, tokens=tokens, cap_s=round_s, round_s=round_s
    )
    return VirtualStages(layout, peers, options.seed)


def play(
    options: SimulationOptions, run: RunConfig, step_s: float, churn_per_h: float,
    say: Callable[[str], None] = print,
) -> tuple[dict[str, Any], int]:  # fmt: skip
    """Play it and ``say`` its figures, unless they are wanted as JSON; returns them for ``summary.json``, and
    the exit status."""
    world = world_of(options, run, step_s)
    planned_s = 3600 * options.hours
    stopped = False

    def stop() -> None:
        nonlocal stopped
        stopped = True
        world.world.stop()

    if churn_per_h:
        plan_churn(world, Churn(churn_per_h, 0.9 * planned_s), options.seed)
    began_at = time.monotonic()
    with StopSignals(stop):
        while not stopped and world.now < planned_s and len(world.books.made) < MOST_MICROBATCHES:
            world.run(min(10.0, planned_s - world.now))
    played_s = world.now
    figures = figures_of(world)
    by_stage = _lines(world)
    if not stopped:
        world.end()
    figures |= {
        "played_s": round(played_s, 3),
        "planned_s": planned_s,
        "wall_s": round(time.monotonic() - began_at, 2),
        "violations": [str(violation) for violation in world.books.violations],
        "digest": world.books.digest(),
    }
    lines = [f"{played_s:.0f} s of {options.peers} peers in {figures['wall_s']:.1f} s", *by_stage]
    if stopped or played_s < planned_s:
        words = "stopped" if stopped else f"enough after {MOST_MICROBATCHES} microbatches"
        lines.insert(0, f"ended early, {words}: {played_s:.0f} of {planned_s:.0f} virtual s")
    lines += [
        f"tokens a second: {figures['tokens_per_s']:,.0f}",
        f"events: sha256 {figures['digest']}",
        *_broken(world),
    ]
    for line in () if options.as_json else lines:
        say(line)
    if stopped:
        print("stopped", file=sys.stderr)
        return figures, 128 + signal.SIGINT
    return figures, 1 if world.books.violations else 0


def figures_of(world: VirtualStages) -> dict[str, Any]:
    """By stage, of what has been played so far: plain JSON."""
    return {
        "tokens_per_s": round(world.books.tokens[0] / world.now, 3),
        "faults": dict(world.internet.faults),
        "stages": [_stage(world, stage) for stage in range(len(world.layout.stages))],
    }


def _stage(world: VirtualStages, stage: int) -> dict[str, Any]:
    """Of the processes that run."""
    group = world.of_stage(stage)
    lived_s = sum(world.now - replica.spent.began_at for replica in group) or math.inf
    waited: dict[str, float] = defaultdict(float)
    for replica in group:
        for why, seconds in replica.spent.waited_s.items():
            waited[why] += seconds
    most = sorted(waited.items(), key=lambda item: -item[1])
    dropped = sum((replica.spent.dropped for replica in group), Counter[str]())
    return {  # a process that is gone has taken with it what its time went to
        "peers": len(group),
        "microbatches": len(world.books.counted[stage]),
        "tokens_per_s": round(world.books.tokens[stage] / world.now, 3),
        "computing": round(sum(replica.spent.busy_s for replica in group) / lived_s, 4),
        "waiting": {why: round(seconds / lived_s, 4) for why, seconds in most},
        "dropped": dict(dropped),
    }


def _lines(world: VirtualStages) -> list[str]:
    lines = []
    for stage in range(len(world.layout.stages)):
        told = _stage(world, stage)
        waits = "; ".join(f"{share:.0%} for {why}" for why, share in list(told["waiting"].items())[:2])
        lines.append(
            f"stage {stage}: {told['peers']} peers, {told['microbatches']} microbatches, "
            f"{told['tokens_per_s']:,.0f} tokens a second, computing {told['computing']:.0%}, "
            f"waiting {waits or 'never'}, dropped {sum(told['dropped'].values())}"
        )
    faults = ", ".join(f"{kind} {count}" for kind, count in world.internet.faults.items())
    return [*lines, f"faults: {faults or 'none'}"]


def _broken(world: VirtualStages) -> Sequence[str]:
    broken = world.books.violations
    return [f"law violations: {len(broken)}", *(f"  {violation}" for violation in broken[:10])]


def write_summary(
    folder: Path, options: SimulationOptions, step_s: float, figures: dict[str, Any]
) -> dict[str, Any]:
    """Write ``summary.json``; returns what is in it."""
    asked = {"peers": options.peers, "profile": options.profile, "hours": options.hours, "seed": options.seed}
    table = {"simulation": {**asked, "churn": options.churn, "step_s": step_s, **figures}}
    (folder / "summary.json").write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
    return table
