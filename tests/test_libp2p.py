"""libp2p: a hostile client that writes raw frames, silence, the daemon, relays, and links that move."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from p2p_co2.config import PeerConfig
from p2p_co2.errors import ConfigError, EnvironmentFault, PeerLost, TransportError
from p2p_co2.net.transport.base import Link
from p2p_co2.net.transport.libp2p import carrier as carrier_room
from p2p_co2.net.transport.libp2p import daemon as daemon_room
from p2p_co2.net.transport.libp2p import relay as relay_room
from p2p_co2.net.transport.libp2p.carrier import (
    LOOKS_BEFORE,
    Libp2pCarrier,
    Libp2pLink,
    LinkUpgrades,
    Receipt,
)
from p2p_co2.net.transport.libp2p.control import (
    Stream,
    hang_up,
    open_stream,
    reach,
)
from p2p_co2.net.transport.libp2p.daemon import keep_alive, start_p2p, stop_p2p
from p2p_co2.net.transport.libp2p.hivemind import P2P, P2PDaemonError
from p2p_co2.net.transport.libp2p.relay import Places, ask_for_place, start_relay
from p2p_co2.wire.identity import Identity, PeerId
from p2p_co2.wire.messages_pb2 import CircuitHop, CircuitLimit, PeerRecord
from peers.daemon import what_is_opened
from tests.transport_peers import PATIENCE_S, Peer, free_port, open_daemon, open_pair, until

ROOT = Path(__file__).resolve().parent.parent


async def test_libp2p_notices_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silence_s = 4.0  # a machine under load may stand still for two
    async with open_pair("libp2p", tmp_path) as (a, b):
        monkeypatch.setattr(carrier_room, "CONNECT_TIMEOUT_S", silence_s / 2)
        link = await a.carrier.connect(b.record)
        b.gate.clear()
        await link.send(b"worked on for long")
        await asyncio.sleep(1.2 * silence_s)
        b.gate.set()
        await link.send(b"still open")
        await until(lambda: len(b.received) == 2)
        monkeypatch.setattr(carrier_room, "_answer", lambda *_: None)
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
        monkeypatch.setattr(Receipt, "came", lambda receipt, size: setattr(receipt, "came_bytes", 1))
        monkeypatch.setattr(carrier_room, "CONNECT_TIMEOUT_S", 1.0)
        liar = await a.carrier.connect(b.record)
        await liar.send(b"x")
        await until(lambda: liar.acknowledged.arrived_bytes == 1)
        monkeypatch.setattr(Receipt, "came", lambda receipt, size: setattr(receipt, "came_bytes", 9))
        await liar.send(b"x")
        async with asyncio.timeout(PATIENCE_S):
            assert "answers nonsense: wrong acknowledgement" in await liar.wait_closed()


def test_finding_peers_takes_no_torch_and_the_rest_of_hivemind_is_there_for_who_asks() -> None:
    script = (
        "import sys\nimport p2p_co2.node.reporting, bootstrap.seed, p2p_co2.net.transport.libp2p.relay\n"
        "print(sorted({'torch', 'numpy', 'scipy'} & set(sys.modules)))\n"
        "import hivemind\nfrom p2p_co2.net.transport.libp2p.hivemind import P2P, DHTNode, MSGPackSerializer\n"
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


async def test_daemon_faults_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Identity.load_or_create(tmp_path / "id")
    async with await asyncio.start_server(lambda *_: None, "127.0.0.1", 0) as server:
        with pytest.raises(EnvironmentFault, match=r"port \d+ is in use; choose another.*--libp2p-port"):
            await start_p2p(tmp_path / "id", port=server.sockets[0].getsockname()[1])
    with pytest.raises(EnvironmentFault, match=r"not this machine's.*\(host\)"):
        await start_p2p(tmp_path / "id", "192.0.2.1")
    with pytest.raises(ConfigError, match="no IP address"):
        await start_p2p(tmp_path / "id", "nowhere")
    with pytest.raises(ConfigError, match="--port to a seed, --libp2p-port to a peer"):
        await start_p2p(tmp_path / "id", announce_host="example.org")
    (tmp_path / "damaged").write_bytes(b"not a key")
    with pytest.raises(EnvironmentFault, match="identity file"):
        await start_p2p(tmp_path / "damaged")
    for content, fix in ((None, "reinstall"), (b"\x7fELF not for us", "another processor")):
        binary = tmp_path / "p2pd"
        if content is not None:
            binary.write_bytes(content)
            binary.chmod(0o700)
        monkeypatch.setattr(daemon_room.importlib.resources, "files", lambda _: tmp_path)
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
    monkeypatch.setattr(daemon_room.importlib.resources, "files", lambda _: tmp_path)
    with pytest.raises(EnvironmentFault, match="very busy"):
        await start_p2p(tmp_path / "id", startup_timeout_s=0.05)


def take_children(_number: int, _frame: object) -> None:
    """A program's own handler, which takes the exit status of any child."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


