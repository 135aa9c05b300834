"""Both carriers over real sockets of this machine: the same laws for both, then what each has of its own."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import os
import random
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import grpc.aio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p_co2.errors import (
    ConfigError,
    EnvironmentFault,
    LocalProtocolError,
    PeerLost,
    RemoteProtocolError,
    TransportError,
)
from p2p_co2.transport import libp2p_carrier, libp2p_daemon
from p2p_co2.transport.base import Carrier
from p2p_co2.transport.door import MAX_INBOUND_LINKS, MAX_INBOUND_LINKS_PER_PEER, MAX_NONCES_PER_PEER, Door
from p2p_co2.transport.grpc_carrier import METHOD, GrpcCarrier
from p2p_co2.transport.libp2p_carrier import HEADER_BYTES, PROTOCOL, Libp2pCarrier
from p2p_co2.transport.libp2p_control import hang_up, open_stream, reach
from p2p_co2.transport.libp2p_daemon import start_p2p, stop_p2p, wait_p2p_exit
from p2p_co2.transport.tls import TARGET_NAME, fetch_certificate, make_certificate
from p2p_co2.wire.identity import Identity, PeerId
from p2p_co2.wire.limits import HELLO_WINDOW_S, MAX_MESSAGE_BYTES
from p2p_co2.wire.messages_pb2 import PeerRecord

RUN = hashlib.sha256(b"a run").digest()
BOTH = pytest.mark.parametrize("kind", ["grpc", "libp2p"])


@dataclass
class Peer:
    """One carrier and what came in through it."""

    identity: Identity
    carrier: Carrier
    record: PeerRecord
    received: list[tuple[PeerId, bytes]] = field(default_factory=list)
    refused: list[tuple[PeerId | None, RemoteProtocolError]] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    """The receiver takes nothing while this is clear."""

    async def on_message(self, sender: PeerId, data: bytes) -> None:
        await self.gate.wait()
        self.received.append((sender, data))

    def on_refused(self, sender: PeerId | None, error: RemoteProtocolError) -> None:
        self.refused.append((sender, error))

    @property
    def reasons(self) -> list[str]:
        return [error.reason for _, error in self.refused]


@asynccontextmanager
async def open_peer(
    kind: str, folder: Path, *, run: bytes = RUN, ahead_s: float = 0.0
) -> AsyncIterator[Peer]:
    os.makedirs(folder, exist_ok=True)
    identity = Identity.load_or_create(folder / "identity.key")
    record = PeerRecord(peer=identity.peer_id, run=run)

    def clock() -> float:
        return time.time() + ahead_s

    carrier: Carrier
    if kind == "grpc":
        carrier = GrpcCarrier(identity, run, "127.0.0.1", 0, clock)
        peer = Peer(identity, carrier, record)
        await carrier.start(peer.on_message, peer.on_refused)
        record.grpc_addresses.append(f"127.0.0.1:{carrier.port}")
        record.certificate_digest = carrier.certificate_digest
        p2p = None
    else:
        p2p = await start_p2p(folder / "identity.key")
        carrier = Libp2pCarrier(p2p, identity, run, clock)
        peer = Peer(identity, carrier, record)
        await carrier.start(peer.on_message, peer.on_refused)
        record.maddrs.extend(str(maddr) for maddr in await p2p.get_visible_maddrs())
    peer.gate.set()
    try:
        yield peer
    finally:
        await carrier.close()
        if p2p is not None:
            await stop_p2p(p2p)


@asynccontextmanager
async def open_pair(kind: str, folder: Path) -> AsyncIterator[tuple[Peer, Peer]]:
    async with open_peer(kind, folder / "a") as a, open_peer(kind, folder / "b") as b:
        yield a, b


async def until(condition: Callable[[], bool], within_s: float = 2.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 (sockets and processes set no event)
            await asyncio.sleep(0.005)


# ---- by hand


@BOTH
async def test_one_message_arrives_with_its_sender(kind: str, tmp_path: Path) -> None:
    async with open_pair(kind, tmp_path) as (a, b):
        link = await a.carrier.connect(b.record)
        assert (link.peer, link.carrier) == (b.identity.peer_id, kind)
        await link.send(b"hello")
        await link.close()
        assert b.received == [(a.identity.peer_id, b"hello")]
        assert await link.wait_closed() == "closed by us"
        with pytest.raises(PeerLost):
            await link.send(b"too late")


# ---- laws


@BOTH
async def test_order_and_bytes_are_kept(kind: str, tmp_path: Path) -> None:
    rng = random.Random(0)
    sizes = [1, 2, MAX_MESSAGE_BYTES, *(rng.randrange(1, 2 ** rng.randrange(1, 18)) for _ in range(297))]
    messages = [rng.randbytes(size) for size in sizes]
    async with open_pair(kind, tmp_path) as (a, b):
        link = await a.carrier.connect(b.record)
        await asyncio.gather(*(link.send(message) for message in messages))
        await link.close()
        assert [data for _, data in b.received] == messages


@BOTH
async def test_both_directions_at_once(kind: str, tmp_path: Path) -> None:
    async with open_pair(kind, tmp_path) as (a, b):
        there, back = await asyncio.gather(a.carrier.connect(b.record), b.carrier.connect(a.record))
        await asyncio.gather(*(link.send(bytes([i])) for i in range(50) for link in (there, back)))
        await asyncio.gather(there.close(), back.close())
        assert [data[0] for _, data in a.received] == [data[0] for _, data in b.received] == list(range(50))


@BOTH
async def test_a_slow_receiver_stops_the_sender(kind: str, tmp_path: Path) -> None:
    async with open_pair(kind, tmp_path) as (a, b):
        link = await a.carrier.connect(b.record)
        b.gate.clear()
        sent = 0

        async def flood() -> None:
            nonlocal sent
            for _ in range(64):
                await link.send(bytes(MAX_MESSAGE_BYTES))
                sent += 1

        flooding = asyncio.create_task(flood())
        await asyncio.sleep(0.7)  # real sockets: the only sign of a stop is that nothing moves
        stopped_at = sent
        await asyncio.sleep(0.2)
        assert sent == stopped_at <= 32
        b.gate.set()
        await flooding
        await link.close()
        assert len(b.received) == 64


@BOTH
async def test_what_no_link_may_carry(kind: str, tmp_path: Path) -> None:
    async with open_pair(kind, tmp_path) as (a, b):
        link = await a.carrier.connect(b.record)
        with pytest.raises(LocalProtocolError):
            await link.send(bytes(MAX_MESSAGE_BYTES + 1))
        with pytest.raises(LocalProtocolError):
            await link.send(b"")
        await link.send(b"still open")
        await link.close()
        assert len(b.received) == 1
        assert not b.refused


@BOTH
async def test_nothing_is_left_after_close(kind: str, tmp_path: Path, own_tmp: Path) -> None:
    async def exercise() -> None:
        async with open_pair(kind, tmp_path) as (a, b):
            links = [await a.carrier.connect(b.record) for _ in range(3)]
            await links[0].send(b"x")
            await links[0].close()  # the other two are the carrier's to close
            await a.carrier.close()
            await a.carrier.close()

    await exercise()  # once for what the libraries open and keep
    files, tasks, dead = _open_files(), len(asyncio.all_tasks()), _dead_sockets()
    await exercise()
    gc.collect()
    await until(lambda: _open_files() <= files and len(asyncio.all_tasks()) <= tasks)
    assert _dead_sockets() <= dead
    assert not os.listdir(own_tmp)


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def _dead_sockets() -> set[str]:
    """Sockets of hivemind in /tmp that nobody serves any more."""
    dead = set()
    for path in Path("/tmp").glob("hivemind-p2p*.sock"):
        with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(FileNotFoundError):
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                dead.add(path.name)
    return dead


@pytest.fixture
def own_tmp(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short temporary folder (unix sockets allow no long paths) that must be empty in the end."""
    folder = Path(tempfile.mkdtemp(prefix="t-"))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    folder.rmdir()


