"""This process on the network: what it publishes of itself, what it remembers of others, and a daemon that
dies."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p_co2.config import PeerConfig
from p2p_co2.errors import TransportError
from p2p_co2.net.discovery import Discovery
from p2p_co2.net.transport.base import MESSAGE_TIMEOUT_S
from p2p_co2.net.transport.libp2p.daemon import start_p2p, stop_p2p
from p2p_co2.node import network as room
from p2p_co2.node.network import Network, RecordBook, publishable
from p2p_co2.ticket import Ticket
from p2p_co2.wire.identity import Identity, PeerId
from p2p_co2.wire.limits import MAX_DIALLED, MAX_RECORD_BYTES, MAX_STRING
from p2p_co2.wire.messages_pb2 import PeerRecord

RUN = bytes(range(32))
DEAD = f"/ip4/127.0.0.1/tcp/9/p2p/{Identity.generate().peer_id}"


def test_an_invitation_names_nobody_that_a_peer_only_tells_of(tmp_path: Path) -> None:
    peer, other = Identity.generate().peer_id, Identity.generate().peer_id
    network = Network(Identity.generate(), PeerConfig(folder=tmp_path), Ticket(RUN, peer, (DEAD,)))
    network._reach = SimpleNamespace(own_maddrs=())  # type: ignore[assignment]
    told = [f"/ip4/127.0.0.1/tcp/1/p2p/{other}", f"/ip4/127.0.0.1/tcp/2/p2p/{peer}"]
    network.records._records = {peer: PeerRecord(peer=peer, maddrs=told)}
    network.records._used_at = {peer: time.monotonic()}
    assert network.invitation.seeds == (DEAD, told[1])


class Dht:
    """A book over a DHT of which every search takes a second of the clock, and is counted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *peers: str) -> None:
        self.peers, self.trouble, self.takes_s, self.ages_s = peers, "", 1.0, 0.0
        self.software, self.searches, self.now = "", 0, 1000.0
        self.book = RecordBook(self.find)
        monkeypatch.setattr(room, "time", self)

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return time.time()

    async def find(self) -> list[PeerRecord]:
        self.searches += 1
        expires_at = time.time() + 60.0 - self.ages_s
        found = [PeerRecord(peer=peer, expires_at=expires_at, software=self.software) for peer in self.peers]
        self.now += self.takes_s
        await asyncio.sleep(0.01)
        if self.trouble:
            raise TransportError(self.trouble)
        return found

    async def software_of(self, peer: str) -> str | None:
        record = await self.book.record_of(PeerId(peer))
        return None if record is None else record.software


async def test_records_are_those_found_last_and_those_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    dht = Dht(monkeypatch, "a", "b")
    await dht.book.search()
    assert await dht.book.record_of(PeerId("a"))
    dht.peers, dht.software = ("c",), "new"
    await dht.book.search()
    assert await dht.software_of("a") == ""
    assert await dht.software_of("c") == "new"
    assert len(dht.book) == 2
    assert dht.book.maddrs_of(PeerId("nobody")) == ()
    dht.peers = ()
    dht.now += 10 * MESSAGE_TIMEOUT_S
    await dht.book.search()
    assert len(dht.book) == 0


async def test_no_more_records_than_peers_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "MAX_PEERS", 3)
    dht = Dht(monkeypatch)
    for step in range(10):
        dht.peers = tuple(f"{step}-{number}" for number in range(2))
        await dht.book.search()
        for name in dht.peers:
            await dht.book.record_of(PeerId(name))
        assert len(dht.book) <= 3
        assert len(dht.book.known(99)) <= 3


