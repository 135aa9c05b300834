"""Do swarms on lines too slow for their runs end in one state? On virtual time, so the same anywhere.

    python benchmarks/ends.py 4g --seeds 0 75
    python benchmarks/ends.py drawn --seeds 200000 200157
    python benchmarks/ends.py wide --seeds 1000 1040

A named set is three peers without a fault; ``drawn`` takes peers, lines, model, rounds and churn at
random from the seed, and lays a storm over about every seventh run; ``wide`` does so with up to 40 peers,
6 fragments and more churn. Prints each run that broke a law, and
one line for all: how many broke one, and in how many somebody left without what others hold and said so.
"""

from __future__ import annotations

import argparse
import random
from statistics import fmean

from p2p_co2.codec_specs import SPECS
from p2p_co2.config import ClockConfig, RunConfig
from p2p_co2.simnet import Churn, EventLog, Settings, Storm, Swarm

SETS = {
    "4g": ("4g", 10_000_000, 30.0, 4),
    "satellite": ("satellite", 2_000_000, 30.0, 12),
    "dsl": ("dsl", 30_000_000, 20.0, 20),
    "home-mix": ("home-mix", 30_000_000, 20.0, 12),
    "cable": ("cable", 30_000_000, 20.0, 10),
}
"""Lines, parameters, seconds of a round, rounds."""
LINES = ("fibre", "cable", "dsl", "4g", "transatlantic", "satellite", "home-mix", "home-mix")
MAX_STATE_FACTOR = 64


def settings_of(
    profile: str, values: int, round_s: float, rounds: int, *, seed: int, peers: int = 3,
    faults: Churn | Storm | None = None,
) -> Settings:  # fmt: skip
    encoded = SPECS["int4"].payload_bytes(values)
    clock = ClockConfig(mode="time", round_s=round_s, rounds=rounds)
    run = RunConfig(name="ends", fragments=2, group_size=64, clock=clock)
    return Settings(
        run=run, peers=peers, seed=seed, profile=profile, faults=faults, blocks=(16, 16),
        real_bytes_per_block=encoded / 16, state_factor=min(MAX_STATE_FACTOR, round(8 * values / encoded)),
    )  # fmt: skip


def wide(seed: int) -> Settings:
    draw = random.Random(seed)
    peers, profile = draw.choice([2, 3, 4, 6, 10, 16, 24, 32, 40]), draw.choice(LINES)
    round_s, rounds = draw.choice([4.0, 8.0, 15.0, 40.0, 90.0]), draw.choice([5, 9, 16, 24])
    values, fragments = draw.choice([50_000, 300_000, 3_000_000, 20_000_000]), draw.choice([1, 2, 3, 4, 6])
    codec, churn_per_h = (
        draw.choice(["int4", "int4", "fp16", "int8"]),
        draw.choice([0.0, 0.5, 6.0, 20.0, 40.0]),
    )
    lasts_s = round_s * rounds
    faults: Churn | Storm | None = Churn(churn_per_h, 0.7 * lasts_s) if churn_per_h else None
    if draw.random() < 0.15:
        faults = Storm(round_s, 0.6 * lasts_s)
    encoded, blocks = SPECS[codec].payload_bytes(values), max(4, 32 // fragments)
    clock = ClockConfig(mode="time", round_s=round_s, rounds=rounds)
    run = RunConfig(name="wide", fragments=fragments, group_size=64, clock=clock)
    return Settings(
        run=run, peers=peers, seed=seed, profile=profile, faults=faults, blocks=(blocks,) * fragments,
        real_bytes_per_block=encoded / (blocks * fragments),
        state_factor=min(MAX_STATE_FACTOR, round(8 * values / encoded)),
    )  # fmt: skip


def drawn(seed: int) -> Settings:
    draw = random.Random(seed)
    peers, profile = draw.choice([2, 3, 3, 4, 5, 8, 12, 20]), draw.choice(LINES)
    round_s, rounds = draw.choice([4.0, 10.0, 30.0]), draw.choice([4, 8, 14])
    values = draw.choice([100_000, 1_000_000, 10_000_000])
    churn_per_h, is_storm = draw.choice([0.0, 0.0, 2.0, 20.0]), draw.random() < 0.15
    faults: Churn | Storm | None = Churn(churn_per_h, 0.7 * round_s * rounds) if churn_per_h else None
    if is_storm:
        faults = Storm(round_s, 0.6 * round_s * rounds)
    return settings_of(
        profile, values, round_s, rounds, seed=seed, peers=peers, faults=faults
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("name", choices=(*SETS, "drawn", "wide"))
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 16), metavar=("FROM", "TO"))
    options = parser.parse_args()
    broke, lacked, rounds, aborts, lasted_s = 0, 0, list[int](), list[int](), list[float]()
    for seed in range(*options.seeds):
        draws = {"drawn": drawn, "wide": wide}.get(options.name)
        of = draws(seed) if draws else settings_of(*SETS[options.name], seed=seed)
        result = Swarm(of, EventLog(digests=False)).run()
        if result.violations:
            storm = " (a storm)" if isinstance(of.faults, Storm) else ""
            print(f"seed {seed}{storm}: {'; '.join(map(str, result.violations[:3]))}", flush=True)
        broke, lacked = broke + bool(result.violations), lacked + bool(result.lacking)
        rounds.append(result.counts.get("round_committed", 0))
        aborts.append(result.counts.get("round_aborted", 0))
        lasted_s.append(result.virtual_s)
    print(
        f"{options.name}, seeds {options.seeds[0]} to {options.seeds[1] - 1}: of {len(rounds)} runs {broke} "
        f"broke a law, in {lacked} somebody left with less and said so; commits and aborts that peers saw "
        f"{fmean(rounds):.1f} and {fmean(aborts):.1f} a run, {fmean(lasted_s):.0f} virtual s"
    )


if __name__ == "__main__":
    main()
