"""What is under way on a connection and how much may be: the receiver's word, and the kernel's send buffer.

Bytes that lie in a buffer between us and the line would count as sent, and a heartbeat would wait behind
them. ``Acknowledged`` bounds what a daemon may hold by what the receiver says it has read. ``SendBuffer``
bounds what the kernel holds of a TCP connection (``TCP_NOTSENT_LOWAT``, Linux, tcp(7)), and asks it how the
way is.
"""

from __future__ import annotations

import ctypes
import ipaddress
import math
import os
import socket
import stat
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.system.machine import IS_LINUX

WAITING_S = 0.25
"""So much longer than the way takes may what is under way keep the next message waiting."""
LEAST_BYTES = 32 << 10
"""Room that there always is."""
MOST_BYTES = 32 << 20
"""Room that there is at most."""
MOMENT_S = 0.1
"""A core may be busy for so long. A connection may hold unsent what it carries meanwhile, a pace may catch
up, and only what is longer is a pause."""
UNSENT_BYTES = 32 << 10
"""And at least so much."""
MOST_UNSENT_BYTES = 1 << 20
"""And at most so much."""
_INFO = struct.Struct("=B15xI8xI24xI8xI48xQ20xI8xQ")
"""Of ``struct tcp_info`` (linux/tcp.h): ``state`` (1 while established), ``snd_mss``, ``sacked``,
``last_ack_recv`` (milliseconds), ``rtt``, ``bytes_acked``, ``min_rtt`` (microseconds) and
``delivery_rate``."""
_LIBC: Any = ctypes.CDLL(None) if IS_LINUX else None
"""Asked by descriptor: a ``socket`` object could change or close what is not ours."""


MAPPED = bytes(10) + b"\xff\xff"
"""What an IPv4 address begins with as an IPv6 one (RFC 4291)."""


class Seen(NamedTuple):
    """What is seen of a link."""

    queued_s: float | None = None
    """How much longer than at best the round trip takes now; None where that is not known."""
    there_bytes: int = 0
    """What has come there since the beginning."""
    is_word: bool = False
    """Whether the other end alone says so."""


class Acknowledged:
    """What the other end of one link says that it has, from the link's first message on.

    The room for what is under way is found as LEDBAT does (RFC 6817): it grows by what arrives sooner and
    shrinks by what arrives later. One message at a time is timed. Law: nobody has more than was sent, nor
    less than before. A receiver that lies can hold up what goes to itself.
    """

    def __init__(self) -> None:
        self.sent_bytes = self.arrived_bytes = 0
        """Of messages: handed over, and known to be there."""
        self.room_bytes = float(LEAST_BYTES)
        self.on_news: Callable[[], None] = lambda: None
        """Called when more has arrived."""
        self._timed: tuple[int, float, bool] | None = None
        """One that is under way: bytes sent up to its end, when it was sent, whether the room was used."""
        self._counted_bytes = 0
        """What had arrived when the last one had."""
        self._quickest_s = math.inf
        """The shortest way so far: what is more is waiting."""

    @property
    def has_room(self) -> bool:
        """Whether bulk may be handed over."""
        return self.sent_bytes - self.arrived_bytes < self.room_bytes

    def sent(self, size_bytes: int, now: float) -> None:
        """A message is handed over."""
        self.sent_bytes += size_bytes
        if self._timed is None:
            was_used = 2 * (self.sent_bytes - self.arrived_bytes) >= self.room_bytes
            self._timed = self.sent_bytes, now, was_used

    def hear(self, said: bytes, now: float) -> None:
        """Take the other end's word, decimal digits. Raises ``RemoteProtocolError`` if it cannot be true."""
        if not said.isdigit() or len(said) > len(str(self.sent_bytes)):
            raise RemoteProtocolError("wrong acknowledgement", "not a number of bytes that were sent")
        total_bytes = int(said)
        if not self.arrived_bytes <= total_bytes <= self.sent_bytes:
            detail = f"{total_bytes} bytes; {self.sent_bytes} were sent and {self.arrived_bytes} there before"
            raise RemoteProtocolError("wrong acknowledgement", detail)
        if total_bytes == self.arrived_bytes:
            return
        self.arrived_bytes = total_bytes
        if self._timed is not None and self._timed[0] <= total_bytes:
            self._adjust(now - self._timed[1], self._timed[2])
        self.on_news()

    def _adjust(self, took_s: float, was_used: bool) -> None:
        size_bytes = self.arrived_bytes - self._counted_bytes
        self._timed = None
        self._counted_bytes = self.arrived_bytes
        self._quickest_s = min(self._quickest_s, took_s)
        early = max(-1.0, 1 - (took_s - self._quickest_s) / WAITING_S)
        if early < 0 or was_used:  # by half: it stands for a whole round trip
            self.room_bytes = min(MOST_BYTES, max(LEAST_BYTES, self.room_bytes + early * size_bytes / 2))


