"""One fragment's agreed state as bytes, and its digest: what peers compare, and what donors give to
newcomers.

Law: canonical. Equal states have equal bytes on every machine, and bytes that are read give back the bytes
that were written. So the digest of a state is that of its bytes, chunk by chunk, and a newcomer checks a
download before it looks inside.

Layout, little-endian: magic and format (8 bytes), version, numel (u64), mean_square (f64). Then the count of
moved norms (u64), 4 moved norms (f64, unused ones 0). Then params, momentum (f32 [numel] each).
"""

from __future__ import annotations

import hashlib
import math
import struct
import sys
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from p2p_co2.digest import chunk_digests, digest_of_chunks
from p2p_co2.errors import RemoteProtocolError
from p2p_co2.system.memory import Buffer, JoinedBuffers
from p2p_co2.tensors.outer import MOVED_NORMS_KEPT, AgreedState

_MAGIC = b"p2pco2s\x01"
_HEADER = struct.Struct(f"<8sQQdQ{MOVED_NORMS_KEPT}d")
_MAX_VERSION = 1 << 53


def state_size_bytes(numel: int) -> int:
    """How long ``state_bytes`` of a fragment of ``numel`` elements is: known before anything is
    downloaded."""
    return _HEADER.size + 8 * numel


def state_bytes(state: AgreedState) -> bytes:
    """The agreed state of one fragment, canonical."""
    return b"".join((header_bytes(state), _little_endian(state.params), _little_endian(state.momentum)))


def state_view(state: AgreedState) -> JoinedBuffers:
    """``state_bytes`` without a copy; it holds the state's tensors, which nobody may change."""
    return JoinedBuffers(header_bytes(state), _little_endian(state.params), _little_endian(state.momentum))


def state_chunk_digests(state: AgreedState, chunk_bytes: int) -> list[bytes]:
    """The digests of ``state_bytes(state)``'s chunks, 32 bytes each, without making a second copy of the
    state. ``chunk_bytes``: as the run's donors give it (``catchup.chunk_bytes_of``)."""
    return list(chunk_digests(state_view(state), chunk_bytes))


def state_digest(state: AgreedState, chunk_bytes: int) -> bytes:
    """The digest of ``state_chunk_digests``, 32 bytes: the state's name."""
    return digest_of_chunks(state_chunk_digests(state, chunk_bytes))


def swarm_digest(digests: Sequence[bytes]) -> bytes:
    """sha256 over the state digests of all fragments, in order: one number for the whole agreed state, 32
    bytes."""
    return hashlib.sha256(b"p2p-co2 swarm\0" + struct.pack("<Q", len(digests)) + b"".join(digests)).digest()


def state_from_bytes(data: Buffer, numel: int) -> AgreedState:
    """Read what ``state_bytes`` wrote for a fragment of ``numel`` elements. If it can be written to, it
    becomes the memory of the state's tensors: it is theirs from now on.

    Raises ``RemoteProtocolError`` unless ``data`` is exactly that: right size, finite everywhere, canonical.
    """
    if len(data) != state_size_bytes(numel):
        raise RemoteProtocolError("bad_state", f"{len(data)} bytes, not {state_size_bytes(numel)}")
    params = tensor_from_bytes(data, _HEADER.size, numel)
    momentum = tensor_from_bytes(data, _HEADER.size + 4 * numel, numel)
    return state_from_header(data[: _HEADER.size], params, momentum)


def tensor_from_bytes(data: Buffer, start: int, numel: int) -> Tensor:
    """``numel`` little-endian fp32 values at ``start``: a copy of them, or if ``data`` can be written to, its
    own memory."""
    if not memoryview(data).readonly and sys.byteorder == "little" and numel:
        return torch.frombuffer(data, dtype=torch.float32, count=numel, offset=start)
    return torch.from_numpy(np.frombuffer(data, "<f4", numel, start).astype(np.float32, copy=True))


def header_bytes(state: AgreedState) -> bytes:
    """Everything of ``state`` but its tensors' values."""
    norms = (*state.moved_norms, *(0.0,) * MOVED_NORMS_KEPT)[:MOVED_NORMS_KEPT]
    return _HEADER.pack(
        _MAGIC, state.version, state.params.numel(), state.mean_square, len(state.moved_norms), *norms
    )


def state_from_header(header: Buffer, params: Tensor, momentum: Tensor) -> AgreedState:
    """A state from ``header_bytes`` and its tensors (fp32 [numel]); raises ``RemoteProtocolError`` as
    ``state_from_bytes``."""
    if len(header) != _HEADER.size:
        raise RemoteProtocolError("bad_state", f"a header of {len(header)} bytes, not {_HEADER.size}")
    magic, version, numel, mean_square, count, *norms = _HEADER.unpack(header)
    if magic != _MAGIC:
        raise RemoteProtocolError("bad_state", "not an agreed state, or of another format")
    if numel != params.numel() or numel != momentum.numel():
        raise RemoteProtocolError("bad_state", f"made for {numel} elements, not {params.numel()}")
    if version > _MAX_VERSION or count > min(version, MOVED_NORMS_KEPT) or any(norms[count:]):
        raise RemoteProtocolError("bad_state", "impossible version or moved norms")
    if not all(math.isfinite(number) and math.copysign(1.0, number) > 0 for number in (mean_square, *norms)):
        raise RemoteProtocolError("bad_state", "a norm is negative or not finite")
    if not (_is_finite(params) and _is_finite(momentum)):
        raise RemoteProtocolError("bad_state", "a value is not finite")
    state = AgreedState(version, params, momentum, mean_square, tuple(norms[:count]))
    if header_bytes(state) != header:
        raise RemoteProtocolError("bad_state", "not canonical")
    return state


def _is_finite(values: Tensor) -> bool:
    """Without memory beside them: a value that is no number makes both ends none."""
    return not values.numel() or all(math.isfinite(end.item()) for end in torch.aminmax(values))


def _little_endian(values: Tensor) -> memoryview:
    """fp32 values as bytes; no copy on a little-endian machine."""
    array = np.ascontiguousarray(values.numpy()).astype("<f4", copy=False)
    return array.data.cast("B") if array.size else memoryview(b"")
