"""A recipe's model cut into stages, each of which a peer can build alone.

    stages = Stages([make_first, make_middle, make_last], split, loss)
    stages = Stages.of_sequential(model, [4, 8], split, loss)        # cut before children 4 and 8
    module = stages.build(seed, 1)              # the same bits on every peer, whatever else it built
    shapes = stages.crossing(inputs)            # of one sequence, at each boundary, by torch's meta device
    whole = stages.join(modules)                # all of them in one process: held-out loss, text, checkpoints

The first module's ``forward`` takes inputs, the others' the float tensor [sequences, ...] that the stage
before has made.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from p2p_co2.errors import ConfigError
from p2p_co2.recipes.drawing import drawn_from
from p2p_co2.tensors.stages import Chain
from p2p_co2.tensors.stages.tied import apart

MakeStage = Callable[[], nn.Module]
Split = Callable[[Any], tuple[Tensor, Tensor]]
StageLoss = Callable[[Tensor, Tensor], Tensor]
_ANY = (-(1 << 63), 1 << 63)


@dataclass(frozen=True)
class TiedTable:
    """A tensor that the first stage and the last both hold, called ``first`` and ``last`` there. They begin
    alike: ``draw_`` fills it from torch's random state.

    Its gradient in the unsplit model is the sum of both uses'. One group of both stages' replicas makes that
    step by twice the token-weighted mean of all, if both counted as many tokens."""

    first: str
    last: str
    draw_: Callable[[Tensor], object]


@dataclass(frozen=True)
class Stages:
    """``makers``: of the modules, first to last, each a new one. ``split(batch)``: (inputs of the first,
    side); ``side`` is an int64 tensor [sequences, ...] that travels unchanged to the last stage.
    ``loss(output, side)``: the **sum** over tokens; ``tokens(side)``: how many those are. ``side_range``: its
    values, from the first number to before the second; others are refused, since an accelerator does not
    survive them.

    ``tied``: what the first stage and the last share, if anything; then there are two or more.
    ``join(modules)``: the whole model of all stages' modules, whose tensors it shares. Its names are those of
    a whole checkpoint: ``stage.S.NAME`` where nothing else is said."""

    makers: Sequence[MakeStage]
    split: Split
    loss: StageLoss
    tokens: Callable[[Tensor], int] = Tensor.numel
    side_range: tuple[int, int] = _ANY
    join: Callable[[Sequence[nn.Module]], nn.Module] = Chain
    tied: TiedTable | None = None

    @classmethod
    def of_sequential(
        cls, model: nn.Sequential | Callable[[], nn.Sequential], cuts: Sequence[int], split: Split,
        loss: StageLoss, tokens: Callable[[Tensor], int] = Tensor.numel, side_range: tuple[int, int] = _ANY,
    ) -> Stages:  # fmt: skip
        """A Sequential cut before its children ``cuts``, as [4, 8]; names stay those of the Sequential.

        ``model``: the Sequential, or what makes one; a peer holds the whole in memory for a moment then, and
        else all the time. Raises ``ConfigError`` for cuts that leave a stage empty, or that part what shares
        a parameter."""
        whole = model if isinstance(model, nn.Sequential) else _outline(model)
        if not isinstance(whole, nn.Sequential):
            problem = f"only a torch.nn.Sequential has cut points, this is a {type(whole).__name__}"
            raise ConfigError("recipe", "stages", f"{problem}; give a maker for each stage")
        edges = list(itertools.pairwise([0, *cuts, len(whole)]))
        if not all(start < stop for start, stop in edges):
            problem = f"{list(cuts)} leave a stage empty: give rising numbers from 1 to {len(whole) - 1}"
            raise ConfigError("recipe", "cuts", problem)
        apart = sum(len(list(whole[start:stop].parameters())) for start, stop in edges)
        if apart != len(list(whole.parameters())):
            problem = f"{list(cuts)} part children that share a parameter: each stage would train its own"
            raise ConfigError("recipe", "cuts", f"{problem}; cut elsewhere, or let them share none")
        makers = [partial(_children, model, start, stop) for start, stop in edges]
        return cls(makers, split, loss, tokens, side_range, _joined)

    def __len__(self) -> int:
        return len(self.makers)

    def build(self, seed: int, stage: int) -> nn.Module:
        """The module of ``stage``, on the CPU, drawn from (``seed``, ``stage``) alone. Raises ``ConfigError``
        if it has nothing to train."""
        with drawn_from(_seed_of(b"stage", seed, stage)), torch.device("cpu"):
            module = self._trainable(stage, self.makers[stage]())
        if self.tied is not None and (name := self.tied_name(stage)):
            with drawn_from(_seed_of(b"tied table", seed, 0)), torch.no_grad():
                self.tied.draw_(module.get_parameter(name))
        return module

    def tied_name(self, stage: int) -> str:
        """What the tied table is called in ``stage``; "" if it has none."""
        if self.tied is None or stage not in {0, len(self) - 1}:
            return ""
        return self.tied.first if stage == 0 else self.tied.last

    def groups(self, stage: int, module: nn.Module) -> list[nn.Module]:
        """What a peer with ``module``, which is ``stage``, trains in each group: the stage's, and that of the
        tied table, if it has one. The tensors are the module's. Raises ``ConfigError`` if nothing is left
        beside the table."""
        if not (name := self.tied_name(stage)):
            return [module]
        rest, table = apart(module, module.get_parameter(name))
        return [self._trainable(stage, rest), table]

    def whole(self, seed: int) -> nn.Module:
        """All stages as their peers start with them, joined."""
        return self.join([self.build(seed, stage) for stage in range(len(self))])

    def outlines(self) -> list[nn.Module]:
        """All stages on torch's meta device: names and shapes, no values. Raises ``ConfigError`` for one that
        is no module or has nothing to train."""
        return [self._trainable(stage, _outline(make)) for stage, make in enumerate(self.makers)]

    def microbatch(self, batch: Any) -> tuple[Tensor, Tensor]:
        """(inputs, side) of ``batch``. Raises ``ConfigError`` if they are not what can travel."""
        inputs, side = self.split(batch)
        if not (isinstance(inputs, Tensor) and isinstance(side, Tensor) and len(inputs) == len(side)):
            problem = "must give two tensors [sequences, ...]: what the first stage takes, and the side"
            raise ConfigError("recipe", "stages.split", problem)
        if side.is_floating_point() or side.is_complex():
            problem = f"gives a side of {side.dtype}, but integers travel; give a float32's bits"
            raise ConfigError("recipe", "stages.split", f"{problem}: side.view(torch.int32)")
        return inputs, side

    def mean_loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The mean over tokens by the whole ``model``: what a recipe calls its ``loss``."""
        inputs, side = self.microbatch(batch)
        device = next(model.parameters()).device
        return self.loss(model(inputs.to(device)), side.to(device)) / self.tokens(side)

    def crossing(self, inputs: Tensor) -> list[tuple[int, ...]]:
        """The shape of one sequence at each boundary, for ``inputs`` as the first stage takes them; nothing
        is computed. Raises ``ConfigError`` if a stage does not make one float tensor [sequences, ...]."""
        shapes: list[tuple[int, ...]] = []
        hidden: Any = inputs.to("meta")
        for stage, make in enumerate(self.makers[:-1]):
            with torch.device("meta"), torch.no_grad():
                hidden = _outline(make)(hidden)
            if not isinstance(hidden, Tensor) or not hidden.is_floating_point() or len(hidden) != len(inputs):
                problem = f"stage {stage} must make one float tensor [sequences, ...] for the next stage"
                raise ConfigError("recipe", "stages", problem)
            shapes.append(tuple(hidden.shape[1:]))
        return shapes

    def _trainable(self, stage: int, module: object) -> nn.Module:
        if not isinstance(module, nn.Module):
            problem = f"stage {stage} of {len(self)} must be an nn.Module, got {type(module).__name__}"
            raise ConfigError("recipe", "stages", problem)
        if not any(parameter.requires_grad for parameter in module.parameters()):
            problem = f"stage {stage} of {len(self)} has no parameter to train; cut the model elsewhere"
            raise ConfigError("recipe", "stages", problem)
        return module


