"""Rehearsals: lines between network namespaces, routers, the whole command and its end; and by somebody who
is not root. What needs namespaces is skipped where they are not allowed; all traffic stays in those that the
test made and removes."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bootstrap import netns
from bootstrap.internet import Internet, Machine
from bootstrap.local_swarm import Child, LocalSwarm, environment
from p2p_co2.planning.profiles import PROFILES
from p2p_co2.system.process import program
from p2p_co2.telemetry.events import LinkOpened
from p2p_co2.telemetry.journal import read_events
from tests.campaign import console
from tests.swarms import owned

KERNEL = netns.examine()
pytestmark = pytest.mark.swarm
needs_namespaces = pytest.mark.skipif(
    bool(KERNEL.problem), reason=f"no network namespaces here: {KERNEL.problem}"
)
needs_router = pytest.mark.skipif(not KERNEL.masquerade, reason="nft makes no router here")
ROOT = Path(__file__).resolve().parent.parent
NOBODY = 65534
BOUND_S = 240.0
"""On what takes seconds on a machine that is at rest."""
RECIPE = f"{ROOT}/examples/own_recipe.py:make"
RUN = f"""
name = "rehearsed"
recipe = "{RECIPE}"
fragments = 2
[clock]
round_s = 2.0
"""
OPEN_DSL = replace(PROFILES["dsl"], nat="open")


def namespaces() -> list[str]:
    return owned(os.getpid())


@contextmanager
def rehearsal(folder: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    (folder / "run.toml").write_text(RUN)
    command = [
        "rehearse",
        str(folder / "run.toml"),
        "--peers",
        "2",
        "--folder",
        str(folder / "run"),
        *options,
    ]
    settings: dict[str, Any] = {"cwd": ROOT, "env": {**os.environ, **environment()}}
    with running(program("bootstrap", *command), folder, **settings) as process:
        yield process


@contextmanager
def running(command: list[str], folder: Path, **settings: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is gone when the block ends; its output goes to a file of ``folder``."""
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, **settings)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait(BOUND_S)


# ---- lines


def inside(machine: Machine, make: Callable[[], socket.socket]) -> socket.socket:
    """A socket that a thread makes on a machine's network."""

    def enter() -> socket.socket:
        with (Path("/run/netns") / machine.namespace).open() as place:
            assert ctypes.CDLL(None).setns(place.fileno(), 0x40000000) == 0
        return make()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(enter).result()


def transfer(sender: Machine, receiver: Machine, data: bytes) -> tuple[bytes, float]:
    """(what arrived, seconds) of one TCP connection."""

    def listen() -> socket.socket:
        made = socket.socket()
        made.bind((receiver.address, 0))
        made.listen()
        return made

    listener, dialling = inside(receiver, listen), inside(sender, socket.socket)
    with listener, dialling:
        dialling.settimeout(BOUND_S)
        dialling.connect((receiver.address, listener.getsockname()[1]))
        began_at = time.monotonic()

        def send() -> None:
            with dialling:
                dialling.sendall(data)

        sending = threading.Thread(target=send)
        sending.start()
        taken, _ = listener.accept()
        got = bytearray()
        with taken:
            taken.settimeout(BOUND_S)
            while piece := taken.recv(1 << 16):
                got += piece
        sending.join()
        return bytes(got), time.monotonic() - began_at


@needs_namespaces
def test_a_line_has_its_delay_rate_and_loss_and_loses_no_byte(tmp_path: Path) -> None:
    """On a slow line; and of many connections on a fast one, which take large packets."""
    slow = replace(OPEN_DSL, jitter_ms=0.0, loss=0.02)
    fast = replace(PROFILES["transatlantic"], latency_ms=10.0, jitter_ms=0.0, loss=0.005)
    with Internet(KERNEL, tmp_path, seed=5) as internet:
        a, b = internet.add("a", slow), internet.add("b", slow)
        machines = [internet.add(f"peer-{index}", fast) for index in range(4)]
        internet.start()
        data = os.urandom(1 << 20)
        got, took_s = transfer(a, b, data)
        assert got == data
        assert took_s > 8 * len(data) / slow.up_bits_per_s + 0.04
        up, _ = internet.traffic_bytes()["a"]
        assert len(data) < up < 1.5 * len(data)
        data *= 4
        with ThreadPoolExecutor(3) as pool:
            arrived = list(pool.map(lambda sender: transfer(sender, machines[0], data), machines[1:]))
        assert all(got == data for got, _ in arrived)
        assert 3 * 8 * len(data) / fast.down_bits_per_s < max(took_s for _, took_s in arrived)
    assert namespaces() == []
    done = internet.forwarded
    full_segments = done["bytes"] / 1500
    assert done["packets"] < 0.5 * full_segments, "acknowledgements included"
    assert 0.1 * 0.005 * full_segments < done["lost"] < 3 * 0.007 * full_segments


