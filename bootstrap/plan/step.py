"""The model of a run file on this machine: its fragments counted, its inner step measured.

Measured is what a peer does between two steps of the swarm (loss, backward, optimizer), on real batches of
the recipe, for some seconds; the first steps, which allocate, are thrown away."""

from __future__ import annotations

import os
import resource
import statistics
import time
from dataclasses import dataclass

import torch

from p2p_co2.config import OWN_LOOP, RunConfig
from p2p_co2.errors import ConfigError
from p2p_co2.recipes import Recipe, load_recipe
from p2p_co2.tensors.fragments import plan_fragments


@dataclass(frozen=True)
class StepMeasure:
    """``step_s``: median of the inner step. ``tokens``: of one step. ``train_bytes``: this process, with the
    model, its gradients and the optimizer, at its largest."""

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
    try:
        recipe.model.to(device)
    except (RuntimeError, AssertionError):  # torch's words for a device that is not there
        raise ConfigError.of_option("--device", f"torch cannot use {device!r} here; use cpu") from None
    return recipe, tuple(fragment.numel for fragment in plan.fragments)


def measure_step(recipe: Recipe, device: str, batch: int, threads: int) -> StepMeasure:
    """Train for a moment and take the time of each step. ``batch``, ``threads``: 0 for the recipe's own and
    all cores. At least five steps and two seconds are counted; none is begun after twelve seconds."""
    torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
    optimizer = recipe.optimizer(recipe.model.parameters())
    times_s: list[float] = []
    tokens = 0
    began_at = time.perf_counter()
    for data in recipe.batches(0, batch or recipe.default_batch):
        at = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        recipe.loss(recipe.model, data).backward()  # type: ignore[no-untyped-call]  # so torch declares it
        optimizer.step()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        now = time.perf_counter()
        times_s.append(now - at)
        tokens = recipe.tokens(data)
        counted = times_s[3:]
        if (len(counted) >= 5 and sum(counted) >= 2.0) or now - began_at > 12.0:
            break
    counted = times_s[3:] or times_s[-1:]
    how = f"measured here, median of {len(counted)} steps, {torch.get_num_threads()} threads, {device}"
    largest_bytes = 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return StepMeasure(statistics.median(counted), tokens, largest_bytes, how)
