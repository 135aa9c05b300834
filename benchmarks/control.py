"""What peers send each other while nothing is exchanged: bytes per peer and second, headers included.

    python benchmarks/control.py [--peers 4 8 16 24] [--after 60] [--seconds 60] [--round-s 30]

Needs root. Real peers with a tiny model, that train at rest in rounds of ``--round-s``, and a seed, in a
network namespace of their own: what its loopback device carries is all that they send. It is counted from
``--after`` seconds after the last has joined, for ``--seconds``; ``sockets`` splits it by who has the
connection (the peer itself: gRPC; its libp2p daemon: the DHT and relays), as the kernel counts payloads.
Peers are forks of one process, since each would else import torch anew. Prints JSON; ``bars`` says what the
figures should be.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bootstrap import netns
from bootstrap.local_swarm import Child, LocalSwarm, environment
from p2p_co2.config import ClockConfig, PeerConfig, RunConfig, write_toml
from p2p_co2.system.process import program
from p2p_co2.trainer import connect

BAR_BYTES_PER_S = {24: 10_000}
STEP_S = 0.25
START_EVERY_S = 1.5
JOINED_WITHIN_S = 300.0
FRAGMENTS = 4


def train(ticket: str, folder: Path, ready: Path) -> None:
    """One peer, until SIGINT."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(FRAGMENTS)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    connection = connect(ticket, PeerConfig(folder=folder, board=False), lambda event: None)
    peer = connection.start(model, optimizer)
    signal.signal(signal.SIGINT, lambda *_: peer.stop())
    with peer:
        ready.touch()
        while True:
            loss = model(torch.randn(8, 32)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(STEP_S)
            if not peer.step(tokens=8, loss=loss):
                break


def lo_bytes() -> tuple[int, int]:
    """(bytes, packets) that loopback has carried."""
    devices = dict(one.split(":") for one in Path("/proc/net/dev").read_text().splitlines()[2:])
    fields = {name.strip(): told for name, told in devices.items()}["lo"].split()
    return int(fields[8]), int(fields[9])


def socket_bytes() -> Counter[str]:
    """Payload bytes sent over the open connections, by program."""
    told = subprocess.run(["ss", "-tinpHO"], capture_output=True, text=True, check=True).stdout
    sent = Counter[str]()
    for line in told.splitlines():
        name, size = re.search(r'users:\(\("([^"]+)"', line), re.search(r"bytes_sent:(\d+)", line)
        if name and size:
            sent[name[1]] += int(size[1])
    return sent


def inside(peers: int, after_s: float, seconds: float, round_s: float, folder: Path) -> dict[str, Any]:
    """In a namespace of its own."""
    clock = ClockConfig(mode="time", round_s=round_s, rounds=10_000)
    run_file = folder / "run.toml"
    run_file.write_text(write_toml(RunConfig(name="control", fragments=FRAGMENTS, clock=clock)))
    children: list[int] = []
    with LocalSwarm(folder) as swarm:
        arguments = ("seed", str(run_file), "--folder", str(folder / "seed"))
        seed = swarm.start("seed", program("bootstrap", *arguments), environment())
        ticket = _ticket_of(seed)
        try:
            for index in range(peers):
                (folder / f"peer{index}").mkdir()
                if not (pid := os.fork()):
                    _become(ticket, folder, index)
                children.append(pid)
                time.sleep(START_EVERY_S)
            ends_at = time.monotonic() + JOINED_WITHIN_S
            while len(list(folder.glob("ready*"))) < peers:
                if time.monotonic() > ends_at:
                    logs = [log.read_text()[-500:] for log in folder.glob("peer*.log")]
                    return {"failed": f"{len(list(folder.glob('ready*')))} of {peers} joined", "logs": logs}
                time.sleep(0.2)
            time.sleep(after_s)
            (began, packets), sockets, at = lo_bytes(), socket_bytes(), time.monotonic()
            time.sleep(seconds)
            (ended, more), later, took_s = lo_bytes(), socket_bytes(), time.monotonic() - at
        finally:
            for pid in children:
                os.kill(pid, signal.SIGINT)
            for pid in children:
                _reap(pid)
    per_peer = peers * took_s
    return {
        "bytes_per_s": round((ended - began) / per_peer),
        "packets_per_s": round((more - packets) / per_peer, 1),
        "sockets": {name: round((size - sockets[name]) / per_peer) for name, size in later.items()},
    }


def _become(ticket: str, folder: Path, index: int) -> None:
    """In a fork: never returns."""
    status = 1
    try:
        os.setsid()
        log = os.open(folder / f"peer{index}.log", os.O_CREAT | os.O_WRONLY)
        os.dup2(log, 1)
        os.dup2(log, 2)
        train(ticket, folder / f"peer{index}", folder / f"ready{index}")
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _reap(pid: int) -> None:
    """Wait for a fork that was asked to end; kill its group in the end."""
    ends_at = time.monotonic() + 15.0
    while time.monotonic() < ends_at:
        if os.waitpid(pid, os.WNOHANG)[0]:
            return
        time.sleep(0.1)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _ticket_of(seed: Child) -> str:
    ends_at = time.monotonic() + 90.0
    while time.monotonic() < ends_at and seed.running():
        if found := re.search(r"p2pco2-\w+", seed.log.read_text(errors="replace")):
            return found.group()
        time.sleep(0.1)
    raise SystemExit(f"the seed gave no ticket: {seed.last_lines()}")


def measured(peers: int, options: argparse.Namespace) -> dict[str, Any]:
    """In a new namespace, which is removed again."""
    namespace = netns.add("control")
    folder = Path(tempfile.mkdtemp())
    try:
        netns.ip(namespace, "link set lo up")
        command = [sys.executable, __file__, "--inside", str(peers), "--folder", str(folder)]
        command += ["--after", str(options.after), "--seconds", str(options.seconds)]
        command += ["--round-s", str(options.round_s)]
        done = subprocess.run(netns.inside(namespace, command), stdout=subprocess.PIPE, text=True, check=True)
        figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return figures
    finally:
        netns.remove(namespace)
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", nargs="+", type=int, default=[4, 8, 16, 24])
    parser.add_argument("--after", type=float, default=60.0)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--round-s", type=float, default=30.0)
    parser.add_argument("--inside", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        figures = inside(options.inside, options.after, options.seconds, options.round_s, options.folder)
        print(json.dumps(figures))
        return
    report: dict[str, Any] = {"at": time.strftime("%F %R"), "round_s": options.round_s}
    for peers in options.peers:
        report[str(peers)] = measured(peers, options)
        print(peers, json.dumps(report[str(peers)]), file=sys.stderr, flush=True)
    report["bars"] = {"bytes_per_s": BAR_BYTES_PER_S}
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
