"""A model's persistent buffers as bytes, for a newcomer to begin with: batch-norm statistics above all.

Buffers are in no fragment and in no mean: each peer keeps its own, of its own data. A newcomer has the
agreed parameters at once and would have statistics of nothing, so it takes a donor's (``catchup.buffers``).

Law: the bytes depend on names, shapes, dtypes and values alone; ``load_`` changes all or nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from p2p_co2.digest import digest
from p2p_co2.fragments.names import named_modules

RUNNING = ("running_mean", "running_var")
"""What torch's normalisation layers call their running statistics."""


class ModelBuffers:
    """The persistent buffers of ``module``, by plain ``names`` in its order. ``running``: those that are
    running statistics. The training thread owns it."""

    def __init__(self, module: nn.Module) -> None:
        self._buffers: dict[str, Tensor] = {}
        seen = set[int]()
        for path, part in named_modules(module):
            for name, buffer in part.named_buffers(recurse=False):
                if name not in part._non_persistent_buffers_set and id(buffer) not in seen:
                    seen.add(id(buffer))
                    self._buffers[f"{path}.{name}" if path else name] = buffer
        self.names = list(self._buffers)
        self.running = [name for name in self.names if name.rpartition(".")[2] in RUNNING]
        self.size_bytes = sum(buffer.numel() * buffer.element_size() for buffer in self._buffers.values())
        rows = [f"{name}\0{tuple(one.shape)}\0{one.dtype}" for name, one in self._buffers.items()]
        self.layout = int.from_bytes(digest("\n".join(rows).encode())[:8], "little")

    @torch.no_grad()
    def to_bytes(self) -> bytes:
        """All values, one buffer after the other."""
        flat = (buffer.detach().reshape(-1).contiguous() for buffer in self._buffers.values())
        return b"".join(one.view(torch.uint8).cpu().numpy().tobytes() for one in flat if one.numel())

    @torch.no_grad()
    def load_(self, data: bytes) -> str:
        """Take over what ``to_bytes`` gave elsewhere. Returns "", or what is wrong with it, and then takes
        nothing."""
        if len(data) != self.size_bytes:
            return f"{len(data)} bytes where this model has {self.size_bytes}"
        loaded, at = dict[str, Tensor](), 0
        for name, buffer in self._buffers.items():
            size = buffer.numel() * buffer.element_size()
            if not size:
                continue
            values = torch.frombuffer(bytearray(data[at : at + size]), dtype=buffer.dtype)
            if buffer.is_floating_point() and not values.float().isfinite().all():
                return f"{name} is not finite"
            loaded[name], at = values.view(buffer.shape), at + size
        for name, values in loaded.items():
            self._buffers[name].copy_(values)
        return ""
