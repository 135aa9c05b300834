"""How busy stages are, on virtual time: shares of capacity, a slow replica, computing on a dsl line, int8 by
fp32; and storms. Prints JSON.

    python benchmarks/pipeline_schedule.py [--cases shares slow dsl codecs kills storms] [--storms N]

shares   of what the slowest stage could do if it never waited, for equal groups and unequal ones (peers up to
         twice as slow as others, groups of 1 to 3), S = 2, 3, 4 and M = 16, 32, 64; hops shorter than
         computing
slow     one of three replicas of the second of two stages 4 times slower: microbatches a second of what
         capacity is left, of the first or second stage, whichever has less. Bar: 0.85
dsl      computing's share at S = 2, M = 32, 84,480 bytes a hop and 52 ms of computing in each stage. Bar:
         0.85. With the profile's loss of 0.2 % one TCP connection carries 3.8 Mbit/s (Mathis et al. 1997), so
         it is measured without and with
codecs   microbatches a second in int8 by those in fp32 on a line whose uplink takes twice a stage's computing
         for one fp32 payload, M = 32. Bars: 1.8 at S = 2, 2.8 at S = 4
kills    2 x 2, a kill every 20 s for 2 minutes, each back after 10 s: tokens that were made and never counted
         (bar: 3 %), microbatches a second of what capacity is left (bar: 0.8), and seconds until a process
         that came back counts
storms   seeds 1 to so many over 2 to 4 stages: broken laws

Each figure beside the planner's. Price: minutes of one core; mean values, no learning.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from p2p_co2.planning.exchange import link_of
from p2p_co2.planning.pipeline import StagedSetting, StageLoad, StageMember, forecast_stages
from p2p_co2.planning.profiles import PROFILES, LinkProfile
from p2p_co2.simnet.campaign import play_stage_storm
from p2p_co2.simnet.microbatches import Layout, StagePeer, VirtualStages

FAST = LinkProfile("fast", 200_000_000, 2_000_000_000, 10.0, 0.0, 0.0, "open")
HOP_BYTES, FP32_BYTES = 84_480, 327_680


def loads_of(stages: int, compute_s: float, size: int) -> tuple[StageLoad, ...]:
    return tuple(
        StageLoad(
            forward_s=compute_s / 3,
            backward_s=2 * compute_s / 3,
            ahead_bytes=size if stage + 1 < stages else 0,
            back_bytes=size if stage else 0,
        )
        for stage in range(stages)
    )


def play(
    loads: Sequence[StageLoad], peers: Sequence[Sequence[StagePeer]], microbatches: int, seed: int
) -> tuple[float, float, float]:
    """Microbatches a second: played, foretold, and what the slowest stage could do."""
    members = tuple(tuple(StageMember(link_of(peer.line), peer.speed) for peer in group) for group in peers)
    setting = StagedSetting(loads=tuple(loads), peers=members, microbatches=microbatches, tokens=100)
    shown = forecast_stages(setting)
    world = VirtualStages(Layout(stages=tuple(loads), microbatches=microbatches), peers, seed)
    world.run(3 * shown.step_s)
    before, began_at = len(world.books.counted[0]), world.now
    world.run(max(60.0, 20 * shown.step_s))
    played = (len(world.books.counted[0]) - before) / (world.now - began_at)
    assert not world.books.violations, world.books.violations[:3]
    most = min(
        sum(peer.speed for peer in group) / load.compute_s for load, group in zip(loads, peers, strict=True)
    )
    return played, shown.microbatches_per_s, most


def shares(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for stages in (2, 3, 4):
        rng = random.Random(f"{options.seed}/{stages}")
        unequal = [
            [StagePeer(FAST, rng.uniform(0.5, 1.0)) for _ in range(rng.randint(1, 3))] for _ in range(stages)
        ]
        for name, peers in (("equal", [[StagePeer(FAST)] * 2] * stages), ("unequal", unequal)):
            for microbatches in (16, 32, 64):
                played, foretold, most = play(loads_of(stages, 0.1, HOP_BYTES), peers, microbatches, 0)
                rows.append(
                    {
                        "groups": name,
                        "peers": [len(group) for group in peers],
                        "stages": stages,
                        "microbatches": microbatches,
                        "share": round(played / most, 3),
                        "plan": round(foretold / most, 3),
                    }
                )
    return rows


def slow(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Where the stages bind alike but for the slow one, and where the other stage binds."""
    rows = []
    for first in (2, 3):
        peers = [[StagePeer(FAST)] * first, [StagePeer(FAST), StagePeer(FAST), StagePeer(FAST, 0.25)]]
        played, foretold, most = play(loads_of(2, 0.1, HOP_BYTES), peers, 32, options.seed)
        rows.append(
            {
                "peers": [first, 3],
                "share": round(played / most, 3),
                "plan": round(foretold / most, 3),
                "bar": 0.85,
            }
        )
    return rows