@pytest.mark.parametrize("taken_by", [signal.SIG_IGN, signal.SIG_DFL, take_children])
async def test_the_daemons_end_is_seen_whoever_takes_the_signal_of_children(
    taken_by: Any, tmp_path: Path
) -> None:
    identity = Identity.load_or_create(tmp_path / "id")
    before = signal.getsignal(signal.SIGCHLD)
    p2p = await start_p2p(tmp_path / "id")
    try:
        assert p2p.peer_id == identity.peer_id
        assert signal.getsignal(signal.SIGCHLD) is before, "it is the program's"
        signal.signal(signal.SIGCHLD, taken_by)
        process = p2p.daemon.process
        os.kill(process.pid, signal.SIGKILL)
        async with asyncio.timeout(PATIENCE_S):
            assert await p2p.daemon.wait_exit()
            await stop_p2p(p2p)
            other = await start_p2p(tmp_path / "id")
            ended = asyncio.create_task(other.daemon.wait_exit())
            await stop_p2p(other)
            assert await ended
    finally:
        signal.signal(signal.SIGCHLD, before)
        await stop_p2p(p2p)
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if "daemon" in name], names


async def test_a_daemon_that_dies_comes_back_with_all_that_was_served(tmp_path: Path) -> None:
    async with open_pair("libp2p", tmp_path) as (a, b):
        assert isinstance(a.carrier, Libp2pCarrier)
        assert isinstance(b.carrier, Libp2pCarrier)
        ours, theirs = a.carrier.p2p, b.carrier.p2p
        await ours.add_protobuf_handler("echo", _echo, PeerRecord)
        revived: list[str] = []

        async def hear(words: str) -> None:
            revived.append(words)

        keeper = asyncio.create_task(keep_alive(ours, hear))
        before = [str(maddr) for maddr in await ours.get_visible_maddrs(latest=True)]
        link = await b.carrier.connect(a.record)
        unanswered = asyncio.create_task(
            ours.call_protobuf_handler(theirs.peer_id, "none", b.record, PeerRecord)
        )
        os.kill(ours.daemon.process.pid, signal.SIGKILL)
        await until(lambda: bool(revived))
        assert await link.wait_closed()
        assert [str(maddr) for maddr in await ours.get_visible_maddrs(latest=True)] == before
        link = await _connect_again(b, a)  # by the address that it had
        await link.send(b"again")
        await until(lambda: a.received == [(b.identity.peer_id, b"again")])
        async with asyncio.timeout(PATIENCE_S):
            assert await theirs.call_protobuf_handler(ours.peer_id, "echo", b.record, PeerRecord) == b.record
        await (await _connect_again(a, b)).send(b"back")
        await until(lambda: [data for _, data in b.received] == [b"back"])
        with pytest.raises((ConnectionError, P2PDaemonError)):
            await unanswered
        await stop_p2p(ours)
        async with asyncio.timeout(PATIENCE_S):
            assert await keeper  # we stopped it ourselves: it is not brought back


