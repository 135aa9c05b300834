"""What is under way: the receiver's word, and what the kernel says and holds of connections of gRPC."""

from __future__ import annotations

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
    MOST_MESSAGES,
    MOST_UNSENT_BYTES,
    UNSENT_BYTES,
    WAITING_S,
    Acknowledged,
    SendBuffer,
)
from p2p_co2.net.transport.grpc_carrier import GrpcLink
from tests.transport_peers import open_pair

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


def test_news_are_told_once() -> None:
    said, news = Acknowledged(), []
    said.on_news = lambda: news.append(said.arrived_bytes)
    said.sent(100, 1.0)
    said.sent(100, 1.0)
    for word in (b"0", b"150", b"150", b"200"):
        said.hear(word, 2.0)
    assert news == [150, 200]


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


def test_a_receiver_that_never_says_what_came_costs_bounded_memory() -> None:
    """Control messages wait for no room, and a link may last for weeks."""
    said = Acknowledged()
    for second in range(3 * MOST_MESSAGES):
        said.sent(200, float(second))
    assert len(said._messages) == MOST_MESSAGES
    said.hear(str(said.sent_bytes).encode(), 1e6)
    assert said.arrived_bytes == said.sent_bytes
    assert not said._messages


def test_what_a_round_trip_is_longer_than_the_shortest_waits_before_the_line() -> None:
    # state, segment, acknowledged out of turn, last acknowledgement, round trip, acknowledged, shortest
    info = struct.Struct("=B15xI8xI24xI8xI48xQ20xI")
    seen = flow._seen
    assert seen(info.pack(1, 1448, 2, 20, 90_000, 7000, 40_000)) == (0.05, 7000 + 2 * 1448)
    assert seen(info.pack(1, 1448, 0, 20, 40_000, 7000, 90_000)) == (0.0, 7000)
    assert seen(info.pack(1, 1448, 0, 600, 90_000, 7000, 40_000)) == (None, 7000)  # it was so
    assert seen(info.pack(7, 1448, 0, 20, 90_000, 7000, 40_000)) == (None, 7000)  # closed
    assert seen(info.pack(1, 1448, 2, 20, 90_000, 7000, 40_000)[:120]) == (None, 0)  # an old kernel


def unsent_bounds(buffer: SendBuffer) -> set[int]:
    """``TCP_NOTSENT_LOWAT`` of its connections that are open."""
    bounds = set()
    for file in buffer.files:
        with flow._copy_of(file) as connection:
            if connection is not None:
                bounds.add(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT))
    return bounds


def carry_for_a_second(buffer: SendBuffer, since: float, bytes_per_s: float) -> None:
    """As if it took messages for a second, after what fills an empty buffer."""
    buffer.took(1 << 20, since, since)
    for number in range(8):
        buffer.took(int(bytes_per_s / 8), since + number / 8, since + (number + 1) / 8)


async def test_a_far_link_leaves_little_unsent_in_the_kernel_and_a_near_one_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_pair("grpc", tmp_path) as (a, b):
        for near_s, is_far in ((60.0, False), (0.0, True)):
            monkeypatch.setattr(flow, "NEAR_S", near_s)
            link = await a.carrier.connect(b.record)
            assert isinstance(link, GrpcLink)
            assert link.send_buffer is not None
            assert (unsent_bounds(link.send_buffer), link.is_far) == (
                {UNSENT_BYTES} if is_far else set(),
                is_far,
            )
            await link.close()


async def test_a_fast_connection_may_hold_more_and_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flow, "NEAR_S", 0.0)
    async with open_pair("grpc", tmp_path) as (a, b):
        buffers = []
        for _ in range(2):
            link = await a.carrier.connect(b.record)
            assert isinstance(link, GrpcLink)
            assert link.send_buffer is not None
            buffers.append(link.send_buffer)
        for since, bytes_per_s, bound_bytes in (
            (10.0, 0.8e6, UNSENT_BYTES),
            (20.0, 4e6, 680_000),
            (30.0, 3.5e6, 680_000),
            (40.0, 1e9, MOST_UNSENT_BYTES),
            (50.0, 0.6e6, UNSENT_BYTES),
        ):
            carry_for_a_second(buffers[1], since, bytes_per_s)
            assert unsent_bounds(buffers[1]) == {bound_bytes}
            assert unsent_bounds(buffers[0]) == {UNSENT_BYTES}


async def test_looking_at_our_links_changes_no_socket_of_the_users() -> None:
    """With a default timeout a socket that is made of a copied descriptor makes the original non-blocking."""
    left, right = socket.socketpair()  # blocking, as those of ``multiprocessing.Pipe``
    socket.setdefaulttimeout(30.0)
    try:
        SendBuffer("127.0.0.1", 9)
    finally:
        socket.setdefaulttimeout(None)
    with left, right:
        assert os.get_blocking(left.fileno())
        assert os.get_blocking(right.fileno())


TAKES_LOCK = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)"


def is_locked(path: Path) -> bool:
    """Whether another process finds it so."""
    command = [sys.executable, "-c", TAKES_LOCK, str(path)]
    return subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == 1


def test_a_file_that_has_a_connections_number_by_now_stays_locked(tmp_path: Path) -> None:
    """To close any descriptor of a file gives up this process's locks on it (fcntl(2)); SQLite uses them."""
    path = tmp_path / "database"
    path.touch()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connection = socket.create_connection(listener.getsockname())
        buffer = SendBuffer(*listener.getsockname())
        number = connection.fileno()
        buffer.files = [(str(number), os.fstat(number).st_ino)]  # of a far machine it finds them itself
        opened = path.open("r+")
        os.dup2(opened.fileno(), number)
        fcntl.lockf(opened, fcntl.LOCK_EX)
        assert is_locked(path)
        buffer.took(1, 0.0, 0.0)
        assert buffer.look().there_bytes == 0
        assert not SendBuffer(*listener.getsockname()).files
        assert is_locked(path)
        connection.close()
        opened.close()
    assert not is_locked(path)


def test_another_connection_of_the_same_number_is_none_of_ours() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connection = socket.create_connection(listener.getsockname())
        buffer = SendBuffer(*listener.getsockname())
        number = connection.fileno()
        buffer.files = [(str(number), os.fstat(number).st_ino)]
        with socket.create_connection(listener.getsockname()) as other:
            os.dup2(other.fileno(), number)
            buffer.took(1, 0.0, 0.0)
        assert buffer.look().there_bytes == 0
        connection.close()
