"""The figures of a run by hand, and readers that survive missing, broken and hostile data."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from matplotlib.image import imread

from monitoring.picture import draw_run
from monitoring.summary import RunFacts, summarise, verdict
from monitoring.terminal import plain_line
from monitoring.words import news
from p2p_co2.config import RunConfig
from p2p_co2.errors import EnvironmentFault
from p2p_co2.telemetry.events import CaughtUp, PeerLeft, PeerStarted
from p2p_co2.telemetry.view import fold
from tests.told_run import FACTS, IDS, frame, hostile_view, printed, story, swarm

# ---- summary, by hand


def test_the_figures_of_a_run_of_two() -> None:
    summary = summarise(swarm(), FACTS)
    assert summary["peers"] == 2
    assert summary["processes"] == {"ada": 11, "bob": 12}
    assert (summary["parameters"], summary["tokens"], summary["wall_s"]) == (1000, 12_000, 22.0)
    assert summary["loss"] == {"start": 5.5, "end": 2.25, "unit": "nats per token"}
    assert (summary["rounds"]["committed"], summary["rounds"]["aborted"]) == (6, 1)
    assert summary["rounds"]["abort_reasons"] == {"the owner of part 1 was lost": 1}
    assert summary["rounds"]["duration_s"] == {"mean": 0.5, "max": 0.5}
    assert summary["staleness"] == {"mean": 0.3333, "max": 1, "histogram": {"0": 8, "1": 4}}
    assert summary["sync_delay_steps"] == {"mean": 4.0, "max": 6, "histogram": {"2": 4, "4": 4, "6": 4}}
    assert summary["utilisation"] == {"mean": 0.95, "per_peer": {"ada": 0.95, "bob": 0.95}}
    assert summary["exposed_s"] == {"max": 0.2, "per_peer": {"ada": 0.2, "bob": 0.0}}
    assert (summary["digests_equal"], summary["carriers"]) == (True, {"grpc": 2})
    assert (summary["codec"], summary["apply_rule"], summary["versions"]) == ("int4", "keep", {"torch": "2"})
    assert summary["outer_versions"] == [3, 3]


def test_bytes_against_data_parallel() -> None:
    counted = summarise(swarm(), FACTS)["bytes"]
    assert counted["up_per_peer"] == {"ada": 3000, "bob": 3000}
    assert counted["down_per_peer"] == {"ada": 2800, "bob": 2800}
    # 6 committed rounds of 2 fragments are 3 sweeps: 3000 bytes / 1000 parameters / 3 sweeps.
    assert counted["per_parameter_per_round"] == 1.0
    # 4 bytes, twice, half of it to the other; 60 inner steps in 3 sweeps.
    assert counted["fp32_data_parallel_per_parameter_per_step"] == 4.0
    assert counted["inner_steps_per_sweep"] == 20.0
    assert counted["times_less_than_data_parallel"] == 80.0
    assert counted["encoded_bits_per_parameter"] == 4.256


def test_a_good_run_has_no_reasons_to_fail() -> None:
    assert verdict(summarise(swarm(), FACTS)) == []


def test_the_summary_is_plain_json() -> None:
    summary = summarise(swarm(), FACTS)
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary


# ---- verdict, faults


def test_every_fault_is_a_reason() -> None:
    other = verdict(summarise(swarm(digest="e" * 64), FACTS))
    assert other == [f"the peers hold different digests of the agreed state: ada {'d' * 12}, bob {'e' * 12}"]
    facts = RunFacts(config=FACTS.config, loss_start=2.0, loss_end=2.5, expected_peers=3)
    assert verdict(summarise(swarm(), facts)) == [
        "only 2 of 3 peers started",
        "the held-out loss did not fall: 2.0000 at the start, 2.5000 at the end",
    ]
    nan = RunFacts(config=FACTS.config, loss_start=2.0, loss_end=math.nan)
    assert verdict(summarise(swarm(), nan)) == ["the held-out loss at start and end was not measured"]


def test_a_killed_peer_is_named_with_what_others_saw() -> None:
    view = swarm(finish=False)
    view.add(PeerLeft(at=119.0, peer=IDS["ada"], other=IDS["bob"], reason="no sign of life for 6 s"))
    summary = summarise(view, FACTS)
    assert summary["digests_equal"]
    assert verdict(summary) == ["peer bob did not finish (last phase training, no sign of life for 6 s)"]
    assert "not finished: no sign of life" in printed(summary)
    assert "gone" in frame(view, now=130.0)


def test_a_finished_peer_without_a_digest_is_not_equal() -> None:
    assert not summarise(swarm(digest=""), FACTS)["digests_equal"]
    assert not summarise(fold(story("ada", "bob", digest="")), FACTS)["digests_equal"]


def test_nothing_started() -> None:
    summary = summarise(fold([]), RunFacts(config=RunConfig(), expected_peers=4))
    assert (summary["peers"], summary["digests_equal"], summary["wall_s"]) == (0, False, 0.0)
    assert summary["bytes"]["per_parameter_per_round"] is None
    assert "no peer started" in verdict(summary)[0]
    assert "0 of 4 peers finished" in printed(summary)


# ---- hostile data


def test_markup_control_characters_and_nan_do_not_break_a_reader(tmp_path: Path) -> None:
    view = hostile_view()
    summary = summarise(view, RunFacts(config=RunConfig(), loss_start=math.nan))
    json.dumps(summary, allow_nan=False)
    for text in (
        frame(view),
        printed(summary),
        plain_line(view, 1.0, None, None),
        "\n".join(w for _, w in news(view, 99)),
    ):
        assert "\x1b" not in text
        assert "\x07" not in text
    assert "[red]$x_?[31m?" in frame(view)
    draw_run(view, tmp_path / "hostile.png", title="$", loss_start=math.nan)


@pytest.mark.parametrize(("rounds", "words"), [(0, ""), (1, "1 round"), (3, "3 rounds")])
def test_rounds_that_a_peer_gave_up_are_told(rounds: int, words: str) -> None:
    span = {"fragment": 0, "from_version": 7, "to_version": 4, "bytes": 8, "duration_s": 0.1}
    event = CaughtUp(at=9.0, peer=IDS["ada"], how="state", donor=IDS["bob"], rounds_given_up=rounds, **span)
    told = [said for _, said in news(fold([*story("ada", "bob"), event]), 99)]
    (line,) = (said for said in told if "ada caught up" in said)
    assert line.endswith(f"; given up: {words} that it made alone" if rounds else "by state from ~BBBBBB")


# ---- picture


def test_the_picture_has_its_size_and_is_not_blank(tmp_path: Path) -> None:
    path = tmp_path / "loss.png"
    draw_run(swarm(finish=False), path, title="demo", loss_start=5.5, loss_end=2.25)
    pixels = imread(path)
    assert pixels.shape[:2] == (560, 1400)
    assert 0.02 < (pixels[..., :3].min(axis=2) < 0.9).mean() < 0.5


@pytest.mark.parametrize("name", ["_hidden", "$", "名前", ""])
def test_any_name_can_be_drawn(tmp_path: Path, name: str) -> None:
    first = story("ada", "bob")
    renamed = PeerStarted(
        at=100.0,
        peer=IDS["ada"],
        name=name,
        pid=1,
        software="",
        device="cpu",
        parameters=1,
        fragments=1,
        run="",
    )
    draw_run(fold([renamed, *first[1:]]), tmp_path / "loss.png")
    assert (tmp_path / "loss.png").stat().st_size > 10_000


def test_an_empty_run_can_be_drawn_and_a_bad_path_is_said(tmp_path: Path) -> None:
    draw_run(fold([]), tmp_path / "empty.png", loss_start=5.0)
    with pytest.raises(EnvironmentFault, match="cannot write the picture"):
        draw_run(fold([]), tmp_path / "absent" / "loss.png")


# ---- laws


def test_the_summary_does_not_depend_on_interleaving() -> None:
    ada, bob = story("ada", "bob"), story("bob", "ada")
    mixed = [event for pair in zip(bob, ada, strict=True) for event in pair]
    assert summarise(fold(mixed), FACTS) == summarise(fold([*ada, *bob]), FACTS)
