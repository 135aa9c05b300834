"""bootstrap: processes started together end together; seeds; lines."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from bootstrap.local_swarm import LocalSwarm
from bootstrap.options import RehearsalOptions, SeedOptions
from bootstrap.rehearsal import Line, lines_of
from bootstrap.seed import SeedServer, invitation_of, salted, say_invitation
from bootstrap.stage import RunEnd, Stage, run_in_new_folder
from p2p_co2.config import OWN_LOOP, RunConfig
from p2p_co2.errors import ConfigError, EnvironmentFault, TransportError
from p2p_co2.net.discovery import Discovery
from p2p_co2.net.transport.libp2p.daemon import start_p2p, stop_p2p
from p2p_co2.planning.profiles import PROFILES
from p2p_co2.system.process import processes_below
from p2p_co2.telemetry.events import Event
from p2p_co2.ticket import Ticket
from p2p_co2.wire.identity import Identity, peer_id_of
from tests.test_process import has_ended
from tests.test_process import until as wait_until
from tests.transport_peers import until

# ---- processes

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
    assert wait_until(lambda: has_ended(below))


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
    assert wait_until(lambda: has_ended(below))


def test_a_death_that_nobody_asked_for_is_seen_with_its_last_words(tmp_path: Path) -> None:
    with LocalSwarm(tmp_path) as swarm:
        child = swarm.start("failing", [*PYTHON, "import sys; sys.exit('error: no room')"])
        with pytest.raises(EnvironmentFault, match="error: no room"):
            swarm.wait_for_line(child, "ticket:", BOUND_S)
        assert swarm.dead_unasked() == [child]
        assert child.exit_status() == 1


async def test_a_seed_brings_its_libp2p_daemon_back_where_it_was(tmp_path: Path) -> None:
    run = RunConfig(recipe_digest=bytes(32).hex())
    identity = Identity.load_or_create(tmp_path / "identity")
    said: list[str] = []
    options = SeedOptions(folder=tmp_path, host="127.0.0.1")
    others = set(processes_below(os.getpid()))
    serving = asyncio.create_task(SeedServer(options, run, None, said.append).serve())
    peer = Identity.generate()
    (tmp_path / "peer").write_bytes(peer.libp2p_bytes())
    p2p = await start_p2p(tmp_path / "peer")
    discovery = Discovery(p2p, peer, run.digest(), lambda *_: None)
    try:
        await until(lambda: serving.done() or any("p2p-co2 join " in line for line in said))
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


def test_a_seed_makes_a_salt_that_nobody_can_guess(tmp_path: Path) -> None:
    """The same at each of its starts, so that tickets live on; also of a run that it had published before."""
    run, said = RunConfig(), list[str]()
    made = salted(run, tmp_path / "one", said.append)
    assert made.digest() != run.digest()
    assert f'salt = "{made.salt}"' in said[-1]
    assert salted(run, tmp_path / "one", said.append) == made
    assert salted(run.model_copy(update={"seed": 1}), tmp_path / "one", said.append).salt != made.salt
    assert salted(run, tmp_path / "other", said.append).salt != made.salt
    assert salted(made, tmp_path / "other", said.append) == made
    (tmp_path / "old").mkdir()
    key = Identity.load_or_create(tmp_path / "old" / "identity").peer_id
    ticket = Ticket(run.digest(), key, (f"/ip4/127.0.0.1/tcp/9/p2p/{key}",))
    (tmp_path / "old" / "ticket").write_text(f"{ticket}\n")
    assert salted(run, tmp_path / "old", said.append) == run


@pytest.mark.parametrize(
    ("recipe", "line", "others"),
    [
        ("byte-gpt", "p2p-co2 join {}", ""),
        (OWN_LOOP, "P2P_CO2_TICKET={} python my_loop.py", "your own program"),
        (
            "/home/ada/my_recipe.py:make",
            "p2p-co2 join {} --recipe my_recipe.py:make",
            "ada/my_recipe",
        ),
        ("a b; rm.py:make", "p2p-co2 join {} --recipe 'a b; rm.py:make'", "a b; rm.py"),
    ],
)
def test_a_seed_says_how_its_run_is_joined(recipe: str, line: str, others: str) -> None:
    invitation = invitation_of(RunConfig(recipe=recipe), ticket_at("192.0.2.1"), Path("seed"))
    assert invitation.join == line.format(invitation.ticket)
    assert others in invitation.others
    said: list[str] = []
    say_invitation(invitation, said.append)
    assert said[0] == f"ticket: {invitation.ticket}"
    assert said[-1] == invitation.join, "the line to copy is the last"


@pytest.mark.parametrize(
    ("hosts", "reach", "words"),
    [
        (["127.0.0.1"], "this machine", "warning: the ticket names the loopback alone"),
        (["192.168.1.7", "10.0.0.1"], "local network", "note: the ticket names addresses of a local network"),
        (["192.168.1.7", "8.8.4.4"], "everywhere", ""),
    ],
)
def test_a_seed_says_who_cannot_use_its_ticket(hosts: list[str], reach: str, words: str) -> None:
    invitation = invitation_of(RunConfig(), ticket_at(*hosts), Path("seed"))
    assert invitation.reach == reach
    said: list[str] = []
    say_invitation(invitation, said.append)
    assert [line for line in said if line.startswith(("warning", "note"))] == [
        line for line in said if words and line.startswith(words)
    ]
    assert len(said) == (4 if words else 3)


def ticket_at(*hosts: str) -> Ticket:
    seed = peer_id_of(bytes(32))
    return Ticket(bytes(32), seed, tuple(f"/ip4/{host}/tcp/9/p2p/{seed}" for host in hosts))


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


class Unseen:
    """A watch of nothing."""

    def see(self, events: Sequence[Event]) -> None:
        pass

    def finish(self, end: RunEnd) -> list[str]:
        return []

    def close(self) -> None:
        pass


def test_a_swarm_whose_peer_cannot_start_ends_at_once(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    with Stage(RunConfig(), tmp_path, "auto", Unseen()) as stage:
        stage.adopt(stage.swarm.start("peer-1", ["sleep", "600"]), tmp_path / "peer-1")
        stage.adopt(stage.swarm.start("peer-2", [*PYTHON, "exit('error: no folder')"]), tmp_path / "peer-2")
        with pytest.raises(
            EnvironmentFault, match=r"peer-2 ended before the training began, with status 1(.|\n)*no folder"
        ):
            stage.look_on()


# ---- lines


def test_lines_are_profiles_with_changes() -> None:
    def lines(**options: Any) -> list[Line]:
        return lines_of(RehearsalOptions(**options), 0)

    first, second = lines(peers=2, profile="dsl, fibre", up_mbit=5, loss=0.01)
    assert (first.peer, first.profile.up_bits_per_s, first.profile.loss) == ("peer-1", 5_000_000, 0.01)
    assert (first.profile.nat, second.profile.name) == ("open", "fibre")
    assert lines()[0].profile == replace(PROFILES["dsl"], nat="open")
    for option, wrong in (
        ("--up-mbit", {"up_mbit": 0}),
        ("--loss", {"loss": 0.9}),
        ("--latency-ms", {"latency_ms": -1}),
        ("--peers", {"peers": 0}),
        ("--profile", {"profile": "modem"}),
    ):
        with pytest.raises(ConfigError, match=option):
            lines(**wrong)
