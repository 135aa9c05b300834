"""Swarms that are hurt on purpose: the console script's programs as processes, killed, stopped, restarted,
and what their journals say about it. Used by ``test_faults`` and by the benchmarks of faults."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from bootstrap.local_swarm import Child, LocalSwarm
from p2p_co2.config import ClockConfig, RunConfig, write_toml
from p2p_co2.recipes import recipe_digest
from p2p_co2.system.governor import Wish, WishFile
from p2p_co2.system.process import processes_below
from p2p_co2.telemetry.events import Event, PeerFinished, Progress, RoundAborted, RoundCommitted
from p2p_co2.telemetry.journal import Tail
from p2p_co2.ticket import Ticket

ROOT = Path(__file__).resolve().parent.parent
RECIPE = f"{ROOT / 'tests' / 'paced_recipe.py'}:make"
START_S = 150.0
"""Bound on a process's start: importing torch, several processes at a time, on few cores."""
_E = TypeVar("_E", bound=Event)


def paced_run(
    round_s: float, fragments: int = 2, step_s: float = 0.1, rounds: int = 0, width: int = 32
) -> RunConfig:
    """A run whose peers rest ``step_s`` in every step; two layers of ``width``."""
    options: dict[str, str | int | float | bool] = {"step_s": step_s, "width": width}
    return RunConfig(
        name="faults",
        recipe=RECIPE,
        recipe_options=options,
        recipe_digest=recipe_digest(RECIPE, options),
        fragments=fragments,
        clock=ClockConfig(mode="time", round_s=round_s, rounds=rounds),
    )


def console(*arguments: str) -> list[str]:
    """The command line of ``p2p-co2``, as it was installed beside this interpreter."""
    return [str(Path(sys.executable).parent / "p2p-co2"), *arguments]


@dataclass
class Campaign(LocalSwarm):
    """A seed, peers, and what was done to them. Every peer has a folder and a journal under its name."""

    ticket: str = ""
    _read: dict[str, tuple[Tail, list[Event]]] = field(default_factory=dict)
    """What was read of each peer's journal so far."""

    def start_seed(self, run: RunConfig, name: str = "seed") -> Child:
        """Start a seed of ``run``, or start it again with the same folder and port; sets ``ticket`` the first
        time."""
        port = Ticket.parse(self.ticket).seeds[0].split("/")[4] if self.ticket else "0"
        run_file = self.folder / "run.toml"
        run_file.write_text(write_toml(run))
        folder = ["--folder", str(self.folder / name), "--host", "127.0.0.1"]
        (self.folder / f"{name}.log").unlink(missing_ok=True)
        seed = self.start(name, console("seed", str(run_file), *folder, "--port", port))
        ticket = self.wait_for_line(seed, "ticket:", START_S)
        self.ticket = self.ticket or ticket
        return seed

    def join(
        self, name: str, *options: str, recipe: str = RECIPE, variables: Mapping[str, str] | None = None
    ) -> Child:
        """Start a peer. ``recipe``: "" for the built-in one."""
        place = ["--folder", str(self.folder / name), "--name", name, "--threads", "1"]
        place += ["--recipe", recipe] if recipe else []
        command = console("join", self.ticket, *place, *options)
        return self.start(name, command, variables)

    def stop(self, child: Child, back: bool = False) -> None:
        """Freeze a process and all below it (SIGSTOP), or wake them (``back``)."""
        for pid in (child.pid, *processes_below(child.pid)):
            os.kill(pid, signal.SIGCONT if back else signal.SIGSTOP)

    def wish(self, child: Child, wish: Wish) -> None:
        """What ``p2p-co2 pause`` and ``resume`` do."""
        WishFile(self.folder / child.name).write(wish)

    def wait_for_coordinator(self, children: Sequence[Child], bound_s: float) -> Child | None:
        """The first of ``children`` that writes that it began a round, at that moment: it is in the middle of
        it. None if nobody did."""
        journals = [(child, self.folder / child.name / "events.jsonl") for child in children]
        opened = [(child, path.open("rb")) for child, path in journals if path.exists()]
        try:
            for _, file in opened:
                file.seek(0, os.SEEK_END)
            ends_at = time.monotonic() + bound_s
            while time.monotonic() < ends_at:
                for child, file in opened:
                    if b'"round_began"' in file.read():
                        return child
                time.sleep(0.002)
            return None
        finally:
            for _, file in opened:
                file.close()

    # ---- what they say

    def events(self, name: str, kind: type[_E], since: float = 0.0) -> list[_E]:
        if name not in self._read:
            self._read[name] = (Tail(self.folder / name / "events.jsonl"), [])
        tail, known = self._read[name]
        known += tail.new_events()
        return [event for event in known if isinstance(event, kind) and event.at >= since]

    def reports(self, name: str, since: float, until: float) -> list[Progress]:
        """Of a peer that trained, in a time."""
        return [
            event
            for event in self.events(name, Progress, since)
            if event.at <= until and event.phase == "training" and event.wall_s > 0
        ]

    def wait_until(self, what: str, happened: Callable[[], bool], timeout_s: float = START_S) -> float:
        """Wait until ``happened``; fails when a process died that nobody asked to end. Returns the time."""
        ends_at = time.monotonic() + timeout_s
        while not happened():
            dead = self.dead_unasked()
            assert not dead, "\n".join(f"{child.name}:\n{child.last_lines(30)}" for child in dead)
            assert time.monotonic() < ends_at, f"{what}: not after {timeout_s} s\n{self.tails()}"
            time.sleep(0.1)
        return time.time()

    def tails(self) -> str:
        return "\n".join(f"{child.name}:\n{child.last_lines()}" for child in self.children if child.running())

    def commits(self, name: str, since: float = 0.0) -> int:
        return len(self.events(name, RoundCommitted, since))

    def aborts(self, name: str, since: float = 0.0) -> list[RoundAborted]:
        return self.events(name, RoundAborted, since)

    def wait_for(self, name: str, kind: type[_E], since: float = 0.0) -> _E:
        """The first event of a kind that a peer writes after ``since``."""
        self.wait_until(f"{kind.__name__} of {name}", lambda: bool(self.events(name, kind, since)))
        return self.events(name, kind, since)[0]

    def wait_for_commits(self, *names: str, count: int = 2, since: float = 0.0, group: int = 1) -> float:
        """Wait until each of these peers saw ``count`` rounds of at least ``group`` contributors."""

        def seen(name: str) -> int:
            return sum(e.contributors >= group for e in self.events(name, RoundCommitted, since))

        return self.wait_until(
            f"{count} commits of {group} at {', '.join(names)}",
            lambda: all(seen(name) >= count for name in names),
        )

    def leave_together(self, *children: Child, bound_s: float = 60.0) -> list[PeerFinished]:
        """Interrupt all at once and wait; how each finished."""
        for child in children:
            self.interrupt(child)
        assert self.wait(children, bound_s), self.tails()
        assert [child.exit_status() for child in children] == [0] * len(children), [
            child.last_lines(30) for child in children
        ]
        return [self.events(child.name, PeerFinished)[-1] for child in children]


def choose(random_: random.Random, children: list[Child]) -> Child:
    """A random one of those that run."""
    return random_.choice([child for child in children if child.running()])
