"""A model as its peers compare it: names, shapes, dtypes, fragments, and the values of what is frozen.

Peers exchange only what is trained. Adapters that were fitted to different frozen bases, or matrices whose
shapes differ and whose sizes do not, would be averaged into something that fits none of them; so peers
compare summaries when they meet (``wire.model_table``). Quantised layers keep their frozen base in buffers:
matrices of narrow numbers count as frozen parameters do. Counters, statistics, masks and indices do not.

Law: the same model gives the same summary on every machine and device, wrapped or not. Price: every frozen
byte is read once, at some GB/s, in pieces of ``PIECE_BYTES``. A tensor whose bytes torch does not show
counts by its name, shape and dtype alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from blake3 import blake3
from torch import Tensor, nn

from p2p_co2.protocol.wire.model_table import VALUES_DIGEST_BYTES, ModelSummary, Row
from p2p_co2.tensors.fragments.names import named_buffers, named_parameters
from p2p_co2.tensors.fragments.plan import FragmentPlan
from p2p_co2.trainer.exchanged_model import EXCHANGED

PIECE_BYTES = 16 << 20
PACKED_BYTES = 4


def summarise(module: nn.Module, plan: FragmentPlan) -> ModelSummary:
    """The summary of ``module``, which ``plan`` cuts. Reads all frozen parameters once."""
    rows = [
        Row(
            name,
            tuple(parameter.shape),
            str(parameter.dtype).removeprefix("torch."),
            parameter.requires_grad,
            b"" if parameter.requires_grad else values_digest(parameter),
        )
        for name, parameter in named_parameters(module).items()
    ]
    for name, buffer in named_buffers(module, persistent=True).items():
        if _is_packed(buffer):
            dtype = str(buffer.dtype).removeprefix("torch.")
            rows.append(Row(name, tuple(buffer.shape), dtype, is_trained=False, values=values_digest(buffer)))
    return ModelSummary(tuple(rows), plan.digest, plan.numel)


def _is_packed(buffer: Tensor) -> bool:
    """Whether a buffer looks like quantised weights: whole numbers of up to 32 bits or fp8, in 2 or more
    dimensions. Indices have 64 bits, counters fewer dimensions."""
    is_plain = buffer.dtype in EXCHANGED or buffer.dtype == torch.bool or buffer.is_complex()
    return buffer.dim() > 1 and buffer.element_size() <= PACKED_BYTES and not is_plain


def values_digest(tensor: Tensor) -> bytes:
    """``VALUES_DIGEST_BYTES`` that name a tensor's values in row-major order, whatever its strides and
    device; empty for one whose bytes torch does not show."""
    hasher = blake3(max_threads=blake3.AUTO)
    try:
        for piece in _pieces(tensor.detach()):
            hasher.update(piece.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        return b""
    return hasher.digest(VALUES_DIGEST_BYTES)


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """``tensor`` as flat pieces of at most ``PIECE_BYTES``, in order."""
    most = max(1, PIECE_BYTES // max(1, tensor.element_size()))
    if tensor.is_contiguous() or tensor.numel() <= most:
        flat = tensor.reshape(-1)
        for start in range(0, flat.numel(), most):
            yield flat[start : start + most]
    else:  # flattened as a whole it would be copied as a whole
        for part in tensor:
            yield from _pieces(part)
