"""Carriers slowed down to a line: rates, latency, order, loss as a delay, and a line that breaks."""

from __future__ import annotations

import asyncio
import time

import pytest

from p2p_co2.errors import ConfigError, PeerLost
from p2p_co2.net.transport.slow import Line, SlowLine, SlowLink
from p2p_co2.protocol.wire.identity import PeerId
from tests.made_links import turns

LINE = SlowLine(up_bits_per_s=8e6, down_bits_per_s=8e6, latency_s=0.05, jitter_s=0.0, loss=0.0)


class Link:
    peer, carrier, way = PeerId("b"), "grpc", "direct"

    def __init__(self) -> None:
        self.came: list[tuple[float, bytes]] = []
        self.closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def send(self, data: bytes) -> None:
        if self.closed.done():
            raise PeerLost(self.closed.result())
        self.came.append((time.monotonic(), data))

    async def close(self) -> None:
        if not self.closed.done():
            self.closed.set_result("closed by us")

    async def wait_closed(self) -> str:
        return await asyncio.shield(self.closed)


async def came(link: Link, count: int) -> None:
    async with asyncio.timeout(10):
        while len(link.came) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_messages_come_in_order_no_sooner_than_the_line_allows() -> None:
    link, slow = Link(), Line(SlowLine(8e6, 8e6, 0.05, 0.03, 0.0), seed=1)
    line = SlowLink(link, slow)
    began_at = time.monotonic()
    sent = [bytes((number,)) * 10_000 for number in range(20)]
    for data in sent:
        await line.send(data)
    assert time.monotonic() - began_at >= 0.2  # 200 kB at 1 MB/s
    await came(link, 20)
    assert [data for _, data in link.came] == sent
    assert link.came[-1][0] - began_at >= 0.2 + 0.0
    await line.close()


async def test_all_links_share_the_line() -> None:
    slow = Line(LINE, seed=0)
    lines = [SlowLink(Link(), slow) for _ in range(2)]
    began_at = time.monotonic()
    await asyncio.gather(*(line.send(bytes(100_000)) for line in lines))
    assert time.monotonic() - began_at >= 0.2
    for line in lines:
        await line.close()


def test_a_lost_packet_is_a_round_trip() -> None:
    slow = Line(SlowLine(1e6, 1e6, 0.05, 0.0, 0.01), seed=0)
    late = [slow.latency_s(1000) for _ in range(10_000)]
    assert sorted(set(late)) == pytest.approx([0.05, 0.15])
    assert 60 < sum(value > 0.1 for value in late) < 140
    assert sum(slow.latency_s(500_000) > 0.1 for _ in range(100)) > 90


async def test_a_broken_link_is_a_lost_peer() -> None:
    link = Link()
    line = SlowLink(link, Line(SlowLine(1e9, 1e9, 0.0, 0.0, 0.0), seed=0))
    link.closed.set_result("the peer is gone")
    await line.send(b"on its way")
    await turns()
    with pytest.raises(PeerLost, match="gone"):
        await line.send(b"too late")
    await line.close()


@pytest.mark.parametrize(
    "text", ["", "1,2,3", "1,2,3,4,x", "0,1,0,0,0", "1,1,0,0,1", "1,1,nan,0,0", "1,1,-1,0,0"]
)
def test_what_is_no_line_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        SlowLine.parse(text)
