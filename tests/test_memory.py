"""memory: what the kernel says this process still holds after large tensors were freed."""

from __future__ import annotations

import subprocess
import sys

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
        [sys.executable, "-c", HOLD, setting], capture_output=True, text=True, check=True, timeout=120
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
