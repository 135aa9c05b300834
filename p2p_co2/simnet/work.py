"""Work in whole numbers, so that conservation can be checked exactly.

Each inner step of a peer is one *unit* of work, numbered over all its processes from 1. A unit is worth
another number in every block of every fragment, modulo 2^64. An outer gradient of a block is 16 bytes, two
lanes: the worth of the units in it and how many they are. A mean is the sum of both lanes, the second one
with weights, so that a wrong weight shows too. A state is the sum of all means.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from p2p_co2.digest import chunk_digests, digest_of_chunks
from p2p_co2.protocol.ledger import AgreedVersion
from p2p_co2.system.memory import Buffer
from p2p_co2.wire.schedule import OfferState

BLOCK_BYTES = 16
WEIGHT_UNIT = 2**32
"""Weights count in these fractions."""
_MASK = (1 << 64) - 1


@dataclass
class WorkUnits:
    """All units of one peer. ``units``: done so far, by all its processes; ``lost``: those that went down
    with a process."""

    name: str
    units: int = 0
    lost: set[int] = field(default_factory=set)
    _worth: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)

    def kept(self, start: int, stop: int) -> Collection[int]:
        """The units in (start, stop], without lost ones."""
        units = range(start + 1, stop + 1)
        return [unit for unit in units if unit not in self.lost] if self.lost else units

    def stretch(self, fragment: int, block: int, start: int, stop: int) -> tuple[int, int]:
        """Worth and number of the units that ``kept`` names."""
        worth = self._worth.get((fragment, block))
        if worth is None:
            rng = random.Random(f"{self.name}/{fragment}/{block}")
            worth = self._worth[fragment, block] = (rng.getrandbits(64), rng.getrandbits(64))
        units = self.kept(start, stop)
        return (worth[0] * len(units) + worth[1] * sum(units)) & _MASK, len(units)

    def offer(self, fragment: int, counted: Sequence[int], units: int) -> bytes:
        """An outer gradient: all blocks' work from what is ``counted`` up to ``units``."""
        lanes: list[int] = []
        for block, start in enumerate(counted):
            lanes += self.stretch(fragment, block, start, max(start, units))
        return pack(lanes)


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


class Form(NamedTuple):
    """How a state is given to a newcomer."""

    size_bytes: int
    chunk_bytes: int


@dataclass(frozen=True)
class CountedState:
    """A fragment's agreed state. ``sums``: two lanes per block; ``digest``: made of all else."""

    version: int
    sums: tuple[int, ...]
    form: Form
    digest: bytes = b""

    @classmethod
    def of(cls, form: Form, version: int, sums: Sequence[int]) -> CountedState:
        state = cls(version, tuple(sums), form)
        return replace(state, digest=digest_of_chunks(chunk_digests(state.serialised(), form.chunk_bytes)))

    @property
    def agreed(self) -> AgreedVersion:
        return AgreedVersion(self.version, self.digest)

    def serialised(self) -> bytes:
        """What a donor gives."""
        data = pack((self.version, *self.sums))
        times = -(-self.form.size_bytes // len(data))  # no zeros: nobody would have to load them
        return (times * data)[: self.form.size_bytes]


def starts(blocks: Sequence[int], state_bytes: Sequence[int], chunk_bytes: int) -> list[CountedState]:
    """The states from which all begin, by fragment; ``blocks`` and ``state_bytes`` of each."""
    sizes = zip(blocks, state_bytes, strict=True)
    return [CountedState.of(Form(size, chunk_bytes), 0, [0] * (2 * count)) for count, size in sizes]


class Saved(NamedTuple):
    """What a checkpoint holds of one fragment. ``counted``: per block, the last unit of this peer that is in
    the agreed state, as far as it knows."""

    state: CountedState
    counted: tuple[int, ...]


class Offered(NamedTuple):
    """An outer gradient on its way. ``made``: as the training thread made it. ``counted``: per block, the
    unit after which it begins; ``units``: the last one in it."""

    made: OfferState
    round: int
    units: int
    counted: tuple[int, ...]
    payload: bytes

    @property
    def offer_id(self) -> bytes:
        return self.made.offer_id
