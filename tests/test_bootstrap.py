"""bootstrap: processes started together end together."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from bootstrap import seed
from bootstrap.local_swarm import LocalSwarm, environment
from bootstrap.seed import SeedOptions, how_to_join, serve_run
from p2p_co2.config import OWN_LOOP, RunConfig
from p2p_co2.errors import EnvironmentFault
from p2p_co2.net.discovery import Discovery
from p2p_co2.net.transport.libp2p import daemon as libp2p_daemon
from p2p_co2.protocol.wire.identity import Identity
from p2p_co2.system.process import processes_below, program
from p2p_co2.ticket import Ticket
from tests.transport_peers import open_peer, until

PYTHON = [sys.executable, "-c"]
BOUND_S = 120.0
"""On what takes less than a second on a machine that is at rest."""
POLITE = """
import signal, sys, time
signal.signal(signal.SIGINT, lambda *_: sys.exit(0))
print("ready: yes", flush=True)
time.sleep(600)
"""
DEAF = """
import signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
below = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("below:", below.pid, flush=True)
time.sleep(600)
"""


def test_a_child_that_listens_leaves_by_itself(tmp_path: Path) -> None:
    with LocalSwarm(tmp_path, grace_s=BOUND_S) as swarm:
        child = swarm.start("polite", [*PYTHON, POLITE])
        assert swarm.wait_for_line(child, "ready:", BOUND_S) == "yes"
        assert swarm.running() == [child]
        swarm.interrupt(child)
        assert swarm.wait([child], BOUND_S)
        assert child.exit_status() == 0
        assert swarm.dead_unasked() == []
    assert not psutil.pid_exists(child.pid)


def test_nothing_survives_a_child_that_does_not_listen(tmp_path: Path) -> None:
    with LocalSwarm(tmp_path, grace_s=0.5) as swarm:
        child = swarm.start("deaf", [*PYTHON, DEAF])
        below = int(swarm.wait_for_line(child, "below:", BOUND_S))
        assert psutil.pid_exists(below)
    assert child.exit_status() == -signal.SIGKILL
    assert not psutil.pid_exists(child.pid)
    assert _gone(below)


def test_a_ctrl_c_has_three_of_its_ten_seconds_for_all_but_the_wait(tmp_path: Path) -> None:
    """Where a peer hangs, ending a demo took 2 s beside the wait, and more on a busier machine."""
    assert LocalSwarm(tmp_path).grace_s < 7


def test_nothing_survives_an_error_in_the_parent(tmp_path: Path) -> None:
    started = []

    def fail() -> None:
        with LocalSwarm(tmp_path, grace_s=BOUND_S) as swarm:
            started.append(swarm.start("polite", [*PYTHON, POLITE]))
            swarm.wait_for_line(started[0], "ready:", BOUND_S)
            raise RuntimeError("the parent failed")

    with pytest.raises(RuntimeError, match="the parent failed"):
        fail()
    assert not psutil.pid_exists(started[0].pid)


def test_a_grandchild_left_behind_by_a_dead_child_is_ended(tmp_path: Path) -> None:
    orphaning = (
        "import subprocess, sys;"
        "below = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
        "print('below:', below.pid, flush=True)"
    )
    with LocalSwarm(tmp_path, grace_s=BOUND_S) as swarm:
        child = swarm.start("orphaning", [*PYTHON, orphaning])
        below = int(swarm.wait_for_line(child, "below:", BOUND_S))
        assert swarm.wait([child], BOUND_S)
        assert psutil.pid_exists(below)
    assert _gone(below)


def test_a_death_that_nobody_asked_for_is_seen_with_its_last_words(tmp_path: Path) -> None:
    with LocalSwarm(tmp_path) as swarm:
        child = swarm.start("failing", [*PYTHON, "import sys; sys.exit('error: no room')"])
        with pytest.raises(EnvironmentFault, match="error: no room"):
            swarm.wait_for_line(child, "ticket:", BOUND_S)
        assert swarm.dead_unasked() == [child]
        assert child.exit_status() == 1


def test_waiting_for_a_line_is_bounded(tmp_path: Path) -> None:
    with LocalSwarm(tmp_path) as swarm:
        child = swarm.start("polite", [*PYTHON, POLITE])
        with pytest.raises(EnvironmentFault, match="not ready after"):
            swarm.wait_for_line(child, "ticket:", 0.2)


def test_children_are_in_groups_of_their_own(tmp_path: Path) -> None:
    """A Ctrl-C in the terminal goes to the foreground group: only to the parent."""
    with LocalSwarm(tmp_path) as swarm:
        child = swarm.start("polite", [*PYTHON, POLITE])
        assert os.getpgid(child.pid) == child.pid != os.getpgid(0)


def test_a_command_that_is_not_there_is_named(tmp_path: Path) -> None:
    with LocalSwarm(tmp_path) as swarm, pytest.raises(EnvironmentFault, match="cannot start nobody"):
        swarm.start("nobody", [str(tmp_path / "no-such-program")])


def test_our_programs_run_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where a folder of the user's has the name of one of ours."""
    (tmp_path / "peers").mkdir()
    (tmp_path / "peers" / "__init__.py").write_text("raise SystemExit('the wrong one')")
    monkeypatch.chdir(tmp_path)
    with LocalSwarm(tmp_path) as swarm:
        child = swarm.start("peer", program("peers", "--help"), environment())
        assert swarm.wait([child], BOUND_S)
        assert child.exit_status() == 0
        assert "TICKET" in child.last_lines(200)


