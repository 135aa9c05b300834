"""One peer of what we are held against, per process: hivemind's ``Optimizer``, hivemind's averager, torchft.

    python benchmarks/rivals.py --worker optimizer FOLDER INDEX HOST SEED_MADDR JOB.json
    python benchmarks/rivals.py --worker averager CODEC VALUES SIDE INDEX SEED_MADDR
    TORCHFT_ENV/bin/python benchmarks/rivals.py --worker torchft SYSTEM INDEX ADDRESS LIGHTHOUSE JOB.json

Each is set as its own documentation advises for slow lines, and says so where it is. The first two print
their DHT's address in a first line of JSON. Imports nothing of ours at the top: torchft has an environment of
its own.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from recipes import Tables

PEERS = int(os.environ.get("RIVALS", "4"))
HIVEMIND: dict[str, dict[str, Any]] = {
    "hivemind": {"min_matchmaking_time": 1.0, "request_timeout": 0.5, "target_group_size": PEERS},
    "hivemind-default": {"min_matchmaking_time": 5.0, "request_timeout": 3.0, "target_group_size": None},
}
"""Its averager tuned to the group (the window ends when the group is full), and as it comes."""
PATIENCE = timedelta(seconds=600)
"""For everything of torchft: its own timeouts, of 60 s and less, would end the rounds of a slow line."""
OUTER = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
"""Of torchft's example, as in the papers."""
DIGEST_EVERY = 9973
"""A sample of the agreed values is compared: to read them all would stop the training."""


def say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


# ---- hivemind's Optimizer


def optimizer(folder: str, index: str, host: str, seed: str, job_file: str) -> None:
    """Gradients are accumulated for a round's worth of samples, averaged in 8 bits, applied in the
    background. A line of JSON a second; what measuring the held-out loss takes is left out."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    import hivemind
    from hivemind.compression import Uniform8BitQuantization

    from p2p_co2.recipes import load_recipe

    job = json.loads(Path(job_file).read_text())
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
    say({"maddr": str(dht.get_visible_maddrs()[0])})
    optimizer = hivemind.Optimizer(
        dht=dht, run_id="wan", batch_size_per_step=recipe.default_batch,
        target_batch_size=job["target_batch_size"], params=list(recipe.model.parameters()), optimizer=scaled,
        offload_optimizer=True, delay_optimizer_step=True, delay_grad_averaging=True,
        grad_compression=Uniform8BitQuantization(), state_averaging_compression=Uniform8BitQuantization(),
        matchmaking_time=3.0, averaging_timeout=60.0,
        next_chunk_timeout=30.0,  # its default, the matchmaking time, ends transfers on such lines
        tracker_opts={"min_refresh_period": 1.0, "default_refresh_period": 1.0}, verbose=False,
        average_state_every=10**6,
    )  # fmt: skip
    time.sleep(max(0.0, job["begin_at"] - time.time()))
    began_at, train_s, tokens, told_at, measured_at = time.monotonic(), 0.0, 0, 0.0, 0.0
    for batch in recipe.batches(1 + int(index), recipe.default_batch):
        step_at = time.monotonic()
        recipe.loss(recipe.model, batch).backward()
        train_s += time.monotonic() - step_at
        optimizer.step()
        optimizer.zero_grad()
        tokens += recipe.tokens(batch)
        wall_s = time.monotonic() - began_at
        is_last = wall_s >= job["seconds"]
        if wall_s - told_at >= 1.0 or is_last:
            told_at = wall_s
            figures = {"tokens": tokens, "train_s": train_s, "wall_s": wall_s, "epoch": optimizer.local_epoch}
            if is_last or wall_s - measured_at >= job["measure_every_s"]:
                measured_at, paused_at = wall_s, time.monotonic()
                figures["loss"] = recipe.held_out(recipe.model) if recipe.held_out else 0.0
                began_at += time.monotonic() - paused_at
            say(figures)
        if is_last:
            break
    time.sleep(2.0)
    optimizer.shutdown()
    dht.shutdown()


# ---- hivemind's averager


def averager(codec: str, values: str, side: str, index: str, address: str) -> None:
    """Answers ``averaging``'s lines: a round is prepared, begun and checked."""
    import hivemind
    import scipy.optimize  # noqa: F401  (its averager begins with it loaded)
    from averaging import TENSORS, noise_of, rms_error
    from hivemind.averaging import DecentralizedAverager
    from hivemind.compression import Float16Compression, Uniform8BitQuantization

    clock = multiprocessing.Array("d", 2)  # reduction began; bytes encoded for others

    class Averager(DecentralizedAverager):  # type: ignore[misc]
        async def _run_allreduce_inplace_(self, *arguments: Any, **settings: Any) -> None:
            clock[0] = time.monotonic()
            await super()._run_allreduce_inplace_(*arguments, **settings)

    base: Any = Float16Compression if codec == "fp16" else Uniform8BitQuantization

    class Counting(base):  # type: ignore[misc]
        def compress(self, *arguments: Any, **settings: Any) -> Any:
            message = super().compress(*arguments, **settings)
            with clock.get_lock():
                clock[1] += len(message.buffer)
            return message

    dht = hivemind.DHT(initial_peers=[] if address == "-" else [address], start=True)
    averager = Averager(
        [torch.zeros(int(values)) for _ in range(TENSORS)], dht, start=True, prefix="benchmark",
        compression=Counting(), **HIVEMIND[side],
    )  # fmt: skip
    say({"address": str(dht.get_visible_maddrs()[0])})
    for line in sys.stdin:
        turn = int(line)
        with averager.get_tensors() as tensors:
            for tensor, noise in zip(tensors, noise_of(turn, int(index), int(values)), strict=True):
                tensor.copy_(noise)
        clock[0] = clock[1] = 0.0
        say({"prepared": True})
        sys.stdin.readline()
        gathered = averager.step(allow_retries=False)
        ended_at = time.monotonic()
        # The answers, as large as the questions, are encoded where we cannot count.
        say({"group": len(gathered or {}), "grouped_at": clock[0], "averaged_at": ended_at,
             "ended_at": ended_at, "encode_s": 0.0, "sent_bytes": 2 * clock[1]})  # fmt: skip
        sys.stdin.readline()
        with averager.get_tensors() as tensors:
            error = rms_error(tensors, turn, 1.0)
        say({"digest": "", "error": error, "more_cpu_s": 0.0})
    averager.shutdown()
    dht.shutdown()


