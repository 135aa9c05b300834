"""A model's persistent buffers as bytes, for a newcomer to begin with: batch-norm statistics above all.

Buffers are in no fragment and in no mean: each peer keeps its own, of its own data. A newcomer has the
agreed parameters at once and would have statistics of nothing, so it takes a donor's (``catchup.buffers``).

Running statistics go first, then the others, small ones first, as long as all are within ``MOST_BYTES``.
Left out is what does not fit in, and what a checkpoint does not hold either (sparse, quantised, special).

Laws: which buffers go, and where in the bytes they lie, depends on names, shapes and dtypes alone. ``load_``
takes all buffers of a module or none of them. Both look buffers up by name: one that was replaced counts as
it is now.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from p2p_co2.digest import digest
from p2p_co2.errors import ConfigError
from p2p_co2.tensors.checkpoint import trouble_with
from p2p_co2.trainer.resuming import kept_buffers

RUNNING = ("running_mean", "running_var")
"""What torch's normalisation layers call their running statistics."""
MOST_BYTES = 8 << 20
"""Of all buffers together: the statistics of any model are far below, tables and packed weights above."""


class ModelBuffers:
    """The persistent buffers of ``module`` that a newcomer is given, by plain ``names`` in their order in the
    bytes. ``running``: those that are running statistics. ``left_out``: the others, and why. The training
    thread owns it, and keeps no buffer."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        buffers, self.left_out = _chosen(module)
        self.names = list(buffers)
        self.running = [name for name in self.names if _is_running(name)]
        self.size_bytes = sum(map(_size_bytes, buffers.values()))
        self.layout = _layout(buffers)

    @torch.no_grad()
    def to_bytes(self) -> bytes:
        """All values as they are now, one buffer after the other. Raises ``ConfigError`` if the buffers are
        not what they were when this was made, or torch does not show their values."""
        buffers, _ = _chosen(self._module)
        if _layout(buffers) != self.layout:
            raise ConfigError("model", "", "has other buffers than in join")
        try:
            flat = (one.detach().reshape(-1).contiguous() for one in buffers.values() if one.numel())
            return b"".join(one.view(torch.uint8).cpu().numpy().data for one in flat)
        except RuntimeError as error:
            raise ConfigError("model", "", f"has buffers that cannot be read ({error})") from error

    def shared(self, warn: Callable[[str], None]) -> bytes:
        """``to_bytes`` for newcomers; none, and a word about it, if they cannot be had."""
        try:
            return self.to_bytes()
        except ConfigError as error:
            warn(f"newcomers are not given this peer's buffers: {error}")
            return b""

    @torch.no_grad()
    def load_(self, data: bytes | bytearray) -> str:
        """Take over what ``to_bytes`` gave elsewhere. Returns "", or what is wrong with it: the module of a
        buffer that is named keeps its own."""
        if len(data) != self.size_bytes:
            return f"{len(data)} bytes where this model has {self.size_bytes}"
        buffers, _ = _chosen(self._module)
        given = dict(_cut(data, buffers))
        troubles, refusing = list[str](), set[str]()
        for name, values in given.items():
            # Where the own one is not finite, as in a mask, the other's need not be either.
            if bool((_is_finite(buffers[name].cpu()) & ~_is_finite(values)).any()):
                troubles.append(f"{name} is not finite")
                refusing.add(_module_of(name))
        for name, values in given.items():
            if _module_of(name) not in refusing:
                try:
                    buffers[name].copy_(values)
                except RuntimeError as error:
                    troubles.append(f"{name} stays as it is ({error})")
        return "; ".join(troubles)


def _cut(data: bytes | bytearray, buffers: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Each buffer's values of ``data``."""
    view, at = memoryview(data), 0
    for name, buffer in buffers.items():
        if size := _size_bytes(buffer):
            own = bytearray(view[at : at + size])  # aligned, and torch may write to it
            yield name, torch.frombuffer(own, dtype=buffer.dtype).view(buffer.shape)
        at += size


def _chosen(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The buffers that are given, in their order, and why others are not."""
    kept = kept_buffers(module)
    left_out = {name: trouble for name, buffer in kept.items() if (trouble := trouble_with(buffer))}
    order = sorted(
        (name for name in kept if name not in left_out),
        key=lambda name: (not _is_running(name), _size_bytes(kept[name])),
    )
    chosen, room = dict[str, Tensor](), MOST_BYTES
    for name in order:
        if (size := _size_bytes(kept[name])) > room:
            left_out[name] = f"only {MOST_BYTES >> 20} MiB are given, small ones first"
        else:
            chosen[name] = kept[name]
            room -= size
    return chosen, left_out


def _is_running(name: str) -> bool:
    return name.rpartition(".")[2] in RUNNING


def _module_of(name: str) -> str:
    return name.rpartition(".")[0]


def _size_bytes(buffer: Tensor) -> int:
    return buffer.numel() * buffer.element_size()


def _is_finite(values: Tensor) -> Tensor:
    """By value. Small floats, which torch compares only in part, count in fp32; wide ones as they are."""
    is_small = values.is_floating_point() and values.element_size() < torch.float32.itemsize
    return torch.isfinite(values.float() if is_small else values)


def _layout(buffers: Mapping[str, Tensor]) -> int:
    rows = [f"{name}\0{tuple(one.shape)}\0{one.dtype}" for name, one in buffers.items()]
    return int.from_bytes(digest("\n".join(rows).encode())[:8], "little")
