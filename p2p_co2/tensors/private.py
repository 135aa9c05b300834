"""What we use of torch, and of libraries upon it, that they do not promise to keep. ``system.private`` has
Python's.

A test in ``tests/test_private.py`` for each says so when a new version has changed it. Classes are known by
their names where importing them takes half a second.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeGuard

from torch import Tensor, nn
from torch.optim import Optimizer

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

FULLY_SHARDED = "_fsdp_wrapped_module"
_INNER = ("_orig_mod", "_checkpoint_wrapped_module", FULLY_SHARDED)
"""Where torch's wrappers keep what they wrap: names that nobody else uses."""
_MIXED_IN = ("FSDPModule", "ReplicateModule")
"""Classes of torch's that a sharded or replicated module has beside its own."""
_HOOKS = ("state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post")


def is_dtensor(tensor: object) -> TypeGuard[DTensor]:
    """Whether it is cut between processes."""
    return type(tensor).__name__ == "DTensor"


def reshard(module: nn.Module) -> None:
    """Have what FSDP2 put together of this module in shards again."""
    if any(base.__name__ == "FSDPModule" for base in type(module).__mro__):
        module.reshard()  # type: ignore[operator]  # torch types a module's names so


def class_of(module: nn.Module) -> type:
    """The class that the author gave it: ``fully_shard`` puts one of its own before it."""
    kind = type(module)
    while any(base.__name__ in _MIXED_IN for base in kind.__bases__) and len(kind.__bases__) > 1:
        kind = next(base for base in kind.__bases__ if base.__name__ not in _MIXED_IN)
    return kind


def inner_module(module: nn.Module) -> nn.Module | None:
    """What a wrapper of torch's wraps; None for a module that is none."""
    children = dict(module.named_children())
    if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return children.get("module")
    return next((children[name] for name in _INNER if name in children), None)


def is_fully_sharded(module: nn.Module) -> bool:
    """Whether the older FullyShardedDataParallel wraps it."""
    return FULLY_SHARDED in dict(module.named_children())


def names_not_saved(module: nn.Module) -> set[str]:
    """The buffers of its own that its ``state_dict`` is without."""
    return module._non_persistent_buffers_set


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Its own parameters and buffers, each under all of its names there."""
    named = {**module._parameters, **module._buffers}
    return {name: one for name, one in named.items() if one is not None}


def own_modules(module: nn.Module) -> dict[str, nn.Module]:
    """Its children, each under all of its names."""
    return {name: one for name, one in module._modules.items() if one is not None}


def is_batch_norm(module: nn.Module) -> TypeGuard[nn.BatchNorm1d]:
    """Whether it has running statistics as batch norms have."""
    return isinstance(module, nn.modules.batchnorm._NormBase) and bool(module.track_running_stats)


def add_state_hooks(optimizer: Optimizer) -> None:
    """Where torch's own methods register hooks on the state of ``optimizer``, which made none of its own."""
    for name in _HOOKS:
        setattr(optimizer, f"_optimizer_{name}_hooks", OrderedDict[int, Any]())


def state_hooks(optimizer: Optimizer, name: str) -> Iterable[Any]:
    """Those of "state_dict_pre", "state_dict_post", "load_state_dict_pre" or "load_state_dict_post"."""
    hooks: OrderedDict[int, Any] = getattr(optimizer, f"_optimizer_{name}_hooks")
    return hooks.values()


def fetcher_of(trainer: Any) -> Any:
    """What Lightning takes the training batches from."""
    return trainer.fit_loop._data_fetcher
