"""memory: what the kernel says this process still holds after large tensors were freed."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from p2p_co2.system import memory
from p2p_co2.system.memory import Pool

SIZE = 3 * memory.HUGE_PAGE_BYTES

TENSORS = """
import resource
import torch
from p2p_co2.system.memory import use_one_arena  # after torch, as programs do

assert use_one_arena()
assert use_one_arena()
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(8):
        torch.ones(6 << 20, dtype=torch.uint8)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_a_large_tensor_finds_the_pages_of_the_one_before() -> None:
    pages = (6 << 20) // os.sysconf("SC_PAGE_SIZE")
    environment = os.environ | {"THP_MEM_ALLOC_ENABLE": "0"}  # a system without huge pages
    run = [sys.executable, "-c", TENSORS]
    done = subprocess.run(run, stdout=subprocess.PIPE, text=True, check=True, timeout=120, env=environment)
    first, later = map(int, done.stdout.split())
    assert first > 0.9 * pages
    assert later < 4 * pages, "half of what eight new ones take"


HOLES = """
from pathlib import Path
from p2p_co2.system import memory

def resident_bytes():
    line = next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024

assert memory.use_one_arena()
del (first := bytearray(1 << 20))[:]  # its free moves the threshold, as a step's tensors do
small = [bytes(64 << 10) for _ in range(64)]
del small[1::2]
give_back, later_s = memory.return_holes, memory.HOLES_EVERY_S
assert give_back(1.0)
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


def place_of(buffer: memoryview) -> int:
    return int(np.frombuffer(buffer, np.uint8).ctypes.data)


def test_pages_are_used_again_once_nothing_refers_to_them() -> None:
    pool = Pool()
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


@given(
    st.lists(st.tuples(st.integers(1, 12), st.lists(st.integers(0, 30), max_size=3)), min_size=1, max_size=40)
)
def test_keeping_pages_raises_no_peak(turns: list[tuple[int, list[int]]]) -> None:
    """Held is never more than the most that was in use at once, whatever is taken and given back."""
    pool = Pool()
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


def test_threads_share_the_pool() -> None:
    pool = Pool()

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
    buffer = Pool().take(SIZE)
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
    pool = Pool()
    large = [pool.take(SIZE) for _ in range(8)]
    del large
    assert pool.held_bytes == 8 * SIZE
    places = set[int]()
    for _ in range(2 * 8 * memory.FORGOTTEN_AFTER + 1):
        places.add(place_of(buffer := pool.take(SIZE)))
        del buffer
    assert pool.held_bytes == SIZE
    assert len(places) <= 8  # and no pages were made for it


def test_what_is_needed_once_is_not_kept() -> None:
    pool = Pool()
    pages = [pool.take(SIZE) for _ in range(3)]
    state = pool.take(4 * SIZE, once=True)
    assert pool.held_bytes == 7 * SIZE
    del state, pages
    assert pool.held_bytes == 3 * SIZE


MANY_THREADS = """
import sys
import threading
from pathlib import Path
from p2p_co2.system.memory import use_one_arena

if sys.argv[1] == "ours":
    use_one_arena()

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


def arenas_kept(setting: str) -> float:
    """How many threads' messages are held still, of eight."""
    run = [sys.executable, "-c", MANY_THREADS, setting]
    return float(subprocess.run(run, stdout=subprocess.PIPE, text=True, check=True, timeout=60).stdout)


@pytest.mark.swarm
def test_threads_share_the_arena() -> None:
    assert arenas_kept("ours") < 1.5
    assert arenas_kept("glibc's") > 2.5  # what the setting is for: if this fails, it is not needed any more
