"""bootstrap: processes started together end together; seeds; the emulated internet without a kernel."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import struct
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from bootstrap.forwarder import HEADER_BYTES, QUEUE_S, Wan
from bootstrap.local_swarm import LocalSwarm
from bootstrap.options import RehearsalOptions, SeedOptions
from bootstrap.rehearsal import Line, lines_of
from bootstrap.seed import Seed, invitation_of, salted, say_invitation
from bootstrap.stage import run_in_new_folder
from p2p_co2.config import OWN_LOOP, RunConfig
from p2p_co2.errors import ConfigError, EnvironmentFault, TransportError
from p2p_co2.net.discovery import Discovery
from p2p_co2.net.transport.libp2p.daemon import start_p2p, stop_p2p
from p2p_co2.planning.profiles import PROFILES, LinkProfile
from p2p_co2.system.process import processes_below
from p2p_co2.ticket import Ticket
from p2p_co2.wire.identity import Identity, peer_id_of
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


# ---- the emulated internet

A, B = socket.inet_aton("192.0.0.67"), socket.inet_aton("192.0.0.69")
FAST = 1e12


def link(
    latency_s: float, jitter_s: float = 0.0, loss: float = 0.0, up: float = FAST, down: float = FAST
) -> LinkProfile:
    return LinkProfile("test", int(up), int(down), 1e3 * latency_s, 1e3 * jitter_s, loss, "open")


PLAIN = link(0.04)


def packet(mark: int = 0, size: int = 1400, source: bytes = A, target: bytes = B) -> bytes:
    ip = bytes((0x45,)) + bytes(11) + source + target
    return bytes(HEADER_BYTES) + ip + struct.pack("!I", mark) + bytes(size - 24)


def mark(data: bytes) -> int:
    return int(struct.unpack_from("!I", data, HEADER_BYTES + 20)[0])


def test_half_of_the_way_at_each_end() -> None:
    wan = Wan({A: PLAIN, B: link(0.02)}, seed=0)
    wan.receive(packet(), 1.0)
    assert wan.next_at() == pytest.approx(1.03)
    assert wan.due(1.0299) == []
    assert wan.due(1.0301) == [packet()]
    assert wan.next_at() is None


def test_jitter_never_reorders() -> None:
    line = link(0.04, jitter_s=0.02)
    wan = Wan({A: line, B: line}, seed=1)
    arrivals = []
    for step in range(3000):
        wan.receive(packet(step), step / 1000)
        arrivals += [(step / 1000, mark(data)) for data in wan.due(step / 1000)]
    numbers = [number for _, number in arrivals]
    assert numbers == sorted(numbers)
    delays = [at - number / 1000 for at, number in arrivals]
    assert min(delays) < 0.03
    assert max(delays) > 0.05


def test_losses_are_as_many_as_asked_for_and_come_again_with_the_seed() -> None:
    line = link(0.0, loss=0.05)

    def survivors(seed: int) -> list[int]:
        wan = Wan({A: line, B: line}, seed)
        for step in range(20_000):
            wan.receive(packet(step), 0.0)
        return [mark(data) for data in wan.due(1.0)]

    assert 18_800 < len(survivors(3)) < 19_200
    assert survivors(3) == survivors(3) != survivors(4)


def test_a_queue_keeps_the_rate_and_drops_what_is_too_much() -> None:
    size_bits = 8 * len(packet())
    line = link(0.0, up=100 * size_bits, down=1000 * size_bits)
    wan = Wan({A: line, B: line}, seed=0)
    for step in range(100):
        wan.receive(packet(step), 0.0)
    came = wan.due(10.0)
    assert abs(len(came) - (QUEUE_S * 100 + 1)) <= 1
    assert wan.count.queue_full == 100 - len(came)
    wan.receive(packet(7), 20.0)
    assert wan.next_at() == pytest.approx(20.01)
    assert wan.due(20.0105) == []
    assert wan.due(20.0111) == [packet(7)]


def test_of_large_packets_no_larger_share_is_lost() -> None:
    line = link(0.0, loss=0.05)
    wan = Wan({A: line, B: line}, seed=1)
    for _ in range(10_000):
        wan.receive(packet(size=14_000), 0.0)
    assert wan.count.lost == pytest.approx(500, rel=0.1)


def test_lines_are_profiles_with_changes() -> None:
    def lines(**options: Any) -> list[Line]:
        return lines_of(RehearsalOptions(**options), 0)

    first, second = lines(peers=2, profile="dsl, fibre", up_mbit=5, loss=0.01, nat="open")
    assert (first.peer, first.profile.up_bits_per_s, first.profile.loss) == ("peer-1", 5_000_000, 0.01)
    assert (first.profile.nat, second.profile.name) == ("open", "fibre")
    assert lines()[0].profile == PROFILES["dsl"]
    for option, wrong in (
        ("--up-mbit", {"up_mbit": 0}),
        ("--loss", {"loss": 0.9}),
        ("--latency-ms", {"latency_ms": -1}),
        ("--nat", {"nat": "wall"}),
        ("--peers", {"peers": 0}),
        ("--profile", {"profile": "modem"}),
    ):
        with pytest.raises(ConfigError, match=option):
            lines(**wrong)
