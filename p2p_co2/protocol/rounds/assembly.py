"""Large bytes in pieces, out and in.

A sender cuts as finely as the links need, or heartbeats and votes behind a piece would look late. Laws: a
piece starts at a multiple of ``PIECE_UNIT_BYTES`` and is a multiple of it long, unless it is the last. It has
at most ``MAX_PIECE_BYTES``. Any order and any repetition give the same bytes; a repetition with other content
or other edges is refused. Nothing is allocated from a number that a peer sent. Bytes are copied once; what
comes in one piece and has no place yet stays where it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from p2p_co2.errors import Offence, RemoteProtocolError
from p2p_co2.protocol.rounds import bounds
from p2p_co2.system.memory import Buffer, large_buffer
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.limits import MAX_PIECE_BYTES
from p2p_co2.wire.messages_pb2 import Mean, Part

Piece = Part | Mean
PIECE_UNIT_BYTES = 16 << 10
PIECE_S = 0.25
"""A piece should not keep a link busy for longer."""
LAST_PIECE_S = 0.07
"""Nor should one of those whose last the others wait for."""
FINEST_PIECES = 256
"""A payload is cut no finer for the sake of what comes behind a piece: each message costs 0.3 ms of processor
time."""


def piece_bytes(rates_bytes_per_s: Iterable[float], within_s: float = PIECE_S) -> int:
    """How large pieces may be on links of these rates (0: unknown) to be gone ``within_s``:
    ``MAX_PIECE_BYTES``, or a smaller power of two from ``PIECE_UNIT_BYTES``."""
    slowest = min((rate for rate in rates_bytes_per_s if rate > 0), default=float("inf"))
    if within_s * slowest >= MAX_PIECE_BYTES:
        return MAX_PIECE_BYTES
    size = 1 << MAX_PIECE_BYTES.bit_length() - 1
    while size > PIECE_UNIT_BYTES and size > within_s * slowest:
        size //= 2
    return size


def pieces(data: memoryview, size_bytes: int = MAX_PIECE_BYTES) -> Iterator[tuple[int, memoryview]]:
    """(offset, bytes) of every piece of ``data``: views of it."""
    for offset in range(0, len(data), size_bytes):
        yield offset, data[offset : offset + size_bytes]


class Assembly:
    """One transfer of ``total_bytes`` from one peer, to ``into`` if given; ``whole`` once it is all there."""

    def __init__(self, total_bytes: int, into: memoryview | None = None) -> None:
        self.total_bytes = total_bytes
        self.whole: memoryview | None = None
        self._buffer = into
        self._sizes: dict[int, int] = {}
        """Of the pieces that have come, by offset."""
        self._units: set[int] = set()
        """Those that the pieces cover."""
        self._count = -(-total_bytes // PIECE_UNIT_BYTES)

    def add(self, offset: int, total: int, data: Buffer) -> bool:
        """Take one piece; False if we have it already. Raises ``RemoteProtocolError`` for impossible
        pieces."""
        self._check(offset, total, len(data))
        if self._buffer is None and len(data) == total:
            self.whole = self._buffer = memoryview(data)  # all of it in one piece, which is held instead
            return True
        if self._buffer is None:
            self._buffer = large_buffer(self.total_bytes)
        place = self._buffer[offset : offset + len(data)]
        if self.whole is not None or self._sizes.get(offset) == len(data):
            if bytes(place) != bytes(data):  # views are compared byte by byte, 30 times as slowly
                raise RemoteProtocolError("conflicting duplicate", f"offset {offset}")
            return False
        units = range(offset // PIECE_UNIT_BYTES, -(-(offset + len(data)) // PIECE_UNIT_BYTES))
        if not self._units.isdisjoint(units):
            raise RemoteProtocolError("conflicting duplicate", f"other pieces around offset {offset}")
        self._units.update(units)
        self._sizes[offset] = len(data)
        place[:] = data
        if len(self._units) == self._count:
            self.whole = self._buffer
            self._sizes = {}
            self._units = set()
        return True

    def _check(self, offset: int, total: int, size: int) -> None:
        if total != self.total_bytes:
            raise RemoteProtocolError(Offence.WRONG_SIZE, f"{total} bytes, {self.total_bytes} expected")
        stop = offset + size
        aligned = offset % PIECE_UNIT_BYTES == 0 and (stop == total or size % PIECE_UNIT_BYTES == 0)
        if not aligned or not 0 < size <= MAX_PIECE_BYTES or stop > total:
            raise RemoteProtocolError(Offence.WRONG_PIECE, f"{size} bytes at offset {offset} of {total}")


class ReorderBuffer:
    """Pieces of one fragment that overtook the message that explains them, in order of arrival.

    A quick member's PART often arrives before the coordinator's BEGIN, and an heir's MEAN before its receiver
    knows that it is one. Bytes and number are bounded, and half is the most for one sender.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = max(bounds.EARLY_FLOOR_BYTES, limit_bytes)
        self._held: list[tuple[PeerId, Piece]] = []
        self._bytes: dict[PeerId, int] = {}

    def hold(self, piece: Piece, sender: PeerId) -> None:
        """Keep a piece, or raise ``RemoteProtocolError(Offence.TOO_MUCH_HELD)``."""
        size = piece.ByteSize()
        mine = self._bytes.get(sender, 0) + size
        full = (
            sum(self._bytes.values()) + size > self._limit_bytes or len(self._held) >= bounds.EARLY_MESSAGES
        )
        if full or 2 * mine > self._limit_bytes:
            raise RemoteProtocolError(Offence.TOO_MUCH_HELD, "pieces of a round that has not begun here")
        self._bytes[sender] = mine
        self._held.append((sender, piece))

    def release(self) -> list[tuple[PeerId, Piece]]:
        """All pieces, and forget them."""
        held = self._held
        self.clear()
        return held

    def held(self) -> dict[str, tuple[int, int]]:
        """As ``Rounds.held``."""
        return {
            "EARLY_MESSAGES": (len(self._held), bounds.EARLY_MESSAGES),
            "EARLY_BYTES": (sum(self._bytes.values()), self._limit_bytes),
        }

    def clear(self) -> None:
        self._held = []
        self._bytes = {}