async def test_a_daemon_that_cannot_live_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[object] = []

    async def fail(p2p: object) -> None:
        tries.append(p2p)
        raise EnvironmentFault("the port is in use")

    async def hear(words: str) -> None:
        raise AssertionError(words)

    monkeypatch.setattr(daemon_room, "_revive", fail)
    monkeypatch.setattr(daemon_room, "TRIES", 2)
    Identity.load_or_create(tmp_path / "id")
    p2p = await start_p2p(tmp_path / "id")
    try:
        p2p.daemon.process.kill()
        async with asyncio.timeout(PATIENCE_S):
            words = await keep_alive(p2p, hear)
        assert "the port is in use; 2 starts in a row" in words
        assert len(tries) == 2
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


A, B = PeerId("a"), PeerId("b")
DIRECT, PUBLIC = "/ip4/203.0.113.7/tcp/4001", "/ip4/203.0.113.8/tcp/4001/p2p/b"
BY_SEED = "/ip4/203.0.113.9/tcp/31337/p2p/seed/p2p-circuit/p2p/b"


def test_a_router_is_asked_to_let_others_in_and_strangers_are_relayed_for_unless_told_not_to() -> None:
    def arguments(host: str, relay: bool = True, upnp: bool = True) -> list[str]:
        return daemon_room._arguments(Path("identity"), host, 0, "", False, relay, upnp)

    assert "-natPortMap" in arguments("0.0.0.0")
    assert "-natPortMap" not in arguments("0.0.0.0", upnp=False)
    assert "-natPortMap" not in arguments("127.0.0.1")
    assert "-relayService=false" in arguments("0.0.0.0", relay=False)


@pytest.mark.parametrize(
    ("settings", "says", "not_says"),
    [
        ({}, ("--no-upnp", "--no-relay"), ()),
        ({"upnp": False}, ("--no-relay",), ("--no-upnp",)),
        ({"relay": False}, ("--no-upnp",), ("--no-relay",)),
        ({"upnp": False, "relay": False}, (), ("this peer",)),
        ({"host": "127.0.0.1"}, (), ("this peer",)),
    ],
)
def test_a_volunteer_is_told_what_his_network_does_for_others(
    settings: dict[str, Any], says: tuple[str, ...], not_says: tuple[str, ...]
) -> None:
    told = what_is_opened(PeerConfig.model_validate({"host": "0.0.0.0", **settings}))
    assert all(word in told for word in says)
    assert not any(word in told for word in not_says)


@asynccontextmanager
async def seed(folder: Path, relay: bool) -> AsyncIterator[str]:
    """Its multiaddr."""
    port, host, path = free_port(), "127.0.0.1", folder / "identity"
    os.makedirs(folder)
    identity = Identity.load_or_create(path)
    if relay:
        p2p = await start_relay(path, host, port, host)
    else:
        p2p = await start_p2p(path, host, port, announce_host=host, public=True, relay=False)
    try:
        yield f"/ip4/{host}/tcp/{port}/p2p/{identity.peer_id}"
    finally:
        await stop_p2p(p2p)


