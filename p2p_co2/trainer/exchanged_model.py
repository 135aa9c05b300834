"""The model that a peer trains, and what it and its optimizer have to be for a swarm to train them. That is
looked at before the network is used, and again while training goes on.

Law: what is taken is exchanged. Each trainable parameter is a plain dense tensor with memory of its own. The
optimizer trains all of them and nothing else. Until the peer leaves they are the same objects by name, shape
and dtype. Anything else raises ``ConfigError`` with the parameter's name and the cure. A parameter that
several modules share (tied) is one parameter. What is frozen may be anything that holds values. fp64
parameters train in fp64 and are exchanged in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from p2p_co2.config import PeerConfig, RunConfig
from p2p_co2.errors import ConfigError
from p2p_co2.tensors.fragments import FragmentPlan, LiveParameters, ParameterSlice, named_values
from p2p_co2.tensors.names import (
    named_buffers,
    named_parameters,
    owned_by,
    shared_names,
    trained_parameters,
)
from p2p_co2.tensors.outer import AgreedState, Merge
from p2p_co2.tensors.private import is_batch_norm, is_fully_sharded
from p2p_co2.tensors.sharding import is_sharded, shard, trouble_with_cut
from p2p_co2.trainer.ranks.parameters import Group, RankedParameters
from p2p_co2.wire.terms import RunTerms

EXCHANGED = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_ASKED_OF_AN_OPTIMIZER = ("param_groups", "state", "state_dict", "load_state_dict")
_MOMENTS = frozenset({"momentum_buffer", "exp_avg", "exp_avg_sq"})
_FROM_THE_START = (
    "a run exchanges the same parameters from join to its end: set this up before join, on every peer"
)


@dataclass(frozen=True)
class TrainingSetup:
    """What a peer trains, and with what: the agreed run, its own config, the cut model, the inner
    optimizer. ``stage``: the one that ``model`` is; None if it is the whole model. ``group``: the ranks
    that hold it together, if this is one of some. ``terms``: the run's, if they may be amended."""

    run: RunConfig
    config: PeerConfig
    fragments: FragmentPlan
    model: nn.Module
    optimizer: Optimizer
    stage: int | None = None
    group: Group | None = None
    terms: RunTerms | None = None

    def live(self) -> LiveParameters:
        """The parameters in training, by fragment."""
        if self.group is None:
            return LiveParameters(self.model, self.fragments)
        return RankedParameters(self.group.ranks, self.model, self.fragments)


