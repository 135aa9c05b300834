"""Addresses near and far, and host names of others: bounded, and one that hangs holds nobody else."""

from __future__ import annotations

import asyncio
import threading

import pytest

from p2p_co2.errors import TransportError
from p2p_co2.net.transport.addresses import (
    Resolver,
    address_of,
    is_loopback,
    is_near,
    is_own,
    is_public_maddr,
    network_of,
)
from p2p_co2.net.transport.admission import network_at
from tests.test_libp2p import BY_SEED, DIRECT


def test_addresses() -> None:
    for near in ("127.0.0.1", "10.1.2.3", "172.31.0.1", "192.168.1.2", "100.64.0.1", "::1", "fd00::1"):
        assert is_near(near), near
    for far in ("203.0.113.5", "192.0.0.67", "172.32.0.1", "2001:db8::1", "peer.example.org"):
        assert not is_near(far), far
    assert is_public_maddr(DIRECT)
    assert not any(map(is_public_maddr, (BY_SEED, "/ip4/192.168.1.2/tcp/1", "/dns/x/tcp/1", "", "/ip4")))
    assert network_of("2001:db8:0:1::5") == network_of("2001:db8:0:1:ffff::9") == "2001:db8:0:1::/64"
    assert network_at("127.0.0.1") == network_at("::1") == ""
    assert is_own("127.0.0.1")
    assert not is_own("203.0.113.5")
    assert is_loopback("127.0.0.1")
    assert not is_loopback("203.0.113.5")


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
    assert await lookups.addresses_of("127.0.0.1", LONG_S) == ["127.0.0.1"]
    assert await lookups.addresses_of("::1", LONG_S) == ["::1"]
    assert played.asked == []
    assert await lookups.addresses_of("peer.example", LONG_S) == ["192.0.2.1", "2001:db8::1"]
    with pytest.raises(TransportError, match="no such name"):
        await lookups.addresses_of("nowhere", LONG_S)
    assert await lookups.addresses_of("peer.example", LONG_S)  # its place is free again


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
    assert await lookups.addresses_of("192.0.2.7", LONG_S) == ["192.0.2.7"]
    assert await asyncio.to_thread(lambda: "the others' threads are free") != ""
    played.released.set()
    async with asyncio.timeout(LONG_S):
        while True:
            try:
                await lookups.addresses_of("peer.example", LONG_S)
                break
            except TransportError:
                await asyncio.sleep(0.01)
