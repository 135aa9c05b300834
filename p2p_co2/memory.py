"""How this process treats large blocks of memory: few page faults, and nothing kept that was never needed.

Fresh pages are what large messages and tensors cost most: in a virtual machine a fault is 2 to 4 microseconds
for 4 KiB, which is ten times the copy itself. Where the machine hands free memory back to its host (a balloon
that reports free pages), a page that was free for two seconds costs that again in the host, huge or not: 2.3
milliseconds of processor time per MB were measured, twenty times the zeroing. So

- ``large_buffer`` uses its pages again, and takes 2 MiB pages where there are some, as torch's allocator does
  (asked in ``p2p_co2/__init__.py``);
- ``return_large_blocks`` has all other blocks above ``LARGE_BYTES`` unmapped when they are freed, for the
  whole run, and keeps up to ``KEPT_BYTES`` of an arena's free end, of which every message's buffers are made.

glibc maps a block above its threshold (128 KiB at first) on its own and unmaps it when it is freed. But each
such free raises the threshold to that block's size, up to 32 MiB; from then on blocks of that size come from
the arena of the thread that asks, and stay there when freed. A peer makes and frees tensors of a fragment's
size on three threads, so it would keep copies of the parameters that nothing uses: one to two of six
(``benchmarks/memory.py``). Setting the threshold once also stops it from moving, and the free end that an
arena keeps with it: without ``KEPT_BYTES`` that is 128 KiB, and every message faults its pages in anew.

Source: mallopt(3), M_MMAP_THRESHOLD and M_TRIM_THRESHOLD; madvise(2), MADV_HUGEPAGE; the kernel's
mm/page_reporting.c. Law: the process only; no effect on what tensors hold.

Price: between two rounds a process keeps as much as the largest of its rounds needed at once, never more. A
block of another size costs the kernel's zeroing of its pages at each allocation, and an arena may keep
``KEPT_BYTES`` that nothing uses. The threshold is for Linux with glibc; else only ``large_buffer`` counts.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
import threading
import weakref
from collections import deque

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
MOST_WASTE = 1.25
"""Pages are used again for a buffer that is smaller by at most this factor, or would get as many."""
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


class _Pool:
    """Pages of large buffers that nobody uses any more, for the next ones.

    Law: what it holds, used and kept, is never more than was in use at one moment before: keeping raises no
    peak. Any thread may ask, and give back at any moment, in a garbage collection inside ``take`` too.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._given_back: deque[mmap.mmap] = deque()
        self._kept: list[mmap.mmap] = []
        self._used_bytes = self._most_bytes = 0

    @property
    def held_bytes(self) -> int:
        with self._lock:
            self._take_back()
            return self._used_bytes + sum(map(len, self._kept))

    def take(self, size_bytes: int) -> memoryview:
        """Writable memory that holds anything."""
        with self._lock:
            self._take_back()
            largest = max(MOST_WASTE * size_bytes, _whole_bytes(size_bytes))
            fitting = [pages for pages in self._kept if size_bytes <= len(pages) <= largest]
            if fitting:
                pages = min(fitting, key=len)
                self._kept.remove(pages)
            else:
                pages = _mapped(size_bytes)
                self._make_room(len(pages))
            self._used_bytes += len(pages)
        import numpy as np  # takes its time, and not every process has large buffers

        # Whatever looks into the pages keeps the array alive, and nobody else knows it.
        array = np.frombuffer(pages, np.uint8, size_bytes)
        weakref.finalize(array, self._given_back.append, pages).atexit = False
        return array.data

    def _take_back(self) -> None:
        while self._given_back:
            pages = self._given_back.popleft()
            self._used_bytes -= len(pages)
            self._kept.append(pages)

    def _make_room(self, size_bytes: int) -> None:
        """Let go of what was kept for longest, as far as the law asks for it."""
        self._most_bytes = max(self._most_bytes, self._used_bytes + size_bytes)
        kept_bytes = sum(map(len, self._kept))
        while self._kept and self._used_bytes + kept_bytes + size_bytes > self._most_bytes:
            kept_bytes -= len(self._kept.pop(0))


def _whole_bytes(size_bytes: int) -> int:
    """How much is mapped for a buffer: the kernel aligns only lengths of whole huge pages."""
    has_huge = hasattr(mmap, "MADV_HUGEPAGE")
    return -(-size_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES if has_huge else size_bytes


def _mapped(size_bytes: int) -> mmap.mmap:
    """New pages of zeros, huge ones as far as they are used whole."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return mmap.mmap(-1, size_bytes)
    # Private: what ``mmap`` makes by default is shared, and most kernels give shared memory no huge pages.
    pages = mmap.mmap(-1, _whole_bytes(size_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages: small ones serve
        pages.madvise(mmap.MADV_HUGEPAGE, 0, size_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES)
    return pages


_pool = _Pool()


def large_buffer(size_bytes: int) -> memoryview:
    """Writable memory that holds anything. If it is large, its pages are used again once nothing refers to
    it."""
    if size_bytes < HUGE_PAGE_BYTES:
        return memoryview(bytearray(size_bytes))
    return _pool.take(size_bytes)
