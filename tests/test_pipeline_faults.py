"""A run with stages as processes over real sockets, hurt on purpose: replicas and owners are killed, frozen
and interrupted, and the rest goes on or says why it waits.

Nothing is counted twice: what stages say of microbatches adds up after every fault.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from bootstrap.local_swarm import Child
from p2p_co2.config import ClockConfig, PipelineConfig, RunConfig
from p2p_co2.recipes import recipe_digest
from p2p_co2.telemetry.events import CheckpointSaved, PeerFinished, StageProgress
from tests.campaign import ROOT, Campaign

pytestmark = pytest.mark.swarm

RECIPE = f"{ROOT / 'tests' / 'paced_recipe.py'}:make_stages"
MICROBATCHES = 6
LEAVE_S = 30.0


def run_of(stages: int) -> RunConfig:
    return RunConfig(
        name="faults",
        recipe=RECIPE,
        recipe_digest=recipe_digest(RECIPE, {}),
        fragments=1,
        clock=ClockConfig(mode="time", round_s=3.0),
        pipeline=PipelineConfig(stages=stages, microbatches=MICROBATCHES, min_replicas=1),
    )


class Stages(Campaign):
    """Peers are called by their stage first: "1b" holds stage 1."""

    def enter(self, name: str, *options: str) -> Child:
        return self.join(name, "--stage", name[0], "--checkpoint-every", "1", *options, recipe=RECIPE)

    def said(self, name: str, since: float = 0.0) -> StageProgress | None:
        """What a peer said last."""
        return next(reversed(self.events(name, StageProgress, since)), None)

    def goes_on(self, *names: str) -> float:
        """Wait until each of them has counted microbatches of an inner step since now."""
        since = time.time()

        def counts(name: str) -> bool:
            said = self.events(name, StageProgress, since)
            return bool(said) and said[-1].counted >= said[0].counted + MICROBATCHES

        return self.wait_until(f"{names} go on", lambda: all(map(counts, names)))

    def waits(self, name: str, for_: str) -> float:
        """Wait until a peer says that it waits for this, and nothing else."""
        since = time.time()

        def waits() -> bool:
            said = self.said(name, since)
            return said is not None and said.waits_for == for_

        return self.wait_until(f"{name} says: {for_}", waits)

    def check_once(self, stages: int) -> None:
        """No stage has counted more microbatches than owners have made since, nor fewer than the stage before
        had; killed peers count as they said last."""
        names = {child.name for child in self.children if child.name != "seed"}

        def counted(stage: int) -> int:
            last = [self.said(name) for name in names if int(name[0]) == stage]
            return sum(one.counted for one in last if one is not None)

        before = [counted(stage) for stage in range(stages)]
        self.goes_on(*(child.name for child in self.running() if child.name[0] == "0"))
        owners = [self.said(name) for name in names if name[0] == "0"]
        made = sum(one.counted + one.dropped + one.in_flight for one in owners if one is not None)
        assert max(before) <= made, (before, made)


def test_replicas_and_owners_die_freeze_and_leave_and_the_rest_goes_on(tmp_path: Path) -> None:
    tmp_path.mkdir(exist_ok=True)
    with Stages(tmp_path, grace_s=LEAVE_S) as swarm:
        swarm.start_seed(run_of(3))
        owner, one, other, last = (swarm.enter(name) for name in ("0a", "1a", "1b", "2a"))
        swarm.goes_on("0a", "1a", "1b", "2a")
        swarm.check_once(3)

        swarm.kill(one)  # one of two replicas
        swarm.goes_on("0a", "1b", "2a")
        swarm.check_once(3)

        newcomer = swarm.enter("1c")
        swarm.goes_on("1c")

        swarm.stop(other)
        swarm.goes_on("0a", "1c", "2a")
        swarm.stop(other, back=True)
        swarm.goes_on("1b")
        swarm.check_once(3)

        swarm.wait_for("2a", CheckpointSaved)
        swarm.kill(last)  # the only replica
        for name in ("1b", "1c"):
            swarm.waits(name, "stage 2 has no replica")
        last = swarm.enter("2a")
        swarm.goes_on("0a", "1b", "1c", "2a")
        swarm.check_once(3)

        swarm.interrupt(newcomer)
        assert swarm.wait([newcomer], LEAVE_S), newcomer.last_lines(30)
        assert newcomer.exit_status() == 0, newcomer.last_lines(30)
        assert swarm.events("1c", PeerFinished)
        swarm.goes_on("0a", "1b", "2a")
        swarm.check_once(3)

        swarm.kill(owner)  # the only one
        swarm.waits("1b", "stage 0 has no replica")
        swarm.wait_for("0a", CheckpointSaved)
        owner = swarm.enter("0a")
        swarm.goes_on("0a", "1b", "2a")

        swarm.kill(owner)  # and its folder is lost
        swarm.waits("1b", "stage 0 has no replica")
        swarm.enter("0b", "--restart-stage")
        swarm.goes_on("0b", "1b", "2a")
