"""Real faults in real swarms, through the console script: peers killed in the middle of rounds they
coordinate, and replaced; peers that freeze, pause or break; seeds that go and come back; everything killed,
and resumed from checkpoints. ``benchmarks/faults.py`` does the long campaign.

The others go on, nobody hangs or dies of it, and all end with one digest.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootstrap.local_swarm import Child
from p2p_co2.system.governor import Wish
from p2p_co2.telemetry.events import (
    CaughtUp,
    FragmentApplied,
    LinkLost,
    LinkOpened,
    Paused,
    PeerFinished,
    PeerLeft,
    PeerStarted,
    Progress,
    Resumed,
    RoundCommitted,
)
from p2p_co2.tensors.checkpoint import folder as checkpoint
from tests.campaign import START_S, Campaign, choose, paced_run
from tests.test_transport import is_by_silence

pytestmark = pytest.mark.swarm
ROUND_S = 1.0
FROZEN_S = 12.0


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Campaign]:
    with Campaign(tmp_path) as swarm:
        yield swarm


def test_peers_are_killed_and_replaced_and_the_rest_goes_on_with_one_history(swarm: Campaign) -> None:
    """Over both carriers: two peers speak libp2p alone, between the others links are gRPC."""
    swarm.start_seed(paced_run(ROUND_S, step_s=0.05))
    names = [f"peer-{number}" for number in range(4)]
    for number, name in enumerate(names):
        swarm.join(name, "--min-peers", "4", "--carrier", "libp2p" if number < 2 else "auto")
    swarm.wait_for_commits(*names, count=2, group=4)
    kills = kill_three_of(swarm, names)
    survivors = [child.name for child in swarm.running() if child.name != "seed"]
    (stayed,) = (name for name in survivors if name != "newcomer")
    assert_one_history(swarm, *survivors)
    assert kills.keys() <= {event.other for event in swarm.events(stayed, PeerLeft)}
    assert swarm.events("newcomer", CaughtUp)
    assert any(event.contributed for event in swarm.events("newcomer", FragmentApplied))
    assert {event.carrier for name in names for event in swarm.events(name, LinkOpened)} == {"grpc", "libp2p"}
    lost = {event.reason for name in survivors for event in swarm.events(name, LinkLost)}
    assert lost
    assert not any(map(is_by_silence, lost)), "the end of a process is seen"
    since, until = min(kills.values()), max(kills.values()) + 5.0 * ROUND_S
    aborts = [abort for name in survivors for abort in swarm.aborts(name, since=since) if abort.at < until]
    ended = {(abort.fragment, abort.round) for abort in aborts}
    assert len(ended) <= 2 * len(kills), aborts  # one of each fragment


def kill_three_of(swarm: Campaign, names: list[str]) -> dict[str, float]:
    """Peer -> when it was killed, in the middle of a round that it coordinates if it can be. A newcomer
    starts meanwhile."""
    random_ = random.Random(1)
    kills: dict[str, float] = {}
    for number in range(3):
        peers = [child for child in swarm.running() if child.name in names]
        victim = swarm.wait_for_coordinator(peers, 3.0) or choose(random_, peers)
        swarm.kill(victim)
        kills[swarm.events(victim.name, PeerStarted)[0].peer] = time.time()
        if number == 0:
            swarm.join("newcomer")
        time.sleep(1.5)
    return kills


def test_a_swarm_outlives_one_fault_after_another(swarm: Campaign) -> None:
    """A peer's own code raises; a peer freezes; the seed dies and comes back; a peer pauses; somebody comes
    late, with the first ticket; everything is killed, and resumed."""
    seldom, often = (swarm.folder / name for name in ("seldom.toml", "often.toml"))
    seldom.write_text("checkpoint_every_s = 3600.0\n")
    often.write_text("checkpoint_every_s = 1.0\n")
    settings = {"frozen": often, "resting": seldom, "calm": often}
    run = paced_run(ROUND_S, step_s=0.05)
    seed = swarm.start_seed(run)
    frozen, resting, _ = (join_three(swarm, name, config) for name, config in settings.items())
    broken = swarm.join("broken", "--min-peers", "4", variables={"PACED_RAISE_AFTER": "40"})
    broken.asked_to_end = True
    swarm.wait_for_commits(*settings, count=2, group=3)
    assert_left_with_its_traceback(swarm, broken)

    swarm.stop(frozen)
    stopped_at = time.time()
    swarm.kill(seed)
    swarm.wait_for_commits("resting", "calm", count=2, since=stopped_at)  # nobody needs a seed to go on
    seed = swarm.start_seed(run)
    pause(swarm, resting)
    swarm.wait_until("the end of the frost", lambda: time.time() > stopped_at + FROZEN_S)
    swarm.stop(frozen, back=True)
    swarm.wait_until("peers greet the seed anew", lambda: "peers: " in seed.last_lines())
    swarm.join("late")
    assert_one_history(swarm, *settings, "late")
    kill_everything(swarm)
    swarm.start_seed(run)
    resume_from_checkpoints(swarm, settings)


def join_three(swarm: Campaign, name: str, config: Path, *options: str) -> Child:
    return swarm.join(name, "--min-peers", "3", "--config", str(config), *options)


def assert_left_with_its_traceback(swarm: Campaign, broken: Child) -> None:
    assert swarm.wait([broken], START_S), swarm.tails()
    said = broken.last_lines(60)
    assert broken.exit_status() == 1, said
    assert "Traceback" in said
    assert "paced_recipe.py" in said
    assert "RuntimeError: the model of this peer is broken" in said.splitlines()
    (end,) = swarm.events(broken.name, PeerFinished)
    assert end.reason == "RuntimeError in the training loop"
    swarm.wait_until(
        "the others see it go", lambda: end.peer in {left.other for left in swarm.events("calm", PeerLeft)}
    )
    assert checkpoint.load(swarm.folder / broken.name / "checkpoint").inner_steps > 0


def pause(swarm: Campaign, peer: Child) -> None:
    """A peer that rests writes a checkpoint first."""
    name = peer.name
    swarm.wish(peer, Wish.PAUSE)
    paused_at = swarm.wait_for(name, Paused).at
    swarm.wait_for_commits("calm", count=2, since=paused_at)
    steps = swarm.events(name, Progress)[-1].inner_steps
    assert 0 < checkpoint.load(swarm.folder / name / "checkpoint").inner_steps <= steps

    swarm.wish(peer, Wish.GO_ON)
    resumed_at = swarm.wait_for(name, Resumed, since=paused_at).at
    swarm.wait_for_commits(name, count=2, since=resumed_at)
    assert swarm.events(name, Progress, paused_at)[0].inner_steps == steps  # it did rest


def assert_one_history(swarm: Campaign, *names: str) -> None:
    """From now on all of them contribute to the same rounds, which they can only from one state; and what
    each outer step does to a fragment is the same at all who take it, bit for bit."""
    healed_at = wait_for_rounds_of_all(swarm, *names)
    wait_for_rounds_of_all(swarm, *names)

    def took(name: str) -> set[int]:
        return {step.fragment for step in swarm.events(name, FragmentApplied, healed_at)}

    # A round is told of when it is decided, an outer step when the training thread has met it.
    swarm.wait_until("outer steps of all", lambda: all(took(name) == {0, 1} for name in names))
    did: dict[tuple[int, int], set[tuple[float, ...]]] = {}
    for name in names:
        for step in swarm.events(name, FragmentApplied, healed_at):
            norms = (step.gap, step.momentum_norm)
            did.setdefault((step.fragment, step.version), set()).add(norms)
    assert len(did) >= 2
    assert {len(norms) for norms in did.values()} == {1}, did


def wait_for_rounds_of_all(swarm: Campaign, *names: str) -> float:
    """Until each of them has seen a round of every fragment, from now on, to which all contributed."""
    since = time.time()

    def fragments(name: str) -> set[int]:
        rounds = swarm.events(name, RoundCommitted, since)
        return {round_.fragment for round_ in rounds if round_.contributors >= len(names)}

    return swarm.wait_until(
        f"rounds of {', '.join(names)}", lambda: all(fragments(name) == {0, 1} for name in names)
    )


def kill_everything(swarm: Campaign) -> None:
    """The seed as well; and the disk tears all checkpoints of a peer."""
    for child in swarm.running():
        swarm.kill(child)
    shutil.copytree(swarm.folder / "frozen" / "checkpoint", swarm.folder / "torn" / "checkpoint")
    torn = checkpoints_of(swarm, "torn")
    assert len(torn) >= 2
    for path in torn:
        manifest = path / "manifest.json"
        manifest.write_bytes(manifest.read_bytes()[:-1])


def checkpoints_of(swarm: Campaign, name: str) -> list[Path]:
    """Oldest first."""
    return sorted((swarm.folder / name / "checkpoint").glob("state-*"))


def resume_from_checkpoints(swarm: Campaign, settings: dict[str, Path]) -> None:
    saved = {name: checkpoint.load(swarm.folder / name / "checkpoint") for name in settings}
    resumed_at = time.time()
    again = [join_three(swarm, name, config, "--resume") for name, config in settings.items()]
    torn = swarm.join("torn", "--resume")
    torn.asked_to_end = True
    assert swarm.wait([torn], START_S), swarm.tails()
    assert torn.exit_status() == 2, torn.last_lines()
    (error,) = (line for line in torn.last_lines(60).splitlines() if line.startswith("error: "))
    assert "no whole checkpoint there: state-" in error
    assert "or begin anew" in error
    assert_one_history(swarm, *settings)
    for name, before in saved.items():
        reports = swarm.events(name, Progress, resumed_at)
        assert reports[0].inner_steps == before.inner_steps
        losses = [report.loss for report in swarm.events(name, Progress) if report.loss == report.loss]
        assert next(report.loss for report in reports if report.loss == report.loss) < losses[0]
    ends = swarm.leave_together(*again)
    reached = sum(state.version for state in saved["frozen"].states)
    assert min(sum(end.versions) for end in ends) > reached
    assert len({(end.digest, end.versions) for end in ends}) == len({end.versions for end in ends})
