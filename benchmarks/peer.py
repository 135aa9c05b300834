"""What a run costs one peer: memory, stops for checkpoints, time of a step, traffic at rest.

    python benchmarks/peer.py memory [--width 2000] [--cases q2-keep-ef fp16-co2-ef ...] [--repeats 3]
    python benchmarks/peer.py checkpoint [--width 2048] [--peers 1 4] [--every-s 3] [--seconds 25]
    python benchmarks/peer.py step [--pairs 5]
    python benchmarks/peer.py control [--peers 4 8 16 24] [--after-s 60] [--seconds 60] [--round-s 30]

``memory``: peak memory beyond training, in copies of the parameters in fp32. The same model and loop run
alone, and as two peers that exchange, each in a fresh process whose largest resident set (VmHWM) the kernel
keeps; with a tiny model the same two give what imports, threads and sockets cost. The answer is

    copies = ((swarm - alone) of the model - (swarm - alone) of the tiny one) / (4 * parameters)

and the bar 4. The default (first case) runs ``--repeats`` times and the median counts. VmHWM counts what the
allocator keeps as well. ``caught_up``: rounds that a late peer got afterwards; with many, the peak is higher.

``checkpoint``: how long one stops training (AdamW, 4 * width * width parameters). ``stopped_s``: what peers
say it cost them. ``longest_step_s``: the longest ``peer.step``, which no report can flatter. ``whole_s``:
with training stopped until it is on the disk. ``written_s``: beside training.

``step``: what joining costs a step, with nobody else in the run: a small ResNet, and a GPT with a vocabulary
of 16k. In turn a process that has joined and one that has not; seconds and CPU of the median step, joined
over plain.

``control``: bytes that peers with a tiny model send each other while nothing is exchanged, per peer and
second, headers included: what the loopback device of a network namespace carries (root). Peers are forks of
one process, since each would else import torch anew."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import torch
from common import Figures, against, bench, command, joined, note, parser_of, peak_bytes, run, say, spread
from torch import nn

from p2p_co2.config import OWN_LOOP, ClockConfig, CodecConfig, OuterConfig, RunConfig
from p2p_co2.system.memory import use_one_arena
from p2p_co2.telemetry import events as ev

BARS = {"copies": 4.0, "step": 1.02, "control_bytes_per_s": 12_000}
LAYERS = 4


def _linear(width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))


def _inner_step(model: nn.Module, optimizer: torch.optim.Optimizer, width: int, batch: int) -> torch.Tensor:
    loss: torch.Tensor = (model(torch.randn(batch, width)) - 1.0).square().mean()
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss.detach()


# ---- memory

PEERS, ROUNDS, STEPS_PER_ROUND, TINY_WIDTH, STEP_S = 2, 4, 8, 16, 0.02
DEFAULT = "q2-keep-ef"
CASES: dict[str, Figures] = {
    f"{codec}-{rule}{'-ef' * feedback}": {
        "codec": {"name": codec, "error_feedback": feedback}, "outer": {"rule": rule},
    }
    for codec in ("q2", "int4", "fp16") for feedback in (False, True)
    for rule in ("keep", "blend", "co2", "eager")
}  # fmt: skip


def memory(options: argparse.Namespace) -> Figures:
    """Peak memory beyond training, in copies of the parameters."""
    sizes = (options.width, TINY_WIDTH)
    alone = {width: _alone_bytes(width) for width in sizes}
    tiny_bytes = _exchanging(DEFAULT, TINY_WIDTH)["peak_bytes"] - alone[TINY_WIDTH]
    copy_bytes, found = 4 * LAYERS * options.width**2, Figures()
    for case in options.cases:
        repeats = options.repeats if case == DEFAULT else 1
        runs = [_exchanging(case, options.width) for _ in range(repeats)]
        each = [(one["peak_bytes"] - alone[options.width] - tiny_bytes) / copy_bytes for one in runs]
        found[case] = {
            "copies": against(statistics.median(each), BARS["copies"], at_most=True),
            "copies_all": sorted(round(one, 2) for one in each),
            "caught_up": [one["caught_up"] for one in runs], "applied": [one["applied"] for one in runs],
        }  # fmt: skip
        note(case, found[case])
    return {"parameters": LAYERS * options.width**2, "fixed_mb": round(tiny_bytes / 1e6), "cases": found}


def _alone_bytes(width: int) -> int:
    with bench() as nobody:
        return int(nobody.ask(__file__, "alone", width).answer()["peak_bytes"])


def _exchanging(case: str, width: int) -> Figures:
    """The peer with the larger peak, and how often either caught up."""
    settings = RunConfig(
        recipe=OWN_LOOP, fragments=LAYERS, codec=CodecConfig.model_validate(CASES[case]["codec"]),
        clock=ClockConfig(mode="steps", inner_steps_per_round=STEPS_PER_ROUND, rounds=ROUNDS),
        outer=OuterConfig.model_validate(CASES[case]["outer"]),
    )  # fmt: skip
    with bench(settings) as swarm:
        peers = [
            swarm.ask(__file__, "exchanging", width, swarm.folder / f"{index}", swarm.ticket)
            for index in range(PEERS)
        ]
        answers = [peer.answer() for peer in peers]
    most = max(answers, key=lambda answer: int(answer["peak_bytes"]))
    return {**most, "caught_up": sum(answer["caught_up"] for answer in answers)}


def _alone(width: str) -> None:
    use_one_arena()  # as in the swarm
    model = _linear(int(width))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(STEPS_PER_ROUND):
        _inner_step(model, optimizer, int(width), 4)
    say({"peak_bytes": peak_bytes()})


def _exchanging_peer(width: str, folder: str, ticket: str) -> None:
    """SGD without momentum, so that nothing else has the parameters' size."""
    use_one_arena()
    model, counts = _linear(int(width)), Counter[str]()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    config = {"min_peers": PEERS, "checkpoint_every_s": 1.5}
    with joined(
        ticket, Path(folder), model, optimizer, lambda event: counts.update([event.kind]), **config
    ) as peer:
        while peer.step(tokens=1, loss=_inner_step(model, optimizer, int(width), 4)):
            time.sleep(STEP_S)
    say({"peak_bytes": peak_bytes(), "applied": counts["fragment_applied"], "caught_up": counts["caught_up"]})
    sys.stdin.read()


