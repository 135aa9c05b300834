"""What every benchmark does alike: options, worker processes, a swarm with its journals, figures, the answer.

A benchmark is one file that starts itself again as its workers: ``Worker`` runs ``FILE --worker ROLE ...``,
which answers in lines of JSON. ``Bench`` is a swarm of the console script's programs and of such workers.
``run`` reads the options and prints one JSON object with the machine's facts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import nn

from bootstrap.local_swarm import Child
from p2p_co2.config import PeerConfig, RunConfig
from p2p_co2.telemetry.events import Event, Progress
from p2p_co2.telemetry.journal import Journal, Tail
from p2p_co2.trainer import Peer, connect
from tests.campaign import ROOT, Campaign

Figures = dict[str, Any]
Command = Callable[[argparse.Namespace], Figures]
END_S = 30.0
"""A worker that is told to end has so long."""


# ---- the command line and the answer


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help is the file's docstring."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def command(commands: Any, name: str, run_it: Command, **options: tuple[Any, str]) -> argparse.ArgumentParser:
    """Add the subcommand ``name``. ``options``: by name, (default, help). A list's elements, and a flag, have
    the default's type."""
    made: argparse.ArgumentParser = commands.add_parser(name, help=(run_it.__doc__ or "").split("\n")[0])
    made.set_defaults(run_it=run_it)
    for option, (default, told) in options.items():
        flag = "--" + option.replace("_", "-")
        if isinstance(default, bool):
            made.add_argument(flag, action="store_true", help=told)
        elif isinstance(default, list | tuple):
            kind = type(default[0]) if default else str
            made.add_argument(flag, nargs="+", type=kind, default=list(default), help=told)
        else:
            kind = Path if default is None else type(default)
            made.add_argument(flag, type=kind, default=default, help=told)
    return made


def run(parser: argparse.ArgumentParser, workers: Mapping[str, Callable[..., None]] | None = None) -> Figures:
    """Do what the command line asks, as a worker or as the benchmark, and print the answer."""
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["--worker"]:
        (workers or {})[sys.argv[2]](*sys.argv[3:])
        return {}
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no process outlives us
    began_at = time.monotonic()
    facts = {
        "at": time.strftime("%F %R"), "platform": platform.platform(), "cpus": os.cpu_count(),
        "load_1_min": round(os.getloadavg()[0], 2),
        "options": {key: value for key, value in vars(options).items() if key != "run_it"},
    }  # fmt: skip
    answer = options.run_it(options)
    facts |= {"load_after": round(os.getloadavg()[0], 2), "seconds": round(time.monotonic() - began_at, 1)}
    print(json.dumps(facts | answer, indent=2, default=str))
    return answer


def note(*words: object) -> None:
    """A word on the way, on stderr; figures as JSON."""
    told = (json.dumps(word, default=str) if isinstance(word, dict | list) else str(word) for word in words)
    print(*told, file=sys.stderr, flush=True)


@contextmanager
def folder_of(kept: Path | None, name: str = "run") -> Iterator[Path]:
    """A new folder, removed afterwards unless it is to be ``kept``."""
    with tempfile.TemporaryDirectory(prefix="p2p-co2-bench-") as temporary:
        folder = (kept.resolve() if kept else Path(temporary)) / name
        folder.mkdir(parents=True, exist_ok=True)
        yield folder


# ---- figures


def against(figure: float, bar: float, *, at_most: bool = False) -> Figures:
    """A figure beside its bar."""
    is_met = figure <= bar if at_most else figure >= bar
    return {"figure": round(figure, 4), "bar": bar, "met": bool(is_met)}


def spread(values: Sequence[float]) -> Figures:
    """Median, the value that nine in ten reach at most, and the most."""
    if not values:
        return {}
    ordered = sorted(values)
    ninth = ordered[round(0.9 * (len(ordered) - 1))]
    return {"median": round(statistics.median(ordered), 4), "90 %": round(ninth, 4),
            "most": round(ordered[-1], 4)}  # fmt: skip


def medians(rows: Sequence[Mapping[str, float]], digits: int = 4) -> dict[str, float]:
    """By key of the rows."""
    return {key: round(statistics.median(row[key] for row in rows), digits) for key in rows[0]}


def rounded(values: Sequence[float], digits: int = 4) -> list[float]:
    return [round(value, digits) for value in values]


