"""demo_watch: from the peers' events to the files of a run and the reasons why it was no success."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from matplotlib.image import imread

from bootstrap.demo import DemoEnd
from p2p_co2.demo_watch import DemoWatch
from p2p_co2.telemetry.events import Event
from tests.told_run import FACTS, story


def end_of(
    folder: Path, killed: tuple[str, ...] = (), deaths: tuple[str, ...] = (), peers: int = 2
) -> DemoEnd:
    return DemoEnd(
        config=FACTS.config,
        folder=folder,
        loss_start=FACTS.loss_start,
        loss_end=FACTS.loss_end,
        text="def generated():",
        expected_peers=peers,
        killed=killed,
        deaths=deaths,
        software={"torch": "2"},
    )


def watched(folder: Path, events: list[Event], end: DemoEnd) -> list[str]:
    watch = DemoWatch(FACTS.config, folder)
    for start in range(0, len(events), 10):
        watch.see(events[start : start + 10])
    return watch.finish(end)


def test_a_good_run_leaves_its_summary_and_its_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = [*story("ada", "bob"), *story("bob", "ada")]
    assert watched(tmp_path, events, end_of(tmp_path)) == []
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["peers"] == 2
    assert (summary["loss"]["start"], summary["loss"]["end"]) == (5.5, 2.25)
    assert summary["rounds"]["committed"] == 6
    assert summary["digests_equal"] is True
    picture = imread(tmp_path / "loss.png")
    assert picture.min() < picture.max()
    printed = capsys.readouterr().out
    assert "2 peers" in printed  # the plain line that stands for the live table
    assert "def generated():" in printed
    assert f"written to {tmp_path}" in printed


def test_peers_that_disagree_are_a_reason(tmp_path: Path) -> None:
    events = [*story("ada", "bob"), *story("bob", "ada", digest="e" * 64)]
    (reason,) = watched(tmp_path, events, end_of(tmp_path))
    assert "digest" in reason
    assert json.loads((tmp_path / "summary.json").read_text())["digests_equal"] is False


def test_who_was_killed_on_purpose_need_not_have_finished(tmp_path: Path) -> None:
    events = [*story("ada", "bob"), *story("bob", "ada", finish=False)]
    assert any("bob" in reason for reason in watched(tmp_path, events, end_of(tmp_path)))
    assert watched(tmp_path, events, end_of(tmp_path, killed=("bob",))) == []


def test_a_peer_that_never_came_is_a_reason_and_deaths_come_first(tmp_path: Path) -> None:
    events = [*story("ada", "bob"), *story("bob", "ada")]
    reasons = watched(tmp_path, events, end_of(tmp_path, deaths=("peer-2 has died: no room",), peers=3))
    assert reasons[0] == "peer-2 has died: no room"
    assert len(reasons) == 2
    assert "2" in reasons[1]
    assert "3" in reasons[1]


def test_the_terminal_is_given_back_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    watch = DemoWatch(FACTS.config, tmp_path, board=False)
    watch.close()
    watch.close()
    watch.see(story("ada", "bob"))
    assert capsys.readouterr().out == ""
    assert list(tmp_path.iterdir()) == []
