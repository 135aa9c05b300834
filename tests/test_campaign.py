"""The campaign: storms in which everything goes wrong that can, another mixture for each seed, every law at
every step. A seed that fails is printed with the command that plays it again. Two tests share the seeds, so
that two workers play them side by side."""

from __future__ import annotations

import pytest

from p2p_co2.simnet.campaign import STORM_OFFER_S, play
from tests.test_simnet_bugs import CountsTwice

SEEDS = 200
STORM_FAULTS = frozenset({
    "crash", "power loss", "leave", "stall", "restart with its disk", "restart without its disk", "split",
    "cut pair", "seed down", "message lost", "message doubled", "message reordered", "behind NAT",
    "skewed clock",
})  # fmt: skip
"""What a storm of 32 peers holds, by the names of ``Swarm.faults``."""


@pytest.mark.parametrize("first", [1, 2])
def test_storms_break_no_law(first: int) -> None:
    """Every kind of fault comes to pass in each storm, and rounds are made after it."""
    played = [play(seed) for seed in range(first, SEEDS + 1, 2)]
    failures = [one.failure for one in played if one.failure]
    assert not failures, "\n".join(failures)
    spared = {one.seed: sorted(STORM_FAULTS - one.faults.keys()) for one in played}
    assert not any(spared.values()), {seed: kinds for seed, kinds in spared.items() if kinds}
    assert all(one.committed_after for one in played)
    assert all(0 < one.longest_offer_s <= STORM_OFFER_S for one in played)


def test_a_storm_that_breaks_a_law_says_how_to_play_it_again() -> None:
    told = play(3, peers=6, make_ledger=CountsTwice).failure
    assert "p2p-co2 simulate --storm --peers 6 --seed 3" in told
    assert "conservation" in told
