"""A live swarm in stages is gathered while it trains; its peers come back to the stages that they held."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_model

from p2p_co2.cli import main as cli
from p2p_co2.recipes import load_run_recipe
from p2p_co2.telemetry.events import PeerJoined, PeerStarted
from p2p_co2.tensors.checkpoint.folder import load_agreed
from p2p_co2.trained import Trained
from tests.test_pipeline_swarm import run_of
from tests.test_swarm import START_S, opened

pytestmark = pytest.mark.swarm


def test_a_swarm_in_stages_is_gathered_while_it_trains_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, names = run_of(2, round_s=2.0, tied="fused"), ("first", "last")
    with opened(tmp_path / "swarm") as swarm:
        swarm.start_seed(run)
        out = str(tmp_path / "whole")
        assert cli.main(["gather", swarm.ticket, "--out", out]) == 1
        assert "nobody gives stage 0 now: none of its peers is there" in capsys.readouterr().err
        assert not Path(out).exists()

        peers = [swarm.join(name, "--stage", str(stage), recipe="") for stage, name in enumerate(names)]
        swarm.wait_until("rounds", lambda: all(swarm.commits(name) >= 6 for name in names))
        with pytest.raises(SystemExit) as end:
            cli.main(["gather", swarm.ticket, "--out", out])
        assert not end.value.code
        said = capsys.readouterr().out
        assert "stage 0: round" in said
        assert "stage 1: round" in said
        assert "tied table: round" in said
        assert len(list(Path(out).iterdir())) == 1
        recipe = load_run_recipe(run)
        assert recipe.held_out is not None
        assert Trained.load(Path(out)).held_out_loss() < recipe.held_out(recipe.whole_model(run)) - 0.1
        with pytest.raises(SystemExit) as end:
            cli.main(["model", swarm.ticket, "--out", str(tmp_path / "model")])
        assert not end.value.code
        assert "the model of round" in capsys.readouterr().out
        made = recipe.whole_model(run)
        load_model(made, tmp_path / "model" / "model.safetensors")
        assert recipe.held_out(made) < recipe.held_out(recipe.whole_model(run)) - 0.1
        assert not [name for name in names if swarm.events(name, PeerJoined)], "visitors are no peers"
        seen = [swarm.commits(name) for name in names]
        swarm.wait_until(
            "more rounds", lambda: all(swarm.commits(n) > 2 + at for n, at in zip(names, seen, strict=True))
        )
        for peer in peers:
            swarm.interrupt(peer)
        assert swarm.wait(peers, START_S), swarm.tails()

        other = swarm.join("first", "--stage", "1", recipe="")
        assert swarm.wait([other], START_S), swarm.tails()
        other.asked_to_end = True
        assert other.exit_status() == 2
        assert "holds stage 0 of this run, and this peer stage 1; join with --stage 0" in other.last_lines()
        swarm.join("last", recipe="")  # stage 0 is as empty: only its folder says where it belongs
        swarm.wait_until("it is back", lambda: len(swarm.events("last", PeerStarted)) == 2)
        back = swarm.events("last", PeerStarted)[-1]
        assert (back.stage, back.resumed_from) == (1, str(swarm.folder / "last" / "checkpoint"))
        assert load_agreed(swarm.folder / "last" / "checkpoint").stage == 1
