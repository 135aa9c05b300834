"""How the slices that peers sent for a part become one mean: a ``Rule``, and the weights that it counted.

A rule takes slices ``[k, n]`` in the order of peer ids and their weights ``[k]``, and gives the encoded mean
``[n]`` and the effective weights ``[k]``, which contributor lists and rule "eager" read. ``weighted_mean`` is
the rule without defence; ``clipped_mean`` is a first defence against a peer that sends noise or boasts.

Laws: a rule is deterministic, so all owners of the same slices make the same bytes, whatever the order of
arrival. The weighted mean is summed in fp32 in the order of peer ids; each peer's share, ``weight / sum of
weights`` (fp64, rounded once to fp32), multiplies its values before they are added, so large weights cannot
overflow. The owner gets its own result by decoding these bytes, like everybody else.

Price: the mean is encoded again, which adds a second quantisation error. Slices are read in pieces of a MiB;
fp16, int8, int4 and e3m0 need no memory for the mean (``codec.passes``).
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterator, Sequence
from statistics import median_high, median_low
from typing import NamedTuple

import torch
from torch import Tensor

from p2p_co2.errors import LocalProtocolError, RemoteProtocolError
from p2p_co2.system.memory import Buffer, large_buffer
from p2p_co2.tensors.codec import Codec
from p2p_co2.tensors.codec.base import CHUNK_BLOCKS, LARGEST
from p2p_co2.tensors.outer import magnitude, norm_shift, square_sum_of

LEAST_OF_MIDDLE = 1 / 4
"""Of its weight: what the upper middle one of an even number of slices counts with, at least."""
LOOKED_AT = 4
"""Of the pieces of a mean, each member looks at one in so many. Nobody knows at which before."""
Part = tuple[str, float, Buffer]
"""(peer, weight, payload slice)"""


class Mean(NamedTuple):
    """``encoded``: a mean; ``weights``: what each slice counted with in it, at most what was asked for it (0:
    not at all), in the order of the slices."""

    encoded: memoryview
    weights: tuple[float, ...]


class HostileSlice(Exception):
    """The slice of ``peer`` may not be used; ``cause`` says why."""

    def __init__(self, peer: str, cause: RemoteProtocolError) -> None:
        self.peer, self.cause = peer, cause
        super().__init__(f"{peer}: {cause}")


class Slices:
    """What the peers sent for a part: [k, n] in the order of peer ids, encoded. Checked while it is read:
    every method raises ``HostileSlice``."""

    def __init__(self, codec: Codec, peers: Sequence[str], payloads: Sequence[Buffer]) -> None:
        self._codec, self._peers = codec, peers
        self._views = [memoryview(payload).cast("B") for payload in payloads]
        self._blocks = len(self._views[0]) // codec.block_bytes

    def __len__(self) -> int:
        return len(self._peers)

    def norms(self) -> list[float]:
        """The L2 norm of each slice's values, the same bits on every machine."""
        return [self._norm(index) for index in range(len(self))]

    def mean(self, weights: Sequence[float]) -> memoryview:
        """The weighted mean, encoded. What rounding carries past the largest fp32 value is clamped to it."""
        if not self._blocks:
            return memoryview(b"")
        divisor = math.fsum(weights)  # as sum() rounds in some versions of Python only
        shares, codec, size = [weight / divisor for weight in weights], self._codec, self._codec.block_bytes
        result = large_buffer(self._blocks * size)
        rows = torch.frombuffer(result, dtype=torch.uint8)
        found = codec.mean(self._views, shares, self._blocks, rows)
        if found is not None and found >= 0:
            cause = RemoteProtocolError("not finite", f"in a {codec.name} slice")
            raise HostileSlice(self._peers[found], cause)
        if found is None:
            for at in self._pieces():
                total = self._decoded(0, at).mul_(shares[0])
                for index in range(1, len(self)):
                    total.add_(self._decoded(index, at).mul_(shares[index]))
                codec.encode(total.clamp_(-LARGEST, LARGEST), rows[at.start * size : at.stop * size])
        return result

    def products(self) -> tuple[float, float, float]:
        """Of two slices: their inner product, and the norm of each; of one in ``LOOKED_AT`` pieces, drawn by
        lot."""
        found = [0.0, 0.0, 0.0]
        pieces = list(self._pieces())
        for at in pieces[secrets.randbelow(min(LOOKED_AT, len(pieces))) :: LOOKED_AT]:
            one, other = (self._decoded(index, at) for index in (0, 1))
            pairs = ((one, other), (one, one), (other, other))
            found = [total + float(a.dot(b)) for total, (a, b) in zip(found, pairs, strict=True)]
        return found[0], math.sqrt(found[1]), math.sqrt(found[2])

    def _norm(self, index: int) -> float:
        total = 0.0
        for at in self._pieces():
            values = self._decoded(index, at)
            if largest := magnitude(values):
                shift = norm_shift(largest)
                total += math.ldexp(square_sum_of(values, shift), -2 * shift)
        return math.sqrt(total)

    def _decoded(self, index: int, at: slice) -> Tensor:
        """The values of some blocks of a slice: fp32, a new tensor."""
        codec, size = self._codec, self._codec.block_bytes
        piece = self._views[index][at.start * size : at.stop * size]
        values = torch.empty((at.stop - at.start) * codec.block_values, dtype=torch.float32, device="cpu")
        try:
            codec.admit(piece, values)
        except RemoteProtocolError as error:
            raise HostileSlice(self._peers[index], error) from None
        return values

    def _pieces(self) -> Iterator[slice]:
        starts = range(0, self._blocks, CHUNK_BLOCKS)
        return (slice(start, min(start + CHUNK_BLOCKS, self._blocks)) for start in starts)


