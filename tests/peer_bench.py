"""Peers as a training loop has them, without a network: what goes out is answered by the test."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from p2p_co2.config import ClockConfig, CodecConfig, OuterConfig, PeerConfig, RunConfig
from p2p_co2.protocol.ledger import AgreedMean, PartWeights
from p2p_co2.telemetry import events as ev
from p2p_co2.tensors import outer
from p2p_co2.tensors.codec import get_codec
from p2p_co2.tensors.fragments import LiveParameters, plan_fragments
from p2p_co2.trainer import synchroniser
from p2p_co2.trainer.exchanged_model import TrainingSetup, check_model
from p2p_co2.trainer.ledger.fragment_state import FragmentState
from p2p_co2.trainer.ledger.worker import TensorWorker
from p2p_co2.trainer.peer import Peer
from p2p_co2.trainer.rates import LearningRates
from p2p_co2.trainer.session import Participation
from p2p_co2.trainer.synchroniser import Progressed
from tests.trainer_bench import RecordingWire

STEPS = 4
"""In a round."""
NEW = Progressed()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who leaves does not wait for rounds that nobody makes."""
    monkeypatch.setattr(synchroniser, "CLOSE_BOUND_S", 0.0)


class NoNetwork(RecordingWire):
    """What a peer asks of its group, and nobody on the line."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.network = SimpleNamespace(identity=SimpleNamespace(peer_id=name))
        self.view = self
        self.board = "http://127.0.0.1:1"
        self.ended_with = ""

    def warn(self, text: str) -> None:
        self.report(ev.Warned, {"text": text})

    def goodbye(self, reason: str, last: Mapping[str, Any]) -> dict[str, str]:
        self.ended_with = reason
        return {}

    def give_buffers(self) -> None:
        return

    def check(self) -> None:
        return

    def live_trainers(self) -> list[str]:
        return []

    def close(self) -> None:
        return


class Lone:
    """A peer with ``model``: two fragments, mode steps, live parameters that take over what is agreed."""

    def __init__(
        self, folder: Path, model: nn.Module, optimizer: Any, name: str = "me",
        learning_rate: Callable[[float], float] | None = None, start: Progressed = NEW,
        checkpoint_every_s: float = 1e9,
    ) -> None:  # fmt: skip
        check_model(model, optimizer)
        self.run = RunConfig(
            fragments=2,
            clock=ClockConfig(mode="steps", inner_steps_per_round=STEPS),
            codec=CodecConfig(name="fp32"),
            outer=OuterConfig(rule="blend", blend_alpha=0.0),
        )
        self.name, self.model, self.optimizer = name, model, optimizer
        fragments, codec = plan_fragments(model, 2), get_codec("fp32")
        live = LiveParameters(model, fragments)
        states = [outer.init(live.snapshot(fragment)) for fragment in range(2)]
        parts = [FragmentState(self.run, codec, name, state, index) for index, state in enumerate(states)]
        self.ledger = TensorWorker(codec, parts)
        self.wire = NoNetwork(name)
        config = PeerConfig(folder=folder, checkpoint_every_s=checkpoint_every_s)
        rates = LearningRates(optimizer, learning_rate, self.wire.warn)
        if start.inner_steps:
            rates.resumed()
        plan = TrainingSetup(self.run, config, fragments, model, optimizer)
        self.peer = Peer(cast(Participation, self.wire), self.ledger, plan, rates, start)
        self.sync, self.folder = self.peer._sync, folder
        self.draw = torch.Generator().manual_seed(sum(name.encode()))

    def train(self, tokens: Any = 64, loss: Any = 1.0) -> bool:
        """An inner step with gradients of its own."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                noise = torch.randn(parameter.shape, generator=self.draw, dtype=torch.float32)
                parameter.grad = noise.to(parameter) if parameter.requires_grad else None
        self.optimizer.step()
        return self.tell(tokens, loss)

    def tell(self, tokens: Any = 64, loss: Any = 1.0) -> bool:
        """An inner step in which nothing is learned."""
        goes_on = self.peer.step(tokens, loss)
        self.ledger.agreed()  # let the worker finish what was asked
        return goes_on

    def live(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]


def meet(*peers: Lone) -> None:
    """The rounds that all have offers in commit, with all in the mean."""
    offers = {peer.name: {offer.fragment: offer for offer in peer.wire.offers} for peer in peers}
    for fragment in sorted(set.intersection(*(set(mine) for mine in offers.values()))):
        sent = {name: mine[fragment] for name, mine in offers.items()}
        first = next(iter(sent.values()))
        slices = [(name, offer.weight, offer.payload) for name, offer in sent.items()]
        mean = asyncio.run(peers[0].ledger.reduce(fragment, slices)).mean
        weights = {name: offer.weight for name, offer in sent.items()}
        ids = {name: offer.offer_id for name, offer in sent.items()}
        parts = (PartWeights(0, len(first.payload) // 512, weights, ids),)
        agreed = AgreedMean(fragment, first.round, first.base_version, first.state_digest, mean, parts)
        for peer in peers:
            asyncio.run(peer.ledger.commit(agreed))
    for peer in peers:
        peer.wire.offers.clear()
