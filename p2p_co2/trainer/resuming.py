"""Going on from a checkpoint, also where the program that goes on is not quite the one that wrote it.

Laws: the agreed state comes back whole, or one ``ConfigError`` says what differs and what to do. What is only
this peer's own, the inner optimizer and the buffers, comes back where it fits; where it does not, training
goes on without it, and one line says so. Frozen parameters are where the model came from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from p2p_co2.config import RunConfig
from p2p_co2.errors import ConfigError
from p2p_co2.tensors.checkpoint.folder import Checkpoint, InnerOptimizer, Owned
from p2p_co2.tensors.fragments import FragmentPlan, LiveParameters
from p2p_co2.tensors.names import named_buffers, named_parameters, owned_by, trained_parameters

FAULTS = (
    ArithmeticError, AssertionError, AttributeError, ConfigError, LookupError, MemoryError, OSError,
    RuntimeError, TypeError, ValueError,
)  # fmt: skip
"""Of an optimizer of the user's, of the memory, of a tensor that is not what it says: no reason to end."""
CURE = "give another folder (--folder, PeerConfig.folder), or begin anew (--start-over, start_over=True)"
Shapes = Mapping[str, tuple[int, ...]]


def shapes_of(model: nn.Module) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Plain name and shape of each parameter that is trained, in the model's order."""
    return tuple((name, tuple(one.shape)) for name, one in trained_parameters(model).items())


def inner_of(optimizer: Optimizer, model: nn.Module) -> InnerOptimizer:
    """What the inner optimizer's state belongs to; a parameter that is not the model's has no name."""
    names = {id(parameter): name for name, parameter in named_parameters(model).items()}

    def owned(parameter: Tensor) -> Owned:
        dtype = str(parameter.dtype).removeprefix("torch.")
        return Owned(names.get(id(parameter), ""), dtype, tuple(parameter.shape))

    groups = (tuple(map(owned, group["params"])) for group in optimizer.param_groups)
    return InnerOptimizer(type(optimizer).__name__, tuple(groups))


def check(
    saved: Checkpoint, run: RunConfig, model: nn.Module, plan: FragmentPlan, where: str,
    stage: int | None = None,
) -> None:  # fmt: skip
    """Raises ``ConfigError`` if the agreed state that was saved is not one of this run and this model.
    ``stage``: the one that ``model`` is, None if it is the whole model."""
    if saved.run.digest() != run.digest():
        another = "another run" if saved.stage is None else f"{saved.holds} of another run"
        raise ConfigError(where, "", f"is of {another}; {CURE}")
    if saved.stage != stage:
        here = "the whole model" if stage is None else f"stage {stage}"
        back = f"join with --stage {saved.stage}, " if saved.stage is not None else ""
        raise ConfigError(where, "", f"holds {saved.holds} of this run, and this peer {here}; {back}{CURE}")
    theirs = dict(saved.parameters)
    ours = dict(shapes_of(model))
    difference = _difference(theirs, ours)
    sizes = [state.params.numel() for state in saved.states]
    if not difference and list(theirs) != list(ours):
        difference = "its parameters come in another order"
    if not difference and sizes != [fragment.numel for fragment in plan.fragments]:
        difference = "its fragments are other ones"
    if difference:
        raise ConfigError(where, "", f"is of another model: {difference}; {CURE}")


def restore(
    saved: Checkpoint, live: LiveParameters, model: nn.Module, optimizer: Optimizer, keeps_rate: bool
) -> list[str]:
    """Put the agreed parameters, the buffers and the inner optimizer back; what did not come back, in words.

    ``keeps_rate``: the learning rates are those that the optimizer has now (the saved ones hold the factor of
    a schedule); otherwise the saved ones, from which a scheduler of torch's goes on.
    """
    for fragment, state in enumerate(saved.states):
        live.load_(fragment, state.params)
    troubles = _restore_buffers(saved, model)
    if trouble := _restore_optimizer(saved, live, model, optimizer, keeps_rate):
        troubles.append(trouble)
    return troubles


def _difference(theirs: Shapes, ours: Shapes) -> str:
    """The first of them, in words; "" if there is none."""
    for name, shape in ours.items():
        if name not in theirs:
            return f"it has no {name}"
        if theirs[name] != shape:
            return f"{name} is {theirs[name]} there and {shape} here"
    more = [name for name in theirs if name not in ours]
    return f"it has {more[0]}, which is not trained here" if more else ""