Rule = Callable[[Slices, Sequence[float]], Mean]
"""How slices [k, n] and weights [k] become a mean [n] and the weights that it was made with."""


def reduce_slices(rule: Rule, codec: Codec, parts: Sequence[Part]) -> Mean:
    """The mean of ``parts``, in any order, by ``rule``; its weights are in the order of ``parts``.

    Weights are positive (tokens); all slices have the same number of whole blocks. Raises ``HostileSlice``
    for one that ``Codec.admit`` would refuse; ``LocalProtocolError`` for no parts, a peer named twice,
    unequal sizes, or a weight that is not finite and positive.
    """
    _check(codec, parts)
    order = sorted(range(len(parts)), key=lambda index: parts[index][0])
    peers, weights, payloads = zip(*(parts[index] for index in order), strict=True)
    mean = rule(Slices(codec, peers, payloads), weights)
    counted = dict(zip(peers, mean.weights, strict=True))
    return Mean(mean.encoded, tuple(counted[peer] for peer, _, _ in parts))


def weighted_mean(slices: Slices, weights: Sequence[float]) -> Mean:
    """The ``Rule`` without defence."""
    return Mean(slices.mean(weights), tuple(weights))


def clipped_mean(slices: Slices, weights: Sequence[float], uses: int = 1) -> Mean:
    """The ``Rule`` of ``median_clipped``: no slice pulls harder than one of the usual norm. By how much a
    slice is longer than that, by so much its weight is smaller."""
    effective = tuple(weights) if len(slices) <= uses else median_clipped(slices.norms(), weights, uses)
    return Mean(slices.mean(effective), effective)


def median_clipped(norms: Sequence[float], weights: Sequence[float], uses: int = 1) -> tuple[float, ...]:
    """The weights with which slices of these norms count: what counts, times the norm, is at most the weight
    times the usual norm. The divisor is what is left of the weights, so clipping some does not make the whole
    step shorter.

    The usual norm is the median. Of four or more, if even, it is the lower middle one, but not less than
    ``LEAST_OF_MIDDLE`` of the upper one: newcomers whose learning rate still warms up do not silence half of
    the swarm. Law: where more than half of the slices that are not zero are honest, it is at least the
    shortest honest norm and at most the longest.

    Of two nobody can tell which is right. The shorter one is believed: noise ruins a model, and a short step
    costs a round. Price: beside a newcomer that warms up the other's work of that time is lost.

    Slices of zeros have no say: of a matrix that most peers did not use (an expert, an adapter at its start)
    the others' work would come to nothing.

    ``uses``: of a table that as many peers train in one use as in the other, whose slices are longer in one:
    usual is what is so among the longest, their share of all. Price: nobody is clipped as long as each use
    has one peer, and who sends noise must be fewer than half of those.
    """
    sizes = sorted(norm for norm in norms if norm > 0)
    sizes = sizes[-(-len(sizes) * (uses - 1) // uses) :]
    if not sizes:
        return tuple(weights)
    usual = median_low(sizes)
    if len(sizes) > 2:
        usual = max(usual, LEAST_OF_MIDDLE * median_high(sizes))
    pairs = zip(norms, weights, strict=True)
    # A product that is too small to be told from nothing stays what it was, which is next to nothing.
    return tuple(weight * (usual / norm) or weight if norm > usual else weight for norm, weight in pairs)


def compare(codec: Codec, mine: Buffer, mean: Buffer) -> tuple[float, float]:
    """What a mean is like beside a slice in it: the cosine between the two, and how many times as long it is.
    (0, 0) where one of them is zero, which tells nothing; a cosine of -1 for a mean that is not finite, or
    beyond what can be summed."""
    slices = Slices(codec, ("mine", "mean"), (mine, mean))
    try:
        along, own, whole = slices.products()
    except HostileSlice:
        return -1.0, math.inf
    if whole == 0.0 or not 0.0 < own < math.inf:
        return 0.0, 0.0
    return (along / own / whole, whole / own) if whole < math.inf else (-1.0, math.inf)


def _check(codec: Codec, parts: Sequence[Part]) -> None:
    peers, weights = [peer for peer, _, _ in parts], [weight for _, weight, _ in parts]
    if not parts or len(set(peers)) != len(peers):
        raise LocalProtocolError(f"a mean needs parts, one a peer, not of {sorted(peers)}")
    sizes = [memoryview(payload).nbytes for _, _, payload in parts]
    if len(set(sizes)) != 1 or sizes[0] % codec.block_bytes:
        raise LocalProtocolError(f"slices of {sizes} bytes are not equal numbers of {codec.name} blocks")
    if not all(weight > 0.0 for weight in weights) or not math.isfinite(sum(weights)):
        raise LocalProtocolError(f"weights {weights} are not finite and positive")

