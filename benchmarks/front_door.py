"""The front door with models of ``transformers``: what it costs, and whether it helps. Prints JSON.

    python benchmarks/front_door.py [--parts trainer step large] [--pairs 5] [--seconds 60] [--layers 12]

``trainer``: a small GPT-2 under ``transformers.Trainer``, a core for each process. ``--pairs`` times in turn:
two peers with the callback for ``--seconds``, then the same two Trainers without it, for as many steps.
``rate``: steps per second in the swarm over those alone, the pair's mean; the bar is 0.97 in the median.
``loss``: held out, of the agreed parameters, against the mean of the two that trained alone on as many tokens
as one peer did; the bar is lower.

``step``: what joining costs a step on a processor, torch imported first and nobody else in the run: a small
ResNet on 64 images of 32 x 32, and a GPT with a vocabulary of 16k. ``--pairs`` times in turn a process that
has joined and one that has not. ``seconds``, ``cpu`` (of the training thread) and ``faults`` (of pages) are
those of the median step joined over plain, the median of the pairs; the bar is 1.02 for the first two.

``large``: GPT-2 with 124 million parameters (``--layers 12``), AdamW, one core for each of two peers, and a
third that joins late. The bars:

    copies       memory beyond training, in copies of the parameters in fp32:  4
                 ((swarm - alone) of the model - (swarm - alone) of a tiny one) / (4 * parameters), of VmHWM
    join_s       of the late peer, on the loopback: 15
    longest_s    that a training step stood still for the exchange: 0.3; ``longest_cpu_s`` is the part of it
                 that the thread worked, which is all of it on a quiet machine

The machine has to be quiet and to have a core for each: others' load is in every figure but the memory.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from json_workers import answer_of, say, spawn

from p2p_co2.config import OWN_LOOP, ClockConfig, RunConfig
from p2p_co2.recipes.corpus import embedded_corpus
from p2p_co2.system.memory import use_one_arena
from p2p_co2.testing import local_swarm

BARS = {"rate": 0.97, "step": 1.02, "copies": 4.0, "join_s": 15.0, "longest_s": 0.3}
CORES = sorted(os.sched_getaffinity(0))
CONTEXT, BATCH, WARM_STEPS = 128, 8, 5
LARGE_WORDS, LARGE_STEPS_ALONE = 32, 4
STEPS, STEP_VOCABULARY = 60, 16384


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = ("trainer", "step", "large")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=60.0, help="of a pair's training in the swarm")
    parser.add_argument("--large-seconds", type=float, default=120.0)
    parser.add_argument("--layers", type=int, default=12, help="of the large model")
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.worker:
        {"trainer": _trainer, "step": _step, "large": _large}[options.worker[0]](*options.worker[1:])
        return
    answer: dict[str, Any] = {
        "at": time.strftime("%F %R"), "platform": platform.platform(), "cpus": os.cpu_count(),
        "load": os.getloadavg(), "bars": BARS,
    }  # fmt: skip
    if "trainer" in options.parts:
        answer["trainer"] = _run_trainers(options.pairs, options.seconds)
    if "step" in options.parts:
        answer["step"] = {kind: _run_steps(kind, options.pairs) for kind in ("resnet", "gpt")}
    if "large" in options.parts:
        answer["large"] = _run_large(options.layers, options.large_seconds)
    answer["load_after"] = os.getloadavg()
    print(json.dumps(answer, indent=2))


# ---- the Trainer


def _run_trainers(pairs: int, seconds: float) -> dict[str, Any]:
    rows = []
    clock = ClockConfig(mode="time", round_s=5.0, rounds=max(2, round(seconds / 5)))
    run = RunConfig(name="trainer", recipe=OWN_LOOP, fragments=4, clock=clock)
    for pair in range(pairs):
        with local_swarm(run=run) as swarm:
            places = [str(swarm.folder / f"peer-{core}") for core in range(2)]
            workers = [
                spawn(__file__, "trainer", str(core), str(pair), place, swarm.ticket)
                for core, place in enumerate(places)
            ]
            peers = [answer_of(worker) for worker in workers]
        with tempfile.TemporaryDirectory() as folder:
            workers = [
                spawn(__file__, "trainer", str(core), str(pair), folder, str(peer["steps"]))
                for core, peer in enumerate(peers)
            ]
            alone = [answer_of(worker) for worker in workers]
        rate = statistics.mean(one["rate"] for one in peers) / statistics.mean(one["rate"] for one in alone)
        rows.append({"rate": rate, "peers": peers, "alone": alone})
        print(json.dumps(rows[-1]), file=sys.stderr)
    losses = [
        [statistics.mean(one["loss"] for one in row[kind]) for row in rows] for kind in ("peers", "alone")
    ]
    rate = statistics.median(row["rate"] for row in rows)
    return {
        "rate": rate, "within_bar": rate >= BARS["rate"], "loss_swarm": statistics.median(losses[0]),
        "loss_alone": statistics.median(losses[1]),
        "is_lower": [swarm < alone for swarm, alone in zip(*losses, strict=True)], "pairs": rows,
    }  # fmt: skip


def _trainer(core: str, seed: str, folder: str, ticket_or_steps: str) -> None:
    """A peer, or a Trainer alone, on a core of its own."""
    os.sched_setaffinity(0, {CORES[int(core) % len(CORES)]})
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        Trainer,
        TrainerCallback,
        TrainingArguments,
        set_seed,
    )

    import p2p_co2 as co2

    stepped_at = list[float]()

    class Clock(TrainerCallback):  # type: ignore[misc]  # a library without types
        """When each step began, which is after the exchange of the one before."""

        def on_step_begin(self, *given: Any, **named: Any) -> None:
            stepped_at.append(time.monotonic())

    corpus = embedded_corpus(2_000_000)
    rows, held_out = (
        one[: len(one) // CONTEXT * CONTEXT].view(-1, CONTEXT).long()
        for one in (corpus.train, corpus.held_out[: 64 * CONTEXT])
    )
    set_seed(int(seed))
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=256, n_positions=CONTEXT, n_embd=128, n_layer=4, n_head=4, resid_pdrop=0, embd_pdrop=0,
            attn_pdrop=0, bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip
    is_alone = ticket_or_steps.isdecimal()
    callbacks = [] if is_alone else [
        co2.integrations.transformers.SwarmCallback(ticket_or_steps, folder=folder, min_peers=2)
    ]  # fmt: skip
    args = TrainingArguments(
        folder, max_steps=int(ticket_or_steps) if is_alone else 10**6, per_device_train_batch_size=BATCH,
        learning_rate=1e-3, lr_scheduler_type="constant_with_warmup", warmup_steps=20, use_cpu=True,
        save_strategy="no", report_to="none", disable_tqdm=True, logging_steps=100, data_seed=int(core),
    )  # fmt: skip
    data = [{"input_ids": row, "labels": row} for row in rows]
    trainer = Trainer(model, args, train_dataset=data, callbacks=[*callbacks, Clock()])
    trainer.train()
    with torch.no_grad():
        loss = model.eval()(input_ids=held_out, labels=held_out).loss.item()
    steps = len(stepped_at) - 1 - WARM_STEPS
    rate = steps / (stepped_at[-1] - stepped_at[WARM_STEPS])
    say({"rate": rate, "loss": loss, "steps": trainer.state.global_step})


# ---- a step


def _run_steps(kind: str, pairs: int) -> dict[str, Any]:
    run = RunConfig(name="step", recipe=OWN_LOOP, clock=ClockConfig(mode="time", round_s=5.0, rounds=0))
    rows = []
    for _ in range(pairs):
        with local_swarm(run=run) as swarm:
            joined = answer_of(spawn(__file__, "step", kind, str(swarm.folder / "peer"), swarm.ticket))
        rows.append({"joined": joined, "plain": answer_of(spawn(__file__, "step", kind))})
        print(kind, json.dumps(rows[-1]), file=sys.stderr)
    ratios = {
        name: statistics.median(row["joined"][name] / max(1e-9, row["plain"][name]) for row in rows)
        for name in ("seconds", "cpu", "faults", "peak_bytes")
    }
    return {**ratios, "within_bar": max(ratios["seconds"], ratios["cpu"]) <= BARS["step"], "pairs": rows}


class _Block(torch.nn.Module):
    """Two convolutions of a ResNet and the way round them."""

    def __init__(self, ins: int, outs: int, stride: int) -> None:
        super().__init__()
        self.path = torch.nn.Sequential(
            torch.nn.Conv2d(ins, outs, 3, stride, 1, bias=False), torch.nn.BatchNorm2d(outs), torch.nn.ReLU(),
            torch.nn.Conv2d(outs, outs, 3, 1, 1, bias=False), torch.nn.BatchNorm2d(outs),
        )  # fmt: skip
        self.round = torch.nn.Conv2d(ins, outs, 1, stride, bias=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.path(images) + self.round(images))


def _step(kind: str, folder: str = "", ticket: str = "") -> None:
    import resource

    import p2p_co2 as co2

    nn = torch.nn
    torch.manual_seed(0)
    if kind == "resnet":
        blocks = _Block(32, 32, 1), _Block(32, 64, 2), _Block(64, 128, 2)
        ends = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)
        model = nn.Sequential(nn.Conv2d(3, 32, 3, 1, 1), *blocks, *ends)
        given, wanted = torch.randn(64, 3, 32, 32), torch.randint(0, 10, (64,))
    else:
        layer = nn.TransformerEncoderLayer(128, 4, 512, 0.0, batch_first=True)
        layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        model = nn.Sequential(
            nn.Embedding(STEP_VOCABULARY, 128), layers, nn.Linear(128, STEP_VOCABULARY), nn.Flatten(0, 1)
        )
        given, wanted = (torch.randint(0, STEP_VOCABULARY, (4, 64)) for _ in range(2))
        wanted = wanted.flatten()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    swarm = co2.join(model, optimizer, run=ticket, folder=folder, board=False) if ticket else None
    figures = list[tuple[float, float, float]]()
    for _ in range(STEPS):
        began = time.monotonic(), time.thread_time(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        loss: torch.Tensor = nn.functional.cross_entropy(model(given), wanted)
        loss.backward()  # type: ignore[no-untyped-call]
        if swarm is None:
            optimizer.step()
            optimizer.zero_grad()
        else:
            swarm.step(loss, tokens=len(given))
        ended = time.monotonic(), time.thread_time(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        figures.append((ended[0] - began[0], ended[1] - began[1], ended[2] - began[2]))
    seconds, cpu, faults = (statistics.median(column) for column in zip(*figures[WARM_STEPS:], strict=True))
    told = {"seconds": seconds, "cpu": cpu, "faults": faults, "peak_bytes": _peak_bytes()}
    if swarm is not None:
        swarm.leave()
    say(told)


# ---- a large model


def _run_large(layers: int, seconds: float) -> dict[str, Any]:
    alone = {size: answer_of(spawn(__file__, "large", str(size), "0"))["peak_bytes"] for size in (layers, 0)}
    tiny = _large_swarm(0, 20.0, is_late=False)
    large = _large_swarm(layers, seconds, is_late=True)
    peak, tiny_peak = (max(one["peak_bytes"] for one in each[:2]) for each in (large, tiny))
    copy_bytes = 4 * large[0]["parameters"]
    copies = (peak - alone[layers] - (tiny_peak - alone[0])) / copy_bytes
    stops = {name: max(one[name] for one in large[:2]) for name in ("longest_s", "longest_cpu_s")}
    return {
        "parameters": large[0]["parameters"], "copies": copies, "join_s": large[2]["join_s"], **stops,
        "alone_bytes": alone, "workers": large, "within_bars": {
            "copies": copies <= BARS["copies"], "join_s": large[2]["join_s"] <= BARS["join_s"],
            "longest_s": stops["longest_s"] <= BARS["longest_s"],
        },
    }  # fmt: skip


def _large_swarm(layers: int, seconds: float, is_late: bool) -> list[dict[str, Any]]:
    """Two peers, and the late one, which comes in the middle. The run ends when they all leave."""
    clock = ClockConfig(mode="time", round_s=max(2.0, seconds / 6), rounds=0)
    run = RunConfig(name="large", recipe=OWN_LOOP, fragments=4, clock=clock)
    with local_swarm(run=run) as swarm:

        def peer(number: int) -> Any:
            return spawn(__file__, "large", str(layers), str(number), str(swarm.folder / f"peer-{number}"),
                         swarm.ticket)  # fmt: skip

        workers = [peer(0), peer(1)]
        for worker in workers:
            answer_of(worker)  # it trains
        time.sleep(seconds / 2)
        if is_late:
            workers.append(peer(2))
            answer_of(workers[2])
        time.sleep(seconds / 2)
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.close()
        return [answer_of(worker) for worker in workers]


def _large(layers: str, core: str, folder: str = "", ticket: str = "") -> None:
    os.sched_setaffinity(0, {CORES[int(core) % len(CORES)]})
    from transformers import GPT2Config, GPT2LMHeadModel

    import p2p_co2 as co2

    use_one_arena()
    torch.manual_seed(0)
    size = (
        {"n_layer": int(layers)}
        if int(layers)
        else {"n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 64}
    )
    config = GPT2Config(**size, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, use_cache=False)
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    draw = torch.Generator().manual_seed(int(core))

    def inner_step() -> torch.Tensor:
        words = torch.randint(0, config.vocab_size, (1, LARGE_WORDS), generator=draw)
        with torch.autocast("cpu", torch.bfloat16):
            loss: torch.Tensor = model(input_ids=words, labels=words).loss
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    told: dict[str, Any] = {"parameters": sum(one.numel() for one in model.parameters())}
    if not ticket:
        for _ in range(LARGE_STEPS_ALONE):
            inner_step()
    else:
        began_at, stops = time.monotonic(), list[tuple[float, float]]()
        min_peers = 2 if int(core) < 2 else 1
        with co2.join(model, optimizer, run=ticket, folder=folder, min_peers=min_peers) as swarm:
            told["join_s"] = time.monotonic() - began_at
            say(told)
            told_to_end = threading.Thread(target=sys.stdin.read, daemon=True)
            told_to_end.start()
            while told_to_end.is_alive():
                loss = inner_step()
                before, worked = time.monotonic(), time.thread_time()
                swarm.exchange(LARGE_WORDS, loss)
                stops.append((time.monotonic() - before, time.thread_time() - worked))
        told["longest_s"] = max(wall for wall, _ in stops)
        told["longest_cpu_s"] = max(worked for _, worked in stops)
        told["steps"], told["longest_five_s"] = len(stops), sorted(wall for wall, _ in stops)[-5:]
    say({**told, "peak_bytes": _peak_bytes()})


def _peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


if __name__ == "__main__":
    main()