# ---- faults, both carriers


@BOTH
async def test_another_run_is_refused(kind: str, tmp_path: Path) -> None:
    async with open_peer(kind, tmp_path / "a", run=bytes(32)) as a, open_peer(kind, tmp_path / "b") as b:
        with pytest.raises(TransportError, match="other run"):
            await a.carrier.connect(b.record)
        assert b.reasons == ["other run"]
        assert not b.received


@BOTH
async def test_a_wrong_clock_is_refused_in_words(kind: str, tmp_path: Path) -> None:
    async with open_peer(kind, tmp_path / "a", ahead_s=-600) as a, open_peer(kind, tmp_path / "b") as b:
        with pytest.raises(TransportError, match="clock"):
            await a.carrier.connect(b.record)


@BOTH
async def test_nobody_there(kind: str, tmp_path: Path) -> None:
    async with open_peer(kind, tmp_path / "a") as a:
        async with open_peer(kind, tmp_path / "b") as b:
            record = b.record
        with pytest.raises(TransportError, match=r"refused|dial"):
            await a.carrier.connect(record)
        with pytest.raises(TransportError):
            await a.carrier.connect(PeerRecord(peer="nonsense", maddrs=["/x"], grpc_addresses=["x"]))


@BOTH
async def test_one_peer_holds_a_bounded_number_of_links(kind: str, tmp_path: Path) -> None:
    async with open_pair(kind, tmp_path) as (a, b):
        links = [await a.carrier.connect(b.record) for _ in range(MAX_INBOUND_LINKS_PER_PEER)]
        with pytest.raises(TransportError, match="too many links"):
            await a.carrier.connect(b.record)
        await links[0].close()
        await a.carrier.connect(b.record)


