"""How the slices that peers sent for a part become one mean: a ``Rule``, and the weights that it counted.

A rule takes slices ``[k, n]`` in the order of peer ids and their weights ``[k]``, and gives the encoded mean
``[n]`` and the effective weights ``[k]``, which contributor lists and rule "eager" read. ``weighted_mean`` is
the rule without defence; ``centred_mean`` is a defence against peers that send noise, lies or boasts.

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

STEPS = 3
"""Of the centre, from the first mean on."""
LONGEST = 2.0
"""Times as long as usual: so much longer a slice may be for the work behind it, however much that is."""
SHORTEST = 1 / 16
"""The same for little work."""
NEXT_TO_NOTHING = 1e-12
"""Of the largest product: squares of distances below it are what rounding left."""
ROUNDED_BITS = 12
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
        self.peer = peer
        self.cause = cause
        super().__init__(f"{peer}: {cause}")


class Slices:
    """What the peers sent for a part: [k, n] in the order of peer ids, encoded. Checked while it is read:
    every method raises ``HostileSlice``."""

    def __init__(self, codec: Codec, peers: Sequence[str], payloads: Sequence[Buffer]) -> None:
        self._codec = codec
        self._peers = peers
        self._views = [memoryview(payload).cast("B") for payload in payloads]
        self._blocks = len(self._views[0]) // codec.block_bytes

    def __len__(self) -> int:
        return len(self._peers)

    def products(self, one_in: int = 1) -> list[list[float]]:
        """[k][k]: the inner product of the values of each slice with those of each; of one in so many pieces,
        drawn by lot."""
        pieces = list(self._pieces(max(1, CHUNK_BLOCKS // len(self))))
        total = torch.zeros((len(self), len(self)), dtype=torch.float64, device="cpu")
        for at in pieces[secrets.randbelow(min(one_in, len(pieces) or 1)) :: one_in]:
            rows = torch.stack([self._decoded(index, at) for index in range(len(self))]).double()
            total += rows @ rows.T
        return [[float(one) for one in row] for row in total]

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
            raise HostileSlice(self._peers[found], cause)
        if found is None:
            for at in self._pieces():
                total = self._decoded(0, at).mul_(shares[0])
                for index in range(1, len(self)):
                    total.add_(self._decoded(index, at).mul_(shares[index]))
                codec.encode(total.clamp_(-LARGEST, LARGEST), rows[at.start * size : at.stop * size])
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
            raise HostileSlice(self._peers[index], error) from None
        return values

    def _pieces(self, step: int = CHUNK_BLOCKS) -> Iterator[slice]:
        starts = range(0, self._blocks, step)
        return (slice(start, min(start + step, self._blocks)) for start in starts)


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


def centred_mean(slices: Slices, weights: Sequence[float], uses: int = 1) -> Mean:
    """The ``Rule`` of ``centred``: no slice pulls harder than one of the usual length for its work, nor lies
    further from the others than most of them do."""
    effective = tuple(weights) if len(slices) <= uses else centred(slices.products(), weights, uses)
    return Mean(slices.mean(effective), effective)


def centred(
    products: Sequence[Sequence[float]], weights: Sequence[float], uses: int = 1
) -> tuple[float, ...]:
    """The weights with which slices count, at most what was asked for them. ``products``: [k][k], of each
    slice with each. Centred clipping (Karimireddy, He and Jaggi, 2021, "Learning from History", eq. CC)
    from a first mean of slices that were cut to the usual length (``usual_length``).

    ``STEPS`` times the centre moves by the mean of what the slices differ from it, each difference cut to
    the median one for its work: the weight by the median weight. All that is a mean of the slices with other
    weights, so it takes their products alone and one pass for the mean. Their sum is the divisor: that some
    are cut makes the step no shorter.

    Law: where more than half of the slices that are not zero are honest, none pulls harder than the longest
    honest one of its work, in either cut. Slices of zeros have no say in what is usual: of a matrix that most
    peers did not use (an expert, an adapter at its start) the others' work would come to nothing.

    Of two nobody can tell which is right, and the shorter one is believed: noise ruins a model, and a short
    step costs a round. ``uses``: of a table that as many peers train in one use as in the other, whose slices
    are longer in one: usual is what is so among the longest, their share of all, and only lengths are cut.
    """
    count = len(weights)
    norms = [math.sqrt(max(0.0, products[index][index])) for index in range(count)]
    middle = median_low(weights)
    work = [min(LONGEST, max(SHORTEST, weight / middle)) for weight in weights]
    usual = usual_length([norm / done for norm, done in zip(norms, work, strict=True)], uses)
    cut = [_cut(usual * done, norm) for norm, done in zip(norms, work, strict=True)]
    as_cut = [
        [product * mine * other for product, other in zip(row, cut, strict=True)]
        for row, mine in zip(products, cut, strict=True)
    ]
    asked = math.fsum(weights)
    left = math.fsum(map(math.prod, zip(weights, cut, strict=True)))
    centre = [weight / left for weight in weights]
    for _ in range(STEPS if count > 2 and uses == 1 else 0):
        far = [_distance(as_cut, centre, index) for index in range(count)]
        told = [one / done for one, done, norm in zip(far, work, norms, strict=True) if norm > 0]
        usual = median_high(told) if told else math.inf
        shares = [
            weight / asked * _cut(usual * done, one)
            for weight, done, one in zip(weights, work, far, strict=True)
        ]
        stays = 1 - math.fsum(shares)
        centre = [stays * at + share for at, share in zip(centre, shares, strict=True)]
    centre = list(map(math.prod, zip(centre, cut, strict=True)))
    most = max(at / weight for at, weight in zip(centre, weights, strict=True))
    # Rounded, so that all machines make the same of sums that differ in their last bits.
    counted = [_rounded(at / weight / most) for at, weight in zip(centre, weights, strict=True)]
    return tuple(max(weight * one, math.ulp(0.0)) for weight, one in zip(weights, counted, strict=True))


def usual_length(lengths: Sequence[float], uses: int) -> float:
    """The median of those above 0; endless if there is none. Of four or more, if even, it is the lower middle
    one, but not less than ``LEAST_OF_MIDDLE`` of the upper one: newcomers whose learning rate still warms up
    do not silence half of the swarm. Law: where more than half are honest, it is at least the shortest honest
    one and at most the longest. Price of two: beside a newcomer the other's work of that time is lost."""
    sizes = sorted(length for length in lengths if length > 0)
    sizes = sizes[-(-len(sizes) * (uses - 1) // uses) :]
    if not sizes:
        return math.inf
    usual = median_low(sizes)
    return max(usual, LEAST_OF_MIDDLE * median_high(sizes)) if len(sizes) > 2 else usual


def _cut(limit: float, length: float) -> float:
    return limit / length if length > limit else 1.0


def _distance(products: Sequence[Sequence[float]], centre: Sequence[float], index: int) -> float:
    """Of the slice at ``index`` from the sum of all, each times its ``centre``."""
    off = [(at == index) - share for at, share in enumerate(centre)]
    square = math.fsum(
        a * b * one for a, row in zip(off, products, strict=True) for b, one in zip(off, row, strict=True)
    )
    largest = max(row[at] for at, row in enumerate(products))
    return math.sqrt(square) if square > NEXT_TO_NOTHING * largest else 0.0


def _rounded(value: float) -> float:
    mantissa, exponent = math.frexp(value)
    return math.ldexp(round(math.ldexp(mantissa, ROUNDED_BITS)), exponent - ROUNDED_BITS)


def compare(codec: Codec, mine: Buffer, mean: Buffer) -> tuple[float, float]:
    """What a mean is like beside a slice in it: the cosine between the two, and how many times as long it is.
    (0, 0) where one of them is zero, which tells nothing; (-1, inf) for a mean that is not finite."""
    slices = Slices(codec, ("mine", "mean"), (mine, mean))
    try:
        (own, along), (_, whole) = slices.products(LOOKED_AT)
    except HostileSlice:
        return -1.0, math.inf
    if own == 0.0 or whole == 0.0:
        return 0.0, 0.0
    return along / math.sqrt(own) / math.sqrt(whole), math.sqrt(whole) / math.sqrt(own)


def _check(codec: Codec, parts: Sequence[Part]) -> None:
    peers = [peer for peer, _, _ in parts]
    weights = [weight for _, weight, _ in parts]
    if not parts or len(set(peers)) != len(peers):
        raise LocalProtocolError(f"a mean needs parts, one a peer, not of {sorted(peers)}")
    sizes = [memoryview(payload).nbytes for _, _, payload in parts]
    if len(set(sizes)) != 1 or sizes[0] % codec.block_bytes:
        raise LocalProtocolError(f"slices of {sizes} bytes are not equal numbers of {codec.name} blocks")
    if not all(weight > 0.0 for weight in weights) or not math.isfinite(sum(weights)):
        raise LocalProtocolError(f"weights {weights} are not finite and positive")
