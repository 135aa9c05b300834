"""This machine alone: Python, torch, device, kernels, threads, memory, disk, files, proxy, ports.

Each check takes what it judges as arguments, so that every outcome can be shown; ``look_at_machine`` reads
the real ones. Sources: proc(5), cgroup v2 (memory.max, cpu.max), getrlimit(2). Price: importing torch, some
seconds on a slow disk.
"""

from __future__ import annotations

import errno
import importlib
import os
import platform
import resource
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from p2p_co2.config import PeerConfig
from p2p_co2.errors import EnvironmentFault
from p2p_co2.system.process import require_supported_platform
from peers.doctor.findings import Finding, State

LEAST_PYTHON, LEAST_TORCH = (3, 11), (2, 6)
BASE_BYTES = 450e6
"""What a peer holds before its model: torch, the network libraries, their threads (``docs/LOG.md``: 530 MB
with a model of 1.3 million parameters)."""
LEAST_DISK_BYTES = 200e6
"""A small model's checkpoint, and a journal of some days."""
LEAST_FILES, ENOUGH_FILES = 128, 1024
"""Open files: about 40 at rest, and some four for each link."""
PROXIES = ("http_proxy", "https_proxy", "all_proxy")
_CGROUP = Path("/sys/fs/cgroup")


def look_at_machine(config: PeerConfig) -> Iterator[Finding]:
    """All checks of this machine, one by one; under a second after torch is imported."""
    yield check_python()
    yield check_platform()
    torch = check_torch()
    yield torch
    if torch.state == State.OK:
        yield check_device(config.device)
        yield check_kernels(*_kernels())
    yield check_threads(config.limits.threads, len(os.sched_getaffinity(0)), cpu_quota())
    yield check_memory(available_memory_bytes(), BASE_BYTES)
    yield check_disk(config.folder, LEAST_DISK_BYTES)
    yield check_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    yield check_proxy(os.environ)
    yield check_ports(config)


def check_python(version: tuple[int, ...] = tuple(sys.version_info[:3])) -> Finding:
    text = ".".join(map(str, version))
    if version[:2] >= LEAST_PYTHON:
        return Finding("python", State.OK, text)
    return Finding("python", State.CANNOT, text, "install Python 3.11 or later and p2p-co2 into it")


def check_platform(system: str = sys.platform, machine: str = platform.machine()) -> Finding:
    try:
        require_supported_platform(system, machine)
    except EnvironmentFault as error:
        return Finding("platform", State.CANNOT, f"{system} on {machine}", str(error))
    return Finding("platform", State.OK, f"{system} on {machine}")


def check_torch(load: Callable[[str], object] = importlib.import_module) -> Finding:
    """Whether torch is there, new enough and can be imported; leaves it imported."""
    advice = "install it again: pip install --force-reinstall torch"
    try:
        version = str(getattr(load("torch"), "__version__", "0"))
    except (ImportError, OSError, RuntimeError) as error:
        return Finding(
            "torch", State.CANNOT, f"cannot be imported: {str(error).partition(chr(10))[0][:200]}", advice
        )
    parts = version.partition("+")[0].split(".")
    numbers = tuple(int(part) for part in parts[:2] if part.isdigit())
    if numbers >= LEAST_TORCH:
        return Finding("torch", State.OK, version)
    return Finding("torch", State.CANNOT, version, "2.6 or later is needed: pip install --upgrade torch")


def check_device(name: str) -> Finding:
    """The training device; its memory if it has its own. Imports torch."""
    import torch

    try:
        device = torch.device(name)
    except RuntimeError:
        return Finding("device", State.CANNOT, f"torch knows no device {name!r}", "use --device cpu or cuda")
    if device.type == "cpu":
        return Finding("device", State.OK, f"cpu, {_processor()}")
    if device.type != "cuda" or not torch.cuda.is_available():
        advice = "use --device cpu, or install a build of torch for it and its driver"
        return Finding("device", State.CANNOT, f"torch sees no {name} here", advice)
    if (device.index or 0) >= torch.cuda.device_count():
        advice = f"there are {torch.cuda.device_count()}; they count from cuda:0"
        return Finding("device", State.CANNOT, f"no device {name}", advice)
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    words = f"{torch.cuda.get_device_name(device)}, {gigabytes(free_bytes)} of {gigabytes(total_bytes)} free"
    if free_bytes < total_bytes / 2:
        return Finding(
            "device", State.LIMITED, words, "another program uses most of its memory; end that first"
        )
    return Finding("device", State.OK, words)


def check_kernels(built: bool, runs: bool) -> Finding:
    """What the codecs have to compute with. ``built``: at installation; ``runs``: this processor can run it.
    Without it torch's operations give the same values."""
    if runs:
        return Finding("kernels", State.OK, "compiled at installation")
    why = (
        "compiled, and this processor has no AVX2 or no F16C"
        if built
        else "none: no C compiler at installation"
    )
    advice = "install gcc and then p2p-co2 again: encoding and averaging are slower without, training is not"
    return Finding("kernels", State.LIMITED, why, advice)


def _kernels() -> tuple[bool, bool]:
    from p2p_co2.tensors.codec import passes

    return bool(passes.libraries()), passes.kernel is not None


