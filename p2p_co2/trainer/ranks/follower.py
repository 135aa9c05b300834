"""What a rank that follows does in a call of all ranks: it carries out rank 0's commands, to the call's end.

Law: it decides nothing. It is told what it needs of the run. Its shards, its inner optimizer and its buffers
are changed only by a command, at the same point of training as rank 0's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from p2p_co2.config import PeerConfig, RunConfig
from p2p_co2.errors import EnvironmentFault, LocalProtocolError
from p2p_co2.system.process import say
from p2p_co2.tensors.fragments import plan_fragments
from p2p_co2.tensors.outer import Merge
from p2p_co2.tensors.sharding import reshard, whole
from p2p_co2.trainer.exchanged_model import ExchangedModel, TrainingSetup
from p2p_co2.trainer.ranks.group import spread_buffers
from p2p_co2.trainer.ranks.parameters import Group, RankedParameters
from p2p_co2.trainer.resuming import FAULTS, take_over


class Follower:
    """Of a rank other than 0, whose ``model`` and ``optimizer`` these are. ``run``: once rank 0 has told."""

    def __init__(self, group: Group, model: nn.Module, optimizer: Optimizer) -> None:
        self._group = group
        self.model = model
        self._optimizer = optimizer
        self.run: RunConfig | None = None
        self._exchanged: ExchangedModel | None = None
        self._aside = ExitStack()

    @torch.no_grad()
    def serve(self, figures: Callable[[], object] = lambda: None) -> list[Any]:
        """Carry out commands to the end of the call; what its last word says. ``figures``: adds this rank's
        to those that lie on an accelerator."""
        reshard(self.model)
        while True:
            match self._group.ranks.hear():
                case ["go", *news]:
                    return news
                case ["begin", run]:
                    self._begin(RunConfig.from_canonical_bytes(run.encode()))
                case ["figures"]:
                    figures()
                case ["buffers"]:
                    spread_buffers(self._group.ranks, self.model)
                case [command, *values]:
                    self._change(self._exchanged, command, values)

    def look(self, position: float) -> None:
        """Raise ``ConfigError`` if the model is not the one that all ranks joined with any more."""
        if self._exchanged is not None:
            self._exchanged.look(position)

    def _begin(self, run: RunConfig) -> None:
        self.run = run
        fragments = plan_fragments(self.model, run.fragments)
        plan = TrainingSetup(run, PeerConfig(), fragments, self.model, self._optimizer, group=self._group)
        self._exchanged = ExchangedModel(plan, say)

    def _change(self, model: ExchangedModel | None, command: str, values: Sequence[Any]) -> None:
        """Something of the parameters, or of the inner optimizer's state."""
        live = None if model is None else model.live
        if model is None or not isinstance(live, RankedParameters):
            raise LocalProtocolError(f"{command} before this rank knows the run")
        match command, *values:
            case "snapshot", index:
                live.snapshot(index)
            case "merge_", index, keep:
                live.merge_(index, Merge(keep, live.valueless(index)))
            case "load_", index:
                live.load_(index, live.valueless(index))
            case ["set_aside"]:
                self._aside.enter_context(live.set_aside())
            case ["put_back"]:
                self._aside.close()
            case "forget_optimizer", index:
                model.forget_optimizer(index)
            case ["state_of"]:
                live.state_of(self._optimizer)
            case "copy_", number:
                whole(live.state[number])
            case "load_state", tree, rows, dtypes, keeps_rate:
                try:
                    own = live.spread_state(tree, rows, self._optimizer)
                    take_over(own, self._optimizer, dtypes, keeps_rate)
                except FAULTS as error:
                    rank = self._group.ranks.rank
                    raise EnvironmentFault(f"rank {rank} cannot go on: {error}") from error
            case _:
                raise LocalProtocolError(f"rank 0 says {command}, which means nothing")