def _gone(pid: int) -> bool:
    """A killed orphan is reaped by init in its own time: a zombie counts as gone."""
    for _ in range(int(BOUND_S / 0.05)):
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize(("announce_host", "public"), [("seed.example.org", True), ("", False)])
def test_a_seed_with_a_public_name_relays_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, announce_host: str, public: bool
) -> None:
    asked: list[object] = []

    async def start_p2p(*_: object, **options: object) -> None:
        asked.append(options)
        raise EnvironmentFault("far enough")

    monkeypatch.setattr(libp2p_daemon, "start_p2p", start_p2p)
    run_file = tmp_path / "run.toml"
    run_file.write_text(f'recipe_digest = "{bytes(32).hex()}"\n')
    options = SeedOptions(run_file=run_file, folder=tmp_path / "seed", port=4001, announce_host=announce_host)
    with pytest.raises(EnvironmentFault, match="far enough"):
        serve_run(options, lambda _: None)
    assert asked == [{"announce_host": announce_host, "public": public, "relay": True}]


async def test_a_seed_brings_its_libp2p_daemon_back_where_it_was(tmp_path: Path) -> None:
    run = RunConfig(recipe_digest=bytes(32).hex())
    identity = Identity.load_or_create(tmp_path / "identity")
    said: list[str] = []
    options = SeedOptions(folder=tmp_path, host="127.0.0.1")
    others = set(processes_below(os.getpid()))
    serving = asyncio.create_task(
        seed._serve(seed._Seed(options, identity, run, run.digest(), identity.peer_id), said.append)
    )
    try:
        async with open_peer("libp2p", tmp_path / "peer", run=run.digest()) as peer:
            p2p = peer.carrier._p2p  # type: ignore[attr-defined]
            discovery = Discovery(p2p, peer.identity, run.digest(), lambda *_: None)
            await until(lambda: serving.done() or any("join with" in line for line in said))
            before = next(line for line in said if line.startswith("ticket: "))
            await discovery.start(Ticket.parse(before.removeprefix("ticket: ")).seeds)
            (daemon,) = set(processes_below(os.getpid())) - others - {p2p.daemon.process.pid}
            os.kill(daemon, signal.SIGKILL)
            await until(lambda: serving.done() or any("started again" in line for line in said))
            await discovery.rebootstrap(Ticket.parse(before.removeprefix("ticket: ")).seeds)
            assert (await discovery.fetch_manifest(identity.peer_id)).config == run.canonical_bytes()
            assert [line for line in said if line.startswith("ticket: ")] == [before]
            await discovery.close()
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("byte-gpt", "p2p-co2 join TICKET"),
        (OWN_LOOP, "python my_loop.py TICKET"),
        ("my_recipe.py:make", "--recipe FILE.py:function"),
    ],
)
def test_a_seed_says_how_its_run_is_joined(recipe: str, words: str) -> None:
    assert words in how_to_join(recipe)