def check_threads(wanted: int, cores: int, quota: float) -> Finding:
    """``wanted``: --threads, 0 for all. ``cores``: that this process may use. ``quota``: CPU seconds per
    second, inf without one."""
    usable = min(float(cores), quota)
    words = f"{wanted or cores} for training, {cores} cores" + (
        f", a quota of {quota:g}" if quota < cores else ""
    )
    if (wanted or cores) > usable:
        advice = f"give --threads {max(1, int(usable))}: more than that wait for each other"
        return Finding("threads", State.LIMITED, words, advice)
    if usable < 2:
        return Finding("threads", State.LIMITED, words, "the exchange shares the one core with training")
    return Finding("threads", State.OK, words)


def check_memory(available_bytes: float, needed_bytes: float, name: str = "memory") -> Finding:
    words = f"{gigabytes(available_bytes)} available, about {gigabytes(needed_bytes)} needed"
    if available_bytes < needed_bytes:
        return Finding(name, State.CANNOT, words, "end other programs, or take a machine with more memory")
    if available_bytes < 1.5 * needed_bytes:
        return Finding(name, State.LIMITED, words, "end other programs: a peer that has to swap stands still")
    return Finding(name, State.OK, words)


def check_disk(folder: Path, needed_bytes: float, name: str = "disk") -> Finding:
    """Room in the folder (or where it will be made), and whether it may be written."""
    place = folder.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        if not place.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "not a folder")
        with tempfile.NamedTemporaryFile(dir=place, prefix=".p2p-co2-") as probe:
            probe.write(bytes(1 << 16))
            probe.flush()
            os.fsync(probe.fileno())
        free_bytes = shutil.disk_usage(place).free
    except OSError as error:
        words = f"{place}: {error.strerror}"
        is_full = error.errno in {errno.ENOSPC, errno.EDQUOT}
        advice = f"{'free some space, or ' if is_full else ''}name another folder with --folder"
        return Finding(name, State.CANNOT, words, advice)
    words = f"{gigabytes(free_bytes)} free in {place}, about {gigabytes(needed_bytes)} needed"
    if free_bytes < needed_bytes:
        advice = "free some space or name another --folder: checkpoints will fail, training goes on"
        return Finding(name, State.LIMITED, words, advice)
    return Finding(name, State.OK, words)


def check_files(soft: int) -> Finding:
    if soft == resource.RLIM_INFINITY or soft >= ENOUGH_FILES:
        return Finding(
            "open files", State.OK, "no limit" if soft == resource.RLIM_INFINITY else f"limit {soft}"
        )
    advice = f"raise the limit in this shell: ulimit -n {4 * ENOUGH_FILES}"
    state = State.CANNOT if soft < LEAST_FILES else State.LIMITED
    return Finding("open files", state, f"limit {soft}", advice)


def check_proxy(environment: Mapping[str, str]) -> Finding:
    """Peers dial each other: a proxy is never used, so a network that has nothing else keeps them out."""
    found = sorted({name for name in environment if name.lower() in PROXIES and environment[name]})
    if not found:
        return Finding("proxy", State.OK, "none set")
    advice = "peers connect directly and do not use it: the network must let outgoing TCP through"
    return Finding("proxy", State.LIMITED, f"{', '.join(found)} set", advice)


def check_ports(config: PeerConfig) -> Finding:
    """Whether the address is this machine's and the fixed ports are free."""
    asked = (
        ("--libp2p-port", config.libp2p_port, True),
        ("--grpc-port", config.grpc_port, config.carrier != "libp2p"),
    )
    for option, port, is_used in asked:
        if not is_used:
            continue
        problem = _cannot_listen(config.host, port)
        if problem:
            where = f"{config.host} port {port}" if port else config.host
            fix = (
                f"choose another {option}, or end the program that has it"
                if port
                else "choose another --host"
            )
            return Finding("ports", State.CANNOT, f"{where}: {problem}", fix)
    ports = [str(port) if port else "any free one" for _, port, is_used in asked if is_used]
    return Finding("ports", State.OK, f"{config.host}, {' and '.join(dict.fromkeys(ports))}")


def _cannot_listen(host: str, port: int) -> str:
    try:
        with socket.socket(
            socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM
        ) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen(1)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def available_memory_bytes() -> float:
    """What this process can still get: the machine's, or its control group's if that is less."""
    machine = 0.0
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            machine = 1024.0 * int(line.split()[1])
    limit, used = _cgroup_number("memory.max"), _cgroup_number("memory.current")
    return min(machine, limit - (used or 0.0)) if limit is not None else machine


def cpu_quota() -> float:
    """CPU seconds per second that the control group allows; inf without a limit."""
    try:
        share, period = (_CGROUP / "cpu.max").read_text(encoding="ascii").split()
        return int(share) / int(period)
    except (OSError, ValueError):  # no control group of its own, or "max"
        return float("inf")


def _cgroup_number(name: str) -> float | None:
    try:
        return float(int((_CGROUP / name).read_text(encoding="ascii")))
    except (OSError, ValueError):  # as above
        return None


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def gigabytes(size_bytes: float) -> str:
    return f"{size_bytes / 1e9:.3g} GB"
