"""How long the training thread is held by a fragment's snapshot and by its merge, as JSON.

    python benchmarks/live.py [--device cuda] [--layers 12] [--width 768] [--repeats 20]

The model is byte-gpt in fp32, in four fragments. Each repeat begins with an idle device, so what is timed is
the copy alone and not the steps that were queued before it: ``snapshot_ms`` until the values are in host
memory, ``merge_ms`` until the call returns (training may go on) and ``merge_done_ms`` until the device has
done it; all medians, of one fragment. ``pinned_ms``: the same bytes into pinned memory, what the line to the
device can do. ``step_ms``: an inner step of the recipe, for scale.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from p2p_co2.recipes import load_recipe
from p2p_co2.tensors.fragments import LiveParameters, large_tensor, plan_fragments
from p2p_co2.tensors.outer import Merge

FRAGMENTS = 4


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    shape = {"layers": options.layers, "width": options.width, "heads": options.heads}
    recipe = load_recipe("byte-gpt", shape, 0)
    model = recipe.model.to(options.device)
    optimizer = recipe.optimizer(model.parameters())
    batches = recipe.batches(0, recipe.default_batch)
    plan = plan_fragments(model, FRAGMENTS)
    live, numel = LiveParameters(model, plan), plan.fragments[1].numel
    is_gpu = torch.device(options.device).type == "cuda"

    def wait() -> None:
        if is_gpu:
            torch.cuda.synchronize(options.device)

    def timed_ms(call: Callable[[], object]) -> tuple[float, float]:
        """Until the call returns, and until the device has nothing left to do."""
        returned, done = [], []
        for _ in range(options.repeats):
            wait()
            start = time.perf_counter()
            call()
            returned.append(1e3 * (time.perf_counter() - start))
            wait()
            done.append(1e3 * (time.perf_counter() - start))
        return round(median(returned), 3), round(median(done), 3)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        recipe.loss(model, next(batches)).backward()
        optimizer.step()

    kept, merge = large_tensor(numel), Merge(1.0, torch.zeros(numel))
    step()
    merging_ms = timed_ms(lambda: live.merge_(1, merge))
    report = {
        "device": torch.cuda.get_device_name(options.device) if is_gpu else options.device,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "fragment_mb": round(4e-6 * numel, 1),
        "step_ms": timed_ms(step)[1],
        "snapshot_ms": timed_ms(lambda: live.snapshot(1, kept))[1],
        "snapshot_of_new_memory_ms": timed_ms(lambda: live.snapshot(1))[1],
        "merge_ms": merging_ms[0],
        "merge_done_ms": merging_ms[1],
    }
    if is_gpu:
        there, pinned = torch.randn(numel, device=options.device), torch.empty(numel, pin_memory=True)
        report["pinned_ms"] = timed_ms(lambda: pinned.copy_(there))[1]
        report["unpinned_ms"] = timed_ms(lambda: kept.copy_(there))[1]
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
