"""A model's persistent buffers as bytes, for a newcomer to begin with: batch-norm statistics above all.

Buffers are in no fragment and in no mean: each peer keeps its own, of its own data. A newcomer has the
agreed parameters at once and would have statistics of nothing, so it takes a donor's (``catchup.buffers``).

Running statistics go first, then the others, small ones first, as long as all are within ``MOST_BYTES``.
Left out is what does not fit in, and what a checkpoint does not hold either (sparse, quantised tensors).

Law: which buffers go, and where in the bytes they lie, depends on names, shapes and dtypes alone.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from p2p_co2.digest import digest
from p2p_co2.tensors.checkpoint import trouble_with
from p2p_co2.tensors.fragments.names import named_buffers

RUNNING = ("running_mean", "running_var")
"""What torch's normalisation layers call their running statistics."""
MOST_BYTES = 8 << 20
"""Of all buffers together: the statistics of any model are far below, tables and packed weights above."""


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
        """All values as they are now, one buffer after the other; empty if the buffers are not those of
        which this was made any more, or torch does not show their values."""
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
        troubles, at = list[str](), 0
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
    given, room = dict[str, Tensor](), MOST_BYTES
    for name in sorted(kept, key=lambda name: (not name.endswith(RUNNING), kept[name].nbytes)):
        if kept[name].nbytes <= room:
            given[name] = kept[name]
            room -= kept[name].nbytes
    return given


def _is_finite(values: Tensor) -> Tensor:
    return torch.isfinite(values.double() if values.is_floating_point() else values)


def _layout(buffers: dict[str, Tensor]) -> int:
    rows = [f"{name}\0{tuple(one.shape)}\0{one.dtype}" for name, one in buffers.items()]
    return int.from_bytes(digest("\n".join(rows).encode())[:8], "little")
