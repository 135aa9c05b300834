"""The kernel's send buffers of connections that a library opened for us: kept short.

A kernel lets a connection's buffer grow to megabytes. What is in it counts as sent: a home link then seems
to take hundreds of megabytes per second, the division of a round by upload rates becomes a lottery, and a
vote waits behind seconds of payload. ``TCP_NOTSENT_LOWAT`` (Linux, tcp(7)) bounds what the buffer holds
beyond what is under way, so that handing over takes as long as sending. gRPC has no option for it, hence the
search through this process's own sockets. A fast line would stand idle whenever this process is busy for
longer than so little lasts, so a connection that turns out to be fast may hold more (``SendBuffer``), as long
as it is, and keeps that when another to the same place is bounded. It alone: one that holds as much as a fast
one beside it, and is slow, goes on for a second when all others have ended (0.4 MB at 0.4 MB/s were seen).

Law: a connection that is not found changes nothing but the figures; one to a near machine, which drains any
buffer in milliseconds, is left alone, since a short buffer has to be filled more often. Price: one look at
the open files for each link that is opened.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from p2p_co2.net.transport.base import Seen

UNSENT_BYTES = 32 << 10
"""Of one connection; one of three on a slow home link needs a twentieth of a second for as much."""
SLOW_BYTES_PER_S, UNSENT_S, MOST_UNSENT_BYTES = 0.6e6, 0.2, 1 << 20
"""A faster connection may hold what it carries beyond the first in so long, at most so much: this process and
those beside it keep a core busy for a tenth of a second now and then."""
IDLE_S, STRETCH_S = 0.05, 1.0
"""A pause this long empties the buffer; how fast a connection is, is measured over so long beside pauses."""
NEAR_S = 0.002
"""Round trips below this are of this machine or its network."""
WINDOWS_EACH_TRIP = 3.0
"""What a connection may send in a round trip as it begins (BBR: 2.9). One that measures the way has almost no
window, at whatever rate it may send: what it takes waits for the end of that."""
MEASURES_S = 0.2
"""BBR measures the way for so long and a round trip (PROBE_RTT), every 10 s; then it goes on as before."""
ANEW_AFTER_S, MOST_ANEW_AFTER_S = 2.0, 64.0
"""A connection that still crawls so long after TCP began anew may do so again, after twice as long each time
up to the second of these: a receiver that is slow itself gets more than it can take for three round trips."""
HELD_S = 0.01
"""How long the kernel is not asked again what it holds: with every look of every lane at a full line the
questions took a tenth of a core."""
FRESH_MS = 100
"""What a connection knows of round trips is as old as the last acknowledgement that it got."""
_ROUND_TRIP, _SEEN = struct.Struct("68xI"), struct.Struct("=B15xI8xI24xI8xI32xQ8xQ20xI")
"""``tcpi_rtt``; and ``tcpi_state``, ``snd_mss``, ``sacked``, ``last_ack_recv`` (milliseconds), ``rtt``,
``pacing_rate``, ``bytes_acked`` and ``min_rtt`` (microseconds), in ``struct tcp_info`` of linux/tcp.h."""
_HELD = struct.Struct("B15xI4xI40xI8xI20xQ32xI4x")
"""``tcpi_state``, ``snd_mss``, ``unacked``, ``rtt``, ``snd_cwnd``, ``pacing_rate`` and ``notsent_bytes``."""
_ESTABLISHED = 1

OpenFile = tuple[str, int]
"""(descriptor, inode): a descriptor alone may be another file's by now."""
_OPEN_FILES = Path("/proc/self/fd")


