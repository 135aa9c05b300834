"""This machine alone: torch, device, kernels, threads, memory, disk, files, ports; and what a run asks of it:
memory, disk, how much of its link.

Each check takes what it judges as arguments; ``look_at_machine`` reads the real ones. What a run needs is
reckoned by ``p2p_co2.planning``. Sources: proc(5), cgroup v2 (memory.max, cpu.max), getrlimit(2).
"""

from __future__ import annotations

import errno
import importlib
import os
import re
import resource
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence, Set
from importlib.metadata import distributions
from pathlib import Path

from p2p_co2.config import OWN_LOOP, PeerConfig, RunConfig
from p2p_co2.errors import ConfigError
from p2p_co2.system.accelerators import Gpus, Maker, gpus_here
from p2p_co2.system.machine import HERE, TESTED, available_memory_bytes, cores, cpu_quota, field_of, wsl
from p2p_co2.system.owner import Owner
from p2p_co2.system.process import OUR_PACKAGES
from peers.doctor.findings import Finding, Grade, MeasuredLink

BASE_BYTES = 450e6
"""What a peer holds before its model: torch, the network libraries, their threads (measured: 530 MB with a
model of 1.3 million parameters)."""
BYTES_PER_VALUE = 16
"""Weights, gradients and AdamW's two moments in fp32; and as much in a checkpoint: agreed parameters and
momentum, AdamW's two moments."""

_HIDE_GPUS = {"CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"}


def look_at_machine(config: PeerConfig, root: Path = Path("/")) -> Iterator[Finding]:
    """All checks of this machine, one by one; under a second after torch is imported. ``root``: where the
    kernel shows its GPUs."""
    yield check_platform(HERE, wsl())
    if names := names_of_others():
        advice = "install p2p-co2 in an environment of its own"
        yield Finding("packages", Grade.LIMITED, f"files of ours may be those of {', '.join(names)}", advice)
    torch = check_torch()
    yield torch
    if torch.state == Grade.OK:
        device = check_device(config.device)
        yield device
        from p2p_co2.tensors.codec import passes
        from p2p_co2.tensors.device import built_for

        used = "cpu" if device.measured.startswith("cpu") else config.device
        yield check_gpus(gpus_here(root), config.device, used, torch.measured, built_for())

        yield check_kernels(bool(passes.libraries()), passes.kernel is not None)
    for missing in Owner(config.limits.rest_while).missing:
        words, _, advice = missing.partition("; ")
        yield Finding("rest-while", Grade.LIMITED, words, advice)
    yield check_threads(config.limits.threads, cores(), cpu_quota())
    yield check_memory(available_memory_bytes(), BASE_BYTES)
    yield check_disk(config.folder, 200e6)  # a small model's checkpoint, and a journal of some days
    yield check_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    yield check_ports(config)


def check_platform(here: str, network: str) -> Finding:
    """``network``: how WSL 2 is connected; "" elsewhere."""
    words = f"{here} in WSL 2, network {network}" if network else here
    if here not in TESTED:
        return Finding("platform", Grade.LIMITED, words, "nobody has tried it: tell us how it went")
    if network in {"", "mirrored"}:
        return Finding("platform", Grade.OK, words)
    advice = "others cannot dial it: set networkingMode=mirrored and let Windows pass two ports"
    return Finding("platform", Grade.LIMITED, words, f"{advice}; docs/how-to/wsl.md says how")


def names_of_others() -> list[str]:
    """Distributions of this environment that bring a package of a name of ours: the last installed has
    overwritten the other's files."""
    ours = re.compile(rf"^({'|'.join(OUR_PACKAGES)})/__init__\.py,", re.MULTILINE)
    found = {one.name for one in distributions() if ours.search(one.read_text("RECORD") or "")}
    return sorted(found - {"p2p-co2"})


def check_torch() -> Finding:
    """Whether torch is there, new enough and can be imported; leaves it imported."""
    try:
        version = str(importlib.import_module("torch").__version__)
    except (ImportError, OSError, RuntimeError) as error:
        words = f"cannot be imported: {str(error).partition(chr(10))[0][:200]}"
        advice = "install it again: pip install --force-reinstall torch"
        return Finding("torch", Grade.CANNOT, words, advice)
    parts = version.partition("+")[0].split(".")
    if tuple(int(part) for part in parts[:2] if part.isdigit()) >= (2, 6):
        return Finding("torch", Grade.OK, version)
    return Finding("torch", Grade.CANNOT, version, "2.6 or later is needed: pip install --upgrade torch")


