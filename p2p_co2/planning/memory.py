"""Where the bytes of a peer lie, whether its machine bears them, and the largest model that it bears.

On the CPU all lies in host memory. With a GPU training lies there: live parameters, gradients, the inner
optimizer, what a backward pass keeps. What the swarm agrees on, snapshots and averaging buffers lie in host
memory all the same: 3 to 5 copies of the parameters in fp32, so 12 to 20 GB for 10^9 parameters.

About, and for means: a peer that gives its state to newcomers, or begins, may hold some more for a moment.
What a backward pass keeps is in ``train_bytes`` where it was measured; a given model counts without it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from p2p_co2.planning.forecast import Forecast, Setting, even_fragments, forecast

TRAIN_BYTES = 16.0
"""Of a parameter that trains in fp32 with Adam: itself, its gradient, two moments."""
_HALVINGS = 12
"""To a thousandth of where it began."""


@dataclass(frozen=True, kw_only=True)
class MachineMemory:
    """What a peer's machine has, bytes; 0: not known. ``gpu_bytes``: None where it trains on the CPU.
    ``how``: where the figures come from, in words; ``is_given``: by whoever plans, and not those of this
    machine, which may be none of the peers'."""

    host_bytes: float
    gpu_bytes: float | None
    how: str
    is_given: bool = False


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """``host_bytes``, ``gpu_bytes``: that the run takes of a peer. ``largest_parameters``: of the largest
    model, trained in fp32 with Adam and as this run is set, that fits ``room``; 0 if nothing of it is known.
    ``limited_by``: "host memory" or "GPU memory". ``troubles``: what the machine does not bear, a sentence
    each."""

    host_bytes: float
    gpu_bytes: float
    room: MachineMemory
    largest_parameters: int
    limited_by: str
    troubles: tuple[str, ...]


def plan_memory(setting: Setting, shown: Forecast, room: MachineMemory) -> MemoryPlan:
    """Lay the forecast ``shown`` of ``setting`` beside what a machine has."""
    needed = {"host memory": shown.memory_bytes, "GPU memory": shown.gpu_bytes}
    there = {"host memory": room.host_bytes, "GPU memory": room.gpu_bytes or 0.0}
    sizes = {where: _largest(setting, where, has) for where, has in there.items() if has}
    limited_by = min(sizes, key=sizes.__getitem__, default="")
    largest = sizes.get(limited_by, 0)
    troubles = [
        f"a peer needs {needed[where] / 1e9:.3g} GB of {where}, and {has / 1e9:.3g} GB are there: "
        f"{_cure(where, setting)}"
        for where, has in there.items()
        if has and needed[where] > has
    ]
    return MemoryPlan(
        host_bytes=shown.memory_bytes,
        gpu_bytes=shown.gpu_bytes,
        room=room,
        largest_parameters=largest,
        limited_by=limited_by,
        troubles=tuple(troubles),
    )


def needed_bytes(setting: Setting, parameters: int) -> dict[str, float]:
    """What a model of so many ``parameters`` takes, as ``setting`` is otherwise: its step takes as long."""
    fragments = even_fragments(parameters, len(setting.fragments))
    other = replace(setting, fragments=fragments, train_bytes=TRAIN_BYTES * parameters)
    shown = forecast(other)
    return {"host memory": shown.memory_bytes, "GPU memory": shown.gpu_bytes}


def _largest(setting: Setting, where: str, has: float) -> int:
    """The most parameters, to two digits, whose need ``where`` is at most ``has``; 0 if none are. By halving:
    on a slow line a larger model has more rounds open at once, so more copies too."""
    low, high = 0.0, has / 4  # a copy of the parameters alone would fill it
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        is_bearable = needed_bytes(setting, max(1000, int(middle)))[where] <= has
        low, high = (middle, high) if is_bearable else (low, middle)
    if low < 1000:
        return 0
    step = 10.0 ** (math.floor(math.log10(low)) - 1)
    return int(math.floor(low / step) * step)


def _cure(where: str, setting: Setting) -> str:
    if where == "GPU memory":
        return "take a smaller model or batch, 16-bit parameters, or cut the model into stages"
    if setting.on_gpu:
        return "agreed parameters lie in host memory beside a GPU, too; take a smaller model, or stages"
    return "take a smaller model or batch, or cut the model into stages"
