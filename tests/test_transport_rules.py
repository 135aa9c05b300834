"""What carriers agree on without a network: who is let in, what addresses are, and lines made slow."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import Counter
from typing import NoReturn, cast

import pytest

from p2p_co2.errors import ConfigError, PeerLost, RemoteProtocolError, TransportError
from p2p_co2.net.transport import admission as rules
from p2p_co2.net.transport.addresses import (
    Resolver,
    address_of,
    is_loopback,
    is_near,
    is_own,
    is_public_maddr,
    network_of,
)
from p2p_co2.net.transport.admission import (
    FEW,
    KEPT_LINKS,
    MAX_INBOUND_LINKS,
    MAX_NONCES_PER_PEER,
    MAX_STRANGERS,
    Admission,
    network_at,
)
from p2p_co2.net.transport.base import DIALS_AT_ONCE, Carrier, Dials, Link
from p2p_co2.net.transport.slow import MAX_UNDER_WAY, SharedLine, SlowLine
from p2p_co2.wire.identity import Identity
from p2p_co2.wire.limits import HELLO_WINDOW_S, MAX_DIALLED
from p2p_co2.wire.messages_pb2 import PeerRecord
from tests.made_links import FakeCarrier
from tests.test_libp2p import BY_SEED, DIRECT
from tests.transport_peers import RUN, until

# ---- admission


class Clock:
    def __init__(self) -> None:
        self.now = 1e9

    def __call__(self) -> float:
        return self.now


def test_the_door_admits_once_and_forgets_in_time() -> None:
    clock, us, them = Clock(), Identity.generate(), Identity.generate()
    admission, other = Admission(us, RUN, clock), Admission(them, RUN, clock)
    hello = other.hello(us.peer_id, b"c")
    assert admission.admit(hello, b"c") == them.peer_id
    clock.now += HELLO_WINDOW_S
    with pytest.raises(RemoteProtocolError, match="replayed"):
        admission.admit(hello, b"c")
    clock.now += 1
    with pytest.raises(RemoteProtocolError, match="stale"):
        admission.admit(hello, b"c")
    clock.now += 2 * HELLO_WINDOW_S
    admission.admit(other.hello(us.peer_id, b"c"), b"c")


def test_the_door_bounds_what_it_remembers(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, us, them = Clock(), Identity.generate(), Identity.generate()
    admission, other = Admission(us, RUN, clock), Admission(them, RUN, clock)
    for _ in range(MAX_NONCES_PER_PEER):
        admission.leave(admission.admit(other.hello(us.peer_id, b""), b""))
    with pytest.raises(RemoteProtocolError, match="too often"):
        admission.admit(other.hello(us.peer_id, b""), b"")
    for _ in range(MAX_STRANGERS):
        admission.knock()
    with pytest.raises(RemoteProtocolError, match="too many links"):
        admission.knock()
    for _ in range(MAX_STRANGERS):
        admission.forget()
    admission.knock()


def crowd(us: Identity, clock: Clock, count: int) -> list[bytes]:
    """Hellos of as many new identities."""
    return [Admission(Identity.generate(), RUN, clock).hello(us.peer_id, b"") for _ in range(count)]


def test_one_neighbourhood_leaves_half_and_those_who_work_get_in_though_many_have() -> None:
    clock, us, friend = Clock(), Identity.generate(), Identity.generate()
    admission, most = Admission(us, RUN, clock), MAX_INBOUND_LINKS - KEPT_LINKS
    for _ in range(MAX_STRANGERS // 2):
        admission.knock("192.0.2.0/24")
    with pytest.raises(RemoteProtocolError, match="too many links"):
        admission.knock("192.0.2.0/24")
    admission.knock("198.51.100.0/24")
    hellos, inside = crowd(us, clock, most + 2), []
    for number, hello in enumerate(hellos[:most]):
        network = "192.0.2.0/24" if number < most // 2 else f"198.51.{number}.0/24"
        inside.append((admission.admit(hello, b"", network), network))
        if number == most // 2 - 1:
            with pytest.raises(RemoteProtocolError, match="too many links"):
                admission.admit(hellos[-1], b"", "192.0.2.0/24")
    with pytest.raises(RemoteProtocolError, match="too many links"):
        admission.admit(hellos[-1], b"", "203.0.113.0/24")
    admission.is_known = {friend.peer_id}.__contains__
    other = Admission(friend, RUN, clock)
    assert admission.admit(other.hello(us.peer_id, b""), b"", "192.0.2.0/24") == friend.peer_id
    admission.leave(friend.peer_id, "192.0.2.0/24")
    for peer, network in inside:
        admission.leave(peer, network)
    for number, hello in enumerate(crowd(us, clock, most)):  # all places are free
        admission.admit(hello, b"", f"198.51.{number}.0/24")


@pytest.mark.parametrize("held_by", [3, 16])
def test_an_attacker_in_a_few_neighbourhoods_leaves_places_for_others(held_by: int) -> None:
    clock, us = Clock(), Identity.generate()
    admission, most = Admission(us, RUN, clock), MAX_INBOUND_LINKS - KEPT_LINKS
    held = strangers = 0
    for number, hello in enumerate(crowd(us, clock, most)):
        network = f"198.51.{number % held_by}.0/24"
        with contextlib.suppress(RemoteProtocolError):
            admission.knock(network)
            strangers += 1
        with contextlib.suppress(RemoteProtocolError):
            admission.admit(hello, b"", network)
            held += 1
    left = most // (held_by + 1)
    assert held == most - left
    assert strangers == max(MAX_STRANGERS - MAX_STRANGERS // (held_by + 1), FEW * held_by)
    for number, hello in enumerate(crowd(us, clock, left - 1)):
        admission.admit(hello, b"", f"203.0.{number}.0/24")
    admission.admit(*crowd(us, clock, 1), b"")  # this machine itself


def test_dials_of_a_crowd_do_not_keep_out_those_who_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "MAX_NONCES", 8)
    clock, us, friend = Clock(), Identity.generate(), Identity.generate()
    admission = Admission(us, RUN, clock)
    for hello in crowd(us, clock, 8):
        admission.leave(admission.admit(hello, b""))
    with pytest.raises(RemoteProtocolError, match="too often"):
        admission.admit(*crowd(us, clock, 1), b"")
    admission.is_known = {friend.peer_id}.__contains__
    other = Admission(friend, RUN, clock)
    for _ in range(8):
        admission.leave(admission.admit(other.hello(us.peer_id, b""), b""))
    with pytest.raises(RemoteProtocolError, match="too often"):
        admission.admit(other.hello(us.peer_id, b""), b"")


# ---- addresses


def test_addresses() -> None:
    for near in (
        "127.0.0.1",
        "10.1.2.3",
        "172.31.0.1",
        "192.168.1.2",
        "100.64.0.1",
        "::1",
        "fd00::1",
        "::ffff:10.1.2.3",
        "0.0.0.0",
        "::",
    ):
        assert is_near(near), near
    for far in ("203.0.113.5", "192.0.0.67", "172.32.0.1", "2001:db8::1", "peer.example.org"):
        assert not is_near(far), far
    assert is_public_maddr(DIRECT)
    assert not any(map(is_public_maddr, (BY_SEED, "/ip4/192.168.1.2/tcp/1", "/dns/x/tcp/1", "", "/ip4")))
    assert network_of("2001:db8:0:1::5") == network_of("2001:db8:0:1:ffff::9") == "2001:db8:0:1::/64"
    assert network_at("127.0.0.1") == network_at("::1") == ""
    assert network_at("192.0.2.1") == network_at("192.0.2.255") == "192.0.2.0/24"
    assert network_at("2001:db8::1") == network_at("2001:db8:0:9::1") == "2001:db8::/48"
    for is_here in (is_own, is_loopback):
        assert (is_here("127.0.0.1"), is_here("203.0.113.5")) == (True, False)


@pytest.mark.parametrize(
    ("maddr", "place"),
    [
        ("/ip4/203.0.113.7/tcp/40000", ("203.0.113.7", 40000)),
        ("/ip6/2001:db8::1/tcp/4/p2p/12D3KooW", ("2001:db8::1", 4)),
        ("/ip4/203.0.113.7/tcp/4001/p2p/QmRelay/p2p-circuit", None),
        ("/ip4/203.0.113.7/udp/4001/quic", None),
        ("/dns4/example.org/tcp/80", None),
        ("/ip4/300.0.113.7/tcp/4001", None),
        ("/ip4/203.0.113.7/tcp/0", None),
        ("", None),
    ],
)
def test_only_a_direct_tcp_connection_has_an_address(maddr: str, place: tuple[str, int] | None) -> None:
    assert address_of(maddr) == place


LONG_S = 60.0


class PlayedLookup:
    """Hangs on names that begin with "slow" until it is released."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.asked: list[str] = []

    def __call__(self, host: str) -> list[str]:
        self.asked.append(host)
        if host.startswith("slow"):
            self.released.wait()
        if host == "nowhere":
            raise OSError("no such name")
        return ["192.0.2.1", "2001:db8::1"]


