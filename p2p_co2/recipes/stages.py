"""A recipe's model cut into stages, each of which a peer can build alone.

    stages = Stages([make_first, make_middle, make_last], split, loss)
    module = stages.build(seed, 1)              # the same bits on every peer, whatever else it built
    shapes = stages.crossing(inputs)            # of one sequence, at each boundary, by torch's meta device

The first module's ``forward`` takes inputs, the others' the float tensor [sequences, ...] that the stage
before has made.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from p2p_co2.errors import ConfigError
from p2p_co2.recipes.drawing import drawn_from

MakeStage = Callable[[], nn.Module]


@dataclass(frozen=True)
class Stages:
    """``makers``: of the modules, first to last. ``split(batch)``: (inputs of the first, side); ``side`` is
    an int64 tensor [sequences, ...] that travels unchanged to the last stage. ``loss(output, side)``: the
    **sum** over tokens; ``tokens(side)``: how many those are. ``side_range``: its values, from the first
    number to before the second; others are refused, since an accelerator does not survive them."""

    makers: Sequence[MakeStage]
    split: Callable[[Any], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]
    tokens: Callable[[Tensor], int] = Tensor.numel
    side_range: tuple[int, int] = (-(1 << 63), 1 << 63)

    def __len__(self) -> int:
        return len(self.makers)

    def build(self, seed: int, stage: int) -> nn.Module:
        """The module of ``stage``, drawn from (``seed``, ``stage``) alone. Raises ``ConfigError`` if it has
        nothing to train."""
        digest = hashlib.sha256(b"p2p-co2 stage\0" + seed.to_bytes(8, "big") + stage.to_bytes(4, "big"))
        with drawn_from(int.from_bytes(digest.digest()[:7], "big")):
            module = self.makers[stage]()
        if not any(parameter.requires_grad for parameter in module.parameters()):
            problem = f"stage {stage} of {len(self)} has no parameter to train; cut the model elsewhere"
            raise ConfigError("recipe", "stages", problem)
        return module

    def crossing(self, inputs: Tensor) -> list[tuple[int, ...]]:
        """The shape of one sequence at each boundary, for ``inputs`` as the first stage takes them; nothing
        is computed. Raises ``ConfigError`` if a stage does not make one float tensor [sequences, ...]."""
        shapes: list[tuple[int, ...]] = []
        hidden: Any = inputs.to("meta")
        for stage, make in enumerate(self.makers[:-1]):
            with drawn_from(0), torch.device("meta"), torch.no_grad():
                hidden = make()(hidden)
            if not isinstance(hidden, Tensor) or not hidden.is_floating_point() or len(hidden) != len(inputs):
                problem = f"stage {stage} must make one float tensor [sequences, ...] for the next stage"
                raise ConfigError("recipe", "stages", problem)
            shapes.append(tuple(hidden.shape[1:]))
        return shapes


def cut_sequential(model: nn.Sequential, cuts: Sequence[int]) -> list[MakeStage]:
    """Makers of the stages between ``cuts``: children before which a new stage begins, as [4, 8]. Raises
    ``ConfigError`` for a cut that leaves a stage empty."""
    edges = [0, *cuts, len(model)]
    for before, after in itertools.pairwise(edges):
        if not before < after:
            problem = f"{list(cuts)} leave a stage empty: give rising numbers from 1 to {len(model) - 1}"
            raise ConfigError("recipe", "cuts", problem)
    pairs = itertools.pairwise(edges)
    return [lambda start=start, stop=stop: model[start:stop] for start, stop in pairs]  # type: ignore[misc]