# ---- checkpoints

CHECKPOINT_ROUND_S, CHECKPOINT_BATCH, WHOLE = 5.0, 8, 3


def checkpoint(options: argparse.Namespace) -> Figures:
    """How long a checkpoint stops training."""
    settings = RunConfig(
        recipe=OWN_LOOP, fragments=LAYERS, clock=ClockConfig(round_s=CHECKPOINT_ROUND_S, rounds=0),
        outer=OuterConfig(blocking_rounds=0),
    )  # fmt: skip
    values = LAYERS * options.width**2
    answer: Figures = {"parameters": values, "optimizer": "AdamW"}
    for count in options.peers:
        with bench(settings, options.folder, f"{count}-peers") as swarm:
            told = (count, options.width, options.every_s, options.seconds)
            peers = [
                swarm.ask(__file__, "checkpoint", swarm.ticket, swarm.folder / f"peer{index}", *told)
                for index in range(count)
            ]
            answers = [peer.answer() for peer in peers]
        every = {key: [s for one in answers for s in one[key]] for key in answers[0] if key.endswith("_s")}
        answer[f"{count} peers"] = {
            **{key: spread(values) for key, values in every.items()},
            "longest_step_s": round(max(every["longest_step_s"]), 3), "checkpoints": len(every["stopped_s"]),
        }  # fmt: skip
        note(count, answer[f"{count} peers"])
    return answer


def _checkpoint_peer(ticket: str, folder: str, peers: str, width: str, every_s: str, seconds: str) -> None:
    """The first round is not counted: each peer has just started."""
    model, saved, longest_s = _linear(int(width)), list[ev.CheckpointSaved](), 0.0
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def hear(event: ev.Event) -> None:
        if isinstance(event, ev.CheckpointSaved):
            saved.append(event)

    config = {"min_peers": int(peers), "checkpoint_every_s": float(every_s)}
    with joined(ticket, Path(folder), model, optimizer, hear, **config) as peer:
        since, whole = time.monotonic() + CHECKPOINT_ROUND_S, list[float]()
        while time.monotonic() < since + float(seconds):
            loss = _inner_step(model, optimizer, int(width), CHECKPOINT_BATCH)
            entered_at = time.monotonic()
            peer.step(tokens=CHECKPOINT_BATCH, loss=loss)
            if entered_at > since:
                longest_s = max(longest_s, time.monotonic() - entered_at)
        beside = list(saved)
        for _ in range(WHOLE):
            began_at = time.monotonic()
            peer.save()
            whole.append(time.monotonic() - began_at)
        say({
            "stopped_s": [event.duration_s for event in beside], "whole_s": whole,
            "written_s": [event.written_s for event in beside], "longest_step_s": [longest_s],
        })  # fmt: skip


