"""The model of a run file on this machine: its fragments counted, its inner step measured.

Measured is what a peer does between two steps of the swarm (loss, backward, optimizer), on real batches of
the recipe, for some seconds. The quickest tenth counts: the first steps allocate, and of the others some wait
for other programs."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from p2p_co2.config import OWN_LOOP, RunConfig
from p2p_co2.errors import ConfigError, EnvironmentFault
from p2p_co2.planning.pipeline import StageCost
from p2p_co2.recipes import InnerStep, Recipe, StageSize, load_recipe, stage_sizes
from p2p_co2.recipes.stages import Stages
from p2p_co2.system.machine import cores, peak_memory_bytes
from p2p_co2.tensors.device import (
    await_computed,
    is_accelerator,
    memory_bytes,
    most_used_bytes,
    training_device,
)
from p2p_co2.tensors.fragments import plan_fragments
from p2p_co2.tensors.stages import StageReplica
from p2p_co2.trainer.stages.work import Crossings

LEAST_STEPS = 5
"""From so many on a measure says something; of a minute's two do."""
MOST_SPREAD = 3.0
"""Of the median over the quickest tenth."""


@dataclass(frozen=True)
class StepMeasure:
    """``step_s``: of the inner step (``quickest``). ``tokens``: of one step. ``train_bytes``: at its largest,
    of this process with the model, its gradients and the optimizer; on a GPU, of that."""

    step_s: float
    tokens: int
    train_bytes: float
    how: str


def load_model(run: RunConfig, device: str) -> tuple[Recipe, tuple[int, ...]]:
    """(the recipe with its model on ``device``, values in each fragment). Raises ``ConfigError``."""
    if run.recipe == OWN_LOOP:
        problem = "this run is trained by a program of its own: give --parameters and --step-s"
        raise ConfigError.of_option("--step-s", problem)
    recipe = load_recipe(run.recipe, run.recipe_options, run.seed)
    if run.pipeline.stages > 1:
        recipe.in_stages(run.pipeline.stages)
    plan = plan_fragments(recipe.model, run.fragments)
    recipe.model.to(device)
    return recipe, tuple(fragment.numel for fragment in plan.fragments)


def gpu_memory_bytes(device: str) -> float:
    """What a GPU has in all; 0 if there is none."""
    try:
        return float(memory_bytes(device)[1])
    except (RuntimeError, AssertionError, ValueError):
        return 0.0


