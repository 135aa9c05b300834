"""memory: what the kernel says this process still holds after large tensors were freed."""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from p2p_co2.config import PeerConfig
from p2p_co2.system import memory
from p2p_co2.tensors.fragments.large_tensor import large_tensor
from p2p_co2.trainer import connection

SIZE = 3 * memory.HUGE_PAGE_BYTES

HOLD = f"""
import sys
import torch
from pathlib import Path
from p2p_co2.system.memory import return_large_blocks

def resident_bytes():
    line = next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024

if sys.argv[1] == "ours":
    assert return_large_blocks()
    assert return_large_blocks()
size = 4 * {memory.LARGE_BYTES}
del (first := [torch.ones(size, dtype=torch.uint8)])[:]  # its free is what moves the threshold
before = resident_bytes()
tensors = [torch.ones(size, dtype=torch.uint8) for _ in range(4)]
last = tensors.pop()  # keeps the end of the arena in use, as a long run does
tensors.clear()
print((resident_bytes() - before - size) / size)
"""


def blocks_kept(setting: str) -> float:
    """How many of three freed blocks the process still holds."""
    answer = subprocess.run(
        [sys.executable, "-c", HOLD, setting],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env=os.environ | {"THP_MEM_ALLOC_ENABLE": "0"},  # a system without huge pages
    )
    return float(answer.stdout)


def test_freed_blocks_go_back_to_the_system() -> None:
    assert blocks_kept("ours") < 0.5
    assert blocks_kept("glibc's") > 2.5  # what the setting is for: if this fails, it is not needed any more


def test_without_glibc_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory.sys, "platform", "darwin")
    assert not memory.return_large_blocks()
    monkeypatch.undo()
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda _: object())  # a C library without mallopt
    assert not memory.return_large_blocks()


MESSAGES = """
import resource
import sys
from p2p_co2.system.memory import return_large_blocks

if sys.argv[1] == "ours":
    return_large_blocks()
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
message = bytes(1 << 20)
for count in range(101):
    if count == 1:
        before = faults()
    copies = [bytearray(message) for _ in range(3)]
    del copies
print((faults() - before) / 100)
"""


def test_messages_reuse_their_pages() -> None:
    def faults(setting: str) -> float:
        run = [sys.executable, "-c", MESSAGES, setting]
        return float(subprocess.run(run, capture_output=True, text=True, check=True, timeout=60).stdout)

    assert faults("ours") < 10  # of 768 pages that each turn writes


HOLES = """
from pathlib import Path
from p2p_co2.system import memory

def resident_bytes():
    line = next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024

assert memory.return_large_blocks()
small = [bytes(64 << 10) for _ in range(64)]
del small[1::2]
give_back, later_s = memory._holes.give_back, memory.HOLES_EVERY_S
assert not give_back(1.0)  # 2 MiB are not worth it
messages = [bytes([1]) * (256 << 10) for _ in range(400)]
del messages[::2]  # what is left keeps the others' places within the arena
before = resident_bytes()
assert not give_back(1.0 + 0.9 * later_s)  # it was looked at a moment ago
assert give_back(1.0 + 1.1 * later_s)
assert all(set(one) == {1} for one in messages)
print((before - resident_bytes()) / (200 * (256 << 10)))
"""


def test_holes_go_back_to_the_system() -> None:
    run = [sys.executable, "-c", HOLES]
    answer = subprocess.run(run, stdout=subprocess.PIPE, text=True, check=True, timeout=60)
    assert float(answer.stdout) > 0.9


def test_without_glibc_there_are_no_holes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda _: object())
    assert memory.in_arenas_bytes() == (0, 0)
    assert not memory._Holes(memory._Pool()).give_back(0.0)


@pytest.mark.parametrize("size", [0, 1, memory.HUGE_PAGE_BYTES - 1, memory.HUGE_PAGE_BYTES + 1])
def test_a_large_buffer_can_be_written(size: int) -> None:
    buffer = memory.large_buffer(size)
    assert len(buffer) == size
    buffer[:] = bytes([7]) * size
    assert bytes(buffer) == bytes([7]) * size


