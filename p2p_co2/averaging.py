"""The owner's work: admit the slices that peers sent for a part, and take their weighted mean.

Laws: the mean is summed in fp32 in the order of peer names, whatever the order of arrival, so the same
slices give the same bytes on every machine; the divisor is the sum of the weights that arrived, never of
those that were expected. The owner gets its own result by decoding these bytes, like everybody else.
Multiplication and addition are separate roundings.

Each peer's share is ``weight / sum of weights`` (fp64, rounded once to fp32) and multiplies its values
before they are added: products never exceed the values, so large weights (tokens) cannot overflow. A share
below 1e-45 vanishes.

Price: the mean is encoded again, so a second quantisation error is added to the peers' own (ALGORITHMS:
reduce-scatter with codecs). One chunk of blocks is decoded at a time, so memory beyond the inputs and the
result is a few MiB; fp16, int8 and int4 need none where there are ``passes``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from p2p_co2.codec import Codec
from p2p_co2.codec.base import CHUNK_BLOCKS, LARGEST
from p2p_co2.errors import LocalProtocolError, RemoteProtocolError
from p2p_co2.memory import Buffer, large_buffer


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


def mean_of_parts(
    codec: Codec, parts: Sequence[tuple[str, float, Buffer]], into: Codec | None = None
) -> memoryview:
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


def _in_order(
    codec: Codec, parts: Sequence[tuple[str, float, Buffer]]
) -> tuple[list[str], list[memoryview], list[float]]:
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
