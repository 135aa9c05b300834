"""The slices that the peers sent for a part, and what every rule that makes one mean of them is.

Laws: a rule is deterministic, so all owners of the same slices make the same bytes, whatever the order of
arrival. Slices come in the order of peer ids. The weighted mean is summed in fp32 in that order. Each peer's
values are multiplied by its share, ``weight / sum of weights`` (fp64, rounded once to fp32), before they are
added: large weights cannot overflow. The owner gets its own result by decoding these bytes, like everybody
else.

Price: the mean is encoded again, which adds a second quantisation error. Slices are read in pieces of a MiB;
codecs of ``codec.passes`` need no memory for the mean.
"""

from __future__ import annotations

import math
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.system.memory import Buffer, large_buffer
from p2p_co2.tensors.codec import Codec
from p2p_co2.tensors.codec.base import LARGEST


class Mean(NamedTuple):
    """``encoded``: a mean. ``weights``: what each slice counted with in it, at most what was asked for it, in
    the order of the slices. ``standing``: of who sent them, for their work; empty if none is kept."""

    encoded: memoryview
    weights: tuple[float, ...]
    standing: tuple[float, ...] = ()


class HostileSlice(Exception):
    """The slice of ``peer`` may not be used; ``cause`` says why."""

    def __init__(self, peer: str, cause: RemoteProtocolError) -> None:
        self.peer = peer
        self.cause = cause
        super().__init__(f"{peer}: {cause}")


class Slices:
    """What the peers sent for a part: [k, n] in the order of peer ids, encoded. Checked while it is read:
    every method raises ``HostileSlice``."""

    def __init__(self, codec: Codec, peers: Sequence[str], payloads: Sequence[Buffer]) -> None:
        self._codec = codec
        self.peers = peers
        self._views = [memoryview(payload).cast("B") for payload in payloads]
        self._blocks = len(self._views[0]) // codec.block_bytes

    def __len__(self) -> int:
        return len(self.peers)

    @property
    def values(self) -> int:
        """Of each slice."""
        return self._blocks * self._codec.block_values

    def products(self, one_in: int = 1) -> tuple[list[list[float]], int, int]:
        """[k][k]: the inner product of the values of each slice with those of each; of how many blocks, and
        how many of the first slice are not zero. ``one_in``: of one in so many pieces, drawn by lot."""
        pieces = list(self._pieces(max(1, self._codec.chunk_blocks // len(self))))
        total = torch.zeros((len(self), len(self)), dtype=torch.float64, device="cpu")
        seen = used = 0
        for at in pieces[secrets.randbelow(min(one_in, len(pieces) or 1)) :: one_in]:
            rows = torch.stack([self._decoded(index, at) for index in range(len(self))]).double()
            total += rows @ rows.T
            seen += at.stop - at.start
            used += int(rows[0].view(at.stop - at.start, -1).any(1).sum())
        return [[float(one) for one in row] for row in total], seen, used

    def mean(self, weights: Sequence[float]) -> memoryview:
        """The weighted mean, encoded. What rounding carries past the largest fp32 value is clamped to it."""
        if not self._blocks:
            return memoryview(b"")
        divisor = math.fsum(weights)  # as sum() rounds in some versions of Python only
        shares = [weight / divisor for weight in weights]
        codec = self._codec
        size = self._codec.block_bytes
        result = large_buffer(self._blocks * size)
        rows = torch.frombuffer(result, dtype=torch.uint8)
        found = codec.mean(self._views, shares, self._blocks, rows)
        if found is not None and found >= 0:
            cause = RemoteProtocolError("not finite", f"in a {codec.name} slice")
            raise HostileSlice(self.peers[found], cause)
        if found is None:
            for at in self._pieces(codec.chunk_blocks):
                total = self._decoded(0, at).mul_(shares[0])
                for index in range(1, len(self)):
                    total.add_(self._decoded(index, at).mul_(shares[index]))
                codec.encode(total.clamp_(-LARGEST, LARGEST), rows[at.start * size : at.stop * size])
        return result

    def median(self) -> memoryview:
        """The median of each value, encoded."""
        codec = self._codec
        size = codec.block_bytes
        result = large_buffer(self._blocks * size)
        for at in self._pieces(max(1, codec.chunk_blocks // len(self))):
            values = torch.stack([self._decoded(index, at) for index in range(len(self))])
            middle = values.sort(0).values[(len(self) - 1) // 2 : len(self) // 2 + 1].mean(0)
            place = result[at.start * size : at.stop * size]
            codec.encode(middle, torch.frombuffer(place, dtype=torch.uint8))
        return result

    def _decoded(self, index: int, at: slice) -> Tensor:
        """The values of some blocks of a slice: fp32, a new tensor."""
        codec = self._codec
        size = self._codec.block_bytes
        piece = self._views[index][at.start * size : at.stop * size]
        values = torch.empty((at.stop - at.start) * codec.block_values, dtype=torch.float32, device="cpu")
        try:
            codec.admit(piece, values)
        except RemoteProtocolError as error:
            raise HostileSlice(self.peers[index], error) from None
        return values

    def _pieces(self, step: int) -> Iterator[slice]:
        starts = range(0, self._blocks, step)
        return (slice(start, min(start + step, self._blocks)) for start in starts)


class AggregationRule(ABC):
    """How slices [k, n] and their weights [k] become a mean [n], and what each slice counted with in it.

    A new rule overrides ``mean`` in a file of its own, and has a line in ``rule_specs.AGGREGATION_RULES``.
    ``uses``: of a table that as many peers train in one use as in the other. ``me``: who averages.
    """

    def __init__(self, uses: int = 1, me: str = "") -> None:
        self.uses = uses
        self.me = me

    @abstractmethod
    def mean(self, slices: Slices, weights: Sequence[float]) -> Mean:
        """``weights``: what is asked for each slice, positive. Contributor lists and rule "eager" read what
        counted. Raises ``HostileSlice``."""