class SendBuffer:
    """What one connection, which must be open, may hold unsent. ``others``: those to the same place that are
    known, this is none of them. Times are of any one clock, in seconds."""

    def __init__(self, host: str, port: int, others: Collection[OpenFile] = ()) -> None:
        self.is_far = keep_little_unsent(host, port) > 0
        self.files = [one for one in _files_to(host, port) if one not in others] if self.is_far else []
        self._bound_bytes = UNSENT_BYTES if self.is_far else MOST_UNSENT_BYTES
        self._last_at = -1e9
        self._taken_bytes, self._taken_s = 0, 0.0
        self._anew_at, self._anew_after_s = -1e9, ANEW_AFTER_S
        self._held, self._held_at = list[bytes](), -1e9
        """What the kernel holds of each, and when it was asked; anew once it has taken a message."""
        self.handing_bytes = 0
        """Of messages that it is to take and has not."""

    def took(self, size_bytes: int, started_at: float, now: float) -> None:
        """The connection took a message from ``started_at`` to ``now``. What comes first after a pause fills
        the buffer and is not counted."""
        if started_at - self._last_at <= IDLE_S:
            self._taken_bytes += size_bytes
            self._taken_s += now - self._last_at
        self._last_at, self._held_at = now, -1e9
        if self._taken_s >= STRETCH_S:
            self._make_room(self._taken_bytes / self._taken_s)
            self._taken_bytes, self._taken_s = 0, 0.0

    def look(self) -> Seen:
        """See ``Link.look``."""
        seen = [_seen(info) for info in self._infos(_SEEN.size)]
        waits_s = [one.queued_s for one in seen if one.queued_s is not None]
        at_most = max((one.at_most_bytes_per_s for one in seen), default=0.0)
        return Seen(min(waits_s, default=None), sum(one.there_bytes for one in seen), at_most)

    def begin_anew(self, now: float) -> None:
        """See ``Link.begin_anew``."""
        if now - self._anew_at < self._anew_after_s:
            return
        is_soon = now - self._anew_at < 2 * self._anew_after_s
        self._anew_after_s = min(MOST_ANEW_AFTER_S, 2 * self._anew_after_s) if is_soon else ANEW_AFTER_S
        self._anew_at = now
        for one in self.files:
            with _copy_of(one) as connection:
                if connection is not None:
                    _begin_anew(connection)

    def there_in_s(self, size_bytes: int) -> float:
        """When so much more will be there, as far as the kernel knows; 0.0 where it does not."""
        if (now := time.monotonic()) - self._held_at >= HELD_S:
            self._held, self._held_at = list(self._infos(_HELD.size)), now
        more_bytes = self.handing_bytes + size_bytes
        return max((_there_in_s(info, more_bytes) for info in self._held), default=0.0)

    def _infos(self, size_bytes: int) -> Iterator[bytes]:
        """The beginning of each connection's ``struct tcp_info``, if it is still there."""
        for one in self.files:
            with _copy_of(one) as connection:
                if connection is not None:
                    yield connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size_bytes)

    def _make_room(self, bytes_per_s: float) -> None:
        wanted = min(int(UNSENT_S * (bytes_per_s - SLOW_BYTES_PER_S)), MOST_UNSENT_BYTES)
        wanted = max(wanted, UNSENT_BYTES)
        if self.is_far and not self._bound_bytes / 1.5 < wanted < self._bound_bytes * 1.5:
            self._bound_bytes = wanted
            for one in self.files:
                _let_hold(one, wanted)


def keep_little_unsent(host: str, port: int) -> int:
    """Bound the send buffers of this process's connections to ``host:port`` (``host`` an address) to
    ``UNSENT_BYTES``, or what they may hold already, unless that is near; returns how many are bounded."""
    return sum(_bound(connection, host) for _, connection in _connections(port))


def _bound(connection: socket.socket, host: str) -> bool:
    """Bound one of them, if it is to ``host`` and not near; closes our copy."""
    with contextlib.closing(connection), contextlib.suppress(OSError):  # it may have broken meanwhile
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ROUND_TRIP.size)
        if _host_of(connection) == host and _ROUND_TRIP.unpack(info)[0] / 1e6 >= NEAR_S:
            before = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT)  # 0: unbounded
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, max(before, UNSENT_BYTES))
            return True
    return False


def _let_hold(file: OpenFile, size_bytes: int) -> None:
    """Bound one connection's send buffer, whatever it may hold now."""
    with _copy_of(file) as connection:
        if connection is not None:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, size_bytes)


def _files_to(host: str, port: int) -> list[OpenFile]:
    """Of our connections to ``host:port``."""
    found = []
    for name, connection in _connections(port):
        with contextlib.closing(connection), contextlib.suppress(OSError):  # it may have broken meanwhile
            if _host_of(connection) == host:
                found.append((name, os.fstat(connection.fileno()).st_ino))
    return found


