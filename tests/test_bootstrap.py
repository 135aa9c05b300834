"""bootstrap: processes started together end together."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from bootstrap.local_swarm import LocalSwarm
from bootstrap.options import SeedOptions
from bootstrap.seed import Seed, how_to_join
from bootstrap.stage import run_in_new_folder
from p2p_co2.config import OWN_LOOP, RunConfig
from p2p_co2.errors import EnvironmentFault, TransportError
from p2p_co2.net.discovery import Discovery
from p2p_co2.net.transport.libp2p.daemon import start_p2p, stop_p2p
from p2p_co2.protocol.wire.identity import Identity
from p2p_co2.system.process import processes_below
from p2p_co2.ticket import Ticket
from tests.transport_peers import until

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


async def test_a_seed_brings_its_libp2p_daemon_back_where_it_was(tmp_path: Path) -> None:
    run = RunConfig(recipe_digest=bytes(32).hex())
    identity = Identity.load_or_create(tmp_path / "identity")
    said: list[str] = []
    options = SeedOptions(folder=tmp_path, host="127.0.0.1")
    others = set(processes_below(os.getpid()))
    serving = asyncio.create_task(Seed(options, run, None, said.append).serve())
    peer = Identity.generate()
    (tmp_path / "peer").write_bytes(peer.libp2p_bytes())
    p2p = await start_p2p(tmp_path / "peer")
    discovery = Discovery(p2p, peer, run.digest(), lambda *_: None)
    try:
        await until(lambda: serving.done() or any("join with" in line for line in said))
        before = next(line for line in said if line.startswith("ticket: "))
        await discovery.start(Ticket.parse(before.removeprefix("ticket: ")).seeds)
        (daemon,) = set(processes_below(os.getpid())) - others - {p2p.daemon.process.pid}
        os.kill(daemon, signal.SIGKILL)
        await until(lambda: serving.done() or any("started again" in line for line in said))
        async with asyncio.timeout(BOUND_S):
            while True:  # libp2p does not dial for some seconds after a failure
                with suppress(TransportError):
                    await discovery.rebootstrap(Ticket.parse(before.removeprefix("ticket: ")).seeds)
                    break
                await asyncio.sleep(0.5)
        assert (await discovery.fetch_manifest(identity.peer_id)).config == run.canonical_bytes()
        assert [line for line in said if line.startswith("ticket: ")] == [before]
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        await discovery.close()
        await stop_p2p(p2p)


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("byte-gpt", "p2p-co2 join TICKET"),
        (OWN_LOOP, "python my_loop.py TICKET"),
        ("my_recipe.py:make", "--recipe FILE.py:function"),
    ],
)
def test_a_seed_says_how_its_run_is_joined(recipe: str, words: str) -> None:
    assert words in how_to_join(RunConfig(recipe=recipe))


@pytest.mark.parametrize(("reasons", "status"), [([], 0), (["the loss did not fall"], 1)])
def test_reasons_are_told_and_make_it_a_failure(
    tmp_path: Path, reasons: list[str], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_in_new_folder(tmp_path / "run", "demo", "stopped", lambda folder: reasons) == status
    assert capsys.readouterr().err == "".join(f"error: {reason}\n" for reason in reasons)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_who_is_stopped_cleans_up_and_says_so(
    tmp_path: Path, number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    cleaned: list[bool] = []

    def run(folder: Path) -> list[str]:
        try:
            os.kill(os.getpid(), number)
            return ["it went on"]
        finally:
            cleaned.append(True)

    before = signal.getsignal(signal.SIGTERM)
    assert run_in_new_folder(tmp_path / "run", "demo", "stopped; nothing is left", run) == 130
    assert capsys.readouterr().err == "stopped; nothing is left\n"
    assert cleaned == [True]
    assert signal.getsignal(signal.SIGTERM) is before
    assert not (tmp_path / "run").exists()
