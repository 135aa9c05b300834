"""A swarm that lives for long while peers come and go: does anything grow? Prints JSON.

    nice -n 19 python benchmarks/long_run.py [--minutes 30] [--out FOLDER]

Through the console script on loopback: a seed and four peers that train a tiny paced model (a few per cent
of a core), one over libp2p, the others over gRPC where they can. Two stay for the whole time and are watched:
every 10 s their resident memory, descriptors, threads, asyncio tasks and Python objects, and the memory and
descriptors of their libp2p daemons. Every 45 s one of the other two is killed (SIGKILL), or leaves by Ctrl-C,
in turn, and is replaced by a newcomer with a new identity.

``flat`` compares medians: of the last fifth of the time with those of the second fifth (the first is left to
warm up): memory and objects at most 3 % more, counts at most 2 more. ``mb_per_hour`` is the slope of a line
through everything after the first fifth.
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
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from p2p_co2.system.process import processes_below
from p2p_co2.telemetry.events import CaughtUp, MessageRefused, RoundAborted, RoundCommitted, Warned
from tests.campaign import Campaign, paced_run

STEADY = ("steady-1", "steady-2")
CHURN_EVERY_S, SAMPLE_EVERY_S = 45.0, 10.0
GROWTH_SHARE, GROWTH_COUNT = 1.03, 2
SHARES = ("rss_bytes", "anonymous_bytes", "objects", "daemon_rss_bytes")
COUNTS = ("fds", "threads", "tasks", "daemon_fds")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--out", type=Path, help="where journals and samples stay")
    options = parser.parse_args()
    folder = options.out or Path(tempfile.mkdtemp(prefix="p2p-co2-long-"))
    folder.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no process outlives us
    with Campaign(folder) as swarm:
        answer = _run(swarm, options.minutes * 60)
    print(json.dumps(answer, indent=2))


def _run(swarm: Campaign, duration_s: float) -> dict[str, Any]:
    swarm.start_seed(paced_run(round_s=5.0, step_s=0.2))
    steady = [
        swarm.join(name, *options, variables={"PACED_SAMPLES": str(swarm.folder / f"{name}.jsonl")})
        for name, options in zip(STEADY, ([], ["--carrier", "libp2p"]), strict=True)
    ]
    guests = [swarm.join(f"guest-{number}") for number in range(2)]
    swarm.wait_for_commits(*STEADY, count=2, group=3)
    daemons: dict[str, list[dict[str, float]]] = {name: [] for name in STEADY}
    over = threading.Event()
    watcher = threading.Thread(target=_watch_daemons, args=(steady, daemons, over))
    watcher.start()
    began_at = time.time()
    joined = 2
    try:
        while time.time() - began_at < duration_s:
            time.sleep(CHURN_EVERY_S)
            lost = swarm.dead_unasked()
            if lost:
                raise SystemExit(f"{lost[0].name} ended by itself:\n{lost[0].last_lines(40)}")
            leaving = guests.pop(0)
            if joined % 2:
                swarm.interrupt(leaving)
            else:
                swarm.kill(leaving)
            guests.append(swarm.join(f"guest-{joined}"))
            joined += 1
    finally:
        over.set()
        watcher.join()
    ended_at = time.time()
    finished = swarm.leave_together(*steady)
    samples = {
        name: [json.loads(line) for line in (swarm.folder / f"{name}.jsonl").read_text().splitlines()]
        for name in STEADY
    }
    return {
        "at": time.strftime("%F %R"),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "minutes": round((ended_at - began_at) / 60, 1),
        "guests": joined,
        "peers": {
            name: {
                **_figures(samples[name], SHARES[:3], COUNTS[:3]),
                **_figures(daemons[name], SHARES[3:], COUNTS[3:]),
                "events": _events(swarm, name, began_at),
                "versions": finished[index].versions,
            }
            for index, name in enumerate(STEADY)
        },
        "digests_equal": len({end.digest for end in finished}) == 1,
    }


def _watch_daemons(
    steady: Sequence[Any], found: dict[str, list[dict[str, float]]], over: threading.Event
) -> None:
    while not over.wait(SAMPLE_EVERY_S):
        for child in steady:
            below = [psutil.Process(pid) for pid in processes_below(child.pid)]
            row = {
                "at": time.time(),
                "daemon_rss_bytes": sum(process.memory_info().rss for process in below),
                "daemon_fds": sum(process.num_fds() for process in below),
            }
            found[child.name].append(row)


def _figures(
    samples: Sequence[dict[str, float]], shares: Sequence[str], counts: Sequence[str]
) -> dict[str, Any]:
    fifth = len(samples) // 5
    early, late, warm = samples[fifth : 2 * fifth], samples[-fifth:], samples[fifth:]
    rows: dict[str, Any] = {}
    for key in (*shares, *counts):
        before, after = (statistics.median(row[key] for row in part) for part in (early, late))
        bound = before * GROWTH_SHARE if key in shares else before + GROWTH_COUNT
        slope = statistics.linear_regression([row["at"] for row in warm], [row[key] for row in warm]).slope
        rows[key] = {
            "first": samples[0][key],
            "second_fifth": before,
            "last_fifth": after,
            "most": max(row[key] for row in samples),
            "flat": after <= bound,
        }
        if key.endswith("bytes"):
            rows[key]["mb_per_hour"] = round(slope * 3600 / 1e6, 2)
    return rows


def _events(swarm: Campaign, name: str, since: float) -> dict[str, int]:
    kinds = (RoundCommitted, RoundAborted, CaughtUp, MessageRefused, Warned)
    return {kind.kind: len(swarm.events(name, kind, since)) for kind in kinds}


if __name__ == "__main__":
    main()
