"""One peer of the comparison in ``wan.py``: the same recipe, trained with hivemind's own ``Optimizer``.

    python benchmarks/wan_hivemind.py FOLDER INDEX HOST SEED_MADDR JOB.json

INDEX 0 is the first peer of its DHT and trains as well. Gradients are accumulated until the swarm has a
round's worth of samples, then averaged in 8 bits and applied in the background (``delay_grad_averaging``,
``delay_optimizer_step``, ``offload_optimizer``), which is what its documentation advises for slow links.
Prints one line of JSON per second, and the DHT's address in a first one. The held-out loss of this peer's
parameters is measured every ``measure_every_s`` of the job; that time does not count.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import hivemind
import torch
from hivemind.compression import Uniform8BitQuantization

from p2p_co2.recipes import load_recipe


def main(folder: str, index: str, host: str, seed: str, job_file: str) -> None:
    job = json.loads(Path(job_file).read_text())
    torch.set_num_threads(1)
    recipe = load_recipe(job["recipe"], job["options"], 0)

    def scaled(parameters: Any) -> torch.optim.Optimizer:
        made = recipe.optimizer(parameters)
        for group in made.param_groups:
            group["lr"] *= job["learning_rate_times"]
        return made

    dht = hivemind.DHT(
        initial_peers=[seed] if seed != "-" else [], host_maddrs=[f"/ip4/{host}/tcp/0"], start=True,
        startup_timeout=60, identity_path=str(Path(folder) / f"identity{index}"),
    )  # fmt: skip
    print(json.dumps({"maddr": str(dht.get_visible_maddrs()[0])}), flush=True)
    batch_size = recipe.default_batch
    optimizer = hivemind.Optimizer(
        dht=dht, run_id="wan", batch_size_per_step=batch_size, target_batch_size=job["target_batch_size"],
        params=list(recipe.model.parameters()), optimizer=scaled,
        offload_optimizer=True, delay_optimizer_step=True, delay_grad_averaging=True,
        grad_compression=Uniform8BitQuantization(),
        state_averaging_compression=Uniform8BitQuantization(),
        matchmaking_time=job["matchmaking_s"], averaging_timeout=job["averaging_timeout_s"],
        next_chunk_timeout=job["next_chunk_timeout_s"],
        tracker_opts={"min_refresh_period": 1.0, "default_refresh_period": 1.0}, verbose=False,
        average_state_every=10**6,
    )  # fmt: skip
    time.sleep(max(0.0, job["begin_at"] - time.time()))
    began_at, train_s, tokens, told_at, measured_at = time.monotonic(), 0.0, 0, 0.0, 0.0
    for batch in recipe.batches(1 + int(index), batch_size):
        step_at = time.monotonic()
        loss = recipe.loss(recipe.model, batch)
        loss.backward()
        entered_at = time.monotonic()
        train_s += entered_at - step_at
        optimizer.step()
        optimizer.zero_grad()
        tokens += recipe.tokens(batch)
        wall_s = time.monotonic() - began_at
        if wall_s - told_at >= 1.0 or wall_s >= job["seconds"]:
            told_at = wall_s
            figures = {"tokens": tokens, "train_s": train_s, "wall_s": wall_s, "epoch": optimizer.local_epoch,
                       "peers": optimizer.tracker.global_progress.num_peers}  # fmt: skip
            if wall_s >= job["seconds"] or wall_s - measured_at >= job["measure_every_s"]:
                measured_at, paused_at = wall_s, time.monotonic()
                figures["loss"] = recipe.held_out(recipe.model)
                began_at += time.monotonic() - paused_at
            print(json.dumps(figures), flush=True)
        if wall_s >= job["seconds"]:
            break
    time.sleep(2.0)
    optimizer.shutdown()
    dht.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:6])