def _restore_buffers(saved: Checkpoint, model: nn.Module) -> list[str]:
    troubles = []
    ours = named_buffers(model, persistent=True)
    for name, buffer in ours.items():
        values = saved.buffers.get(name)
        if values is None or values.shape != buffer.shape or not torch.can_cast(values.dtype, buffer.dtype):
            there = "none" if values is None else f"{values.dtype} {tuple(values.shape)}"
            text = f"the buffer {name} stays as it is: {buffer.dtype} {tuple(buffer.shape)} here, {there} in"
            troubles.append(f"{text} the checkpoint".replace("torch.", ""))
            continue
        try:
            with torch.no_grad():
                buffer.copy_(values)
        except RuntimeError as error:
            troubles.append(f"the buffer {name} stays as it is: {error}")
    gone = [name for name in saved.buffers if name not in ours]
    return troubles + [f"the checkpoint's buffer {name} is none of this model" for name in gone]


def _restore_optimizer(
    saved: Checkpoint, live: LiveParameters, model: nn.Module, optimizer: Optimizer, keeps_rate: bool
) -> str:
    """What did not come back; "" if all did."""
    anew = "the inner optimizer begins anew, the agreed state does not; to keep both, pass the same optimizer"
    if not saved.optimizer:
        return "the checkpoint is without an inner optimizer, which begins anew"
    if difference := _other(saved.inner, inner_of(optimizer, model)):
        return f"{difference}: {anew}"
    dtypes = [owned.dtype for owned in chain(*saved.inner.groups)]
    state_dict = live.own_state(saved.optimizer, optimizer, dtypes, keeps_rate)
    try:
        take_over(state_dict, optimizer, dtypes, keeps_rate)
    except FAULTS as error:
        why = f"{type(error).__name__}: {error}"
        return f"this inner optimizer does not take the checkpoint's ({why}): {anew}"
    return ""


def take_over(
    saved: Mapping[str, Any], optimizer: Optimizer, dtypes: Sequence[str], keeps_rate: bool
) -> None:
    """Load what of a saved ``state_dict`` is this process's. ``dtypes``: of the parameters that it was saved
    with, in order. ``keeps_rate`` as ``restore`` has it. Raises whatever the optimizer does."""
    state_dict = dict(saved)
    rates = [group.get("lr") for group in optimizer.param_groups]
    if groups := state_dict.get("param_groups", []):  # what was not saved of them stays
        pairs = zip(optimizer.param_groups, groups, strict=True)
        state_dict["param_groups"] = [{**ours, **theirs} for ours, theirs in pairs]
    optimizer.load_state_dict(state_dict)
    _keep_dtypes(state_dict.get("state", {}), dtypes, optimizer)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if keeps_rate and rate is not None:
            group["lr"] = rate


def _other(then: InnerOptimizer, now: InnerOptimizer) -> str:
    """How the saved inner optimizer differs from the one of now, in words; "" if it is the same."""
    sizes = [[len(group) for group in inner.groups] for inner in (then, now)]
    if (then.kind, sizes[0]) != (now.kind, sizes[1]):
        here = f"this one {now.kind} with groups of {sizes[1]}"
        return f"the checkpoint's inner optimizer is {then.kind} with groups of {sizes[0]} parameters, {here}"
    for theirs, ours in zip(chain(*then.groups), chain(*now.groups), strict=True):
        if (theirs.name, theirs.shape) != (ours.name, ours.shape):
            there, here = (f"{one.name or 'another parameter'} {one.shape}" for one in (theirs, ours))
            return f"the checkpoint's inner optimizer has {there} where this one has {here}"
    return ""


def _keep_dtypes(state: Mapping[Any, Any], dtypes: Sequence[str], optimizer: Optimizer) -> None:
    """``load_state_dict`` gives a state its parameter's dtype: right where that has changed, wrong where an
    optimizer keeps another one."""
    for index, (parameter, dtype) in enumerate(zip(owned_by(optimizer), dtypes, strict=True)):
        if str(parameter.dtype) != f"torch.{dtype}":
            continue
        now = optimizer.state.get(parameter, {})
        for key, values in state.get(index, {}).items():
            other = now.get(key)
            if isinstance(values, Tensor) and isinstance(other, Tensor) and values.dtype != other.dtype:
                now[key] = values.to(other.device)