# ---- torchft


def torchft(system: str, index: str, address: str, lighthouse: str, job_file: str) -> None:
    """``diloco``: the model is one fragment, as in torchft's example. ``streaming``: a fragment and an outer
    optimizer for each of the model's modules, and the longest delay that it takes. A line of JSON after each
    outer step, until somebody ends it."""
    # torchft announces the machine's name and looks it up; these machines have addresses only.
    socket.gethostname = lambda: address
    os.environ["GLOO_SOCKET_IFNAME"] = "lan0"
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo

    job = json.loads(Path(job_file).read_text())
    training, steps = Tables(**job["options"]), int(job["steps"])
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
    delay = steps // len(fragments) - 1 if system == "streaming" else 0
    manager.start_quorum()  # all are here, and connected, when the first step begins
    manager.allreduce(torch.zeros(1)).wait()
    tokens, outer_steps, syncs = 0, 0, 0
    with DiLoCo(manager, fragments, inner, outer, sync_every=steps, fragment_sync_delay=delay) as diloco:
        started_at, told_s = time.monotonic(), 0.0
        for count, batch in enumerate(training.batches(1 + int(index), training.batch), 1):
            clock["began_at"] = time.monotonic()
            inner.zero_grad()
            training.loss(training.model, batch).backward()
            inner.step()
            tokens += batch.numel()
            syncs += count % (steps // len(fragments)) == 0
            if manager.current_step() == outer_steps:
                continue
            outer_steps, now = manager.current_step(), time.monotonic()
            agreed = [values for one in diloco._fragments for values in one.original_parameters.values()]
            sample = torch.cat([values.flatten()[::DIGEST_EVERY] for values in agreed])
            say({
                "outer_steps": outer_steps, "failed": syncs - outer_steps, "inner_steps": count,
                "tokens": tokens, "train_s": clock["train_s"], "wall_s": now - started_at - told_s,
                "at": time.time(), "delay_steps": delay, "fragments": len(fragments),
                "digest": hashlib.sha256(sample.numpy().tobytes()).hexdigest()[:16],
            })  # fmt: skip
            told_s += time.monotonic() - now


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"optimizer": optimizer, "averager": averager, "torchft": torchft}[sys.argv[2]](*sys.argv[3:])