# ---- a step

WARM_STEPS, VOCABULARY = 5, 16384


def step(options: argparse.Namespace) -> Figures:
    """What joining costs a step, with nobody else in the run."""
    settings = RunConfig(recipe=OWN_LOOP, clock=ClockConfig(mode="time", round_s=5.0, rounds=0))
    answer: Figures = {}
    for kind in options.models:
        rows = []
        for _ in range(options.pairs):
            with bench(settings) as swarm:
                told = (options.steps, kind, swarm.folder / "peer", swarm.ticket)
                rows.append({"joined": swarm.ask(__file__, "step", *told).answer()})
            with bench() as nobody:
                rows[-1]["plain"] = nobody.ask(__file__, "step", *told[:2]).answer()
            note(kind, rows[-1])
        answer[kind] = {
            name: against(
                statistics.median(row["joined"][name] / row["plain"][name] for row in rows),
                BARS["step"], at_most=True,
            )
            for name in ("seconds", "cpu_s")
        }  # fmt: skip
    return answer


class _Block(nn.Module):
    """Two convolutions of a ResNet and the way round them."""

    def __init__(self, ins: int, outs: int, stride: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            nn.Conv2d(ins, outs, 3, stride, 1, bias=False), nn.BatchNorm2d(outs), nn.ReLU(),
            nn.Conv2d(outs, outs, 3, 1, 1, bias=False), nn.BatchNorm2d(outs),
        )  # fmt: skip
        self.round = nn.Conv2d(ins, outs, 1, stride, bias=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.path(images) + self.round(images))


def _model_of(kind: str) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A model, its inputs and targets."""
    torch.manual_seed(0)
    if kind == "resnet":
        blocks = _Block(32, 32, 1), _Block(32, 64, 2), _Block(64, 128, 2)
        ends = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)
        model = nn.Sequential(nn.Conv2d(3, 32, 3, 1, 1), *blocks, *ends)
        return model, torch.randn(64, 3, 32, 32), torch.randint(0, 10, (64,))
    layer = nn.TransformerEncoderLayer(128, 4, 512, 0.0, batch_first=True)
    layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    embedding = nn.Embedding(VOCABULARY, 128)
    model = nn.Sequential(embedding, layers, nn.Linear(128, VOCABULARY), nn.Flatten(0, 1))
    given, wanted = (torch.randint(0, VOCABULARY, (4, 64)) for _ in range(2))
    return model, given, wanted.flatten()


def _step_peer(steps: str, kind: str, folder: str = "", ticket: str = "") -> None:
    import p2p_co2 as co2

    model, given, wanted = _model_of(kind)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    swarm = co2.join(model, optimizer, run=ticket, folder=folder, board=False) if ticket else None
    took = list[tuple[float, float]]()
    for _ in range(int(steps)):
        began = time.monotonic(), time.thread_time()
        loss: torch.Tensor = nn.functional.cross_entropy(model(given), wanted)
        loss.backward()  # type: ignore[no-untyped-call]
        if swarm is None:
            optimizer.step()
            optimizer.zero_grad()
        else:
            swarm.step(loss, tokens=len(given))
        took.append((time.monotonic() - began[0], time.thread_time() - began[1]))
    seconds, cpu_s = (statistics.median(column) for column in zip(*took[WARM_STEPS:], strict=True))
    if swarm is not None:
        swarm.leave()
    say({"seconds": seconds, "cpu_s": cpu_s})


# ---- traffic at rest

CONTROL_STEP_S, START_EVERY_S, JOINED_WITHIN_S = 0.25, 1.5, 300.0


def control(options: argparse.Namespace) -> Figures:
    """Bytes that peers send while nothing is exchanged."""
    if os.geteuid() != 0:
        raise SystemExit("error: a network namespace needs root: run this with sudo")
    answer: Figures = {"bar_at_24": BARS["control_bytes_per_s"]}
    for count in options.peers:
        told = map(str, (count, options.after_s, options.seconds, options.round_s))
        command = ["unshare", "--net", sys.executable, __file__, "--worker", "control", *told]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        answer[str(count)] = json.loads(done.stdout.splitlines()[-1])
        note(count, answer[str(count)])
    return answer


def _control(peers: str, after_s: str, seconds: str, round_s: str) -> None:
    """In a namespace of its own."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    clock = ClockConfig(mode="time", round_s=float(round_s), rounds=10_000)
    fork, children = multiprocessing.get_context("fork"), list[multiprocessing.process.BaseProcess]()
    with bench(RunConfig(name="control", fragments=LAYERS, clock=clock)) as swarm:
        try:
            for index in range(int(peers)):
                child = fork.Process(target=_at_rest, args=(swarm.ticket, swarm.folder, index))
                child.start()
                children.append(child)
                time.sleep(START_EVERY_S)
            ends_at = time.monotonic() + JOINED_WITHIN_S
            while (joined_ := len(list(swarm.folder.glob("ready*")))) < len(children):
                if time.monotonic() > ends_at:
                    say({"failed": f"{joined_} of {peers} joined"})
                    return
                time.sleep(0.2)
            time.sleep(float(after_s))
            (began, packets), at = _lo_bytes(), time.monotonic()
            time.sleep(float(seconds))
            (ended, more), took_s = _lo_bytes(), time.monotonic() - at
        finally:
            for child in filter(multiprocessing.process.BaseProcess.is_alive, children):
                os.kill(child.pid, signal.SIGINT)
            for child in children:
                child.join(15.0)
                if child.is_alive():
                    os.killpg(child.pid, signal.SIGKILL)
    per_peer = len(children) * took_s
    say({
        "bytes_per_s": round((ended - began) / per_peer),
        "packets_per_s": round((more - packets) / per_peer, 1),
    })  # fmt: skip


