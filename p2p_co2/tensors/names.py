"""The names of a model's parameters as its author wrote them, whatever wrappers this machine put round it.

``torch.compile``, activation checkpointing and data parallelism wrap a module in another one and put a prefix
into the names of what is inside. Names are what peers and checkpoints recognise parameters by. So the module
tree is walked here, and a wrapper's inner module takes the wrapper's place.

Law: a wrapped model has the same names in the same order as the model without wrappers. A module that its
author called ``module`` keeps its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from p2p_co2.tensors.private import inner_module, names_not_saved, own_modules, own_tensors

_Kind = TypeVar("_Kind", bound=Tensor)


def unwrapped(module: nn.Module) -> nn.Module:
    """``module``, or what is inside if it is a wrapper."""
    while (inner := inner_module(module)) is not None:
        module = inner
    return module


def named_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """As ``module.named_modules()``, each once and parents first, without wrappers."""
    seen = set[nn.Module]()

    def walk(name: str, wrapped: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        module = unwrapped(wrapped)
        if module in seen:
            return
        seen.add(module)
        yield name, module
        for key, child in module.named_children():
            yield from walk(f"{name}.{key}" if name else key, child)

    yield from walk("", module)


def _named(module: nn.Module, own: Callable[[nn.Module], Iterable[tuple[str, _Kind]]]) -> dict[str, _Kind]:
    """What each module has of its ``own`` by plain name, in the module's order, each under its first name."""
    found = dict[str, _Kind]()
    seen = set[int]()
    for path, part in named_modules(module):
        for name, one in own(part):
            if id(one) not in seen:
                seen.add(id(one))
                found[f"{path}.{name}" if path else name] = one
    return found


def named_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of ``module`` by plain name, in the module's order, tied ones under their first name."""
    return _named(module, lambda part: part.named_parameters(recurse=False))


def named_buffers(module: nn.Module, persistent: bool = False) -> dict[str, Tensor]:
    """The buffers of ``module`` by plain name, in the module's order, shared ones under their first name.
    ``persistent``: only those that a ``state_dict`` would have."""

    def own(part: nn.Module) -> Iterator[tuple[str, Tensor]]:
        left_out = names_not_saved(part) if persistent else set[str]()
        return (pair for pair in part.named_buffers(recurse=False) if pair[0] not in left_out)

    return _named(module, own)


def trained_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Those that fragments hold, by plain name, in the module's order."""
    named = named_parameters(module).items()
    return {name: one for name, one in named if one.requires_grad and one.numel()}


def owned_by(optimizer: Optimizer) -> list[Tensor]:
    """Its parameters, in the order in which a ``state_dict`` numbers them."""
    return [one for group in optimizer.param_groups for one in group["params"]]


def shared_names(module: nn.Module) -> dict[str, str]:
    """Further plain names of parameters and persistent buffers, and the first of each: what a state dict
    holds beyond ``named_parameters`` and ``named_buffers``."""
    own = {**named_parameters(module), **named_buffers(module, persistent=True)}
    first = {id(one): name for name, one in own.items()}
    found = dict[str, str]()

    def walk(path: str, wrapped: nn.Module) -> None:
        inner = unwrapped(wrapped)
        left_out = names_not_saved(inner)
        for key, one in own_tensors(inner).items():
            name = f"{path}{key}"
            if key not in left_out and first[id(one)] != name:
                found[name] = first[id(one)]
        for key, child in own_modules(inner).items():
            walk(f"{path}{key}.", child)

    walk("", module)
    return found
