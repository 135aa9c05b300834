"""Peers killed in every phase of a round: real processes, real sockets, SIGKILL.

In each case one of three peers dies in the moment before its first message of the given kind. The others must
go on, finish the run with the same digest, and say that the peer left.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from p2p_co2.config import ClockConfig, CodecConfig, RunConfig
from p2p_co2.recipes import recipe_digest
from p2p_co2.telemetry.events import LinkLost, MessageRefused, PeerLeft, RoundCommitted
from tests.swarms import Swarm, swarm

pytestmark = pytest.mark.swarm
RUN = RunConfig(
    name="kill",
    recipe="own-loop",
    recipe_digest=recipe_digest("own-loop", {}),
    fragments=2,
    clock=ClockConfig(mode="time", round_s=1.5, rounds=6),
    codec=CodecConfig(name="int4"),
)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Swarm]:
    with swarm(tmp_path, RUN) as running:
        yield running


@pytest.mark.parametrize("phase", ["ready", "begin", "part", "mean", "result", "decision"])
def test_survivors_of_a_peer_killed_in_a_phase_finish_together(running: Swarm, phase: str) -> None:
    survivors = ["a", "b"]
    running.start_peer("doomed", "--seed", "3", "--min-peers", "3", "--die-at", phase)
    for seed, name in enumerate(survivors):
        running.start_peer(name, "--seed", str(seed), "--min-peers", "3")
    assert running.processes["doomed"].wait(90) == -signal.SIGKILL
    running.wait(*survivors)

    finished = [running.finished(name) for name in survivors]
    assert {event.reason for event in finished} == {"the run is over"}
    assert len({(event.digest, event.versions) for event in finished}) == 1
    for name in survivors:
        events = running.events(name)
        assert any(isinstance(event, PeerLeft | LinkLost) for event in events)
        assert not [event for event in events if isinstance(event, MessageRefused)]
        last = [event for event in events if isinstance(event, RoundCommitted)][-1]
        assert last.group_size <= 2  # they went on without it