def test_buffers_from_a_mebibyte_on_are_the_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as live for a round and would leave holes in the arena."""
    monkeypatch.setattr(memory, "_pool", pool := memory._Pool())
    small = memory.large_buffer(memory.POOLED_BYTES - 1), memory.zeros(memory.POOLED_BYTES - 1)
    assert pool.held_bytes == 0
    large = memory.large_buffer(memory.POOLED_BYTES), memory.zeros(memory.POOLED_BYTES)
    assert pool.held_bytes == 2 * memory.POOLED_BYTES
    tensor = large_tensor(memory.POOLED_BYTES, torch.uint8)
    assert pool.held_bytes == 3 * memory.POOLED_BYTES
    del small, large, tensor


def place_of(buffer: memoryview) -> int:
    return int(np.frombuffer(buffer, np.uint8).ctypes.data)


def test_pages_are_used_again_once_nothing_refers_to_them() -> None:
    pool = memory._Pool()
    buffer = pool.take(SIZE)
    place, piece = place_of(buffer), buffer[5:9]
    tensor = torch.frombuffer(buffer, dtype=torch.uint8)[9:12]
    del buffer
    assert place_of(second := pool.take(SIZE)) != place  # a piece of it keeps all of it
    del piece
    assert place_of(third := pool.take(SIZE)) != place  # so does a tensor
    del tensor
    assert place_of(pool.take(SIZE - 1)) == place
    assert len(second) == len(third) == SIZE


def test_pages_serve_what_is_not_much_smaller() -> None:
    pool = memory._Pool()
    kept = pool.take(SIZE)
    place = place_of(kept)
    del kept
    assert place_of(pool.take(int(SIZE / memory.MOST_WASTE) - memory.HUGE_PAGE_BYTES)) != place


@pytest.mark.parametrize("more_bytes", [0, 1, memory.HUGE_PAGE_BYTES // 2, memory.HUGE_PAGE_BYTES - 1])
@pytest.mark.parametrize("whole", [1, 2, 3])
def test_pages_serve_a_buffer_of_the_same_size_again(whole: int, more_bytes: int) -> None:
    pool, size = memory._Pool(), whole * memory.HUGE_PAGE_BYTES + more_bytes
    first = pool.take(size)
    place = place_of(first)
    del first
    assert place_of(pool.take(size)) == place


@given(
    st.lists(st.tuples(st.integers(1, 12), st.lists(st.integers(0, 30), max_size=3)), min_size=1, max_size=40)
)
def test_keeping_pages_raises_no_peak(turns: list[tuple[int, list[int]]]) -> None:
    """Held is never more than the most that was in use at once, whatever is taken and given back."""
    pool = memory._Pool()
    used: list[memoryview] = []
    most_bytes = 0
    for size, dropped in turns:
        for at in dropped:
            if used:
                del used[at % len(used)]
        used.append(pool.take(size * memory.HUGE_PAGE_BYTES))
        in_use = sum(map(len, used))
        most_bytes = max(most_bytes, int(memory.MOST_WASTE * in_use))
        assert in_use <= pool.held_bytes <= most_bytes
    assert len({place_of(buffer) for buffer in used}) == len(used)


def test_what_does_not_fit_makes_room_for_what_is_taken() -> None:
    pool = memory._Pool()
    before = resident_kib()
    taken = [pool.take(64 << 20)]
    ctypes.memset(place_of(taken[0]), 1, 64 << 20)  # 64 MiB of bytes might stay with malloc
    assert resident_kib() - before > 60 << 10
    taken.clear()
    for mib in (8, 24, 30):
        taken.append(pool.take(mib << 20))
        ctypes.memset(place_of(taken[-1]), 1, mib << 20)
        assert resident_kib() - before < 68 << 10
    assert sum(map(len, taken)) == 62 << 20


def resident_kib() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize() // 1024


def test_threads_share_the_pool() -> None:
    pool = memory._Pool()

    def work(number: int) -> bool:
        for _ in range(50):
            buffer = pool.take(SIZE)
            buffer[:64] = bytes([number]) * 64
            if bytes(buffer[:64]) != bytes([number]) * 64:
                return False
        return True

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(8)))
    assert pool.held_bytes <= 4 * SIZE


def test_a_large_buffer_asks_for_huge_pages_where_kernels_give_them() -> None:
    """Most kernels give none to shared memory, whatever it is advised."""
    buffer = memory._Pool().take(SIZE)
    at = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    permissions, flags, is_here = "", set[str](), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if not name.endswith(":"):
            start, stop = (int(edge, 16) for edge in name.split("-"))
            if is_here := start <= at < stop:
                permissions = rest[:4]
        elif name == "VmFlags:" and is_here:
            flags = set(rest.split())
    assert permissions == "rw-p"
    has_them = Path("/sys/kernel/mm/transparent_hugepage/enabled").exists()
    assert ("hg" in flags) == has_them


def test_the_largest_moment_is_forgotten() -> None:
    """A state that was loaded once must not stay in memory for the run."""
    pool = memory._Pool()
    large = [pool.take(SIZE) for _ in range(8)]
    del large
    assert pool.held_bytes == 8 * SIZE
    places = set[int]()
    for _ in range(2 * 8 * memory.FORGOTTEN_AFTER + 1):
        places.add(place_of(buffer := pool.take(SIZE)))
        del buffer
    assert pool.held_bytes == SIZE
    assert len(places) <= 8  # and no pages were made for it


def test_less_is_kept_while_more_is_in_use_beside_it() -> None:
    """Together they hold no more than they used at one moment."""
    pool = memory._Pool()
    pool.beside(10 * SIZE)
    pages = [pool.take(SIZE) for _ in range(4)]
    del pages[1:]
    pool.beside(10 * SIZE)
    assert pool.held_bytes == 4 * SIZE
    pool.beside(12 * SIZE)
    assert pool.held_bytes == 2 * SIZE
    more = [pool.take(SIZE) for _ in range(3)]
    del more
    assert pool.held_bytes == 4 * SIZE  # so much was in use beside the 12
    pool.beside(20 * SIZE)
    assert pool.held_bytes == SIZE


def test_no_more_is_kept_when_less_is_in_use_beside_it() -> None:
    pool = memory._Pool()
    pool.beside(20 * SIZE)
    pages = [pool.take(SIZE) for _ in range(4)]
    del pages
    pool.beside(0)
    larger = pool.take(3 * SIZE)
    assert pool.held_bytes == 4 * SIZE  # what was in use of it at one moment
    del larger


def test_what_is_in_use_beside_it_keeps_no_moment_for_longer() -> None:
    pool = memory._Pool()
    pool.beside(100 * SIZE)
    large = [pool.take(SIZE) for _ in range(8)]
    del large
    for _ in range(2 * 8 * memory.FORGOTTEN_AFTER + 1):
        place_of(pool.take(SIZE))
    assert pool.held_bytes == SIZE


def test_what_rounds_need_is_not_forgotten() -> None:
    pool = memory._Pool()
    places = set[int]()
    for _ in range(20 * memory.FORGOTTEN_AFTER):
        places.update(map(place_of, buffers := [pool.take(SIZE) for _ in range(3)]))
        del buffers
        place_of(pool.take(SIZE))
        assert pool.held_bytes == 3 * SIZE
    assert len(places) == 3


def test_no_more_is_returned_than_is_too_much() -> None:
    """A message's pages beside what a mean left would else cost the next mean all of its own."""
    pool, size = memory._Pool(), memory.HUGE_PAGE_BYTES
    others, mean = pool.take(8 * size), pool.take(8 * size)
    mean[::size] = b"\7" * 8
    place = place_of(mean)
    del mean
    message = pool.take(size)
    assert pool.held_bytes == 16 * size
    mean = pool.take(8 * size)
    assert place_of(mean) == place
    assert bytes(mean[::size]) == b"\7" * 7 + b"\0"
    del others, message, mean
    assert pool.held_bytes == 17 * size  # so much was in use at last