def quickest(times_s: Sequence[float]) -> float:
    """The time that a tenth of them do not exceed. Raises ``EnvironmentFault`` for fewer than
    ``LEAST_STEPS``, or two that take a minute, and where they differ more than ``MOST_SPREAD`` times."""
    ordered = sorted(times_s)
    usual_s = statistics.median(ordered)
    least = 2 if sum(ordered) >= 60.0 else LEAST_STEPS
    if len(ordered) < least or usual_s > MOST_SPREAD * ordered[len(ordered) // 10]:
        took = f"{len(ordered)} took {ordered[0]:.2g} to {ordered[-1]:.2g} s"
        raise EnvironmentFault(f"the inner step is not measurable now ({took}): give --step-s, or come again")
    return ordered[len(ordered) // 10]


def measure_step(recipe: Recipe, device: str, batch: int, threads: int) -> StepMeasure:
    """Train for a moment and take the time of each step. ``batch``, ``threads``: 0 for the recipe's own and
    all cores. At least five steps and two seconds are counted; none is begun after a minute, in which two
    are enough. Raises ``EnvironmentFault`` if they say nothing."""
    torch.set_num_threads(threads or cores())
    optimizer = recipe.optimizer(recipe.model.parameters())
    step = InnerStep(recipe, recipe.model, optimizer)
    batches = iter(recipe.batches(0, batch or recipe.default_batch))
    times_s: list[float] = []
    tokens = 0
    began_at = at = time.perf_counter()
    while (taken := step.take(batches)) is not None:
        await_computed(device)
        now = time.perf_counter()
        times_s.append(now - at)
        at = now
        tokens = max(tokens, int(taken.tokens))
        if (len(times_s) > LEAST_STEPS and now - began_at >= 2.0) or now - began_at > 60.0:
            break
    step_s = quickest(times_s)
    where = training_device(device, is_tried=False).words
    threads = torch.get_num_threads()
    how = f"measured here, the quickest tenth of {len(times_s)} steps, {threads} threads, {where}"
    largest_bytes = float(peak_memory_bytes())
    if is_accelerator(device):
        largest_bytes = most_used_bytes(device)
    return StepMeasure(step_s, tokens, largest_bytes, how)


def stage_costs(
    run: RunConfig, step_s: float, device: str, threads: int
) -> tuple[tuple[StageCost, ...], int, str]:
    """(what a microbatch costs in each stage, its tokens, where the seconds come from). ``step_s``: computing
    of one inner step in the largest stage, others by their parameters; 0 measures. Raises ``ConfigError``."""
    pipeline = run.pipeline
    recipe = load_recipe(run.recipe, run.recipe_options, run.seed, pipeline.stages, pipeline.is_tied)
    stages = recipe.in_stages(pipeline.stages)
    sizes = stage_sizes(recipe, run)
    inputs, side = stages.microbatch(next(recipe.batches(0, pipeline.sequences)))
    codecs = pipeline.forward, pipeline.backward, pipeline.backward_critical
    Crossings.of(stages, inputs, side, *codecs)  # as peers do, for its errors
    most = max(size.parameters for size in sizes)
    how = "given"
    if step_s:
        each = [step_s / pipeline.microbatches * size.parameters / most for size in sizes]
        taken = [(seconds / 3, 2 * seconds / 3) for seconds in each]
    else:
        torch.set_num_threads(threads or cores())
        where = training_device(device, is_tried=False).words
        how = f"measured here, {torch.get_num_threads()} threads, {where}"
        taken = _measured_stages(stages, sizes, run, (inputs, side), device)
    costs = tuple(
        StageCost(
            forward_s=forward_s,
            backward_s=backward_s,
            values=pipeline.sequences * math.prod(size.sequence_shape) if size.sequence_shape else 0,
            side_bytes=8 * side.numel(),
            parameters=size.parameters,
            entry_bytes=size.graph_bytes,
        )
        for size, (forward_s, backward_s) in zip(sizes, taken, strict=True)
    )
    return costs, stages.tokens(side), how


def _measured_stages(
    stages: Stages, sizes: Sequence[StageSize], run: RunConfig, like: tuple[Tensor, Tensor], device: str
) -> list[tuple[float, float]]:
    """Seconds forward and back; of middle stages the first is measured, the others by their parameters."""
    last = len(stages) - 1
    taken = {
        stage: _measured(stages, sizes, run, stage, like, device) for stage in sorted({0, min(1, last), last})
    }
    for stage in range(2, last):
        share = sizes[stage].parameters / sizes[1].parameters
        taken[stage] = (share * taken[1][0], share * taken[1][1])
    return [taken[stage] for stage in range(len(stages))]


def _measured(
    stages: Stages,
    sizes: Sequence[StageSize],
    run: RunConfig,
    stage: int,
    like: tuple[Tensor, Tensor],
    device: str,
) -> tuple[float, float]:
    """Of at least five, for some two seconds (``quickest``); what allocates first is thrown away."""
    is_last = stage == len(stages) - 1
    inputs, side = (tensor.to(device) for tensor in like)
    if stage:
        shape = len(inputs), *sizes[stage - 1].sequence_shape
        inputs = torch.full(shape, 0.5, dtype=torch.float32, device=device)
    module = stages.build(run.seed, stage).to(device)
    replica = StageReplica(module, is_first=stage == 0, loss=stages.loss if is_last else None)
    times: list[tuple[float, float]] = []
    began_at = time.perf_counter()
    while len(times) < 7 or time.perf_counter() - began_at < 1.0:
        at = time.perf_counter()
        if is_last:
            replica.last(inputs, side, 1)
            whole_s = _now(device) - at
            times.append((whole_s / 3, 2 * whole_s / 3))
        else:
            output = replica.forward(len(times), inputs)
            middle = _now(device)
            replica.backward(len(times), torch.ones_like(output), 1, 0.0)
            times.append((middle - at, _now(device) - middle))
    forward, backward = zip(*times[2:], strict=True)
    return quickest(forward), quickest(backward)


def _now(device: str) -> float:
    await_computed(device)
    return time.perf_counter()
