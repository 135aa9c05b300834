"""join_watch: what a volunteer sees in a terminal, and that the terminal is given back."""

from __future__ import annotations

import errno
import io
import os
import re

from event_samples import started
from rich.console import Console
from told_run import IDS, story

from p2p_co2.cli.join import JoinWatch
from p2p_co2.telemetry.events import PeerFinished, Warned


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
    assert "~BBBBBB " not in last[: last.index("peers reached")]
    assert "peers reached: 1" in last
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
    watch = JoinWatch(Console(file=text, width=150))
    for event in story("ada", "bob", finish=False):
        watch.see(event)
    watch.see(Warned(at=1.0, peer=IDS["ada"], text="the disk is nearly full"))
    watch.close()
    assert "this peer started on cpu" in text.getvalue()
    assert "warning: the disk is nearly full" in text.getvalue()
    assert "1 of 1 peers, round" in text.getvalue()

    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    watch = JoinWatch(Console(file=Full()))
    watch.say("looking for the swarm ...")
    watch.see(started(IDS["ada"]))
    watch.close()
