"""What libp2p has of its own: a hostile client that writes raw frames, silence, and the daemon."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from p2p_co2.errors import ConfigError, EnvironmentFault, TransportError
from p2p_co2.net.transport import libp2p_carrier, libp2p_daemon, libp2p_revival
from p2p_co2.net.transport.admission import Admission
from p2p_co2.net.transport.base import Link
from p2p_co2.net.transport.hivemind_quiet import P2PDaemonError, quiet_stream_ends
from p2p_co2.net.transport.libp2p_carrier import HEADER_BYTES, PROTOCOL
from p2p_co2.net.transport.libp2p_control import answers, hang_up, open_stream, reach
from p2p_co2.net.transport.libp2p_daemon import start_p2p, stop_p2p, wait_p2p_exit
from p2p_co2.net.transport.libp2p_revival import keep_alive
from p2p_co2.protocol.wire.identity import Identity
from p2p_co2.protocol.wire.limits import MAX_MESSAGE_BYTES
from p2p_co2.protocol.wire.messages_pb2 import PeerRecord
from tests.transport_peers import PATIENCE_S, RUN, Peer, open_pair, until

ROOT = Path(__file__).resolve().parent.parent


# ---- raw frames


def frame(data: bytes) -> bytes:
    return len(data).to_bytes(HEADER_BYTES) + data


async def test_libp2p_refuses_hostile_frames(tmp_path: Path) -> None:
    async with open_pair("libp2p", tmp_path) as (a, b):
        p2p = a.carrier._p2p  # type: ignore[attr-defined]
        admission = Admission(a.identity, RUN, time.time)
        hello = admission.hello(b.identity.peer_id, b"")
        somebody = Admission(Identity.generate(), RUN, time.time).hello(b.identity.peer_id, b"")
        too_long = (MAX_MESSAGE_BYTES + 1).to_bytes(HEADER_BYTES)
        await reach(p2p, b.identity.peer_id, b.record.maddrs, PATIENCE_S)
        for raw, reason in (
            (frame(hello) + too_long, "wrong message size"),
            (frame(hello), "replayed hello"),
            (frame(somebody), "wrong hello"),
            (b"\xff\xff\xff\xff", "wrong hello"),
            (b"GET / HTTP/1.1", "wrong hello"),
        ):
            reader, writer = await open_stream(p2p, b.identity.peer_id, PROTOCOL, PATIENCE_S)
            writer.write(raw)
            answers = b""
            while reason.encode() not in answers:
                answers += await reader.read(1000)
            await hang_up(writer)
            assert b.reasons[-1] == reason
        assert not b.received
        assert {sender for sender, _ in b.refused} == {a.identity.peer_id}
        await until(lambda: not b.carrier._inbound)  # type: ignore[attr-defined]


async def test_libp2p_notices_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silence_s = 2.0  # a machine under load may stand still for a second
    monkeypatch.setattr(libp2p_carrier, "HEARTBEAT_S", 0.02)
    monkeypatch.setattr(libp2p_carrier, "SILENCE_S", silence_s)
    async with open_pair("libp2p", tmp_path) as (a, b):
        link = await a.carrier.connect(b.record)
        b.gate.clear()
        await link.send(b"worked on for long")
        await asyncio.sleep(1.2 * silence_s)
        b.gate.set()
        await link.send(b"still open")
        await until(lambda: len(b.received) == 2)
        monkeypatch.setattr(libp2p_carrier, "HEARTBEAT_S", 60.0)
        async with asyncio.timeout(PATIENCE_S):
            assert "silent" in await link.wait_closed()


async def test_libp2p_says_what_has_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_pair("libp2p", tmp_path) as (a, b):
        link = await a.carrier.connect(b.record)
        said = link.acknowledged
        assert said is not None
        b.gate.clear()  # read, and not worked on yet: the line has carried it
        await link.send(bytes(100_000))
        await until(lambda: said.arrived_bytes == 100_000)
        b.gate.set()
        for number in range(50):
            await link.send(bytes(number + 1))
        await until(lambda: said.arrived_bytes == said.sent_bytes == 101_275)
        assert len(b.received) == 51
        monkeypatch.setattr(
            libp2p_carrier._Receipt, "came", lambda receipt, size: setattr(receipt, "_bytes", 1)
        )
        monkeypatch.setattr(libp2p_carrier, "HEARTBEAT_S", 0.01)
        liar = await a.carrier.connect(b.record)
        await liar.send(b"x")
        await until(lambda: liar.acknowledged.arrived_bytes == 1)
        monkeypatch.setattr(
            libp2p_carrier._Receipt, "came", lambda receipt, size: setattr(receipt, "_bytes", 9)
        )
        await liar.send(b"x")
        async with asyncio.timeout(PATIENCE_S):
            assert "answers nonsense: wrong acknowledgement" in await liar.wait_closed()


# ---- hivemind


def test_finding_peers_takes_no_torch_and_the_rest_of_hivemind_is_there_for_who_asks() -> None:
    script = (
        "import sys\nimport p2p_co2.node.observer, bootstrap.seed, p2p_co2.net.transport.libp2p_relay\n"
        "print(sorted({'torch', 'numpy', 'scipy'} & set(sys.modules)))\n"
        "import hivemind\nfrom p2p_co2.net.transport.hivemind_quiet import P2P, DHTNode, MSGPackSerializer\n"
        "assert (hivemind.p2p.P2P, hivemind.dht.DHTNode) == (P2P, DHTNode)\n"
        "assert hivemind.utils.MSGPackSerializer is MSGPackSerializer\n"
        "assert not hasattr(hivemind.dht, 'nonsense')\nassert hivemind.__version__.count('.') == 2\n"
        "print(hivemind.Optimizer.__name__, hivemind.dht.DHT.__name__, 'torch' in sys.modules)"
    )
    told = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning", "-c", script], cwd=ROOT, capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    assert told.stdout.splitlines() == ["[]", "Optimizer DHT True"]
    assert not told.stderr


# ---- the daemon


def test_a_search_that_is_broken_off_by_leaving_prints_no_traceback() -> None:
    async def traverse_dht() -> None:
        raise AssertionError  # hivemind's, when its workers found the daemon gone

    async def anything_else() -> None:
        raise AssertionError

    loop = asyncio.new_event_loop()
    printed: list[object] = []
    loop.default_exception_handler = printed.append  # type: ignore[method-assign,assignment]
    for search in (traverse_dht, anything_else):
        task = loop.create_task(search())
        loop.run_until_complete(asyncio.wait([task]))
        quiet_stream_ends(loop, {"exception": task.exception(), "future": task, "message": search.__name__})
    loop.close()
    assert [context["message"] for context in printed] == ["anything_else"]  # type: ignore[index]


async def test_daemon_port_in_use(tmp_path: Path, own_tmp: Path) -> None:
    Identity.load_or_create(tmp_path / "id")
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    async with server:
        with pytest.raises(EnvironmentFault, match=r"port \d+ is in use; choose another.*--libp2p-port"):
            await start_p2p(tmp_path / "id", port=server.sockets[0].getsockname()[1])


async def test_daemon_faults_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Identity.load_or_create(tmp_path / "id")
    with pytest.raises(EnvironmentFault, match=r"not this machine's.*\(host\)"):
        await start_p2p(tmp_path / "id", "192.0.2.1")
    with pytest.raises(ConfigError, match="no IP address"):
        await start_p2p(tmp_path / "id", "nowhere")
    with pytest.raises(ConfigError, match="fixed libp2p_port"):
        await start_p2p(tmp_path / "id", announce_host="example.org")
    (tmp_path / "damaged").write_bytes(b"not a key")
    with pytest.raises(EnvironmentFault, match="identity file"):
        await start_p2p(tmp_path / "damaged")
    for content, fix in ((None, "reinstall"), (b"\x7fELF not for us", "Linux x86-64")):
        binary = tmp_path / "p2pd"
        if content is not None:
            binary.write_bytes(content)
            binary.chmod(0o700)
        monkeypatch.setattr(libp2p_daemon.importlib.resources, "files", lambda _: tmp_path)
        with pytest.raises(EnvironmentFault, match=fix):
            await start_p2p(tmp_path / "id")
    binary.chmod(0o600)
    with pytest.raises(EnvironmentFault, match=r"chmod \+x"):
        await start_p2p(tmp_path / "id")


async def test_daemon_that_hangs_is_given_more_time_then_up(
    tmp_path: Path, own_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "p2pd").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "p2pd").chmod(0o700)
    monkeypatch.setattr(libp2p_daemon.importlib.resources, "files", lambda _: tmp_path)
    with pytest.raises(EnvironmentFault, match="very busy"):
        await start_p2p(tmp_path / "id", startup_timeout_s=0.05)


@pytest.mark.parametrize("amid", ["start", "end"])
async def test_who_is_cancelled_again_amid_a_start_or_an_end_leaves_nothing(
    tmp_path: Path, own_tmp: Path, monkeypatch: pytest.MonkeyPatch, amid: str
) -> None:
    """A Ctrl-C cancels the start, and closing the loop cancels what that has still to clear away."""
    started: list[libp2p_daemon.Daemon] = []
    launch = libp2p_daemon._launch

    def launch_and_tell(arguments: list[str]) -> libp2p_daemon.Daemon:
        started.append(launch(arguments))
        return started[-1]

    monkeypatch.setattr(libp2p_daemon, "_launch", launch_and_tell)
    Identity.load_or_create(tmp_path / "id")
    if amid == "start":
        (tmp_path / "p2pd").write_text("#!/bin/sh\ntrap '' TERM\nexec sleep 600\n")
        (tmp_path / "p2pd").chmod(0o700)
        monkeypatch.setattr(libp2p_daemon.importlib.resources, "files", lambda _: tmp_path)
        task = asyncio.create_task(start_p2p(tmp_path / "id"))
        await until(lambda: bool(started))
    else:
        task = asyncio.create_task(stop_p2p(await start_p2p(tmp_path / "id")))
        await asyncio.sleep(0)  # else it never runs
    while not task.done():
        task.cancel()
        await asyncio.sleep(0)
    (daemon,) = started
    assert not daemon.folder.exists()
    async with asyncio.timeout(PATIENCE_S):
        await daemon.wait_exit()


async def test_daemon_has_our_identity_and_ends_with_us(tmp_path: Path) -> None:
    identity = Identity.load_or_create(tmp_path / "id")
    p2p = await start_p2p(tmp_path / "id")
    assert p2p.peer_id == identity.peer_id
    process = p2p.daemon.process
    ended = asyncio.create_task(wait_p2p_exit(p2p))
    await stop_p2p(p2p)
    await stop_p2p(p2p)
    assert await ended
    assert process.returncode is not None


def take_children(_number: int, _frame: object) -> None:
    """A program's own handler, which takes the exit status of any child."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


