"""A process that joins and leaves twice and prints, as JSON, what is left of each time.

python tests/leak_check.py TICKET FOLDER
"""

from __future__ import annotations

import gc
import glob
import json
import math
import os
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import torch

from p2p_co2 import PeerConfig
from p2p_co2.trainer import connect
from tests.swarm_peer import WIDTH, make_model


def left_behind(before: dict[str, Any], bound_s: float = 10.0) -> dict[str, Any]:
    """What is left of this process, once no thread, child or file is, and no more descriptors than
    ``before``, or after ``bound_s``: the kernel and the libraries may take a moment on a busy machine."""
    ends_at = time.monotonic() + bound_s
    while (
        (found := now_held())["threads"] or found["children"] or found["files"]
        or found["fds"] > before["fds"] or found["sockets"] > before["sockets"]
    ):  # fmt: skip
        if time.monotonic() > ends_at:
            break
        time.sleep(0.1)
    return found


def now_held() -> dict[str, Any]:
    """Descriptors, threads, child processes and temporary files of this process."""
    gc.collect()
    children: list[str] = []
    for task in glob.glob("/proc/self/task/*/children"):
        children += Path(task).read_text().split()
    mine = [
        path
        for path in glob.glob(f"{tempfile.gettempdir()}/*p2p*")
        if Path(path).stat().st_ctime > STARTED_AT
    ]
    return {
        "fds": len(os.listdir("/proc/self/fd")),
        "threads": [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()],
        "children": children,
        "files": mine,
        "sockets": sum("socket:" in os.readlink(link) for link in open_links()),
    }


def open_links() -> list[str]:
    return [link for link in glob.glob("/proc/self/fd/*") if os.path.islink(link)]


def cycle(ticket: str, folder: Path) -> None:
    """Join, train, have this peer's own board looked at in the middle, leave."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    config = PeerConfig(folder=folder)
    connection = connect(ticket, config, lambda event: None)
    try:
        with connection.start(model, optimizer, start_over=True) as peer:
            for step in range(40):
                loss = model(torch.randn(8, WIDTH)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                time.sleep(0.05)
                if step == 30:
                    look(peer.board)
                if not peer.step(tokens=8, loss=loss):
                    break
            peer.stop()
    finally:
        connection.close()


def look(address: str) -> None:
    """What a scraper reads must be this peer's own tokens."""
    ends_at = time.monotonic() + 120
    while time.monotonic() < ends_at:
        with urllib.request.urlopen(f"{address}metrics", timeout=120) as answer:
            if b"p2p_co2_peer_tokens_total{" in answer.read():
                return
        time.sleep(0.2)
    raise AssertionError("the peer's own page knows no tokens")


STARTED_AT = time.time()

if __name__ == "__main__":
    torch.set_num_threads(1)
    found: list[dict[str, Any]] = [{"fds": math.inf, "sockets": math.inf}]
    for _ in range(3):
        cycle(sys.argv[1], Path(sys.argv[2]))
        found.append(left_behind(found[-1]))
    print(json.dumps(found[1:]))