@BOTH
async def test_a_message_refused_above_ends_the_link(kind: str, tmp_path: Path) -> None:
    async with open_pair(kind, tmp_path) as (a, b):

        async def refuse(sender: PeerId, data: bytes) -> None:
            raise RemoteProtocolError("nonsense", data.decode())

        b.carrier._on_message = refuse  # type: ignore[attr-defined]
        link = await a.carrier.connect(b.record)
        await link.send(b"xyz")
        assert "nonsense: xyz" in await link.wait_closed()
        assert [(sender, str(error)) for sender, error in b.refused] == [
            (a.identity.peer_id, "nonsense: xyz")
        ]


@BOTH
async def test_a_closed_peer_is_noticed_while_idle(kind: str, tmp_path: Path) -> None:
    async with open_peer(kind, tmp_path / "a") as a:
        async with open_peer(kind, tmp_path / "b") as b:
            link = await a.carrier.connect(b.record)
        async with asyncio.timeout(2):
            await link.wait_closed()
        with pytest.raises(PeerLost):
            await link.send(b"x")


@BOTH
async def test_a_sender_that_waits_for_room_learns_of_the_death(kind: str, tmp_path: Path) -> None:
    async with open_peer(kind, tmp_path / "a") as a:
        async with open_peer(kind, tmp_path / "b") as b:
            link = await a.carrier.connect(b.record)
            b.gate.clear()

            async def flood() -> None:
                while True:
                    await link.send(bytes(MAX_MESSAGE_BYTES))

            flooding = asyncio.create_task(flood())
            await asyncio.sleep(0.3)  # until all buffers are full
        async with asyncio.timeout(2):
            with pytest.raises(PeerLost):
                await flooding


@BOTH
async def test_a_cancelled_connect_leaves_nothing(kind: str, tmp_path: Path) -> None:
    async with open_pair(kind, tmp_path) as (a, b):
        for delay_ms in (0, 1, 2, 4, 8):  # wherever it may be by then
            connecting = asyncio.create_task(a.carrier.connect(b.record))
            await asyncio.sleep(delay_ms / 1000)
            if not connecting.cancel():
                await (await connecting).close()
            await asyncio.gather(connecting, return_exceptions=True)
        await until(lambda: not b.carrier._door._inside)  # type: ignore[attr-defined]
        assert not a.carrier._links  # type: ignore[attr-defined]


@BOTH
async def test_an_inbound_link_ends_with_its_peer(kind: str, tmp_path: Path) -> None:
    async with open_peer(kind, tmp_path / "b") as b:
        for _ in range(MAX_INBOUND_LINKS_PER_PEER + 1):  # a link that were kept would count against the bound
            async with open_peer(kind, tmp_path / "a") as a:
                link = await a.carrier.connect(b.record)
                await link.drop("without a goodbye")  # type: ignore[attr-defined]
            await until(lambda: not b.carrier._door._inside)  # type: ignore[attr-defined]


