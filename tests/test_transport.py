"""Both carriers over real sockets of this machine: the same laws and faults for both, and gRPC's own."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import random
import time
from pathlib import Path

import pytest

from p2p_co2.errors import (
    EnvironmentFault,
    LocalProtocolError,
    PeerLost,
    RemoteProtocolError,
    TransportError,
)
from p2p_co2.net.transport.admission import MAX_INBOUND_LINKS_PER_PEER
from p2p_co2.net.transport.base import Dials, Link
from p2p_co2.net.transport.grpc_carrier import (
    GrpcCarrier,
    fetch_certificate,
    make_certificate,
)
from p2p_co2.wire.identity import Identity, PeerId
from p2p_co2.wire.limits import MAX_MESSAGE_BYTES
from p2p_co2.wire.messages_pb2 import PeerRecord
from tests.transport_peers import BOTH, PATIENCE_S, RUN, open_pair, open_peer, until

# ---- laws


@BOTH
async def test_order_and_bytes_are_kept(kind: str, tmp_path: Path) -> None:
    rng = random.Random(0)
    sizes = [1, 2, MAX_MESSAGE_BYTES, *(rng.randrange(1, 2 ** rng.randrange(1, 18)) for _ in range(297))]
    messages = [rng.randbytes(size) for size in sizes]
    async with open_pair(kind, tmp_path) as (a, b):
        link = await a.carrier.connect(b.record)
        assert (link.peer, link.carrier) == (b.identity.peer_id, kind)
        for size in (0, MAX_MESSAGE_BYTES + 1):  # what no link may carry leaves it open
            with pytest.raises(LocalProtocolError):
                await link.send(bytes(size))
        await asyncio.gather(*(link.send(message) for message in messages))
        await link.close()
        assert b.received == [(a.identity.peer_id, message) for message in messages]
        assert await link.wait_closed() == "closed by us"
        with pytest.raises(PeerLost):
            await link.send(b"too late")
        assert not b.refused


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
        stood_at = -1
        while stood_at < sent <= 32:  # real sockets: the only sign of a stop is that nothing moves
            stood_at = sent
            await asyncio.sleep(0.5)
        assert sent <= 32
        b.gate.set()
        await flooding
        await link.close()
        assert len(b.received) == 64


@BOTH
async def test_nothing_is_left_after_close(kind: str, tmp_path: Path, own_tmp: Path) -> None:
    paths: set[str] = set()

    async def exercise() -> None:
        async with open_pair(kind, tmp_path) as (a, b):
            paths.update(_own_sockets())
            links = [await a.carrier.connect(b.record) for _ in range(3)]
            await links[0].send(b"x")
            await links[0].close()  # the other two are the carrier's to close
            await a.carrier.close()
            await a.carrier.close()

    await exercise()  # once for what the libraries open and keep
    files, tasks = _open_files(), len(asyncio.all_tasks())
    await exercise()
    gc.collect()
    await until(lambda: _open_files() <= files and len(asyncio.all_tasks()) <= tasks)
    assert bool(paths) == (kind == "libp2p")
    assert not list(filter(os.path.exists, paths))
    assert not os.listdir(own_tmp)


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def _own_sockets() -> set[str]:
    """Paths of the unix sockets that this process holds open."""
    held = set()
    for file in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            held.add(os.readlink(f"/proc/self/fd/{file}"))
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return {row[7] for row in rows if len(row) > 7 and f"socket:[{row[6]}]" in held}


# ---- faults


@BOTH
async def test_another_run_is_refused(kind: str, tmp_path: Path) -> None:
    async with open_peer(kind, tmp_path / "a", run=bytes(32)) as a, open_peer(kind, tmp_path / "b") as b:
        with pytest.raises(TransportError, match="other run"):
            await a.carrier.connect(b.record)
        assert b.reasons == ["other run"]
        assert not b.received


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
        async with asyncio.timeout(PATIENCE_S):  # the other side hears of it a moment later
            while True:
                with contextlib.suppress(TransportError):
                    await a.carrier.connect(b.record)
                    break
                await asyncio.sleep(0.05)


@BOTH
async def test_a_message_refused_above_ends_the_link(kind: str, tmp_path: Path) -> None:
    async with open_pair(kind, tmp_path) as (a, b):

        async def refuse(sender: PeerId, data: bytes) -> None:
            raise RemoteProtocolError("nonsense", data.decode())

        b.carrier.on_message = refuse
        link = await a.carrier.connect(b.record)
        await link.send(b"xyz")
        assert "nonsense: xyz" in await link.wait_closed()
        assert [(sender, str(error)) for sender, error in b.refused] == [
            (a.identity.peer_id, "nonsense: xyz")
        ]


@BOTH
async def test_who_is_refused_while_it_sends_learns_why(kind: str, tmp_path: Path) -> None:
    async with open_pair(kind, tmp_path) as (a, b):

        async def refuse(sender: PeerId, data: bytes) -> None:
            if data == b"last":
                raise RemoteProtocolError("too many messages", "")

        async def pour(link: Link) -> None:
            for data in itertools.chain([b"first"] * 200, itertools.repeat(b"last")):
                await link.send(data)

        b.carrier.on_message = refuse
        for _ in range(8):
            with pytest.raises(PeerLost, match="refused us: too many messages"):
                await pour(await a.carrier.connect(b.record))


def is_by_silence(cause: str) -> bool:
    """Whether a link ended because nothing was heard any more, and not because its end was seen."""
    return "silent" in cause or "keepalive" in cause


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
            await asyncio.sleep(0.3)  # until all buffers are full, as a rule
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(PeerLost) as lost:
                await flooding
        assert not is_by_silence(str(lost.value))


@BOTH
async def test_a_cancelled_connect_leaves_nothing(kind: str, tmp_path: Path) -> None:
    async with open_pair(kind, tmp_path) as (a, b):
        for delay_ms in (0, 1, 2, 4, 8):  # wherever it may be by then
            a.carrier.dials = Dials()  # as if a minute had passed
            connecting = asyncio.create_task(a.carrier.connect(b.record))
            await asyncio.sleep(delay_ms / 1000)
            if not connecting.cancel():
                await (await connecting).close()
            await asyncio.gather(connecting, return_exceptions=True)
        await until(lambda: not b.carrier.admission.links)
        assert not a.carrier.links


# ---- what gRPC has of its own: TLS, ports


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
            await fetch_certificate("127.0.0.1", port, bytes(32), PATIENCE_S)


def test_the_private_key_is_not_shown() -> None:
    certificate = make_certificate(time.time())
    assert "PRIVATE" not in f"{certificate!r} {certificate}"
