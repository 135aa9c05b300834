"""Processes of a swarm on one machine: started apart, stopped together, and none survives.

Every child has a process group of its own, so a Ctrl-C in the terminal reaches only the parent. That asks
each child by its id (SIGINT), waits a bounded time and ends the stragglers' groups (SIGKILL), with them the
libp2p daemons below them. Each child's output goes to a file of its own, whose end says why it died."""

from __future__ import annotations

import os
import signal
import site
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from p2p_co2.errors import EnvironmentFault
from p2p_co2.system.process import processes_below, without_options

POLL_S = 0.1
_ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Child:
    """A process we started. ``asked_to_end``: its death is no surprise any more."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    started_at: float
    asked_to_end: bool = False

    @property
    def pid(self) -> int:
        return self.process.pid

    def exit_status(self) -> int | None:
        """None while it runs, else its exit code (negative: the signal that ended it).

        Looks without reaping: until ``LocalSwarm.kill`` the process keeps its number. So the group killed
        there is ours, never a stranger's with the same number."""
        if self.process.returncode is not None:
            return self.process.returncode
        seen = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if seen is None:
            return None
        return seen.si_status if seen.si_code == os.CLD_EXITED else -seen.si_status

    def running(self) -> bool:
        return self.exit_status() is None

    def last_lines(self, count: int = 12) -> str:
        """The end of its log."""
        try:
            text = self.log.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-count:])

    def last_words(self) -> str:
        """For a report of its death: its status, and the end of its log."""
        return f"status {self.exit_status()}; its last lines ({self.log}):\n{self.last_lines()}"


@dataclass
class LocalSwarm:
    """Use as ``with LocalSwarm(folder) as swarm``. ``grace_s``: seconds between SIGINT and SIGKILL at the
    end: a Ctrl-C takes less than ten on a busy machine, too."""

    folder: Path
    grace_s: float = 6.5
    children: list[Child] = field(default_factory=list)

    def start(self, name: str, arguments: Sequence[str], variables: Mapping[str, str] | None = None) -> Child:
        """Start ``arguments`` in its own process group, its output in ``<folder>/<name>.log``. ``variables``:
        beside those of ``environment``. Raises ``EnvironmentFault`` if the process or its log cannot be
        made."""
        log = self.folder / f"{name}.log"
        given = {**without_options(os.environ), **environment(), **(variables or {})}
        try:
            with log.open("ab") as output:
                process = subprocess.Popen(
                    list(arguments), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                    env=given, process_group=0,
                )  # fmt: skip
        except OSError as error:
            raise EnvironmentFault(f"cannot start {name}: {error.strerror}; see {log}") from None
        child = Child(name=name, process=process, log=log, started_at=time.time())
        self.children.append(child)
        return child

    def wait_for_line(self, child: Child, prefix: str, timeout_s: float) -> str:
        """The rest of the first line of the child's log that begins with ``prefix``. Raises
        ``EnvironmentFault`` with the end of its log if it dies first, or takes longer than ``timeout_s``."""
        deadline_at = time.monotonic() + timeout_s
        while True:
            alive = child.running()
            for line in child.log.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
                if line.startswith(prefix) and line.endswith("\n"):
                    return line[len(prefix) :].strip()
            problem = "ended too early" if not alive else f"was not ready after {timeout_s:.0f} s"
            if not alive or time.monotonic() > deadline_at:
                raise EnvironmentFault(f"{child.name} {problem}; its last lines:\n{child.last_lines()}")
            time.sleep(POLL_S)

    def running(self) -> list[Child]:
        return [child for child in self.children if child.running()]

    def dead_unasked(self) -> list[Child]:
        """Children that failed although nobody asked them to end."""
        return [
            child
            for child in self.children
            if not child.asked_to_end and child.exit_status() not in (None, 0)
        ]

    def interrupt(self, child: Child) -> None:
        """Ask one child to leave (SIGINT); it may take its time."""
        child.asked_to_end = True
        if child.running():
            os.kill(child.pid, signal.SIGINT)

    def kill(self, child: Child) -> None:
        """End a child and everything below it at once. SIGKILL goes to its group, and to descendants that
        have groups of their own."""
        child.asked_to_end = True
        if child.process.returncode is not None:
            return
        below = processes_below(child.pid)
        os.killpg(child.pid, signal.SIGKILL)
        for pid in below:
            with suppress(ProcessLookupError):  # it ended with the group, or by itself
                os.kill(pid, signal.SIGKILL)
        child.process.wait()

    def wait(self, children: Sequence[Child], timeout_s: float) -> bool:
        """Wait until all of ``children`` have ended; False if some had not after ``timeout_s``."""
        deadline_at = time.monotonic() + timeout_s
        while any(child.running() for child in children):
            if time.monotonic() > deadline_at:
                return False
            time.sleep(POLL_S)
        return True

    def close(self) -> None:
        """Ask everybody to leave, wait ``grace_s`` at most, end the rest. A second Ctrl-C skips the wait."""
        try:
            for child in self.running():
                self.interrupt(child)
            self.wait(self.children, self.grace_s)
        finally:
            for child in self.children:
                self.kill(child)

    def __enter__(self) -> LocalSwarm:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def environment(threads: int = 1) -> dict[str, str]:
    """Variables for a child: where our packages are, and few threads, since many processes share this
    machine."""
    variables = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
    if str(_ROOT) not in site.getsitepackages():
        known = os.environ.get("PYTHONPATH")
        variables["PYTHONPATH"] = f"{_ROOT}{os.pathsep}{known}" if known else str(_ROOT)
    return variables
