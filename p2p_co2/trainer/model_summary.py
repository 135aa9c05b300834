"""A model as its peers compare it, and the buffers that a newcomer is given.

Compared are names, shapes, dtypes, fragments, and the values of what is frozen (``wire.model_table``).
Adapters that were fitted to different frozen bases would be averaged into something that fits none of them.
Quantised layers keep their frozen base in buffers: matrices of narrow numbers count as frozen parameters do.

A newcomer begins with a donor's persistent buffers (``catchup.donor``), batch-norm statistics above all:
they are in no fragment and in no mean. Running statistics go first, then the others, small ones first, as
long as all are within ``MOST_BYTES``. Which go, and where in the bytes they lie, depends on names, shapes and
dtypes alone.

Law: the same model gives the same summary on every machine and device, wrapped or not. Price: every frozen
byte is read once. A tensor whose bytes torch does not show counts by its name, shape and dtype alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from blake3 import blake3
from torch import Tensor, nn

from p2p_co2.digest import digest
from p2p_co2.tensors.checkpoint.parts import trouble_with
from p2p_co2.tensors.fragments import FragmentPlan
from p2p_co2.tensors.names import named_buffers, named_parameters
from p2p_co2.trainer.exchanged_model import EXCHANGED
from p2p_co2.wire.model_table import VALUES_DIGEST_BYTES, ModelSummary, Row

RUNNING = ("running_mean", "running_var")
"""What torch's normalisation layers call their running statistics."""
MOST_BYTES = 8 << 20
"""Of all buffers together: the statistics of any model are far below, tables and packed weights above."""
PIECE_BYTES = 16 << 20
PACKED_BYTES = 4


def summarise(
    module: nn.Module, plan: FragmentPlan, known: Mapping[str, bytes] | None = None
) -> ModelSummary:
    """The summary of ``module``, which ``plan`` cuts. Reads all frozen parameters once, but for those whose
    digests are ``known``: they are cut between processes."""
    digests = known or {}
    rows = [
        Row(
            name,
            tuple(parameter.shape),
            str(parameter.dtype).removeprefix("torch."),
            parameter.requires_grad,
            b"" if parameter.requires_grad else digests.get(name) or values_digest(parameter),
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
    dimensions."""
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


class ModelBuffers:
    """The persistent buffers of ``module`` that a newcomer is given. ``running``: the names of those that are
    running statistics. The training thread owns it, and looks buffers up by name: a replaced one counts."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        buffers = _given(module)
        self.running = [name for name in buffers if name.endswith(RUNNING)]
        self.size_bytes = sum(one.nbytes for one in buffers.values())
        self.layout = _layout(buffers)

    @torch.no_grad()
    def to_bytes(self) -> bytes:
        """All values as they are now, one buffer after the other. Empty if the buffers are others by now, or
        torch does not show their values."""
        buffers = _given(self._module)
        if _layout(buffers) != self.layout:
            return b""
        try:
            flat = (one.detach().reshape(-1).contiguous() for one in buffers.values() if one.numel())
            return b"".join(one.view(torch.uint8).cpu().numpy().data for one in flat)
        except RuntimeError:
            return b""

    @torch.no_grad()
    def load_(self, data: bytearray) -> list[str]:
        """Take over what ``to_bytes`` gave elsewhere, ``size_bytes`` long. What stays as it is, in words."""
        troubles = list[str]()
        at = 0
        for name, own in _given(self._module).items():
            part, at = data[at : at + own.nbytes], at + own.nbytes  # a copy: aligned, and torch may write it
            if not part:
                continue
            values = torch.frombuffer(part, dtype=own.dtype).view(own.shape)
            # Where the own one is not finite, as in a mask, the other's need not be either.
            if bool((_is_finite(own.cpu()) & ~_is_finite(values)).any()):
                troubles.append(f"{name} is not finite")
                continue
            try:
                own.copy_(values)
            except RuntimeError as error:
                troubles.append(f"{name} cannot be written ({error})")
        return troubles


def _given(module: nn.Module) -> dict[str, Tensor]:
    """The buffers that are given, in their order."""
    kept = {
        name: one for name, one in named_buffers(module, persistent=True).items() if not trouble_with(one)
    }
    given = dict[str, Tensor]()
    room = MOST_BYTES
    for name in sorted(kept, key=lambda name: (not name.endswith(RUNNING), kept[name].nbytes)):
        if kept[name].nbytes <= room:
            given[name] = kept[name]
            room -= kept[name].nbytes
    return given


def _is_finite(values: Tensor) -> Tensor:
    return torch.isfinite(values.double() if values.is_floating_point() else values)


def _layout(buffers: dict[str, Tensor]) -> int:
    rows = [f"{name}\0{tuple(one.shape)}\0{one.dtype}" for name, one in buffers.items()]
    return int.from_bytes(digest("\n".join(rows).encode())[:6], "little")  # as versions are
