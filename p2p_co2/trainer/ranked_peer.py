"""A ``torchrun`` group as one peer: what each of its ranks calls instead of ``connect`` and ``start``.

    group = form_group(model, optimizer)                     # None outside a group
    peer = as_one_peer(group, model, optimizer, lead, learning_rate)

On rank 0 ``lead()`` connects and starts, and the result is a ``LeadingPeer`` that commands the other ranks;
on those ``lead`` is not called, and the result is a ``FollowingPeer`` with the same methods. What rank 0
fails with while it joins, every rank raises.

Laws: all ranks make the same calls in the same order, or each raises one ``ConfigError`` that names the two.
Tokens are summed and losses averaged over the ranks. A rank that ends, ends the peer on every other rank,
with one ``EnvironmentFault``. A rank that leaves while others step makes their step return False.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from p2p_co2.config import RunConfig
from p2p_co2.errors import ConfigError, LocalProtocolError, P2PCo2Error
from p2p_co2.trainer.exchanged_model import Plan
from p2p_co2.trainer.figures import loss_of, mean_loss, tokens_of
from p2p_co2.trainer.follower import Follower, frozen_digests
from p2p_co2.trainer.group import sample_digest
from p2p_co2.trainer.peer import Peer
from p2p_co2.trainer.ranked_parameters import Group
from p2p_co2.trainer.ranks import Call, Command, Ranks
from p2p_co2.trainer.rates import Factor, Rates
from p2p_co2.trainer.side_thread import PeerThread
from p2p_co2.trainer.synchroniser import Progressed
from p2p_co2.trainer.worker import TensorWorker

_STOP, _PAUSE, _GO_ON = 1, 2, 4
"""What a person asked of a rank that follows, with its next step."""


class LeadingPeer(Peer):
    """Rank 0's: the peer, as the swarm sees it. Every method that trains, saves, measures or leaves is called
    by all ranks at the same time; ``agreed_parameters`` is rank 0's alone."""

    def __init__(
        self, thread: PeerThread, ledger: TensorWorker, plan: Plan, rates: Rates, start: Progressed
    ) -> None:
        assert plan.group is not None
        self._ranks: Ranks = plan.group.ranks
        self._gone = set[int]()
        """Those that wait in ``leave`` for the others."""
        self._is_compared = False
        super().__init__(thread, ledger, plan, rates, start)

    def step(self, tokens: int | Tensor, loss: float | Tensor) -> bool:
        """As ``Peer.step``, called on every rank: tokens are summed and losses averaged."""
        problem, given = None, (0, math.nan)
        self._must_be_here()
        with self._ranks.together():
            try:
                given = tokens_of(tokens), loss_of(loss)
            except ConfigError as error:  # the others hear of it, too
                problem = error
            words = self._meet(Call.STEP, problem)
            if self._gone:
                self.stop()
            else:
                given = self._figures(words, *given)
            goes_on = super().step(*given) and not self._gone
            self._go(goes_on)
        return goes_on

    def _figures(
        self, words: Mapping[int, list[float]], tokens: int | Tensor, loss: float | Tensor
    ) -> tuple[int | Tensor, float | Tensor]:
        """Of all ranks. What lies on an accelerator is added there, and nobody waits for it."""
        self._compare()
        asked = 0
        for word in words.values():
            asked |= int(word[3])
        self._obey(asked)
        if self._is_on_accelerator:
            self._ranks.tell(Command.FIGURES)
            both = summed(tokens, loss, self._device)
            return both[0], both[1] / self._ranks.size
        losses: list[float | Tensor] = [loss, *(word[2] for word in words.values())]
        assert isinstance(tokens, int)
        return tokens + sum(int(word[1]) for word in words.values()), mean_loss(losses)
