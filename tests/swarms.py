"""Real swarms for tests: a seed and peers as processes of this machine, on loopback, each ended by its own
id."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bootstrap.local_swarm import LocalSwarm
from p2p_co2.config import RunConfig, write_toml
from p2p_co2.recipes import recipe_digest
from p2p_co2.telemetry.events import Event, PeerFinished
from p2p_co2.telemetry.journal import read_events

ROOT = Path(__file__).resolve().parent.parent
START_BOUND_S = 240.0
"""Nothing here is about speed: many processes import torch on few cores, which may stand still for
seconds."""
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


class Swarm:
    """A seed with its ticket, and the peers that a test starts, among the processes of ``local``."""

    def __init__(self, local: LocalSwarm, run: RunConfig) -> None:
        self._local, self.folder, self.run = local, local.folder, run
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        if not run.recipe_digest:  # else the seed imports torch for it
            run = run.model_copy(update={"recipe_digest": recipe_digest(run.recipe, run.recipe_options)})
        run_file = self.folder / "run.toml"
        run_file.write_text(write_toml(run))
        folder = ["--folder", str(self.folder / "seed")]
        self.start("seed", [sys.executable, "-m", "bootstrap", "seed", str(run_file), *folder])
        self.ticket = local.wait_for_line(local.children[0], "ticket:", START_BOUND_S)

    def start(self, name: str, command: list[str]) -> subprocess.Popen[bytes]:
        """Start a process whose output goes to ``<name>.log``."""
        self.processes[name] = self._local.start(name, command).process
        return self.processes[name]

    def start_peer(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        """A ``swarm_peer.py`` process in folder ``<name>``."""
        script = str(ROOT / "tests" / "swarm_peer.py")
        return self.start(name, [sys.executable, script, self.ticket, str(self.folder / name), *arguments])

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def events(self, name: str) -> list[Event]:
        path = self.folder / name / "events.jsonl"
        return list(read_events(path)) if path.exists() else []

    def wait(self, *names: str, bound_s: float = START_BOUND_S) -> None:
        """Wait until these processes have ended by themselves with status 0."""
        ends_at = time.monotonic() + bound_s
        for name in names:
            status = self.processes[name].wait(max(0.1, ends_at - time.monotonic()))
            assert status == 0, f"{name} ended with {status}:\n{self.log(name)[-3000:]}"

    def wait_for(
        self, name: str, kind: type[Event], count: int = 1, bound_s: float = START_BOUND_S
    ) -> list[Event]:
        """Wait until the peer has written ``count`` events of a kind."""
        ends_at = time.monotonic() + bound_s
        while time.monotonic() < ends_at:
            found = [event for event in self.events(name) if isinstance(event, kind)]
            if len(found) >= count:
                return found
            assert self.processes[name].poll() is None, f"{name} ended:\n{self.log(name)[-3000:]}"
            time.sleep(0.05)
        raise AssertionError(f"{name}: no {count} x {kind.__name__} in {bound_s} s\n{self.log(name)[-2000:]}")

    def said(self, name: str, pattern: str) -> re.Match[str]:
        """Wait until it is in the process's log."""
        ends_at = time.monotonic() + START_BOUND_S
        while time.monotonic() < ends_at:
            if found := re.search(pattern, self.log(name)):
                return found
            assert self.processes[name].poll() is None, self.log(name)
            time.sleep(0.05)
        raise AssertionError(f"no {pattern} in {self.log(name)}")

    def finished(self, name: str) -> PeerFinished:
        (event,) = [event for event in self.events(name) if isinstance(event, PeerFinished)]
        return event


@contextmanager
def swarm(folder: Path, run: RunConfig) -> Iterator[Swarm]:
    """A seed that is gone, with every peer, when the block ends."""
    with LocalSwarm(folder, grace_s=60.0) as local:
        yield Swarm(local, run)
