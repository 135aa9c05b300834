"""What this machine is, and what it has for a process: memory, and processor time, as the kernel and its
control groups say. No other file asks which system this is.

Sources: proc(5), the kernel's cgroup-v2.rst and cgroup-v1/memory.rst.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from p2p_co2.errors import EnvironmentFault

IS_LINUX = sys.platform == "linux"
HERE = f"{sys.platform} on {platform.machine()}"
TESTED = {"linux on x86_64"}
_CGROUP = Path("/sys/fs/cgroup")
_MEMORY = (
    ("memory.max", "memory.current", "memory.stat"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
)
"""Of version 2, and of version 1: the limit, what is used, and of what kinds that is."""


def require_supported_platform(here: str = HERE) -> None:
    """Raise ``EnvironmentFault`` where no peer can run. ``TESTED`` are those where somebody has tried one."""
    if not re.fullmatch("(linux|darwin) on (x86_64|aarch64|arm64)", here):
        cure = "install WSL 2 and run it there" if "win32" in here else "take a container or virtual machine"
        raise EnvironmentFault(f"p2p-co2 runs on Linux (this is {here}): {cure}")


def wsl(release: str = platform.release()) -> str:
    """How WSL 2 is connected, in its own word ("nat", "mirrored"); "" elsewhere."""
    if "microsoft" not in release.lower():
        return ""
    with suppress(OSError, subprocess.SubprocessError):  # of a WSL that is older than this program
        asked = ["wslinfo", "--networking-mode"]
        return subprocess.run(asked, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    return "unknown"


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if IS_LINUX else os.cpu_count() or 1


def peak_memory_bytes() -> int:
    """The most that this process has held so far; 0 where the system does not count it."""
    with suppress(ImportError):
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1024 if IS_LINUX else 1)
    return 0


def available_memory_bytes() -> float:
    """What this process can still get: the machine's, or its control group's if that is less. Pages of files
    that were read are free: the kernel gives them back. Of other systems inf: they are not asked."""
    if not IS_LINUX:
        return float("inf")
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
    for line in Path(path).read_text(encoding="utf-8", errors="replace").splitlines() if IS_LINUX else ():
        if line.startswith(name):
            return line.partition(":")[2].strip()
    return ""
