"""Large bytes in pieces of ``MAX_DATA_BYTES``, out and in.

Laws: a piece starts at a multiple of ``MAX_DATA_BYTES`` and is full unless it is the last, so a piece is
known by its index; any order and any repetition give the same bytes; a repetition with other content is a lie
and is refused. Nothing is allocated from a number that a peer sent: the expected total comes from the agreed
shape, and what is held is what has arrived. Bytes are copied once, when the last piece comes.
"""

from __future__ import annotations

from collections.abc import Iterator

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.wire.limits import MAX_DATA_BYTES


def pieces(data: memoryview) -> Iterator[tuple[int, bytes]]:
    """(offset, bytes) of every piece of ``data``."""
    for offset in range(0, len(data), MAX_DATA_BYTES):
        yield offset, bytes(data[offset : offset + MAX_DATA_BYTES])


class Assembly:
    """One transfer of ``total_bytes`` from one peer; ``whole`` once it is all there."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.whole: bytes | None = None
        self._pieces: dict[int, bytes] = {}
        self._count = -(-total_bytes // MAX_DATA_BYTES)

    def add(self, offset: int, total: int, data: bytes) -> bool:
        """Take one piece; True when it was the last. Raises ``RemoteProtocolError`` for impossible pieces."""
        if total != self.total_bytes:
            raise RemoteProtocolError("wrong size", f"{total} bytes announced, {self.total_bytes} expected")
        index, rest = divmod(offset, MAX_DATA_BYTES)
        if rest or index >= self._count or len(data) != min(MAX_DATA_BYTES, total - offset):
            raise RemoteProtocolError("wrong piece", f"{len(data)} bytes at offset {offset} of {total}")
        if self.whole is not None:
            if memoryview(self.whole)[offset : offset + len(data)] != data:
                raise RemoteProtocolError("conflicting duplicate", f"offset {offset}")
            return False
        if self._pieces.setdefault(index, data) != data:
            raise RemoteProtocolError("conflicting duplicate", f"offset {offset}")
        if len(self._pieces) < self._count:
            return False
        self.whole = (
            self._pieces[0]
            if self._count == 1
            else b"".join(map(self._pieces.__getitem__, range(self._count)))
        )
        self._pieces.clear()
        return True
