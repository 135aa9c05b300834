"""What a peer keeps of an offer until its round has ended, and how it reads its outer gradient from it.

Almost nothing is kept for that alone. The payload is in the round anyway, and holds the gradient but for what
the codec lost (``FromPayload``). In copies of the fragment in fp32:

- "co2" and "eager": nothing. What comes back of an offer that was not counted is what would have counted;
  what the codec lost is in the residual, or lost as it is in every round without error feedback;
- "keep" and "blend" with error feedback: what was lost, at an eighth of its size (1/8), the next residual;
- "keep" and "blend" without it, with a codec of 8 bits or less: the gradient itself at half precision (1/2),
  because the live parameters are to keep nothing of what such a codec loses;
- "keep" and "blend" without it and with a finer one: nothing. What fp16 lost stays in the live parameters, so
  it is in the next offer.

How far a step took the agreed parameters is not kept either: it is computed again from the momentum that the
step left and the mean that it applied, which donors keep for a while (``FromStep``).

Law: nothing here changes once it is whole, so whoever holds it (a checkpoint, the next offer) reads the same
values. Price: a decode for each piece that is read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from p2p_co2.config import OuterConfig
from p2p_co2.errors import RemoteProtocolError
from p2p_co2.system.memory import Buffer
from p2p_co2.tensors import outer
from p2p_co2.tensors.aggregation import admit
from p2p_co2.tensors.codec import Codec
from p2p_co2.trainer.pieces import piece_values, pieces
from p2p_co2.trainer.scaled_fp16 import ScaledFp16
from p2p_co2.trainer.scaled_int4 import ScaledInt4


class FromPayload:
    """The outer gradient behind ``payload`` (uint8 [blocks * block_bytes]): fp32 [numel], read by slices.

    ``lost``: what the codec lost of it, with ``decay`` times ``carried`` added before (``codec.feedback``);
    None where that does not matter or was nothing. Exact but for the precision of ``lost``.
    """

    def __init__(
        self, codec: Codec, payload: Tensor, numel: int, lost: ScaledInt4 | None = None,
        carried: ScaledInt4 | None = None, decay: float = 0.0,
    ) -> None:  # fmt: skip
        self._codec, self._payload, self._numel = codec, payload, numel
        self._lost, self._carried, self._decay = lost, carried, decay

    @property
    def payload_bytes(self) -> int:
        """Held here and, as long as the round is open, by the round."""
        return self._payload.numel()

    @property
    def held_bytes(self) -> int:
        """Beyond the payload and what was carried on, which somebody else needs."""
        return 0 if self._lost is None else self._lost.held_bytes

    def __getitem__(self, at: slice) -> Tensor:
        """fp32, a new tensor."""
        values = _decoded(self._codec, self._payload, at, self._numel)
        if self._lost is not None:
            values.add_(self._lost[at])
        return values if self._carried is None else values.sub_(self._carried[at].mul_(self._decay))

    def counted(self, at: slice) -> Tensor:
        """What the mean holds of it, if it is counted: with what was carried on, without what was lost. fp32,
        a new tensor."""
        return _decoded(self._codec, self._payload, at, self._numel)

    def as_counted(self) -> Kept:
        """The same for later than the round, when nobody else needs the payload: that itself if it takes no
        more than four bits or loses nothing, else the values to 2^-3."""
        if 8 * self._codec.block_bytes < 5 * self._codec.block_values or self._codec.name == "fp32":
            return FromPayload(self._codec, self._payload, self._numel)
        room = ScaledInt4(self._numel)
        for start in range(0, self._numel, outer.PIECE):
            at = slice(start, min(start + outer.PIECE, self._numel))
            room.set(at, self.counted(at))
        return room


class FromMean:
    """An agreed mean as it travelled: fp32 [numel], read by slices. ``encoded``: payload bytes that nobody
    changes; what owners signed, so they may be of any size and hold anything."""

    def __init__(self, codec: Codec, encoded: Buffer, numel: int) -> None:
        self._codec, self._encoded, self._numel = codec, encoded, numel

    @property
    def held_bytes(self) -> int:
        """As long as nobody else needs the mean."""
        return len(self._encoded)

    def __getitem__(self, at: slice) -> Tensor:
        """fp32, a new tensor. Only of one whose ``largest`` is finite."""
        return _decoded(self._codec, memoryview(self._encoded), at, self._numel)

    def largest(self) -> float:
        """The largest magnitude; inf if the bytes are not what a payload of this codec and size must be."""
        if len(self._encoded) != self._codec.payload_bytes(self._numel):
            return math.inf
        largest, width, encoded = 0.0, self._codec.block_values, memoryview(self._encoded)
        scratch = torch.empty(min(piece_values(self._codec), self._numel), dtype=torch.float32, device="cpu")
        for at in pieces(self._codec, self._numel):
            first, blocks = at.start // width, self._codec.blocks(at.stop - at.start)
            rows = encoded[first * self._codec.block_bytes : (first + blocks) * self._codec.block_bytes]
            values = scratch[: at.stop - at.start]
            if not self._codec.decode_sound(rows, values):
                try:
                    values = self._codec.decode(admit(self._codec, rows, blocks))[: len(values)]
                except RemoteProtocolError:
                    return math.inf
            largest = max(largest, outer.magnitude(values))
        return largest


class FromStep:
    """How far a step took the agreed parameters back, ``old - new`` but for one rounding: fp32 [numel], read
    by slices. ``mean``: what the step applied, encoded; ``momentum``: what it left, fp32 [numel], which must
    not change; ``gap``: its staleness gap penalty."""

    def __init__(self, config: OuterConfig, codec: Codec, mean: Buffer, momentum: Tensor, gap: float) -> None:
        self._config, self._codec, self._momentum, self._gap = config, codec, momentum, gap
        self._mean = memoryview(mean) if config.nesterov else None

    @property
    def held_bytes(self) -> int:
        """The momentum is the state's. With Nesterov the mean is held here to the next boundary, and is the
        donor's as well as long as somebody lacks it."""
        return 0 if self._mean is None else len(self._mean)

    def __getitem__(self, at: slice) -> Tensor:
        """fp32, a new tensor."""
        momentum, applied = self._momentum[at], None
        if self._mean is not None:
            applied = _decoded(self._codec, self._mean, at, self._momentum.numel())
        return outer.last_change(self._config, momentum, applied, self._gap)


