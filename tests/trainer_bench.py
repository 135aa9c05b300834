"""What a training thread has, without a network: it takes down what goes out, and the test answers.

``Bench`` is a synchroniser with its ledger, ``Lone`` a whole peer."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from p2p_co2.config import ClockConfig, CodecConfig, OuterConfig, PeerConfig, RunConfig
from p2p_co2.node.state import LocalProgress
from p2p_co2.protocol.ledger import AgreedMean, PartWeights
from p2p_co2.protocol.rounds import Offer
from p2p_co2.telemetry import events as ev
from p2p_co2.tensors import outer
from p2p_co2.tensors.codec import get_codec
from p2p_co2.tensors.fragments import LiveParameters, plan_fragments
from p2p_co2.trainer import synchroniser
from p2p_co2.trainer.exchanged_model import ExchangedModel, TrainingSetup, check_model
from p2p_co2.trainer.ledger.fragment_state import FragmentState
from p2p_co2.trainer.ledger.worker import TensorWorker
from p2p_co2.trainer.peer import Peer
from p2p_co2.trainer.rates import LearningRates
from p2p_co2.trainer.session import Participation
from p2p_co2.trainer.synchroniser import REPORT_EVERY_S, SYSTEM, Progressed, Source, Synchroniser
from p2p_co2.wire.schedule import Stage


class RecordingWire:
    """A network that takes offers and says nothing: the test answers."""

    def __init__(self) -> None:
        self.offers: list[Offer] = []
        self.events: list[tuple[type[ev.Event], Mapping[str, Any]]] = []
        self.shown: list[LocalProgress] = []
        self.is_settled = False
        self.newcomers = False
        self.loads_until = -1.0
        """Until which moment of ``now`` a state is on its way."""
        self.now: Callable[[], float] = lambda: 0.0
        self.ended: frozenset[int] = frozenset()
        self.awaiting = set[int]()
        self.stages = dict[int, Stage]()
        self.is_full = False
        self.broken: BaseException | None = None

    def offer(self, offer: Offer) -> None:
        self.offers.append(offer)

    def show(self, progress: LocalProgress) -> None:
        self.shown.append(progress)

    def swarm_position(self) -> tuple[float, float] | None:
        return None

    def settled(self, versions: Sequence[int]) -> bool:
        return self.is_settled

    def tell_what_is_missing(self) -> None:
        pass

    def loads(self, settled: bool) -> bool:
        return self.now() < self.loads_until and (self.newcomers or not settled)

    def over(self) -> frozenset[int]:
        return self.ended

    def is_line_full(self) -> bool:
        return self.is_full

    def stage(self, fragment: int) -> Stage:
        return "asking" if fragment in self.awaiting else self.stages.get(fragment, "")

    def traffic_bytes(self) -> tuple[int, int]:
        return 0, 0

    def failure(self) -> BaseException | None:
        return self.broken

    def report(self, kind: type[ev.Event], fields: Mapping[str, Any]) -> None:
        kind(at=0.0, peer="me", **fields)  # the fields fit the event
        self.events.append((kind, fields))

    def seen(self, kind: type[ev.Event]) -> list[Mapping[str, Any]]:
        return [fields for event, fields in self.events if event is kind]


LEDGERS = list[TensorWorker]()
"""To be closed."""


def ledger_of(run: RunConfig, model: torch.nn.Module, name: str = "me") -> TensorWorker:
    """Of a peer that has just begun."""
    plan, codec = plan_fragments(model, run.fragments), get_codec(run.codec.name)
    live = LiveParameters(model, plan)
    states = [outer.init(live.snapshot(fragment)) for fragment in range(run.fragments)]
    parts = [FragmentState(run, codec, name, state, index) for index, state in enumerate(states)]
    LEDGERS.append(TensorWorker(codec, parts))
    return LEDGERS[-1]


class Bench:
    """A synchroniser in mode steps: 2 fragments unless told otherwise, 4 inner steps per round."""

    def __init__(
        self, fragments: int = 2, clock: ClockConfig | None = None, source: Source = SYSTEM, **settings: Any
    ) -> None:
        self.run = RunConfig(
            fragments=fragments,
            clock=clock or ClockConfig(mode="steps", inner_steps_per_round=4),
            codec=CodecConfig(name="fp32"),
            outer=OuterConfig(**{"blocking_rounds": 0, **settings}),
        )
        self.model = torch.nn.Linear(8, 32)
        self.ledger = ledger_of(self.run, self.model)
        self.wire = RecordingWire()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        plan = plan_fragments(self.model, fragments)
        setup = TrainingSetup(self.run, PeerConfig(), plan, self.model, self.optimizer)
        self.exchanged = ExchangedModel(setup, lambda text: None)
        self.sync = Synchroniser(
            self.run, self.exchanged, self.ledger, cast(Any, self.wire), Progressed(), source
        )

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.add_(1.0)
            self.sync.after_step(tokens=10, loss=1.0)
            self.ledger.agreed()  # let the worker finish what was asked

    def commit(self, fragment: int, by: str = "me") -> None:
        """The round of this peer's last offer for ``fragment`` commits, as if others had done the same."""
        offer = [offer for offer in self.wire.offers if offer.fragment == fragment][-1]
        ids = {by: offer.offer_id} if by == "me" else {}
        parts = (PartWeights(0, len(offer.payload) // 512, {by: offer.weight, "others": 1.0}, ids),)
        mean = AgreedMean(fragment, offer.round, offer.base_version, offer.state_digest, offer.payload, parts)
        asyncio.run(self.ledger.commit(mean))

    def abort(self, fragment: int) -> None:
        """This peer's last offer for ``fragment`` comes to nothing."""
        offer = [offer for offer in self.wire.offers if offer.fragment == fragment][-1]
        asyncio.run(self.ledger.abort(fragment, offer.offer_id))

    def value(self) -> float:
        return float(self.model.weight.detach().flatten()[0])


class PatientOutcomes(queue.SimpleQueue[Any]):
    """Time passes only while the training thread waits here, the tensor worker has done all, and nothing
    comes."""

    def __init__(self, bench: Bench, now_s: list[float]) -> None:
        self.bench, self.now_s = bench, now_s

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        self.bench.ledger.agreed()
        try:
            return self.get_nowait()
        except queue.Empty:
            self.now_s[0] += 10 * timeout if timeout == REPORT_EVERY_S / 100 else timeout or 0.0
            raise


def bench_on_virtual_time(fragments: int = 2, **settings: Any) -> Bench:
    now_s = [0.0]
    made = Bench(fragments, source=SYSTEM._replace(now=lambda: now_s[0]), **settings)
    made.ledger.outcomes = PatientOutcomes(made, now_s)
    made.wire.now = lambda: now_s[0]
    return made


# ---- whole peers

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
        checkpoint_every_s: float = 1e9, fits_swarm: bool = False,
    ) -> None:  # fmt: skip
        check_model(model, optimizer)
        self.run = RunConfig(
            fragments=2,
            clock=ClockConfig(mode="steps", inner_steps_per_round=STEPS),
            codec=CodecConfig(name="fp32"),
            outer=OuterConfig(rule="blend", blend_alpha=0.0),
        )
        self.name, self.model, self.optimizer = name, model, optimizer
        self.ledger = ledger_of(self.run, model, name)
        self.wire = NoNetwork(name)
        config = PeerConfig(folder=folder, checkpoint_every_s=checkpoint_every_s)
        rates = LearningRates(optimizer, learning_rate, self.wire.warn, fits_swarm)
        if start.inner_steps:
            rates.resumed()
        plan = TrainingSetup(self.run, config, plan_fragments(model, 2), model, optimizer)
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
