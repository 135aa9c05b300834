"""Programs that a test starts as a user's machine would, each with a log, none left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tests.installed import ENVIRONMENT

BOUND_S = 240.0
"""Nothing here is about speed."""


@dataclass(frozen=True)
class Program:
    """A running process and the file with what it says."""

    process: subprocess.Popen[bytes]
    log: Path

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for(self, pattern: str) -> str:
        """The first of a pattern in what it says, while it runs."""
        self.wait_until(lambda: re.search(pattern, self.said()) is not None)
        return re.findall(pattern, self.said())[0]

    def wait_until(self, holds: Callable[[], bool]) -> None:
        """While it runs."""
        ends_at = time.monotonic() + BOUND_S
        while not holds():
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < ends_at, self.said()
            time.sleep(0.1)

    def ends(self, by: signal.Signals | None = None) -> int:
        """Its exit status, after a signal if one is given."""
        if by is not None:
            self.process.send_signal(by)
        return self.process.wait(BOUND_S)


@contextmanager
def started(
    command: list[str], folder: Path, variables: Mapping[str, str] | None = None
) -> Iterator[Program]:
    """Run it in ``folder``; it is asked to leave at the end of the block, and ended if it does not."""
    log = folder / f"{len(list(folder.glob('*.log')))}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=folder, env={**ENVIRONMENT, **(variables or {})}, stdin=subprocess.DEVNULL,
            stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        yield Program(process, log)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Strangers:
    """Processes that are nobody's children here: a shell starts each, and ends. A context manager: none is
    left."""

    def __init__(self) -> None:
        self._running: list[int] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for pid in list(self._running):
            self.end(pid)

    def start(self, *command: str) -> int:
        """Its process id."""
        shell = ["sh", "-c", '"$@" </dev/null >/dev/null 2>&1 & echo $!', "sh", *command]
        said = subprocess.run(shell, env=ENVIRONMENT, stdout=subprocess.PIPE, check=True, text=True).stdout
        self._running.append(int(said))
        return int(said)

    def end(self, pid: int) -> None:
        self._running.remove(pid)
        os.kill(pid, signal.SIGKILL)
