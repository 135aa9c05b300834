"""What a peer's own page costs its training: tokens per second with a browser on it and without. Prints JSON.

    python -m benchmarks.board_port            about two and a half minutes; wants the machine to itself

Two peers of one thread each train on two cores; a browser of this machine opens the first one's page, looks,
and goes, several times. Its peer's rate is held against the phase before, and that ratio against the other
peer's, which shares the machine but not the page: other work on the machine cancels out. What the page's
process and the browser take is given apart: a browser elsewhere (over ssh) costs the volunteer only the first
of the two. There is no bar: the law is that training never waits for the page, so the price can only be
processor time.
"""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.board import cpu_s
from p2p_co2.telemetry.events import Progress
from p2p_co2.telemetry.journal import read_events
from tests.browser import browser, missing, wait_for
from tests.swarms import ENVIRONMENT, ROOT

PEERS, PHASES, PHASE_S, SETTLE_S = 2, 3, 16.0, 4.0
TRAIN_S = 150
START_BOUND_S = 90.0


def measure(folder: Path) -> dict[str, Any]:
    """Run a demo in ``folder`` and alternate."""
    run = folder / "run"
    command = [sys.executable, "-m", "p2p_co2.cli", "demo", "--no-board", "--peers", str(PEERS)]
    with (folder / "demo.log").open("wb") as log:
        demo = subprocess.Popen(
            [*command, "--seconds", str(TRAIN_S), "--folder", str(run)],
            stdout=log, stderr=log, env=ENVIRONMENT, cwd=ROOT,
        )  # fmt: skip
    try:
        journals = [run / "peers" / f"peer-{number}" / "events.jsonl" for number in range(1, PEERS + 1)]
        _until_training(journals, demo)
        address = re.search(r"board: (\S+)", (run / "logs" / "peer-1.log").read_text())
        assert address
        phases = []
        with browser() as driver:
            for _ in range(PHASES):
                driver.get("about:blank")
                _end_page_of(demo)
                phases.append(_phase("closed", demo, driver.service.process.pid))
                driver.get(address[1])
                wait_for(driver, "tokens", 60)
                phases.append(_phase("open", demo, driver.service.process.pid))
        return _held_against(phases, journals)
    finally:
        demo.send_signal(signal.SIGINT)
        demo.wait(60)


def _until_training(journals: list[Path], demo: subprocess.Popen[bytes]) -> None:
    """Until everybody has had its first rounds."""
    ends_at = time.monotonic() + START_BOUND_S
    while time.monotonic() < ends_at and demo.poll() is None:
        progress = [_progress(journal) for journal in journals]
        if all(told and min(told[-1].versions, default=0) >= 2 for told in progress):
            return
        time.sleep(0.5)
    raise SystemExit("the demo did not start to train")


def _progress(journal: Path) -> list[Progress]:
    return (
        [event for event in read_events(journal) if isinstance(event, Progress)] if journal.exists() else []
    )


def _pages(demo: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The processes behind the peers' pages."""
    below = psutil.Process(demo.pid).children(recursive=True)
    return [process for process in below if "monitoring" in process.cmdline()]


def _end_page_of(demo: subprocess.Popen[bytes]) -> None:
    for process in _pages(demo):
        os.kill(process.pid, signal.SIGTERM)


def _phase(kind: str, demo: subprocess.Popen[bytes], browser_pid: int) -> dict[str, Any]:
    time.sleep(SETTLE_S)
    began_at, pages, looking = time.time(), _pages(demo), psutil.Process(browser_pid)
    before = sum(map(cpu_s, pages)), cpu_s(looking)
    time.sleep(PHASE_S)
    took_s = time.time() - began_at
    after = sum(map(cpu_s, pages)), cpu_s(looking)
    return {
        "kind": kind, "from": began_at, "to": began_at + took_s,
        "page_core": (after[0] - before[0]) / took_s, "browser_core": (after[1] - before[1]) / took_s,
    }  # fmt: skip


def _held_against(phases: list[dict[str, Any]], journals: list[Path]) -> dict[str, Any]:
    told = [_progress(journal) for journal in journals]
    for phase in phases:
        phase["tokens_per_s"] = [round(_rate(progress, phase["from"], phase["to"]), 1) for progress in told]
        phase["exposed_share"] = round(_exposed(told[0], phase["from"], phase["to"]), 4)
    pairs = list(zip(phases[::2], phases[1::2], strict=True))

    def ratios(place: int) -> list[float]:
        return [round(b["tokens_per_s"][place] / a["tokens_per_s"][place], 3) for a, b in pairs]

    opened = [phase for phase in phases if phase["kind"] == "open"]
    return {
        "looked_at_open_over_closed": ratios(0), "other_open_over_closed": ratios(1),
        "looked_at_against_other": [round(a / b, 3) for a, b in zip(ratios(0), ratios(1), strict=True)],
        "exposed_share": {
            kind: [phase["exposed_share"] for phase in phases if phase["kind"] == kind]
            for kind in ("closed", "open")
        },
        "page_core": round(statistics.median(phase["page_core"] for phase in opened), 3),
        "browser_core": round(statistics.median(phase["browser_core"] for phase in opened), 3),
        "tokens_per_s": [phase["tokens_per_s"] for phase in phases],
    }  # fmt: skip


def _within(told: list[Progress], since: float, until: float) -> tuple[Progress, Progress]:
    inside = [event for event in told if since <= event.at <= until]
    return inside[0], inside[-1]


def _rate(told: list[Progress], since: float, until: float) -> float:
    first, last = _within(told, since, until)
    return (last.tokens - first.tokens) / (last.at - first.at)


def _exposed(told: list[Progress], since: float, until: float) -> float:
    """Share of the time that training stood still for communication."""
    first, last = _within(told, since, until)
    return (last.exposed_s - first.exposed_s) / (last.at - first.at)


if __name__ == "__main__":
    if missing():
        sys.exit(f"error: {missing()}")
    with tempfile.TemporaryDirectory(prefix="p2p-co2-port-") as place:
        print(json.dumps(measure(Path(place)), indent=2))
