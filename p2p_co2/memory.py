"""How this process's allocator treats large blocks: given back to the system when freed, for the whole run.

glibc maps a block above its threshold (128 KiB at first) on its own and unmaps it when it is freed. But each
such free raises the threshold to that block's size, up to 32 MiB; from then on blocks of that size come from
the arena of the thread that asks, and stay there when freed. A peer makes and frees tensors of a fragment's
size on three threads, so it would keep copies of the parameters that nothing uses: one to two of six
(``benchmarks/memory.py``). Setting the threshold once also stops it from moving.

Source: mallopt(3), M_MMAP_THRESHOLD. Law: the process only; no effect on what tensors hold.

Price: a block above the threshold costs the kernel's zeroing of its pages at each allocation (about 0.4 ms
per MiB). Linux with glibc only; elsewhere it does nothing.
"""

from __future__ import annotations

import ctypes
import sys

LARGE_BYTES = 4 << 20
"""At least this large, a block is mapped on its own. Smaller ones, of which training makes many, stay with
the arenas, which reuse them without the kernel."""
_M_MMAP_THRESHOLD = -3


def return_large_blocks() -> bool:
    """Have blocks of ``LARGE_BYTES`` and more returned to the system when freed; True if the allocator took
    it. May be called twice, best before a model is made."""
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc's; other C libraries have none
    return mallopt is not None and bool(mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES))
