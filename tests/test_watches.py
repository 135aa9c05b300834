"""What a demo, a rehearsal and a volunteer's peer show: from events to a terminal, to files and to why a
run was no success."""

from __future__ import annotations

import errno
import io
import json
import os
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread
from rich.console import Console

from bootstrap.demo import RunningDemo
from bootstrap.options import DemoOptions
from bootstrap.stage import RunEnd, Stage
from p2p_co2.cli.command import Loudness
from p2p_co2.cli.demo import RunWatch
from p2p_co2.cli.join import JoinWatch
from p2p_co2.config import ClockConfig, RunConfig
from p2p_co2.errors import RUN_OVER
from p2p_co2.telemetry.events import Event, PeerFinished, Progress, RoundCounted, Warned
from p2p_co2.telemetry.journal import Journal
from tests.event_samples import sample, started
from tests.told_run import FACTS, IDS, story

ADA = IDS["ada"]
BOTH = [*story("ada", "bob"), *story("bob", "ada")]
TRAINS = story("ada", "bob", finish=False)

# ---- a whole swarm


def end_of(killed: tuple[str, ...] = (), deaths: tuple[str, ...] = (), peers: int = 2) -> RunEnd:
    return RunEnd(
        loss_start=FACTS.loss_start, loss_end=FACTS.loss_end, loss_whole=FACTS.loss_whole,
        text="def generated():", expected_peers=peers, killed=killed, deaths=deaths, software={"torch": "2"},
    )  # fmt: skip


def watched(folder: Path, events: list[Event], end: RunEnd) -> list[str]:
    watch = RunWatch(FACTS.config, folder, board=True)
    for start in range(0, len(events), 10):
        watch.see(events[start : start + 10])
    return watch.finish(end)


def test_a_good_run_leaves_its_summary_and_its_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert watched(tmp_path, BOTH, end_of()) == []
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [summary["loss"][key] for key in ("start", "end", "whole")] == [5.5, 2.25, 2.5]
    assert (summary["peers"], summary["rounds"]["committed"], summary["digests_equal"]) == (2, 6, True)
    picture = imread(tmp_path / "loss.png")
    assert picture.shape[:2] == (560, 1400)
    assert picture.min() < picture.max()
    printed = capsys.readouterr().out
    figures, steps = printed[printed.index("ran for: ") :].split("next:\n")
    assert "held-out loss: 5.5000 to 2.2500 nats per token (2.5000 on all of the held-out data)\n" in figures
    assert figures.endswith("same parameters: yes, 2 of 2 peers finished\n")
    assert figures.count("\n") == 5
    assert [line.split("  ")[1] for line in steps.splitlines()] == [
        str(tmp_path / "report.html"), f"p2p-co2 sample {tmp_path}", f"p2p-co2 board {tmp_path}",
    ]  # fmt: skip
    assert "def generated():" in (tmp_path / "report.html").read_text()


def test_a_quiet_run_shows_its_summary_alone_and_a_verbose_one_each_event_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for loudness in (Loudness.QUIET, Loudness.VERBOSE):
        watch = RunWatch(FACTS.config, tmp_path, loudness=loudness)
        watch.see(BOTH)
        assert watch.finish(end_of()) == []
        shown = capsys.readouterr().out
        assert "held-out loss: 5.5000 to 2.2500" in shown
        commits = re.findall(r"^..:..:.. exchange 2 of fragment 1 committed", shown, re.MULTILINE)
        assert len(commits) == (loudness is Loudness.VERBOSE)
        assert (" of 2 peers, round" in shown) == (loudness is Loudness.VERBOSE)


def test_why_a_run_was_no_success_with_deaths_first_and_without_who_was_killed(tmp_path: Path) -> None:
    (reason,) = watched(tmp_path, [*story("ada", "bob"), *story("bob", "ada", digest="e" * 64)], end_of())
    assert "digest" in reason
    assert json.loads((tmp_path / "summary.json").read_text())["digests_equal"] is False
    unfinished = [*story("ada", "bob"), *story("bob", "ada", finish=False)]
    assert any("bob" in reason for reason in watched(tmp_path, unfinished, end_of()))
    assert watched(tmp_path, unfinished, end_of(killed=("bob",))) == []
    death, missing = watched(tmp_path, BOTH, end_of(deaths=("peer-2 has died: no room",), peers=3))
    assert death == "peer-2 has died: no room"
    assert "2 of 3" in missing


