"""How this process treats large blocks of memory: few page faults, and nothing kept that is not used.

Fresh pages are what large messages and tensors cost most: in a virtual machine a fault is 2 to 4 microseconds
for 4 KiB, which is ten times the copy itself. So

- ``large_buffer``, and torch's allocator (asked in ``p2p_co2/__init__.py``), take 2 MiB pages where there are
  some;
- ``return_large_blocks`` has blocks above ``LARGE_BYTES`` unmapped when they are freed, for the whole run,
  and keeps up to ``KEPT_BYTES`` of an arena's free end, of which every message's buffers are made.

glibc maps a block above its threshold (128 KiB at first) on its own and unmaps it when it is freed. But each
such free raises the threshold to that block's size, up to 32 MiB; from then on blocks of that size come from
the arena of the thread that asks, and stay there when freed. A peer makes and frees tensors of a fragment's
size on three threads, so it would keep copies of the parameters that nothing uses: one to two of six
(``benchmarks/memory.py``). Setting the threshold once also stops it from moving, and the free end that an
arena keeps with it: without ``KEPT_BYTES`` that is 128 KiB, and every message faults its pages in anew.

Source: mallopt(3), M_MMAP_THRESHOLD and M_TRIM_THRESHOLD; madvise(2), MADV_HUGEPAGE. Law: the process only;
no effect on what tensors hold.

Price: a block above the threshold costs the kernel's zeroing of its pages at each allocation, and an arena
may keep ``KEPT_BYTES`` that nothing uses. Linux, the threshold with glibc only; elsewhere it does nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys

Buffer = bytes | bytearray | memoryview
"""Bytes, wherever they are."""


class Joined:
    """Buffers that are read as one, without a copy of the whole: ``len`` and slices (step 1), as bytes."""

    def __init__(self, *pieces: Buffer) -> None:
        self._pieces = [memoryview(piece).cast("B") for piece in pieces]

    def __len__(self) -> int:
        return sum(map(len, self._pieces))

    def __getitem__(self, at: slice) -> bytes:
        start, stop, step = at.indices(len(self))
        assert step == 1
        taken, begins = [], 0
        for piece in self._pieces:
            taken.append(piece[max(0, start - begins) : max(0, stop - begins)])
            begins += len(piece)
        return b"".join(taken)


LARGE_BYTES = 4 << 20
"""At least this large, a block is mapped on its own. Smaller ones, of which training makes many, stay with
the arenas, which reuse them without the kernel."""
KEPT_BYTES = 32 << 20
"""Free bytes at the end of an arena that are not given back: the messages that are under way at once."""
HUGE_PAGE_BYTES = 2 << 20
_M_MMAP_THRESHOLD = -3
_M_TRIM_THRESHOLD = -1


def return_large_blocks() -> bool:
    """Have blocks of ``LARGE_BYTES`` and more returned to the system when freed; True if the allocator took
    it. May be called twice, best before a model is made."""
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc's; other C libraries have none
    if mallopt is None:
        return False
    return all([mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES), mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)])


def large_buffer(size_bytes: int) -> memoryview:
    """Writable memory of zeros; unmapped once nothing refers to it, if it is large."""
    if size_bytes < HUGE_PAGE_BYTES:
        return memoryview(bytearray(size_bytes))
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return memoryview(mmap.mmap(-1, size_bytes))
    whole_bytes = -(-size_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES  # the kernel aligns only such lengths
    # Private: what ``mmap`` makes by default is shared, and most kernels give shared memory no huge pages.
    pages = mmap.mmap(-1, whole_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages: small ones serve
        pages.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(pages)[:size_bytes]
