"""The second connection to a far peer, over carriers made for the purpose: when it comes and how it ends."""

from __future__ import annotations

import asyncio

import pytest

from p2p_co2.node.links import BESIDE_BYTES, Links
from tests.made_links import B, FakeCarrier, links_over, turns
from tests.transport_peers import until


async def far_with_a_slow_first(links: Links, grpc: FakeCarrier) -> None:
    """A link to B that is far and takes nothing more than what it has been given, one message of bulk."""
    grpc.is_far = True
    links.post(B, b"hello", bulk=False)
    await turns()
    grpc.links[0].gate = asyncio.Event()
    links.post(B, b"first", bulk=True)
    await turns()


async def test_much_bulk_over_a_far_way_takes_a_second_connection_and_control_does_not() -> None:
    grpc = FakeCarrier("grpc")
    async with links_over(grpc) as (links, heard):
        await far_with_a_slow_first(links, grpc)
        assert len(grpc.links) == 1  # little needs none
        bulk = [bytes([number]) * (BESIDE_BYTES // 4) for number in range(8)]
        for data in bulk:
            links.post(B, data, bulk=True)
        links.post(B, b"control", bulk=False)
        await turns(100)
        assert len(grpc.links) == 2
        assert grpc.sent == [b"hello", *bulk]
        grpc.links[0].gate.set()
        await turns()
        assert grpc.sent[9:] == [b"first", b"control"]
        assert (links._queued_bytes, links.traffic[B].bulk_bytes) == (0, 5 + 2 * BESIDE_BYTES)
        assert heard.opened == [(B, "grpc", "")]


async def test_what_a_second_connection_could_not_send_goes_over_the_first() -> None:
    grpc = FakeCarrier("grpc")
    async with links_over(grpc) as (links, heard):
        await far_with_a_slow_first(links, grpc)
        grpc.gate.clear()
        bulk = [bytes([number]) * BESIDE_BYTES for number in range(3)]
        for data in bulk:
            links.post(B, data, bulk=True)
        await turns()
        grpc.links[1].closed.set_result("reset")
        grpc.gate.set()
        await turns()
        grpc.links[0].gate.set()
        await turns(100)
        assert grpc.sent == [b"hello", b"first", *bulk]
        links.post(B, bytes(2 * BESIDE_BYTES), bulk=True)
        await turns()
        assert len(grpc.links) == 2  # it is not tried again at once
        assert (links._queued_bytes, heard.lost) == (0, [])


async def test_a_second_connection_ends_with_a_peer_that_is_lost_and_leaves_nothing_queued() -> None:
    grpc = FakeCarrier("grpc")
    async with links_over(grpc) as (links, heard):
        await far_with_a_slow_first(links, grpc)
        grpc.gate = asyncio.Event()
        for _ in range(3):
            links.post(B, bytes(BESIDE_BYTES), bulk=True)
        await turns()
        first, second = grpc.links
        grpc.reachable = False
        first.closed.set_result("reset")
        first.gate.set()
        await turns(50)
        assert heard.unreachable == [(B, "grpc: connection refused")]
        assert second.closed.done()
        second.gate.set()  # its last message fails only now
        await turns(50)
        assert links._queued_bytes == 0


async def test_who_has_no_place_for_a_second_connection_is_served_by_the_first() -> None:
    grpc = FakeCarrier("grpc")
    async with links_over(grpc) as (links, heard):
        await far_with_a_slow_first(links, grpc)
        grpc.reachable = False
        for _ in range(2):
            links.post(B, bytes(BESIDE_BYTES), bulk=True)
        grpc.links[0].gate.set()
        await turns(100)
        assert [len(data) for data in grpc.sent] == [5, 5, BESIDE_BYTES, BESIDE_BYTES]
        assert (len(grpc.links), heard.unreachable) == (1, [])


async def test_a_second_connection_that_has_nothing_to_carry_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("p2p_co2.node.links.BESIDE_IDLE_S", 0.0)
    grpc = FakeCarrier("grpc")
    async with links_over(grpc) as (links, _):
        await far_with_a_slow_first(links, grpc)
        for count in (2, 3):
            links.post(B, bytes(BESIDE_BYTES), bulk=True)
            await turns(100)
            assert len(grpc.links) == count
            assert await grpc.links[-1].wait_closed() == "closed by us"
            await turns()
        assert not grpc.links[0].closed.done()
        grpc.links[0].gate.set()
        await links.drain(5.0)


async def test_a_second_connection_without_bulk_is_closed_though_control_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Control goes over the first; a second one that is silent for a minute makes the peer shut us out."""
    monkeypatch.setattr("p2p_co2.node.links.BESIDE_IDLE_S", 0.1)
    grpc = FakeCarrier("grpc")
    async with links_over(grpc) as (links, _):
        await far_with_a_slow_first(links, grpc)
        grpc.links[0].gate.set()
        links.post(B, bytes(BESIDE_BYTES), bulk=True)
        await turns(100)
        for _ in range(1000):
            links.post(B, b"heartbeat", bulk=False)
            await asyncio.sleep(0.01)
            if grpc.links[-1].closed.done():
                break
        assert [link.closed.done() for link in grpc.links] == [False, True]


async def test_a_message_goes_over_the_connection_by_which_it_is_there_sooner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grpc = FakeCarrier("grpc")
    async with links_over(grpc) as (links, _):
        await far_with_a_slow_first(links, grpc)
        links.post(B, bytes(BESIDE_BYTES), bulk=True)
        await until(lambda: len(grpc.links) == 2 and len(grpc.sent) == 2)
        first, second = grpc.links
        first.gate.set()
        await until(lambda: (len(first.carried), len(second.carried)) == (2, 1))
        first.bytes_per_s = 1e3  # a message would take minutes
        for _ in range(4):
            links.post(B, bytes(BESIDE_BYTES), bulk=True)
        await until(lambda: (len(first.carried), len(second.carried)) == (2, 5))
        first.bytes_per_s, second.bytes_per_s = 0.0, 1e3
        monkeypatch.setattr("p2p_co2.node.links.BESIDE_IDLE_S", 0.1)
        for _ in range(4):
            links.post(B, bytes(BESIDE_BYTES), bulk=True)
        await until(lambda: (len(first.carried), len(second.carried)) == (6, 5))
        links.post(B, b"more", bulk=True)
        await until(second.closed.done)  # it has carried nothing for long
        await until(lambda: len(first.carried) == 7)


async def test_a_message_is_not_left_for_ever_to_a_connection_that_is_not_read() -> None:
    grpc = FakeCarrier("grpc")
    async with links_over(grpc) as (links, _):
        await far_with_a_slow_first(links, grpc)
        links.post(B, bytes(BESIDE_BYTES), bulk=True)
        await until(lambda: len(grpc.links) == 2 and len(grpc.sent) == 2)
        first, second = grpc.links
        first.bytes_per_s = 1e9  # and takes nothing
        second.bytes_per_s = 10 * BESIDE_BYTES  # a message is there after 0.1 s
        for _ in range(4):
            links.post(B, bytes(BESIDE_BYTES), bulk=True)
        await until(lambda: len(second.carried) == 5)
        assert first.carried == [b"hello"]
        first.gate.set()
        await links.drain(10.0)