@pytest.mark.parametrize("taken_by", [signal.SIG_IGN, signal.SIG_DFL, take_children])
async def test_the_daemons_end_is_seen_whoever_takes_the_signal_of_children(
    taken_by: Any, tmp_path: Path
) -> None:
    Identity.load_or_create(tmp_path / "id")
    before = signal.getsignal(signal.SIGCHLD)
    p2p = await start_p2p(tmp_path / "id")
    try:
        assert signal.getsignal(signal.SIGCHLD) is before, "it is the program's"
        signal.signal(signal.SIGCHLD, taken_by)
        process = p2p.daemon.process
        os.kill(process.pid, signal.SIGKILL)
        async with asyncio.timeout(PATIENCE_S):
            assert await wait_p2p_exit(p2p)
            await stop_p2p(p2p)
            other = await start_p2p(tmp_path / "id")
            await stop_p2p(other)
    finally:
        signal.signal(signal.SIGCHLD, before)
        await stop_p2p(p2p)
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if "daemon" in name], names


async def test_a_dead_daemon_is_said(tmp_path: Path) -> None:
    async with open_pair("libp2p", tmp_path) as (a, b):
        p2p = a.carrier._p2p  # type: ignore[attr-defined]
        link = await a.carrier.connect(b.record)
        p2p.daemon.process.kill()
        assert await wait_p2p_exit(p2p)
        assert await link.wait_closed()
        with pytest.raises(TransportError, match="daemon of this process is gone"):
            await a.carrier.connect(b.record)


