"""What is under way on a connection and how much may be: the receiver's word, and the kernel's send buffer.

Bytes that lie in a buffer between us and the line count as sent. A home line then seems to carry hundreds of
megabytes a second, and a heartbeat waits behind seconds of bulk. ``Acknowledged`` bounds what a daemon may
hold by what the receiver says it has read. ``SendBuffer`` bounds what the kernel holds of a TCP connection
that a library opened for us (``TCP_NOTSENT_LOWAT``, Linux, tcp(7)), and asks it how the way is.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import stat
import struct
from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

from p2p_co2.errors import RemoteProtocolError

SAY_EVERY_S = 0.01
"""A receiver says what it has at most this often."""
WAITING_S = 0.25
"""So much longer than the way takes may what is under way keep the next message waiting."""
LEAST_BYTES, MOST_BYTES = 32 << 10, 32 << 20
"""Room that there always is, and that there is at most."""
MOST_MESSAGES = 4096
"""Told apart under way."""
UNSENT_BYTES, MOST_UNSENT_BYTES = 32 << 10, 1 << 20
"""What a connection may hold unsent: one of three on a slow home link needs 0.05 s for the first."""
SLOW_BYTES_PER_S, UNSENT_S = 0.6e6, 0.2
"""A faster connection may hold what it carries beyond the first in so long: a core may be busy meanwhile."""
IDLE_S, STRETCH_S = 0.05, 1.0
"""A pause this long empties the buffer; a connection's speed is measured over so long beside pauses."""
NEAR_S = 0.002
"""Round trips below this are of this machine or its network: such a connection is left alone."""
FRESH_MS = 100
"""What a connection knows of round trips is as old as the last acknowledgement that it got."""
_MAX_DIGITS = 18
_ROUND_TRIP, _SEEN = struct.Struct("68xI"), struct.Struct("=B15xI8xI24xI8xI48xQ20xI")
"""``tcpi_rtt``; and ``tcpi_state``, ``snd_mss``, ``sacked``, ``last_ack_recv`` (milliseconds), ``rtt``,
``bytes_acked`` and ``min_rtt`` (microseconds), in ``struct tcp_info`` of linux/tcp.h."""
_ESTABLISHED = 1
_OPEN_FILES = "/proc/self/fd"

OpenFile = tuple[str, int]
"""(descriptor, inode): a descriptor alone may be another file's by now."""


class Seen(NamedTuple):
    """What is seen of a link."""

    queued_s: float | None = None
    """How much longer than at best the round trip takes now; None where that is not known."""
    there_bytes: int = 0
    """What the receiver's kernel has acknowledged since the beginning; 0 where that is not known."""


class Acknowledged:
    """What the other end of one link says that it has, from the link's first message on.

    The room for what is under way is found as LEDBAT finds it (RFC 6817): it grows by what arrives sooner
    and shrinks by what arrives later. Law: nobody has more than was sent, nor less than before; a receiver
    that lies can hold up what goes to itself, and seem no faster than we hand over.
    """

    def __init__(self) -> None:
        self.sent_bytes = self.arrived_bytes = 0
        """Of messages: handed over, and known to be there."""
        self.room_bytes = float(LEAST_BYTES)
        self.on_news: Callable[[], None] = lambda: None
        """Called when more has arrived."""
        self._messages: deque[tuple[int, float, bool]] = deque()
        """Under way: bytes sent up to its end, when it was sent, whether the room was used."""
        self._quickest_s = math.inf
        """The shortest way so far: what is more is waiting."""

    @property
    def has_room(self) -> bool:
        """Whether bulk may be handed over."""
        return self.sent_bytes - self.arrived_bytes < self.room_bytes

    def sent(self, size_bytes: int, now: float) -> None:
        """A message is handed over."""
        self.sent_bytes += size_bytes
        was_used = 2 * (self.sent_bytes - self.arrived_bytes) >= self.room_bytes
        if len(self._messages) == MOST_MESSAGES:
            self._messages.pop()  # its bytes are there when this one's are
        self._messages.append((self.sent_bytes, now, was_used))

    def hear(self, said: bytes, now: float) -> None:
        """Take the other end's word, decimal digits. Raises ``RemoteProtocolError`` if it cannot be true."""
        if not said.isdigit() or len(said) > _MAX_DIGITS:
            raise RemoteProtocolError("wrong acknowledgement", "not a number of bytes")
        total_bytes = int(said)
        if not self.arrived_bytes <= total_bytes <= self.sent_bytes:
            detail = f"{total_bytes} bytes; {self.sent_bytes} were sent and {self.arrived_bytes} there before"
            raise RemoteProtocolError("wrong acknowledgement", detail)
        if total_bytes == self.arrived_bytes:
            return
        while self._messages and self._messages[0][0] <= total_bytes:
            end_bytes, sent_at, was_used = self._messages.popleft()
            self._adjust(end_bytes - self.arrived_bytes, now - sent_at, was_used)
            self.arrived_bytes = end_bytes
        self.arrived_bytes = total_bytes
        self.on_news()

    def _adjust(self, size_bytes: int, took_s: float, was_used: bool) -> None:
        self._quickest_s = min(self._quickest_s, took_s)
        early = max(-1.0, 1 - (took_s - self._quickest_s) / WAITING_S)
        if early < 0 or was_used:
            self.room_bytes = min(MOST_BYTES, max(LEAST_BYTES, self.room_bytes + early * size_bytes))


