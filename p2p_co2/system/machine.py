"""What this machine has for a process: memory, and processor time, as the kernel and its control groups say.

Sources: proc(5), the kernel's cgroup-v2.rst and cgroup-v1/memory.rst.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_MEMORY = (
    ("memory.max", "memory.current", "memory.stat"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
)
"""Of version 2, and of version 1: the limit, what is used, and of what kinds that is."""


def available_memory_bytes() -> float:
    """What this process can still get: the machine's, or its control group's if that is less. Pages of files
    that were read are free: the kernel gives them back."""
    available = 1024.0 * int(field_of("/proc/meminfo", "MemAvailable").split()[0])
    for limit, used, table in _MEMORY:
        with suppress(OSError, ValueError):  # of the other version, no control group of its own, or "max"
            left = int((_CGROUP / limit).read_text()) - int((_CGROUP / used).read_text())
            available = min(available, float(left + _file_bytes(_CGROUP / table)))
    return available


def _file_bytes(table: Path) -> int:
    """What the page cache of a control group holds, in version 1 with the groups below it."""
    lines = table.read_text(encoding="ascii") if table.exists() else ""
    found = [re.findall(rf"^{of}(?:in)?active_file (\d+)$", lines, re.MULTILINE) for of in ("total_", "")]
    return sum(map(int, found[0] or found[1]))


def cpu_quota() -> float:
    """CPU seconds per second that the control group allows; inf without a limit."""
    try:
        share, period = (_CGROUP / "cpu.max").read_text(encoding="ascii").split()
        return int(share) / int(period)
    except (OSError, ValueError):  # as above
        return float("inf")


def field_of(path: str, name: str) -> str:
    """What one of the kernel's tables says under ``name``; "" if nothing."""
    for line in Path(path).read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith(name):
            return line.partition(":")[2].strip()
    return ""
