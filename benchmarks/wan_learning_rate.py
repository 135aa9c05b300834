"""Which learning rate is fair to the Optimizer that ``wan_loss.py`` compares with: AdamW on mean gradients.

    python benchmarks/wan_learning_rate.py [--times 1 2 4 8] [--steps 12]

One process plays what hivemind's Optimizer does on a slow line without the line: one AdamW step per round, on
the mean gradient of all peers' batches of a round, applied a round late (``delay_grad_averaging``,
``delay_optimizer_step``). A ``--share`` of the micro-batches stands for all: their mean is nearly the same.
Prints the held-out loss after every step, for each multiple of the recipe's own rate.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.wan_gpt_recipe import make

MICRO_BATCHES = 86
"""Of four peers in a round of 10.7 s, one each half second."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", nargs="+", type=float, default=[1.0, 2.0, 4.0, 8.0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--share", type=float, default=0.25)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for times in options.times:
        losses = losses_of(times, options.steps, max(1, round(options.share * MICRO_BATCHES)))
        print(json.dumps({"times": times, "held_out": losses}), flush=True)


def losses_of(times: float, steps: int, micro_batches: int) -> list[float]:
    """Held-out loss after each step with ``times`` the recipe's learning rate."""
    recipe = make(step_s=0.0)
    assert recipe.held_out is not None
    optimizer = recipe.optimizer(recipe.model.parameters())
    for group in optimizer.param_groups:
        group["lr"] *= times
    batches = recipe.batches(1, recipe.default_batch)
    parameters, losses = list(recipe.model.parameters()), []
    late: list[torch.Tensor] = []
    for _ in range(steps):
        for _ in range(micro_batches):
            (recipe.loss(recipe.model, next(batches)) / micro_batches).backward()
        mean = [parameter.grad for parameter in parameters]
        for parameter, gradient in zip(parameters, late or mean, strict=True):
            parameter.grad = gradient
        optimizer.step()
        for parameter in parameters:
            parameter.grad = None
        late = [gradient for gradient in mean if gradient is not None]
        losses.append(round(recipe.held_out(recipe.model), 4))
    return losses


if __name__ == "__main__":
    main()