async def test_one_search_serves_all_who_ask_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a dozen dead peers that the DHT lists, each is dialled over two carriers."""
    dht = Dht(monkeypatch, *"abcdef")
    await dht.book.search()
    dht.now += 60.0
    asked = [dht.book.record_of(PeerId(peer), True) for peer in "abcdef" for _ in range(2)]
    found = await asyncio.gather(*asked)
    assert [record.peer for record in found if record] == [peer for peer in "abcdef" for _ in range(2)]
    assert dht.searches == 2


async def test_what_was_found_a_moment_ago_is_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    dht = Dht(monkeypatch, "a")
    await dht.book.search()
    assert await dht.book.record_of(PeerId("a"), True)
    assert dht.searches == 1
    dht.now += 0.1  # it began more than a second ago
    dht.peers = ()
    assert await dht.book.record_of(PeerId("a"))
    assert dht.searches == 1
    assert await dht.book.record_of(PeerId("a"), True), "what was used is kept"
    assert dht.searches == 2
    dht.book.forget_searches()
    assert await dht.book.record_of(PeerId("a"), True)
    assert dht.searches == 3


async def test_who_is_not_known_is_searched_for_from_now_on(monkeypatch: pytest.MonkeyPatch) -> None:
    dht = Dht(monkeypatch)
    first = asyncio.create_task(dht.book.record_of(PeerId("a")))
    await asyncio.sleep(0)
    assert dht.searches == 1
    dht.peers = ("a",)
    later = [asyncio.create_task(dht.book.record_of(PeerId("a"))) for _ in range(5)]
    assert await first is None
    assert all(await asyncio.gather(*later))
    assert dht.searches == 2


async def test_who_asks_while_a_search_fails_waits_for_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    dht = Dht(monkeypatch)
    dht.trouble = "the DHT did not answer"
    asked = [asyncio.create_task(dht.book.record_of(PeerId("a"))) for _ in range(9)]
    assert await asyncio.gather(*asked) == [None] * 9
    assert dht.searches == 2  # the others asked while the first was under way
    with pytest.raises(TransportError):
        await dht.book.search()


async def test_a_search_that_is_given_up_serves_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    dht = Dht(monkeypatch, "a")
    await dht.book.search()
    dht.now += 60.0
    dht.takes_s = 0.0
    given_up = asyncio.create_task(dht.book.record_of(PeerId("a"), True))
    await asyncio.sleep(0)
    waiting = asyncio.create_task(dht.book.record_of(PeerId("a"), True))
    await asyncio.sleep(0)
    given_up.cancel()
    assert await waiting
    assert dht.searches == 3


async def test_an_old_copy_of_a_record_does_not_replace_a_newer_one(monkeypatch: pytest.MonkeyPatch) -> None:
    dht = Dht(monkeypatch, "a")
    for software, ages_s, known in (("new", 0.0, "new"), ("old", 30.0, "new"), ("newest", -1.0, "newest")):
        dht.software, dht.ages_s = software, ages_s
        await dht.book.search()
        assert await dht.software_of("a") == known


async def test_a_record_that_has_expired_is_not_searched_for_by_each_who_asks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dht = Dht(monkeypatch, "a", "b")
    dht.ages_s = 120.0
    await dht.book.search()
    dht.now, dht.takes_s = dht.now + 60.0, 0.1
    for peer in "abab":
        assert await dht.book.record_of(PeerId(peer))
    assert dht.searches == 2


@given(st.lists(st.integers(0, 2 * MAX_STRING), max_size=40))
def test_published_addresses_fit_into_a_record(lengths: list[int]) -> None:
    maddrs = ["x" * length for length in lengths]
    taken = publishable(maddrs)
    assert sum(map(len, taken)) <= MAX_RECORD_BYTES // 2
    assert taken == [maddr for maddr in maddrs if len(maddr) <= MAX_STRING][:MAX_DIALLED]


class NoPlaces:
    """Of a peer for which no seed relays."""

    held = ()
    trouble = "/ip4/203.0.113.9/tcp/1: it does not relay for us"

    def __init__(self, *_: object) -> None: ...

    async def renew(self) -> None: ...


@pytest.mark.parametrize(
    ("seeds", "is_told"),
    [
        (["/ip4/203.0.113.9/tcp/1"], True), (["/dns4/seed.example/tcp/1"], True),
        (["/ip4/192.168.1.7/tcp/1", "/ip4/203.0.113.9/tcp/1"], True),
        (["/ip4/192.168.1.7/tcp/1"], False),  # on a network of its own nobody needs a relay
    ],
)  # fmt: skip
async def test_a_peer_that_nobody_can_reach_is_told_what_to_do_when_somebody_is_there(
    monkeypatch: pytest.MonkeyPatch, seeds: list[str], is_told: bool
) -> None:
    monkeypatch.setattr(room, "Places", NoPlaces)
    monkeypatch.setattr(room, "own_maddrs", AsyncMock(return_value=[]))
    peer = Identity.generate().peer_id
    ticket = Ticket(RUN, peer, tuple(f"{seed}/p2p/{peer}" for seed in seeds))
    network = Network(Identity.generate(), PeerConfig(), ticket)
    network.use(None, AsyncMock())  # type: ignore[arg-type]
    assert await network.publish_self() == ""  # nobody is out of reach: nobody is there
    told = await network.publish_self(somebody_unmet=True)
    assert ("forward two TCP ports of the router" in told and "it does not relay for us" in told) == is_told


async def test_a_killed_daemon_is_a_transport_error_everywhere(tmp_path: Path) -> None:
    async with asyncio.timeout(60):
        identity = Identity.load_or_create(tmp_path / "identity")
        network = Network(identity, PeerConfig(), Ticket(RUN, identity.peer_id, (DEAD,)))
        p2p = await start_p2p(tmp_path / "identity")
        network.use(p2p, Discovery(p2p, identity, RUN, lambda *_: None))
        try:
            await network.discovery.start([])
            await network.publish_self()
            assert await network.find_peers() == []
            os.kill(network.p2p.daemon.process.pid, signal.SIGKILL)
            await network.p2p.daemon.wait_exit()
            for call in (lambda: network.publish_position(1.0, [1]), network.find_peers):
                with pytest.raises(TransportError, match="daemon"):
                    await call()
            assert await network.find_record(PeerId("nobody")) is None
            with pytest.raises(TransportError, match="daemon"):
                await network.rebootstrap()
        finally:
            await network.discovery.close()
            await stop_p2p(network.p2p)


async def test_who_only_visits_a_stage_is_not_listed_as_holding_it(tmp_path: Path) -> None:
    me = Identity.generate()
    ticket = Ticket(RUN, me.peer_id, (DEAD,))
    network = Network(me, PeerConfig(folder=tmp_path), ticket)

    async def find() -> list[PeerRecord]:
        held = {"replica": 1, "visitor": 1, "other": 0}
        return [PeerRecord(peer=peer, stage=at, visits=peer == "visitor") for peer, at in held.items()]

    network.records = RecordBook(find)
    assert len(await network.records.search()) == 3  # its stage's peers meet it
    assert [one.peer for one in network.listed(1)] == ["replica"]
    assert [one.peer for one in network.listed(0)] == ["other"]