class ExchangedModel:
    """The model in training: its live parameters, and whether they still are what ``join`` was given. The
    training thread owns it; ``warn`` is told what a person should know."""

    def __init__(self, plan: TrainingSetup, warn: Callable[[str], None]) -> None:
        self._plan = plan
        self._warn = warn
        self.live = plan.live()
        self._joined = {
            name: (parameter, parameter.shape, parameter.dtype)
            for name, parameter in trained_parameters(plan.model).items()
        }
        self._shared = shared_names(plan.model)
        self._seen = self._glance()
        self.is_changed = False
        """Whether its parameters do not belong to the agreed state any more."""
        self._told = set[str]()
        self._frozen: dict[str, tuple[float, Tensor]] = {}
        """Since which position nothing trains a frozen parameter, and some of its values."""
        self._copied: dict[str, bool] = {}
        """Entries of the inner optimizer's state: whether they are copies of the parameters."""
        self._merged: tuple[ParameterSlice, Tensor, Tensor] | None = None
        """Some values before and after the last merge, until the next step was made."""
        self._undone = 0
        """Merges in a row that did not last."""
        self.live.copies = self.copies_of

    def warn_once(self, text: str) -> None:
        """Tell a person what would be told again and again."""
        if text not in self._told:
            self._told.add(text)
            self._warn(text)

    def look(self, position: float) -> None:
        """Raise ``ConfigError`` if the model has other parameters than those that are exchanged. Reads no
        values; as long as nothing changes it costs a glance at each module. One that is frozen for part of an
        iteration is still trained. It is told only if all that is frozen stays as it is for a round."""
        if (glance := self._glance()) == self._seen:
            self._frozen.clear()
            return
        try:
            self._check(position)
        except ConfigError as error:
            self.is_changed = True
            self._warn(str(error))  # others see why this peer leaves
            raise
        if not self._frozen:
            self._seen = glance

    def _glance(self) -> list[object]:
        """All that ``look`` goes by, quick to gather and to compare."""
        found: list[object] = [id(tensor) for tensor in owned_by(self._plan.optimizer)]
        for one in self._plan.model.parameters():
            found += (id(one), one.requires_grad, one.dtype, None if is_lazy(one) else one.shape)
        return found

    def _stays_frozen(self, name: str, parameter: Tensor, position: float) -> bool:
        since, _ = self._frozen.setdefault(name, (position, _some_of(parameter)))
        return position >= since + 1

    def _check(self, position: float) -> None:
        parameters = named_parameters(self._plan.model)
        frozen = ((self._joined[name][0], seen) for name, (_, seen) in self._frozen.items())
        if not all(torch.equal(_some_of(one), seen) for one, seen in frozen):
            self._frozen.clear()  # one whose gradient is 0 stays where the others are trained
        for name, (joined, shape, dtype) in self._joined.items():
            now = parameters.get(name)
            if now is None:
                problem = "is gone since join"
            elif now is joined and not now.requires_grad and not self._stays_frozen(name, now, position):
                continue
            elif not now.requires_grad:
                problem = "was frozen after join, for a round and more"
            elif (now.shape, now.dtype) != (shape, dtype):
                problem = f"was {dtype} {tuple(shape)} in join and is {now.dtype} {tuple(now.shape)}"
            elif now is not joined:
                problem = "was replaced by another object after join, such as by load_state_dict(assign=True)"
            else:
                continue
            raise ConfigError("model", name, f"{problem.replace('torch.', '')}; {_FROM_THE_START}")
        for name, parameter in parameters.items():
            is_trained = parameter.requires_grad and (is_lazy(parameter) or parameter.numel())
            if is_trained and name not in self._joined:
                is_new = "is trained, and was not when this peer joined: it is not exchanged"
                raise ConfigError("model", name, f"{is_new}; {_FROM_THE_START}")
        _check_strangers(parameters.values(), self._plan.optimizer)

    # ---- what moves with the parameters

    def merge_(self, fragment: int, merge: Merge) -> None:
        """As ``LiveParameters.merge_``; whether it lasts is seen after the next step."""
        part = max(self.live.slices(fragment), key=lambda one: one.stop - one.start, default=None)
        before = None if part is None else self._values(part)
        self.live.merge_(fragment, merge)
        self._frozen = {
            name: (since, _some_of(self._joined[name][0])) for name, (since, _) in self._frozen.items()
        }
        if part is not None and before is not None:
            self._merged = part, before, self._values(part)

    def look_back(self) -> None:
        """After a step: warn of an inner optimizer that has put back what merges changed, thrice in a row."""
        if self._merged is None:
            return
        (part, before, after) = self._merged
        self._merged = None
        moved = after - before
        lasted = self._values(part) - before
        if float(moved @ moved) > 0.0:
            is_undone = float(lasted @ moved) < 0.2 * float(moved @ moved)
            self._undone = self._undone + 1 if is_undone else 0
        if self._undone == 3:
            kind = type(self._plan.optimizer).__name__
            self.warn_once(
                f"{part.name}: what was agreed was gone after one step, three times in a row: {kind} "
                "seems to write a copy of its own over the parameters (master weights, offloading), so this "
                "peer trains alone; keep the copy in optimizer.state[parameter], where it is moved along, or "
                "use another optimizer"
            )

    def _values(self, part: ParameterSlice) -> Tensor:
        return _some_of(self._joined[part.name][0], slice(part.start, part.stop))

    def copies_of(self, name: str) -> list[Tensor]:
        """What of the inner optimizer's state is a copy of a parameter and moves with it: master weights, a
        slow or averaged model."""
        parameter = self._joined[name][0]
        state = self._plan.optimizer.state
        if parameter not in state:
            return []
        like = ((key, one) for key, one in state[parameter].items() if _is_like(one, parameter))
        return [shard(one).detach() for key, one in like if self._is_copy(key)]

    def _is_copy(self, key: str) -> bool:
        """Whether entry ``key`` of the inner optimizer's states lies near the parameters, over all of them.
        Moments of gradients, known by their names, do so too with much weight decay."""
        if key not in self._copied:
            state = self._plan.optimizer.state
            apart = 0.0
            size = 0.0
            for parameter, *_ in self._joined.values():
                one = state[parameter].get(key) if parameter in state else None
                if isinstance(one, Tensor) and parameter.numel() > 1 and _is_like(one, parameter):
                    ours = _some_of(parameter)
                    apart += float((_some_of(one) - ours).square().sum())
                    size += float(ours.square().sum())
            self._copied[key] = apart < 0.25 * size and key not in _MOMENTS
        return self._copied[key]

    def begin_anew(self) -> None:
        """Its parameters were not finite: running statistics that are not either begin anew, too."""
        self._merged = None
        for module in self._plan.model.modules():
            if not is_batch_norm(module):
                continue  # others' buffers may be of dtypes that cannot be asked
            if not all(bool(one.isfinite().all()) for one in module.buffers(recurse=False)):
                module.reset_running_stats()

    def forget_optimizer(self, fragment: int) -> None:
        """Drop the inner optimizer's state of a fragment whose parameters were not finite: its moments are
        not either."""
        parameters = named_parameters(self._plan.model)
        for part in self._plan.fragments.fragments[fragment].slices:
            self._plan.optimizer.state.pop(parameters[part.name], None)
        self.live.forget_elsewhere(fragment)

    def named(self, states: Sequence[AgreedState]) -> dict[str, Tensor]:
        """A copy of agreed parameters by name (fp32, host memory), tied ones under each of theirs."""
        shapes = {name: shape for name, (_, shape, _) in self._joined.items()}
        named = named_values(self._plan.fragments, shapes, [state.params for state in states])
        return named | {name: named[first] for name, first in self._shared.items() if first in named}