def dsl(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for line in (replace(PROFILES["dsl"], loss=0.0, nat="open"), replace(PROFILES["dsl"], nat="open")):
        for codec, size in (("int8", HOP_BYTES), ("fp32", FP32_BYTES)):
            played, foretold, most = play(loads_of(2, 0.052, size), [[StagePeer(line)]] * 2, 32, options.seed)
            rows.append(
                {
                    "loss": line.loss,
                    "codec": codec,
                    "computing": round(played / most, 3),
                    "plan": round(foretold / most, 3),
                    "bar": 0.85,
                }
            )
    return rows


def codecs(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    compute_s = 0.052
    line = replace(FAST, up_bits_per_s=round(8 * FP32_BYTES / (2 * compute_s)))
    for stages, bar in ((2, 1.8), (4, 2.8)):
        pairs = [
            play(loads_of(stages, compute_s, size), [[StagePeer(line)]] * stages, 32, options.seed)
            for size in (HOP_BYTES, FP32_BYTES)
        ]
        rows.append(
            {
                "stages": stages,
                "ratio": round(pairs[0][0] / pairs[1][0], 2),
                "plan": round(pairs[0][1] / pairs[1][1], 2),
                "bar": bar,
            }
        )
    return rows


def kills(options: argparse.Namespace) -> dict[str, Any]:
    """Capacity: of the stage with fewer replicas at each moment."""
    compute_s, away_s = 0.1, 10.0
    layout = Layout(stages=loads_of(2, compute_s, HOP_BYTES), microbatches=32)
    world = VirtualStages(layout, [[StagePeer(FAST)] * 2] * 2, options.seed)
    rng, capacity, back_s = random.Random(options.seed), 0.0, []
    world.run(30.0)
    before, made = len(world.books.counted[0]), len(world.books.made)
    for _ in range(6):
        victim = rng.choice(sorted(world.replicas))
        stage = world.replicas[victim].stage
        world.kill(victim)
        world.run(away_s)
        world.start(victim)
        began_at, counted = world.now, list(world.books.counted[stage].values()).count(victim)
        while world.now < began_at + away_s:
            world.run(0.25)
            if list(world.books.counted[stage].values()).count(victim) > counted:
                back_s.append(round(world.now - began_at, 2))
                break
        world.run(began_at + away_s - world.now)
        capacity += (away_s + 2 * away_s) / compute_s
    played = len(world.books.counted[0]) - before
    world.end()
    lost = 1 - len(world.books.counted[0]) / len(world.books.made)
    calm, _, most = play(layout.stages, [[StagePeer(FAST)] * 2] * 2, 32, options.seed)
    return {
        "made": len(world.books.made) - made,
        "never_counted": round(lost, 4),
        "share_of_what_is_left": round(played / capacity, 3),
        "share_without_kills": round(calm / most, 3),
        "counts_again_s": back_s,
        "violations": len(world.books.violations),
        "bars": {"never_counted": 0.03, "share_of_what_is_left": 0.8},
    }


def storms(options: argparse.Namespace) -> dict[str, Any]:
    began_at, broken = time.process_time(), []
    for seed in range(1, options.storms + 1):
        violations = play_stage_storm(seed).books.violations
        broken += [f"seed {seed}: {violation}" for violation in violations[:3]]
    taken_s = time.process_time() - began_at
    return {"storms": options.storms, "broken": broken, "core_s": round(taken_s, 1)}


CASES: dict[str, Callable[[argparse.Namespace], Any]] = {
    "shares": shares, "slow": slow, "dsl": dsl, "codecs": codecs, "kills": kills, "storms": storms,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--storms", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(json.dumps({case: CASES[case](options) for case in options.cases}, indent=1))


if __name__ == "__main__":
    main()