async def test_a_daemon_that_dies_or_hangs_comes_back_with_all_that_was_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libp2p_revival, "LOOK_EVERY_S", 0.05)
    async with open_pair("libp2p", tmp_path) as (a, b):
        ours, theirs = a.carrier._p2p, b.carrier._p2p  # type: ignore[attr-defined]
        await ours.add_protobuf_handler("echo", _echo, PeerRecord)
        revived: list[str] = []

        async def hear(words: str) -> None:
            monkeypatch.setattr(libp2p_revival, "ANSWER_WITHIN_S", 10.0)  # it lives: however slow it is
            revived.append(words)

        keeper = asyncio.create_task(keep_alive(ours, hear))
        before = [str(maddr) for maddr in await ours.get_visible_maddrs(latest=True)]
        link = await b.carrier.connect(a.record)
        unanswered = asyncio.create_task(
            ours.call_protobuf_handler(theirs.peer_id, "none", b.record, PeerRecord)
        )
        for killed, number in enumerate((signal.SIGKILL, signal.SIGSTOP), start=1):
            os.kill(ours.daemon.process.pid, number)
            monkeypatch.setattr(libp2p_revival, "ANSWER_WITHIN_S", 0.1)
            await until(lambda killed=killed: len(revived) == killed)
            assert ("no answer to 3 questions" in revived[-1]) == (number == signal.SIGSTOP)
            assert await link.wait_closed()
            assert [str(maddr) for maddr in await ours.get_visible_maddrs(latest=True)] == before
            link = await _connect_again(b, a)  # by the address that it had
            await link.send(b"%d" % killed)
            last = [(b.identity.peer_id, b"%d" % killed)]
            await until(lambda last=last: a.received[-1:] == last)
            async with asyncio.timeout(PATIENCE_S):
                echoed = await theirs.call_protobuf_handler(ours.peer_id, "echo", b.record, PeerRecord)
            assert echoed == b.record
            await (await _connect_again(a, b)).send(b"back")
            echoes = killed * [b"back"]
            await until(lambda echoes=echoes: [data for _, data in b.received] == echoes)
        with pytest.raises((ConnectionError, P2PDaemonError)):
            await unanswered
        await stop_p2p(ours)
        async with asyncio.timeout(PATIENCE_S):
            assert await keeper  # we stopped it ourselves: it is not brought back


