"""What a model and its optimizer have to be for a swarm to train them: looked at before the network is used,
and again, by identity, while training goes on.

Law: what is taken is exchanged. Each trainable parameter is a plain dense tensor with memory of its own, the
optimizer that ``join`` was given trains all of them and nothing else, and until the peer leaves they are the
same objects by name, shape and dtype. Anything else raises ``ConfigError`` with the parameter's name and the
cure. A parameter that several modules share (tied) is one parameter. What is frozen may be anything that
holds values.

fp64 parameters train in fp64 and are exchanged in fp32.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from p2p_co2.errors import ConfigError
from p2p_co2.tensors.names import named_buffers, named_parameters, shared_names

EXCHANGED = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_ASKED_OF_AN_OPTIMIZER = ("param_groups", "state", "state_dict", "load_state_dict")
_FROM_THE_START = (
    "a run exchanges the same parameters from join to its end: set this up before join, on every peer"
)


def check_model(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise ``ConfigError`` unless a swarm can train ``model`` with ``optimizer``. Reads every trainable
    value once; changes nothing."""
    if not isinstance(model, nn.Module):
        raise _wrong("model", f"is {_what(model)}; give the torch.nn.Module first, then its optimizer")
    if not all(hasattr(optimizer, name) for name in _ASKED_OF_AN_OPTIMIZER):
        raise _wrong(
            "optimizer", f"is {_what(optimizer)}; give the model first, then its torch.optim optimizer"
        )
    for name, module in model.named_modules():
        is_sharded = "_fsdp_wrapped_module" in dict(module.named_children())
        if is_sharded or isinstance(module, nn.parallel.DistributedDataParallel):
            raise ConfigError(
                "model", name or type(module).__name__,
                "is wrapped by DistributedDataParallel or FullyShardedDataParallel, which share it between "
                "processes; give each process the whole model itself: one peer per process",
            )  # fmt: skip
    parameters = named_parameters(model)
    for name, tensor in (*parameters.items(), *named_buffers(model).items()):
        if is_lazy(tensor) or tensor.device.type == "meta":
            raise ConfigError(
                "model", name,
                "has no values yet (lazy, or on the meta device); make one forward pass, or "
                "to_empty(device=...) and initialise it, before the optimizer and join",
            )  # fmt: skip
    trained = _trained(parameters)
    if not trained:
        problem = "has no parameter to train, all are frozen; requires_grad_(True) on what the swarm trains"
        raise _wrong("model", problem)
    for name, parameter in trained.items():
        if not _is_plain(parameter):
            kinds = ", ".join(str(dtype).removeprefix("torch.") for dtype in EXCHANGED)
            raise ConfigError("model", name, f"is {_described(parameter)}; {_PLAIN.format(kinds)}")
    _check_places(trained)
    _check_owners(trained, optimizer)
    _check_strangers(parameters.values(), optimizer)
    for name, parameter in trained.items():
        low, high = torch.aminmax(parameter.detach())
        if not torch.isfinite(low) or not torch.isfinite(high):
            raise ConfigError(
                "model", name, "has values that are not finite (NaN or Inf); initialise it before join"
            )


class Structure:
    """The parameters that are exchanged, as they were in ``join``. ``shapes``: by plain name; ``shared``:
    further names of tied ones, with their first."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._joined = {
            name: (parameter, parameter.shape, parameter.dtype)
            for name, parameter in _trained(named_parameters(model)).items()
        }
        self.shapes = {name: shape for name, (_, shape, _) in self._joined.items()}
        self.shared = shared_names(model)
        self._seen = self._glance()

    def check(self) -> None:
        """Raises ``ConfigError`` if what is trained is not what is exchanged any more. Reads no values; as
        long as nothing changes it costs a glance at each module."""
        if (glance := self._glance()) == self._seen:
            return
        parameters = named_parameters(self._model)
        for name, (joined, shape, dtype) in self._joined.items():
            now = parameters.get(name)
            if now is None:
                problem = "is gone since join"
            elif not now.requires_grad:
                problem = "was frozen after join"
            elif (now.shape, now.dtype) != (shape, dtype):
                problem = f"was {dtype} {tuple(shape)} in join and is {now.dtype} {tuple(now.shape)}"
            elif now is not joined:
                problem = "was replaced by another object after join, such as by load_state_dict(assign=True)"
            else:
                continue
            raise ConfigError("model", name, f"{problem.replace('torch.', '')}; {_FROM_THE_START}")
        for name, parameter in parameters.items():
            if (
                parameter.requires_grad
                and name not in self._joined
                and (is_lazy(parameter) or parameter.numel())
            ):
                is_new = "is trained, and was not when this peer joined: it is not exchanged"
                raise ConfigError("model", name, f"{is_new}; {_FROM_THE_START}")
        _check_strangers(parameters.values(), self._optimizer)
        self._seen = glance

    def _glance(self) -> list[object]:
        """All that ``check`` goes by, quick to gather and to compare."""
        found: list[object] = [id(tensor) for tensor in _owned(self._optimizer)]
        for one in self._model.parameters():
            found += (id(one), one.requires_grad, one.dtype, None if is_lazy(one) else one.shape)
        return found


def _trained(parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Those that fragments hold."""
    return {name: one for name, one in parameters.items() if one.requires_grad and one.numel()}


_PLAIN = (
    "only plain dense parameters of {} are exchanged, leaves with memory of their own: convert it "
    "(to_dense, contiguous, float), shard nothing (one peer per process), or freeze it"
)


def _is_plain(parameter: nn.Parameter) -> bool:
    is_dense = parameter.layout == torch.strided and not parameter.is_nested
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


def _check_places(trained: Mapping[str, nn.Parameter]) -> None:
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


def _owned(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _check_owners(trained: Mapping[str, nn.Parameter], optimizer: Optimizer) -> None:
    owned = {id(tensor) for tensor in _owned(optimizer)}
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
    for tensor in _owned(optimizer):
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
