"""What a peer says of its upload where the kernel's buffers, or a daemon, take more than the line carries."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from p2p_co2.node.links import LinkObserver, Links
from p2p_co2.node.meter import UploadMeter
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.messages_pb2 import PeerRecord
from tests.transport_peers import PATIENCE_S, open_pair, until

LINE_BYTES_PER_S = 250_000.0
PIECE_BYTES, PIECES = 16 << 10, 32


class ThinLine:
    """A way to ``port`` on this machine that carries ``LINE_BYTES_PER_S`` and holds little."""

    def __init__(self, port: int) -> None:
        self._port, self.port = port, 0
        self.marks: list[tuple[float, int]] = [(0.0, 0)]
        """(when, bytes carried there by then)"""

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 10)
        listener.bind(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        async with await asyncio.start_server(self._carry, sock=listener, limit=8 << 10):
            yield

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        other_reader, other_writer = await asyncio.open_connection("127.0.0.1", self._port)
        with contextlib.closing(writer), contextlib.closing(other_writer):
            back = asyncio.create_task(_copy(other_reader, writer))
            free_at = time.monotonic()
            with contextlib.suppress(OSError):
                while data := await reader.read(2 << 10):
                    free_at = max(free_at, time.monotonic()) + len(data) / LINE_BYTES_PER_S
                    await asyncio.sleep(free_at - time.monotonic())
                    other_writer.write(data)
                    self.marks.append((time.monotonic(), self.marks[-1][1] + len(data)))
            back.cancel()
            await asyncio.gather(back, return_exceptions=True)

    @property
    def bytes_per_s(self) -> float:
        """Of all that it has carried: less than it can on a busy machine."""
        (began_at, _), (ended_at, carried) = self.marks[1], self.marks[-1]
        return carried / (ended_at - began_at)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)


def test_a_short_burst_that_buffers_took_says_nothing_of_a_line_that_was_seen() -> None:
    meter, line, now = UploadMeter(), 12e6, 1000.0

    def exchange(megabytes: int, handed_bytes_per_s: float) -> None:
        nonlocal now
        for number in range(2 * megabytes):
            meter.started(now)
            took_s = 0.5e6 / handed_bytes_per_s
            now += took_s
            meter.came(int(min(line, handed_bytes_per_s) * took_s), took_s, True, now)
            meter.finished("bcd"[number % 3], 500_000, now)
        now += 5.0
        assert meter.rest(now)

    for rate in (40e6, 30e6):
        exchange(4, rate)
        assert meter.bytes_per_s == pytest.approx(40e6, rel=0.1)  # nothing better is known
    exchange(24, line)
    assert meter.bytes_per_s == pytest.approx(line, rel=0.01)
    for _ in range(6):
        exchange(4, 40e6)
    assert meter.bytes_per_s == pytest.approx(line, rel=0.01)
    exchange(24, 6e6)
    line = 9e6
    for _ in range(5):
        exchange(24, line)
    assert meter.bytes_per_s == pytest.approx(9e6, rel=0.01)


@pytest.mark.parametrize(("is_far", "known_again"), [(True, 120e6), (False, 120e6)])
def test_a_low_rate_of_busy_first_seconds_does_not_stay_for_good(is_far: bool, known_again: float) -> None:
    """At 1 Gbit/s each later exchange is over before it can be seen arriving, and nothing contradicted what
    was measured while the processes started: their peer was partial in 54 of 56 rounds."""
    meter, now = UploadMeter(), 1000.0

    def exchange(megabytes: int, rate: float, looks: bool) -> None:
        nonlocal now
        for number in range(2 * megabytes):
            meter.started(now)
            now += 0.5e6 / rate
            if looks:
                meter.came(int(0.5e6), 0.5e6 / rate, True, now)
            meter.finished("bcd"[number % 3], 500_000, now)
        if is_far and not looks:
            meter.came(0, 0.0, False, now)  # it was looked at, but too shortly
        now += 1.0
        assert meter.rest(now)

    exchange(6, 5e6, looks=is_far)
    assert meter.bytes_per_s == pytest.approx(5e6, rel=0.1)
    exchange(6, known_again, looks=False)
    assert (meter.bytes_per_s == pytest.approx(5e6, rel=0.1)) == is_far  # once may be a buffer
    for _ in range(10):
        exchange(6, known_again, looks=False)
    assert meter.bytes_per_s == pytest.approx(known_again, rel=0.1)


def test_a_fast_line_that_has_become_faster_is_found_out_though_its_bursts_are_short() -> None:
    """Above ``FAST_BYTES_PER_S`` bulk takes no turns, so nothing else keeps the bursts from being short."""
    meter, now = UploadMeter(), 1000.0

    def exchange(line: float) -> None:
        """60 MB, of which buffers hold 3 MB, and a round trip of 50 ms."""
        nonlocal now
        began_at, sent, looked_at, there = now, 0.0, now, 0.0
        while sent < 60e6:
            meter.started(now)
            sent += 0.5e6
            now = max(now + 0.5e6 / 400e6, began_at + (sent - 3e6) / line)
            if now - looked_at >= 0.04:
                is_there = min(sent, line * max(0.0, now - began_at - 0.05))
                meter.came(int(is_there - there), now - looked_at, True, now)
                looked_at, there = now, is_there
            meter.finished("bcd"[int(sent / 0.5e6) % 3], 500_000, now)
        now += 5.0
        assert meter.rest(now)

    for _ in range(5):
        exchange(30e6)
    assert meter.bytes_per_s == pytest.approx(30e6, rel=0.15)
    for _ in range(4):
        exchange(125e6)
    assert meter.bytes_per_s == pytest.approx(125e6, rel=0.1)


async def test_a_claimed_upload_is_the_lines_and_a_heartbeat_does_not_wait_behind_bulk(
    tmp_path: Path,
) -> None:
    async with open_pair("libp2p", tmp_path) as (a, b):
        line = ThinLine(int(b.record.maddrs[0].split("/tcp/")[1].split("/")[0]))
        async with line.open(), asyncio.TaskGroup() as tasks:
            there = b.identity.peer_id
            record = PeerRecord(peer=there, maddrs=[f"/ip4/127.0.0.1/tcp/{line.port}/p2p/{there}"])

            async def find(peer: PeerId, fresh: bool) -> PeerRecord | None:
                return record

            observer = LinkObserver(lambda *_: None, lambda *_: None, lambda *_: None)
            links = Links([a.carrier], find, observer, tasks, 0.0)
            for _ in range(PIECES):
                links.post(there, bytes(PIECE_BYTES), bulk=True)
            await until(lambda: len(b.received) >= 4)
            links.post(there, b"heartbeat", bulk=False)
            await until(lambda: (a.identity.peer_id, b"heartbeat") in b.received)
            assert len(b.received) < 20  # it did not wait behind what the daemon would have taken
            await until(lambda: len(b.received) == PIECES + 1)
            carried_bytes_per_s = line.bytes_per_s
            async with asyncio.timeout(PATIENCE_S):
                while not links.upload_bytes_per_s:  # told when the next burst begins
                    links.post(there, b"next", bulk=True)
                    await asyncio.sleep(0.2)
            claimed = links.upload_bytes_per_s
            await links.close()
        # The later half is measured: a machine that stands still then, or before, moves it so far at most.
        assert 0.5 * carried_bytes_per_s < claimed < 1.5 * LINE_BYTES_PER_S
