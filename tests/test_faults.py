"""Real faults in real swarms, through the console script: peers killed in the middle of rounds they
coordinate, and replaced. ``benchmarks/faults.py`` does the long campaign.

The others go on, nobody hangs or dies of it, and all end with one digest.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from p2p_co2.telemetry.events import FragmentApplied, LinkOpened, PeerFinished
from tests.campaign import Campaign, choose, paced_run

pytestmark = pytest.mark.swarm
ROUND_S = 1.0


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Campaign]:
    with Campaign(tmp_path) as swarm:
        yield swarm


def assert_one_end(ends: list[PeerFinished]) -> None:
    assert len({(end.digest, end.versions) for end in ends}) == 1, ends
    assert {end.reason for end in ends} == {"the run is over"}


def wait_for_the_end(swarm: Campaign, *names: str) -> list[PeerFinished]:
    children = [child for child in swarm.running() if child.name in names]
    assert swarm.wait(children, 120.0), swarm.tails()
    assert [child.exit_status() for child in children] == [0] * len(names), swarm.dead_unasked()
    return [swarm.events(name, PeerFinished)[-1] for name in names]


def test_peers_are_killed_and_replaced_and_the_rest_ends_with_one_digest(swarm: Campaign) -> None:
    """Over both carriers: two peers speak libp2p alone, between the others links are gRPC."""
    random_ = random.Random(1)
    swarm.start_seed(paced_run(ROUND_S, step_s=0.05, rounds=24))
    names = [f"peer-{number}" for number in range(4)]
    for number, name in enumerate(names):
        swarm.join(name, "--min-peers", "4", "--carrier", "libp2p" if number < 2 else "auto")
    swarm.wait_for_commits(*names, count=2, group=4)
    kills: list[float] = []
    for number in range(3):
        peers = [child for child in swarm.running() if child.name in names]
        victim = swarm.wait_for_coordinator(peers, 3.0) or choose(random_, peers)
        swarm.kill(victim)
        kills.append(time.time())
        if number == 0:
            swarm.join("newcomer")
        time.sleep(1.5)
    survivors = [child.name for child in swarm.running() if child.name != "seed"]
    assert_one_end(wait_for_the_end(swarm, *survivors))
    assert any(event.contributed for event in swarm.events("newcomer", FragmentApplied))
    assert {event.carrier for name in names for event in swarm.events(name, LinkOpened)} == {"grpc", "libp2p"}
    aborts = [abort for name in survivors for abort in swarm.aborts(name, since=kills[0])]
    assert len({(abort.fragment, abort.round) for abort in aborts}) <= len(kills), aborts
