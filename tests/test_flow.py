"""What is under way: the receiver's word, and what the kernel says and holds of connections of gRPC."""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.net.transport import flow
from p2p_co2.net.transport.flow import (
    LEAST_BYTES,
    MOST_BYTES,
    MOST_UNSENT_BYTES,
    UNSENT_BYTES,
    WAITING_S,
    Acknowledged,
    SendBuffer,
)
from p2p_co2.net.transport.grpc_carrier import GrpcLink
from tests.transport_peers import Peer, open_pair

PIECE_BYTES = 16 << 10


def carry(bytes_per_s: float, way_s: float, for_s: float) -> tuple[Acknowledged, float, float]:
    """Pieces without end over a line behind buffers that take all: (what was found out, bytes that came per
    second of the later half, the longest that a piece waited in it)."""
    said, now, came, waited_s = Acknowledged(), 0.0, 0, 0.0
    line_free_at = 0.0
    arrivals: list[tuple[float, int, float]] = []
    while now < for_s:
        while said.has_room:
            said.sent(PIECE_BYTES, now)
            line_free_at = max(now, line_free_at) + PIECE_BYTES / bytes_per_s
            heapq.heappush(arrivals, (line_free_at + way_s, said.sent_bytes, now))
        now, total_bytes, sent_at = heapq.heappop(arrivals)
        said.hear(str(total_bytes).encode(), now)
        if now > for_s / 2:
            came += PIECE_BYTES
            waited_s = max(waited_s, now - sent_at - way_s)
    return said, came / (now - for_s / 2), waited_s


@pytest.mark.parametrize("bytes_per_s", [83e3, 250e3, 2.5e6, 25e6])
@pytest.mark.parametrize("way_s", [0.0005, 0.04, 0.2])
def test_a_line_is_kept_full_and_little_waits_before_it(bytes_per_s: float, way_s: float) -> None:
    _, came_bytes_per_s, waited_s = carry(bytes_per_s, way_s, 6.0)
    assert 0.93 * bytes_per_s < came_bytes_per_s < 1.07 * bytes_per_s
    least_s = (LEAST_BYTES + 2 * PIECE_BYTES) / bytes_per_s
    assert waited_s < 2 * WAITING_S + least_s


def test_there_is_always_room_for_some_and_never_for_all() -> None:
    said = Acknowledged()
    for number in range(1, 200):  # later and later
        said.sent(PIECE_BYTES, 10.0 * number)
        said.hear(str(number * PIECE_BYTES).encode(), 10.0 * number + number)
    assert said.room_bytes == LEAST_BYTES
    said = Acknowledged()
    for number in range(40):  # at once, whatever it is
        said.sent(1 << number, float(number))
        said.hear(str((2 << number) - 1).encode(), float(number))
    assert said.room_bytes == MOST_BYTES


def test_what_is_not_used_does_not_grow() -> None:
    said = Acknowledged()
    for number in range(1, 1000):
        said.sent(100, float(number))
        said.hear(str(number * 100).encode(), number + 0.001)
    assert said.room_bytes == LEAST_BYTES


@pytest.mark.parametrize(
    "word", [b"", b"-1", b"1e2", b"201", b"99", b"9" * 400, b"\xd9\xa1", b" 150", b"1" * 19]
)
def test_words_that_cannot_be_true_are_refused(word: bytes) -> None:
    said = Acknowledged()
    said.sent(200, 1.0)
    said.hear(b"100", 1.0)
    with pytest.raises(RemoteProtocolError, match="wrong acknowledgement"):
        said.hear(word, 2.0)
    assert said.arrived_bytes == 100


def test_what_a_round_trip_is_longer_than_the_shortest_waits_before_the_line() -> None:
    # state, segment, acknowledged out of turn, last acknowledgement, round trip, acknowledged, shortest, rate
    info = struct.Struct("=B15xI8xI24xI8xI48xQ20xI8xQ")
    for values, queued_s, there_bytes in (
        ((1, 1448, 2, 20, 90_000, 7000, 40_000), 0.05, 7000 + 2 * 1448),
        ((1, 1448, 0, 20, 40_000, 7000, 90_000), 0.0, 7000),
        ((1, 1448, 0, 600, 90_000, 7000, 40_000), None, 7000),  # it was so
        ((7, 1448, 0, 20, 90_000, 7000, 40_000), None, 7000),  # closed
    ):
        assert flow.seen_in(info.pack(*values, 5000)) == (flow.Seen(queued_s, there_bytes), 5000)
    assert flow.seen_in(info.pack(1, 1448, 2, 20, 90_000, 7000, 40_000, 5000)[:120]) == (flow.Seen(), 0)


