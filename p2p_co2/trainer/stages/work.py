"""What the training thread does with the pipeline's work: bytes in, one stage's computing, bytes out.

    crossings = Crossings.of(stages, inputs, side, forward="int8", backward="int8")
    work = StageWork(stages, module, stage, crossings, batches)
    done = work.compute(machine_work)          # Done: what to tell the machine

A payload forward is the side (int64, little-endian) and then the encoded activations; backward the encoded
gradient alone. ``Done.codec`` numbers its codec: 0 is the run's ``backward``, 1 its ``backward_critical``,
for urgent ones. What low rank leaves out of some is added to their heir; where there is none, codec 0 is
taken, and nothing is left over. The last stage goes forward and back at once. What a peer sent is checked
before it is used: ``Done.refused`` says why it could not be, and nothing of it is counted.
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

from p2p_co2.config import RANK
from p2p_co2.errors import ConfigError, RemoteProtocolError
from p2p_co2.protocol.pipeline import Key, Work
from p2p_co2.protocol.pipeline.machine import Do
from p2p_co2.recipes.stages import Stages
from p2p_co2.system.memory import Buffer
from p2p_co2.tensors.codec.base import NOT_FINITE
from p2p_co2.tensors.stages import Boundary, Counted, LowRank, StageReplica, UsualSizes

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
    critical: str = ""
    """Of urgent gradients: a codec, "rank16" for low rank, or "" for ``backward``."""
    inputs: tuple[int, ...] = ()
    """Shape of one sequence as the first stage takes it; they do not cross."""

    @classmethod
    def of(
        cls, stages: Stages, inputs: Tensor, side: Tensor, forward: str, backward: str, critical: str = ""
    ) -> Crossings:
        """For microbatches like ``inputs`` and ``side``. Raises ``ConfigError`` as ``Stages.crossing``, for
        microbatches that are too large to cross, and for a rank that a gradient cannot have or that saves
        nothing."""
        shapes = stages.crossing(inputs)
        like = tuple(inputs.shape[1:])
        made = cls(shapes, tuple(side.shape[1:]), len(inputs), forward, backward, critical, like)
        for boundary in range(len(stages) - 1):
            plain, *urgent = made.backward_bytes(boundary)
            size = max(made.forward_bytes(boundary), plain)
            if size > MOST_BYTES:
                problem = f"{len(inputs)} make microbatches of {size / 2**20:.0f} MiB behind stage {boundary}"
                advice = f"{MOST_BYTES >> 20} MiB is the most; use fewer, or a codec with fewer bits"
                raise ConfigError("pipeline", "sequences", f"{problem}: {advice}")
            if urgent and urgent[0] >= plain:
                sizes = f"{urgent[0]} bytes of a gradient in {critical}, {plain} in {backward}"
                problem = f"saves nothing at boundary {boundary}: {sizes}; use a lower rank, or none"
                raise ConfigError("the run", "pipeline.backward_critical", problem)
        return made

    @property
    def side_bytes(self) -> int:
        return _SIDE_BYTES * self.sequences * torch.Size(self.side).numel()

    def digest(self) -> bytes:
        """Names all this: peers that differ in it take nothing from each other."""
        said = [self.shapes, self.side, self.sequences, self.forward, self.backward, self.critical]
        return hashlib.sha256(json.dumps(said).encode()).digest()

    def must_fit(self, inputs: Tensor, side: Tensor) -> None:
        """Raises ``ConfigError`` for a microbatch of another shape than the one that these are for."""
        wanted = [(self.sequences, *self.inputs), (self.sequences, *self.side)]
        if (given := [tuple(inputs.shape), tuple(side.shape)]) != wanted:
            problem = "all microbatches must have one shape: pad, or drop the last"
            said = f"inputs and side are {given[0]} and {given[1]}, were {wanted[0]} and {wanted[1]} before"
            raise ConfigError("recipe", "batches", f"{problem}; {said}")

    def forward_bytes(self, boundary: int) -> int:
        return self.side_bytes + self.ahead(boundary).payload_bytes

    def ahead(self, boundary: int) -> Boundary:
        """Of activations between stage ``boundary`` and the next."""
        return Boundary(self.forward, self.shapes[boundary], self.sequences)

    def back(self, boundary: int) -> Boundary:
        """Of gradients there."""
        return Boundary(self.backward, self.shapes[boundary], self.sequences)

    def urgent(self, boundary: int) -> Boundary | LowRank | None:
        """Of urgent gradients there, if those have a codec of their own."""
        shape = self.shapes[boundary]
        if self.critical.startswith(RANK):
            return LowRank(int(self.critical.removeprefix(RANK)), shape, self.sequences)
        return Boundary(self.critical, shape, self.sequences) if self.critical else None

    def gradients(self, boundary: int) -> list[Boundary | LowRank]:
        """What gradients may be encoded with there, by the number of the codec."""
        urgent = self.urgent(boundary)
        return [self.back(boundary)] if urgent is None else [self.back(boundary), urgent]

    def backward_bytes(self, boundary: int) -> list[int]:
        """Of a gradient there, by the number of its codec."""
        return [codec.payload_bytes for codec in self.gradients(boundary)]

    def up_bytes(self, stage: int) -> int:
        """What ``stage`` sends for one microbatch: to the next, and its gradient in codec 0."""
        ahead = self.forward_bytes(stage) if stage < len(self.shapes) else 0
        return ahead + (self.back(stage - 1).payload_bytes if stage else 0)


@dataclass(frozen=True)
class Done:
    """What has come of a piece of work. ``payload``: what goes on, or back in ``codec``. ``refused``: what a
    peer sent was no use. ``counted``: of an inner step."""

    work: Work
    payload: Buffer | None = None
    tokens: int = 0
    loss: float = 0.0
    refused: RemoteProtocolError | ValueError | None = None
    counted: Counted | None = None
    codec: int = 0


class StageWork:
    """``module``: stage number ``stage``; ``batches``: microbatches, at the first stage alone."""

    def __init__(
        self, stages: Stages, module: nn.Module, stage: int, crossings: Crossings,
        batches: Iterator[Any] | None = None, graph_room_bytes: float = math.inf,
    ) -> None:  # fmt: skip
        is_first = stage == 0
        self._is_last = stage == len(stages) - 1
        loss = stages.loss if self._is_last else None
        self.replica = StageReplica(module, is_first=is_first, loss=loss, graph_room_bytes=graph_room_bytes)
        self._stages = stages
        self._crossings = crossings
        self._batches = batches
        self._device = next(module.parameters()).device
        self._comes = None if is_first else crossings.ahead(stage - 1)
        self._goes_back = None if is_first else crossings.back(stage - 1)
        self._goes_back_urgent = None if is_first else crossings.urgent(stage - 1)
        self._goes = None if self._is_last else crossings.ahead(stage)
        self._comes_back = [] if self._is_last else crossings.gradients(stage)
        self._rest: dict[Key, Tensor] = {}
        """What is to be added to a gradient that is yet to be sent, in this inner step."""
        self._usual = UsualSizes()

    @property
    def is_between_steps(self) -> bool:
        """Whether no gradient is under way."""
        return not self.replica.in_flight and not self.replica.counted.microbatches

    def compute(self, work: Work) -> Done:
        """Forward, back, or the end of an inner step, whose optimizer step is the caller's. Where this
        stage makes values that are not finite, ``refused`` is a ``ValueError``. What this inner step has
        counted is dropped then: its gradient may be no better. Raises ``ConfigError`` for batches of one's
        own that have run out or have another shape."""
        try:
            if work.do is Do.BACKWARD:
                return self._backward(work)
            if work.do is Do.FORWARD:
                return self._forward(work)
        except RemoteProtocolError as error:
            self.forget(work.key)
            return Done(work, refused=error)
        except ValueError as error:
            if NOT_FINITE not in str(error):
                raise
            self.forget(work.key)
            self.replica.take_back()
            return Done(work, refused=error)
        self._rest.clear()
        return Done(work, counted=self.replica.take())

    def forget(self, key: Key | None) -> None:
        """Microbatch ``key`` was dropped."""
        if key is not None:
            self.replica.forget(key)
            self._rest.pop(key, None)

    def _forward(self, work: Work) -> Done:
        inputs, side = self._inputs(work)
        tokens = self._stages.tokens(side)
        if self._is_last:
            gradient, loss = self.replica.last(inputs, side.to(self._device), tokens)
            payload, codec = self._encoded(work, gradient)
            return Done(work, payload, tokens, loss, codec=codec)
        assert self._goes is not None
        output = self._goes.encode(self.replica.forward(work.key, inputs))
        flat = side.detach().to(device="cpu", dtype=torch.int64).contiguous().view(-1).view(torch.uint8)
        return Done(work, _bytes(torch.cat([flat, output])), tokens)

    def _backward(self, work: Work) -> Done:
        assert work.payload is not None
        gradient = self._comes_back[work.codec].decode(work.payload, self._device)
        gradient = self._usual.admit(work.sender, gradient)
        back = self.replica.backward(work.key, gradient, work.tokens, work.loss)
        payload, codec = self._encoded(work, back)
        return Done(work, payload, work.tokens, work.loss, codec=codec)

    def _encoded(self, work: Work, gradient: Tensor | None) -> tuple[Buffer | None, int]:
        """What goes back, and the number of its codec; None at the first stage."""
        if gradient is None or self._goes_back is None or work.key is None:
            return None, 0
        if (rest := self._rest.pop(work.key, None)) is not None:
            gradient = gradient + rest
        urgent = self._goes_back_urgent if work.is_urgent else None
        if isinstance(urgent, Boundary):
            return _bytes(urgent.encode(gradient)), 1
        if urgent is None or work.heir is None:
            return _bytes(self._goes_back.encode(gradient)), 0
        payload, rest = urgent.encode(gradient)
        self._rest[work.heir] = rest + self._rest.get(work.heir, 0)  # out of order, several have one heir
        return _bytes(payload), 1

    def _inputs(self, work: Work) -> tuple[Tensor, Tensor]:
        """What the stage computes on, on its device, and the side. Raises ``RemoteProtocolError`` for what a
        peer sent and is no use."""
        if self._comes is None:
            assert self._batches is not None
            if (batch := next(self._batches, None)) is None:
                raise ConfigError("recipe", "batches", "have run out; in a run with stages they never end")
            inputs, side = self._stages.microbatch(batch)
            self._crossings.must_fit(inputs, side)
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
        return self._usual.admit(work.sender, hidden), side


def _bytes(payload: Tensor) -> memoryview:
    """A flat uint8 tensor's, without a copy."""
    return memoryview(payload.numpy())  # type: ignore[arg-type]