async def test_two_that_nobody_dials_meet_at_a_seed(tmp_path: Path) -> None:
    """And the relay is the one without libp2p's limit of 128 KiB per circuit."""
    async with (
        asyncio.timeout(2 * PATIENCE_S),
        seed(tmp_path / "seed", relay=True) as maddr,
        open_daemon(tmp_path / "a") as (a, _),
        open_daemon(tmp_path / "b") as (b, identity),
    ):
        b_id = identity.peer_id
        places = Places(b, b_id, [maddr])
        await places.renew()
        (place,) = places.held
        assert places.trouble == ""
        assert place == f"{maddr}/p2p-circuit/p2p/{b_id}"

        async def echo(_: object, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(await reader.readexactly(1 << 20))
            await writer.drain()
            await reader.read()  # until the other end hangs up
            await hang_up(writer)

        await b.add_binary_stream_handler("/echo", echo)
        await reach(a, b_id, [place], PATIENCE_S)
        reader, writer, _ = await open_stream(a, b_id, "/echo", PATIENCE_S)
        writer.write(bytes(range(256)) * 4096)
        assert await reader.readexactly(1 << 20) == bytes(range(256)) * 4096
        await hang_up(writer)


async def test_a_seed_whose_small_relay_has_won_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [TransportError("passes on only 128 KiB at a time"), None]
    started: list[Path] = []

    async def ask(*_: object) -> None:
        if (answer := answers.pop(0)) is not None:
            raise answer

    async def start(identity_path: Path, *arguments: Any, **options: Any) -> P2P:
        started.append(identity_path)
        return await start_p2p(identity_path, *arguments, **options)

    monkeypatch.setattr(relay_room, "ask_for_place", ask)
    monkeypatch.setattr(relay_room, "start_p2p", start)
    identity = Identity.load_or_create(tmp_path / "identity")
    p2p = await start_relay(tmp_path / "identity", "127.0.0.1", free_port(), "127.0.0.1")
    try:
        assert started.count(tmp_path / "identity") == 2
        assert not answers
        assert p2p.peer_id.to_base58() == identity.peer_id
        assert not p2p.daemon.has_ended
    finally:
        await stop_p2p(p2p)
    assert [path.parent.exists() for path in started] == [True, False, True, False]


async def test_a_seed_may_decline_to_relay(tmp_path: Path) -> None:
    async with (
        asyncio.timeout(2 * PATIENCE_S),
        seed(tmp_path / "seed", relay=False) as maddr,
        open_daemon(tmp_path / "a") as (a, identity),
    ):
        seeds = [maddr, f"/ip4/127.0.0.1/tcp/9/p2p/{Identity.generate().peer_id}"]
        places = Places(a, identity.peer_id, seeds)
        await places.renew()
        assert places.held == ()
        relay, dead = (f"{address.rpartition('/p2p/')[0]}: " for address in seeds)
        assert relay in places.trouble
        assert dead in places.trouble


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (CircuitHop(type=2, status=200), "does not relay for us .status 200"),
        (CircuitHop(type=1, status=100), "does not relay for us"),
        (CircuitHop(type=2, status=100, limit=CircuitLimit(data_bytes=128 << 10)), "only 128 KiB at a time"),
        (b"\x05\xff\xff\xff\xff\xff", "nonsense"),
        (b"\xff\xff\x7f", "too large"),
        (b"\x7f", "hung up"),
    ],
)
async def test_a_relay_is_not_believed(
    monkeypatch: pytest.MonkeyPatch, answer: CircuitHop | bytes, problem: str
) -> None:
    raw = answer
    if isinstance(answer, CircuitHop):
        raw = bytes((len(answer.SerializeToString()),)) + answer.SerializeToString()
    ours, liar = socket.socketpair()

    async def stream(*_: object) -> Stream:
        return Stream(*await asyncio.open_connection(sock=ours))

    async def reached(*_: object) -> None:
        return None

    monkeypatch.setattr(relay_room, "reach", reached)
    monkeypatch.setattr(relay_room, "open_stream", stream)
    with liar:
        liar.sendall(raw)
        liar.shutdown(socket.SHUT_WR)
        with pytest.raises(TransportError, match=problem):
            await ask_for_place(None, "/ip4/203.0.113.9/tcp/31337/p2p/b", A)  # type: ignore[arg-type]
        assert liar.recv(100) == b"\x02\x08\x00"


@dataclass
class MadeLink:
    peer: PeerId = B
    is_relayed: bool = True
    maddrs: tuple[str, ...] = (BY_SEED, PUBLIC)
    closed: list[str] = field(default_factory=list)

    async def close(self, why: str = "") -> None:
        self.closed.append(why)


