"""One peer of torchft's side of ``grid.py``, in torchft's own environment.

    TORCHFT_ENV/bin/python benchmarks/grid_torchft.py SYSTEM INDEX ADDRESS LIGHTHOUSE STEPS STEP_S

SYSTEM is ``diloco`` (the model is one fragment, as in its example) or ``streaming`` (a fragment for each of
the model's modules, and an outer optimizer for each). ADDRESS is this machine's. Prints one line of JSON
after each outer step, until somebody ends it.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
import time
from datetime import timedelta
from typing import Any

import torch
from grid_recipe import Training

PEERS = 4
PATIENCE = timedelta(seconds=600)
"""For everything: its own timeouts, of 60 s and less, would end the rounds of a slow line."""
OUTER = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
"""Of its example, as in the papers."""
DIGEST_EVERY = 9973
"""A sample of the agreed values is compared: to read them all would stop the training."""


def main(system: str, index: str, address: str, lighthouse: str, steps: str, step_s: str) -> None:
    # torchft announces the machine's name and looks it up; these machines have addresses only.
    socket.gethostname = lambda: address
    os.environ["GLOO_SOCKET_IFNAME"] = "lan0"
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo

    torch.set_num_threads(1)
    training = Training(float(step_s))
    inner = training.optimizer(training.model.parameters())
    clock = {"train_s": 0.0, "began_at": 0.0}

    def ended(*of_the_hook: Any) -> None:
        clock["train_s"] += time.monotonic() - clock["began_at"]

    inner.register_step_post_hook(ended)
    store = torch.distributed.TCPStore(address, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=PATIENCE), min_replica_size=PEERS, use_async_quorum=False,
        init_sync=False,  # all models are the same
        load_state_dict=lambda state: None, state_dict=dict, replica_id=f"grid_{index}", hostname=address,
        timeout=PATIENCE, quorum_timeout=PATIENCE, connect_timeout=PATIENCE, rank=0, world_size=1,
        store_addr=address, store_port=store.port, lighthouse_addr=lighthouse,
    )  # fmt: skip
    fragments = list(training.model) if system == "streaming" else [training.model]
    outer = [torch.optim.SGD(fragment.parameters(), **OUTER) for fragment in fragments]
    delay = int(steps) // len(fragments) - 1 if system == "streaming" else 0
    manager.start_quorum()  # all are here, and connected, when the first step begins
    manager.allreduce(torch.zeros(1)).wait()
    tokens, outer_steps, syncs = 0, 0, 0
    with DiLoCo(manager, fragments, inner, outer, sync_every=int(steps), fragment_sync_delay=delay) as diloco:
        started_at, told_s = time.monotonic(), 0.0
        for count, batch in enumerate(training.batches(1 + int(index)), 1):
            clock["began_at"] = time.monotonic()
            inner.zero_grad()
            training.loss(training.model, batch).backward()
            inner.step()
            tokens += batch.numel()
            syncs += count % (int(steps) // len(fragments)) == 0
            if manager.current_step() == outer_steps:
                continue
            outer_steps, now = manager.current_step(), time.monotonic()
            agreed = [values for one in diloco._fragments for values in one.original_parameters.values()]
            sample = torch.cat([values.flatten()[::DIGEST_EVERY] for values in agreed])
            figures = {
                "outer_steps": outer_steps, "syncs": syncs, "inner_steps": count, "tokens": tokens,
                "train_s": clock["train_s"], "wall_s": now - started_at - told_s, "at": time.time(),
                "delay_steps": delay, "fragments": len(fragments),
                "digest": hashlib.sha256(sample.numpy().tobytes()).hexdigest()[:16],
            }  # fmt: skip
            print(json.dumps(figures), flush=True)
            told_s += time.monotonic() - now


if __name__ == "__main__":
    main(*sys.argv[1:7])