class Sum:
    """Of what is kept in two places."""

    def __init__(self, first: Kept, second: Kept) -> None:
        self._first, self._second = first, second

    @property
    def held_bytes(self) -> int:
        return held_bytes(self._first) + held_bytes(self._second)

    def __getitem__(self, at: slice) -> Tensor:
        """fp32, a new tensor."""
        return self._first[at] + self._second[at]


Kept = Tensor | ScaledFp16 | ScaledInt4 | FromPayload | FromStep | Sum
"""fp32 [n], read by slices, never changed once it is whole."""


def held_bytes(kept: Kept) -> int:
    """What it takes that nobody else needs."""
    return kept.numel() * kept.element_size() if isinstance(kept, Tensor) else kept.held_bytes


def both(earlier: Kept, moved: FromStep, codec: Codec) -> Kept:
    """How far two steps, or more, took the agreed parameters back. What a room of half a copy holds of the
    earlier ones is put into one with the last, which lets go of its mean."""
    if not isinstance(earlier, ScaledFp16):
        return Sum(earlier, moved)
    room = ScaledFp16(len(earlier), piece_values(codec))  # somebody may hold the old one
    for at in pieces(codec, len(earlier)):
        room.set(at, earlier[at].add_(moved[at]))
    return room


def set_piece(room: Tensor | ScaledFp16 | ScaledInt4, at: slice, values: Tensor) -> None:
    if isinstance(room, Tensor):
        room[at] = values
    else:
        room.set(at, values)


@dataclass
class Offered:
    """An offer of this peer's, as it remembers it."""

    round: int
    weight: float
    base_version: int
    gradient: Kept
    residual: ScaledInt4 | None
    """Of error feedback, if this one is counted; None under "co2" and "eager", where it is so already."""


@dataclass(frozen=True)
class Rebase:
    """How live parameters that set out ``offset`` away from ``old`` are measured from ``new`` instead. fp32
    [n] each, never changed: held, not copied."""

    old: Tensor
    new: Tensor
    offset: Kept | None
    gradient: Kept | None
    """The work that was taken out of them, and is in flight."""

    def addend(self, at: slice) -> Tensor:
        """What the live parameters gain there; a new tensor."""
        new = self.new[at]
        addend = torch.zeros_like(new) if self.new is self.old else new - self.old[at]
        for gone in (self.offset, self.gradient):
            if gone is not None:
                addend.sub_(gone[at])
        return addend


def _decoded(codec: Codec, payload: Tensor | memoryview, at: slice, numel: int) -> Tensor:
    """The values ``at`` of ``numel`` ones that are encoded in ``payload``: fp32, a new tensor."""
    start, stop, _ = at.indices(numel)
    stop = max(start, stop)
    width, size = codec.block_values, codec.block_bytes
    first, last = start // width, -(-stop // width)
    rows = payload[first * size : last * size]
    if not isinstance(rows, Tensor):
        # torch has no read-only tensors, and none of an empty buffer.
        writable = bytearray(rows) if rows.readonly else rows
        rows = torch.frombuffer(writable or bytearray(1), dtype=torch.uint8)[: len(rows)]
    return codec.decode(rows)[start - first * width : stop - first * width]
