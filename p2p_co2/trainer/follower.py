"""What a rank that follows does in the calls that all ranks make: it carries out rank 0's commands, until one
says that the call is over.

Law: it decides nothing. What it needs of the run it is told; its shards, its inner optimizer and its buffers
are changed only by a command, at the same point of training as rank 0's.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from p2p_co2.config import PeerConfig, RunConfig
from p2p_co2.errors import EnvironmentFault, LocalProtocolError
from p2p_co2.system.process import say
from p2p_co2.tensors.checkpoint.tree import unsay
from p2p_co2.tensors.fragments import FragmentPlan, LiveParameters, large_tensor, plan_fragments
from p2p_co2.tensors.names import named_buffers, named_parameters
from p2p_co2.tensors.outer import Merge
from p2p_co2.tensors.sharding import Shards, reshard, shard
from p2p_co2.trainer.exchanged_model import ExchangedModel, Plan
from p2p_co2.trainer.group import sample_digest, whole_frozen
from p2p_co2.trainer.ranks.parameters import (
    Group,
    Share,
    readable,
    sharded_states,
    share_of,
    with_shards,
)
from p2p_co2.trainer.ranks.words import Command
from p2p_co2.trainer.resuming import FAULTS, take_over


@dataclass(frozen=True)
class _Shares:
    """This rank's, by fragment, once the run is known: what merges reach, and what rank 0 reads."""

    model: ExchangedModel
    kept: tuple[Share, ...]
    read: tuple[Share, ...]
    live: LiveParameters
    readable: LiveParameters


class Follower:
    """Of a rank other than 0, whose ``model`` and ``optimizer`` these are."""

    def __init__(self, group: Group, model: nn.Module, optimizer: Optimizer) -> None:
        self._group = group
        self._ranks = group.ranks
        self.model = model
        self._optimizer = optimizer
        self.device = next(model.parameters()).device
        self.run: RunConfig | None = None
        """Once rank 0 has told."""
        self._shares: _Shares | None = None
        self._aside = ExitStack()
        self._state = list[tuple[Tensor, str]]()

    @torch.no_grad()
    def serve(self, figures: Callable[[], object] | None = None) -> list[float]:
        """Carry out commands to the end of the call; what its last word says. ``figures``: adds this rank's
        to those that lie on an accelerator."""
        reshard(self.model)
        while True:
            kind, *numbers = self._ranks.next_word(0)
            match Command(int(kind)):
                case Command.GO:
                    return numbers
                case Command.BEGIN:
                    self._begin(self._ranks.hear(0))
                case Command.FIGURES if figures is not None:
                    figures()
                case Command.COMPARE:
                    self._ranks.say(0, sample_digest(self.model))
                case Command.FROZEN:
                    for _ in whole_frozen(self.model):
                        continue
                case Command.BUFFERS:
                    self._take_buffers()
                case Command.LOAD_STATE:
                    self._load_state(bool(numbers[0]))
                case command:
                    self._change(command, int(numbers[0]), numbers[1])

    def look(self, position: float) -> None:
        """Raise ``ConfigError`` if the model is not the one that all ranks joined with any more."""
        if self._shares is not None:
            self._shares.model.look(position)

    def _begin(self, run: str) -> None:
        self.run = RunConfig.from_canonical_bytes(run.encode())
        plan = plan_fragments(self.model, self.run.fragments)
        rank = self._ranks.rank
        division = self._group.division
        kept = tuple(share_of(one, division.held[rank]) for one in plan.fragments)
        read = tuple(share_of(one, division.to_read(rank)) for one in plan.fragments)
        shards = Shards(named_parameters(self.model))
        live, readable_ = (
            LiveParameters(shards, FragmentPlan(tuple(one.local for one in shares), plan.digest))
            for shares in (kept, read)
        )
        whole = Plan(self.run, PeerConfig(), plan, self.model, self._optimizer)
        model = ExchangedModel(whole, say)
        live.copies = model.copies_of
        self._shares = _Shares(model, kept, read, live, readable_)

    def _change(self, command: Command, number: int, keep: float) -> None:
        """Something of the parameters, or of the inner optimizer's state."""
        if self._shares is None:
            raise LocalProtocolError(f"{command.name} before this rank knows the run")
        live = self._shares.live
        match command:
            case Command.SNAPSHOT:
                values = large_tensor(self._shares.read[number].local.numel)
                self._ranks.send(0, self._shares.readable.snapshot(number, values))
            case Command.MERGE | Command.LOAD:
                values = large_tensor(self._shares.kept[number].local.numel)
                self._ranks.receive(0, values)
                if command is Command.LOAD:
                    live.load_(number, values)
                else:
                    live.merge_(number, Merge(keep, values))
            case Command.SET_ASIDE:
                self._aside.enter_context(live.set_aside())
            case Command.PUT_BACK:
                self._aside.close()
            case Command.FORGET:
                self._shares.model.forget_optimizer(number)
            case Command.LIST_STATE:
                names = {id(one): name for name, one in named_parameters(self.model).items()}
                self._state = sharded_states(readable(self._optimizer), self._optimizer, names)
            case Command.READ_STATE:
                self._ranks.send(0, shard(self._state[number][0]).cpu())
            case _:
                raise LocalProtocolError(f"rank 0 says {command.name} where it means nothing")

    def _load_state(self, keeps_rate: bool) -> None:
        told = json.loads(self._ranks.hear(0))
        tensors = list[Tensor]()
        for dtype, shape in told["tensors"]:
            tensors.append(torch.empty(shape, dtype=getattr(torch, dtype), device="cpu"))
            self._ranks.receive(0, tensors[-1])
        part: dict[str, Any] = unsay(told["tree"], tensors)
        cut = [(int(index), str(key)) for index, key in told["cut"]]
        try:
            take_over(with_shards(part, cut, self._optimizer), self._optimizer, told["dtypes"], keeps_rate)
        except FAULTS as error:
            raise EnvironmentFault(f"rank {self._ranks.rank} cannot go on: {error}") from error

    def _take_buffers(self) -> None:
        for buffer in named_buffers(self.model, persistent=True).values():
            values = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")
            self._ranks.receive(0, values)
            buffer.copy_(values)
