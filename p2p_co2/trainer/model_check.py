"""What a model and its optimizer have to be for a swarm to train them: looked at before the network is used,
and again, by identity, while training goes on.

Law: what is taken is exchanged. Each trainable parameter holds real numbers in memory of its own, the
optimizer that ``join`` was given trains all of them and nothing else, and until the peer leaves they are the
same by name, shape and dtype. Anything else raises ``ConfigError`` with the parameter's name and the cure. A
parameter that several modules share (tied) is one parameter. What is frozen may be anything that holds
values.

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
from p2p_co2.tensors.fragments.names import named_buffers, named_parameters, shared_names

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
    _check_wrappers(model)
    parameters = named_parameters(model)
    for name, tensor in (*parameters.items(), *named_buffers(model).items()):
        if problem := _unready(tensor):
            raise ConfigError("model", name, problem)
    trained = _trained(parameters)
    if not trained:
        raise _wrong(
            "model",
            "has no parameter to train, all are frozen; requires_grad_(True) on what the swarm trains",
        )
    _check_exchanged(trained)
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
        self._exchanged = self._joined = _trained(named_parameters(model))
        self.shapes = {name: parameter.shape for name, parameter in self._joined.items()}
        self._dtypes = {name: parameter.dtype for name, parameter in self._joined.items()}
        self.shared = shared_names(model)
        self._seen = self._glance()

    def check(self) -> str:
        """The name of a parameter that another object of its kind has replaced since this was asked last, ""
        if all are the same: go on with the module's own, by name.

        Raises ``ConfigError`` if what is trained is not what is exchanged any more. Reads no values; as long
        as nothing changes it costs a glance at each module.
        """
        if self._glance() == self._seen:
            return ""
        parameters = named_parameters(self._model)
        now = {name: parameters[name] for name in self._joined if name in parameters}
        for name, shape in self.shapes.items():
            if name not in now:
                raise ConfigError("model", name, f"is gone since join; {_FROM_THE_START}")
            if not now[name].requires_grad:
                raise ConfigError("model", name, f"was frozen after join; {_FROM_THE_START}")
            if now[name].shape != shape:
                was = f"was {tuple(shape)} in join and is {tuple(now[name].shape)}"
                raise ConfigError("model", name, f"{was}; {_FROM_THE_START}")
        for name, parameter in parameters.items():
            if parameter.requires_grad and name not in now and (is_lazy(parameter) or parameter.numel()):
                is_new = "is trained, and was not when this peer joined: it is not exchanged"
                raise ConfigError("model", name, f"{is_new}; {_FROM_THE_START}")
        _check_exchanged(now)
        self._check_dtypes(now)
        _check_strangers((*self._joined.values(), *parameters.values()), self._optimizer)
        before, self._exchanged = self._exchanged, now
        self._seen = self._glance()
        return next((name for name, parameter in now.items() if before[name] is not parameter), "")

    def _check_dtypes(self, now: Mapping[str, nn.Parameter]) -> None:
        for name, dtype in self._dtypes.items():
            if now[name].dtype != dtype:
                then, here = (str(one).removeprefix("torch.") for one in (dtype, now[name].dtype))
                raise ConfigError("model", name, f"was {then} in join and is {here}; {_FROM_THE_START}")

    def _glance(self) -> list[object]:
        """All that ``check`` goes by, quick to gather and to compare: parameters and whether they are
        trained, the memory of those that are exchanged, and the optimizer's."""
        found, met, ahead = list[object](), set[int](), [self._model]
        while ahead:
            module = ahead.pop()
            if id(module) in met:
                continue
            met.add(id(module))
            for parameter in module._parameters.values():
                if parameter is not None:
                    found += (id(parameter), parameter.requires_grad)
            ahead += [child for child in module._modules.values() if child is not None]
        for parameter in self._exchanged.values():
            found += (parameter.dtype, parameter.shape, parameter.data_ptr())
        found += map(id, _owned(self._optimizer))
        return found

    def unowned(self) -> str:
        """The name of a parameter that the optimizer does not train; "" if it trains all."""
        return next(iter(_lacking(self._exchanged, self._optimizer)), "")


