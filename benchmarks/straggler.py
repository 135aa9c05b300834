"""What one slow peer costs the others: real processes, with and without it, in turn.

Three peers train a model by paced steps (a sleep of ``--step-s`` after each, so that two cores suffice) over
links capped at ``--rate``; a fourth has ten times longer steps, or a link of a tenth of the rate in both
directions, or both. Reported per case, over a window after the first rounds: the fast peers' tokens per
second, committed rounds per minute, the share of time that training stood still, and how long answers took
(``sync_delay_s``), each beside the same without the slow peer. Prints JSON.

    python benchmarks/straggler.py [--seconds 40] [--cases compute link both]

Law: all peers of a case are started together with ``min_peers``, so nobody joins inside the window.
Price: caps stand for slow links: what is queued in a modem is not modelled (``p2p-co2 rehearse`` does that).
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
Figures = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--warm-s", type=float, default=20.0)
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=list(CASES))
    parser.add_argument("--step-s", type=float, default=0.1)
    parser.add_argument("--rate", type=float, default=1e6, help="bytes per second, each direction")
    parser.add_argument("--worker", nargs=6, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        ticket, folder, peers, step_s, rate, seed = options.worker
        _work(ticket, Path(folder), int(peers), float(step_s), float(rate), int(seed))
        return
    alone = _measure(options, None)
    cases = {}
    for name in options.cases:
        beside = _measure(options, CASES[name])
        ratios = {key: round(beside[key] / alone[key], 4) for key in ("tokens_per_s", "rounds_per_min")}
        cases[name] = {**beside, "with_by_without": ratios}
        print(name, json.dumps(cases[name]), file=sys.stderr)
    values = 2 * WIDTH * WIDTH
    job = {"parameters": values, "round_s": ROUND_S, "fast_peers": FAST, "seconds": options.seconds,
           "step_s": options.step_s, "rate_bytes_per_s": options.rate, "bar": BAR}  # fmt: skip
    machine = {"platform": platform.platform(), "cpus": os.cpu_count(), "load_1_min": os.getloadavg()[0]}
    print(json.dumps({"at": time.strftime("%F %R"), **machine, **job, "alone": alone, **cases}, indent=2))


def _measure(options: argparse.Namespace, slow: tuple[float, float] | None) -> Figures:
    """The fast peers' figures, with a slow one beside them or not."""
    peers = FAST + (slow is not None)
    with tempfile.TemporaryDirectory() as folder:
        swarm = Swarm(Path(folder), RUN)
        try:
            for number in range(peers):
                times, share = slow if slow is not None and number == FAST else (1.0, 1.0)
                swarm.start(
                    f"peer{number}",
                    [sys.executable, str(ROOT / "benchmarks" / "straggler.py"), "--worker", swarm.ticket,
                     str(Path(folder) / f"peer{number}"), str(peers), str(options.step_s * times),
                     str(options.rate * share), str(number)],
                )  # fmt: skip
            for number in range(peers):
                swarm.wait_for(f"peer{number}", RoundCommitted, count=2, bound_s=120.0)
            began_at = time.time() + options.warm_s
            time.sleep(options.warm_s + options.seconds)
            figures = [_figures(swarm, f"peer{number}", began_at) for number in range(peers)]
        finally:
            swarm.close()
    fast = figures[:FAST]
    result = {key: round(statistics.mean(one[key] for one in fast), 4) for key in fast[0]}
    if slow is not None:
        result["slow_peer"] = {key: round(value, 4) for key, value in figures[-1].items()}
    return result


def _figures(swarm: Swarm, name: str, began_at: float) -> dict[str, float]:
    events = [event for event in swarm.events(name) if event.at >= began_at]
    progress = [event for event in events if isinstance(event, Progress)]
    first, last = progress[0], progress[-1]
    seconds = last.at - first.at
    applied = [event for event in events if isinstance(event, FragmentApplied)]
    counted = [event for event in applied if event.contributed]
    return {
        "tokens_per_s": (last.tokens - first.tokens) / seconds,
        "rounds_per_min": 60 * sum(isinstance(event, RoundCommitted) for event in events) / seconds,
        "exposed_share": (last.exposed_s - first.exposed_s) / seconds,
        "sync_delay_s": statistics.mean([event.sync_delay_s for event in applied] or [0.0]),
        "skipped": float(sum(isinstance(event, SendSkipped) for event in events)),
        "counted_whole_share": len(counted) / max(1, len(applied)),
        "up_bytes_per_s": (last.up_bytes - first.up_bytes) / seconds,
        "down_bytes_per_s": (last.down_bytes - first.down_bytes) / seconds,
    }


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
