"""How this process treats large blocks of memory: few page faults, and nothing kept that was never needed.

Fresh pages are what large messages and tensors cost most: a fault takes ten times the copy itself.

    large_buffer(size_bytes)   uses its pages again, in a pool that holds no more than was in use lately
    use_one_arena()            all threads share glibc's first arena; each would keep its own largest moment
    return_holes()             gives back, once in a while, what is free among the arena's blocks

Law: a training step takes no more page faults than in a program that has not joined. So glibc's own
thresholds stand. Linux with glibc; else only ``large_buffer`` counts. Sources: mallopt(3), malloc_trim(3),
madvise(2)."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import threading
import time
import weakref
from collections import deque
from typing import Any

from p2p_co2.system.machine import IS_LINUX

Buffer = bytes | bytearray | memoryview
"""Bytes, wherever they are."""


class JoinedBuffers:
    """Buffers that are read as one, without a copy of the whole: ``len`` and slices (step 1), as bytes."""

    def __init__(self, *pieces: Buffer) -> None:
        self._pieces = [memoryview(piece).cast("B") for piece in pieces]
        self._length = sum(map(len, self._pieces))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, at: slice) -> bytes:
        return b"".join(self.views(at))

    def views(self, at: slice) -> list[memoryview]:
        """What lies at ``at``, of each piece."""
        start, stop, step = at.indices(len(self))
        assert step == 1
        taken = []
        begins = 0
        for piece in self._pieces:
            taken.append(piece[max(0, start - begins) : max(0, stop - begins)])
            begins += len(piece)
        return taken

    def __bytes__(self) -> bytes:
        return b"".join(self._pieces)


KEPT_BYTES = 8 << 20
"""Free bytes at the end of the arena that are not given back: the messages that are under way at once."""
HOLES_EVERY_S = 60.0
"""How often holes are given back at most: training's free pages go with them, some 0.1 s of faults."""
FORGOTTEN_AFTER = 4
"""The largest moment is measured anew when so many times the bytes that are held have been asked for."""
HUGE_PAGE_BYTES = 2 << 20
POOLED_BYTES = 1 << 20
"""Buffers from this size on are the pool's: those that live for a round would leave holes in the arena."""
MOST_WASTE = 1.25
"""Pages are used again for a buffer that is smaller by at most this factor."""
_M_ARENA_MAX = -8


def use_one_arena() -> bool:
    """Have all threads share glibc's first arena; True if it took the setting. May be called twice, best
    before threads are started: they stay with the one that they have."""
    mallopt = _of_glibc("mallopt")
    return mallopt is not None and bool(mallopt(_M_ARENA_MAX, 1))


def _of_glibc(name: str) -> Any:
    """A function of it; None where the C library is another."""
    return getattr(ctypes.CDLL(None), name, None) if IS_LINUX else None


class _Kept:
    """Pages that wait for their next buffer: the first ``here_bytes`` of them may be in memory."""

    def __init__(self, pages: mmap.mmap) -> None:
        self.pages = pages
        self.here_bytes = len(pages)

    def shrink(self, excess_bytes: int) -> int:
        """Return so much or a little more to the system, from the end; how many bytes stay. 0: there is no
        use in keeping it."""
        left_bytes = 0
        if hasattr(mmap, "MADV_HUGEPAGE"):  # else pages are shared, and stay, or ``madvise`` frees nothing
            left_bytes = max(0, self.here_bytes - excess_bytes) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        if left_bytes:
            try:
                self.pages.madvise(mmap.MADV_DONTNEED, left_bytes, len(self.pages) - left_bytes)
            except OSError:  # locked in memory
                left_bytes = 0
        self.here_bytes = left_bytes
        return left_bytes


