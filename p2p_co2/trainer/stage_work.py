"""What the training thread does with the pipeline's work: bytes in, one stage's computing, bytes out.

    crossings = Crossings.of(stages, inputs, side, forward="int8", backward="int8")
    work = StageWork(stages, module, stage, crossings, batches)
    done = work.compute(machine_work)          # Done: what to tell the machine

A payload forward is the side (int64, little-endian) and then the encoded activations; backward the encoded
gradient alone. The last stage goes forward and back at once. What a peer sent is checked before it is used:
``Done.refused`` says why it could not be, and nothing of it is counted.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from p2p_co2.errors import ConfigError, RemoteProtocolError
from p2p_co2.protocol.pipeline import Key, Work
from p2p_co2.protocol.pipeline.machine import Do
from p2p_co2.recipes.stages import Stages
from p2p_co2.system.memory import Buffer
from p2p_co2.tensors.stages import Boundary, Counted, StageReplica, UsualSizes

_SIDE_BYTES = 8
"""Of each of its values."""
MOST_BYTES = 256 << 20
"""Of a microbatch, where it crosses."""


@dataclass(frozen=True)
class Crossings:
    """What crosses at each boundary of a run, the same for all its peers. ``shapes``: of one sequence;
    ``side``: of one sequence's."""

    shapes: Sequence[tuple[int, ...]]
    side: tuple[int, ...]
    sequences: int
    forward: str
    backward: str

    @classmethod
    def of(cls, stages: Stages, inputs: Tensor, side: Tensor, forward: str, backward: str) -> Crossings:
        """For microbatches like ``inputs`` and ``side``. Raises ``ConfigError`` as ``Stages.crossing``, and
        for microbatches that are too large to cross."""
        made = cls(stages.crossing(inputs), tuple(side.shape[1:]), len(inputs), forward, backward)
        for boundary in range(len(stages) - 1):
            size = max(made.forward_bytes(boundary), made.back(boundary).payload_bytes)
            if size > MOST_BYTES:
                problem = f"{len(inputs)} make microbatches of {size / 2**20:.0f} MiB behind stage {boundary}"
                advice = f"{MOST_BYTES >> 20} MiB is the most; use fewer, or a codec with fewer bits"
                raise ConfigError("pipeline", "sequences", f"{problem}: {advice}")
        return made

    @property
    def side_bytes(self) -> int:
        return _SIDE_BYTES * self.sequences * torch.Size(self.side).numel()

    def digest(self) -> bytes:
        """Names all this: peers that differ in it take nothing from each other."""
        said = [self.shapes, self.side, self.sequences, self.forward, self.backward]
        return hashlib.sha256(json.dumps(said).encode()).digest()

    def forward_bytes(self, boundary: int) -> int:
        return self.side_bytes + self.ahead(boundary).payload_bytes

    def ahead(self, boundary: int) -> Boundary:
        """Of activations between stage ``boundary`` and the next."""
        return Boundary(self.forward, self.shapes[boundary], self.sequences)

    def back(self, boundary: int) -> Boundary:
        """Of gradients there."""
        return Boundary(self.backward, self.shapes[boundary], self.sequences)


@dataclass(frozen=True)
class Done:
    """What has come of a piece of work. ``payload``: what goes on, or back. ``refused``: what a peer sent was
    no use. ``counted``: of an inner step."""

    work: Work
    payload: Buffer | None = None
    tokens: int = 0
    loss: float = 0.0
    refused: RemoteProtocolError | None = None
    counted: Counted | None = None


class StageWork:
    """``module``: stage number ``stage``; ``batches``: microbatches, at the first stage alone."""

    def __init__(
        self, stages: Stages, module: nn.Module, stage: int, crossings: Crossings,
        batches: Iterator[Any] | None = None, graph_room_bytes: float = math.inf,
    ) -> None:  # fmt: skip
        is_first, self._is_last = stage == 0, stage == len(stages) - 1
        loss = stages.loss if self._is_last else None
        self.replica = StageReplica(module, is_first=is_first, loss=loss, graph_room_bytes=graph_room_bytes)
        self._stages, self._crossings, self._batches = stages, crossings, batches
        self._device = next(module.parameters()).device
        self._comes = None if is_first else crossings.ahead(stage - 1)
        self._goes_back = None if is_first else crossings.back(stage - 1)
        self._goes = None if self._is_last else crossings.ahead(stage)
        self._comes_back = None if self._is_last else crossings.back(stage)
        self._usual = UsualSizes()

    @property
    def is_between_steps(self) -> bool:
        """Whether no gradient is under way."""
        return not self.replica.in_flight and not self.replica.counted.microbatches

    def compute(self, work: Work) -> Done:
        """Forward, back, or the end of an inner step, whose optimizer step is the caller's. Raises
        ``ValueError`` for values that are not finite: training has diverged here."""
        try:
            if work.do is Do.BACKWARD:
                return self._backward(work)
            if work.do is Do.FORWARD:
                return self._forward(work)
        except RemoteProtocolError as error:
            self.forget(work.key)
            return Done(work, refused=error)
        return Done(work, counted=self.replica.take())

    def forget(self, key: Key | None) -> None:
        """Microbatch ``key`` was dropped."""
        if key is not None:
            self.replica.forget(key)

    def _forward(self, work: Work) -> Done:
        inputs, side = self._inputs(work)
        tokens = self._stages.tokens(side)
        if self._is_last:
            gradient, loss = self.replica.last(inputs, side.to(self._device), tokens)
            back = self._goes_back.encode(gradient) if self._goes_back and gradient is not None else None
            return Done(work, None if back is None else _bytes(back), tokens, loss)
        assert self._goes is not None
        output = self._goes.encode(self.replica.forward(work.key, inputs))
        flat = side.detach().to(device="cpu", dtype=torch.int64).contiguous().view(-1).view(torch.uint8)
        return Done(work, _bytes(torch.cat([flat, output])), tokens)

    def _backward(self, work: Work) -> Done:
        assert self._comes_back is not None
        assert work.payload is not None
        gradient = self._comes_back.decode(work.payload, self._device)
        self._usual.admit(work.sender, gradient)
        back = self.replica.backward(work.key, gradient, work.tokens, work.loss)
        sent = self._goes_back.encode(back) if self._goes_back and back is not None else None
        return Done(work, None if sent is None else _bytes(sent), work.tokens, work.loss)

    def _inputs(self, work: Work) -> tuple[Tensor, Tensor]:
        """What the stage computes on, on its device, and the side. Raises ``RemoteProtocolError`` for what a
        peer sent and is no use."""
        if self._comes is None:
            assert self._batches is not None
            inputs, side = self._stages.split(next(self._batches))
            return inputs.to(self._device), side
        assert work.payload is not None
        view = memoryview(work.payload).cast("B")
        cut = self._crossings.side_bytes
        side = torch.frombuffer(bytearray(view[:cut]), dtype=torch.int64)
        side = side.view(self._crossings.sequences, *self._crossings.side)
        least, beyond = self._stages.side_range
        if side.numel() and not (least <= int(side.min()) and int(side.max()) < beyond):
            raise RemoteProtocolError(
                "out of range", f"values outside of {least} to {beyond - 1} in the side"
            )
        hidden = self._comes.decode(view[cut:], self._device)
        self._usual.admit(work.sender, hidden)
        return hidden, side


def _bytes(payload: Tensor) -> memoryview:
    """A flat uint8 tensor's, without a copy."""
    return memoryview(payload.numpy())  # type: ignore[arg-type]