@contextlib.contextmanager
def _copy_of(file: OpenFile) -> Iterator[socket.socket | None]:
    """The connection, on a copy of its descriptor; None if that is another file's by now. It is found anew
    each time: a copy of ours would keep the connection open. What fails because it has broken is left."""
    connection = _socket_of(*file)
    if connection is None:
        yield None
        return
    with contextlib.closing(connection), contextlib.suppress(OSError):
        yield connection


def _seen(info: bytes) -> Seen:
    """By how much the round trip of a ``struct tcp_info`` is longer than the shortest, unless the connection
    is closed or has carried nothing for a while, and what is there, behind what was lost too; nothing of an
    old kernel's that does not say."""
    if len(info) < _SEEN.size:
        return Seen()
    state, segment_bytes, sacked, heard_ms_ago, now_us, pacing, there_bytes, least_us = _SEEN.unpack(info)
    is_known = state == _ESTABLISHED and heard_ms_ago <= FRESH_MS
    queued_s = max(0, now_us - least_us) / 1e6 if is_known else None
    at_most = float(pacing) if state == _ESTABLISHED else 0.0
    return Seen(queued_s, there_bytes + sacked * segment_bytes, at_most)


def _begin_anew(connection: socket.socket) -> None:
    """Have BBR forget what it has learned of the way: it doubles its rate each round trip then. Other ways of
    congestion control do not learn a rate. Raises ``OSError``: nothing has changed. An administrator may give
    BBR to a connection (by its route) and keep it from us: once away, it would not come back. So that is
    tried on a socket that carries nothing first."""
    control = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")
    if control != b"bbr":
        return
    with socket.socket() as trial:
        for some in (trial, connection):
            for one in (b"reno", control):
                some.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, one)


def _there_in_s(info: bytes, more_bytes: int) -> float:
    """When what a connection holds and ``more_bytes`` will be there, at the rate at which it may send now or
    once it has measured the way; 0.0 of one that is closed, and of an old kernel's that does not say."""
    if len(info) < _HELD.size:
        return 0.0
    state, segment_bytes, under_way, trip_us, window, pacing, unsent_bytes = _HELD.unpack(info)
    if state != _ESTABLISHED:
        return 0.0
    held_bytes = under_way * segment_bytes + unsent_bytes + more_bytes
    by_window_s = held_bytes / max(1.0, WINDOWS_EACH_TRIP * 1e6 * window * segment_bytes / max(1, trip_us))
    by_pace_s = held_bytes / max(1.0, pacing)
    return float(max(by_pace_s, min(by_window_s, MEASURES_S + trip_us / 1e6 + by_pace_s)))


def _host_of(connection: socket.socket) -> str:
    """The address at the other end. Raises ``OSError``."""
    host: str = connection.getpeername()[0]
    return host.removeprefix("::ffff:")


def _connections(port: int) -> Iterator[tuple[str, socket.socket]]:
    """Our open connections to ``port`` anywhere, each with its descriptor, as sockets of their own to be
    closed."""
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
            yield name, connection
        else:
            connection.close()


def _socket_of(name: str, inode: int | None = None) -> socket.socket | None:
    """A socket on a copy of descriptor ``name``, so that closing it leaves the original alone; None if that
    is none, or not the one of ``inode``. Only where that is not known the kernel is asked for its family and
    type, which takes longer than all else. No other file is copied: to close the copy of one that somebody
    has locked (fcntl(2); SQLite does) would unlock it."""
    try:
        if not _is_socket(int(name), inode):
            return None
        copy = os.dup(int(name))
    except OSError:
        return None  # another thread has closed it meanwhile
    try:
        if not _is_socket(copy, inode):
            os.close(copy)  # another thread has opened a file by that number
            return None
        # A default timeout of the user's changes the original with the copy. Where there is none nothing is
        # set: another thread that makes it non-blocking at this moment would find that undone.
        blocks = socket.getdefaulttimeout() is not None and os.get_blocking(copy)
        family, kind, protocol = (-1, -1, -1) if inode is None else (socket.AF_INET, socket.SOCK_STREAM, 0)
        connection = socket.socket(family, kind, protocol, fileno=copy)
        if blocks:
            os.set_blocking(copy, True)
    except OSError:
        os.close(copy)
        return None
    return connection


def _is_socket(descriptor: int, inode: int | None) -> bool:
    """Whether it is one, and the one of ``inode``. Raises ``OSError``."""
    found = os.fstat(descriptor)
    return stat.S_ISSOCK(found.st_mode) and inode in (None, found.st_ino)
