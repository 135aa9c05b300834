"""Worker processes of a benchmark, which answer in lines of JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any


def spawn(script: str, *arguments: str) -> subprocess.Popen[str]:
    """Run ``script --worker arguments``, the benchmark itself, with one thread for torch; close its stdin to
    ask it to end."""
    return subprocess.Popen(
        [sys.executable, script, "--worker", *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def say(answer: Mapping[str, Any]) -> None:
    """A worker's answer."""
    print(json.dumps(answer), flush=True)


def answer_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The next answer of a worker; other lines are passed over. Ends the program if the worker ended."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith('{"'):  # no dict that a library prints
            answer: dict[str, Any] = json.loads(line)
            return answer
    raise SystemExit(f"a worker ended with {process.wait()}: {process.args!r}")
