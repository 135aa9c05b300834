"""The digest of agreed content, which peers compare instead of it.

BLAKE3 (O'Connor et al. 2020), 32 bytes: two to three times as fast as sha256 on one thread, which counts
because every peer digests every mean and every new state. Small things stay with sha256, which standard
tools can check. A state, which travels in chunks, is named by the digest of its chunks' digests (a hash tree
of one level): that name tells a right list of chunk digests from an invented one before a byte is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from blake3 import blake3

from p2p_co2.system.memory import Buffer, JoinedBuffers

DIGEST_BYTES = 32


def digest(*pieces: Buffer) -> bytes:
    """32 bytes that name the pieces' bytes, one after the other; where one ends is not part of it."""
    hasher = blake3()
    for piece in pieces:
        hasher.update(piece)
    return hasher.digest()


def chunk_digests(data: Buffer | JoinedBuffers, chunk_bytes: int) -> Iterator[bytes]:
    """32 bytes for each ``chunk_bytes`` of ``data`` (the last may have fewer), in order, without a copy."""
    joined = data if isinstance(data, JoinedBuffers) else JoinedBuffers(data)
    for start in range(0, len(joined), chunk_bytes):
        yield digest(*joined.views(slice(start, start + chunk_bytes)))


def digest_of_chunks(digests: Iterable[bytes]) -> bytes:
    """32 bytes that name what has these chunk digests."""
    return digest(*digests)
