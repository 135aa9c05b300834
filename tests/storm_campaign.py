"""The campaign: storms in which everything goes wrong that can, another mixture for each seed, every law at
every step. A seed that fails is printed with the command that plays it again. Two files of tests share the
seeds, so that two workers play them side by side: as many as the suite has time for."""

from __future__ import annotations

from collections.abc import Iterable

from p2p_co2.simnet.campaign import STORM_OFFER_S, play
from p2p_co2.simnet.faults import STORM_FAULTS

SEEDS = 200


def check_storms(seeds: Iterable[int]) -> None:
    """No law is broken, every kind of fault comes to pass in each storm, and rounds are made after it."""
    played = [play(seed) for seed in seeds]
    failures = [str(one.failure) for one in played if one.failure is not None]
    assert not failures, "\n".join(failures)
    spared = {one.seed: sorted(STORM_FAULTS - one.faults.keys()) for one in played}
    assert not any(spared.values()), {seed: kinds for seed, kinds in spared.items() if kinds}
    assert all(one.committed_after for one in played)
    assert all(0 < one.longest_offer_s <= STORM_OFFER_S for one in played)
