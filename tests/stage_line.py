"""One replica of each stage in one process, by what their training threads do; no messages are lost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from p2p_co2.config import RunConfig
from p2p_co2.protocol.pipeline import Key, Work
from p2p_co2.protocol.pipeline.machine import Do
from p2p_co2.recipes import Recipe, Stages
from p2p_co2.trainer.stages.work import Crossings, StageWork

Maker = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class Line:
    """``batches``: an endless iterator of microbatches, of which the first tells their shape alone."""

    def __init__(
        self, stages: Stages, batches: Iterator[Any], optimizer: Maker, seed: int, *codecs: str
    ) -> None:
        crossings = Crossings.of(stages, *stages.split(next(batches)), *codecs)
        self.modules = [stages.build(seed, stage) for stage in range(len(stages))]
        self.works = [
            StageWork(stages, module, stage, crossings, None if stage else batches)
            for stage, module in enumerate(self.modules)
        ]
        self.optimizers = [optimizer(module.parameters()) for module in self.modules]

    @classmethod
    def of(cls, recipe: Recipe, run: RunConfig) -> Line:
        pipeline = run.pipeline
        batches = recipe.batches(1, pipeline.sequences)
        stages = recipe.in_stages(pipeline.stages)
        return cls(stages, batches, recipe.optimizer, run.seed, pipeline.forward, pipeline.backward)

    def step(self, microbatches: int) -> float:
        """The mean loss of an inner step."""
        for number in range(microbatches):
            key, payload = Key(1, number), None
            for work in self.works:
                done = work.compute(Work(Do.FORWARD, key, payload))
                payload = done.payload
            for work in reversed(self.works[:-1]):
                done = work.compute(Work(Do.BACKWARD, key, done.payload, done.tokens, done.loss))
        for work, optimizer in zip(self.works, self.optimizers, strict=True):
            counted = work.compute(Work(Do.STEP)).counted
            assert counted is not None
            optimizer.step()
            optimizer.zero_grad()
        return counted.loss / counted.tokens
