"""Cut a fragment's blocks into parts, one per member, by upload bandwidth.

Law: the parts are the whole: every block is in exactly one part, in order. An owner uploads its part to
everybody, so a part in proportion to the upload rate makes all owners finish together (Streaming DiLoCo's
all-to-all, hivemind's load balancing solves the same as a linear programme). Unknown rates count as the mean
of the known ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median_low
from typing import NamedTuple

from p2p_co2.rounds.bounds import MAX_UPLOAD_BYTES_PER_S

FASTEST_SHARE = 16.0


class BlockRange(NamedTuple):
    """Blocks ``start`` to ``stop`` (exclusive)."""

    start: int
    stop: int


def split_blocks(blocks: int, uploads_bytes_per_s: Sequence[float]) -> tuple[BlockRange, ...]:
    """One range per member, in the members' order; empty where a member is too slow or there are too few
    blocks."""
    rates = [min(max(rate, 0.0), MAX_UPLOAD_BYTES_PER_S) for rate in uploads_bytes_per_s]
    known = [rate for rate in rates if rate > 0]
    typical = sum(known) / len(known) if known else 1.0
    ceiling = FASTEST_SHARE * median_low(known) if known else typical
    shares = [min(rate or typical, ceiling) for rate in rates]
    total = sum(shares)
    edges, reached = [0], 0.0
    for share in shares:
        reached += share
        edges.append(min(blocks, round(blocks * reached / total)))
    edges[-1] = blocks
    return tuple(BlockRange(start, stop) for start, stop in pairwise(edges))


def covers(ranges: Sequence[BlockRange], blocks: int) -> bool:
    """Whether non-empty ranges cover ``blocks`` blocks, in order, each exactly once."""
    reached = 0
    for start, stop in ranges:
        if start != reached or stop <= start:
            return False
        reached = stop
    return reached == blocks