async def test_a_daemon_that_cannot_live_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[bool] = []

    async def fail(p2p: object, any_port: bool) -> None:
        tries.append(any_port)
        raise EnvironmentFault("the port is in use")

    async def hear(words: str) -> None:
        raise AssertionError(words)

    monkeypatch.setattr(libp2p_revival, "revive", fail)
    monkeypatch.setattr(libp2p_revival, "FIRST_WAIT_S", 0.0)
    Identity.load_or_create(tmp_path / "id")
    p2p = await start_p2p(tmp_path / "id")
    try:
        p2p.daemon.process.kill()
        async with asyncio.timeout(PATIENCE_S):
            words = await keep_alive(p2p, hear)
        assert "the port is in use; 8 starts in a row" in words
        assert tries == 4 * [False] + 4 * [True]
    finally:
        await stop_p2p(p2p)


async def _connect_again(one: Peer, other: Peer) -> Link:
    """libp2p does not dial for some seconds after a failure."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                return await one.carrier.connect(other.record)
            except TransportError as error:
                if "dial backoff" not in str(error):
                    raise
            await asyncio.sleep(0.05)


async def _echo(request: PeerRecord, _: object) -> PeerRecord:
    return request


def test_litter_of_killed_processes_is_swept(own_tmp: Path) -> None:
    names = ("p2p-co2-live", "p2p-co2-dead", "p2p-co2-8letters", "p2p-co2-runs")
    live, dead, _, anothers = folders = [own_tmp / name for name in names]
    for folder in folders:
        folder.mkdir()
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(dead / "p2pd.sock"))
    with socket.socket(socket.AF_UNIX) as serving:
        serving.bind(str(live / "p2pd.sock"))
        serving.listen()
        libp2p_daemon.sweep()
        assert all(folder.exists() for folder in folders)  # too young to judge
        for path in (dead / "p2pd.sock", live / "p2pd.sock", *folders):
            os.utime(path, (0, 0))
        libp2p_daemon.sweep()
        assert [folder.exists() for folder in folders] == [True, False, False, True]
        os.unlink(live / "p2pd.sock")
    live.rmdir()
    anothers.rmdir()


def talking() -> subprocess.Popen[bytes]:
    """A process with another below it, which has its output too."""
    script = "sleep 600 & echo last words; exec sleep 600"
    return subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, bufsize=0, start_new_session=True)


async def test_a_daemons_end_is_seen_while_another_process_holds_its_output(tmp_path: Path) -> None:
    """As a child does that was forked at the moment of its start."""
    process = talking()
    try:
        daemon = libp2p_daemon.Daemon(process, tmp_path / "folder")
        await until(lambda: bool(daemon.output))
        async with asyncio.timeout(PATIENCE_S):
            await daemon.stop()
            assert await daemon.wait_exit() == "last words"
        assert process.returncode == -signal.SIGTERM
    finally:
        os.killpg(process.pid, signal.SIGKILL)


async def test_a_daemon_that_takes_no_more_questions_does_not_answer(tmp_path: Path) -> None:
    """One that hangs for long enough has a full queue: then the system refuses, instead of letting wait."""
    with socket.socket(socket.AF_UNIX) as daemon, socket.socket(socket.AF_UNIX) as waiting:
        daemon.bind(str(tmp_path / "control"))
        daemon.listen(0)
        waiting.connect(str(tmp_path / "control"))
        p2p = SimpleNamespace(daemon_listen_maddr={"unix": str(tmp_path / "control")})
        assert not await answers(p2p, PATIENCE_S)  # type: ignore[arg-type]