class SendBuffer:
    """The kernel's send buffer of one open connection to ``host:port`` (``host`` an address).

    gRPC has no option for it, hence the search through this process's own sockets. ``others``: files of
    those to the same place that are known. A far connection is bounded to ``UNSENT_BYTES``; one that turns
    out to be fast may hold more. Law: a connection that is not found changes nothing but the figures.
    """

    def __init__(self, host: str, port: int, others: Collection[OpenFile] = ()) -> None:
        found = [one for one in _files_to(host, port) if one not in others]
        self.files = [one for one in found if _bound(one)]
        self.is_far = bool(self.files)
        self._bound_bytes, self._last_at = UNSENT_BYTES, -1e9
        self._taken_bytes, self._taken_s = 0, 0.0

    def took(self, size_bytes: int, started_at: float, now: float) -> None:
        """The connection took a message from ``started_at`` to ``now``; the first after a pause only fills
        the buffer and is not counted."""
        if started_at - self._last_at <= IDLE_S:
            self._taken_bytes += size_bytes
            self._taken_s += now - self._last_at
        self._last_at = now
        if self._taken_s >= STRETCH_S:
            self._make_room(self._taken_bytes / self._taken_s)
            self._taken_bytes, self._taken_s = 0, 0.0

    def look(self) -> Seen:
        """See ``Link.look``."""
        seen = [_seen(info) for info in self._infos(_SEEN.size)]
        waits_s = [one.queued_s for one in seen if one.queued_s is not None]
        return Seen(min(waits_s, default=None), sum(one.there_bytes for one in seen))

    def _infos(self, size_bytes: int) -> Iterator[bytes]:
        """The beginning of each connection's ``struct tcp_info``, if it is still there."""
        for one in self.files:
            with _copy_of(one) as connection:
                if connection is not None:
                    yield connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size_bytes)

    def _make_room(self, bytes_per_s: float) -> None:
        wanted = min(int(UNSENT_S * (bytes_per_s - SLOW_BYTES_PER_S)), MOST_UNSENT_BYTES)
        wanted = max(wanted, UNSENT_BYTES)
        if not self._bound_bytes / 1.5 < wanted < self._bound_bytes * 1.5:
            self._bound_bytes = wanted
            for one in self.files:
                with _copy_of(one) as connection:
                    if connection is not None:
                        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, wanted)


def _bound(file: OpenFile) -> bool:
    """Bound a connection's send buffer to ``UNSENT_BYTES``, unless it is near."""
    with _copy_of(file) as connection:
        if connection is not None:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ROUND_TRIP.size)
            if _ROUND_TRIP.unpack(info)[0] / 1e6 >= NEAR_S:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
                return True
    return False


def _seen(info: bytes) -> Seen:
    """What a ``struct tcp_info`` says: how much longer than the shortest the round trip is, unless nothing
    was carried for a while, and what is there, behind what was lost too. Old kernels say nothing."""
    if len(info) < _SEEN.size:
        return Seen()
    state, segment_bytes, sacked, heard_ms_ago, now_us, there_bytes, least_us = _SEEN.unpack(info)
    is_known = state == _ESTABLISHED and heard_ms_ago <= FRESH_MS
    queued_s = max(0, now_us - least_us) / 1e6 if is_known else None
    return Seen(queued_s, there_bytes + sacked * segment_bytes)


def _files_to(host: str, port: int) -> list[OpenFile]:
    """Our open connections to ``host:port``."""
    found = []
    for name in os.listdir(_OPEN_FILES):
        connection = _socket_of(name)
        if connection is None:
            continue
        with contextlib.closing(connection), contextlib.suppress(OSError):  # not connected (any more)
            is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6)
            if is_tcp and connection.type == socket.SOCK_STREAM:
                there, there_port = connection.getpeername()[:2]
                if (there.removeprefix("::ffff:"), there_port) == (host, port):
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


def _socket_of(name: str, inode: int | None = None) -> socket.socket | None:
    """A socket on a copy of descriptor ``name``; None if that is none, or not the one of ``inode``.

    Only where the inode is not known the kernel is asked for family and type, which takes longer than all
    else. No other file is copied: to close the copy of one that is locked (fcntl(2)) would unlock it.
    """
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
