"""This process on the network: what it publishes of itself, what it remembers of others, and a daemon that
dies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p_co2.config import PeerConfig, RunConfig
from p2p_co2.errors import TransportError
from p2p_co2.net.discovery import Discovery
from p2p_co2.net.transport.libp2p.carrier import Libp2pCarrier
from p2p_co2.net.transport.libp2p.daemon import start_p2p, stop_p2p, wait_p2p_exit
from p2p_co2.node import network as room
from p2p_co2.node.network import RECORD_KEPT_S, KnownRecords, Network, lead_nowhere_else, publishable
from p2p_co2.protocol.wire.identity import Identity, PeerId, cell_of
from p2p_co2.protocol.wire.limits import MAX_ADDRESSES, MAX_RECORD_BYTES, MAX_STRING
from p2p_co2.protocol.wire.messages_pb2 import PeerRecord
from p2p_co2.ticket import Ticket

RUN = bytes(range(32))
DEAD = f"/ip4/127.0.0.1/tcp/9/p2p/{Identity.generate().peer_id}"


def record(peer: str, software: str = "") -> PeerRecord:
    return PeerRecord(peer=peer, run=RUN, software=software)


def test_records_are_those_found_last_and_those_in_use() -> None:
    known = KnownRecords()
    known.found([record("a"), record("b")], 0.0)
    assert known.use(PeerId("a"), 1.0) == record("a")
    known.found([record("c", "new")], 2.0)
    assert known.use(PeerId("b"), 2.0) is None
    assert known.use(PeerId("a"), 2.0) == record("a")
    assert known.use(PeerId("c"), 2.0) == record("c", "new")
    assert known.maddrs_of(PeerId("c")) == known.maddrs_of(PeerId("nobody")) == ()
    known.found([PeerRecord(peer="c", run=RUN, maddrs=["/ip4/203.0.113.9/tcp/1"])], 2.5)
    assert known.maddrs_of(PeerId("c")) == ("/ip4/203.0.113.9/tcp/1",)
    known.found([record("c", "newer")], 3.0)
    assert known.use(PeerId("c"), 3.0) == record("c", "newer")
    known.found([], 2.0 + RECORD_KEPT_S)
    assert known.use(PeerId("a"), 2.0 + RECORD_KEPT_S) is None
    assert len(known) == 1


def test_no_more_records_than_peers_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "MAX_PEERS", 3)
    known = KnownRecords()
    for step in range(10):
        names = [f"{step}-{i}" for i in range(2)]
        known.found([record(name) for name in names], float(step))
        for name in names:
            known.use(PeerId(name), float(step))
        assert len(known) <= 3
        assert len(known._used_at) <= 3
    known.found([record(f"x{i}") for i in range(9)], 10.0)
    assert len(known) == 3


@given(st.lists(st.integers(0, 2 * MAX_STRING), max_size=40))
def test_published_addresses_fit_into_a_record(lengths: list[int]) -> None:
    maddrs = ["x" * length for length in lengths]
    taken = publishable(maddrs)
    assert len(taken) <= MAX_ADDRESSES
    assert max(map(len, taken), default=0) <= MAX_STRING
    assert sum(map(len, taken)) <= MAX_RECORD_BYTES // 2
    if sum(lengths) <= MAX_RECORD_BYTES // 2 and len(lengths) <= MAX_ADDRESSES:
        assert taken == [maddr for maddr in maddrs if len(maddr) <= MAX_STRING]


def test_on_a_network_of_its_own_nobody_needs_a_relay() -> None:
    near, far, named = "/ip4/192.168.1.7/tcp/1", "/ip4/192.0.0.65/tcp/1", "/dns4/seed.example/tcp/1"
    assert lead_nowhere_else([near])
    assert not lead_nowhere_else([near, far])
    assert not lead_nowhere_else([named])


async def test_a_killed_daemon_is_a_transport_error_everywhere(tmp_path: Path) -> None:
    async with asyncio.timeout(60):
        identity = Identity.load_or_create(tmp_path / "identity")
        network = Network(identity, PeerConfig(), Ticket(RUN, identity.peer_id, (DEAD,)))
        network.p2p = await start_p2p(tmp_path / "identity")
        network.discovery = Discovery(network.p2p, identity, RUN, lambda *_: None)
        try:
            await network.discovery.start([])
            await network.publish_self()
            assert await network.find_peers() == []
            network._published_at = -1e9
            os.kill(network.p2p.daemon.process.pid, signal.SIGKILL)
            await wait_p2p_exit(network.p2p)
            for call in (network.publish_self, network.find_peers):
                with pytest.raises(TransportError, match="daemon"):
                    await call()
            assert await network.find_record(PeerId("nobody")) is None
            with pytest.raises(TransportError, match="daemon"):
                await network.rebootstrap()
        finally:
            await network.discovery.close()
            await stop_p2p(network.p2p)


class Searchable:
    """In the place of the DHT: every search takes a second of the clock, and is counted."""

    def __init__(self, clock: Clock, peers: Sequence[str]) -> None:
        self.clock, self.peers, self.trouble, self.takes_s = clock, peers, "", 1.0
        self.software, self.cells, self.ages_s, self.sealed_manifest = "", 1, 0.0, b""
        self.answers: asyncio.Event | None = None
        self.searches = 0

    async def find_peers(self, cell: int | None = None) -> list[PeerRecord]:
        self.searches += 1
        expires_at = time.time() + 60.0 - self.ages_s
        found = [
            PeerRecord(peer=peer, run=RUN, expires_at=expires_at, software=self.software)
            for peer in self.peers
            if cell is None or cell_of(PeerId(peer), self.cells) == cell
        ]
        self.clock.now += self.takes_s
        if (answers := self.answers) is not None:
            await answers.wait()
        await asyncio.sleep(0.01)
        if self.trouble:
            raise TransportError(self.trouble)
        return found


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return time.time()


def searchable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *peers: str
) -> tuple[Network, Searchable, Clock]:
    clock = Clock()
    monkeypatch.setattr(room, "time", clock)
    identity = Identity.load_or_create(tmp_path / "identity")
    network = Network(identity, PeerConfig(), Ticket(RUN, identity.peer_id, (DEAD,)))
    dht = Searchable(clock, peers)
    network.discovery = dht  # type: ignore[assignment]  # what is asked of it
    return network, dht, clock


async def search_held_up(
    network: Network, dht: Searchable, cell: int | None, software: str
) -> tuple[asyncio.Task[list[PeerRecord]], Callable[[], None]]:
    """A search that has found peers of this software, and what lets it end."""
    answers = asyncio.Event()
    dht.answers, dht.software = answers, software
    search = asyncio.create_task(network.find_peers(cell))
    await asyncio.sleep(0)
    dht.answers = None
    return search, answers.set


def software_known(network: Network, peer: PeerId) -> str:
    known = network._records.use(peer, 0.0)
    assert known is not None
    return known.software


async def test_one_search_serves_all_who_ask_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a dozen dead peers that the DHT lists, each is dialled over two carriers."""
    network, dht, clock = searchable(tmp_path, monkeypatch, *"abcdef")
    await network.find_peers(0)
    clock.now += 60.0
    asked = [network.find_record(PeerId(peer), True) for peer in "abcdef" for _ in range(2)]
    found = await asyncio.gather(*asked)
    assert [record.peer for record in found if record] == [peer for peer in "abcdef" for _ in range(2)]
    assert dht.searches == 2


