"""Peers killed in every phase of a round: real processes, real sockets, SIGKILL.

Six of eight peers die, each in the moment before its first message of one kind. The others must go on, finish
the run with the same digest, and say that the peers left.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from p2p_co2.config import ClockConfig, CodecConfig, RunConfig
from p2p_co2.protocol.rounds.rank import coordination_order
from p2p_co2.recipes import recipe_digest
from p2p_co2.telemetry.events import LinkLost, PeerLeft, RoundCommitted
from p2p_co2.wire.identity import Identity
from tests.swarms import START_BOUND_S, swarm

pytestmark = pytest.mark.swarm
ROUNDS, FRAGMENTS = 12, 2
RUN = RunConfig(
    name="kill",
    recipe="own-loop",
    recipe_digest=recipe_digest("own-loop", {}),
    fragments=FRAGMENTS,
    clock=ClockConfig(mode="time", round_s=1.5, rounds=ROUNDS),
    codec=CodecConfig(name="int4"),
)
AS_COORDINATOR = ("begin", "waiting")
COMMITS_BEFORE = {"begin": 1, "ready": 2, "part": 3, "waiting": 3, "mean": 4, "result": 5}
"""Phase -> how many commits a peer lives to see at least."""
SURVIVORS = ("a", "b")
PLACES = 3
"""How many of the early rounds those two coordinate who die as coordinators."""


def choose_places(folder: Path) -> None:
    """Make everybody's identity beforehand: who coordinates is decided by hash, and both that die as
    coordinators are to have ``PLACES`` chances, whoever is still alive."""
    names = (*COMMITS_BEFORE, *SURVIVORS)
    early = [(fragment, round_) for fragment in range(FRAGMENTS) for round_ in range(3, ROUNDS - 3)]
    while True:
        made = [Identity.generate() for _ in names]
        firsts = [coordination_order((one.peer_id for one in made), *place)[0] for place in early]
        made.sort(key=lambda one: -firsts.count(one.peer_id))
        if firsts.count(made[1].peer_id) >= PLACES:
            break
    others = [name for name in names if name not in AS_COORDINATOR]
    for name, identity in zip((*AS_COORDINATOR, *others), made, strict=True):
        (folder / name).mkdir()
        (folder / name / "identity").write_bytes(identity.libp2p_bytes())


def test_survivors_of_peers_killed_in_each_phase_finish_together(tmp_path: Path) -> None:
    choose_places(tmp_path)
    everybody = ("--min-peers", str(len(COMMITS_BEFORE) + len(SURVIVORS)))
    with swarm(tmp_path, RUN) as running:
        for seed, (phase, commits) in enumerate(COMMITS_BEFORE.items()):
            kinds = {"waiting": "waiting,begin"}.get(phase, phase)  # if all are in time, nobody need wait
            doom = ("--die-at", kinds, "--die-after", str(commits))
            running.start_peer(phase, "--seed", str(seed), *everybody, *doom)
        for seed, name in enumerate(SURVIVORS):
            running.start_peer(name, "--seed", str(10 + seed), *everybody)
        for phase in COMMITS_BEFORE:
            assert running.processes[phase].wait(START_BOUND_S) == -signal.SIGKILL, running.log(phase)[-2000:]
        running.wait(*SURVIVORS)

        finished = [running.finished(name) for name in SURVIVORS]
        assert {event.reason for event in finished} == {"the run is over"}
        assert len({(event.digest, event.versions) for event in finished}) == 1
        for name in SURVIVORS:
            events = running.events(name)
            gone = {event.other for event in events if isinstance(event, PeerLeft | LinkLost)}
            assert len(gone) >= len(COMMITS_BEFORE)
            last = [event for event in events if isinstance(event, RoundCommitted)][-1]
            assert last.group_size <= len(SURVIVORS)  # they went on without them
