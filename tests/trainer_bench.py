"""A synchroniser with its ledger and a network that only records, for tests of the training thread."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch

from p2p_co2.config import ClockConfig, CodecConfig, OuterConfig, PeerConfig, RunConfig
from p2p_co2.node.state import LocalProgress
from p2p_co2.protocol.ledger import AgreedMean, PartWeights
from p2p_co2.protocol.rounds import Offer
from p2p_co2.telemetry import events as ev
from p2p_co2.tensors import outer
from p2p_co2.tensors.codec import get_codec
from p2p_co2.tensors.fragments import LiveParameters, plan_fragments
from p2p_co2.trainer.exchanged_model import ExchangedModel, TrainingSetup
from p2p_co2.trainer.ledger.fragment_state import FragmentState
from p2p_co2.trainer.ledger.worker import TensorWorker
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
        plan = plan_fragments(self.model, fragments)
        codec = get_codec("fp32")
        live = LiveParameters(self.model, plan)
        states = [outer.init(live.snapshot(fragment)) for fragment in range(fragments)]
        self.ledger = TensorWorker(
            codec, [FragmentState(self.run, codec, "me", state, index) for index, state in enumerate(states)]
        )
        LEDGERS.append(self.ledger)
        self.wire = RecordingWire()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
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
        """The round of this peer's last offer for ``fragment`` commits, with one peer alone in the mean."""
        offer = [offer for offer in self.wire.offers if offer.fragment == fragment][-1]
        ids = {by: offer.offer_id} if by == "me" else {}
        parts = (PartWeights(0, len(offer.payload) // 512, {by: offer.weight}, ids),)
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
