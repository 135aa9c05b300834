"""Peers killed in every phase of a round: real processes, real sockets, SIGKILL.

In each case three of five peers die, each in the moment before its first message of one kind. The others must
go on, finish the run with the same digest, and say that the peers left.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from p2p_co2.config import ClockConfig, CodecConfig, RunConfig
from p2p_co2.recipes import recipe_digest
from p2p_co2.telemetry.events import LinkLost, PeerLeft, RoundCommitted
from tests.swarms import START_BOUND_S, Swarm, swarm

pytestmark = pytest.mark.swarm
RUN = RunConfig(
    name="kill",
    recipe="own-loop",
    recipe_digest=recipe_digest("own-loop", {}),
    fragments=2,
    clock=ClockConfig(mode="time", round_s=1.5, rounds=12),
    codec=CodecConfig(name="int4"),
)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Swarm]:
    with swarm(tmp_path, RUN) as running:
        yield running


@pytest.mark.parametrize("phases", [("ready", "begin", "part"), ("mean", "result", "decision")])
def test_survivors_of_peers_killed_in_each_phase_finish_together(
    running: Swarm, phases: tuple[str, ...]
) -> None:
    survivors = ["a", "b"]
    for number, phase in enumerate(phases):
        arguments = (
            "--seed",
            str(number),
            "--min-peers",
            "5",
            "--die-at",
            phase,
            "--die-after",
            str(2 + 2 * number),
        )
        running.start_peer(phase, *arguments)
    for seed, name in enumerate(survivors):
        running.start_peer(name, "--seed", str(10 + seed), "--min-peers", "5")
    for phase in phases:
        assert running.processes[phase].wait(START_BOUND_S) == -signal.SIGKILL, running.log(phase)[-2000:]
    running.wait(*survivors)

    finished = [running.finished(name) for name in survivors]
    assert {event.reason for event in finished} == {"the run is over"}
    assert len({(event.digest, event.versions) for event in finished}) == 1
    for name in survivors:
        events = running.events(name)
        assert len({event.other for event in events if isinstance(event, PeerLeft | LinkLost)}) >= len(phases)
        last = [event for event in events if isinstance(event, RoundCommitted)][-1]
        assert last.group_size <= 2  # they went on without them
