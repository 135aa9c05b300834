"""What a codec loses, measured and carried on.

``encode_with_residual`` is error feedback after SparseLoCo (arXiv 2508.15706, algorithm 1): what was not
sent is added, times a decay, to what is sent next, so that a small gradient in a block with a large one is
late instead of lost. Law: ``values + decay * residual == decoded + new_residual`` up to one fp32 rounding.
It is pure: the caller keeps the new residual only if the round commits with this peer in it.

Price: one more fp32 copy of the fragment in host memory, and a decode after each encode.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from p2p_co2.errors import LocalProtocolError
from p2p_co2.tensors.codec.base import Codec

_CHUNK_VALUES = 1 << 16
_SMALLEST_ENERGY = 1e-20


def encode_with_residual(
    codec: Codec, values: Tensor, residual: Tensor | None, decay: float
) -> tuple[Tensor, Tensor]:
    """Encode ``values + decay * residual``; give the payload and what it lost.

    ``values``: fp32 [n]. ``residual``: fp32 [n] on the same device, or None at the start. ``decay``: 0..1,
    0 forgets. Returns uint8 [payload_bytes(n)] and the new residual fp32 [n]. Raises as ``Codec.encode``,
    and ``LocalProtocolError`` if the residual has another shape.
    """
    wanted = values.detach()
    if residual is not None and residual.shape != values.shape:
        raise LocalProtocolError(f"residual {tuple(residual.shape)} is not for values {tuple(values.shape)}")
    if residual is not None:
        wanted = wanted + residual * decay
    payload = codec.encode(wanted)
    return payload, wanted - codec.decode(payload)[: values.numel()]


def relative_error(values: Tensor, decoded: Tensor) -> float:
    """``||values - decoded||**2 / ||values||**2``, summed in fp32 per piece and in fp64 over pieces.

    ``values``: fp32 [n]; ``decoded``: fp32 [at least n], what follows the first n is padding. 0 if both are
    zero, Inf if only ``values`` is.
    """
    return error_ratio(*error_energy(values, decoded))


def error_energy(values: Tensor, decoded: Tensor) -> tuple[float, float]:
    """``||values - decoded||**2`` and ``||values||**2``: the sums of ``relative_error``, to be added up over
    pieces."""
    lost = energy = 0.0
    for start in range(0, values.numel(), _CHUNK_VALUES):
        wanted = values[start : start + _CHUNK_VALUES]
        difference = wanted - decoded[start : start + len(wanted)]
        here = torch.dot(wanted, wanted).item()
        if not _SMALLEST_ENERGY < here < math.inf:  # squares beyond fp32's range
            wanted, difference = wanted.double(), difference.double()
            here = torch.dot(wanted, wanted).item()
        energy += here
        lost += torch.dot(difference, difference).item()
    return lost, energy


def error_ratio(lost: float, energy: float) -> float:
    """``lost / energy``; 0 if both are zero, Inf if only ``energy`` is."""
    if energy == 0.0:
        return 0.0 if lost == 0.0 else math.inf
    return lost / energy
