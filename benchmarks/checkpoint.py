"""How long a checkpoint stops training. Prints JSON.

    python benchmarks/checkpoint.py [--width 2048] [--peers 1 4] [--every-s 3] [--seconds 25]

Peers that exchange over the loopback train a model of 4 * width * width parameters with AdamW and write a
checkpoint every few seconds; the clock is round ``peer.step``, so whatever a checkpoint costs the training
thread is in it. Per number of peers, over all checkpoints of all peers:

- ``stopped_s``: what the peers say it cost them in all steps together (``CheckpointSaved.duration_s``), and
  ``longest_step_s``, the longest ``peer.step`` of all, which no report can flatter;
- ``whole_s``: the same checkpoint while training waits until it is whole on the disk (``peer.save()``, as
  when a peer leaves);
- ``written_s``: from its beginning until it is whole, beside training;
- ``stopped_share``: of the interval that the budget of writes gives (the default), in per cent;
- ``inner_step_s``: inner steps while a checkpoint is on its way to the disk, and otherwise.

Price: a busy disk or machine is in the figures. Peers on one machine write to one disk.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from averaging_workers import serve_run
from json_workers import answer_of, say, spawn

from p2p_co2.config import (
    CHECKPOINT_BYTES_PER_DAY,
    CHECKPOINT_LEAST_S,
    ClockConfig,
    OuterConfig,
    PeerConfig,
    RunConfig,
)
from p2p_co2.telemetry import events as ev
from p2p_co2.trainer import Peer, connect

LAYERS, BATCH, WHOLE = 4, 8, 3
ROUND_S = 5.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=2048, help="parameters: 4 * width * width")
    parser.add_argument("--peers", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--every-s", type=float, default=3.0, help="between two checkpoints of a peer")
    parser.add_argument("--seconds", type=float, default=25.0)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; a temporary one otherwise")
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.worker:
        roles: dict[str, Callable[..., None]] = {"seed": _seed, "peer": _peer}
        roles[options.worker[0]](*options.worker[1:])
        return
    measured = {str(peers): _measure(peers, options) for peers in options.peers}
    machine = {"platform": platform.platform(), "cpus": os.cpu_count()}
    job = {"parameters": LAYERS * options.width**2, "optimizer": "AdamW", "every_s": options.every_s}
    print(json.dumps({"at": time.strftime("%F %R"), **machine, **job, "by_peers": measured}, indent=2))


def _measure(peers: int, options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        seed = spawn(__file__, "seed", folder)
        settings = str(peers), str(options.width), str(options.every_s), str(options.seconds)
        ticket = answer_of(seed)["address"]
        processes = [spawn(__file__, "peer", f"{folder}/{i}", ticket, *settings) for i in range(peers)]
        try:
            answers = [answer_of(process) for process in processes]
        finally:
            for process in (*processes, seed):
                assert process.stdin is not None
                process.stdin.close()
            for process in (*processes, seed):
                process.wait(60)
    whole, stopped = _all(answers, "whole_s"), _all(answers, "stopped_s")
    every_s = 24 * 3600 * 16 * LAYERS * options.width**2 / CHECKPOINT_BYTES_PER_DAY
    return {
        "checkpoints": len(stopped),
        "stopped_s": _spread(stopped),
        "whole_s": _spread(whole),
        "stopped_share": round(100 * statistics.median(stopped) / max(CHECKPOINT_LEAST_S, every_s), 4),
        "longest_step_s": round(max(answer["longest_step_s"] for answer in answers), 3),
        "inner_step_s": {what: _spread(_all(answers, what)) for what in ("while_writing_s", "otherwise_s")},
        "written_s": _spread(_all(answers, "written_s")),
    }


def _all(answers: Sequence[dict[str, Any]], what: str) -> list[float]:
    return [value for answer in answers for value in answer[what]]


def _spread(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    return {"median": round(statistics.median(values), 4), "most": round(max(values), 4)}


# ---- the workers


def _seed(folder: str) -> None:
    run = RunConfig(
        recipe="own-loop",
        fragments=LAYERS,
        clock=ClockConfig(round_s=ROUND_S, rounds=0),
        outer=OuterConfig(blocking_rounds=0),
    )
    serve_run(run, Path(folder) / "seed")


def _peer(folder: str, ticket: str, peers: str, width: str, every_s: str, seconds: str) -> None:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(int(width), int(width), bias=False) for _ in range(LAYERS)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    saved: list[ev.CheckpointSaved] = []
    config = PeerConfig(
        folder=Path(folder), min_peers=int(peers), checkpoint_every_s=float(every_s), board=False
    )
    connection = connect(
        ticket, config, lambda event: saved.append(event) if isinstance(event, ev.CheckpointSaved) else None
    )
    with connection.start(model, optimizer) as peer:
        answer = _train(peer, model, optimizer, int(width), float(seconds), saved)
        for _ in range(WHOLE):
            began_at = time.monotonic()
            peer.save()
            answer["whole_s"].append(time.monotonic() - began_at)
    say(answer)
    sys.stdin.read()


def _train(
    peer: Peer,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    width: int,
    seconds: float,
    saved: list[ev.CheckpointSaved],
) -> dict[str, Any]:
    """The first round is not counted: each peer has just started."""
    inner_steps: list[tuple[float, float]] = []
    longest_s, since = 0.0, time.monotonic() + ROUND_S
    while (entered_at := time.monotonic()) < since + seconds:
        loss = (model(torch.randn(BATCH, width)) - 1.0).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        left_at = time.monotonic()
        peer.step(tokens=BATCH, loss=loss)
        if entered_at < since:
            continue
        longest_s = max(longest_s, time.monotonic() - left_at)
        inner_steps.append((time.time(), left_at - entered_at))
    spans = [(event.at - getattr(event, "written_s", 0.0), event.at) for event in saved]
    writing = [any(first < at < last for first, last in spans) for at, _ in inner_steps]
    return {
        "stopped_s": [event.duration_s for event in saved],
        "written_s": [getattr(event, "written_s", event.duration_s) for event in saved],
        "whole_s": [],
        "longest_step_s": longest_s,
        "while_writing_s": [s for (_, s), beside in zip(inner_steps, writing, strict=True) if beside],
        "otherwise_s": [s for (_, s), beside in zip(inner_steps, writing, strict=True) if not beside],
    }


if __name__ == "__main__":
    main()
