"""The simulated swarm: same seed, same events; calm runs keep every law; planted bugs are caught."""

from __future__ import annotations

from p2p_co2.config import ClockConfig, RunConfig
from p2p_co2.simnet import Settings, simulate

ROUND_S = 4.0


def run_of(rounds: int = 4, fragments: int = 2) -> RunConfig:
    clock = ClockConfig(mode="time", round_s=ROUND_S, rounds=rounds)
    return RunConfig(name="simulated", fragments=fragments, clock=clock)


def test_a_calm_swarm_keeps_every_law_and_ends_with_one_state() -> None:
    result = simulate(Settings(run=run_of(), peers=6, seed=3))
    assert result.violations == []
    assert len(result.digests) == 6
    assert len(set(result.digests.values())) == 1
    assert result.forks == 0
    assert result.counts["round_committed"] >= 6 * 6
    assert result.written_off == {}


def test_the_same_seed_gives_the_same_events_and_another_one_others() -> None:
    first, again, other = (simulate(Settings(run=run_of(2), peers=5, seed=seed)) for seed in (1, 1, 2))
    assert first.digest == again.digest
    assert first.digest != other.digest
