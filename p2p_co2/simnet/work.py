"""What simulated peers learn: whole numbers instead of tensors, so that conservation can be checked exactly.

Each inner step of a peer is one *unit* of work, numbered over all its processes from 1. A unit is worth
another number in every block of every fragment; the worth of units (a, b] is a difference of two prefix sums
modulo 2^64, so it costs nothing to know and no two stretches of work look alike. An outer gradient of a block
is 16 bytes: the worth of the units in it and how many they are. A mean is the sum of both lanes, the second
one with weights, so that a wrong weight shows too.

``keep`` with outer_lr 1 and no momentum (ALGORITHMS.md, law 2) is what this plays: the agreed state is the
sum of what was counted, and what is not counted yet stays with its peer.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

from p2p_co2.system.memory import Buffer

BLOCK_BYTES = 16
WEIGHT_UNIT = 2**32
"""Weights count in these fractions."""
_MASK = (1 << 64) - 1


@dataclass
class Work:
    """All units of one peer. ``units``: done so far, by all its processes; ``lost``: stretches (start, stop]
    that went down with a process: sorted, apart, none after the last unit."""

    name: str
    units: int = 0
    lost: list[tuple[int, int]] = field(default_factory=list)
    _coefficients: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)

    def lose(self, start: int, stop: int) -> None:
        """Units (start, stop] went down with the process that did them."""
        while self.lost and self.lost[-1][1] >= start:
            start = min(start, self.lost.pop()[0])
        if stop > start:
            self.lost.append((start, stop))

    def stretch(self, fragment: int, block: int, start: int, stop: int) -> tuple[int, int]:
        """Worth and number of the units in (start, stop], without lost ones."""
        worth = self._until(fragment, block, stop) - self._until(fragment, block, start)
        count = stop - start
        for lost_start, lost_stop in self.lost:
            first, last = max(start, lost_start), min(stop, lost_stop)
            if first < last:
                worth -= self._until(fragment, block, last) - self._until(fragment, block, first)
                count -= last - first
        return worth & _MASK, count

    def count(self, start: int, stop: int) -> int:
        """How many units (start, stop] holds, without lost ones."""
        gone = sum(max(0, min(stop, b) - max(start, a)) for a, b in self.lost)
        return stop - start - gone

    def _until(self, fragment: int, block: int, unit: int) -> int:
        known = self._coefficients.get((fragment, block))
        if known is None:
            rng = random.Random(f"{self.name}/{fragment}/{block}")
            known = self._coefficients[fragment, block] = (rng.getrandbits(64), rng.getrandbits(64))
        return known[0] * unit + known[1] * (unit * (unit + 1) // 2)


def pack(lanes: Sequence[int]) -> bytes:
    """Numbers modulo 2^64 as bytes, eight each."""
    return struct.pack(f"<{len(lanes)}Q", *lanes)


def unpack(data: Buffer) -> list[int]:
    return list(struct.unpack(f"<{len(data) // 8}Q", data))


def add(lanes: Sequence[int], others: Sequence[int]) -> list[int]:
    """Lane by lane, modulo 2^64."""
    return [(a + b) & _MASK for a, b in zip(lanes, others, strict=True)]


def mean_of(slices: Sequence[tuple[float, Buffer]]) -> bytes:
    """The "mean" of a part: of (weight, slice) each, lane by lane; see the module."""
    total: list[int] = []
    for weight, data in slices:
        lanes = unpack(data)
        fixed = int(weight * WEIGHT_UNIT)
        lanes[1::2] = [fixed * (a + b) for a, b in zip(lanes[0::2], lanes[1::2], strict=True)]
        total = add(total, lanes) if total else [lane & _MASK for lane in lanes]
    return pack(total)