async def test_what_was_found_a_moment_ago_is_fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network, dht, clock = searchable(tmp_path, monkeypatch, "a")
    await network.find_peers(0)
    assert await network.find_record(PeerId("a"), True)
    assert dht.searches == 1
    clock.now += 0.1  # it began more than a second ago
    dht.peers = ()
    assert await network.find_record(PeerId("a"))
    assert dht.searches == 1
    assert await network.find_record(PeerId("a"), True), "what was used is kept"
    assert dht.searches == 2


async def test_who_is_not_known_is_searched_for_from_now_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have entered its record while the last search was under way."""
    network, dht, _ = searchable(tmp_path, monkeypatch)
    first = asyncio.create_task(network.find_record(PeerId("a")))
    await asyncio.sleep(0)
    assert dht.searches == 1
    dht.peers = "a"
    later = [asyncio.create_task(network.find_record(PeerId("a"))) for _ in range(5)]
    assert await first is None
    assert all(await asyncio.gather(*later))
    assert dht.searches == 2


async def test_who_asks_while_a_search_fails_waits_for_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network, dht, _ = searchable(tmp_path, monkeypatch)
    dht.trouble = "the DHT did not answer"
    asked = [asyncio.create_task(network.find_record(PeerId("a"))) for _ in range(9)]
    assert await asyncio.gather(*asked) == [None] * 9
    assert dht.searches == 2  # the others asked while the first was under way
    with pytest.raises(TransportError):
        await network.find_peers(0)


async def test_a_search_that_is_given_up_serves_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network, dht, clock = searchable(tmp_path, monkeypatch, "a")
    await network.find_peers(0)
    clock.now += 60.0
    dht.takes_s = 0.0
    given_up = asyncio.create_task(network.find_record(PeerId("a"), True))
    await asyncio.sleep(0)
    waiting = asyncio.create_task(network.find_record(PeerId("a"), True))
    await asyncio.sleep(0)
    given_up.cancel()
    assert await waiting
    assert dht.searches == 3


@pytest.mark.parametrize("later_fails", [False, True])
async def test_a_search_that_was_overtaken_takes_nothing_back(
    later_fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer was started again meanwhile, and the later search has found where it is now."""
    network, dht, _ = searchable(tmp_path, monkeypatch, "a")
    early, answer_early = await search_held_up(network, dht, 0, "old")
    dht.software = "new"
    dht.trouble = "the DHT did not answer" if later_fails else ""
    with contextlib.suppress(TransportError):
        await network.find_peers(0)
    dht.trouble = ""
    answer_early()
    assert [record.software for record in await early] == ["old"]
    assert software_known(network, PeerId("a")) == ("old" if later_fails else "new")
    await network.find_record(PeerId("a"), True)
    assert dht.searches == 2, "the later one began a moment ago"