async def test_addresses_need_no_lookup_and_names_get_one() -> None:
    played = PlayedLookup()
    lookups = Resolver(1, played)
    for address in ("127.0.0.1", "::1"):
        assert await lookups.addresses_of(address, LONG_S) == [address]
    assert played.asked == []
    with pytest.raises(TransportError, match="no such name"):
        await lookups.addresses_of("nowhere", LONG_S)
    assert await lookups.addresses_of("peer.example", LONG_S) == ["192.0.2.1", "2001:db8::1"]


async def test_names_that_hang_hold_their_places_and_no_thread_of_anybody_else() -> None:
    played = PlayedLookup()
    lookups = Resolver(2, played)
    before = threading.active_count()
    for number in range(2):
        with pytest.raises(TransportError, match="do not answer"):
            await lookups.addresses_of(f"slow{number}", 0.01)
    for _ in range(50):
        with pytest.raises(TransportError, match="too many names"):
            await lookups.addresses_of("peer.example", LONG_S)
    assert threading.active_count() <= before + 2
    played.released.set()
    async with asyncio.timeout(LONG_S):
        while True:
            try:
                await lookups.addresses_of("peer.example", LONG_S)
                break
            except TransportError:
                await asyncio.sleep(0.01)


# ---- slow lines


async def open_link(slow: SharedLine) -> tuple[FakeCarrier, Link]:
    """A link over the line, and the carrier that keeps what comes of it."""
    carrier = FakeCarrier("grpc")
    return carrier, await slow.carrying(cast(Link, await carrier.connect(PeerRecord(peer="b"))))


