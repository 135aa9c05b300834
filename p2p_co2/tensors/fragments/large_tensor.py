"""Memory for tensors of a fragment's size, used again round after round.

A round makes several of them and lets go of them again: the snapshot, the payload, what is kept of the offer,
the decoded mean. Fresh pages would cost each round more than all its arithmetic (``memory``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from p2p_co2.system.memory import POOLED_BYTES, large_buffer


def large_tensor(numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A new tensor [numel] on the CPU that holds anything. Any thread."""
    size_bytes = numel * dtype.itemsize
    if size_bytes < POOLED_BYTES:
        return torch.empty(numel, dtype=dtype, device="cpu")
    return torch.frombuffer(large_buffer(size_bytes), dtype=dtype)
