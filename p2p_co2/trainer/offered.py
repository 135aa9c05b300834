"""What a peer keeps of an offer until its round has ended, and how it reads its outer gradient from it.

Three ways, by what they cost in copies of the fragment in fp32:

- the snapshot itself (1), where the codec is fine and nothing else is kept: the merge rounds once;
- the gradient at half precision (1/2), with a codec of 8 bits or less;
- with error feedback nothing of its own. The payload is in the round anyway, and what the codec lost is the
  next residual: the gradient is what the one says, plus the other, less what was carried over
  (``FromPayload``).

Law: nothing here changes once it is whole, so whoever holds it (a checkpoint, the next offer) reads the same
values. Price: a decode for each piece that is read.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from p2p_co2.codec import Codec
from p2p_co2.trainer.scaled_fp16 import ScaledFp16


class FromPayload:
    """The outer gradient behind ``payload`` (uint8 [blocks * block_bytes]): fp32 [n], read by slices.

    ``lost``: what the codec lost of it, with ``decay`` times ``carried`` added before (``codec.feedback``);
    None where nothing was. Exact but for the half precision of ``lost``.
    """

    def __init__(
        self, codec: Codec, payload: Tensor, lost: ScaledFp16, carried: ScaledFp16 | None, decay: float
    ) -> None:
        self._codec, self._payload, self._lost = codec, payload, lost
        self._carried, self._decay = carried, decay

    @property
    def held_bytes(self) -> int:
        """Beyond the payload and the residuals, which somebody else needs."""
        return 0

    def __getitem__(self, at: slice) -> Tensor:
        """fp32, a new tensor."""
        start, stop, _ = at.indices(len(self._lost))
        width, size = self._codec.block_values, self._codec.block_bytes
        first, last = start // width, -(-max(start, stop) // width)
        values = self._codec.decode(self._payload[first * size : last * size])
        values = values[start - first * width : max(start, stop) - first * width]
        values.add_(self._lost[at])
        return values if self._carried is None else values.sub_(self._carried[at].mul_(self._decay))


Kept = Tensor | ScaledFp16 | FromPayload
"""fp32 [n], read by slices, never changed once it is whole."""


def set_piece(room: Tensor | ScaledFp16, at: slice, values: Tensor) -> None:
    if isinstance(room, ScaledFp16):
        room.set(at, values)
    else:
        room[at] = values


@dataclass
class Offered:
    """An offer of this peer's, as it remembers it."""

    round: int
    weight: float
    base_version: int
    snapshot: Tensor | None
    gradient: Kept | None
    """Instead of the snapshot."""
    residual: ScaledFp16 | None
    """Of error feedback, if this one is counted."""