@pytest.mark.parametrize("caught_up", [False, True])
def test_who_comes_when_all_others_have_left_trains_no_run_of_its_own(
    tmp_path: Path, caught_up: bool
) -> None:
    (tmp_path / "logs").mkdir()
    with Stage(FACTS.config, tmp_path, "auto", RunWatch(FACTS.config, tmp_path)) as stage:
        demo = RunningDemo(DemoOptions(peers=2, kill_one=True), stage)
        for name, seconds in (("peer-1", "0.5"), ("peer-3", "1.5" if caught_up else "60")):
            stage.adopt(stage.swarm.start(name, ["sleep", seconds]), tmp_path / name)
        demo.killed, demo.latecomer = ["peer-2"], "peer-3"
        with Journal(tmp_path / "peer-1" / "events.jsonl") as journal:
            journal.write(sample("progress", ADA, 1.0))
        with Journal(tmp_path / "peer-3" / "events.jsonl") as journal:
            journal.write(sample("progress", IDS["bob"], 1.0))
            if caught_up:
                journal.write(sample("caught_up", IDS["bob"], 2.0, donor=ADA))
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
    (tmp_path / "logs").mkdir()
    with Stage(FACTS.config, tmp_path, "auto", RunWatch(FACTS.config, tmp_path)) as stage:
        demo = RunningDemo(DemoOptions(peers=2, kill_one=True), stage)
        demo.killed, demo.latecomer = ["peer-2"], "peer-3"
        for name, does in (("peer-1", ["sleep", "60"]), ("peer-3", ["sh", "-c", f"exit {RUN_OVER}"])):
            stage.adopt(stage.swarm.start(name, does), tmp_path / name)
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


def log() -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, width=150), text


def shown(text: io.StringIO) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text.getvalue())


def joined(console: Console, events: Iterable[Event], run: RunConfig | None = None, **more: Any) -> JoinWatch:
    """What shows a peer that has told ``events``."""
    watch = JoinWatch(console, **more)
    if run is not None:
        watch.know(run)
    for event in events:
        watch.see([event])
    return watch


def counted(**weights: float) -> RoundCounted:
    """As ada's certificate says."""
    told = {IDS[name]: weight for name, weight in weights.items()}
    return RoundCounted(at=121.0, peer=ADA, fragment=0, round=1, weights=told)


def finished(reason: str) -> PeerFinished:
    made: PeerFinished = sample("peer_finished", ADA, 122.0, reason=reason, digest="ab" * 32)
    return made


def warned() -> Warned:
    made: Warned = sample("warned", ADA, 122.0, text="the disk is nearly full")
    return made


def test_the_own_row_comes_first_and_then_whose_work_was_counted() -> None:
    console, text = terminal()
    run = RunConfig(name="demo", fragments=2, clock=ClockConfig(round_s=60.0, rounds=6))
    watch = joined(console, [*TRAINS, counted(ada=300.0, bob=900.0)], run)
    watch.say("board: http://127.0.0.1:1/\x1b[2J")
    watch.close()
    last = shown(text)[shown(text).rindex("demo  this machine's peer") :].splitlines()
    assert "round 2.9 of 6 (3:09 left)" in last[1]
    assert last[3].count("█") == round(60 * 20 / 7 / 6)
    rows = [line.split() for line in last if line.startswith(("ada", "full-aspen"))]
    assert rows[0][:5] == ["ada", "(you)", "training", "25.0", "%"]
    assert rows[1] == ["full-aspen", "reached", "75.0", "%", "1", "grpc"]
    assert "board: http://127.0.0.1:1/?[2J" in shown(text)


