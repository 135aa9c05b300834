"""What is under way on a connection and how much may be: the receiver's word, and the kernel's send buffer.

Bytes that lie in a buffer between us and the line count as sent. A home line then seems to carry hundreds of
megabytes a second, and a heartbeat waits behind seconds of bulk. ``Acknowledged`` bounds what a daemon may
hold by what the receiver says it has read. ``SendBuffer`` bounds what the kernel holds of a TCP connection
that a library opened for us (``TCP_NOTSENT_LOWAT``, Linux, tcp(7)), and asks it how the way is.
"""

from __future__ import annotations

import math
import os
import socket
import stat
import struct
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple, TypeVar

from p2p_co2.errors import RemoteProtocolError

_T = TypeVar("_T")
WAITING_S = 0.25
"""So much longer than the way takes may what is under way keep the next message waiting."""
LEAST_BYTES, MOST_BYTES = 32 << 10, 32 << 20
"""Room that there always is, and that there is at most."""
MOST_MESSAGES = 4096
"""Told apart under way."""
UNSENT_BYTES, MOST_UNSENT_BYTES, UNSENT_S = 32 << 10, 1 << 20, 0.1
"""A connection may hold unsent what it carries in so long, from the first to the second: a core may be busy
meanwhile."""
NEAR_S = 0.002
"""Round trips below this are of this machine or its network: such a connection is left alone."""
_MAX_DIGITS = 18
_INFO = struct.Struct("=B15xI8xI24xI8xI48xQ20xI8xQ")
"""Of ``struct tcp_info`` (linux/tcp.h): ``state``, ``snd_mss``, ``sacked``, ``last_ack_recv`` (milliseconds),
``rtt``, ``bytes_acked``, ``min_rtt`` (microseconds) and ``delivery_rate``."""
_ESTABLISHED = 1

OpenFile = tuple[int, tuple[int, int]]
"""(descriptor, device and inode): a descriptor alone may be another file's by now."""


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

    @property
    def under_way(self) -> int:
        """Messages that are told apart, at most ``MOST_MESSAGES``."""
        return len(self._messages)

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
    """The kernel's send buffer of our connection to ``host:port`` (``host`` an address).

    gRPC has no option for it, hence the search through this process's own sockets. A far connection is
    bounded. Law: one that is near, or not found, is left alone and nothing is known of it.
    """

    def __init__(self, host: str, port: int) -> None:
        bound = partial(_bound_far, host, port)
        newest_first = sorted(_open_sockets(), reverse=True)  # as a rule: an older one may end any moment
        self._file = next((file for file in newest_first if _on_copy(file, bound)), None)
        self.bound_bytes = UNSENT_BYTES
        """What it may hold unsent, if it is far."""

    @property
    def is_far(self) -> bool:
        return self._file is not None

    def look(self) -> Seen:
        """See ``Link.look``. A connection that turns out to be fast may hold more from then on."""
        info = None if self._file is None else _on_copy(self._file, _info)
        if self._file is None or info is None:
            return Seen()
        seen, bytes_per_s = seen_in(info)
        wanted = min(MOST_UNSENT_BYTES, max(UNSENT_BYTES, int(UNSENT_S * bytes_per_s)))
        if not self.bound_bytes / 1.5 < wanted < self.bound_bytes * 1.5:
            self.bound_bytes = wanted
            _on_copy(self._file, lambda connection: _bound(connection, wanted))
        return seen


def seen_in(info: bytes) -> tuple[Seen, int]:
    """What a ``struct tcp_info`` says: how much longer than the shortest the round trip is, unless nothing
    was carried for a while, and what is there, behind what was lost too; and the bytes per second that are
    delivered. Old kernels say nothing."""
    if len(info) < _INFO.size:
        return Seen(), 0
    state, segment_bytes, sacked, heard_ms_ago, now_us, there_bytes, least_us, rate = _INFO.unpack(info)
    is_known = state == _ESTABLISHED and heard_ms_ago / 1e3 <= WAITING_S  # older is what it was
    queued_s = max(0, now_us - least_us) / 1e6 if is_known else None
    return Seen(queued_s, there_bytes + sacked * segment_bytes), rate


def _bound_far(host: str, port: int, connection: socket.socket) -> bool:
    """Whether it is a far connection to ``host:port``, which is bounded then."""
    there = connection.getpeername()
    if not isinstance(there, tuple) or (str(there[0]).removeprefix("::ffff:"), there[1]) != (host, port):
        return False
    round_trip_us = _INFO.unpack(_info(connection).ljust(_INFO.size, b"\0"))[4]
    return round_trip_us / 1e6 >= NEAR_S and _bound(connection, UNSENT_BYTES)


def _bound(connection: socket.socket, most_bytes: int) -> bool:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, most_bytes)
    return True


def _info(connection: socket.socket) -> bytes:
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)


def _open_sockets() -> Iterator[OpenFile]:
    for name in os.listdir("/proc/self/fd"):
        try:
            found = os.fstat(int(name))
        except OSError:
            continue  # closed meanwhile
        if stat.S_ISSOCK(found.st_mode):
            yield int(name), (found.st_dev, found.st_ino)


def _on_copy(file: OpenFile, use: Callable[[socket.socket], _T]) -> _T | None:
    """What ``use`` makes of a socket, on a copy of its descriptor: ours would keep it open. None where it is
    another file's by now, has broken, or is of another kind.

    No other file is copied: to close the copy of one that is locked (fcntl(2)) would unlock it. A default
    timeout of the user's would change the original with the copy; where there is none nothing is set, since
    another thread may be making it non-blocking at this moment.
    """
    number, key = file
    try:
        if _key(number) != key:
            return None
        copy = os.dup(number)
    except OSError:
        return None
    try:
        if _key(copy) != key:
            return None  # another thread has opened a file by that number
        blocks = socket.getdefaulttimeout() is not None and os.get_blocking(copy)
        connection = socket.socket(fileno=copy)
        try:
            if blocks:
                os.set_blocking(copy, True)
            return use(connection)
        finally:
            connection.detach()
    except OSError:
        return None
    finally:
        os.close(copy)


def _key(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino
