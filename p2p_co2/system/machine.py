"""What this machine has for a process: memory, and processor time, as the kernel and its control groups say.

Sources: proc(5), the kernel's cgroup-v2.rst.
"""

from __future__ import annotations

from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def available_memory_bytes() -> float:
    """What this process can still get: the machine's, or its control group's if that is less."""
    machine = 1024.0 * int(field_of("/proc/meminfo", "MemAvailable").split()[0])
    try:
        limit, used = (int((_CGROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
    except (OSError, ValueError):  # no control group of its own, or "max"
        return machine
    return min(machine, float(limit - used))


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
