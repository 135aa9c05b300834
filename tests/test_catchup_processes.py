"""Loading the agreed state from several donors at once: the console script's programs, over real links."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from p2p_co2.telemetry.events import CaughtUp, PeerJoined
from tests.campaign import Campaign, paced_run

pytestmark = pytest.mark.swarm
ROUND_S = 2.0
DONORS = ("first", "second", "third")
REPLAYED_AT_MOST = 8


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Campaign]:
    with Campaign(tmp_path) as swarm:
        yield swarm


@pytest.mark.parametrize("carrier", ["grpc", "libp2p"])
def test_who_comes_late_loads_from_several_donors_and_goes_on_when_one_of_them_is_killed(
    swarm: Campaign, carrier: str
) -> None:
    """Each may upload so little that the state takes seconds."""
    swarm.start_seed(paced_run(ROUND_S, step_s=0.05, width=512))
    for name in DONORS:
        swarm.join(name, "--min-peers", "3", "--upload", "600k", "--carrier", carrier)
    swarm.wait_for_commits(*DONORS, count=2 * (REPLAYED_AT_MOST + 2))  # of either fragment so many
    swarm.join("late", "--carrier", carrier)
    swarm.wait_for("late", PeerJoined)  # it asks for the state now
    swarm.kill(next(child for child in swarm.running() if child.name == "second"))
    swarm.wait_until("late has caught up", lambda: {event.fragment for event in caught_up(swarm)} == {0, 1})
    for fragment in (0, 1):  # by a state, though the last step to where the others are may be a round
        first = next(event for event in caught_up(swarm) if event.fragment == fragment)
        assert first.from_version == 0
        assert first.to_version > REPLAYED_AT_MOST
    assert max(event.donors for event in caught_up(swarm)) >= 2
    swarm.wait_for_commits("late", "first", "third", group=3)


def caught_up(swarm: Campaign) -> list[CaughtUp]:
    return swarm.events("late", CaughtUp)
