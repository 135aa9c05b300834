"""The machine that a peer runs on: memory, GPU memory, temperature. Read only while somebody looks.

Sources: proc(5); the kernel's documents of hwmon, thermal and amdgpu; ``nvidia-smi --help-query-gpu``.
What a machine does not tell is None, and no reading fails. Price: some 2 ms of reading, and where there is an
NVIDIA driver one ``nvidia-smi`` (tens of ms, in a process of its own). No torch, and no GPU is woken by us
where there is none.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from monitoring.facts import SILENT_AFTER_S
from p2p_co2.system.machine import field_of

_ASK_GPU = "--query-gpu=name,memory.used,memory.total,temperature.gpu"
_MIB = 1 << 20


@dataclass(frozen=True)
class GpuFacts:
    """One GPU, or card of memory of its own."""

    name: str
    used_bytes: float | None = None
    total_bytes: float | None = None
    celsius: float | None = None


@dataclass(frozen=True)
class MachineFacts:
    """``used_bytes`` of memory: all but what the kernel could give at once. ``peer_bytes``: that the peer's
    process holds. ``celsius``: of the warmest sensor of processor or board. ``gpus``: empty where none is.
    ``peer_cpu_s``: processor seconds that the peer's process has had; ``peer_cpu_share``: its share of all
    cores of late, 0 to 1, which only who looks twice knows."""

    total_bytes: float | None = None
    used_bytes: float | None = None
    peer_bytes: float | None = None
    celsius: float | None = None
    gpus: tuple[GpuFacts, ...] = ()
    peer_cpu_s: float | None = None
    peer_cpu_share: float | None = None


def read_machine(pid: int = 0, root: Path = Path("/")) -> MachineFacts:
    """What this machine says now, but for NVIDIA's GPUs (``ask_nvidia``). ``pid``: the peer's process, 0 for
    none. ``root``: where ``proc`` and ``sys`` lie. Reads files: not for an event loop."""
    proc = root / "proc"
    total, free = (_kib(proc / "meminfo", name) for name in ("MemTotal", "MemAvailable"))
    return MachineFacts(
        total_bytes=total,
        used_bytes=None if total is None or free is None else total - free,
        peer_bytes=_kib(proc / str(pid) / "status", "VmRSS") if pid > 0 else None,
        celsius=max(_temperatures(root / "sys"), default=None),
        gpus=tuple(_amd(root / "sys")),
        peer_cpu_s=_cpu_s(proc / str(pid) / "stat") if pid > 0 else None,
    )


def _cpu_s(stat: Path) -> float | None:
    """User and system time of a process, without its children."""
    with suppress(OSError, ValueError, IndexError):  # no such process
        fields = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return None


def _kib(table: Path, name: str) -> float | None:
    with suppress(OSError, ValueError, IndexError):  # no such process, or no such kernel
        return 1024.0 * int(field_of(str(table), name).split()[0])
    return None


def _number(path: Path) -> float | None:
    with suppress(OSError, ValueError):  # a sensor that sleeps, or is gone
        return float(path.read_text(encoding="ascii"))
    return None


def _temperatures(sys: Path) -> Iterator[float]:
    """Degrees Celsius of all sensors that a machine can have; no real one is outside of 1 to 150."""
    for path in (*sys.glob("class/hwmon/hwmon*/temp*_input"), *sys.glob("class/thermal/thermal_zone*/temp")):
        value = _number(path)
        if value is not None and 1.0 < value / 1000 < 150.0:
            yield value / 1000


def ask_nvidia() -> tuple[GpuFacts, ...]:
    """NVIDIA's GPUs. Blocks for tens of ms, ``SILENT_AFTER_S`` where a driver does not answer."""
    if shutil.which("nvidia-smi") is None:
        return ()
    try:
        asked = ["nvidia-smi", _ASK_GPU, "--format=csv,noheader,nounits"]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=SILENT_AFTER_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(read_nvidia(done.stdout))


def read_nvidia(told: str) -> Iterator[GpuFacts]:
    """The answer of ``nvidia-smi``, a GPU a line; "[N/A]" is what it does not know."""
    for line in told.splitlines():
        name, *figures = (word.strip() for word in line.split(","))
        if len(figures) == 3:
            used, total, celsius = (float(word) if word.isdecimal() else None for word in figures)
            yield GpuFacts(name, used and used * _MIB, total and total * _MIB, celsius)


def _amd(sys: Path) -> Iterator[GpuFacts]:
    for device in sorted(sys.glob("class/drm/card[0-9]*/device")):
        total = _number(device / "mem_info_vram_total")
        if total:
            celsius = max((one for path in device.glob("hwmon/hwmon*/temp1_input") if (one := _number(path))),
                          default=None)  # fmt: skip
            yield GpuFacts("AMD GPU", _number(device / "mem_info_vram_used"), total,
                           None if celsius is None else celsius / 1000)  # fmt: skip
