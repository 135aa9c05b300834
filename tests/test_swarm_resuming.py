"""A user's own loop that is started again in its folder: it goes on by itself, or says why it cannot."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from p2p_co2.config import ClockConfig, RunConfig
from p2p_co2.tensors.checkpoint.folder import load, load_agreed
from tests.resuming_peer import GAMMA, RATE
from tests.swarms import ROOT, START_BOUND_S, swarm

STEPS = 40


@pytest.mark.swarm
def test_an_own_loop_that_is_started_again_goes_on_by_itself_and_begins_anew_only_if_asked(
    tmp_path: Path,
) -> None:
    run = RunConfig(recipe="own-loop", fragments=2, clock=ClockConfig(mode="time", round_s=1.0))
    with swarm(tmp_path, run) as opened:

        def start(name: str, width: int, *over: str) -> tuple[int, str]:
            script = str(ROOT / "tests" / "resuming_peer.py")
            folder = str(tmp_path / "peer")
            words = [sys.executable, script, opened.ticket, folder, str(width), str(STEPS), *over]
            status = opened.start(name, words).wait(START_BOUND_S)
            return status, opened.log(name)

        status, said = start("first", 16)
        assert status == 0, said
        assert "starts at 0 buffer 0" in said
        warning = "warning: checkpoints are without the buffer mask (a tensor of layout sparse_coo)"
        assert said.count("warning: checkpoints are without") == said.count(warning) == 1, said
        folder = tmp_path / "peer" / "checkpoint"
        saved, agreed = load(folder), load_agreed(folder)
        rows = said.partition("\nrows ")[2].partition("\n")[0].split()
        assert saved.inner_steps == STEPS
        assert [name for name, _ in saved.parameters] == ["adapter.weight", "adapter.bias"]
        assert set(agreed.buffers) == {"rotary", "steps"}

        status, said = start("again", 16)
        assert status == 0, said
        assert f"starts at {STEPS} buffer {STEPS}" in said
        assert "the buffer mask stays as it is: float32 (4, 4) here, none in the checkpoint" in said
        rows += said.partition("\nrows ")[2].partition("\n")[0].split()
        assert sorted(map(int, rows)) == list(range(2 * STEPS * 16))  # the rest of its data, in its order
        rate = re.search(r"rate (\S+)", said)
        assert rate is not None
        assert float(rate[1]) == pytest.approx(RATE * GAMMA ** (2 * STEPS), rel=1e-4)

        status, said = start("other", 24)
        assert status != 0
        assert "is of another model: adapter.weight is (1, 16) there and (1, 24) here; give another" in said
        status, said = start("anew", 24, "--start-over")
        assert status == 0, said
        assert "starts at 0 buffer 0" in said
        assert load(folder).inner_steps == STEPS
        names = sorted(path.name for path in folder.iterdir())
        model, set_aside = [name for name in names if not name[-3:].isdigit()]
        assert model == "model"  # its layout, for who wants it out
        assert re.fullmatch(rf"state-{2 * STEPS:012d}-\d{{3}}\.set-aside", set_aside)