def check_device(wanted: str) -> Finding:
    """The training device; its memory if it has its own. Imports torch."""

    from p2p_co2.tensors.device import built_for, memory_bytes, training_device

    try:
        device = training_device(wanted)
    except ConfigError as error:
        words, _, advice = error.problem.partition("; ")
        return Finding("device", Grade.CANNOT, words, advice)
    if device.name == "cpu":
        processor = field_of("/proc/cpuinfo", "model name") or HERE
        return Finding("device", Grade.OK, f"{device.words}, {processor}")
    free_bytes, total_bytes = memory_bytes(device.name)
    words = f"{device.words}, {free_bytes / 2**30:.1f} GB free"
    if built_for() is Maker.AMD:
        words += ", by ROCm"
        return Finding("device", Grade.LIMITED, words, "nobody has tried ROCm: tell us how it went")
    if free_bytes < total_bytes / 2:
        advice = "another program uses most of its memory; end that first"
        return Finding("device", Grade.LIMITED, words, advice)
    return Finding("device", Grade.OK, words)


def check_gpus(
    there: Sequence[Gpus], wanted: str, used: str, version: str, built_for: Maker | None
) -> Finding:
    """Whether a GPU of this machine is left unused, and why. ``used``: the device that ``wanted`` has come
    to. ``version``, ``built_for``: of torch."""
    if built_for is Maker.APPLE and wanted != "cpu":
        advice = "it trains on the processor: nobody has tried p2p-co2 on mps"
        return Finding("gpu", Grade.LIMITED, "Apple's GPU (mps), not used: untested", advice)
    names = " and ".join(gpus.words for gpus in there) or "none"
    if not there or used != "cpu":
        return Finding("gpu", Grade.OK, names)
    if wanted == "cpu":
        return Finding("gpu", Grade.OK, f"{names}, not asked for")
    why, advice = _why_unused({gpus.maker for gpus in there if gpus.has_driver}, version, built_for)
    return Finding("gpu", Grade.LIMITED, f"{names}, not used: {why}", advice)


def _why_unused(makers: Set[Maker], version: str, built_for: Maker | None) -> tuple[str, str]:
    """(why torch uses none of the GPUs whose drivers are loaded, what to do)."""
    if not makers:
        return "its driver is not loaded", "install NVIDIA's driver, restart, and look with: nvidia-smi"
    if built_for in makers:
        advice = "look with nvidia-smi or rocm-smi: its driver may be too old; a container needs --gpus all"
        for name in _HIDE_GPUS & os.environ.keys():
            advice = f"{name} is set and may hide it"
        return f"torch {version} cannot use it", advice
    why = f"torch {version} is " + ("a CPU build" if built_for is None else "built for another maker's")
    pip = f"{sys.executable} -m pip"
    same = version.partition("+")[0]
    cure = f"{pip} uninstall -y torch && {pip} install torch=={same}"
    if Maker.NVIDIA in makers:
        return why, f"install one for CUDA: {cure}"
    return why, f"install one for ROCm: {cure} --index-url (as pytorch.org names it)"


def check_kernels(built: bool, runs: bool) -> Finding:
    """What the codecs have to compute with. ``built``: at installation; ``runs``: this processor can run it.
    Without it torch's operations give the same values."""
    if runs:
        return Finding("kernels", Grade.OK, "compiled")
    why = "compiled, and this processor has no AVX2 or no F16C" if built else "no C compiler at installation"
    advice = "install gcc and then p2p-co2 again: encoding and averaging are slower without, training is not"
    return Finding("kernels", Grade.LIMITED, why, advice)


def check_threads(wanted: int, cores: int, quota: float) -> Finding:
    """``wanted``: --threads, 0 for all. ``cores``: that this process may use. ``quota``: CPU seconds per
    second, inf without one."""
    usable = min(float(cores), quota)
    words = f"{wanted or cores} for training, {cores} cores"
    words += f", a quota of {quota:g}" if quota < cores else ""
    if (wanted or cores) > usable:
        advice = f"give --threads {max(1, int(usable))}: more than that wait for each other"
        return Finding("threads", Grade.LIMITED, words, advice)
    if usable < 2:
        return Finding("threads", Grade.LIMITED, words, "the exchange shares the one core with training")
    return Finding("threads", Grade.OK, words)


def check_memory(available_bytes: float, needed_bytes: float, name: str = "memory") -> Finding:
    words = f"{gigabytes(available_bytes)} available, about {gigabytes(needed_bytes)} needed"
    if available_bytes < needed_bytes:
        return Finding(name, Grade.CANNOT, words, "end other programs, or take a machine with more memory")
    if available_bytes < 1.5 * needed_bytes:
        return Finding(name, Grade.LIMITED, words, "end other programs: a peer that has to swap stands still")
    return Finding(name, Grade.OK, words)


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
        is_full = error.errno in {errno.ENOSPC, errno.EDQUOT}
        advice = f"{'free some space, or ' if is_full else ''}name another folder with --folder"
        return Finding(name, Grade.CANNOT, f"{place}: {error.strerror}", advice)
    words = f"{gigabytes(free_bytes)} free in {place}, about {gigabytes(needed_bytes)} needed"
    if free_bytes < needed_bytes:
        advice = "free some space or name another --folder: checkpoints will fail, training goes on"
        return Finding(name, Grade.LIMITED, words, advice)
    return Finding(name, Grade.OK, words)