_CHILD = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_transport import open_peer
async def main():
    async with open_peer({kind!r}, Path({folder!r})) as peer:
        print(peer.record.SerializeToString().hex(), flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""


@pytest.mark.swarm
@BOTH
async def test_a_killed_process_is_noticed_while_idle(kind: str, tmp_path: Path) -> None:
    code = _CHILD.format(tests=str(Path(__file__).parent), kind=kind, folder=str(tmp_path / "b"))
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    try:
        assert child.stdout is not None
        record = PeerRecord.FromString(bytes.fromhex((await child.stdout.readline()).decode()))
        async with open_peer(kind, tmp_path / "a") as a:
            link = await a.carrier.connect(record)
            await link.send(b"x")
            child.send_signal(signal.SIGKILL)
            async with asyncio.timeout(5):
                assert await link.wait_closed()
    finally:
        if child.returncode is None:
            child.kill()
        await child.communicate()


# ---- faults, gRPC only: a hostile client that speaks gRPC by hand


@asynccontextmanager
async def raw_grpc(b: Peer) -> AsyncIterator[grpc.aio.StreamUnaryCall]:
    """A call to ``b`` that sends what it likes."""
    carrier = b.carrier
    assert isinstance(carrier, GrpcCarrier)
    pem = await fetch_certificate("127.0.0.1", carrier.port, carrier.certificate_digest, 2)
    options = [("grpc.ssl_target_name_override", TARGET_NAME)]
    credentials = grpc.ssl_channel_credentials(root_certificates=pem)
    async with grpc.aio.secure_channel(f"127.0.0.1:{carrier.port}", credentials, options=options) as channel:
        call = channel.stream_unary(METHOD)()
        yield call
        call.cancel()


def hello_for(
    b: Peer, *, to: PeerId | None = None, digest: bytes | None = None, at: float | None = None
) -> bytes:
    door = Door(Identity.generate(), RUN, lambda: time.time() if at is None else at)
    return door.hello(to or b.identity.peer_id, b.record.certificate_digest if digest is None else digest)


async def test_grpc_refuses_hostile_hellos(tmp_path: Path) -> None:
    async with open_peer("grpc", tmp_path / "b") as b:
        forged = bytearray(hello_for(b))
        forged[-1] ^= 1
        for hello, reason in (
            (bytes(forged), "wrong signature"),
            (hello_for(b, to=Identity.generate().peer_id), "wrong addressee"),
            (hello_for(b, digest=bytes(32)), "other certificate"),
            (hello_for(b, at=time.time() - 1.1 * HELLO_WINDOW_S), "stale hello"),
            (b"GET / HTTP/1.1", "unreadable"),
            (bytes(2000), "wrong hello"),
        ):
            async with raw_grpc(b) as call:
                await call.write(hello)
                assert await call.code() is grpc.StatusCode.PERMISSION_DENIED
                assert (await call.details()).startswith(reason)
            assert b.reasons[-1] == reason
        assert all(sender is None for sender, _ in b.refused)
        assert not b.received


async def test_grpc_refuses_a_replayed_hello(tmp_path: Path) -> None:
    async with open_peer("grpc", tmp_path / "b") as b:
        hello = hello_for(b)
        async with raw_grpc(b) as call:
            await call.write(hello)
            await call.initial_metadata()
            async with raw_grpc(b) as again:
                await again.write(hello)
                assert await again.code() is grpc.StatusCode.PERMISSION_DENIED
        assert b.reasons == ["replayed hello"]


@pytest.mark.parametrize("size", [0, MAX_MESSAGE_BYTES + 1])
async def test_grpc_refuses_a_message_of_wrong_size(size: int, tmp_path: Path) -> None:
    async with open_peer("grpc", tmp_path / "b") as b, raw_grpc(b) as call:
        await call.write(hello_for(b))
        await call.write(bytes(size))
        assert await call.code() is grpc.StatusCode.PERMISSION_DENIED
        ((sender, error),) = b.refused
        assert sender is not None
        assert error.reason == "wrong message size"
        assert not b.received


async def test_grpc_drops_a_huge_message_unread(tmp_path: Path) -> None:
    async with open_peer("grpc", tmp_path / "b") as b, raw_grpc(b) as call:
        await call.write(hello_for(b))
        await call.write(bytes(3 * MAX_MESSAGE_BYTES))
        assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert not b.received


async def test_grpc_talks_only_to_the_certificate_in_the_record(tmp_path: Path) -> None:
    async with open_pair("grpc", tmp_path) as (a, b):
        b.record.certificate_digest = bytes(32)
        with pytest.raises(TransportError, match="another certificate"):
            await a.carrier.connect(b.record)


async def test_grpc_port_in_use(tmp_path: Path) -> None:
    async with open_peer("grpc", tmp_path / "a") as a:
        assert isinstance(a.carrier, GrpcCarrier)
        second = GrpcCarrier(Identity.generate(), RUN, "127.0.0.1", a.carrier.port)
        with pytest.raises(EnvironmentFault, match="grpc_port"):
            await second.start(a.on_message, a.on_refused)


async def test_no_tls_there() -> None:
    async def talk(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.example.org ready\r\n")
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(TransportError, match="TLS"):
            await fetch_certificate("127.0.0.1", port, bytes(32), 2)


def test_the_private_key_is_not_shown() -> None:
    certificate = make_certificate(time.time())
    assert "PRIVATE" not in f"{certificate!r} {certificate}"


# ---- faults, libp2p only: a hostile client that writes raw frames


async def test_libp2p_refuses_hostile_frames(tmp_path: Path) -> None:
    async with open_pair("libp2p", tmp_path) as (a, b):
        p2p = a.carrier._p2p  # type: ignore[attr-defined]
        door = Door(a.identity, RUN, time.time)
        hello = door.hello(b.identity.peer_id, b"")
        somebody = Door(Identity.generate(), RUN, time.time).hello(b.identity.peer_id, b"")
        too_long = (MAX_MESSAGE_BYTES + 1).to_bytes(HEADER_BYTES)
        await reach(p2p, b.identity.peer_id, b.record.maddrs, 2)
        for raw, reason in (
            (frame(hello) + too_long, "wrong message size"),
            (frame(hello), "replayed hello"),
            (frame(somebody), "wrong hello"),
            (b"\xff\xff\xff\xff", "wrong hello"),
            (b"GET / HTTP/1.1", "wrong hello"),
        ):
            reader, writer = await open_stream(p2p, b.identity.peer_id, PROTOCOL, 2)
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
    monkeypatch.setattr(libp2p_carrier, "HEARTBEAT_S", 0.02)
    monkeypatch.setattr(libp2p_carrier, "SILENCE_S", 0.4)
    async with open_pair("libp2p", tmp_path) as (a, b):
        link = await a.carrier.connect(b.record)
        b.gate.clear()
        await link.send(b"worked on for long")
        await asyncio.sleep(0.6)
        b.gate.set()
        await link.send(b"still open")
        await until(lambda: len(b.received) == 2)
        monkeypatch.setattr(libp2p_carrier, "HEARTBEAT_S", 60.0)
        async with asyncio.timeout(2):
            assert "silent" in await link.wait_closed()


def frame(data: bytes) -> bytes:
    return len(data).to_bytes(HEADER_BYTES) + data


# ---- the door, without a network


class Clock:
    def __init__(self) -> None:
        self.now = 1e9

    def __call__(self) -> float:
        return self.now


def test_the_door_admits_once_and_forgets_in_time() -> None:
    clock, us, them = Clock(), Identity.generate(), Identity.generate()
    door, other = Door(us, RUN, clock), Door(them, RUN, clock)
    hello = other.hello(us.peer_id, b"c")
    assert door.admit(hello, b"c") == them.peer_id
    clock.now += HELLO_WINDOW_S
    with pytest.raises(RemoteProtocolError, match="replayed"):
        door.admit(hello, b"c")
    clock.now += 1
    with pytest.raises(RemoteProtocolError, match="stale"):
        door.admit(hello, b"c")
    clock.now += 2 * HELLO_WINDOW_S
    door.admit(other.hello(us.peer_id, b"c"), b"c")
    assert len(door._nonces) == 1


def test_the_door_bounds_what_it_remembers(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, us, them = Clock(), Identity.generate(), Identity.generate()
    door, other = Door(us, RUN, clock), Door(them, RUN, clock)
    for _ in range(MAX_NONCES_PER_PEER):
        door.leave(door.admit(other.hello(us.peer_id, b""), b""))
    with pytest.raises(RemoteProtocolError, match="too often"):
        door.admit(other.hello(us.peer_id, b""), b"")
    assert not door._inside
    for _ in range(MAX_INBOUND_LINKS):
        door.knock()
    with pytest.raises(RemoteProtocolError, match="too many links"):
        door.knock()


@given(st.binary(max_size=200))
def test_the_door_survives_any_bytes(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        Door(Identity.generate(), RUN, Clock()).admit(data, b"")


# ---- the libp2p daemon


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


async def test_a_dead_daemon_is_said(tmp_path: Path) -> None:
    async with open_pair("libp2p", tmp_path) as (a, b):
        p2p = a.carrier._p2p  # type: ignore[attr-defined]
        link = await a.carrier.connect(b.record)
        p2p.daemon.process.kill()
        assert await wait_p2p_exit(p2p)
        assert await link.wait_closed()
        with pytest.raises(TransportError, match="daemon of this process is gone"):
            await a.carrier.connect(b.record)


def test_litter_of_killed_processes_is_swept(own_tmp: Path) -> None:
    live, dead = own_tmp / "p2p-co2-live", own_tmp / "p2p-co2-dead"
    for folder in (live, dead):
        folder.mkdir()
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(dead / "p2pd.sock"))
    with socket.socket(socket.AF_UNIX) as serving:
        serving.bind(str(live / "p2pd.sock"))
        serving.listen()
        libp2p_daemon.sweep()
        assert dead.exists()  # too young to judge
        libp2p_daemon.sweep(older_than_s=-1.0)
        assert not dead.exists()
        assert live.exists()
        os.unlink(live / "p2pd.sock")
    live.rmdir()