@needs_namespaces
def test_a_congestion_control_that_the_kernel_lacks_is_a_mistake_of_the_command_line(tmp_path: Path) -> None:
    with Internet(KERNEL, tmp_path, seed=5, congestion="reno") as internet:
        internet.add("a", OPEN_DSL)
    with rehearsal(tmp_path, "--congestion", "foo") as process:
        assert process.wait(BOUND_S) == 2
    assert "error: command line: --congestion: this kernel has reno" in (tmp_path / "output").read_text()
    assert namespaces() == owned(process.pid) == []


@needs_namespaces
def test_what_a_killed_process_made_is_swept_and_nothing_else() -> None:
    code = "from bootstrap import netns; import time; print(netns.add('left'), flush=True); time.sleep(600)"
    maker = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert maker.stdout is not None
    with maker.stdout:
        left, mine = maker.stdout.readline().strip(), netns.add("mine")
    try:
        inside = subprocess.Popen(netns.inside(left, ["sleep", "600"]))
        command, ends_at = Path(f"/proc/{inside.pid}/comm"), time.monotonic() + BOUND_S
        while command.read_text() != "sleep\n":  # before, it may not be in there yet
            assert time.monotonic() < ends_at
            time.sleep(0.01)
        assert left not in netns.sweep()
        maker.kill()
        maker.wait()
        assert left in netns.sweep()
        assert inside.wait(BOUND_S) == -signal.SIGKILL
        assert namespaces() == [mine]
    finally:
        netns.remove(mine)
        netns.remove(left)
    assert owned(maker.pid) == []


# ---- the command


@needs_router
def test_peers_behind_routers_meet_through_the_seed(tmp_path: Path) -> None:
    with rehearsal(tmp_path, "--profile", "4g", "--seconds", "8") as process:
        output, summary = finished(process, tmp_path)
    assert owned(process.pid) == []
    assert "emulation: real packets" in output
    assert summary["lines"]["peer-1"]["nat"] == "symmetric"
    assert summary["digests_equal"]
    assert summary["rounds"]["committed"] > 0
    assert set(summary["carriers"]) == {"libp2p"}
    assert summary["exchanges"]["count"] > 0
    assert 0 < summary["steady"]["utilisation"]["peer-1"] <= 1
    assert summary["lines"]["peer-1"]["latency_ms"] == 50
    events = read_events(tmp_path / "run" / "events.jsonl")
    opened = [event for event in events if isinstance(event, LinkOpened)]
    assert opened
    assert all("relayed by 192.0.0." in event.reason for event in opened)


def finished(process: subprocess.Popen[bytes], folder: Path) -> tuple[str, dict[str, Any]]:
    """(output, summary) of a successful rehearsal, once it has ended."""
    status, said = process.wait(BOUND_S), (folder / "output").read_text()
    assert status == 0, said
    return said, json.loads((folder / "run" / "summary.json").read_text())


@pytest.fixture
def nobodys() -> Iterator[Path]:
    """A folder of somebody who is not root: of nobody where we are."""
    path = Path(tempfile.mkdtemp(prefix="p2p-co2-nobody-"))
    shutil.copy(ROOT / "examples" / "own_recipe.py", path)
    (path / "run.toml").write_text(RUN.replace(f"{ROOT}/examples/", ""))
    if os.geteuid() == 0:
        for each in (path, *path.iterdir()):
            os.chown(each, NOBODY, NOBODY)
    yield path
    shutil.rmtree(path)


def test_without_root_it_is_played_on_loopback_with_slow_carriers_and_says_so(nobodys: Path) -> None:
    command = console("rehearse", "run.toml", "--peers", "2", "--profile", "dsl", "--seconds", "6")
    variables = {**os.environ, **environment(), "HOME": str(nobodys), "COLUMNS": "120"}
    who = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
    try:
        with running([*command, "--folder", "run"], nobodys, cwd=nobodys, env=variables, **who) as process:
            said, summary = finished(process, nobodys)
    except PermissionError as error:
        pytest.skip(f"this checkout is for its owner alone, nobody else can run it: {error}")
    assert "carriers slowed down on loopback" in said
    assert "network namespaces need root" in " ".join(said.split())  # and why
    assert "slowed down" in summary["emulation"]
    assert summary["lines"]["peer-1"]["nat"] == "open"  # no router is played on loopback
    assert summary["rounds"]["duration_s"]["mean"] > 0.16, "four ways of 40 ms at least"
    assert summary["exchanges"]["line_share"]["median"] is None
    assert len(summary["lines"]) == 2


