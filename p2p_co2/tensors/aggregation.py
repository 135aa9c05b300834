"""The owner's work: admit the slices that peers sent for a part, and take their mean by the run's ``Rule``.

Laws: the mean is summed in fp32 in the order of peer names, whatever the order of arrival, so the same
slices give the same bytes on every machine; the divisor is the sum of the weights that arrived, never of
those that were expected. The owner gets its own result by decoding these bytes, like everybody else.
Multiplication and addition are separate roundings.

Each peer's share is ``weight / sum of weights`` (fp64, rounded once to fp32) and multiplies its values
before they are added: products never exceed the values, so large weights (tokens) cannot overflow. A share
below 1e-45 vanishes.

``clipped_mean`` is a first defence against a peer that sends noise or boasts: no slice pulls harder than one
of the usual norm (``median_clipped``) with the same weight. By how much a slice is longer than that, by so
much its weight is smaller. So the weights that come back are the truth for whoever asks what counted: the
mean is by them. Norms have no order of reduction: another owner of the same slices makes the same bytes.

Price: the mean is encoded again, so a second quantisation error is added to the peers' own (ALGORITHMS:
reduce-scatter with codecs). One chunk of blocks is decoded at a time, so memory beyond the inputs and the
result is a few MiB; fp16, int8 and int4 need none where there are ``passes``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import median_high, median_low
from typing import NamedTuple

import torch
from torch import Tensor

from p2p_co2.errors import LocalProtocolError, RemoteProtocolError
from p2p_co2.system.memory import Buffer, large_buffer
from p2p_co2.tensors.codec import Codec
from p2p_co2.tensors.codec.base import CHUNK_BLOCKS, LARGEST
from p2p_co2.tensors.outer.norms import magnitude, norm_shift, square_sum_of

LEAST_OF_MIDDLE = 1 / 4
"""Of its weight: what the upper middle one of an even number of slices counts with, at least."""


class Mean(NamedTuple):
    """``encoded``: a mean; ``weights``: what each part counted with in it, at most what was asked for it, in
    the order in which the parts were given."""

    encoded: memoryview
    weights: tuple[float, ...]


Part = tuple[str, float, Buffer]
"""(peer, weight, payload slice)"""
Rule = Callable[[Codec, Sequence[Part], Codec | None], Mean]
"""How slices and weights become a mean and the weights that it was made with. Deterministic, whatever the
order of the parts is."""


class HostileSlice(Exception):
    """The slice of ``peer`` may not be used; ``cause`` says why."""

    def __init__(self, peer: str, cause: RemoteProtocolError) -> None:
        self.peer, self.cause = peer, cause
        super().__init__(f"{peer}: {cause}")


def admit(codec: Codec, payload: Buffer, blocks: int) -> Tensor:
    """Check a peer's bytes before anything uses them.

    ``payload`` must be exactly ``blocks`` blocks of ``codec`` whose values are finite. Returns the payload
    as uint8 [blocks * block_bytes] for ``codec.decode``: without a copy if the buffer is writable (and then
    tied to it), else a copy. Raises ``RemoteProtocolError`` with reason "wrong size" or "not finite".
    """
    view = memoryview(payload).cast("B")
    if len(view) != blocks * codec.block_bytes:
        raise RemoteProtocolError(
            "wrong size", f"{len(view)} bytes for {blocks} {codec.name} blocks of {codec.block_bytes} bytes"
        )
    if not blocks:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    # torch has no read-only tensors and warns about read-only memory.
    tensor = torch.frombuffer(bytearray(view) if view.readonly else view, dtype=torch.uint8)
    codec.check(tensor)
    return tensor


def weighted_mean(codec: Codec, parts: Sequence[Part], into: Codec | None = None) -> Mean:
    """The ``Rule`` without defence: ``mean_of_parts``, with the weights that are asked for."""
    return Mean(mean_of_parts(codec, parts, into), tuple(weight for _, weight, _ in parts))


def clipped_mean(codec: Codec, parts: Sequence[Part], into: Codec | None = None) -> Mean:
    """The ``Rule`` of ``median_clipped``: each slice counts for less by as much as it is too long. Arguments
    and errors as ``mean_of_parts``."""
    _in_order(codec, parts)
    if len(parts) == 1:
        return weighted_mean(codec, parts, into)
    norms = [slice_norm(codec, peer, payload) for peer, _, payload in parts]
    weights = median_clipped(norms, [weight for _, weight, _ in parts])
    clipped = [(peer, weight, payload) for (peer, _, payload), weight in zip(parts, weights, strict=True)]
    return Mean(mean_of_parts(codec, clipped, into), weights)


def median_clipped(norms: Sequence[float], weights: Sequence[float]) -> tuple[float, ...]:
    """The weights with which slices of these norms count: what counts, times the norm, is at most the weight
    times the usual norm. In the sum that is each slice clipped to the usual norm; the divisor is what is left
    of the weights, so that clipping some does not make the whole step shorter.

    The usual norm is the median. Of four or more, if even, it is the lower middle one, but not less than
    ``LEAST_OF_MIDDLE`` of the upper one: newcomers whose learning rate still warms up do not silence half of
    the swarm. Law: where more than half of the slices that are not zero are honest, it is at least the
    shortest honest norm and at most the longest.

    Of two nobody can tell which is right. The shorter one is believed: noise ruins a model, and a short step
    costs a round. Price: beside a newcomer that warms up the other's work of that time is lost.

    Slices of zeros have no say: of a matrix that most peers did not use (an expert, an adapter at its start)
    the others' work would come to nothing.
    """
    sizes = [norm for norm in norms if norm > 0]
    if not sizes:
        return tuple(weights)
    usual = median_low(sizes)
    if len(sizes) > 2:
        usual = max(usual, LEAST_OF_MIDDLE * median_high(sizes))
    pairs = zip(norms, weights, strict=True)
    # A product that is too small to be told from nothing stays what it was, which is next to nothing.
    return tuple(weight * (usual / norm) or weight if norm > usual else weight for norm, weight in pairs)


def slice_norm(codec: Codec, peer: str, payload: Buffer) -> float:
    """The L2 norm of a slice's values, the same bits on every machine. Raises ``HostileSlice``."""
    view = memoryview(payload).cast("B")
    step, total = CHUNK_BLOCKS * codec.block_bytes, 0.0
    values_most = min(step, len(view)) // codec.block_bytes * codec.block_values
    scratch = torch.empty(values_most, dtype=torch.float32, device="cpu")
    for start in range(0, len(view), step):
        piece = view[start : start + step]
        values = scratch[: len(piece) // codec.block_bytes * codec.block_values]
        try:
            sound = codec.decode_sound(piece, values)
            if not sound:
                codec.decode(admit(codec, piece, len(piece) // codec.block_bytes), values)
        except RemoteProtocolError as error:
            raise HostileSlice(peer, error) from None
        largest = magnitude(values)
        if largest:
            shift = norm_shift(largest)
            total += math.ldexp(square_sum_of(values, shift), -2 * shift)
    return math.sqrt(total)


def mean_of_parts(codec: Codec, parts: Sequence[Part], into: Codec | None = None) -> memoryview:
    """The encoded weighted mean of slices: (peer, weight, payload slice) each, in any order.

    Weights are positive (tokens); all slices have the same number of whole blocks. Slices are checked as
    ``admit`` does while they are read. Returns as many blocks as one slice has, encoded by ``into`` (by
    ``codec`` if None). A mean that rounding carries past
    the largest fp32 value is clamped to it. Raises ``HostileSlice`` for one that ``admit`` would refuse;
    ``LocalProtocolError`` for no parts, a peer named twice, unequal sizes, or a weight that is not finite
    and positive.
    """
    peers, views, shares = _in_order(codec, parts)
    size, step = len(views[0]), CHUNK_BLOCKS * codec.block_bytes
    if not size:
        return memoryview(b"")
    into = into or codec

    def place(at_bytes: int) -> int:
        values = at_bytes // codec.block_bytes * codec.block_values
        return values // into.block_values * into.block_bytes

    result = large_buffer(place(size))
    encoded = torch.frombuffer(result, dtype=torch.uint8)
    found = codec.mean(views, shares, size // codec.block_bytes, encoded) if into is codec else None
    if found is not None:
        if found >= 0:
            raise HostileSlice(peers[found], RemoteProtocolError("not finite", f"in a {codec.name} slice"))
        return result
    scratch = torch.empty(
        2, min(step, size) // codec.block_bytes * codec.block_values, dtype=torch.float32, device="cpu"
    )
    for start in range(0, size, step):
        stop = min(start + step, size)
        total, values = scratch[:, : (stop - start) // codec.block_bytes * codec.block_values]
        for index, (peer, view, share) in enumerate(zip(peers, views, shares, strict=True)):
            try:
                codes = admit(codec, view[start:stop], (stop - start) // codec.block_bytes)
            except RemoteProtocolError as error:
                raise HostileSlice(peer, error) from None
            if index:
                total.add_(codec.decode(codes, values).mul_(share))
            else:
                codec.decode(codes, total).mul_(share)
        into.encode(total.clamp_(-LARGEST, LARGEST), encoded[place(start) : place(stop)])
    return result


def _in_order(codec: Codec, parts: Sequence[Part]) -> tuple[list[str], list[memoryview], list[float]]:
    """Peers, slices and shares in the order of peer names, checked."""
    if not parts:
        raise LocalProtocolError("a mean needs at least one part")
    ordered = sorted(parts, key=lambda part: part[0])
    peers = [peer for peer, _, _ in ordered]
    views = [memoryview(payload).cast("B") for _, _, payload in ordered]
    weights = [weight for _, weight, _ in ordered]
    if len(set(peers)) != len(peers):
        raise LocalProtocolError(f"a peer is named twice among {peers}")
    if len({len(view) for view in views}) != 1 or len(views[0]) % codec.block_bytes:
        raise LocalProtocolError(
            f"slices of {[len(view) for view in views]} bytes are not equal numbers of {codec.name} blocks"
        )
    divisor = 0.0
    for peer, weight in zip(peers, weights, strict=True):
        divisor += weight
        if not (math.isfinite(divisor) and weight > 0.0):
            raise LocalProtocolError(f"weight {weight} of peer {peer} is not finite and positive")
    return peers, views, [weight / divisor for weight in weights]
