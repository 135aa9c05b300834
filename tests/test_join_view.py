"""join as a volunteer sees it: a real peer in a terminal, left with Ctrl-C."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from bootstrap.local_swarm import environment
from tests.campaign import RECIPE, START_S, Campaign, console, paced_run

pytestmark = pytest.mark.swarm


class InTerminal:
    """A process whose terminal is a pseudo one. ``text``: what it shows, without colours and movements."""

    def __init__(self, command: list[str]) -> None:
        self._end, inside = pty.openpty()
        os.set_blocking(self._end, False)
        self.process = subprocess.Popen(
            command, stdin=inside, stdout=inside, stderr=inside, close_fds=True,
            env={**os.environ, **environment(), "COLUMNS": "100", "LINES": "30", "TERM": "xterm"},
        )  # fmt: skip
        os.close(inside)
        self.text = ""

    def wait_for(self, words: str, timeout_s: float = START_S) -> None:
        ends_at = time.monotonic() + timeout_s
        while not re.search(words, self.text):
            assert time.monotonic() < ends_at, f"no {words!r} in\n{self.text[-3000:]}"
            self.read()
            time.sleep(0.05)

    def read(self) -> None:
        try:
            shown = os.read(self._end, 1 << 16).decode(errors="replace")
        except OSError:  # nothing new, or the process has ended
            return
        self.text += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._end)


def test_a_volunteer_sees_the_own_row_an_answer_to_ctrl_c_and_how_to_come_back(tmp_path: Path) -> None:
    with Campaign(tmp_path) as swarm:
        swarm.start_seed(paced_run(1.0, step_s=0.05, rounds=500))
        other = swarm.join("other")
        folder = str(tmp_path / "ada")
        options = ["--folder", folder, "--name", "ada", "--threads", "1", "--recipe", RECIPE, "--start-over"]
        peer = InTerminal(console("join", swarm.ticket, *options))
        try:
            peer.wait_for(r"faults   round \d+\.\d of 500   \d+:\d\d left")
            peer.wait_for(r"ada \(you\)\s+training\s+\d+\.\d %[^\n]*\n[^\n]*reached")
            assert "leaving" not in peer.text
            other.process.send_signal(signal.SIGSTOP)  # what is in flight stays so: leaving takes its time
            peer.process.send_signal(signal.SIGINT)
            peer.wait_for("leaving after this inner step", 5.0)
            assert "left: stopped" not in peer.text
            peer.wait_for("to come back: ", 60.0)
            assert peer.process.wait(60) == 0
        finally:
            other.process.send_signal(signal.SIGCONT)
            peer.close()
    last = peer.text[peer.text.rindex("left: stopped") :]
    assert re.search(r"contributed: [\d,]+ tokens in \d:\d\d, work in \d+ rounds?, [\d.]+ % of what", last)
    again = re.search(r"to come back: (.*)", last)
    assert again is not None
    words = " ".join(again[1].split())
    assert words.startswith("p2p-co2 join ")
    assert folder in last.replace("\r\n", "")
    assert "--start-over" not in last