def check_files(soft: int) -> Finding:
    """Of the limit of open files: a peer has about 40 at rest, and some four for each link."""
    if soft == resource.RLIM_INFINITY or soft >= 1024:
        return Finding("open files", Grade.OK, f"limit {soft}")
    state = Grade.CANNOT if soft < 128 else Grade.LIMITED
    return Finding("open files", state, f"limit {soft}", "raise the limit in this shell: ulimit -n 4096")


def check_ports(config: PeerConfig) -> Finding:
    """Whether the address is this machine's and the fixed ports are free."""
    asked = [("--libp2p-port", config.libp2p_port)]
    if config.carrier != "libp2p":
        asked.append(("--grpc-port", config.grpc_port))
    for option, port in asked:
        if problem := cannot_listen(config.host, port):
            where = f"{config.host} port {port}" if port else config.host
            fix = f"{option}, or end the program that has it" if port else "--host"
            return Finding("ports", Grade.CANNOT, f"{where}: {problem}", f"choose another {fix}")
    ports = dict.fromkeys(str(port) if port else "any free one" for _, port in asked)
    return Finding("ports", Grade.OK, f"{config.host}, {' and '.join(ports)}")


def cannot_listen(host: str, port: int) -> str:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen(1)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def gigabytes(size_bytes: float) -> str:
    return f"{size_bytes / 1e9:.3g} GB"


# ---- what a run needs


def parameters_of(run: RunConfig) -> int | None:
    """Values of the built-in recipe's model, counted without making it; None for others. Imports torch.
    Raises ``ConfigError``."""
    from p2p_co2.recipes import BYTE_GPT
    from p2p_co2.recipes.byte_gpt import numel_of
    from p2p_co2.recipes.recipe import check_options

    return numel_of(check_options(run.recipe_options)[0]) if run.recipe == BYTE_GPT else None


def look_at_needs(run: RunConfig, config: PeerConfig, peers: int, link: MeasuredLink) -> Iterator[Finding]:
    """Memory, disk and link against what ``run`` needs among ``peers`` other peers."""
    from p2p_co2.planning.exchange import LinkFigures
    from p2p_co2.planning.forecast import even_fragments, forecast, setting_of

    try:
        parameters = parameters_of(run)
    except ConfigError as error:
        yield Finding("this run", Grade.CANNOT, str(error), "tell the organiser")
        return
    if parameters is None:
        whose = f"own recipe {run.recipe}"
        advice = "ask the organiser for the recipe's file and plan with it: p2p-co2 plan RUN.toml"
        if run.recipe == OWN_LOOP:
            whose = "trained by a program of its own"
            advice = "ask the organiser for these: p2p-co2 plan RUN.toml --parameters N --step-s S"
        yield Finding("this run", Grade.UNKNOWN, f"{whose}: size not known", advice)
        return
    line = LinkFigures(
        up_bytes_per_s=link.up_bytes_per_s or 1.0,
        down_bytes_per_s=link.down_bytes_per_s or 1.0,
        round_trip_s=link.round_trip_s or 0.0,
    )
    links = [line] * (peers + 1 if peers else 4)  # four where nobody is there to count
    train_bytes = BASE_BYTES + BYTES_PER_VALUE * parameters
    fragments = even_fragments(parameters, run.fragments)
    shown = forecast(setting_of(run, fragments, step_s=1.0, links=links, train_bytes=train_bytes))
    yield check_memory(available_memory_bytes(), shown.memory_bytes, "run's memory")
    yield check_disk(config.folder, 3 * BYTES_PER_VALUE * parameters + 50e6, "run's disk")
    if link.up_bytes_per_s and link.down_bytes_per_s and run.clock.mode == "time":
        yield check_link(shown.floor_s, run.clock.round_s)


def check_link(floor_s: float, round_s: float) -> Finding:
    """``floor_s``: the least time in which this link moves one round of all fragments."""
    words = f"an exchange takes {floor_s:.3g} s of this link, a round is {round_s:g} s"
    if floor_s > 0.8 * round_s:
        advice = "answers will be stale: use a cable, not Wi-Fi, and spare the link, or a longer round"
        return Finding("run's link", Grade.LIMITED, words, advice)
    return Finding("run's link", Grade.OK, words)
