"""A peer's outer gradient as the payload of its offer, piece by piece: nothing of the fragment's size is made
that is not kept.

Law: the payload is the codec's of ``base.params + offset - snapshot``, plus the decayed residual, whichever
way a piece takes. Price: with a residual some ten passes over a piece that fits the cache; else one, where
the codec has it (``codec.passes``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from p2p_co2.tensors import outer
from p2p_co2.tensors.codec import Codec
from p2p_co2.tensors.codec.feedback import error_energy, error_ratio
from p2p_co2.tensors.fragments.large_tensor import large_tensor
from p2p_co2.tensors.outer import OuterState
from p2p_co2.trainer.offered import Kept, set_piece
from p2p_co2.trainer.pieces import piece_values, pieces
from p2p_co2.trainer.scaled_fp16 import ScaledFp16
from p2p_co2.trainer.scaled_int4 import ScaledInt4


@dataclass(frozen=True)
class OfferEncoding:
    """What one offer is made of, and what is kept of it; fp32 [n] each. ``offset``: from ``base.params`` to
    where the live parameters set out. ``residual`` and ``decay``: of error feedback, what is left of the
    offers before. ``gradient`` and ``lost``, what the codec loses of it and the residual, are filled."""

    codec: Codec
    base: OuterState
    offset: Kept | None
    snapshot: Tensor
    residual: ScaledInt4 | None
    decay: float
    gradient: Tensor | ScaledFp16 | None
    lost: ScaledInt4 | None

    def encode(self) -> tuple[Tensor, float]:
        """The payload (uint8 [blocks * block_bytes]) and its relative error. Raises ``ValueError`` if a value
        is not finite."""
        size, codec = self.snapshot.numel(), self.codec
        payload = large_tensor(codec.payload_bytes(size), torch.uint8)
        most = codec.blocks(min(piece_values(codec), size)) * codec.block_values
        scratch = torch.empty(most, dtype=torch.float32, device="cpu")
        lost = energy = 0.0
        for at in pieces(codec, size):
            first, blocks = at.start // codec.block_values, codec.blocks(at.stop - at.start)
            rows = payload[first * codec.block_bytes : (first + blocks) * codec.block_bytes]
            values = scratch[: blocks * codec.block_values]
            piece = self._encode_at_once(at, rows, values) or self._encode_piece(at, rows, values)
            lost, energy = lost + piece[0], energy + piece[1]
        return payload, error_ratio(lost, energy)

    def _origin(self, at: slice) -> Tensor:
        params = self.base.params[at]
        return params if self.offset is None else params + self.offset[at]

    def _encode_at_once(self, at: slice, rows: Tensor, scratch: Tensor) -> tuple[float, float] | None:
        """A plain difference in one pass, if the codec has it: what was lost, and the energy."""
        if self.residual is not None or self.codec.in_passes is None:
            return None
        is_wanted = self.gradient is not None or self.lost is not None
        wanted = scratch[: at.stop - at.start] if is_wanted else None
        piece = self.codec.encode_difference(self._origin(at), self.snapshot[at], rows, wanted)
        if piece is not None and wanted is not None:
            if self.gradient is not None:
                set_piece(self.gradient, at, wanted)
            if self.lost is not None:
                self.lost.set(at, wanted.sub_(self.codec.decode(rows)[: len(wanted)]))
        return piece

    def _encode_piece(self, at: slice, rows: Tensor, scratch: Tensor) -> tuple[float, float]:
        wanted = outer.outer_gradient(self.base._replace(params=self._origin(at)), self.snapshot[at])
        if self.gradient is not None:
            set_piece(self.gradient, at, wanted)
        if self.residual is not None:
            wanted += self.residual[at].mul_(self.decay)
        self.codec.encode(wanted, rows)
        decoded = self.codec.decode(rows, scratch)[: len(wanted)]
        energy = error_energy(wanted, decoded)
        if self.lost is not None:
            self.lost.set(at, wanted.sub_(decoded))
        return energy