@needs_namespaces
def test_an_interrupted_rehearsal_leaves_nothing(tmp_path: Path) -> None:
    with rehearsal(tmp_path, "--profile", "fibre", "--seconds", "60") as process:
        ends_at = time.monotonic() + BOUND_S
        while not (tmp_path / "run" / "logs" / "peer-2.log").exists():
            assert time.monotonic() < ends_at
            assert process.poll() is None, (tmp_path / "output").read_text()
            time.sleep(0.1)
        assert owned(process.pid)
        process.send_signal(signal.SIGINT)
        assert process.wait(BOUND_S) == 130
    assert owned(process.pid) == []
    assert "no process and no namespace is left" in (tmp_path / "output").read_text()


def start_seed(swarm: LocalSwarm, place: Machine, folder: Path, *options: str) -> str:
    """Start a seed on a public machine; returns its ticket."""
    (folder / "run.toml").write_text(RUN)
    arguments = ["seed", str(folder / "run.toml"), "--folder", str(folder / "seed"), "--port", "31337"]
    arguments += ["--host", place.address, "--announce-host", place.address, *options]
    seed = swarm.start("seed", place.command(program("bootstrap", *arguments)))
    return swarm.wait_for_line(seed, "ticket:", BOUND_S)


@needs_router
def test_a_peer_that_nobody_can_reach_is_told_what_to_do_when_somebody_is_there(tmp_path: Path) -> None:
    with Internet(KERNEL, tmp_path, seed=0) as internet, LocalSwarm(tmp_path, grace_s=3) as swarm:
        public = internet.add("seed", PROFILES["fibre"])
        behind = replace(PROFILES["fibre"], nat="symmetric")
        hidden, other = internet.add("peer", behind), internet.add("other", behind)
        internet.start()
        ticket = start_seed(swarm, public, tmp_path, "--no-relay")
        command = program("peers", ticket, "--folder", str(tmp_path / "peer"), "--recipe", RECIPE)
        peer = swarm.start("peer", hidden.command(command))
        cure = "forward two TCP ports of the router to this machine and join with --announce-host"

        def wait_for(words: str, process: Child) -> None:
            ends_at = time.monotonic() + BOUND_S
            while words not in process.last_lines(100):
                assert time.monotonic() < ends_at, process.last_lines(100)
                time.sleep(0.1)

        wait_for("peers reached: 0, round", peer)
        assert cure not in peer.last_lines(100)  # nobody is out of reach: nobody is there
        command[command.index(str(tmp_path / "peer"))] = str(tmp_path / "other")
        newcomer = swarm.start("newcomer", other.command(command))
        wait_for("error: the others left at round", newcomer)  # it is not let to train the run anew, alone
        assert cure in newcomer.last_lines(100)
        swarm.start("other", other.command([*command, "--start-over"]))
        wait_for("no seed passes on traffic for this peer", peer)
        assert f"warning: {cure}" in peer.last_lines(100)
    assert namespaces() == []


@needs_router
def test_a_board_behind_a_router_shows_a_peer_behind_another(tmp_path: Path) -> None:
    hidden = replace(PROFILES["fibre"], nat="symmetric")
    with Internet(KERNEL, tmp_path, seed=0) as internet, LocalSwarm(tmp_path, grace_s=3) as swarm:
        public = internet.add("seed", PROFILES["fibre"])
        trains, looks = internet.add("peer", hidden), internet.add("board", hidden)
        internet.start()
        ticket = start_seed(swarm, public, tmp_path)
        command = program("peers", ticket, "--folder", str(tmp_path / "peer"), "--recipe", RECIPE)
        swarm.start("peer", trains.command(command))
        command = program("p2p_co2.cli", "board", ticket, "--folder", str(tmp_path / "b"), "--port", "8800")
        board = swarm.start("board", looks.command(command))
        script = (
            "import urllib.request as r; print(r.urlopen('http://127.0.0.1:8800/api/swarm').read().decode())"
        )
        ask = looks.command([sys.executable, "-c", script])
        ends_at = time.monotonic() + BOUND_S
        while True:
            answer = subprocess.run(ask, capture_output=True, text=True, timeout=60, check=False)
            peers = json.loads(answer.stdout)["peers"] if answer.returncode == 0 else []
            if any(peer["device"] == "cpu" for peer in peers):  # what only the peer itself tells
                break
            assert time.monotonic() < ends_at, answer.stdout + answer.stderr + board.last_lines(100)
            assert board.running(), board.last_lines(100)
            time.sleep(0.5)
    assert namespaces() == []