def _seed_of(what: bytes, seed: int, number: int) -> int:
    said = b"p2p-co2 " + what + b"\0" + seed.to_bytes(8, "big") + number.to_bytes(4, "big")
    return int.from_bytes(hashlib.sha256(said).digest()[:7], "big")


def _outline(make: MakeStage) -> nn.Module:
    """What ``make`` makes, on torch's meta device, with what is tied still tied."""
    with drawn_from(0), torch.device("meta"):
        made = make()
    if not isinstance(made, nn.Module):
        return made
    outlines: dict[int, Any] = {id(p): nn.Parameter(p.to("meta"), p.requires_grad) for p in made.parameters()}
    outlines |= {id(buffer): buffer.to("meta") for buffer in made.buffers()}
    return copy.deepcopy(made, outlines)


def _children(model: nn.Sequential | Callable[[], nn.Sequential], start: int, stop: int) -> nn.Module:
    """Those from ``start`` to ``stop``, of a model of their own; an outline is a copy already."""
    if not isinstance(model, nn.Sequential):
        return model()[start:stop]
    is_outlined = torch.get_default_device().type == "meta"
    return model[start:stop] if is_outlined else copy.deepcopy(model[start:stop])


def _joined(parts: Sequence[nn.Module]) -> nn.Sequential:
    """One Sequential of the children of several, under the names that they have."""
    return nn.Sequential(OrderedDict(child for part in parts for child in part.named_children()))
