"""The swarm of a rehearsal: where each process runs, started, looked after, and ended.

Laws: peers start only when the emulated lines carry packets; the processes end before the namespaces under
them go. The lines' counters are read ten times a second on a thread of their own, so that an exchange of a
second can be held against its line.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from bootstrap import netns
from bootstrap.demo import merge_journals
from bootstrap.internet import EMULATION, Internet
from bootstrap.lines import Line
from bootstrap.local_swarm import Child, LocalSwarm, environment, require_all_alive
from p2p_co2.config import RunConfig
from p2p_co2.errors import EnvironmentFault
from p2p_co2.planning.profiles import PROFILES
from p2p_co2.system.process import program
from p2p_co2.telemetry.events import Event, PeerFinished, Progress
from p2p_co2.telemetry.journal import Tail

_LOOK_EVERY_S = 0.3
_SAMPLE_EVERY_S = 0.1
_MAX_SAMPLES = 200_000
"""Five and a half hours of traffic; of a longer rehearsal the end is kept."""
_SEED_READY_S = 90.0
_START_UP_S = 120.0
_LEAVE_S = 60.0
_SEED, _SEED_PORT = "seed", 31337
_SEED_PROFILE = PROFILES["fibre"]
_WITH_US = ["--parent", str(os.getpid())]

Traffic = tuple[float, dict[str, tuple[int, int]]]
"""(unix time, bytes (up, down) by peer)."""


class RehearsalSwarm:
    """``prepare``, ``run``, ``collect``, in this order."""

    def __init__(self, config: RunConfig, folder: Path, carrier: str) -> None:
        self.config, self.folder = config, folder
        self.deaths: dict[str, str] = {}
        self.traffic: deque[Traffic] = deque(maxlen=_MAX_SAMPLES)
        self.forwarded: dict[str, float] = {}
        self._carrier = carrier
        self._recipe = config.recipe if ":" in config.recipe else ""
        """Where the run's own recipe lies here; "" for a built-in one."""
        self._lines: list[Line] = []
        self._internet: Internet | None = None
        self._peers: dict[str, Child] = {}
        self._tails: dict[str, Tail] = {}
        self._finished: set[str] = set()
        self._training = False

    # ---- lines

    def prepare(
        self, stack: ExitStack, lines: Sequence[Line], congestion: str, in_carrier: bool
    ) -> tuple[str, list[Line]]:
        """Emulate the lines until ``stack`` is left; returns which emulation is in use, in words, and the
        lines with what was measured on them."""
        kernel = netns.examine()
        self._lines = list(lines)
        problem = "it was asked for" if in_carrier else kernel.problem
        if problem:
            words = (
                f"carriers slowed down on loopback: no real packets, no routers to get through ({problem})"
            )
            self._lines = [
                replace(line, profile=replace(line.profile, nat="open"))  # nothing stands before a peer
                for line in lines
            ]
            return words, self._lines
        internet = stack.enter_context(Internet(kernel, self.folder, self.config.seed, congestion))
        self._build(internet)
        self._internet = internet
        return EMULATION, self._lines

    def _build(self, internet: Internet) -> None:
        internet.add(_SEED, _SEED_PROFILE)
        for line in self._lines:
            internet.add(line.peer, line.profile)
        internet.start()
        self._lines = [
            replace(
                line,
                address=internet.machines[line.peer].public_address,
                round_trip_s=internet.round_trip_s(line.peer, _SEED),
            )
            for line in self._lines
        ]

    # ---- life

    def run(self, see: Callable[[Sequence[Event]], None]) -> None:
        """Start everybody, look on until the peers have ended, then end the rest."""
        ended = threading.Event()
        sampler = threading.Thread(target=self._sample, args=(ended,), name="line counters")
        with LocalSwarm(self.folder / "logs") as swarm:
            if self._internet is not None:
                sampler.start()
            try:
                self._run(swarm, see)
            finally:
                ended.set()
                if sampler.is_alive():
                    sampler.join()
        self._look(see)
        if self._internet is not None:
            self._internet.close()
            self.forwarded = self._internet.forwarded

    def _run(self, swarm: LocalSwarm, see: Callable[[Sequence[Event]], None]) -> None:
        seed = swarm.start(_SEED, self._seed_command(), environment())
        ticket = swarm.wait_for_line(seed, "ticket:", _SEED_READY_S)
        for line in self._lines:
            self._peers[line.peer] = swarm.start(line.peer, self._peer_command(line, ticket), environment())
            self._tails[line.peer] = Tail(self._folder_of(line.peer) / "events.jsonl")
        clock = self.config.clock
        length_s = clock.rounds * clock.round_s if clock.mode == "time" else float("inf")
        latest_at = time.monotonic() + _START_UP_S + length_s + _LEAVE_S
        asked_at: float | None = None
        while any(child.running() for child in self._peers.values()):
            time.sleep(_LOOK_EVERY_S)
            self._look(see)
            self._report_deaths(swarm)
            if not (self._training or self._finished):
                require_all_alive(self._peers.values())
            if asked_at is None and time.monotonic() > latest_at:
                asked_at = time.monotonic()
                for child in self._peers.values():
                    swarm.interrupt(child)
            elif asked_at is not None and time.monotonic() > asked_at + _LEAVE_S:
                break
        self._report_deaths(swarm)

    def _seed_command(self) -> list[str]:
        run_file, folder = str(self.folder / "run.toml"), str(self.folder / _SEED)
        arguments = ["seed", run_file, "--folder", folder, *_WITH_US]
        if self._internet is None:
            return program("bootstrap", *arguments, "--host", "127.0.0.1")
        machine = self._internet.machines[_SEED]
        place = ["--host", machine.address, "--announce-host", machine.address, "--port", str(_SEED_PORT)]
        return machine.command(program("bootstrap", *arguments, *place))

    def _peer_command(self, line: Line, ticket: str) -> list[str]:
        arguments = [
            ticket, "--folder", str(self._folder_of(line.peer)), "--name", line.peer, "--threads", "1",
            "--carrier", self._carrier, "--min-peers", str(len(self._lines)), *_WITH_US,
        ]  # fmt: skip
        if self._recipe:
            arguments += ["--recipe", self._recipe]
        if self._internet is None:
            profile = line.profile
            slow = (
                profile.up_bits_per_s, profile.down_bits_per_s, profile.latency_ms / 1e3,
                profile.jitter_ms / 1e3, profile.loss,
            )  # fmt: skip
            slow_line = ",".join(f"{figure:g}" for figure in slow)
            return program("peers", *arguments, "--host", "127.0.0.1", "--slow-line", slow_line)
        machine = self._internet.machines[line.peer]
        return machine.command(program("peers", *arguments))

    def _folder_of(self, peer: str) -> Path:
        return self.folder / "peers" / peer

    def _sample(self, ended: threading.Event) -> None:
        assert self._internet is not None
        while not ended.wait(_SAMPLE_EVERY_S):
            try:
                self.traffic.append((time.time(), self._internet.traffic_bytes()))
            except EnvironmentFault:
                return  # somebody took the namespaces away: the peers' end will tell

    def _look(self, see: Callable[[Sequence[Event]], None]) -> None:
        events: list[Event] = []
        for name, tail in self._tails.items():
            for event in tail.new_events():
                if isinstance(event, PeerFinished):
                    self._finished.add(name)
                self._training |= isinstance(event, Progress) and event.inner_steps > 0
                events.append(event)
        see(events)

    def _report_deaths(self, swarm: LocalSwarm) -> None:
        for child in swarm.dead_unasked():
            if child.name not in self.deaths:
                self.deaths[child.name] = (
                    f"{child.name} ended unexpectedly with status {child.exit_status()}; "
                    f"its last lines ({child.log}):\n{child.last_lines()}"
                )

    # ---- what is left

    def collect(self) -> float | None:
        """Put the journals together, copy a checkpoint, and measure the agreed parameters' held-out loss
        (None if no peer finished, or the recipe has none)."""
        from p2p_co2.trained import Trained

        merge_journals([tail.path for tail in self._tails.values()], self.folder / "events.jsonl")
        for name in sorted(self._finished):
            source = self._folder_of(name) / "checkpoint"
            if source.is_dir():
                shutil.copytree(source, self.folder / "checkpoint")
                trained = Trained.load(
                    self.folder / "checkpoint", self._recipe if ":" in self._recipe else ""
                )
                return trained.held_out_loss() if trained.recipe.held_out is not None else None
        return None