def peak_bytes() -> int:
    """The largest resident set of this process so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


@dataclass
class Clock:
    """Of a function: when its last call began and ended; of all calls the seconds, those of its thread's
    processor, and how many values the first tensor had that it was given, and where that lay."""

    began_at: float = 0.0
    ended_at: float = 0.0
    took_s: float = 0.0
    cpu_s: float = 0.0
    calls: int = 0
    values: int = 0
    device: str = ""


class Clocks(defaultdict[str, Clock]):
    """Put around functions of the product (owner, name); a clock by each name. ``clear`` begins anew."""

    def __init__(self, *around: tuple[Any, str]) -> None:
        super().__init__(Clock)
        for owner, name in around:
            self._put_on(owner, name)

    def _put_on(self, owner: Any, name: str) -> None:
        function: Callable[..., Any] = getattr(owner, name)

        def call(*arguments: Any, **settings: Any) -> Any:
            given = next((one for one in arguments if isinstance(one, torch.Tensor)), None)
            began_at, began_s = time.monotonic(), time.thread_time()
            self[name].began_at = began_at
            result = function(*arguments, **settings)
            clock, clock_at = self[name], time.monotonic()
            clock.ended_at, clock.took_s = clock_at, clock.took_s + clock_at - began_at
            clock.cpu_s, clock.calls = clock.cpu_s + time.thread_time() - began_s, clock.calls + 1
            if given is not None:
                clock.values, clock.device = clock.values + given.numel(), str(given.device)
            return result

        setattr(owner, name, call)


# ---- workers


def say(answer: Mapping[str, Any]) -> None:
    """A worker's answer."""
    print(json.dumps(answer), flush=True)


class Worker:
    """``script --worker role arguments``, told by lines and answering in lines of JSON. Use it as a context
    manager, or ``close`` it: it ends when its standard input does."""

    def __init__(self, script: str, role: str, *arguments: object, python: str = sys.executable) -> None:
        words = [python, script, "--worker", role, *map(str, arguments)]
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables,
            start_new_session=True,
        )  # fmt: skip

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def answer(self) -> Figures:
        """The next answer; other lines are passed over. Ends the program if the worker has ended."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith('{"'):  # no dict that a library prints
                answer: Figures = json.loads(line)
                return answer
        raise SystemExit(f"a worker ended with {self.process.wait()}: {self.process.args!r}")

    def close(self) -> None:
        """End it: kindly if it ends within a bound."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.process.stdout.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


# ---- swarms


class Bench(Campaign):
    """A seed, peers and workers, each with a log, and a journal below the folder of its name."""

    workers: ExitStack

    def ask(self, script: str, role: str, *arguments: object) -> Worker:
        """A worker of this swarm that answers; it ends before the swarm."""
        return self.workers.enter_context(Worker(script, role, *arguments))

    def work(self, name: str, script: str, role: str, *arguments: object, **variables: str) -> Child:
        """A worker of this swarm, which reads nothing and prints into its log."""
        words = [sys.executable, script, "--worker", role, *map(str, arguments)]
        return self.start(name, words, variables)

    def said(self, child: Child, begin: str = '{"') -> list[Figures]:
        """The lines of JSON that a worker has printed so far and that begin so."""
        lines = child.log.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.startswith(begin) and line.endswith("\n")]

    def first_answer(self, child: Child) -> Figures:
        self.wait_until(f"an answer of {child.name}", lambda: bool(self.said(child)))
        return self.said(child)[0]

    def tokens_per_s(self, name: str, since: float, until: float) -> float:
        """Of a peer, between two moments: each lies between two of its reports."""
        progress = self.events(name, Progress)

        def tokens(at: float) -> float:
            after = next((event for event in progress if event.at >= at), progress[-1])
            before = next((event for event in reversed(progress) if event.at < at), progress[0])
            share = min(1.0, (at - before.at) / (after.at - before.at)) if after.at > before.at else 1.0
            return before.tokens + share * (after.tokens - before.tokens)

        return (tokens(until) - tokens(since)) / (until - since)

    def all_events(self, name: str) -> list[Any]:
        """Each event of a peer so far."""
        path = self.folder / name / "events.jsonl"
        return list(Tail(path).new_events()) if path.exists() else []


@contextmanager
def bench(
    run: RunConfig | None = None, kept: Path | None = None, name: str = "run", grace_s: float = 6.5
) -> Iterator[Bench]:
    """A swarm in a new folder, ended with the block; with a seed, if there is a ``run``."""
    with folder_of(kept, name) as folder, Bench(folder, grace_s=grace_s) as made, ExitStack() as made.workers:
        if run is not None:
            made.start_seed(run)
        yield made


@contextmanager
def joined(
    ticket: str, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer,
    hear: Callable[[Event], None] | None = None, schedule: Any = None, **config: Any,
) -> Iterator[Peer]:  # fmt: skip
    """A peer in this worker, with its journal, ended by SIGINT. ``config``: fields of ``PeerConfig``."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"folder": folder, "board": False, "checkpoint_every_s": 1e6} | config
    with Journal(folder / "events.jsonl") as journal:

        def on_event(event: Event) -> None:
            journal.write(event)
            if hear is not None:
                hear(event)

        peer = connect(ticket, PeerConfig(**settings), on_event).start(model, optimizer, schedule)
        signal.signal(signal.SIGINT, lambda *_: peer.stop())
        with peer:
            yield peer
