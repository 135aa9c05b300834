"""join as a volunteer sees it: a real peer in a terminal, left with Ctrl-C."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from bootstrap.local_swarm import environment
from tests.campaign import RECIPE, START_S, Campaign, console, paced_run

pytestmark = pytest.mark.swarm


class InTerminal:
    """A process whose terminal is a pseudo one. ``text``: what it shows, without colours and movements."""

    def __init__(self, command: list[str], **variables: str) -> None:
        self._end, inside = pty.openpty()
        self.process = subprocess.Popen(
            command, stdin=inside, stdout=inside, stderr=inside, close_fds=True,
            env={**os.environ, **environment(), "COLUMNS": "100", "LINES": "30", "TERM": "xterm"} | variables,
        )  # fmt: skip
        os.close(inside)
        self.text = ""
        self._reading = threading.Thread(target=self._read)  # a terminal that nobody reads stops its process
        self._reading.start()

    def wait_for(self, words: str, timeout_s: float = START_S) -> None:
        ends_at = time.monotonic() + timeout_s
        while not re.search(words, self.text):
            assert time.monotonic() < ends_at, f"no {words!r} in\n{self.text[-3000:]}"
            time.sleep(0.05)

    def _read(self) -> None:
        while True:
            try:
                shown = os.read(self._end, 1 << 16).decode(errors="replace")
            except OSError:  # the process has ended
                return
            self.text += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reading.join(10.0)
        os.close(self._end)


def test_a_volunteer_sees_the_own_row_an_answer_to_ctrl_c_and_how_to_come_back(tmp_path: Path) -> None:
    with Campaign(tmp_path) as swarm:
        swarm.start_seed(paced_run(1.0, step_s=0.05, rounds=500))
        other = swarm.join("other")
        folder = str(tmp_path / "ada")
        options = ["--folder", folder, "--name", "ada", "--recipe", RECIPE, "--start-over"]
        variables = {"P2P_CO2_TICKET": swarm.ticket, "P2P_CO2_THREADS": "1", "P2P_CO2_TOKEN": "of a board"}
        peer = InTerminal(console("join", *options), **variables)
        try:
            peer.wait_for(r"faults  this machine's peer  connected")
            peer.wait_for(r"round \d+\.\d of 500 \(\d+:\d\d left\)")
            peer.wait_for(r"ada \(you\)\s+training\s+\d+\.\d %[^\n]*\n[^\n]*reached")
            _status_is_told(swarm, Path(folder))
            assert "leaving" not in peer.text
            other.process.send_signal(signal.SIGSTOP)  # what is in flight stays so: leaving takes its time
            peer.process.send_signal(signal.SIGINT)
            peer.wait_for("leaving after this inner step", 60.0)
            assert "left: stopped" not in peer.text
            peer.wait_for("to come back: ", 60.0)
            assert peer.process.wait(60) == 0
        finally:
            other.process.send_signal(signal.SIGCONT)
            peer.close()
    _last_words_are_right(peer.text[peer.text.rindex("left: stopped") :], folder)


def _last_words_are_right(last: str, folder: str) -> None:
    assert re.search(r"contributed: [\d,]+ tokens in \d:\d\d, work in \d+ rounds?, [\d.]+ % of what", last)
    again = re.search(r"to come back: (.*)", last)
    assert again is not None
    words = " ".join(again[1].split())
    assert words.startswith("P2P_CO2_THREADS=1 p2p-co2 join ")
    assert folder in last.replace("\r\n", "")
    assert f"@{folder}/ticket" in last.replace("\r\n", "")  # no ticket was typed
    assert "--start-over" not in last


def _status_is_told(swarm: Campaign, folder: Path) -> None:
    """By ticket, by a peer's folder and by the seed's."""
    deadline_at = time.monotonic() + 60  # a share is told once two peers have told of the same exchange
    while not re.search(r"training +\d", shown := _said("status", swarm.ticket)):
        assert time.monotonic() < deadline_at, shown
    assert re.search(r"^faults: (Healthy|Degraded): ", shown)
    assert re.search(r"2 of 2 peers   round \d+\.\d of 500 \(\d+:\d\d left\)", shown)
    for name in ("ada", "other"):
        assert re.search(rf"^{name} +training +\d+\.\d %", shown, re.MULTILINE)
    facts = json.loads(_said("status", "--json", str(swarm.folder / "seed")))
    assert {peer["name"] for peer in facts["peers"]} == {"ada", "other"}
    assert facts["rounds_total"] == 500
    assert re.search(r"^ada \(you\) +training ", _said("status", str(folder)), re.MULTILINE)


def _said(*arguments: str) -> str:
    done = subprocess.run(
        console(*arguments), capture_output=True, text=True, timeout=120, check=True,
        env={**os.environ, **environment()},
    )  # fmt: skip
    assert all(line.startswith("so far: ") for line in done.stderr.splitlines()), done.stderr
    return done.stdout


def test_a_run_that_cannot_be_reached_is_an_error_and_one_where_nobody_trains_is_none(
    tmp_path: Path,
) -> None:
    with Campaign(tmp_path) as swarm:
        seed = swarm.start(
            "seed", console("seed", "--json", "--host", "127.0.0.1", "--folder", str(tmp_path / "s"))
        )
        told = json.loads("{" + swarm.wait_for_line(seed, "{", START_S))
        assert told["join"] == f"p2p-co2 join {told['ticket']}"
        assert told["reach"] == "this machine"
        assert (
            _said("status", told["ticket"])
            == "run: the seed answers, but no peer is listed: nobody trains now\n"
        )
        swarm.interrupt(seed)
        assert swarm.wait([seed], 30.0)
    gone = subprocess.run(
        console("status", told["ticket"], "--seconds", "5"), capture_output=True, text=True, timeout=60,
        check=False, env={**os.environ, **environment()},
    )  # fmt: skip
    assert gone.returncode == 1
    assert gone.stderr.startswith("error: the run was not reached: ")
