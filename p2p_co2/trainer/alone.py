"""What a peer did in rounds that it makes alone, for as long as nobody else has them.

Who trains while the others sleep commits rounds of one. Once most others are back, and in another state, it
goes over to theirs (``node.apart``): then its rounds are in nobody's history, and its live parameters get
their work back, as with an offer that came to nothing.

Law: the outer gradients that were applied, each once, of the newest rounds in a row that hold nobody else's
(ALGORITHMS.md, law 2): not the steps, whose lr and momentum come with the next round again. Price: of one
such round its mean, which a donor keeps for the others anyway; of several half the fragment's size (of any
with a codec that takes more); nothing before, and nothing after the next round with others.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from p2p_co2.node.ledger import PartWeights
from p2p_co2.tensors.codec import Codec
from p2p_co2.trainer.offered import FromMean
from p2p_co2.trainer.pieces import piece_values, pieces
from p2p_co2.trainer.scaled_fp16 import ScaledFp16


class Alone:
    """Of one fragment."""

    def __init__(self, codec: Codec, peer: str) -> None:
        self._codec, self._peer = codec, peer
        self._sum: ScaledFp16 | FromMean | None = None

    @property
    def held_bytes(self) -> int:
        return 0 if self._sum is None else self._sum.held_bytes

    def committed(self, mean: FromMean | None, parts: Sequence[PartWeights], numel: int) -> None:
        """A round of ``parts`` applied ``mean``, whose bytes nobody changes; None if others were in its
        group, counted or not, or if some of it may be in others' history as well."""
        if mean is None or any(part.weights.keys() != {self._peer} for part in parts):
            self._sum = None
            return
        before = self._sum
        if before is None and mean.held_bytes <= torch.float16.itemsize * numel:
            self._sum = mean
            return
        total = before if isinstance(before, ScaledFp16) else ScaledFp16(numel, piece_values(self._codec))
        for at in pieces(self._codec, numel):
            total.set(at, mean[at] if before is None else mean[at].add_(before[at]))
        self._sum = total

    def forget(self) -> None:
        """They are in somebody's history, or nobody knows."""
        self._sum = None

    def put_back_(self, addend: Tensor) -> None:
        """Give live parameters that gain ``addend`` (fp32 [n]) their work again; it is forgotten here."""
        if self._sum is not None:
            for at in pieces(self._codec, addend.numel()):
                addend[at].sub_(self._sum[at])
        self._sum = None
