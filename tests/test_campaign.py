"""The campaign: storms in which everything goes wrong that can, another mixture for each seed, every law at
every step. A seed that fails is printed with the command that plays it again. Two tests share the seeds, so
that two workers play them side by side."""

from __future__ import annotations

import pytest

from p2p_co2.errors import P2PCo2Error
from p2p_co2.simnet import EventLog, Result, VirtualSwarm
from p2p_co2.simnet.campaign import STORM_OFFER_S, STORM_UNTIL_S, storm_settings
from p2p_co2.telemetry.events import RoundCommitted

STORM_FAULTS = frozenset({
    "crash", "power loss", "leave", "stall", "restart with its disk", "restart without its disk", "split",
    "cut pair", "seed down", "message lost", "message doubled", "message reordered", "behind NAT",
    "skewed clock",
})  # fmt: skip
"""What a storm of 32 peers holds, by the names of ``Result.faults``."""
BUGS = (
    P2PCo2Error, LookupError, TypeError, ValueError, ArithmeticError, AssertionError, RuntimeError,
)  # fmt: skip
"""How a simulation ends that is ended by a bug."""


def play(seed: int) -> tuple[Result, list[str]]:
    """One storm, and what is wrong with it: broken laws, a bug that ended it, a kind of fault that did not
    come to pass, no round after the last of them."""
    swarm, after = VirtualSwarm(storm_settings(seed), EventLog(digests=False)), [0]

    def count(event: RoundCommitted) -> None:
        after[0] += swarm.world.now > STORM_UNTIL_S

    swarm.log.readers_of[RoundCommitted].append(count)
    try:
        result = swarm.run()
    except BUGS as error:
        return Result(), [f"ended by a bug: {error!r}"]
    wrong = [str(violation) for violation in result.violations[:5]]
    wrong += [f"no {kind}" for kind in sorted(STORM_FAULTS - result.faults.keys())]
    return result, wrong + ["no round was committed after it"] * (not after[0])


@pytest.mark.parametrize("first", [1, 2])
def test_storms_break_no_law(first: int, request: pytest.FixtureRequest) -> None:
    """Every kind of fault comes to pass in each storm, and rounds are made after it."""
    failures = []
    for seed in range(first, request.config.getoption("--storms") + 1, 2):
        result, wrong = play(seed)
        if wrong:
            failures += [f"p2p-co2 simulate --storm --peers 32 --seed {seed}", *wrong]
        else:
            assert 0 < result.longest_offer_s <= STORM_OFFER_S
    assert not failures, "\n  ".join(failures)