async def improve(
    monkeypatch: pytest.MonkeyPatch,
    link: MadeLink,
    ways: list[str],
    me: PeerId = A,
    own: str = PUBLIC,
    newest: tuple[str, ...] = (),
) -> list[str]:
    """What one look after the links does, once the link has been relayed for long enough."""
    done: list[str] = []

    def play(name: str, answer: object = None, does: str = "") -> None:
        async def stand_in(*arguments: object) -> object:
            done.extend([does] if does else [])
            assert does != "reach" or arguments[2] == (newest or link.maddrs)
            return answer

        monkeypatch.setattr(carrier_room, name, stand_in)

    play("ways_to_peers", {str(B): ways})
    play("own_maddrs", [own])
    play("hang_up_on", does="hang up")
    play("reach", does="reach")
    looking = LinkUpgrades(None, me, lambda: (link,), lambda peer: newest)  # type: ignore[arg-type]
    looking.opened(link)
    for _ in range(LOOKS_BEFORE):
        await looking.look()
        assert not done, "too soon"
    await looking.look()
    before = list(done)
    for _ in range(2 * LOOKS_BEFORE):
        await looking.look()
    assert done == before, "one try"
    return done


async def test_a_relayed_link_moves_to_a_direct_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    link = MadeLink()
    assert await improve(monkeypatch, link, [BY_SEED, DIRECT]) == []
    assert link.closed[0] == "moving to a direct connection"


async def test_holes_are_tried_by_one_end_where_both_have_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await improve(monkeypatch, MadeLink(), [BY_SEED]) == ["hang up", "reach"]
    assert await improve(monkeypatch, MadeLink(), [BY_SEED], me=PeerId("c")) == []
    assert await improve(monkeypatch, MadeLink(maddrs=(BY_SEED,)), [BY_SEED]) == []
    assert await improve(monkeypatch, MadeLink(), [BY_SEED], own="/ip4/192.168.1.2/tcp/4001") == []
    known = MadeLink(maddrs=(BY_SEED,))  # it had none before
    assert await improve(monkeypatch, known, [BY_SEED], newest=(BY_SEED, PUBLIC)) == ["hang up", "reach"]


async def test_the_end_that_does_not_make_it_anew_dials_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its packets find a router that has heard of an attempt that is over."""
    dialled: list[tuple[PeerId, object]] = []

    async def dial(p2p: object, peer: PeerId, maddrs: object, timeout_s: float) -> None:
        dialled.append((peer, maddrs))
        raise TransportError("nobody is there any more")

    monkeypatch.setattr(carrier_room, "reach", dial)
    for me, relayed, wanted in (("c", True, [(B, (DIRECT,))]), ("c", False, []), ("a", True, [])):
        dialled.clear()
        ways = LinkUpgrades(None, PeerId(me), tuple, lambda peer: [DIRECT])  # type: ignore[arg-type]
        ways.start()
        ways.ended(MadeLink(is_relayed=relayed))
        await asyncio.sleep(0)
        assert dialled == wanted
        await ways.stop()
        ways.ended(MadeLink())
        await asyncio.sleep(0)
        assert dialled == wanted, "nobody dials after the end"


async def test_a_link_whose_stream_has_just_ended_closes_without_a_word() -> None:
    """uvloop raises RuntimeError for what is written to it then, before anybody has seen its end."""

    class Ended:
        reader: asyncio.StreamReader

        def is_closing(self) -> bool:
            return True

        @property
        def transport(self) -> Ended:
            return self

        def abort(self) -> None:
            self.reader.feed_eof()

        def write(self, data: bytes) -> None:
            raise RuntimeError("the handler is closed")

        close = abort

        async def wait_closed(self) -> None: ...

    for end in ("send", "close"):
        ended = Ended()
        ended.reader = asyncio.StreamReader()
        link = Libp2pLink(PeerId("b"), (ended.reader, ended, ""), (), lambda link: None)  # type: ignore[arg-type]
        if end == "send":
            asyncio.get_running_loop().call_later(0.1, ended.abort)
            with pytest.raises(PeerLost):
                await link.send(b"more")
        await link.close()
