"""What the board costs: a week of 64 peers on disk, and 512 peers in a browser. Prints JSON.

    python -m benchmarks.board history    a week of 64 peers: size of the file, time to open it (about 2 min)
    python -m benchmarks.board page       512 peers, made up: time to render, processor time per second
    python -m benchmarks.board facts      the same swarm without a browser: fold and facts

Bars (issue 4): history at most 200 MB, opened within 2 s; the page within 2 s, and below 30 % of one core at
one update a second. "open" is what a board does before it can answer: open the file, read counts, series,
rounds and happenings of the first page. Processor time of server and browser are given apart.
"""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from monitoring.history import MEASURES, SWARM, Batch, BoardHistory, Happening
from monitoring.model import Model, Recorder
from tests.browser import browser, missing, wait_for
from tests.made_swarm import MadeFeed, MadeSwarm, peer_id
from tests.swarms import ENVIRONMENT, ROOT

WEEK_S = 7 * 86400
PEERS, FRAGMENTS, ROUND_S = 64, 4, 60
START = 1_800_000_000.0
MEASURE_S = 12.0


def history() -> dict[str, Any]:
    """Write a week as a board would have, sample by sample, and open it."""
    folder = Path(tempfile.mkdtemp(prefix="p2p-co2-history-"))
    path = folder / "board.sqlite"
    kept = BoardHistory(path)
    started_at = time.monotonic()
    names = [*(peer_id(number) for number in range(PEERS)), SWARM]
    # A board writes every 2 s. Fine samples live for 20 minutes and 4 hours only, so where they would be gone
    # by the end a minute's step leaves the same rows in the tiers that are kept.
    at = 0
    while at < WEEK_S:
        kept.write(_batch(at, names, with_round=at % ROUND_S < 2))
        left_s = WEEK_S - at
        at += 60 if left_s > 5 * 3600 else 20 if left_s > 1500 else 2
    wrote_s = time.monotonic() - started_at
    kept.close()
    opened_at = time.monotonic()
    again = BoardHistory(path)
    Recorder(Model(MadeFeed(MadeSwarm(0))), again)
    since, until = again.span()
    points = len(again.series(SWARM, since, until))
    rounds, lines = len(again.counted_rounds()), len(again.happenings(60))
    opened_s = time.monotonic() - opened_at
    rows = {
        table: again._reader.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
        for table in ("samples", "counted_rounds", "happenings")
    }
    again.close()
    on_disk = sum(file.stat().st_size for file in folder.iterdir())
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    return {
        "on_disk_mb": round(on_disk / 1e6, 1), "bar_mb": 200,
        "open_s": round(opened_s, 3), "bar_s": 2.0, "series_points": points, "rounds": rounds, "lines": lines,
        "rows": rows, "writing_s": round(wrote_s, 1), "span_days": round((until - since) / 86400, 2),
    }  # fmt: skip


def _batch(at: int, names: list[str], *, with_round: bool) -> Batch:
    now = START + at
    samples: dict[str, tuple[float, ...]] = {
        name: tuple(float((at * 7 + place * 13 + number) % 9973) for place in range(len(MEASURES)))
        for number, name in enumerate(names)
    }
    if not with_round:
        return Batch(at=now, samples=samples)
    number = at // ROUND_S + 1
    happenings = [
        Happening(now, "round_committed", names[f], f, number,
                  f"exchange {number} of fragment {f} committed: 64 of 64", f"commit {f} {number}")
        for f in range(FRAGMENTS)
    ]  # fmt: skip
    return Batch(
        at=now, samples=samples, happenings=happenings,
        counted_rounds={(f, number) for f in range(FRAGMENTS)},
        counted={name: float(at) for name in names[:-1]},
    )  # fmt: skip


def facts(peers: int = 512) -> dict[str, Any]:
    """Fold and facts of a large swarm, per second of its time."""
    feed = MadeFeed(MadeSwarm(peers, start_at=START, round_s=30.0))
    feed.is_whole = False
    feed.advance(30)
    model = Model(feed)
    recorder = Recorder(model, BoardHistory(None))
    recorder.follow(START + 30)
    steps, events, used_s = 0, 0, 0.0
    for t in range(30, 60):
        feed.advance(t + 1)
        events += len(feed.news.events)
        before = time.process_time()
        recorder.follow(START + t)
        made = model.facts()
        used_s += time.process_time() - before
        steps += 1
    before = time.process_time()
    text = made.model_dump_json()
    return {
        "peers": made.peers_known, "events_per_s": events / steps, "core_share": round(used_s / steps, 4),
        "api_bytes": len(text), "api_s": round(time.process_time() - before, 4),
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }  # fmt: skip


def page(peers: int = 512) -> dict[str, Any]:
    """Render every page of a large swarm, then watch the processor time of both sides."""
    if missing():
        return {"skipped": missing()}
    command = [sys.executable, "-m", "tests.board_server", str(peers)]
    board = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT, cwd=ROOT)
    found: dict[str, Any] = {"swarm_size": peers}
    try:
        assert board.stdout is not None
        address = board.stdout.readline().removeprefix("board: ").strip()
        with browser() as driver:
            driver.get(address)  # scripts are in the cache afterwards, and the past is folded
            wait_for(driver, "tokens", 60)
            time.sleep(5)
            for name, path, ready in (
                ("swarm", "", "tokens"), ("staleness", "staleness", "staleness-mean"),
                ("bandwidth", "bandwidth", "sent"), ("peers", "peers", "peers-count"),
                ("events", "events", "events"),
            ):  # fmt: skip
                started_at = time.monotonic()
                driver.get(address + path)
                wait_for(driver, ready, 30)
                rendered_s = time.monotonic() - started_at
                time.sleep(4)
                server, client = psutil.Process(board.pid), psutil.Process(driver.service.process.pid)
                before = cpu_s(server), cpu_s(client)
                time.sleep(MEASURE_S)
                after = cpu_s(server), cpu_s(client)
                found[name] = {
                    "rendered_s": round(rendered_s, 2),
                    "server_core": round((after[0] - before[0]) / MEASURE_S, 3),
                    "browser_core": round((after[1] - before[1]) / MEASURE_S, 3),
                }
        found["server_memory_mb"] = psutil.Process(board.pid).memory_info().rss // 2**20
    finally:
        board.send_signal(signal.SIGINT)
        board.wait(15)
        if board.stdout is not None:
            board.stdout.close()
    return found


def cpu_s(process: psutil.Process) -> float:
    """Processor seconds of a process and all below it that are alive."""
    total = 0.0
    for one in (process, *process.children(recursive=True)):
        try:
            times = one.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


if __name__ == "__main__":
    kinds = {"history": history, "facts": facts, "page": page}
    print(json.dumps({kind: kinds[kind]() for kind in sys.argv[1:] or kinds}, indent=2))
