"""What to train on, and what a device can: no other file asks torch for that.

    device = training_device("auto")
    device.words        # "cuda:0 (NVIDIA GeForce RTX 4090, 24 GB)"
    model.to(device.name)

``auto`` is the first GPU that torch can compute on, else the processor. One that torch sees and cannot
compute on is passed over, and the words say why: its driver, its kernels or its memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from p2p_co2.errors import ConfigError
from p2p_co2.system.accelerators import Maker
from p2p_co2.system.machine import cores

AUTO = "auto"
_KNOWN = "give auto, cpu, cuda or cuda:1"


@dataclass(frozen=True)
class TrainingDevice:
    """``name``: torch's. ``words``: it with what was found, for a line of its own."""

    name: str
    words: str


def training_device(wanted: str, is_tried: bool = True) -> TrainingDevice:
    """The device that ``wanted`` (auto, cpu, cuda, cuda:1) means here. ``is_tried``: compute something on a
    GPU, which takes some of its memory. Raises ``ConfigError`` for one that cannot be used."""
    if wanted == AUTO:
        return _chosen(is_tried)
    try:
        device = torch.device(wanted)
    except RuntimeError:
        raise ConfigError.of_option("--device", f"torch knows no device {wanted!r}; {_KNOWN}") from None
    if device.type == "cpu":
        return TrainingDevice("cpu", f"cpu ({_cores()})")
    if device.type != "cuda" or (device.index or 0) >= torch.cuda.device_count():
        words = f"torch {torch.__version__} sees no {wanted} here; give auto or cpu, or see p2p-co2 doctor"
        raise ConfigError.of_option("--device", words)
    name = f"cuda:{device.index or 0}"
    found = _gpu(name, is_tried)
    if isinstance(found, str):
        words = f"{name} cannot be used ({found}); give auto or cpu, or see p2p-co2 doctor"
        raise ConfigError.of_option("--device", words)
    return found


def _chosen(is_tried: bool) -> TrainingDevice:
    if not torch.cuda.device_count():
        return TrainingDevice("cpu", f"cpu ({_cores()}; torch {torch.__version__} sees no GPU)")
    found = _gpu("cuda:0", is_tried)
    if isinstance(found, str):
        return TrainingDevice("cpu", f"cpu ({_cores()}; cuda:0 cannot be used: {found})")
    return found


def _gpu(name: str, is_tried: bool) -> TrainingDevice | str:
    """It, or why torch, which sees it, cannot compute on it."""
    try:
        found = torch.cuda.get_device_properties(name)
        if is_tried:
            torch.zeros(1, dtype=torch.float32, device=name).add_(1).item()
    except (RuntimeError, AssertionError) as error:  # torch's, for all that a driver answers
        return str(error).partition("\n")[0][:200] or "torch gives no reason"
    return TrainingDevice(name, f"{name} ({found.name}, {found.total_memory / 2**30:.0f} GB)")


def _cores() -> str:
    count = cores()
    return f"{count} core{'s' if count > 1 else ''}"


def built_for() -> Maker | None:
    """Whose GPUs this build of torch computes on; None for a CPU build."""
    if torch.version.hip is not None:
        return Maker.AMD
    if torch.backends.mps.is_available():
        return Maker.APPLE
    return Maker.NVIDIA if torch.version.cuda is not None else None


def device_of(number: int, wanted: str) -> str:
    """What peer ``number`` (from 0) of a swarm on this machine is to be told where ``wanted`` was asked for.
    ``auto`` spreads them over several GPUs."""
    count = torch.cuda.device_count()
    return f"cuda:{number % count}" if wanted == AUTO and count > 1 else wanted


# ---- what a device can

Device = torch.device | str
RandomState = Mapping[torch.device, Tensor]
"""Of torch's random numbers, by device."""
_CPU = torch.device("cpu")


def is_accelerator(device: Device) -> bool:
    """Whether it has memory and a queue of its own."""
    return torch.device(device).type not in ("cpu", "meta")


def await_computed(device: Device) -> None:
    """Wait until it has computed what is queued there."""
    if is_accelerator(device):
        torch.accelerator.current_stream(torch.device(device)).synchronize()


def memory_bytes(device: Device) -> tuple[int, int]:
    """Of an accelerator: free, and in all. Raises ``RuntimeError``, ``AssertionError`` or ``ValueError`` if
    torch cannot say."""
    if not is_accelerator(device):
        raise ValueError(f"{device} has no memory of its own")
    free, total = torch.get_device_module(torch.device(device)).mem_get_info(device)
    return free, total


def most_used_bytes(device: Device) -> float:
    """The most memory of an accelerator that this process has held so far."""
    return float(torch.get_device_module(torch.device(device)).max_memory_reserved(device))


def devices_in_use() -> list[torch.device]:
    """The accelerators that this process has begun to use."""
    has_begun = bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())] if has_begun else []


def current_accelerator() -> int | None:
    """The one that this thread has chosen, for ``choose_accelerator`` in another thread."""
    return torch.cuda.current_device() if devices_in_use() else None


def choose_accelerator(index: int | None) -> None:
    if index is not None:
        torch.cuda.set_device(index)


def random_state(devices: Iterable[torch.device]) -> RandomState:
    """As it is now, on the processor and on those of ``devices`` that are accelerators."""
    there = {one for one in devices if is_accelerator(one)}
    own = {one: torch.get_device_module(one).get_rng_state(one) for one in there}
    return {_CPU: torch.get_rng_state(), **own}


def set_random_state(state: RandomState) -> None:
    for device, values in state.items():
        if is_accelerator(device):
            torch.get_device_module(device).set_rng_state(values, device)
        else:
            torch.set_rng_state(values)


@contextmanager
def random_state_kept(devices: Iterable[torch.device]) -> Iterator[None]:
    """Afterwards the random numbers there, and on the processor, go on from where they were."""
    kept = random_state(devices)
    try:
        yield
    finally:
        set_random_state(kept)


def seed_accelerators(seed: int) -> None:
    """Those that nobody has drawn from yet, too, when they are used first."""
    torch.cuda.manual_seed_all(seed)