def _trained(parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Those that fragments hold."""
    return {name: one for name, one in parameters.items() if one.requires_grad and one.numel()}


def _check_wrappers(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            kind = "DistributedDataParallel averages gradients with processes that the swarm knows nothing of"
        elif "_fsdp_wrapped_module" in dict(module.named_children()):
            kind = "FullyShardedDataParallel leaves each process a shard, and a peer needs the whole model"
        else:
            continue
        first = next((parameter for parameter, _ in module.named_parameters()), "")
        at = ".".join(part for part in (name, first) if part) or "model"
        raise ConfigError("model", at, f"{kind}; give each process the model itself: one peer per process")


def _unready(tensor: Tensor) -> str:
    """Why a tensor holds no values yet; "" if it does."""
    if is_lazy(tensor):
        return "has no shape yet (a lazy layer); make one forward pass before the optimizer and join"
    if tensor.device.type == "meta":
        return "is on the meta device, without values; to_empty(device=...) and load or initialise it first"
    return ""


def _check_exchanged(trained: Mapping[str, nn.Parameter]) -> None:
    for name, parameter in trained.items():
        if problem := _unready(parameter) or _unexchanged(parameter):
            raise ConfigError("model", name, problem)
    by_address = sorted((_place(one), name) for name, one in trained.items())
    for ((device, _, end), name), ((next_device, start, _), next_name) in pairwise(by_address):
        if device == next_device and start < end:
            raise ConfigError(
                "model", next_name,
                f"shares memory with {name}, and both would be exchanged; make them one parameter "
                "(head.weight = embedding.weight), or give each its own values (clone)",
            )  # fmt: skip


def _unexchanged(parameter: nn.Parameter) -> str:
    """Why a trainable parameter cannot be exchanged as it is; "" if it can."""
    plain = parameter.detach()
    if type(plain) not in (Tensor, nn.Parameter):
        return (
            f"is a {type(plain).__name__}; tensors that are sharded (DTensor, as FSDP makes) or special are "
            "not exchanged: one peer per process, with the whole model in plain tensors"
        )
    if parameter.layout != torch.strided or parameter.is_nested:
        layout = "nested" if parameter.is_nested else str(parameter.layout).removeprefix("torch.")
        return f"has the layout {layout}; only dense parameters are exchanged: to_dense() it"
    if parameter.dtype not in EXCHANGED:
        kinds = ", ".join(str(dtype).removeprefix("torch.") for dtype in EXCHANGED)
        return (
            f"is {str(parameter.dtype).removeprefix('torch.')}, which is not exchanged; use one of {kinds}, "
            "or freeze it"
        )
    if parameter.is_inference() or not parameter.is_leaf:
        return "cannot be trained (made in inference mode, or computed); make it outside of it, as a leaf"
    if _overlaps_itself(parameter):
        return (
            "has one place in memory for several values (expanded); give it memory of its own: contiguous()"
        )
    return ""


def _overlaps_itself(tensor: Tensor) -> bool:
    reach = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride < reach:
            return True
        reach += (size - 1) * stride
    return False


def _place(tensor: Tensor) -> tuple[str, int, int]:
    """Device, and the addresses between which its values lie."""
    reach = 1 + sum((size - 1) * step for step, size in zip(tensor.stride(), tensor.shape, strict=True))
    start = tensor.data_ptr()
    return str(tensor.device), start, start + reach * tensor.element_size()


def _owned(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _lacking(trained: Mapping[str, nn.Parameter], optimizer: Optimizer) -> list[str]:
    owned = {id(tensor) for tensor in _owned(optimizer)}
    return [name for name, parameter in trained.items() if id(parameter) not in owned]


def _check_owners(trained: Mapping[str, nn.Parameter], optimizer: Optimizer) -> None:
    lacking = _lacking(trained, optimizer)
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
