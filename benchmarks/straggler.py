"""What one slow peer costs the others: real processes, with and without it, in turn.

Three peers train a model by paced steps (a sleep of ``--step-s`` after each, so that two cores suffice) over
links capped at ``--rate``; a fourth has ten times longer steps, or a link of a tenth of the rate in both
directions, or both. It rests (as after SIGUSR1: heartbeats only) and takes part in turn, ``--pairs`` times,
in one swarm and beside the same processes. Reported per case: the fast peers' tokens per second with it over
without it, pair by pair; committed rounds per minute, and how long answers took (``sync_delay_s``). JSON.

    python benchmarks/straggler.py [--pairs 3] [--seconds 12] [--cases compute link both]

``noise``: half the spread of the pairs' ratios. Law: after each change the first ``--settle-s`` count for
nothing. Price: caps stand for slow links: what is queued in a modem is not modelled (``p2p-co2 rehearse``
does that).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from p2p_co2.config import ClockConfig, CodecConfig, LimitsConfig, PeerConfig, RunConfig
from p2p_co2.recipes import recipe_digest
from p2p_co2.telemetry.events import FragmentApplied, Progress, RoundCommitted, SendSkipped
from p2p_co2.telemetry.journal import Journal
from p2p_co2.trainer import connect
from tests.swarms import ROOT, Swarm

WIDTH, FAST, TIMES = 512, 3, 10.0
ROUND_S = 4.0
RUN = RunConfig(
    name="straggler", recipe="own-loop", recipe_digest=recipe_digest("own-loop", {}), fragments=2,
    clock=ClockConfig(mode="time", round_s=ROUND_S), codec=CodecConfig(name="int4"),
)  # fmt: skip
CASES = {"compute": (TIMES, 1.0), "link": (1.0, 1 / TIMES), "both": (TIMES, 1 / TIMES)}
"""(times longer steps, share of the rate) of the slow peer."""
BAR = 0.98
REPORT_EVERY_S = 1.5
"""Peers report once a second."""
Figures = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=12.0, help="measured in each half of a pair")
    parser.add_argument("--settle-s", type=float, default=3.0)
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=list(CASES))
    parser.add_argument("--step-s", type=float, default=0.1)
    parser.add_argument("--rate", type=float, default=1e6, help="bytes per second, each direction")
    parser.add_argument("--worker", nargs=6, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        ticket, folder, peers, step_s, rate, seed = options.worker
        _work(ticket, Path(folder), int(peers), float(step_s), float(rate), int(seed))
        return
    cases = {}
    for name in options.cases:
        cases[name] = _measure(options, CASES[name])
        print(name, json.dumps(cases[name]), file=sys.stderr)
    values = 2 * WIDTH * WIDTH
    job = {"parameters": values, "round_s": ROUND_S, "fast_peers": FAST, "seconds": options.seconds,
           "step_s": options.step_s, "rate_bytes_per_s": options.rate, "bar": BAR}  # fmt: skip
    machine = {"platform": platform.platform(), "cpus": os.cpu_count(), "load_1_min": os.getloadavg()[0]}
    print(json.dumps({"at": time.strftime("%F %R"), **machine, **job, **cases}, indent=2))


def _measure(options: argparse.Namespace, slow: tuple[float, float]) -> Figures:
    """The pairs of one case."""
    with tempfile.TemporaryDirectory() as folder:
        swarm = Swarm(Path(folder), RUN)
        try:
            for number in range(FAST + 1):
                times, share = slow if number == FAST else (1.0, 1.0)
                swarm.start(
                    f"peer{number}",
                    [sys.executable, str(ROOT / "benchmarks" / "straggler.py"), "--worker", swarm.ticket,
                     str(Path(folder) / f"peer{number}"), str(FAST + 1), str(options.step_s * times),
                     str(options.rate * share), str(number)],
                )  # fmt: skip
            for number in range(FAST):
                swarm.wait_for(f"peer{number}", RoundCommitted, count=2, bound_s=90.0)
            swarm.wait_for(f"peer{FAST}", Progress, bound_s=90.0)  # its link may bring no round to its end
            halves = _halves(options, swarm)
        finally:
            swarm.close()
    ratios = [_ratio(pair) for pair in zip(halves[True], halves[False], strict=True)]
    return {
        "tokens_with_by_without": round(statistics.median(ratios), 4),
        "pairs": [round(ratio, 4) for ratio in ratios],
        "noise": round((max(ratios) - min(ratios)) / 2, 4),
        "with": _medians(halves[True]),
        "without": _medians(halves[False]),
    }


def _halves(options: argparse.Namespace, swarm: Swarm) -> dict[bool, list[Figures]]:
    """The figures with the slow peer (True) and while it rests, one of each per pair; which comes first
    changes from pair to pair, so that a drift of the machine favours neither."""
    slow = swarm.processes[f"peer{FAST}"]
    halves: dict[bool, list[Figures]] = {True: [], False: []}
    for pair in range(options.pairs):
        for takes_part in (pair % 2 == 0, pair % 2 == 1):
            slow.send_signal(signal.SIGUSR2 if takes_part else signal.SIGUSR1)
            time.sleep(options.settle_s)
            began_at = time.time()
            time.sleep(options.seconds)
            ended_at = time.time()
            time.sleep(REPORT_EVERY_S)  # the last report but one is the last before the end
            fast = [_figures(swarm, f"peer{number}", began_at, ended_at) for number in range(FAST)]
            means = {key: statistics.mean(one[key] for one in fast) for key in fast[0]}
            took_part = _figures(swarm, f"peer{FAST}", began_at, ended_at)
            halves[takes_part].append({**means, "slow_peer_tokens_per_s": took_part["tokens_per_s"]})
    return halves


def _ratio(pair: tuple[Figures, Figures]) -> float:
    return float(pair[0]["tokens_per_s"] / pair[1]["tokens_per_s"])


def _medians(halves: list[Figures]) -> Figures:
    return {key: round(statistics.median(half[key] for half in halves), 4) for key in halves[0]}


def _figures(swarm: Swarm, name: str, began_at: float, ended_at: float) -> dict[str, float]:
    events = swarm.events(name)
    seconds = ended_at - began_at
    progress = [event for event in events if isinstance(event, Progress)]
    within = [event for event in events if began_at <= event.at < ended_at]
    applied = [event for event in within if isinstance(event, FragmentApplied)]
    return {
        "tokens_per_s": (_tokens(progress, ended_at) - _tokens(progress, began_at)) / seconds,
        "rounds_per_min": 60 * sum(isinstance(event, RoundCommitted) for event in within) / seconds,
        "sync_delay_s": statistics.mean([event.sync_delay_s for event in applied] or [0.0]),
        "skipped": float(sum(isinstance(event, SendSkipped) for event in within)),
    }


def _tokens(progress: list[Progress], at: float) -> float:
    """By then, between the two reports around it."""
    after = next((event for event in progress if event.at >= at), progress[-1])
    before = next((event for event in reversed(progress) if event.at < at), progress[0])
    if after.at <= before.at:
        return float(after.tokens)
    share = min(1.0, (at - before.at) / (after.at - before.at))
    return before.tokens + share * (after.tokens - before.tokens)


def _work(ticket: str, folder: Path, peers: int, step_s: float, rate: float, seed: int) -> None:
    """One peer: paced training through the library's front door until it is interrupted."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(seed)
    limits = LimitsConfig(upload_bytes_per_s=rate, download_bytes_per_s=rate, threads=1)
    config = PeerConfig(folder=folder, min_peers=peers, carrier="grpc", limits=limits, checkpoint_every_s=1e6)
    folder.mkdir(parents=True, exist_ok=True)
    with Journal(folder / "events.jsonl") as journal:
        peer = connect(ticket, config, journal.write).start(model, optimizer)
        signal.signal(signal.SIGINT, lambda *_: peer.stop())
        signal.signal(signal.SIGUSR1, lambda *_: peer.pause())
        signal.signal(signal.SIGUSR2, lambda *_: peer.go_on())
        with peer:
            while True:
                inputs = torch.randn(4, WIDTH, generator=data)
                loss = ((model(inputs) - inputs.roll(1, 1)) ** 2).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                time.sleep(step_s)  # stands for the work of a larger model
                if not peer.step(tokens=4, loss=loss):
                    break


if __name__ == "__main__":
    main()
