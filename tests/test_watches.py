"""What a demo, a rehearsal and a volunteer's peer show: from events to a terminal, to files and to why a
run was no success."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from event_samples import started
from matplotlib.image import imread
from rich.console import Console

from bootstrap.demo import RunningDemo
from bootstrap.options import DemoOptions
from bootstrap.stage import RunEnd, Stage
from p2p_co2.cli.demo import RunWatch
from p2p_co2.cli.join import JoinWatch
from p2p_co2.errors import RUN_OVER
from p2p_co2.telemetry.events import CaughtUp, Event, PeerFinished, Progress, Warned
from p2p_co2.telemetry.journal import Journal
from tests.told_run import FACTS, IDS, story

# ---- a whole swarm


def end_of(killed: tuple[str, ...] = (), deaths: tuple[str, ...] = (), peers: int = 2) -> RunEnd:
    return RunEnd(
        loss_start=FACTS.loss_start,
        loss_end=FACTS.loss_end,
        text="def generated():",
        expected_peers=peers,
        killed=killed,
        deaths=deaths,
        software={"torch": "2"},
    )


def watched(folder: Path, events: list[Event], end: RunEnd) -> list[str]:
    watch = RunWatch(FACTS.config, folder, board=True)
    for start in range(0, len(events), 10):
        watch.see(events[start : start + 10])
    return watch.finish(end)


def test_a_good_run_leaves_its_summary_and_its_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = [*story("ada", "bob"), *story("bob", "ada")]
    assert watched(tmp_path, events, end_of()) == []
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["peers"] == 2
    assert (summary["loss"]["start"], summary["loss"]["end"]) == (5.5, 2.25)
    assert summary["rounds"]["committed"] == 6
    assert summary["digests_equal"] is True
    picture = imread(tmp_path / "loss.png")
    assert picture.shape[:2] == (560, 1400)
    assert picture.min() < picture.max()
    printed = capsys.readouterr().out
    assert "2 peers" in printed  # the plain line that stands for the live table
    assert "def generated():" in printed
    assert f"written to {tmp_path}" in printed


def test_peers_that_disagree_are_a_reason(tmp_path: Path) -> None:
    events = [*story("ada", "bob"), *story("bob", "ada", digest="e" * 64)]
    (reason,) = watched(tmp_path, events, end_of())
    assert "digest" in reason
    assert json.loads((tmp_path / "summary.json").read_text())["digests_equal"] is False


def test_who_was_killed_on_purpose_need_not_have_finished(tmp_path: Path) -> None:
    events = [*story("ada", "bob"), *story("bob", "ada", finish=False)]
    assert any("bob" in reason for reason in watched(tmp_path, events, end_of()))
    assert watched(tmp_path, events, end_of(killed=("bob",))) == []


def test_a_peer_that_never_came_is_a_reason_and_deaths_come_first(tmp_path: Path) -> None:
    events = [*story("ada", "bob"), *story("bob", "ada")]
    reasons = watched(tmp_path, events, end_of(deaths=("peer-2 has died: no room",), peers=3))
    assert reasons[0] == "peer-2 has died: no room"
    assert len(reasons) == 2
    assert "2" in reasons[1]
    assert "3" in reasons[1]


@pytest.mark.parametrize("caught_up", [False, True])
def test_who_comes_when_all_others_have_left_trains_no_run_of_its_own(
    tmp_path: Path, caught_up: bool
) -> None:
    python = [sys.executable, "-c"]
    (tmp_path / "logs").mkdir()
    with Stage(FACTS.config, tmp_path, "auto", RunWatch(FACTS.config, tmp_path)) as stage:
        demo = RunningDemo(DemoOptions(peers=2, kill_one=True), stage)
        for name, seconds in (("peer-1", 2.0), ("peer-3", 5.0)):
            sleeping = stage.swarm.start(name, [*python, f"import time; time.sleep({seconds})"])
            stage.adopt(sleeping, tmp_path / name)
        demo.killed, demo.latecomer = ["peer-2"], "peer-3"
        began = Progress(
            at=1.0, peer=IDS["ada"], phase="training", position=0.0, inner_steps=1, tokens=1,
            tokens_per_s=1.0, loss=1.0, train_s=1.0, exposed_s=0.0, wall_s=1.0, up_bytes=0, down_bytes=0,
            versions=(0,),
        )  # fmt: skip
        with Journal(tmp_path / "peer-1" / "events.jsonl") as journal:
            journal.write(began)
        with Journal(tmp_path / "peer-3" / "events.jsonl") as journal:
            journal.write(replace(began, peer=IDS["bob"]))
            if caught_up:
                journal.write(
                    CaughtUp(
                        at=2.0, peer=IDS["bob"], fragment=0, from_version=0, to_version=1, how="state",
                        donor=IDS["ada"], bytes=1, duration_s=0.1,
                    )
                )  # fmt: skip
        stage.look_on(demo.act)
        status = stage.peers["peer-3"].exit_status()
    assert status == (0 if caught_up else -9)
    assert demo.killed == (["peer-2"] if caught_up else ["peer-2", "peer-3"])
    assert [note.partition(":")[0] for note in demo.notes] == (
        [] if caught_up else ["peer-3 came too late and was ended"]
    )


def test_a_newcomer_that_finds_the_run_over_is_no_death_though_others_are_still_leaving(
    tmp_path: Path,
) -> None:
    python = [sys.executable, "-c"]
    (tmp_path / "logs").mkdir()
    with Stage(FACTS.config, tmp_path, "auto", RunWatch(FACTS.config, tmp_path)) as stage:
        demo = RunningDemo(DemoOptions(peers=2, kill_one=True), stage)
        demo.killed, demo.latecomer = ["peer-2"], "peer-3"
        for name, code in (("peer-1", "import time; time.sleep(9)"), ("peer-3", f"exit({RUN_OVER})")):
            stage.adopt(stage.swarm.start(name, [*python, code]), tmp_path / name)
        assert stage.swarm.wait([stage.peers["peer-3"]], 9.0)
        demo.act()
        assert stage.swarm.dead_unasked() == []
    assert demo.killed == ["peer-2", "peer-3"]


def test_the_terminal_is_given_back_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    watch = RunWatch(FACTS.config, tmp_path)
    watch.close()
    watch.close()
    watch.see(story("ada", "bob"))
    assert capsys.readouterr().out == ""
    assert list(tmp_path.iterdir()) == []


# ---- one's own peer


def terminal() -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, force_terminal=True, width=120, height=40, color_system=None), text


def shown(text: io.StringIO) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text.getvalue())


def test_one_row_for_ones_own_peer_and_a_line_for_the_others() -> None:
    console, text = terminal()
    watch = JoinWatch(console)
    for event in story("ada", "bob", finish=False):
        watch.see(event)
    watch.say("board: http://127.0.0.1:1/\x1b[2J")
    watch.close()
    last = shown(text)[shown(text).rindex("train") :]
    assert "ada" in last
    assert not re.search("~BBBBBB  ", last)
    assert "peers reached: 1 (1 grpc)   round" in shown(text)
    assert "board: http://127.0.0.1:1/?[2J" in shown(text)


def test_a_peer_that_was_refused_leaves_no_table() -> None:
    console, text = terminal()
    watch = JoinWatch(console)
    watch.say("looking for the swarm ...")
    watch.see(Warned(at=1.0, peer=IDS["ada"], text="the disk is nearly full"))
    watch.close()
    watch.see(started(IDS["ada"]))
    watch.close()
    assert text.getvalue() == "looking for the swarm ...\n"


def test_the_terminal_is_given_back_with_the_last_words() -> None:
    console, text = terminal()
    watch = JoinWatch(console)
    watch.say("looking for the swarm ...")
    watch.see(started(IDS["ada"]))
    watch.see(
        PeerFinished(
            at=1.0, peer=IDS["ada"], reason="stopped", digest="ab" * 32, versions=(1,), carriers={},
            peak_memory_bytes=1,
        )
    )  # fmt: skip
    watch.close()
    watch.close()
    assert shown(text).rstrip().endswith("left: stopped; agreed state abababababababab")
    assert shown(text).count("left: stopped") >= 1
    assert text.getvalue().rindex("\x1b[?25h") > text.getvalue().rindex("\x1b[?25l")  # the cursor is back
    watch.say("after the end")
    assert shown(text).rstrip().endswith("after the end")


def test_a_log_gets_a_line_for_what_matters_and_one_that_is_full_ends_no_peer() -> None:
    text = io.StringIO()
    watch = JoinWatch(Console(file=text, width=80))
    for event in story("ada", "bob", finish=False):
        watch.see(event)
    watch.see(Warned(at=1.0, peer=IDS["ada"], text="the disk is nearly full"))
    watch.close()
    assert "this peer started on cpu" in text.getvalue()
    assert "warning: the disk is nearly full" in text.getvalue()
    assert re.search(
        r"^\[.*\] peers reached: 1 \(1 grpc\), round .* up [^,\n]*$", text.getvalue(), re.MULTILINE
    )

    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    watch = JoinWatch(Console(file=Full()))
    watch.say("looking for the swarm ...")
    watch.see(started(IDS["ada"]))
    watch.close()
