"""The parameters of a model that the ranks of one group hold together, seen from rank 0 as if they lay there.

Each rank holds some elements of each parameter: all of them (DDP, ``Division`` then says rank 0's are the
ones to read), or a shard (FSDP2). Fragments are those of the whole model, as a peer of one process has them.

Laws: a snapshot is what the whole model's would be; a merge reaches every copy of an element; rank 0's
elements never travel. Price: what the others hold of a fragment, through host memory, while training stands
still.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from p2p_co2.tensors.checkpoint.tree import say
from p2p_co2.tensors.fragments import Fragment, FragmentPlan, LiveParameters, Slice, large_tensor
from p2p_co2.tensors.names import named_parameters
from p2p_co2.tensors.outer import Merge
from p2p_co2.tensors.sharding import Shards, as_sharded, is_sharded, shard
from p2p_co2.trainer.ranks.words import Command, Ranks

Ranges = Mapping[str, tuple[int, int]]
"""Elements of parameters by name: from, to."""


@dataclass(frozen=True)
class Share:
    """What one rank has of a fragment: ``local``, as slices of its shards, and where they lie in the whole
    fragment, in the same order."""

    local: Fragment
    at: tuple[slice, ...]

    def of(self, values: Tensor) -> Tensor:
        """This share of a whole fragment's ``values``."""
        return values[self.at[0]] if len(self.at) == 1 else torch.cat([values[at] for at in self.at])

    def into(self, out: Tensor, values: Tensor) -> None:
        """Put this share's ``values`` where they belong in the whole."""
        begin = 0
        for at in self.at:
            out[at] = values[begin : begin + at.stop - at.start]
            begin += at.stop - at.start


def share_of(fragment: Fragment, held: Ranges) -> Share:
    """What of ``fragment`` lies in the ranges that are ``held``."""
    slices = list[Slice]()
    places = list[slice]()
    begin = 0
    for part in fragment.slices:
        start, stop = held[part.name]
        first = max(part.start, start)
        last = min(part.stop, stop)
        if first < last:
            slices.append(Slice(part.name, first - start, last - start))
            at = slice(begin + first - part.start, begin + last - part.start)
            if places and places[-1].stop == at.start:
                places[-1] = slice(places[-1].start, at.stop)
            else:
                places.append(at)
        begin += part.stop - part.start
    numel = sum(at.stop - at.start for at in places)
    return Share(Fragment(fragment.index, tuple(slices), numel), tuple(places or (slice(0, 0),)))


@dataclass(frozen=True)
class Division:
    """Which elements of each parameter each rank holds, by rank."""

    held: tuple[Ranges, ...]

    def to_read(self, rank: int) -> Ranges:
        """Those that are read from this rank: of equal copies the first rank's."""
        return {
            name: (0, 0) if any(lower[name] == own for lower in self.held[:rank]) else own
            for name, own in self.held[rank].items()
        }

    def missing(self, sizes: Mapping[str, int]) -> str:
        """The first parameter that the ranks do not hold once and whole, "" if there is none."""
        parts = [self.to_read(rank) for rank in range(len(self.held))]
        for name, numel in sizes.items():
            at = 0
            for start, stop in sorted(part[name] for part in parts):
                at = stop if start == at else at
            if at != numel or sum(part[name][1] - part[name][0] for part in parts) != numel:
                return name
        return ""


@dataclass(frozen=True)
class Group:
    """This process's place in a group, and who of it holds what."""

    ranks: Ranks
    division: Division