async def test_messages_come_in_order_no_sooner_than_the_line_that_all_links_share_allows() -> None:
    slow = SharedLine(SlowLine(8e6, 8e6, 0.05, 0.03, 0.0), seed=1)
    pairs = [await open_link(slow), await open_link(slow)]
    began_at = time.monotonic()
    sent = [bytes((number,)) * 10_000 for number in range(10)]
    for data in sent:
        await asyncio.gather(*(line.send(data) for _, line in pairs))
    assert time.monotonic() - began_at >= 0.2  # 200 kB at 1 MB/s
    for carrier, line in pairs:
        await until(lambda came=carrier.sent: len(came) == 10)  # type: ignore[misc]
        assert carrier.sent == sent
        await line.close()


def test_a_lost_packet_is_a_round_trip() -> None:
    slow = SharedLine(SlowLine(1e6, 1e6, 0.05, 0.0, 0.01), seed=0)
    late = [slow.latency_s(1000) for _ in range(10_000)]
    assert sorted(set(late)) == pytest.approx([0.05, 0.15])
    assert 60 < sum(value > 0.1 for value in late) < 140
    assert sum(slow.latency_s(500_000) > 0.1 for _ in range(100)) > 90


@pytest.mark.parametrize("waits_for_room", [False, True])
async def test_a_send_over_a_link_that_is_gone_is_a_lost_peer(waits_for_room: bool) -> None:
    slow = SharedLine(SlowLine(1e9, 1e9, 0.1 * waits_for_room, 0.0, 0.0), seed=0)
    carrier, line = await open_link(slow)
    for _ in range(waits_for_room * MAX_UNDER_WAY + 1):  # the first is on its way
        await line.send(b"on its way")
    carrier.links[0].closed.set_result("the peer is gone")

    async def send_on() -> None:
        while True:
            await line.send(b"too late")

    with pytest.raises(PeerLost, match="gone"):
        await asyncio.wait_for(send_on(), 10)
    await line.close()


@pytest.mark.parametrize(
    "text", ["", "1,2,3", "1,2,3,4,x", "0,1,0,0,0", "1,1,0,0,1", "1,1,nan,0,0", "1,1,-1,0,0"]
)
def test_what_is_no_line_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        SlowLine.parse(text)


# ---- whom records may have us dial


def test_an_address_is_dialled_once_a_minute_until_a_peer_answers_there() -> None:
    dials, named = Dials(), [f"203.0.113.9:{port}" for port in range(16)]

    def due(addresses: list[str], now: float) -> list[str]:
        return list(dials.due(addresses, now))

    assert due([named[0], *named], 0.0) == named[:MAX_DIALLED]
    with pytest.raises(TransportError, match="nobody answered"):
        due(named, 59.0)  # whoever names them
    assert due([*named[:3], named[9]], 59.0) == [named[9]]
    dials.answered(named[1])
    for now in (59.1, 59.2, 59.3):
        assert due(named, now) == [named[1]]
    assert due(named[:2], 61.0) == named[:2]
    assert due([], 61.0) == []
    one, other, relayed = (f"{DIRECT}/p2p/{rest}" for rest in ("a", "b", "r/p2p-circuit/p2p/c"))
    assert due([one, other, relayed], 61.0) == [one]  # one place
    dials.answered(relayed)
    assert due([one, other, relayed], 61.0) == [one, other, relayed]


async def test_records_of_nobody_have_a_third_machine_dialled_a_few_times() -> None:
    """Fifty identities name sixteen ports of one machine, and ours tries all of them twenty times."""
    dialled, at_once = Counter[int](), [0, 0]

    class Carrying(Carrier):
        async def _dial(self, record: PeerRecord) -> NoReturn:
            at_once[0] += 1
            at_once[1] = max(at_once)
            await asyncio.sleep(0)
            at_once[0] -= 1
            for address in self.dials.due(record.grpc_addresses, 1000.0):
                dialled[int(address.rpartition(":")[2])] += 1
            raise TransportError("nobody there")

    carrier = Carrying(Identity.generate(), RUN, time.time)
    addresses = [f"203.0.113.9:{port}" for port in range(16)]
    peers = [Identity.generate().peer_id for _ in range(50)]
    records = [PeerRecord(peer=peer, grpc_addresses=addresses) for peer in peers]
    for _ in range(20):
        tried = await asyncio.gather(*map(carrier.connect, records), return_exceptions=True)
        assert all(isinstance(error, TransportError) for error in tried)
    assert dialled == Counter({port: 1 for port in range(MAX_DIALLED)})
    assert at_once[1] == DIALS_AT_ONCE
