"""Host names of others: addresses need no lookup, names are bounded, one that hangs holds nobody else."""

from __future__ import annotations

import asyncio
import threading

import pytest

from p2p_co2.errors import TransportError
from p2p_co2.net.transport.resolver import Resolver

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