def test_a_ctrl_c_is_answered_and_the_last_words_say_what_was_given_and_how_to_come_back() -> None:
    for console, text in (terminal(), log()):
        events = [*TRAINS, counted(ada=300.0, bob=900.0)]
        watch = joined(console, events, come_back="p2p-co2 join @ticket --upload 2M")
        assert "leaving" not in shown(text)
        watch.leave()
        assert "leaving after this inner step" in shown(text)
        assert "Ctrl-C again ends at once" in " ".join(shown(text).split())
        watch.see([finished("stopped")])
        watch.close()
        watch.close()
        assert shown(text).splitlines()[-4:] == [
            "left: stopped; agreed state abababababababab",
            "contributed: 6,000 tokens in 0:22, work in 1 round, 25.0 % of what was counted meanwhile",
            "to show it: p2p-co2 credit .",
            "to come back: p2p-co2 join @ticket --upload 2M",
        ]
        watch.say("after the end")
        assert shown(text).rstrip().endswith("after the end")
        if console.is_terminal:  # the cursor is back
            assert text.getvalue().rindex("\x1b[?25h") > text.getvalue().rindex("\x1b[?25l")


def test_what_was_given_before_does_not_count_as_given_now() -> None:
    console, text = log()
    events = [
        replace(event, tokens=100_000 + event.tokens) if isinstance(event, Progress) else event
        for event in (*TRAINS, finished("stopped"))
    ]
    joined(console, events).close()
    assert "contributed: 6,000 tokens in 0:22" in shown(text)


def test_of_a_run_that_is_over_the_last_words_say_where_the_model_is() -> None:
    console, text = log()
    measured = [
        sample("agreed_measured", ADA, 120.0 + number, loss=loss, position=float(number))
        for number, loss in ((1, 3.0), (2, 1.399), (3, 1.5))
    ]
    met = sample("peer_joined", ADA, 100.0, other=IDS["bob"], name="bob")
    told = [*TRAINS, met, counted(ada=300.0, bob=900.0), *measured, finished("the run is over")]
    run = FACTS.config.model_copy(update={"clock": ClockConfig(round_s=7.0, rounds=3)})
    joined(console, told, run, come_back="p2p-co2 join @ticket", folder=Path("runs/me")).close()
    last = shown(text)[shown(text).index("ran for: ") :]
    assert last.splitlines() == [
        "ran for: 0:20, 3 of 3 rounds",
        "in the model: 600 tokens, certificates seen here: 1",
        "best loss heard: 1.399 nats per token, held-out, at round 2",
        "who gave: 2 peers, bob 75.0 %, ada 25.0 %",
        "the model: p2p-co2 model runs/me --out DIR",
    ]


@pytest.mark.parametrize("make", [terminal, log])
@pytest.mark.parametrize("loudness", [Loudness.QUIET, Loudness.VERBOSE])
def test_quiet_says_warnings_and_last_words_and_verbose_says_each_round(
    make: Any, loudness: Loudness
) -> None:
    console, text = make()
    watch = joined(console, [], loudness=loudness)
    watch.say("looking for the swarm ...")
    for event in (*TRAINS, warned(), finished("stopped")):
        watch.see([event])
    watch.close()
    is_loud = loudness is Loudness.VERBOSE
    assert ("looking for" in shown(text)) == is_loud
    assert bool(re.search(r"..:..:.. .*fragment 0.* committed", shown(text))) == is_loud
    assert ("the disk is nearly full" in shown(text)) or is_loud
    assert "left: stopped" in shown(text)
    assert len(shown(text).splitlines()) == 3 or is_loud


def test_a_peer_that_was_refused_leaves_no_table() -> None:
    console, text = terminal()
    watch = joined(console, [])
    watch.say("looking for the swarm ...")
    watch.see([warned()])
    watch.close()
    watch.see([started(ADA)])
    watch.close()
    assert text.getvalue() == "looking for the swarm ...\n"


def test_a_log_gets_a_line_for_what_matters_and_one_that_is_full_ends_no_peer() -> None:
    console, text = log()
    joined(console, [*TRAINS, warned()]).close()
    assert "this peer started on cpu" in text.getvalue()
    assert "warning: the disk is nearly full" in text.getvalue()
    told = r"^\[.*\] Healthy: 2 of 2 peers, round .* links 1 grpc"
    assert re.search(told, text.getvalue(), re.MULTILINE)

    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    watch = joined(Console(file=Full()), [])
    watch.say("looking for the swarm ...")
    watch.see([started(ADA)])
    watch.close()