def _at_rest(ticket: str, folder: Path, index: int) -> None:
    """In a fork, which leads a group of its own."""
    os.setsid()
    log = os.open(folder / f"peer{index}.log", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(LAYERS)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with joined(ticket, folder / f"peer{index}", model, optimizer) as peer:
        (folder / f"ready{index}").touch()
        while peer.step(tokens=8, loss=_inner_step(model, optimizer, 32, 8)):
            time.sleep(CONTROL_STEP_S)


def _lo_bytes() -> tuple[int, int]:
    """(bytes, packets) that loopback has carried."""
    devices = dict(one.split(":") for one in Path("/proc/self/net/dev").read_text().splitlines()[2:])
    fields = {name.strip(): told for name, told in devices.items()}["lo"].split()
    return int(fields[8]), int(fields[9])


def main() -> None:
    parser = parser_of(__doc__)
    commands = parser.add_subparsers(required=True)
    made = command(
        commands, "memory", memory, width=(2000, "parameters: 4 * width * width"),
        repeats=(3, "of the default"),
    )  # fmt: skip
    made.add_argument("--cases", nargs="+", choices=tuple(CASES), default=list(CASES))
    command(
        commands, "checkpoint", checkpoint, width=(2048, "parameters: 4 * width * width"),
        peers=([1, 4], "at a time"), every_s=(3.0, "between two checkpoints"), seconds=(25.0, "of training"),
        folder=(None, "on the disk to measure"),
    )  # fmt: skip
    command(
        commands, "step", step, pairs=(5, "in turn"), models=(["resnet", "gpt"], "resnet, gpt"),
        steps=(60, "of each process, the first 5 not counted"),
    )  # fmt: skip
    command(
        commands, "control", control, peers=([4, 8, 16, 24], "at a time"), after_s=(60.0, "of settling"),
        seconds=(60.0, "counted"), round_s=(30.0, "of a round"),
    )  # fmt: skip
    workers = {
        "alone": _alone, "exchanging": _exchanging_peer, "checkpoint": _checkpoint_peer, "step": _step_peer,
        "control": _control,
    }  # fmt: skip
    run(parser, workers)


if __name__ == "__main__":
    main()
