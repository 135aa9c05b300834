"""A parameter that FSDP2 (``torch.distributed.fsdp.fully_shard``) cut along its first dimension: what of it
lies in this process.

``held`` gives the elements in row-major order, so a shard is one range of a parameter as fragments number it.
``shard`` is its memory, and ``as_sharded`` makes such a tensor from one's own part. ``whole`` alone talks to
other processes. A tensor that is not cut is its own shard, whole.

Law: first-dimension cuts are torch's, ``ceil(rows / ranks)`` rows to a rank, so the last ranks hold fewer or
none. Other cuts, such as tensor parallelism's, are named by ``trouble_with_cut`` and not read.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from p2p_co2.tensors import private
from p2p_co2.tensors.private import is_dtensor as is_sharded

__all__ = ["as_sharded", "held", "is_sharded", "reshard", "shard", "trouble_with_cut"]


def shard(tensor: Tensor) -> Tensor:
    """What of it lies here: the same memory, outside autograd."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def whole(tensor: Tensor) -> Tensor:
    """All of it, outside autograd: every process that has a shard asks at the same time."""
    if not is_sharded(tensor):
        return tensor.detach()
    there = tensor.detach().to(tensor.device_mesh.device_type)  # an offloaded one goes where its group speaks
    assert is_sharded(there)
    return there.full_tensor()


def held(tensor: Tensor) -> tuple[int, int]:
    """Which elements that is: from, to."""
    if not is_sharded(tensor):
        return 0, tensor.numel()
    at = next((at for at, one in enumerate(tensor.placements) if one.is_shard()), None)
    if at is None or not tensor.numel():
        return 0, tensor.numel()
    rows = tensor.shape[0]
    ranks = tensor.device_mesh.size(at)
    each = -(-rows // ranks)
    mine = tensor.device_mesh.get_local_rank(at)
    row = tensor.numel() // rows
    return min(rows, mine * each) * row, min(rows, (mine + 1) * each) * row


def trouble_with_cut(tensor: Tensor) -> str:
    """Why the others' parts of it cannot be asked for; "" if they can."""
    if not is_sharded(tensor):
        return ""
    kinds = [type(one).__name__ for one in tensor.placements]
    cuts = [one for one in tensor.placements if one.is_shard()]
    if {*kinds} - {"Shard", "Replicate"} or len(cuts) > 1 or not all(one.is_shard(0) for one in cuts):
        return f"cut as {tensor.placements}"
    start, stop = held(tensor)
    mine = shard(tensor)
    if mine.numel() != stop - start or not mine.is_contiguous():
        return f"cut in a way of its own ({tuple(mine.shape)} of {tuple(tensor.shape)} here)"
    return ""


def as_sharded(mine: Tensor, like: Tensor) -> Tensor:
    """A tensor of the shape and the cut of ``like``, of which ``mine`` (flat, of any dtype) lies here."""
    from torch.distributed.tensor import DTensor

    assert is_sharded(like)
    there = mine.view(shard(like).shape).to(like.device)
    return DTensor.from_local(
        there, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def reshard(model: nn.Module) -> None:
    """Have all that FSDP2 put together for a forward pass in shards again. The first module keeps its
    parameters whole until a backward pass, and an evaluation has none."""
    for module in model.modules():
        private.reshard(module)
