"""What a peer keeps of an offer until its round has ended: fp32 values, held in as little as they need. How
much that is, and why, ``docs/design/memory.md`` says.

Law: nothing here changes once it is whole, so all that hold it read the same values. Price: a decode for each
piece that is read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from p2p_co2.config import OuterConfig
from p2p_co2.errors import RemoteProtocolError
from p2p_co2.system.memory import Buffer
from p2p_co2.tensors import outer
from p2p_co2.tensors.codec import Codec, get_codec
from p2p_co2.tensors.codec.base import PIECE_VALUES, pieces
from p2p_co2.tensors.fragments import large_tensor
from p2p_co2.tensors.outer_rules import within

_BITS = 15
"""The largest value of a piece is kept as one below 2^_BITS: fp16 ends at 65504."""
_SMALLEST = 2.0**-100


class Encoded:
    """A payload as the values it stands for: fp32 [numel], read by slices. Nobody changes its bytes. A mean
    is what others signed, of any size, holding anything: read it only if ``largest`` is finite.

    ``uses``: times its values. It is 2 for the mean of a tied table over all peers of both stages that use
    it: the unsplit model's mean is the sum."""

    def __init__(self, codec: Codec, payload: Buffer, numel: int, uses: int = 1) -> None:
        self.codec = codec
        self._payload = memoryview(payload)
        self._numel = numel
        self._uses = uses

    def __getitem__(self, at: slice) -> Tensor:
        """fp32, a new tensor."""
        start, stop, _ = at.indices(self._numel)
        first = start // self.codec.block_values * self.codec.block_values
        values = torch.empty(max(start, stop) - first, dtype=torch.float32, device="cpu")
        self._read(slice(first, first + len(values)), values)
        return values[start - first :]

    def largest(self) -> float:
        """The largest magnitude; inf if the bytes are not what a payload of this codec and size must be."""
        if len(self._payload) != self.codec.payload_bytes(self._numel):
            return math.inf
        largest = 0.0
        scratch = torch.empty(min(PIECE_VALUES, self._numel), dtype=torch.float32, device="cpu")
        for at in pieces(self._numel):
            values = scratch[: at.stop - at.start]
            largest = max(largest, outer.magnitude(values) if self._read(at, values) else math.inf)
        return largest

    def _read(self, at: slice, values: Tensor) -> bool:
        """Decode ``at``, which begins with a block, into ``values``; False if it is not sound."""
        blocks = self.codec.blocks(len(values))
        size = self.codec.block_bytes
        first = at.start // self.codec.block_values
        rows = self._payload[first * size : (first + blocks) * size]
        try:
            self.codec.admit(rows, values)
        except RemoteProtocolError:
            return False
        if self._uses != 1:
            values.mul_(self._uses)
        return True


class Compact:
    """fp32 [numel] in a codec's code, each of the ``pieces`` scaled by a power of two. Values come back as
    near as the codec keeps them, however large or small; a piece of nothing above 2^-100 as zeros."""

    def __init__(self, numel: int, codec: Codec) -> None:
        self._codec = codec
        self._numel = numel
        self._rows = large_tensor(codec.payload_bytes(numel), torch.uint8)
        self._scales = [0.0] * -(-numel // PIECE_VALUES)

    def __len__(self) -> int:
        return self._numel

    def set_(self, at: slice, values: Tensor) -> None:
        """``values``: fp32, finite, of the one piece ``at``; used up."""
        largest = outer.magnitude(values)
        scale = math.ldexp(1.0, math.frexp(largest)[1] - _BITS) if largest > _SMALLEST else 0.0
        self._scales[at.start // PIECE_VALUES] = scale
        rows = self._rows_of(at.start, at.stop)
        # A product with a power of two rounds nothing.
        self._codec.encode(values.mul_(1.0 / scale) if scale else values.zero_(), rows)

    def __getitem__(self, at: slice) -> Tensor:
        """fp32, a new tensor."""
        start, stop, _ = at.indices(self._numel)
        stop = max(start, stop)
        width = self._codec.block_values
        begin = start // width * width
        values = self._codec.decode(self._rows_of(begin, stop))
        for index in range(begin // PIECE_VALUES, -(-stop // PIECE_VALUES)):
            first = index * PIECE_VALUES - begin
            values[max(0, first) : first + PIECE_VALUES].mul_(self._scales[index])
        return values[start - begin : stop - begin]

    def _rows_of(self, start: int, stop: int) -> Tensor:
        width = self._codec.block_values
        size = self._codec.block_bytes
        return self._rows[start // width * size : -(-stop // width) * size]


class Gradient:
    """The outer gradient behind a payload, with what the codec lost of it: fp32 [numel], read by slices.
    ``carried``: the residual that was added before, times ``decay``."""

    def __init__(self, sent: Encoded, lost: Compact | None, carried: Compact | None, decay: float) -> None:
        self._sent = sent
        self._lost = lost
        self._carried = carried
        self._decay = decay

    def __getitem__(self, at: slice) -> Tensor:
        """fp32, a new tensor."""
        values = self._sent[at]
        if self._lost is not None:
            values.add_(self._lost[at])
        return values if self._carried is None else values.sub_(self._carried[at].mul_(self._decay))


class StepChange:
    """How far a step took the agreed parameters back, ``old - new`` but for one rounding: fp32 [numel], read
    by slices. It is computed again from the ``mean`` that was applied, the ``momentum`` that was left (which
    must not change), and the ``gap``."""

    def __init__(self, config: OuterConfig, mean: Encoded, momentum: Tensor, gap: float) -> None:
        self._config = config
        self._momentum = momentum
        self._gap = gap
        self._mean = mean if config.nesterov else None

    def __getitem__(self, at: slice) -> Tensor:
        """fp32, a new tensor."""
        applied = None if self._mean is None else self._mean[at]
        return outer.last_change(self._config, self._momentum[at], applied, self._gap)


Kept = Compact | Encoded | Gradient | StepChange
"""fp32 [n], read by slices, never changed once it is whole."""


def room_of(codec: Codec, numel: int, bits: int) -> Compact:
    """A room in four bits or half precision (16); whole where the run's codec loses nothing."""
    return Compact(numel, codec if codec.name == "fp32" else get_codec("int4" if bits == 4 else "fp16"))


def copied(values: Sequence[Kept], room: Compact) -> Compact:
    """The sum of ``values`` in ``room``."""
    for at in pieces(len(room)):
        room.set_(at, added(values, at))
    return room


def added(values: Sequence[Kept], at: slice) -> Tensor:
    """The sum of one or more: fp32, a new tensor."""
    total = values[0][at]
    for more in values[1:]:
        total.add_(more[at])
    return total


def spliced(fresh: Compact, before: Compact | None, missed: Sequence[slice], room: Compact) -> Compact:
    """``fresh`` in ``room``, but in the ranges ``missed`` what was ``before``: zeros without it."""
    for at in pieces(len(fresh)):
        values = fresh[at]
        for here in (within(part, at) for part in missed):
            values[here] = 0.0 if before is None else before[at][here]
        room.set_(at, values)
    return room