def test_what_is_shrunk_again_and_again_goes() -> None:
    pool, size = memory._Pool(), memory.HUGE_PAGE_BYTES
    pages = pool.take(4 * size)
    del pages
    small = [pool.take(size) for _ in range(3)]
    assert pool.held_bytes == 4 * size
    small.append(pool.take(size))
    assert pool.held_bytes == sum(map(len, small)) == 4 * size


@pytest.mark.parametrize("why", ["no huge pages", "locked"])
def test_where_pages_cannot_be_returned_singly_all_of_them_go(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, size = memory._Pool(), memory.HUGE_PAGE_BYTES
    if why == "locked":
        monkeypatch.setattr(memory.mmap, "MADV_DONTNEED", -1)  # ``madvise`` refuses
    else:
        monkeypatch.delattr(memory.mmap, "MADV_HUGEPAGE")
    pages = pool.take(4 * size)
    del pages
    small = pool.take(size)
    assert pool.held_bytes == len(small)
    del small
    assert pool.held_bytes == size


def test_of_pages_that_fit_those_are_taken_that_are_here() -> None:
    pool, size = memory._Pool(), memory.HUGE_PAGE_BYTES
    smaller, larger = pool.take(8 * size), pool.take(9 * size)
    place = place_of(larger)
    del smaller
    message = pool.take(size)
    del larger
    assert place_of(pool.take(8 * size)) == place
    assert len(message) == size


def test_little_more_is_held_than_was_asked_for() -> None:
    """What is mapped beyond would be touched by buffers of other sizes, and kept."""
    pool = memory._Pool()
    buffer = pool.take(memory.HUGE_PAGE_BYTES + 1)
    assert memory.HUGE_PAGE_BYTES < pool.held_bytes <= memory.HUGE_PAGE_BYTES * 17 / 16
    buffer[-1] = 7
    assert bytes(buffer[-2:]) == b"\0\7"
    whole = pool.take(8 * memory.HUGE_PAGE_BYTES)
    assert pool.held_bytes <= memory.HUGE_PAGE_BYTES * 17 / 16 + len(whole)


def test_pages_serve_what_is_a_little_larger() -> None:
    pool, size = memory._Pool(), SIZE + 5000
    first = pool.take(size)
    place = place_of(first)
    del first
    assert place_of(pool.take(size + 5000)) == place


@pytest.mark.parametrize("size", [0, 1, SIZE, SIZE + 1])
def test_zeros_hold_nothing_of_before(size: int) -> None:
    memory.large_buffer(size)[:] = bytes([7]) * size
    assert bytes(memory.zeros(size)) == bytes(size)


def test_what_is_needed_once_is_not_kept() -> None:
    pool = memory._Pool()
    pages = [pool.take(SIZE) for _ in range(3)]
    state = pool.take(4 * SIZE, once=True)
    assert pool.held_bytes == 7 * SIZE
    del state, pages
    assert pool.held_bytes == 3 * SIZE


MANY_THREADS = """
import sys
import threading
from pathlib import Path
from p2p_co2.system.memory import return_large_blocks

if sys.argv[1] == "ours":
    return_large_blocks()

def resident_bytes():
    line = next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024

def carry():
    messages = [bytearray(b"1") * (1 << 20) for _ in range(12)]
    last.append(bytearray(100 << 10))  # keeps the end of the arena in use, as a long run does
    messages.clear()
    carried.set()
    over.wait()

last, over = [], threading.Event()
before = resident_bytes()
for _ in range(8):  # one after the other, and all are there to the end
    carried = threading.Event()
    threading.Thread(target=carry).start()
    carried.wait()
print((resident_bytes() - before) / (12 << 20))
over.set()
"""


def test_threads_use_each_others_memory_again() -> None:
    def kept(setting: str) -> float:
        """In moments of one of eight threads."""
        run = [sys.executable, "-c", MANY_THREADS, setting]
        return float(subprocess.run(run, capture_output=True, text=True, check=True, timeout=60).stdout)

    assert kept("ours") < 2.0
    assert kept("glibc's") > 4.0  # what the setting is for: if this fails, it is not needed any more


def test_the_setting_is_made_before_there_are_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread stays with the arena that it had."""
    order: list[str] = []

    def set_up() -> None:
        order.append("memory")

    def thread(*_: object) -> None:
        order.append("threads")
        raise InterruptedError

    monkeypatch.setattr(connection, "return_large_blocks", set_up)
    monkeypatch.setattr(connection, "NetworkThread", thread)
    monkeypatch.setattr(connection.Ticket, "parse", str)
    with pytest.raises(InterruptedError):
        connection.connect("a ticket", PeerConfig(folder=Path("unused")), lambda event: None)
    assert order == ["memory", "threads"]