class RankedParameters(LiveParameters):
    """Rank 0's: as ``LiveParameters``, of the whole model, for which it commands the other ranks."""

    def __init__(self, group: Group, module: nn.Module, plan: FragmentPlan) -> None:
        self._ranks = group.ranks
        self._division = group.division
        self._whole = plan
        self._names = {id(one): name for name, one in named_parameters(module).items()}
        self._kept = [[share_of(one, held) for held in group.division.held] for one in plan.fragments]
        self._read = [
            [share_of(one, group.division.to_read(rank)) for rank in range(group.ranks.size)]
            for one in plan.fragments
        ]
        self._state = list[tuple[Tensor, str]]()
        mine = FragmentPlan(tuple(shares[0].local for shares in self._kept), plan.digest)
        super().__init__(Shards(named_parameters(module)), mine)

    @torch.no_grad()
    def snapshot(self, index: int, out: Tensor | None = None) -> Tensor:
        out = large_tensor(self._whole.fragments[index].numel) if out is None else out
        own, *others = self._read[index]
        asked = [rank for rank, share in enumerate(others, 1) if share.local.numel]
        for rank in asked:
            self._ranks.word(rank, Command.SNAPSHOT, index)
        if not asked:
            return super().snapshot(index, out)
        own.into(out, super().snapshot(index))
        for rank in asked:
            values = large_tensor(others[rank - 1].local.numel)
            self._ranks.receive(rank, values)
            others[rank - 1].into(out, values)
        return out

    @torch.no_grad()
    def merge_(self, index: int, merge: Merge) -> None:
        own = self._spread(Command.MERGE, index, merge.addend, merge.keep)
        super().merge_(index, Merge(merge.keep, own))

    @torch.no_grad()
    def load_(self, index: int, values: Tensor) -> None:
        super().load_(index, self._spread(Command.LOAD, index, values))

    def _spread(self, command: Command, index: int, values: Tensor, *numbers: float) -> Tensor:
        """Each other rank's share on its way to it; returns this one's."""
        own, *others = self._kept[index]
        for rank, share in enumerate(others, 1):
            if share.local.numel:
                self._ranks.word(rank, command, index, *numbers)
                self._ranks.send(rank, share.of(values))
        return own.of(values)

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        self._ranks.tell(Command.SET_ASIDE)
        with super().set_aside():
            yield
        if not self._ranks.is_broken:
            self._ranks.tell(Command.PUT_BACK)

    # ---- the inner optimizer's state

    def state_of(self, optimizer: Optimizer) -> dict[str, Any]:
        self._ranks.tell(Command.LIST_STATE)
        state_dict = readable(optimizer)
        self._state = sharded_states(state_dict, optimizer, self._names)
        return state_dict

    @torch.no_grad()
    def copy_(self, out: Tensor, tensor: Tensor) -> None:
        if not is_sharded(tensor):
            super().copy_(out, tensor)
            return
        number = next(number for number, (one, _) in enumerate(self._state) if one is tensor)
        name = self._state[number][1]
        flat = out.view(-1)
        for rank in range(self._ranks.size):
            start, stop = self._division.to_read(rank)[name]
            if start == stop:
                continue
            if rank:
                self._ranks.word(rank, Command.READ_STATE, number)
                self._ranks.receive(rank, flat[start:stop])
            else:
                flat[start:stop] = shard(tensor).reshape(-1)

    def own_state(
        self, state_dict: Mapping[str, Any], optimizer: Optimizer, dtypes: Sequence[str], keeps_rate: bool
    ) -> Mapping[str, Any]:
        for rank, held in enumerate(self._division.held):
            part, cut = self._cut(state_dict, optimizer, held)
            if not rank:
                own = with_shards(part, cut, optimizer)
                continue
            said = say(part)
            tensors = [one for some in said.tensors for one in some.values()]
            self._ranks.word(rank, Command.LOAD_STATE, keeps_rate)
            self._ranks.say(rank, json.dumps({
                "tree": said.tree, "cut": cut, "dtypes": list(dtypes),
                "tensors": [[str(one.dtype).removeprefix("torch."), list(one.shape)] for one in tensors],
            }))  # fmt: skip
            for one in tensors:
                self._ranks.send(rank, one)
        return own

    def _cut(
        self, state_dict: Mapping[str, Any], optimizer: Optimizer, held: Ranges
    ) -> tuple[dict[str, Any], list[tuple[int, str]]]:
        """One rank's part of a whole ``state_dict``, and which of its tensors are shards."""
        cut = list[tuple[int, str]]()
        states = dict[int, Any]()
        owned = [one for group in optimizer.param_groups for one in group["params"]]
        for index, state in state_dict.get("state", {}).items():
            parameter = owned[index]
            states[index] = dict(state)
            if not is_sharded(parameter):
                continue
            start, stop = held[self._names[id(parameter)]]
            for key, values in state.items():
                if isinstance(values, Tensor) and values.shape == parameter.shape:
                    states[index][key] = values.reshape(-1)[start:stop]
                    cut.append((index, key))
        return {**state_dict, "state": states}, cut

    def forget_elsewhere(self, index: int) -> None:
        self._ranks.tell(Command.FORGET, index)


class StateOfAnotherShape:
    """Stands for a rank's own state that the others' cannot be asked for: it is in no checkpoint."""


def readable(optimizer: Optimizer) -> dict[str, Any]:
    """Its ``state_dict``, with what cannot be read whole replaced. The same on every rank but for values."""
    state_dict = optimizer.state_dict()
    owned = [one for group in optimizer.param_groups for one in group["params"]]

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


def sharded_states(
    state_dict: Mapping[str, Any], optimizer: Optimizer, names: Mapping[int, str]
) -> list[tuple[Tensor, str]]:
    """Its tensors that are cut, each with its parameter's name: in the same order on every rank."""
    owned = [one for group in optimizer.param_groups for one in group["params"]]
    return [
        (values, names[id(owned[index])])
        for index, state in state_dict["state"].items()
        for values in state.values()
        if is_sharded(values)
    ]


def with_shards(
    part: Mapping[str, Any], cut: Sequence[tuple[int, str]], optimizer: Optimizer
) -> dict[str, Any]:
    """``part`` of a ``state_dict`` with its shards as tensors that are cut like their parameters."""
    owned = [one for group in optimizer.param_groups for one in group["params"]]
    states = {index: dict(state) for index, state in part["state"].items()}
    for index, key in cut:
        states[index][key] = as_sharded(states[index][key], owned[index])
    return {**part, "state": states}
