"""How the ranks of a ``torchrun`` group find that they hold one model together.

Laws: every rank raises the same ``ConfigError``, or none does; nothing is changed. What each rank holds whole
has the same values on all of them, read once, when they join. Some of each are compared again after the first
step, which finds ranks that train apart.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from p2p_co2.errors import ConfigError
from p2p_co2.tensors.names import named_buffers, named_parameters, trained_parameters
from p2p_co2.tensors.sharding import is_sharded, whole
from p2p_co2.trainer.exchanged_model import check_model
from p2p_co2.trainer.model_summary import values_digest
from p2p_co2.trainer.ranks.collectives import Ranks, error_of, text_of
from p2p_co2.trainer.ranks.parameters import Group
from p2p_co2.trainer.rates import Factor, LearningRates
from p2p_co2.trainer.resuming import inner_of

_COMPARED_VALUES = 1024
"""Of each parameter, after the first step."""


def form_group(model: nn.Module, optimizer: Optimizer, learning_rate: Factor | None = None) -> Group | None:
    """This process's place in the group that ``torch.distributed`` was initialised for; None outside one.

    Looks at model and optimizer as ``check_model`` does. Raises ``ConfigError``, in a group on every rank,
    for what a swarm cannot train and where the ranks hold different models.
    """
    ranks = Ranks.of_this_process()
    if ranks is None:
        check_model(model, optimizer)
        LearningRates(optimizer, learning_rate, print)  # for its errors
        return None
    with ranks.together():
        facts = dict[str, Any]()
        try:
            check_model(model, optimizer, in_group=True)
            LearningRates(optimizer, learning_rate, print)
            for name, one in trained_parameters(model).items():
                if is_sharded(one) and one.device_mesh.size() != ranks.size:
                    problem = "is not whole on the ranks of this group together; shard it over all of them"
                    raise ConfigError("model", name, problem)
            facts = _facts(model, optimizer)
        except ConfigError as error:
            facts = {"problem": text_of(error)}
        heard = ranks.gather(facts)
        if ranks.leads:
            with ranks.commanding():
                _compare_all(heard)
            ranks.tell("go")
        else:
            ranks.hear()
        return Group(ranks, {name: values_digest(one) for name, one in whole_frozen(model)})


def _facts(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """What ranks compare, as JSON has it: rows of parameters, and the inner optimizer's groups."""
    parameters = named_parameters(model)
    inner = inner_of(optimizer, model)
    return {
        "rows": [
            [name, str(one.dtype), list(one.shape), one.requires_grad, is_sharded(one), one.device.type]
            for name, one in parameters.items()
        ],
        "inner": [inner.kind, [[list(map(str, owned)) for owned in g] for g in inner.groups]],
        "values": {name: values_digest(one).hex() for name, one in parameters.items() if not is_sharded(one)},
    }


def _compare_all(heard: list[dict[str, Any]]) -> None:
    """Raises the first problem that a rank has, or the first difference to rank 0's model."""
    for said in heard:
        if "problem" in said:
            raise error_of(said["problem"])
    for rank, theirs in enumerate(heard):
        _compare(heard[0], theirs, rank)


def _compare(mine: dict[str, Any], theirs: dict[str, Any], rank: int) -> None:
    for ours, other in zip(mine["rows"], theirs["rows"], strict=False):
        if ours != other:
            raise ConfigError("model", ours[0], f"is {ours[1:]} on rank 0, and {other} on rank {rank}")
    if len(mine["rows"]) != len(theirs["rows"]):
        counts = f"has {len(mine['rows'])} parameters on rank 0, {len(theirs['rows'])} on rank {rank}"
        raise ConfigError("model", "", counts)
    if mine["inner"] != theirs["inner"]:
        raise ConfigError(
            "optimizer", "", f"is another one on rank {rank} than on rank 0; make the same on every rank"
        )
    for name, digest in mine["values"].items():
        if theirs["values"].get(name) != digest:
            raise ConfigError(
                "model", name,
                f"has other values on rank {rank} than on rank 0; build it from one seed on every rank, and "
                "wrap it (DistributedDataParallel) before join",
            )  # fmt: skip


def sample_digest(model: nn.Module) -> str:
    """Of some values of each parameter that every rank holds whole."""
    hasher = hashlib.sha256()
    for one in trained_parameters(model).values():
        if not is_sharded(one):
            hasher.update(values_digest(one.detach().reshape(-1)[:_COMPARED_VALUES]))
    return hasher.hexdigest()


def compare_samples(digests: Iterable[str]) -> None:
    """Raises ``ConfigError`` if what ranks hold whole is not the same any more."""
    if len(set(digests)) > 1:
        raise ConfigError(
            "model", "",
            "the ranks' parameters differ after the first step: each trains by its own gradients; wrap the "
            "model by DistributedDataParallel, or shard it (fully_shard). One peer to each process "
            "instead: without torch.distributed.init_process_group",
        )  # fmt: skip


@torch.no_grad()
def whole_frozen(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Each frozen parameter that is cut between ranks, put together on each of them: all ranks go through
    them at once."""
    for name, one in named_parameters(model).items():
        if is_sharded(one) and not one.requires_grad:
            yield name, whole(one)


def has_frozen_shards(model: nn.Module) -> bool:
    """Whether ``whole_frozen`` has anything to go through."""
    return any(is_sharded(one) and not one.requires_grad for one in model.parameters())


@torch.no_grad()
def spread_buffers(ranks: Ranks, model: nn.Module) -> None:
    """Every rank begins with rank 0's buffers, and calls this at the same time."""
    for buffer in named_buffers(model, persistent=True).values():
        values = ranks.spread(buffer.detach().cpu().contiguous())
        if not ranks.leads:
            buffer.copy_(values)
