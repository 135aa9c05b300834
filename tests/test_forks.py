"""Children that a user's program forks hold nothing of a peer: whoever outlives it, its folder and its ports
are free at once, and its daemon has ended."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from p2p_co2.config import ClockConfig, RunConfig
from p2p_co2.system.process import FolderLock, is_kept, left_to_others, processes_below, shut_in_forks_at
from tests.swarms import ROOT, swarm
from tests.transport_peers import free_port

RUN = RunConfig(name="forks", recipe="own-loop", fragments=2, clock=ClockConfig(mode="time", round_s=600.0))
"""No round ends: who began again would be asked for the state of those before."""


def test_a_forked_child_has_neither_the_lock_nor_the_sockets_and_the_parent_keeps_both(
    tmp_path: Path,
) -> None:
    lock = FolderLock(tmp_path)
    here = socket.create_server(("127.0.0.1", 0))
    port = here.getsockname()[1]
    shut_in_forks_at(port)
    others = socket.socket()
    socket.setdefaulttimeout(1.0)
    told, tell = os.pipe()
    ended, end = os.pipe()
    child = os.fork()
    socket.setdefaulttimeout(None)
    if child == 0:
        lock.release()  # closes what the number leads to here
        os.write(tell, os.readlink(f"/proc/self/fd/{here.fileno()}").encode())
        os.close(end)
        os.read(ended, 1)
        os._exit(0)
    try:
        os.close(ended)
        assert os.read(told, 99) == b"/dev/null"
        assert os.get_blocking(others.fileno()), "the program's sockets stay as they are"
        others.close()
        assert is_kept(tmp_path)
        socket.create_connection(("127.0.0.1", port)).close()
        lock.release()
        here.close()
        left_to_others(port)
        assert is_kept(tmp_path) is False
        socket.create_server(("127.0.0.1", port)).close()  # while the child lives
    finally:
        os.close(end)
        assert os.waitpid(child, 0)[1] == 0
        os.close(told)
        os.close(tell)


LISTENS_AND_FORKS = """
import asyncio, os
from p2p_co2.net.transport.grpc_carrier import GrpcCarrier
from p2p_co2.wire.identity import Identity

async def main():
    carrier = GrpcCarrier(Identity.generate(), bytes(32), "127.0.0.1", 0)
    await carrier.start(lambda *_: None, lambda *_: None)
    child = os.fork()
    if child == 0:
        os.write(1, str(len(os.listdir("/proc/self/task"))).encode())
        os._exit(0)
    os.waitpid(child, 0)
    await carrier.close()

asyncio.run(main())
"""


def test_no_thread_of_ours_comes_to_life_in_a_forked_child() -> None:
    """gRPC's would: on connections that are the parent's."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}
    command = [sys.executable, "-c", LISTENS_AND_FORKS]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (ended.stdout, ended.returncode) == ("1", 0), ended.stderr


@pytest.mark.swarm
def test_a_forked_child_that_outlives_its_parent_keeps_no_folder_port_or_daemon(tmp_path: Path) -> None:
    children: list[int] = []
    with swarm(tmp_path, RUN) as running:
        command = [sys.executable, str(ROOT / "tests" / "forking_peer.py"), running.ticket]
        ports = [str(free_port()) for _ in range(3)]
        command += [str(tmp_path / "peer"), *ports]
        try:
            for name in ("killed", "again"):
                running.start(name, command)
                assert running.said(name, r"ended (-?\d+)")[1] == "7"
                children.append(int(running.said(name, r"child (\d+)")[1]))
                refused = re.findall("refused: .*this one was forked from it", running.log(name))
                assert len(refused) == 3, running.log(name)
                process = running.processes[name]
                ours = set(processes_below(process.pid)) - {children[-1]}
                if name == "killed":
                    process.kill()
                    process.wait()
                    ends_at = time.monotonic() + 60
                    while any(Path(f"/proc/{pid}/exe").exists() for pid in ours):  # the daemon goes by itself
                        assert time.monotonic() < ends_at, "the daemon lives on"
                        time.sleep(0.05)
                else:
                    process.send_signal(signal.SIGINT)
                    running.wait(name)
                    assert "left" in running.log(name)
                    FolderLock(tmp_path / "peer").release()
                    for port in ports:
                        socket.create_server(("127.0.0.1", int(port))).close()
                assert ours, "there was a daemon"
                os.kill(children[-1], 0)  # it still sleeps
                assert "Traceback" not in running.log(name), running.log(name)
        finally:
            for pid in children:
                os.kill(pid, signal.SIGKILL)
