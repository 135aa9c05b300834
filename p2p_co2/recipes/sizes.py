"""How large each stage of a run is, before anything of it is made: for planning, and for choosing a stage.

    for size in stage_sizes(recipe, run):
        print(size.parameters, size.parameter_bytes, size.activation_bytes)

By torch's meta device: shapes are computed and nothing is allocated, so a model that fits no machine has its
sizes on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from p2p_co2.config import RunConfig
from p2p_co2.recipes.recipe import Recipe
from p2p_co2.tensors.stages.replica import saved_bytes

_DECODED_BYTES = 4
"""Of a value that has crossed: it is fp32, whatever the codec."""


@dataclass(frozen=True)
class StageSize:
    """Of one stage. ``parameters``: how many are trained; ``parameter_bytes``: of all. ``sequence_shape``: of
    what one sequence sends on, () at the last stage. Of one microbatch: ``activation_bytes`` go on to the
    next stage, before they are encoded; ``graph_bytes``, about, are held for the backward, unless it computes
    again."""

    parameters: int
    parameter_bytes: int
    sequence_shape: tuple[int, ...]
    activation_bytes: int
    graph_bytes: int


def stage_sizes(recipe: Recipe, run: RunConfig) -> list[StageSize]:
    """Each stage's of ``run``, first to last. Draws one batch. Raises ``ConfigError`` as ``in_stages`` and
    ``crossing`` do."""
    stages = recipe.in_stages(run.pipeline.stages)
    inputs, side = stages.microbatch(next(recipe.batches(0, run.pipeline.sequences)))
    shapes = [*stages.crossing(inputs), ()]
    hidden = inputs.to("meta")
    sizes = list[StageSize]()
    for module, shape in zip(stages.outlines(), shapes, strict=True):
        with saved_bytes(module) as saved, torch.device("meta"):
            output = module(hidden)
            if not shape:
                stages.loss(output, side.to("meta"))
        sizes.append(
            StageSize(
                parameters=sum(p.numel() for p in module.parameters() if p.requires_grad),
                parameter_bytes=sum(p.numel() * p.element_size() for p in module.parameters()),
                sequence_shape=shape,
                activation_bytes=_DECODED_BYTES * output.numel() if shape else 0,
                graph_bytes=sum(saved.values()),
            )
        )
        hidden = output.detach().float().requires_grad_()
    return sizes
