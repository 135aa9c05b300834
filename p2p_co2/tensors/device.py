"""What to train on: ``auto`` is the first GPU that torch can compute on, else the processor.

    device = training_device("auto")
    device.words        # "cuda:0 (NVIDIA GeForce RTX 4090, 24 GB)"
    model.to(device.name)

A GPU that torch sees and cannot compute on (a driver that is too old, a card that this build has no kernels
for, no memory left) is passed over by ``auto``, and the words say why.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from p2p_co2.errors import ConfigError
from p2p_co2.system.accelerators import Maker

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
    count = len(os.sched_getaffinity(0))
    return f"{count} core{'s' if count > 1 else ''}"


def built_for() -> Maker | None:
    """Whose GPUs this build of torch computes on; None for a CPU build."""
    if torch.version.hip is not None:
        return Maker.AMD
    return Maker.NVIDIA if torch.version.cuda is not None else None


def device_of(number: int, wanted: str) -> str:
    """What peer ``number`` (from 0) of a swarm on this machine is to be told where ``wanted`` was asked for:
    ``auto`` spreads them over the GPUs, where there are several."""
    count = torch.cuda.device_count()
    return f"cuda:{number % count}" if wanted == AUTO and count > 1 else wanted
