"""The parameters of a model that the ranks of one group hold together, as if they lay whole on rank 0.

Each rank holds all of a parameter (DDP), or a shard of it (FSDP2). Fragments are those of the whole model, as
a peer of one process has them. Rank 0 calls the methods; each tells the other ranks, which call the same.

Laws: a snapshot is what the whole model's would be; a merge reaches every copy of an element. Price: training
stands still meanwhile, and each rank holds one whole parameter at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from p2p_co2.tensors.checkpoint.tree import say, unsay
from p2p_co2.tensors.fragments import FragmentPlan, LiveParameters, ParameterSlice, large_tensor
from p2p_co2.tensors.names import owned_by
from p2p_co2.tensors.outer import Merge
from p2p_co2.tensors.sharding import as_sharded, held, is_sharded, shard, whole
from p2p_co2.trainer.ranks.collectives import Ranks


@dataclass(frozen=True)
class Group:
    """This process's place among ``ranks``. ``frozen``: digests of frozen parameters that are cut between
    them, of their whole values."""

    ranks: Ranks
    frozen: Mapping[str, bytes]


class RankedParameters(LiveParameters):
    """As ``LiveParameters``, of the whole model. On ranks other than 0 arguments and results have no
    values."""

    def __init__(self, ranks: Ranks, module: nn.Module, plan: FragmentPlan) -> None:
        super().__init__(module, plan)
        self._ranks = ranks
        self.state = list[Tensor]()
        """The inner optimizer's tensors that are cut, in the same order on every rank."""

    def _tell(self, *command: object) -> None:
        if self._ranks.leads:
            self._ranks.tell(*command)

    def valueless(self, index: int) -> Tensor:
        """What stands for the values of fragment ``index`` on ranks other than 0."""
        return torch.empty(self._plan.fragments[index].numel, dtype=torch.float32, device="meta")

    @torch.no_grad()
    def snapshot(self, index: int, out: Tensor | None = None) -> Tensor:
        if any(is_sharded(parameter) for parameter, _, _ in super()._slices(index)):
            self._tell("snapshot", index)
        if out is None:
            is_here = self._ranks.leads
            out = large_tensor(self._plan.fragments[index].numel) if is_here else self.valueless(index)
        self._check(index, out)
        self._let_compute(index)
        for parameter, part, at in super()._slices(index):
            if self._ranks.leads or is_sharded(parameter):
                out[at].copy_(whole(parameter).reshape(-1)[part.start : part.stop])
        return out

    def merge_(self, index: int, merge: Merge) -> None:
        self._tell("merge_", index, merge.keep)
        super().merge_(index, merge)

    def load_(self, index: int, values: Tensor) -> None:
        self._tell("load_", index)
        super().load_(index, values)

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        self._tell("set_aside")
        with super().set_aside():
            yield
        if not self._ranks.is_broken:
            self._tell("put_back")

    # ---- what of a fragment lies here

    def slices(self, index: int) -> Sequence[ParameterSlice]:
        return [part for _, part, _ in self._slices(index)]

    def _slices(self, index: int) -> Iterator[tuple[Tensor, ParameterSlice, slice]]:
        for parameter, part, at in super()._slices(index):
            mine, within = _share(parameter, part)
            if mine.start < mine.stop:
                yield shard(parameter), mine, slice(at.start + within.start, at.start + within.stop)

    def _with(self, index: int, values: Tensor) -> Iterator[tuple[Tensor, ParameterSlice, slice, Tensor]]:
        """As ``_slices``, with rank 0's ``values``: to host memory at once, to accelerators part by part."""
        parts = list(super()._slices(index))
        is_here = all(parameter.device.type == "cpu" for parameter, _, _ in parts)
        if is_here:
            values = self._ranks.spread(values if self._ranks.leads else large_tensor(len(values)))
        for parameter, part, at in parts:
            mine, within = _share(parameter, part)
            if is_here:
                own = values[at][within]
            else:
                own = self._to_device(values[at], parameter.device)[within]
                own = own.clone() if len(own) < part.stop - part.start else own  # lets the rest go
            if mine.start < mine.stop:
                yield shard(parameter), mine, slice(0, len(own)), own

    def _to_device(self, values: Tensor, device: torch.device) -> Tensor:
        """Rank 0's ``values`` on the device of every rank."""
        there = (
            values.to(device)
            if self._ranks.leads
            else torch.empty(len(values), dtype=torch.float32, device=device)
        )
        return self._ranks.spread(there)

    def _exchanged(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in super()._exchanged():
            yield name, shard(parameter)

    # ---- the inner optimizer's state

    def state_of(self, optimizer: Optimizer) -> dict[str, Any]:
        self._tell("state_of")
        state_dict = readable(optimizer)
        states = state_dict["state"].values()
        self.state = [one for state in states for one in state.values() if is_sharded(one)]
        return state_dict

    @torch.no_grad()
    def copy_(self, out: Tensor, tensor: Tensor) -> None:
        if is_sharded(tensor):
            self._tell("copy_", next(at for at, one in enumerate(self.state) if one is tensor))
        super().copy_(out, whole(tensor))

    def own_state(
        self, state_dict: Mapping[str, Any], optimizer: Optimizer, dtypes: Sequence[str], keeps_rate: bool
    ) -> Mapping[str, Any]:
        said = say(state_dict)
        tensors = [one for part in said.tensors for one in part.values()]
        owned = owned_by(optimizer)
        like = {
            id(one): index
            for index, state in state_dict.get("state", {}).items()
            for one in state.values()
            if is_sharded(owned[index]) and isinstance(one, Tensor) and one.shape == owned[index].shape
        }
        rows = [
            [str(one.dtype).removeprefix("torch."), list(one.shape), like.get(id(one))] for one in tensors
        ]
        self._tell("load_state", said.tree, rows, list(dtypes), keeps_rate)
        return self.spread_state(said.tree, rows, optimizer, tensors)

    @torch.no_grad()
    def spread_state(
        self, tree: object, rows: Sequence[Sequence[Any]], optimizer: Optimizer,
        tensors: Sequence[Tensor] = (),
    ) -> Mapping[str, Any]:  # fmt: skip
        """This rank's part of a ``state_dict`` whose ``tensors`` rank 0 has. ``rows``: dtype, shape, and like
        which parameter each is cut."""
        owned = owned_by(optimizer)
        mine = list[Tensor]()
        for number, (dtype, shape, index) in enumerate(rows):
            is_here = self._ranks.leads
            there = tensors[number].contiguous() if is_here else _room(dtype, shape)
            values = self._ranks.spread(there)
            if index is not None:
                start, stop = held(owned[index])
                values = as_sharded(values.reshape(-1)[start:stop].clone(), owned[index])
            mine.append(values)
        state_dict: Mapping[str, Any] = unsay(tree, mine)
        return state_dict

    def forget_elsewhere(self, index: int) -> None:
        self._tell("forget_optimizer", index)


def _share(parameter: Tensor, part: ParameterSlice) -> tuple[ParameterSlice, slice]:
    """What of ``part`` lies here: as elements of the shard, and of the part; perhaps none."""
    start, stop = held(parameter)
    first = max(part.start, start)
    last = max(first, min(part.stop, stop))
    return ParameterSlice(part.name, first - start, last - start), slice(
        first - part.start, last - part.start
    )


def _room(dtype: str, shape: Sequence[int]) -> Tensor:
    return torch.empty(tuple(shape), dtype=getattr(torch, dtype), device="cpu")


class StateOfAnotherShape:
    """Stands for a rank's own state that the others' cannot be asked for: it is in no checkpoint."""


def readable(optimizer: Optimizer) -> dict[str, Any]:
    """Its ``state_dict``, with what cannot be read whole replaced. The same on every rank but for values."""
    state_dict = optimizer.state_dict()
    owned = owned_by(optimizer)

    def is_readable(parameter: Tensor, values: object) -> bool:
        if not is_sharded(parameter) or not isinstance(values, Tensor):
            return not is_sharded(values)
        if is_sharded(values):
            return values.shape == parameter.shape and values.placements == parameter.placements
        return values.numel() == 1

    state_dict["state"] = {
        index: {
            key: values if is_readable(owned[index], values) else StateOfAnotherShape()
            for key, values in state.items()
        }
        for index, state in state_dict["state"].items()
    }
    return state_dict
