"""The kernel's send buffers of connections that a library opened for us: kept short.

A kernel lets a connection's buffer grow to megabytes. What is in it counts as sent: a home link then seems
to take hundreds of megabytes per second, the division of a round by upload rates becomes a lottery, and a
vote waits behind seconds of payload. ``TCP_NOTSENT_LOWAT`` (Linux, tcp(7)) bounds what the buffer holds
beyond what is under way, so that handing over takes as long as sending. gRPC has no option for it, hence the
search through this process's own sockets.

Law: a connection that is not found changes nothing but the figures; one to a near machine, which drains any
buffer in milliseconds, is left alone, since a short buffer has to be filled more often. Price: one look at
the open files for each link that is opened.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

UNSENT_BYTES = 32 << 10
"""Of one connection; one of three on a slow home link needs a twentieth of a second for as much."""
NEAR_S = 0.002
"""Round trips below this are of this machine or its network."""
_ROUND_TRIP = struct.Struct("68xI")
"""``tcpi_rtt`` in ``struct tcp_info`` of linux/tcp.h, microseconds."""
_OPEN_FILES = Path("/proc/self/fd")


def keep_little_unsent(host: str, port: int) -> int:
    """Bound the send buffers of this process's connections to ``host:port`` (``host`` an address), unless
    that is near; returns how many were bounded."""
    return sum(_bound(connection, host) for connection in _connections(port))


def _bound(connection: socket.socket, host: str) -> bool:
    """Bound one of them, if it is to ``host`` and not near; closes our copy."""
    with contextlib.closing(connection), contextlib.suppress(OSError):  # it may have broken meanwhile
        peer = connection.getpeername()[0].removeprefix("::ffff:")
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ROUND_TRIP.size)
        if peer == host and _ROUND_TRIP.unpack(info)[0] / 1e6 >= NEAR_S:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
            return True
    return False


def _connections(port: int) -> Iterator[socket.socket]:
    """Our open connections to ``port`` anywhere, as sockets of their own to be closed."""
    for name in os.listdir(_OPEN_FILES):
        connection = _socket_of(name)
        if connection is None:
            continue
        try:
            is_wanted = connection.family in (socket.AF_INET, socket.AF_INET6)
            is_wanted = is_wanted and connection.type == socket.SOCK_STREAM
            is_wanted = is_wanted and connection.getpeername()[1] == port
        except OSError:
            is_wanted = False  # not connected (any more)
        if is_wanted:
            yield connection
        else:
            connection.close()


def _socket_of(name: str) -> socket.socket | None:
    """A socket on a copy of descriptor ``name``, so that closing it leaves the original alone."""
    try:
        if not os.readlink(_OPEN_FILES / name).startswith("socket:"):
            return None
        return socket.socket(fileno=os.dup(int(name)))
    except OSError:
        return None  # another thread has closed it meanwhile
