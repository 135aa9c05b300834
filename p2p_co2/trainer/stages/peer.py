"""A peer that holds one stage of a model: it computes microbatches of others, and trains its stage by them.

    with connection.start_stage(recipe) as peer:
        peer.train()                      # until the run is over or somebody stops it

To its stage's replicas it is an ordinary training peer (``Peer``): an inner step is ``microbatches`` that
were counted, the outer step theirs. Laws: between the first forward of an inner step and its end the
parameters stand still, so nothing is merged there. The training thread waits for microbatches and for nothing
else; how long is told (``StageProgress.waiting_s``).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import NamedTuple

from torch import nn
from torch.optim import Optimizer

from p2p_co2.config import RunConfig
from p2p_co2.errors import ConfigError
from p2p_co2.node.pipeline_node import BesideStages
from p2p_co2.protocol.pipeline import Pipeline, Place, Sizes, Work, window_of
from p2p_co2.protocol.pipeline.machine import Do
from p2p_co2.recipes.inner_step import clip_
from p2p_co2.recipes.sizes import StageSize
from p2p_co2.system.machine import available_memory_bytes
from p2p_co2.tensors.device import is_accelerator, memory_bytes
from p2p_co2.trainer.peer import Peer, heal
from p2p_co2.trainer.stages.work import Crossings, Done, StageWork
from p2p_co2.trainer.synchroniser import REPORT_EVERY_S
from p2p_co2.trainer.views import PipelineView

TRAINED_COPIES = 4
"""Of the parameters: those in training, their gradient and two moments."""
AGREED_COPIES = 4
"""Of the parameters, beside training."""


def data_seed(run: RunConfig, peer: str, inner_steps: int) -> int:
    """Each peer draws other batches, and after a resume not the ones it has had."""
    digest = hashlib.sha256(f"{run.seed} {peer} {inner_steps}".encode()).digest()
    return int.from_bytes(digest[:6], "big")


def sizes_of(run: RunConfig, crossings: Crossings, stage: int, cache_bytes: int) -> Sizes:
    """What the replicas of ``stage`` have agreed on, and what there is room for. Half of ``cache_bytes`` is
    for payloads of microbatches that are under way here, half for graphs."""
    pipeline = run.pipeline
    is_first = stage == 0
    is_last = stage == run.pipeline.stages - 1
    comes = 0 if is_first else crossings.forward_bytes(stage - 1)
    returns = [] if is_last else crossings.backward_bytes(stage)
    goes = 0 if is_last else crossings.forward_bytes(stage)
    room = max(2, cache_bytes // 2 // (comes + max(returns, default=0) + goes))
    window = min(window_of(stage, pipeline.stages, pipeline.microbatches), room // 2)
    cap_s = run.clock.round_s if run.clock.mode == "time" else 60.0
    return Sizes(
        pipeline.microbatches, window, min(room, 2 * window), comes, returns, crossings.digest(), cap_s,
        crossings.up_bytes(stage),
    )  # fmt: skip


def fitting(sizes: Sequence[StageSize], run: RunConfig, device: str, cache_bytes: int) -> list[int]:
    """The stages that this machine has the memory for: for training with two moments on ``device``, with the
    graphs of all microbatches under way or as many as half of ``cache_bytes`` holds; and for what peers agree
    on in the host's memory. Raises ``ConfigError`` if there is none."""
    is_host = not is_accelerator(device)
    host = available_memory_bytes()
    there = host if is_host else float(memory_bytes(device)[0])
    fits = list[int]()
    needed = list[float]()
    for stage, size in enumerate(sizes):
        window = window_of(stage, len(sizes), run.pipeline.microbatches)
        graphs = min(window * size.graph_bytes, max(size.graph_bytes, cache_bytes // 2))
        trained = TRAINED_COPIES * size.parameter_bytes + graphs
        agreed = AGREED_COPIES * size.parameter_bytes
        needed.append(trained + agreed)
        if trained + is_host * agreed <= there and agreed <= host:
            fits.append(stage)
    if not fits:
        least = min(needed)
        problem = f"no stage fits: the smallest needs {least / 1e9:.1f} GB, {there / 1e9:.1f} GB are there"
        raise ConfigError.of_option(
            "--stage", f"{problem}; free some memory, or cut the run into more stages"
        )
    return fits


class TrainedGroup(NamedTuple):
    """What a stage's peer trains in one group: ``peer`` is in it, ``optimizer`` steps its parameters."""

    peer: Peer
    optimizer: Optimizer


class StagePeer:
    """Made by ``Connection.start_stage``. A context manager: leaving the block leaves the swarm.

    ``groups``: the stage's own, and that of the tied table after it, if the stage has one.
    ``max_grad_norm``: as ``Recipe`` has it."""

    def __init__(
        self, groups: Sequence[TrainedGroup], pipeline: PipelineView, place: Place, work: StageWork,
        max_grad_norm: float | None = None,
    ) -> None:  # fmt: skip
        self._groups = groups
        self._pipeline = pipeline
        self._place = place
        self._work = work
        self.peer = groups[0].peer
        self._max_grad_norm = max_grad_norm
        self._busy_s = 0.0
        """Seconds of computing in this inner step."""
        self.tokens_per_s = 0.0
        """While it computes; waiting is not in it."""
        self._is_stopping = False
        self._after_step: Callable[[StagePeer], None] = lambda peer: None

    @property
    def stage(self) -> int:
        return self._place.stage

    @property
    def beside(self) -> BesideStages:
        """Who is in the stages beside this one's; any thread may ask."""
        return self._pipeline.node.beside

    @property
    def module(self) -> nn.Module:
        """The stage itself, with the parameters that are trained here."""
        return self._work.replica.module

    def train(self, after_step: Callable[[StagePeer], None] | None = None) -> None:
        """Until the run is over or ``stop`` was called; then leave the swarm. ``after_step``: called with
        this peer after each inner step. Raises as ``Peer.step``."""
        if after_step is not None:
            self._after_step = after_step
        with self:
            self._pipeline.exchange(None)
            while (work := self._next()) is not None:
                self._do(work)

    def stop(self) -> None:
        """Ask ``train`` to end: what is under way is brought to its end, within seconds. Safe in a signal
        handler."""
        self._is_stopping = True
        for group in self._groups:
            group.peer.stop()

    def leave(self, reason: str = "") -> None:
        """As ``Peer.leave``."""
        with ExitStack() as ending:  # from the last to the first, whose thread carries the others
            for group in self._groups:
                ending.callback(group.peer.leave, reason)

    def _next(self) -> Work | None:
        """What to compute next; None when all has come to its end."""
        while True:
            began_at = time.monotonic()
            work = self._pipeline.wait(REPORT_EVERY_S / 10)
            waited_s = time.monotonic() - began_at
            self._pipeline.node.handed.waited_s += waited_s
            for key in self._pipeline.dropped():
                self._work.forget(key)
            is_still = self._work.is_between_steps and work is None
            goes_on = any([group.peer.idle(waited_s, is_still) for group in self._groups])
            if not goes_on:
                self._pipeline.finish(at_once=self._place.is_first or self._is_stopping)
            if work is not None:
                return work
            if self._pipeline.node.handed.is_over:
                return None

    def _do(self, work: Work) -> None:
        began_at = time.monotonic()
        done = self._work.compute(work)
        if work.do is Do.STEP:
            self._step(done, began_at)
            return
        self._busy_s += time.monotonic() - began_at
        if isinstance(done.refused, ValueError) and self._work.is_between_steps:
            for group in self._groups:
                heal(group.peer)
        is_counted = work.do is Do.BACKWARD or self._place.is_last
        self._pipeline.node.handed.counted += is_counted and not done.refused

        def tell(machine: Pipeline, now: float) -> None:
            assert work.key is not None
            if done.refused:
                machine.failed(work.key, done.refused)
            elif is_counted:
                machine.counted(work.key, done.payload, done.tokens, done.loss, now, done.codec)
            else:
                machine.forwarded(work.key, done.payload or b"", done.tokens, now)

        self._pipeline.exchange(tell)

    def _step(self, done: Done, began_at: float) -> None:
        """The end of an inner step: the gradient is the mean over its tokens."""
        counted = done.counted
        assert counted is not None
        clip_([group.optimizer for group in self._groups], self._max_grad_norm)
        for group in self._groups:
            group.optimizer.step()
            group.optimizer.zero_grad(set_to_none=True)
        busy_s = self._busy_s + time.monotonic() - began_at
        self._busy_s = 0.0
        rate = counted.tokens / busy_s if busy_s > 0 else 0.0
        self.tokens_per_s = (self.tokens_per_s + rate) / 2 if self.tokens_per_s else rate
        loss = counted.loss / max(1, counted.tokens)
        goes_on = any([group.peer.step(counted.tokens, loss) for group in self._groups])  # until all are over
        self._after_step(self)
        if self._is_stopping or not goes_on:
            self._pipeline.finish(at_once=self._is_stopping or self._place.is_first)
        self._pipeline.draw(int(self.peer.position), self.tokens_per_s)
        self._pipeline.exchange(lambda machine, now: machine.stepped())

    def __enter__(self) -> StagePeer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ending = ExitStack()
        for group in self._groups:
            ending.push(group.peer)
        ending.__exit__(kind, error, trace)
