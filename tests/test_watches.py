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
from monitoring.facts import Known, swarm_facts
from monitoring.own_peer import OwnPeer
from p2p_co2.cli.command import Loudness
from p2p_co2.cli.demo import RunWatch
from p2p_co2.cli.join import JoinWatch
from p2p_co2.config import ClockConfig, RunConfig
from p2p_co2.errors import RUN_OVER
from p2p_co2.telemetry.events import (
    CaughtUp,
    Event,
    PeerFinished,
    Progress,
    RoundCounted,
    StateLoading,
    Warned,
)
from p2p_co2.telemetry.journal import Journal
from p2p_co2.telemetry.view import SwarmView
from tests.told_run import FACTS, IDS, story

# ---- a whole swarm


def end_of(killed: tuple[str, ...] = (), deaths: tuple[str, ...] = (), peers: int = 2) -> RunEnd:
    return RunEnd(
        loss_start=FACTS.loss_start,
        loss_end=FACTS.loss_end,
        loss_whole=FACTS.loss_whole,
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
    assert [summary["loss"][key] for key in ("start", "end", "whole")] == [5.5, 2.25, 2.5]
    assert summary["rounds"]["committed"] == 6
    assert summary["digests_equal"] is True
    picture = imread(tmp_path / "loss.png")
    assert picture.shape[:2] == (560, 1400)
    assert picture.min() < picture.max()
    printed = capsys.readouterr().out
    assert "2 peers" in printed  # the plain line that stands for the live table
    assert "def generated():" in printed
    assert f"written to {tmp_path}" in printed


def test_a_quiet_run_shows_its_summary_alone_and_a_verbose_one_each_event_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = [*story("ada", "bob"), *story("bob", "ada")]
    for loudness in (Loudness.QUIET, Loudness.VERBOSE):
        watch = RunWatch(FACTS.config, tmp_path, loudness=loudness)
        watch.see(events)
        assert watch.finish(end_of()) == []
        shown = capsys.readouterr().out
        assert "held-out loss, agreed parameters" in shown
        commits = re.findall(r"^..:..:.. exchange 2 of fragment 1 committed", shown, re.MULTILINE)
        assert len(commits) == (loudness is Loudness.VERBOSE)
        assert (" of 2 peers, round" in shown) == (loudness is Loudness.VERBOSE)


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


def counted(**weights: float) -> RoundCounted:
    """As ada's certificate says."""
    told = {IDS[name]: weight for name, weight in weights.items()}
    return RoundCounted(at=121.0, peer=IDS["ada"], fragment=0, round=1, weights=told)


def test_the_own_row_comes_first_and_then_whose_work_was_counted() -> None:
    console, text = terminal()
    watch = JoinWatch(console)
    watch.know(RunConfig(name="demo", fragments=2, clock=ClockConfig(round_s=60.0, rounds=6)))
    for event in (*story("ada", "bob", finish=False), counted(ada=300.0, bob=900.0)):
        watch.see(event)
    watch.say("board: http://127.0.0.1:1/\x1b[2J")
    watch.close()
    last = shown(text)[shown(text).rindex("demo   round") :].splitlines()
    assert last[0].startswith("demo   round 2.9 of 6   3:09 left   loss ")
    assert last[1].count("█") == round(60 * 20 / 7 / 6)
    rows = [line.split() for line in last if line.startswith(("ada", "~BBBBBB"))]
    assert rows[0][:5] == ["ada", "(you)", "training", "25.0", "%"]
    assert rows[1] == ["~BBBBBB", "reached", "75.0", "%", "grpc"]
    assert "board: http://127.0.0.1:1/?[2J" in shown(text)


def test_where_rounds_count_steps_the_time_left_goes_by_the_own_pace() -> None:
    console, text = terminal()
    watch = JoinWatch(console)
    watch.know(
        RunConfig(
            name="demo", fragments=2, clock=ClockConfig(mode="steps", inner_steps_per_round=21, rounds=6)
        )
    )
    for event in story("ada", "bob", finish=False):  # 60 inner steps in 20 s
        watch.see(event)
    watch.close()
    assert "demo   round 2.9 of 6   0:22 left" in shown(text)


def loading(received_bytes: int, *fragments: int) -> StateLoading:
    return StateLoading(
        at=101.0, peer=IDS["ada"], fragments=fragments, received_bytes=received_bytes,
        total_bytes=80_000_000, donors=3,
    )  # fmt: skip


def caught_up(fragment: int) -> CaughtUp:
    return CaughtUp(
        at=102.0, peer=IDS["ada"], fragment=fragment, from_version=0, to_version=1, how="state",
        donor=IDS["bob"], bytes=1, duration_s=1.0,
    )  # fmt: skip


def test_a_bar_shows_how_far_the_state_is_until_it_is_there() -> None:
    own, view = OwnPeer(), SwarmView()
    for event in (started(IDS["ada"], 100.0), loading(20_000_000, 0, 1), caught_up(0)):
        view.add(event)
        own.see(event)
    known = Known(view, 103.0, me=IDS["ada"])

    def picture() -> str:
        console, text = terminal()
        console.print(own.frame(known, swarm_facts(known), 120, 40, ()))
        return shown(text)

    assert "loading the agreed state: 20.0 MB of 80.0 MB from 3 peers (25%)" in picture()
    assert "█" * 15 + "░" * 45 in picture()
    assert "20.0 MB of 80.0 MB" in own.line(known, swarm_facts(known))
    own.see(caught_up(1))
    assert "loading" not in picture()


def test_a_log_tells_how_far_the_state_is() -> None:
    console, text = log()
    watch = JoinWatch(console)
    watch.see(started(IDS["ada"], 100.0))
    watch.see(replace(loading(20_000_000, 0), at=111.0))
    assert text.getvalue().rstrip().endswith("20.0 MB of 80.0 MB from 3 peers")


def test_a_ctrl_c_is_answered_and_the_last_words_say_what_was_given_and_how_to_come_back() -> None:
    for console, text in (terminal(), log()):
        watch = JoinWatch(console, come_back="p2p-co2 join @ticket --upload 2M")
        for event in (*story("ada", "bob", finish=False), counted(ada=300.0, bob=900.0)):
            watch.see(event)
        assert "leaving" not in shown(text)
        watch.leave()
        assert "leaving after this inner step" in shown(text)
        assert "Ctrl-C again ends at once" in " ".join(shown(text).split())
        watch.see(finished("stopped"))
        watch.close()
        assert shown(text).splitlines()[-3:] == [
            "left: stopped; agreed state abababababababab",
            "contributed: 6,000 tokens in 0:22, work in 1 round, 25.0 % of what was counted meanwhile",
            "to come back: p2p-co2 join @ticket --upload 2M",
        ]


def test_what_was_given_before_does_not_count_as_given_now() -> None:
    console, text = log()
    watch = JoinWatch(console)
    for event in (*story("ada", "bob", finish=False), finished("stopped")):
        is_progress = isinstance(event, Progress)
        watch.see(replace(event, tokens=100_000 + event.tokens) if is_progress else event)
    watch.close()
    assert "contributed: 6,000 tokens in 0:22" in shown(text)


def test_of_a_run_that_is_over_the_last_words_say_where_the_model_is() -> None:
    console, text = log()
    watch = JoinWatch(console, come_back="p2p-co2 join @ticket", folder=Path("runs/me"))
    watch.see(started(IDS["ada"]))
    watch.see(finished("the run is over"))
    watch.close()
    assert "the model: p2p-co2 model runs/me/checkpoint --out DIR" in shown(text)
    assert "to come back" not in shown(text)


def test_quiet_says_warnings_and_last_words_and_verbose_says_each_round() -> None:
    warned = Warned(at=122.0, peer=IDS["ada"], text="the disk is nearly full")
    for make in (terminal, log):
        for loudness, is_loud in ((Loudness.QUIET, False), (Loudness.VERBOSE, True)):
            console, text = make()
            watch = JoinWatch(console, loudness)
            watch.say("looking for the swarm ...")
            for event in (*story("ada", "bob", finish=False), warned, finished("stopped")):
                watch.see(event)
            watch.close()
            assert ("looking for" in shown(text)) == is_loud
            assert bool(re.search(r"..:..:.. .*fragment 0.* committed", shown(text))) == is_loud
            assert ("the disk is nearly full" in shown(text)) or is_loud
            assert "left: stopped" in shown(text)
            if not is_loud:
                assert len(shown(text).splitlines()) == 3


def finished(reason: str) -> PeerFinished:
    return PeerFinished(
        at=122.0, peer=IDS["ada"], reason=reason, digest="ab" * 32, versions=(1,), carriers={},
        peak_memory_bytes=1,
    )  # fmt: skip


def log() -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, width=150), text


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
    assert "left: stopped; agreed state abababababababab\n" in shown(text)
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