def _some_of(tensor: Tensor, at: slice = slice(None)) -> Tensor:
    """At most 256 values of a range of what lies here: fp32, host memory, a copy."""
    flat = shard(tensor).detach().reshape(-1)[at]
    return flat[:: max(1, len(flat) // 256)].float().cpu().clone()


def _is_like(one: object, parameter: Tensor) -> bool:
    return isinstance(one, Tensor) and one.is_floating_point() and one.shape == parameter.shape


def check_model(model: nn.Module, optimizer: Optimizer, in_group: bool = False) -> None:
    """Raise ``ConfigError`` unless a swarm can train ``model`` with ``optimizer``. Reads every trainable
    value that lies here once; changes nothing. ``in_group``: the ranks of one hold it together."""
    if not isinstance(model, nn.Module):
        raise _wrong("model", f"is {_what(model)}; give the torch.nn.Module first, then its optimizer")
    if not all(hasattr(optimizer, name) for name in _ASKED_OF_AN_OPTIMIZER):
        problem = f"is {_what(optimizer)}; give the model first, then its torch.optim optimizer"
        raise _wrong("optimizer", problem)
    _check_wrappers(model, in_group)
    parameters = named_parameters(model)
    for name, tensor in (*parameters.items(), *named_buffers(model).items()):
        if is_lazy(tensor) or tensor.device.type == "meta":
            raise ConfigError(
                "model", name,
                "has no values yet (lazy, or on the meta device); make one forward pass, or "
                "to_empty(device=...) and initialise it, before the optimizer and join",
            )  # fmt: skip
    trained = trained_parameters(model)
    if not trained:
        problem = "has no parameter to train, all are frozen; requires_grad_(True) on what the swarm trains"
        raise _wrong("model", problem)
    _check_kinds(trained, in_group)
    _check_places({name: shard(one) for name, one in trained.items()})
    _check_owners(trained, optimizer)
    _check_strangers(parameters.values(), optimizer)
    _check_values(trained)


def _check_wrappers(model: nn.Module, in_group: bool) -> None:
    for name, module in model.named_modules():
        if is_fully_sharded(module):
            raise ConfigError("model", name or type(module).__name__, _OLD_FSDP)
        if isinstance(module, nn.parallel.DistributedDataParallel) and not in_group:
            raise ConfigError("model", name or type(module).__name__, _ALONE)


def _check_kinds(trained: Mapping[str, nn.Parameter], in_group: bool) -> None:
    for name, parameter in trained.items():
        if is_sharded(parameter) and not in_group:
            raise ConfigError("model", name, _ALONE)
        if trouble := trouble_with_cut(parameter):
            raise ConfigError("model", name, f"is {trouble}; {_CUT}")
        if not _is_plain(parameter):
            kinds = ", ".join(str(dtype).removeprefix("torch.") for dtype in EXCHANGED)
            raise ConfigError("model", name, f"is {_described(parameter)}; {_PLAIN.format(kinds)}")


def _check_values(trained: Mapping[str, nn.Parameter]) -> None:
    for name, parameter in trained.items():
        if not (mine := shard(parameter).detach()).numel():
            continue
        low, high = torch.aminmax(mine)
        if not torch.isfinite(low) or not torch.isfinite(high):
            problem = "has values that are not finite (NaN or Inf); initialise it before join"
            raise ConfigError("model", name, problem)


_OLD_FSDP = (
    "is wrapped by FullyShardedDataParallel, which hides its parameters; shard it with "
    "torch.distributed.fsdp.fully_shard instead, before the optimizer is made"
)
_ALONE = (
    "is shared between processes (DistributedDataParallel, fully_shard): start the program with torchrun and "
    "call p2p_co2.join on every rank, or give each process the whole model itself"
)
_CUT = "fully_shard along the first dimension is what a peer's ranks exchange; or freeze it"
_PLAIN = (
    "only plain dense parameters of {} are exchanged, leaves with memory of their own: convert it "
    "(to_dense, contiguous, float), shard nothing (one peer per process), or freeze it"
)


def _is_plain(parameter: nn.Parameter) -> bool:
    is_dense = parameter.layout == torch.strided and not parameter.is_nested
    if is_sharded(parameter):
        return parameter.dtype in EXCHANGED and parameter.is_leaf and is_dense
    is_kind = type(parameter.detach()) in (Tensor, nn.Parameter) and parameter.dtype in EXCHANGED
    is_leaf = parameter.is_leaf and not parameter.is_inference()
    return is_dense and is_kind and is_leaf and not _overlaps_itself(parameter)


def _described(parameter: nn.Parameter) -> str:
    kind = type(parameter.detach()).__name__
    words = f"a {kind} of {parameter.dtype}, {'nested' if parameter.is_nested else parameter.layout}"
    return words.replace("torch.", "") + ("" if parameter.is_leaf else ", computed")


def _overlaps_itself(tensor: Tensor) -> bool:
    """Whether one place in memory stands for several values (expanded)."""
    reach = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride < reach:
            return True
        reach += (size - 1) * stride
    return False


def _check_places(trained: Mapping[str, Tensor]) -> None:
    def place(tensor: Tensor) -> tuple[str, int, int]:
        """Device, and the addresses between which its values lie."""
        reach = 1 + sum((size - 1) * step for step, size in zip(tensor.stride(), tensor.shape, strict=True))
        return str(tensor.device), tensor.data_ptr(), tensor.data_ptr() + reach * tensor.element_size()

    by_address = sorted((place(one), name) for name, one in trained.items())
    for ((device, _, end), name), ((next_device, start, _), next_name) in pairwise(by_address):
        if device == next_device and start < end:
            raise ConfigError(
                "model", next_name,
                f"shares memory with {name}, and both would be exchanged; make them one parameter "
                "(head.weight = embedding.weight), or give each its own values (clone)",
            )  # fmt: skip


def _check_owners(trained: Mapping[str, nn.Parameter], optimizer: Optimizer) -> None:
    owned = {id(tensor) for tensor in owned_by(optimizer)}
    lacking = [name for name, parameter in trained.items() if id(parameter) not in owned]
    if len(lacking) == len(trained):
        raise _wrong(
            "optimizer",
            f"holds none of the model's parameters ({lacking[0]}, ...): it was made for another model, or "
            "before this one was copied, sharded or quantised; make it from this model's parameters()",
        )
    if lacking:
        raise ConfigError(
            "model", lacking[0],
            "is trained by no group of the optimizer; add it to one, or freeze it: requires_grad_(False)",
        )  # fmt: skip


def _check_strangers(parameters: Iterable[Tensor], optimizer: Optimizer) -> None:
    known = {id(parameter) for parameter in parameters}
    for tensor in owned_by(optimizer):
        if id(tensor) not in known and tensor.requires_grad:
            raise _wrong(
                "optimizer",
                f"trains a parameter of shape {tuple(tensor.shape)} that is not the model's, so it is not "
                "exchanged; make it a part of the model that you give",
            )


def _wrong(argument: str, problem: str) -> ConfigError:
    return ConfigError("join", argument, problem)


def _what(given: object) -> str:
    return "None" if given is None else f"of type {type(given).__name__}"
