"""memory: what the kernel says this process still holds after large tensors were freed."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from p2p_co2 import memory

HOLD = f"""
import sys
import torch
from pathlib import Path
from p2p_co2.memory import return_large_blocks

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
from p2p_co2.memory import return_large_blocks

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


@pytest.mark.parametrize("size", [0, 1, memory.HUGE_PAGE_BYTES - 1, memory.HUGE_PAGE_BYTES + 1])
def test_a_large_buffer_is_zeros_that_can_be_written(size: int) -> None:
    buffer = memory.large_buffer(size)
    assert len(buffer) == size
    assert not any(buffer[:4096])
    buffer[:] = bytes([7]) * size
    assert bytes(buffer) == bytes([7]) * size


def test_a_large_buffer_goes_back_to_the_system() -> None:
    def resident_kib() -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * resource.getpagesize() // 1024

    before = resident_kib()
    buffer = memory.large_buffer(64 << 20)
    buffer[:] = bytes(64 << 20)
    piece = buffer[:1]
    del buffer
    assert resident_kib() - before > 60 << 10  # a piece of it keeps all of it
    del piece
    gc.collect()
    assert resident_kib() - before < 8 << 10


def test_a_large_buffer_asks_for_huge_pages_where_kernels_give_them() -> None:
    """Most kernels give none to shared memory, whatever it is advised."""
    buffer = memory.large_buffer(3 * memory.HUGE_PAGE_BYTES)
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
