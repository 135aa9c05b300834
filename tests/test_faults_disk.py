"""A peer's disk, through the console script: full, and torn while nobody ran."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from p2p_co2.telemetry.events import CheckpointSaved, PeerFinished, Progress, RoundCommitted, Warned
from p2p_co2.tensors.checkpoint import folder as checkpoint
from tests.campaign import START_S, Campaign, paced_run
from tests.conftest import mounted_disk
from tests.disks import fill

pytestmark = pytest.mark.swarm
ROUND_S = 1.0
TORN_AT = (0, 30, -1)
LAST = "part-00000.safetensors"
"""Nothing of the file is left, some of its header, and all but one byte."""


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Campaign]:
    with Campaign(tmp_path) as swarm:
        yield swarm


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """The folder of a peer named "full", on a file system of its own."""
    with mounted_disk(tmp_path / "full", "32m") as disk:
        yield disk


def test_a_peer_trains_on_with_a_full_disk_and_saves_again_when_there_is_room(
    disk: Path, swarm: Campaign
) -> None:
    """Of its own file system nothing is left: for checkpoints, and for its journal."""
    often = swarm.folder / "often.toml"
    often.write_text("checkpoint_every_s = 1.0\n")
    swarm.start_seed(paced_run(ROUND_S, step_s=0.05, width=256))
    full = swarm.join("full", "--min-peers", "2", "--config", str(often))
    calm = swarm.join("calm", "--min-peers", "2")
    swarm.wait_for_commits("full", "calm", group=2)
    saved = swarm.wait_for("full", CheckpointSaved)
    fill(disk)
    filled_at = time.time()
    told = "the disk is full; free some space or give another folder"
    swarm.wait_until("it says so", lambda: told in full.last_lines(200))
    swarm.wait_for_commits("calm", count=4, since=filled_at, group=2)  # in which it takes part
    before = checkpoint.load(disk / "checkpoint")
    assert sum(state.version for state in before.states) >= sum(saved.versions)
    (disk / "filling").unlink()
    freed_at = time.time()
    after = swarm.wait_for("full", CheckpointSaved, since=freed_at)
    assert sum(after.versions) > sum(state.version for state in before.states)
    assert checkpoint.load(disk / "checkpoint").inner_steps > before.inner_steps
    swarm.wait_for_commits("full", "calm", since=freed_at, group=2)
    ends = swarm.leave_together(full, calm)
    assert [end.reason for end in ends] == ["stopped", "stopped"]


def test_memory_that_ends_amid_a_step_costs_no_checkpoint_and_one_torn_anywhere_is_passed_over(
    swarm: Campaign,
) -> None:
    """For the one before it: a peer for each class of bytes, resumed side by side. Nobody takes part of one
    for a whole."""
    often = swarm.folder / "often.toml"
    often.write_text("checkpoint_every_s = 0.5\n")
    run = paced_run(ROUND_S, step_s=0.05)
    seed = swarm.start_seed(run)
    peer = swarm.join("whole", "--config", str(often), variables={"PACED_TEAR_AFTER": "80"})
    peer.asked_to_end = True
    assert swarm.wait([peer], START_S), swarm.tails()
    assert peer.exit_status() == 1, peer.last_lines(60)
    (error,) = (line for line in peer.last_lines(60).splitlines() if line.startswith("error: "))
    assert "failed in its middle (MemoryError: no memory is left)" in error
    assert "join again with --resume, with more memory free" in error
    (end,) = swarm.events("whole", PeerFinished)
    assert end.reason == "EnvironmentFault in the training loop, without a last checkpoint"
    before = checkpoint.load(swarm.folder / "whole" / "checkpoint")
    assert before.passed_over == ()
    saved = swarm.events("whole", CheckpointSaved)[-1]
    assert tuple(state.version for state in before.states) == saved.versions
    older, newest = states_of(swarm.folder / "whole")
    data, steps = (newest / LAST).read_bytes(), int(older.stem.split("-")[1])
    torn: dict[str, Path] = {}
    for where in TORN_AT:
        name = f"torn-{len(torn)}"
        shutil.copytree(swarm.folder / "whole" / "checkpoint", swarm.folder / name / "checkpoint")
        torn[name] = swarm.folder / name / "checkpoint" / newest.name / LAST
        torn[name].write_bytes(data[:where])
        assert not torn[name].samefile(newest / LAST)
        swarm.join(name, "--resume")
    for name in torn:
        words = "a checkpoint is damaged, went on from the checkpoint before it: " + newest.name
        swarm.wait_until(
            f"{name} says so",
            lambda name=name, words=words: any(w.text.startswith(words) for w in swarm.events(name, Warned)),
        )
        assert swarm.wait_for(name, Progress).inner_steps == steps
        swarm.wait_for(name, RoundCommitted)
    assert seed.running()
    ends = swarm.leave_together(*(child for child in swarm.running() if child is not seed))
    assert len({end.reason for end in ends}) == 1


def states_of(folder: Path) -> list[Path]:
    """Oldest first."""
    return sorted((folder / "checkpoint").glob("state-*"), key=os.fspath)
