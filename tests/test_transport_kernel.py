"""What the kernel says of a connection of gRPC, and connections that begin anew."""

from __future__ import annotations

import socket
import struct
import sys
from pathlib import Path

import pytest

from p2p_co2.net.transport import send_buffer
from p2p_co2.net.transport.grpc_carrier import GrpcLink
from tests.transport_peers import open_pair


def test_what_a_round_trip_is_longer_than_the_shortest_waits_before_the_line() -> None:
    # state, segment, acknowledged out of turn, last acknowledgement, round trip, rate, acknowledged, shortest
    info = struct.Struct("=B15xI8xI24xI8xI32xQ8xQ20xI")
    seen = send_buffer._seen
    assert seen(info.pack(1, 1448, 2, 20, 90_000, 600_000, 7000, 40_000)) == (0.05, 7000 + 2 * 1448, 6e5)
    assert seen(info.pack(1, 1448, 0, 20, 40_000, 600_000, 7000, 90_000)) == (0.0, 7000, 6e5)
    assert seen(info.pack(1, 1448, 0, 600, 90_000, 600_000, 7000, 40_000)) == (None, 7000, 6e5)  # it was so
    assert seen(info.pack(7, 1448, 0, 20, 90_000, 600_000, 7000, 40_000)) == (None, 7000, 0.0)  # closed
    an_old_kernels = info.pack(1, 1448, 2, 20, 90_000, 600_000, 7000, 40_000)[:120]
    assert seen(an_old_kernels) == (None, 0, 0.0)  # does not say


BBR_INFO = 26
"""``TCP_CC_INFO`` of linux/tcp.h; BBR's begins with the rate that it has learned, 8 bytes."""


def learned_bytes_per_s(connection: socket.socket) -> int:
    told = connection.getsockopt(socket.IPPROTO_TCP, BBR_INFO, 20)
    return int.from_bytes(told[:8], sys.byteorder)


def test_a_connection_that_begins_anew_has_forgotten_how_slow_the_way_was() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    with ours, theirs:
        try:
            ours.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")
        except OSError:
            pytest.skip("this kernel has no BBR, or keeps it from us")
        ours.sendall(bytes(100_000))
        while len(theirs.recv(100_000, socket.MSG_PEEK)) < 100_000:
            pass
        assert learned_bytes_per_s(ours) > 0
        send_buffer._begin_anew(ours)
        assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0") == b"bbr"
        assert learned_bytes_per_s(ours) == 0
        ours.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
        send_buffer._begin_anew(ours)
        assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0") == b"reno"


def test_a_connection_keeps_the_congestion_control_that_we_could_not_give_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Restricted(socket.socket):
        """As where tcp_allowed_congestion_control lacks what a route gives."""

        def setsockopt(self, level: int, option: int, value: bytes) -> None:  # type: ignore[override]
            if value == b"bbr":
                raise PermissionError
            super().setsockopt(level, option, value)

    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
    try:
        ours.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")
    except OSError:
        ours.close()
        pytest.skip("this kernel has no BBR, or keeps it from us")
    with Restricted(fileno=ours.detach()) as connection:
        monkeypatch.setattr("p2p_co2.net.transport.send_buffer.socket.socket", Restricted)
        with pytest.raises(PermissionError):
            send_buffer._begin_anew(connection)
        control = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        assert control.rstrip(b"\0") == b"bbr"


async def test_a_connection_begins_anew_ever_more_seldom_where_that_does_not_help(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began: list[float] = []
    monkeypatch.setattr(send_buffer, "NEAR_S", 0.0)
    async with open_pair("grpc", tmp_path) as (a, b):
        link = await a.carrier.connect(b.record)
        assert isinstance(link, GrpcLink)
        assert link.send_buffer is not None
        link.send_buffer.files = link.send_buffer.files[:1]
        for now in range(1000, 1400):
            monkeypatch.setattr(send_buffer, "_begin_anew", lambda _, at=now: began.append(at))
            link.begin_anew(now)
        assert began == [1000, 1002, 1006, 1014, 1030, 1062, 1126, 1190, 1254, 1318, 1382]
        link.begin_anew(9000.0)
        link.begin_anew(9003.0)
        assert began[-2:] == [1399, 1399]  # it was well for long
        await link.close()


def test_when_more_would_be_there_by_a_connection() -> None:
    # state, segment, under way, round trip, window, pacing rate, unsent
    info = struct.Struct("=B15xI4xI40xI8xI20xQ32xI4x")
    there_in_s = send_buffer._there_in_s
    sent_soon = info.pack(1, 1000, 10, 100_000, 100, 400_000, 30_000)
    assert there_in_s(sent_soon, 40_000) == 0.2  # 80 kB at 400 kB/s
    assert there_in_s(info.pack(1, 1000, 10, 100_000, 20, 900_000, 30_000), 20_000) == 0.1  # of 600 kB/s
    assert there_in_s(info.pack(1, 1000, 0, 0, 0, 0, 0), 5) == 5.0  # it has not begun
    assert there_in_s(info.pack(7, 1000, 10, 100_000, 100, 400_000, 30_000), 40_000) == 0.0  # closed
    assert there_in_s(sent_soon[:120], 40_000) == 0.0  # an old kernel does not say


def test_a_connection_that_measures_the_way_goes_on_soon_and_one_that_crawls_does_not() -> None:
    """194 kB were handed to one of 25 kB/s, beside one that measured the way with 0.5 MB to carry."""
    info = struct.Struct("=B15xI4xI40xI8xI20xQ32xI4x")
    measures = info.pack(1, 1448, 270, 500_000, 4, 1_000_000, 107_000)
    crawls = info.pack(1, 1448, 4, 250_000, 8, 25_000, 0)
    assert send_buffer._there_in_s(measures, 32_768) == pytest.approx(0.2 + 0.5 + 0.53, abs=0.01)
    assert send_buffer._there_in_s(crawls, 32_768) == pytest.approx(1.54, abs=0.01)
    assert send_buffer._there_in_s(info.pack(1, 1448, 4, 100_000, 4, 1_000_000, 0), 0) == pytest.approx(
        4 * 1448 / (3 * 4 * 1448 / 0.1)
    )  # a little goes at once