async def test_of_three_searches_the_last_that_found_anything_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network, dht, _ = searchable(tmp_path, monkeypatch, "a")
    early, answer_early = await search_held_up(network, dht, 0, "old")
    dht.software = "new"
    await network.find_peers(0)
    dht.trouble = "the DHT did not answer"
    with pytest.raises(TransportError):
        await network.find_peers(0)
    dht.trouble = ""
    answer_early()
    await early
    assert software_known(network, PeerId("a")) == "new"


async def test_what_only_an_overtaken_search_found_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The later one ended first because the nodes that know the peer did not answer it."""
    network, dht, _ = searchable(tmp_path, monkeypatch, "a", "b")
    early, answer_early = await search_held_up(network, dht, 0, "early")
    dht.peers, dht.software = ("b", "c"), "late"
    await network.find_peers(0)
    answer_early()
    await early
    known = {peer: software_known(network, PeerId(peer)) for peer in "abc"}
    assert known == {"a": "early", "b": "late", "c": "late"}


async def test_an_old_copy_of_a_record_does_not_replace_a_newer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network, dht, _ = searchable(tmp_path, monkeypatch, "a")
    for software, ages_s, known in (("new", 0.0, "new"), ("old", 30.0, "new"), ("newest", -1.0, "newest")):
        dht.software, dht.ages_s = software, ages_s
        await network.find_peers(0)
        assert software_known(network, PeerId("a")) == known


async def test_a_record_that_has_expired_is_not_searched_for_by_each_who_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dead peers whose records ran out, asked for one after the other."""
    network, dht, clock = searchable(tmp_path, monkeypatch, "a", "b")
    dht.ages_s = 120.0
    await network.find_peers(0)
    clock.now, dht.takes_s = clock.now + 60.0, 0.1
    for peer in "abab":
        assert await network.find_record(PeerId(peer))
    assert dht.searches == 2


async def test_a_daemon_that_comes_back_is_asked_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network, dht, _ = searchable(tmp_path, monkeypatch, "a")
    dht.takes_s = 0.0
    await network.find_peers(0)
    monkeypatch.setattr(dht, "rebootstrap", lambda seeds: asyncio.sleep(0), raising=False)
    await network._revived("killed")
    assert await network.find_record(PeerId("a"), True)
    assert dht.searches == 2


async def test_a_search_of_all_cells_that_one_overtook_counts_for_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network, dht, _ = searchable(tmp_path, monkeypatch, "a", "b", "c", "d")
    network.run, dht.cells = RunConfig(cells=2), 2
    early, answer_early = await search_held_up(network, dht, None, "early")
    dht.software = "late"
    await network.find_peers(1)
    answer_early()
    assert len(await early) == 4
    for peer in map(PeerId, "abcd"):
        assert software_known(network, peer) == ("late" if cell_of(peer, 2) == 1 else "early")


async def test_a_search_of_one_cell_serves_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network, dht, clock = searchable(tmp_path, monkeypatch, "a", "b", "c", "d")
    network.run, dht.cells = RunConfig(cells=2), 2
    cells = {cell_of(PeerId(peer), 2): PeerId(peer) for peer in "abcd"}
    assert set(cells) == {0, 1}
    await network.find_peers(None)
    clock.now += 60.0
    dht.takes_s = 0.0
    await network.find_peers(0)
    assert await network.find_record(cells[0], True)
    assert dht.searches == 2
    assert await network.find_record(cells[1], True)
    assert dht.searches == 3
    clock.now += 60.0
    await network.find_peers(None)
    assert await network.find_record(cells[0], True)
    assert await network.find_record(cells[1], True)
    assert dht.searches == 4


async def test_relayed_links_are_led_to_where_the_newest_records_say(tmp_path: Path) -> None:
    async with asyncio.timeout(60):
        identity = Identity.load_or_create(tmp_path / "identity")
        network = Network(identity, PeerConfig(carrier="libp2p"), Ticket(RUN, identity.peer_id, (DEAD,)))
        network.p2p = await start_p2p(tmp_path / "identity")
        try:
            await network.start_carriers(ignore, lambda *_: None)
            (carrier,) = network.carriers
            assert isinstance(carrier, Libp2pCarrier)
            for port in (1, 2):
                maddr = f"/ip4/203.0.113.9/tcp/{port}"
                network._records.found([PeerRecord(peer="c", run=RUN, maddrs=[maddr])], float(port))
                assert tuple(carrier._upgrades._newest(PeerId("c"))) == (maddr,)
        finally:
            await network.close()
            await stop_p2p(network.p2p)


async def ignore(sender: PeerId, data: bytes) -> None:
    return None