class SendBuffer:
    """The kernel's send buffer of our connection to ``host:port`` (``host`` an address).

    gRPC has no option for it, hence the search through this process's own sockets. A connection that leaves
    this machine is bounded. Law: one within it is left as it is, and of one not found nothing is known.
    """

    def __init__(self, host: str, port: int) -> None:
        self._descriptor, self._file = _connection(host, port)
        self.is_far = self._file is not None and not is_within(self._descriptor)
        self.bound_bytes = UNSENT_BYTES
        """What it may hold unsent, if it is far."""
        self._bound()

    def look(self) -> Seen:
        """See ``Link.look``. A connection that turns out to be fast may hold more from then on."""
        if self._file is None or _socket_at(self._descriptor) != self._file:
            return Seen()  # closed, and its number may be another file's by now
        seen, bytes_per_s = seen_in(_tcp_info(self._descriptor))
        wanted = min(MOST_UNSENT_BYTES, max(UNSENT_BYTES, int(MOMENT_S * bytes_per_s)))
        if not self.bound_bytes / 1.5 < wanted < self.bound_bytes * 1.5:
            self.bound_bytes = wanted
            self._bound()
        return seen

    def _bound(self) -> None:
        if self.is_far:
            value = ctypes.c_int(self.bound_bytes)
            size = ctypes.sizeof(value)
            _LIBC.setsockopt(
                self._descriptor, socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, ctypes.byref(value), size
            )


def seen_in(info: bytes) -> tuple[Seen, int]:
    """What a ``struct tcp_info`` says of the way, and the bytes per second that are delivered. What is there
    counts behind what was lost, too. The round trip is not known where nothing was carried for a while. Old
    kernels say nothing."""
    if len(info) < _INFO.size:
        return Seen(), 0
    state, segment_bytes, sacked, heard_ms_ago, now_us, there_bytes, least_us, rate = _INFO.unpack(info)
    is_known = state == 1 and heard_ms_ago / 1e3 <= WAITING_S  # older is what it was
    queued_s = max(0, now_us - least_us) / 1e6 if is_known else None
    return Seen(queued_s, there_bytes + sacked * segment_bytes), rate


def _connection(host: str, port: int) -> tuple[int, tuple[int, int] | None]:
    """The descriptor of our connection to there, and the file behind it, None if there is none. Of several
    the newest: an older one may end any moment."""
    if not IS_LINUX:
        return -1, None
    address = ipaddress.ip_address(host).packed.removeprefix(MAPPED)
    for number in sorted(map(int, os.listdir("/proc/self/fd")), reverse=True):
        file = _socket_at(number)
        if file is not None and _end(_LIBC.getpeername, number) == (address, port) and _tcp_info(number):
            return number, file
    return -1, None


def _socket_at(descriptor: int) -> tuple[int, int] | None:
    """Device and inode of an open socket; None if it is none."""
    try:
        found = os.fstat(descriptor)
    except OSError:
        return None
    return (found.st_dev, found.st_ino) if stat.S_ISSOCK(found.st_mode) else None


def is_within(descriptor: int) -> bool:
    """Whether both ends of a connection are this machine's: they have one address then."""
    return _end(_LIBC.getsockname, descriptor)[0] == _end(_LIBC.getpeername, descriptor)[0]


def _end(ask: Callable[..., int], descriptor: int) -> tuple[bytes, int]:
    """Address and port (``sockaddr_in``, ``sockaddr_in6``) of one end of a connection; IPv4 may be mapped."""
    found = ctypes.create_string_buffer(28)
    size = ctypes.c_uint(28)
    if ask(descriptor, found, ctypes.byref(size)):
        return b"", 0
    (family,) = struct.unpack_from("=H", found)
    address = {socket.AF_INET: found.raw[4:8], socket.AF_INET6: found.raw[8:24]}.get(family, b"")
    return address.removeprefix(MAPPED), int.from_bytes(found.raw[2:4])


def _tcp_info(descriptor: int) -> bytes:
    info = ctypes.create_string_buffer(_INFO.size)
    size = ctypes.c_uint(_INFO.size)
    failed = _LIBC.getsockopt(descriptor, socket.IPPROTO_TCP, socket.TCP_INFO, info, ctypes.byref(size))
    return b"" if failed else info.raw[: size.value]