async def buffer_of_link(a: Peer, b: Peer) -> SendBuffer:
    link = await a.carrier.connect(b.record)
    assert isinstance(link, GrpcLink)
    assert link.send_buffer is not None
    assert link.is_far == link.send_buffer.is_far
    return link.send_buffer


def bounded_connections() -> int:
    """Connections of this process that may hold ``UNSENT_BYTES`` unsent."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as copy:
            bound = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT)
            found += bound == UNSENT_BYTES
    return found


@pytest.mark.parametrize("is_far", [False, True])
async def test_a_link_out_of_this_machine_leaves_little_unsent_in_the_kernel_and_one_within_is_left_alone(
    is_far: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_far:
        monkeypatch.setattr(flow, "is_within", lambda _: False)
    async with open_pair("grpc", tmp_path) as (a, b):
        buffer = await buffer_of_link(a, b)
        assert (buffer.is_far, bounded_connections()) == (is_far, is_far)
        assert buffer.look().there_bytes > 0


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_connection_from_an_address_to_the_same_one_is_within_this_machine(host: str) -> None:
    """However short the way to another address is: a line is measured where it is, not where it is slow."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        place = listener.getsockname()[:2]
        with socket.create_connection(place):
            assert not SendBuffer(*place).is_far
    with socket.create_server(("127.0.0.1", 0)) as listener:
        place = listener.getsockname()
        with socket.create_connection(place, source_address=("127.0.0.2", 0)):
            assert SendBuffer(*place).is_far


async def test_a_fast_connection_may_hold_what_it_carries_in_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flow, "is_within", lambda _: False)
    rate = 0
    monkeypatch.setattr(flow, "seen_in", lambda info: (flow.Seen(), rate))
    async with open_pair("grpc", tmp_path) as (a, b):
        buffer = await buffer_of_link(a, b)
        for shown, bound_bytes in (
            (100_000, UNSENT_BYTES),
            (4_000_000, 400_000),
            (3_500_000, 400_000),
            (10**9, MOST_UNSENT_BYTES),
            (0, UNSENT_BYTES),
        ):
            rate = shown
            buffer.look()
            assert buffer.bound_bytes == bound_bytes


async def test_looking_at_our_links_changes_no_socket_of_the_users() -> None:
    """With a default timeout a socket that is made of a copied descriptor makes the original non-blocking."""
    left, right = socket.socketpair()  # blocking, as those of ``multiprocessing.Pipe``
    socket.setdefaulttimeout(30.0)
    try:
        assert not SendBuffer("127.0.0.1", 9).is_far
    finally:
        socket.setdefaulttimeout(None)
    with left, right:
        assert os.get_blocking(left.fileno())
        assert os.get_blocking(right.fileno())


TAKES_LOCK = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)"


def test_a_file_or_connection_that_has_a_connections_number_by_now_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To close any descriptor of a file gives up this process's locks on it (fcntl(2)); SQLite uses them."""
    monkeypatch.setattr(flow, "is_within", lambda _: False)
    path = tmp_path / "database"
    path.touch()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connection = socket.create_connection(listener.getsockname())
        connection.sendall(b"x")
        buffer = SendBuffer(*listener.getsockname())
        assert buffer.look().there_bytes
        with socket.create_connection(listener.getsockname()) as other:
            other.sendall(b"x")
            os.dup2(other.fileno(), connection.fileno())
        assert not buffer.look().there_bytes
        opened = path.open("r+")
        os.dup2(opened.fileno(), connection.fileno())
        fcntl.lockf(opened, fcntl.LOCK_EX)
        assert not buffer.look().there_bytes
        assert not SendBuffer(*listener.getsockname()).is_far
        takes_it = [sys.executable, "-c", TAKES_LOCK, str(path)]
        assert subprocess.run(takes_it, stderr=subprocess.DEVNULL, check=False).returncode == 1
        connection.close()
        opened.close()
