"""A fragment in pieces that stay in the cache: all of its tensors are worked on piece by piece, so that
nothing of the fragment's size is made that is not kept.

Law: pieces end where the codec's blocks do, so each is encoded and decoded alone to the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator

from p2p_co2.tensors.codec import Codec
from p2p_co2.tensors.codec.base import CHUNK_BLOCKS


def piece_values(codec: Codec) -> int:
    """How many values are worked on at once."""
    return CHUNK_BLOCKS * codec.block_values


def pieces(codec: Codec, size: int) -> Iterator[slice]:
    """The pieces of ``size`` values."""
    width = piece_values(codec)
    return (slice(start, min(start + width, size)) for start in range(0, size, width))


def within(part: slice, at: slice) -> slice:
    """Where ``part`` lies in the piece ``at``, counted from that one's start."""
    size = at.stop - at.start
    return slice(min(size, max(0, part.start - at.start)), min(size, max(0, part.stop - at.start)))