class Pool:
    """Pages of large buffers that nobody uses any more, for the next ones.

    What it holds, used and kept, is never more than was in use at one moment lately. What is too much is
    returned and no more. A message's pages in place of a mean's would cost the next mean all of its own. Any
    thread may ask, and give back at any moment, in a garbage collection inside ``take`` too."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._given_back: deque[tuple[mmap.mmap, bool]] = deque()
        self._kept: list[_Kept] = []
        self._used_bytes = self._asked_bytes = 0
        self._most_used = self._most_before = 0
        """The most that was in use since it was measured anew, and in the stretch before that."""

    @property
    def held_bytes(self) -> int:
        with self._lock:
            self._take_back()
            return self._used_bytes + self._kept_bytes()

    def take(self, size_bytes: int, once: bool = False) -> memoryview:
        """Writable memory that holds anything. ``once``: its pages are not kept when it is given back."""
        with self._lock:
            self._take_back()
            most_bytes = MOST_WASTE * size_bytes
            if fitting := [kept for kept in self._kept if size_bytes <= len(kept.pages) <= most_bytes]:
                chosen = min(fitting, key=lambda kept: (len(kept.pages) - kept.here_bytes, len(kept.pages)))
                self._kept.remove(chosen)
                pages = chosen.pages
            else:
                pages = _mapped(size_bytes)
            self._used_bytes += len(pages)
            self._asked_bytes += len(pages)
            self._let_go()
        import numpy as np  # takes its time, and not every process has large buffers

        # Whatever looks into the pages keeps the array alive, and nobody else knows it.
        array = np.frombuffer(pages, np.uint8, size_bytes)
        weakref.finalize(array, self._given_back.append, (pages, not once)).atexit = False
        return array.data

    def _take_back(self) -> None:
        while self._given_back:
            pages, is_kept = self._given_back.popleft()
            self._used_bytes -= len(pages)
            if is_kept:
                self._kept.append(_Kept(pages))

    def _let_go(self) -> None:
        """Of what was kept for longest, as much as the law asks for."""
        self._most_used = max(self._most_used, self._used_bytes)
        if self._asked_bytes >= FORGOTTEN_AFTER * max(self._most_used, self._most_before):
            self._most_before = self._most_used
            self._most_used = self._used_bytes
            self._asked_bytes = 0
        allowed_bytes = max(self._most_used, self._most_before) - self._used_bytes
        while self._kept and (excess_bytes := self._kept_bytes() - allowed_bytes) > 0:
            if not self._kept[0].shrink(excess_bytes):
                self._kept.pop(0)

    def _kept_bytes(self) -> int:
        return sum(kept.here_bytes for kept in self._kept)


def _mapped(size_bytes: int) -> mmap.mmap:
    """New pages of zeros, huge ones as far as they are used whole."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return mmap.mmap(-1, size_bytes)
    # Private: most kernels give shared memory no huge pages. They align only lengths of whole huge pages;
    # what is too much of that would count as held.
    whole_bytes = -(-size_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    pages = mmap.mmap(-1, whole_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # At most a sixteenth more: parts of a payload are a little larger in one round than in another.
    step_bytes = max(mmap.PAGESIZE, 1 << (size_bytes.bit_length() - 5))
    pages.resize(-(-size_bytes // step_bytes) * step_bytes)
    with contextlib.suppress(OSError):  # a kernel without huge pages: small ones serve
        pages.madvise(mmap.MADV_HUGEPAGE, 0, size_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES)
    return pages


_pool = Pool()
_trimmed_at = -math.inf


def return_holes(now: float | None = None) -> bool:
    """Give free pages within the arena back to the system, if ``HOLES_EVERY_S`` have passed; whether it was
    done. For a thread that nobody waits for: others that allocate meanwhile wait."""
    global _trimmed_at  # noqa: PLW0603 (so is the arena)
    now = time.monotonic() if now is None else now
    trim = _of_glibc("malloc_trim")
    if trim is None or now - _trimmed_at < HOLES_EVERY_S:
        return False
    _trimmed_at = now
    trim(ctypes.c_size_t(KEPT_BYTES))
    return True


def large_buffer(size_bytes: int, once: bool = False) -> memoryview:
    """Writable memory that holds anything. If it is large, its pages are used again once nothing refers to
    it. Not with ``once``: for what is not needed round after round, and of a size that nothing else has."""
    return memoryview(bytearray(size_bytes)) if size_bytes < POOLED_BYTES else _pool.take(size_bytes, once)
